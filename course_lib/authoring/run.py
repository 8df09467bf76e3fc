"`course run`: execute worked lessons here and show this machine's figures beside the recorded ones."

import json
import re
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from course_lib import recorded
from course_lib.authoring import kernel, notebook
from course_lib.authoring.notebook import CourseError

MARKED = re.compile(r"^\s*#+\s*NBVAL_CHECK_OUTPUT\s*$", re.MULTILINE)


@dataclass
class Execution:
    """What came of a worked lesson.

    `ran`: cell id to kernel.Ran, in order; `failed`: (cell, error) or None; `figures`: name to {value, unit}.
    """

    ran: dict = field(default_factory=dict)
    failed: tuple | None = None
    figures: dict = field(default_factory=dict)


def execute(nb, name, timeout=None, env=None):
    """Execute the code cells of the worked notebook `nb` (a dict) in order, until one fails.

    The kernel's folder is a temporary one, so that nothing a cell writes lands in the repository. `name` is
    for the lines that are printed; `env` adds variables.
    """
    cells = [c for c in nb["cells"] if c["cell_type"] == "code" and notebook.source(c).strip()]
    cells = [{**c, "source": notebook.source(c)} for c in cells]
    result = Execution()
    with tempfile.TemporaryDirectory(prefix="course-run-", ignore_cleanup_errors=True) as scratch:
        notes, folder = Path(scratch, "figures.jsonl"), Path(scratch, "nbs")
        folder.mkdir()
        env = {"COURSE_FIGURES": str(notes), **(env or {})}
        with kernel.Session(cells, folder, timeout, env=env) as session:
            for i, cell in enumerate(cells):
                ran = result.ran[cell["id"]] = session.execute(i)
                print(f"{name}  {i + 1}/{len(cells)}  {cell['id']}  {ran.seconds:.1f} s", flush=True)
                if ran.error:
                    result.failed = cell, ran.error
                    break
        if notes.exists():
            rows = [json.loads(line) for line in notes.read_text(encoding="utf-8").splitlines()]
            result.figures = {row.pop("name"): row for row in rows}
    return result


def is_marked(cell):
    "Whether a code cell's output is compared with the recorded one."
    return MARKED.search(notebook.source(cell)) is not None


def difference(cell, ran):
    "How a marked cell's output now differs from the recorded one, in one line, or ''."
    if not is_marked(cell) or cell.get("execution_count") is None:
        return ""
    before, after = _compared(cell["outputs"]), _compared(ran.outputs)
    for a, b in zip(before, after, strict=False):
        if a != b:
            return f"recorded {a[:100]!r}, now {b[:100]!r}"
    return "" if len(before) == len(after) else f"recorded {len(before)} lines of output, now {len(after)}"


def _compared(outputs):
    "What nbval compares, in lines; not stderr: a warning with a time in it says nothing."
    texts = [
        o["text"] if o.get("name") == "stdout" else o.get("data", {}).get("text/plain", "") for o in outputs
    ]
    return [line for text in texts for line in "".join(text).splitlines()]


def worked(words, everything=False):
    "The worked notebooks that `words` name: {number: path}. Raises CourseError."
    known = notebook.lessons(notebook.NBS)
    chosen = known if everything else [notebook.resolve(word, notebook.NBS) for word in words]
    return {number: known[number] for number in chosen}


def run_cmd(args):
    "Execute worked lessons; writes nothing into the repository. Returns 1 if a cell failed or differs."
    chosen = worked(args.lessons, args.all)
    if not chosen:
        raise CourseError("there are no lessons in nbs/ yet" if args.all else "name a lesson, or use --all")
    problems = []
    for path in chosen.values():
        nb = notebook.load(path)
        result = execute(nb, path.stem)
        for cell in nb["cells"]:
            ran = result.ran.get(cell.get("id"))
            if ran and (how := ran.error or difference(cell, ran)):
                what = "" if ran.error else "the output differs: "
                problems.append(f"{path.stem}, cell `{cell['id']}`: {what}{how}")
        print(recorded.compare(path.stem[3:], result.figures))
        took = sum(r.seconds for r in result.ran.values())
        print(f"{path.stem}: {len(result.ran)} cells in {took:.0f} s\n", flush=True)
    print(*problems, sep="\n", end="\n" * bool(problems), file=sys.stderr)
    return int(bool(problems))
