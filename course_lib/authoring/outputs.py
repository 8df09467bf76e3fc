"What may be stored as a cell's output: `clean` makes it so, `problems` says what is not."

import base64
import io
import os
import platform
import re
import sys
import tempfile
from pathlib import Path

from course_lib.authoring import notebook
from course_lib.authoring.run import is_marked

MAX_BYTES = 500_000
PNG = "image/png"
WIDGET = "application/vnd.jupyter.widget-view+json"
BAR = re.compile(r"\d+%\|.*\||<progress")
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]{8,}")
TEXT = ("text/", "image/svg")


def _of_this_machine():
    "(pattern of the folders above a file on this machine, pattern of its names)."
    folders = {Path.home(), Path.cwd(), notebook.ROOT, Path(tempfile.gettempdir())}
    folders |= {Path(sys.prefix), Path(sys.base_prefix), *(f.resolve() for f in folders)}
    above = "|".join(re.escape(str(f)) for f in sorted(folders, reverse=True) if f != f.parent)
    sep = re.escape(os.sep)
    names = {platform.node(), platform.node().split(".")[0]} - {"", "host", "localhost"}
    named = "|".join(re.escape(n) for n in sorted(names, reverse=True)) or r"(?!)"
    return (
        re.compile(rf"(?:{above}){sep}(?:[^\s'\":,()<>{sep}]+{sep})*"),
        re.compile(rf"(?<![\w-])(?:{named})(?![\w-])"),
    )


def scrub(text):
    "A text without what belongs to one machine: folders, host names, addresses of objects."
    folders, names = _of_this_machine()
    text = re.sub(r"ipykernel_\d+/\d+\.py", "cell", text)
    return ADDRESS.sub(" at 0x…", names.sub("host", folders.sub("", text)))


def clean(outputs):
    "Outputs as they are stored: no widgets, no progress bars, nothing of the machine; text in lines."
    kept = []
    for out in outputs:
        out = {k: v for k, v in out.items() if k != "transient"}
        if out["output_type"] == "stream":
            lines = [line for line in out["text"].splitlines(keepends=True) if not BAR.search(line)]
            out["text"] = scrub("".join(lines)).splitlines(keepends=True)
            kept += [out] if "".join(out["text"]).strip() else []
            continue
        data = dict(out.get("data", {}))
        html = data.get("text/html", "")
        bar = "<progress" in html or ("<style" in html and "progress" in html and "<table" not in html)
        if WIDGET in data or bar:
            continue
        for mime, value in data.items():
            if mime.startswith(TEXT) and isinstance(value, str):
                data[mime] = scrub(value).splitlines(keepends=True)
        if isinstance(data.get(PNG), str):
            data[PNG] = _with_fewer_colours(data[PNG])
        kept.append({**out, "data": data})
    return kept


def _with_fewer_colours(png):
    "A PNG (base64) in 128 colours, a third of the size."
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(base64.b64decode(png)))
        few = image if image.mode == "P" else image.convert("RGB").quantize(128, dither=Image.Dither.NONE)
    except (OSError, ValueError):  # not an image that Pillow reads
        return png
    packed = io.BytesIO()
    few.save(packed, "PNG", optimize=True)
    return min(png, base64.b64encode(packed.getvalue()).decode(), key=len)


def problems(nb):
    "What is wrong with the stored outputs of a worked notebook, as sentences."
    found = []
    if "widgets" in nb["metadata"]:
        found.append("it stores the state of widgets")
    if (size := len(notebook.dump(nb).encode())) >= MAX_BYTES:
        found.append(f"it has {size:,} bytes; expected less than {MAX_BYTES:,}")
    cells = [c for c in nb["cells"] if c["cell_type"] == "code" and notebook.source(c).strip()]
    if not notebook.is_draft(nb):
        counts = [c.get("execution_count") for c in cells]
        if counts != list(range(1, len(counts) + 1)):
            found.append(f"its execution counts are {counts}; expected 1 to {len(counts)} in order")
    return found + [f"cell `{c['id']}` {what}" for c in cells for what in _cell_problems(c)]


def _cell_problems(cell):
    outputs = cell.get("outputs", [])
    if is_marked(cell) and (not outputs or cell.get("execution_count") is None):
        yield "is compared and has no output: run `course record --cpu`"
    if "execution" in cell["metadata"]:
        yield "stores times of execution"
    streams = [out["name"] for out in outputs if out["output_type"] == "stream"]
    if len(streams) != len(set(streams)):
        yield "stores a stream in pieces"
    folders, names = _of_this_machine()
    for out in outputs:
        data = out.get("data", {})
        if out["output_type"] == "error":
            yield "stores an error"
        if WIDGET in data:
            yield "stores a widget"
        shown = [out["text"]] if "text" in out else [v for mime, v in data.items() if mime.startswith(TEXT)]
        for text in map("".join, shown):
            if BAR.search(text) or "\r" in text:
                yield "stores a progress bar"
            if m := folders.search(text) or names.search(text):
                yield f"shows what belongs to one machine, {m[0]}"
