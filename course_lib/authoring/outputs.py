"What may be stored as a cell's output: `clean` makes it so, `problems` says what is not."

import base64
import io
import platform
import re

from course_lib.authoring import notebook
from course_lib.authoring.run import is_marked

MAX_BYTES = 500_000
PNG = "image/png"
WIDGET = "application/vnd.jupyter.widget-view+json"
BAR = re.compile(r"\d+%\|.*\|")
# Folders that systems, containers and rented hosts keep people's and programs' files in.
ROOTS = "home|root|tmp|usr|opt|var|mnt|srv|private|Users|workspace|work|content|scratch|data|nix|venv|proc"
PATH = re.compile(
    rf"(?<![\w.:/~-])/(?:{ROOTS})/(?:[^\s'\"`:;,()<>\[\]{{}}|/]+/)*(?=[^\s'\"`:;,()<>\[\]{{}}|/]|)"
)
WINDOWS = re.compile(r"\b[A-Z]:\\+(?:[^\s'\"\\]+\\+)*")
CELL = re.compile(r"[^\s'\"]*ipykernel_\d+[/\\]+\d+\.py")
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]{8,}")
TEXT = ("text/", "image/svg")


def _host_names():
    "This machine's name, long and short; names that are ordinary words too are let be."
    names = {platform.node(), platform.node().split(".")[0]}
    return sorted(
        (n for n in names if len(n) > 3 and n.lower() not in ("localhost", "host")), key=len, reverse=True
    )


def scrub(text):
    "A text without what belongs to one machine: folders, host names, addresses of objects."
    text = CELL.sub("cell", text)
    text = WINDOWS.sub("", PATH.sub("", text))
    for name in _host_names():
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", "host", text)
    return ADDRESS.sub(" at 0x…", text)


def clean(outputs):
    "Outputs as they are stored: no widgets, no progress bars, nothing of the machine; text in lines."
    kept = []
    for out in outputs:
        out = {k: v for k, v in out.items() if k != "transient"}
        if out["output_type"] == "stream":
            lines = [line for line in out["text"].splitlines(keepends=True) if not BAR.search(line)]
            out["text"] = scrub("".join(lines)).splitlines(keepends=True)
            if "".join(out["text"]).strip():
                kept.append(out)
            continue
        data = dict(out.get("data", {}))
        html = data.get("text/html", "")
        if (
            WIDGET in data
            or "<progress" in html
            or ("<style" in html and "progress" in html and "<table" not in html)
        ):
            continue
        for mime, value in data.items():
            if mime.startswith(TEXT) and isinstance(value, str):
                data[mime] = scrub(value).splitlines(keepends=True)
        if isinstance(data.get(PNG), str):
            data[PNG] = _with_fewer_colours(data[PNG])
        kept.append({**out, "data": data})
    return kept


def _with_fewer_colours(png):
    "A PNG (base64) in 128 colours, a third of the size; as it was where that would show, as in a photograph."
    from PIL import Image, ImageChops, ImageStat

    try:
        image = Image.open(io.BytesIO(base64.b64decode(png)))
        whole = image.convert("RGB")
    except (OSError, ValueError):  # not an image that Pillow reads
        return png
    if image.mode == "P":
        return png
    few = whole.quantize(128, dither=Image.Dither.NONE)
    off = ImageStat.Stat(ImageChops.difference(whole, few.convert("RGB"))).mean
    packed = io.BytesIO()
    few.save(packed, "PNG", optimize=True)
    smaller = base64.b64encode(packed.getvalue()).decode()
    return smaller if max(off) < 1 and len(smaller) < len(png) else png


def _texts(outputs):
    "Every text in a cell's outputs that a reader sees."
    for out in outputs:
        if out["output_type"] == "stream":
            yield "".join(out["text"])
        for mime, value in out.get("data", {}).items():
            if mime.startswith(TEXT):
                yield "".join(value)


def problems(nb):
    "What is wrong with the stored outputs of a worked notebook, as sentences."
    found = []
    stamp = nb["metadata"].get("recorded")
    if not isinstance(stamp, dict):
        return ["it has not been recorded: run `course record` on a GPU host"]
    if stamp.get("source") != notebook.code_hash(nb):
        found.append("its code has changed since it was recorded: run `course record`")
    if missing := {"commit", "clean", "gpu", "torch", "triton", "python", "date", "figures"} - set(stamp):
        found.append(f"its stamp lacks {', '.join(sorted(missing))}")
    if "widgets" in nb["metadata"]:
        found.append("it stores the state of widgets")
    if (size := len(notebook.dump(nb).encode())) >= MAX_BYTES:
        found.append(f"it has {size:,} bytes; expected less than {MAX_BYTES:,}")
    counts = []
    for cell in nb["cells"]:
        if cell["cell_type"] == "code":
            counts += [cell["execution_count"]] if cell.get("execution_count") is not None else []
            found += [f"cell `{cell['id']}` {what}" for what in _cell_problems(cell)]
    if counts != list(range(1, len(counts) + 1)):
        found.append(f"its execution counts are {counts}; expected 1 to {len(counts)} in order")
    return found


def _cell_problems(cell):
    outputs, count = cell.get("outputs", []), cell.get("execution_count")
    if count is None and "gpu" not in notebook.tags(cell) and notebook.source(cell).strip():
        yield "was never executed"
    if is_marked(cell) and count is not None and not outputs:
        yield "is compared and has no output"
    if "execution" in cell["metadata"]:
        yield "stores times of execution"
    if any(out["output_type"] == "error" for out in outputs):
        yield "stores an error"
    if any(WIDGET in out.get("data", {}) for out in outputs):
        yield "stores a widget"
    streams = [out["name"] for out in outputs if out["output_type"] == "stream"]
    if len(streams) != len(set(streams)):
        yield "stores a stream in pieces"
    for text in _texts(outputs):
        if BAR.search(text) or "<progress" in text or "\r" in text:
            yield "stores a progress bar"
        if m := PATH.search(text) or WINDOWS.search(text):
            yield f"shows a path of one machine, {m[0]}"
        if name := next(
            (n for n in _host_names() if re.search(rf"(?<![\w-]){re.escape(n)}(?![\w-])", text)), None
        ):
            yield f"shows a host name, {name}"
