"What may be stored as a cell's output: `clean` makes it so, `problems` says what is not."

import base64
import io
import platform
import re

from course_lib.authoring import notebook

PNG = "image/png"
WIDGET = "application/vnd.jupyter.widget-view+json"
BAR = re.compile(r"\d+%\|.*\|")


def scrub(text):
    "A text without what belongs to one machine: folders, host names, addresses of objects."
    host = platform.node()
    names = "|".join(re.escape(n) for n in (host, host.split(".")[0]) if len(n) > 4 and n != "localhost")
    text = re.sub(r"ipykernel_\d+/\d+\.py", "cell", text)
    text = re.sub(r"(?<![\w~/:,.<-])/(?:[^\s'\":,()<>/]+/)+", "", text)
    text = re.sub(rf"(?<![\w-])(?:{names or '(?!)'})(?![\w-])", "host", text)
    return re.sub(r" at 0x[0-9a-fA-F]{8,}", " at 0x…", text)


def clean(outputs):
    "Outputs as they are stored: no widgets, no progress bars, nothing of the machine; text in lines."
    kept = []
    for out in outputs:
        if out["output_type"] == "stream":
            shown = re.sub(r"[^\n]*\r(?=[^\r\n])", "", "".join(out["text"]))  # as a terminal shows it
            lines = shown.splitlines(keepends=True)
            text = scrub("".join(line for line in lines if not BAR.search(line)))
            kept += [out | {"text": text.splitlines(keepends=True)}] if text.strip() else []
            continue
        data = dict(out.get("data", {}))
        html = "".join(data.get("text/html", ""))
        if WIDGET in data or "<progress" in html or ("<style" in html and "progress {" in html):
            continue
        for mime, value in data.items():
            if mime.startswith(("text/", "image/svg")):
                data[mime] = scrub("".join(value)).splitlines(keepends=True)
            elif mime == PNG:
                data[mime] = _with_fewer_colours(value)
        kept.append(out | {"data": data} if data else out)
    return kept


def _with_fewer_colours(png):
    "A PNG (base64) in 128 colours, a third of the size."
    from PIL import Image

    image = Image.open(io.BytesIO(base64.b64decode(png)))
    if image.mode == "P":
        return png
    packed = io.BytesIO()
    image.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(packed, "PNG", optimize=True)
    return base64.b64encode(packed.getvalue()).decode()


def problems(nb):
    "What is wrong with the stored outputs of a worked notebook, as sentences."
    found = []
    cells = [c for c in nb["cells"] if c["cell_type"] == "code" and notebook.source(c).strip()]
    counts = [c.get("execution_count") for c in cells]
    if not notebook.is_draft(nb) and counts != list(range(1, len(counts) + 1)):
        found.append(f"its execution counts are {counts}; expected 1 to {len(counts)} in order")
    for c in cells:
        outs = c.get("outputs", [])
        if notebook.is_marked(c) and not (outs and c.get("execution_count")):
            found.append(f"cell `{c['id']}` is compared and has no output: run `course record --cpu`")
        if clean(outs) != outs or any(out["output_type"] == "error" for out in outs):
            what = "an error, a widget, a progress bar, or a path or name of one machine"
            found.append(f"cell `{c['id']}` stores {what}, which `course record` leaves out")
    return found
