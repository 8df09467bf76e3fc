"`course run`: execute worked lessons here and show this machine's figures beside the recorded ones."

import json
import re
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from course_lib import recorded
from course_lib.authoring import kernel, notebook
from course_lib.authoring.check import check_cmd
from course_lib.authoring.notebook import CourseError

__all__ = ["check_cmd", "execute", "run_cmd"]

MARKED = re.compile(r"^\s*#+\s*NBVAL_CHECK_OUTPUT\s*$", re.MULTILINE)


@dataclass
class Execution:
    """What came of a worked lesson.

    `ran`: cell id to kernel.Ran, in order; `skipped`: ids of gpu cells; `failed`: (cell, error) or None;
    `figures`: name to {value, unit}, as noted; `asked`: what the code given as `ask` printed.
    """

    ran: dict = field(default_factory=dict)
    skipped: list = field(default_factory=list)
    failed: tuple | None = None
    figures: dict = field(default_factory=dict)
    asked: str = ""


def execute(nb, name, timeout=None, ask=None, env=None):
    """Execute the code cells of the worked notebook `nb` (a dict) in order, until one fails.

    The kernel's folder is a temporary one, so that nothing a cell writes lands in the repository. Cells
    tagged gpu are left out without a CUDA device. `name` is for the progress shown; `ask` is code to run at
    the end, its print kept; `env` adds environment variables. Returns an Execution.
    """
    cells = [c for c in nb["cells"] if c["cell_type"] == "code" and notebook.source(c).strip()]
    cells = [{**c, "source": notebook.source(c), "outputs": [], "execution_count": None} for c in cells]
    cpu_only = any("gpu" in notebook.tags(c) for c in cells) and not kernel.has_cuda()
    result = Execution()
    with tempfile.TemporaryDirectory(prefix="course-run-", ignore_cleanup_errors=True) as scratch:
        notes = Path(scratch) / "figures.jsonl"
        folder = Path(scratch) / "nbs"
        folder.mkdir()
        env = {"COURSE_FIGURES": str(notes), **(env or {})}
        bar = tqdm(total=len(cells), desc=name, unit="cell", leave=False, disable=not sys.stderr.isatty())
        with bar, kernel.Session(cells, folder, timeout, env=env) as session:
            for i, cell in enumerate(cells):
                bar.set_postfix_str(cell["id"])
                if cpu_only and "gpu" in notebook.tags(cell):
                    result.skipped.append(cell["id"])
                else:
                    ran = result.ran[cell["id"]] = session.execute(i)
                    if bar.disable:
                        print(f"{name}  {i + 1}/{len(cells)}  {cell['id']}  {ran.seconds:.1f} s", flush=True)
                    if ran.error:
                        result.failed = cell, ran.error
                        break
                bar.update()
            if ask and not result.failed:
                result.asked = session.ask(ask)
        if notes.exists():
            for line in notes.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                result.figures[row.pop("name")] = row
    return result


def is_marked(cell):
    "Whether a code cell's output is compared with the recorded one."
    return MARKED.search(notebook.source(cell)) is not None


def _compared(outputs):
    "What nbval compares of a cell's outputs, in lines; not stderr: a warning with a time in it says nothing."
    lines = []
    for out in outputs:
        if out["output_type"] == "stream" and out["name"] == "stdout":
            lines += "".join(out["text"]).splitlines()
        elif "text/plain" in out.get("data", {}):
            lines += "".join(out["data"]["text/plain"]).splitlines()
    return lines


def difference(cell, ran):
    "How a marked cell's output now differs from the recorded one, in one line, or ''."
    if not is_marked(cell) or cell.get("execution_count") is None:
        return ""
    before, after = _compared(cell["outputs"]), _compared(ran.outputs)
    for a, b in zip(before, after, strict=False):
        if a != b:
            return f"recorded {a[:100]!r}, now {b[:100]!r}"
    if len(before) != len(after):
        return f"recorded {len(before)} lines of output, now {len(after)}"
    return ""


def at(nb, cell):
    "Where a cell is, in words: its id, and the exercise that it belongs to."
    cells = nb["cells"]
    i = next(i for i, c in enumerate(cells) if c.get("id") == cell["id"])
    if notebook.tags(cells[i]) & {"exercise", "check"}:
        after = next((c for c in cells[i:] if "check" in notebook.tags(c)), None)
        if after is not None:
            return f"cell `{cell['id']}` (exercise {after['metadata']['exercise']['id']})"
    return f"cell `{cell['id']}`"


def worked(words, everything=False):
    "The worked notebooks that `words` name: {number: path}. Raises CourseError."
    # Not notebook.resolve: an author runs a lesson before it is built.
    known = {p.name[:2]: p for p in sorted(notebook.NBS.glob("[0-9][0-9]_*.ipynb"))}
    if everything:
        return known
    chosen = {}
    for word in words:
        stem = Path(str(word)).stem
        for number, path in known.items():
            if stem in (number, number.lstrip("0"), path.stem, path.stem[3:]):
                chosen[number] = path
                break
        else:
            listed = ", ".join(f"{n} {p.stem[3:]}" for n, p in known.items()) or "none yet"
            raise CourseError(f"there is no worked lesson {word!r}; there are: {listed}")
    return chosen


def run_cmd(args):
    "Execute worked lessons; writes nothing into the repository. Returns 1 if a cell failed or differs."
    chosen = worked(args.lessons, args.all)
    if not chosen:
        raise CourseError(
            "there are no worked lessons in nbs/ yet" if args.all else "name a lesson, or use --all"
        )
    problems = []
    for number, path in chosen.items():
        nb = notebook.load(path)
        result = execute(nb, path.stem, getattr(args, "timeout", None))
        by_id = {c["id"]: c for c in nb["cells"]}
        for name, ran in result.ran.items():
            if not ran.error and (how := difference(by_id[name], ran)):
                problems.append(f"{path.stem}, {at(nb, by_id[name])}: the output differs: {how}")
        if result.failed:
            cell, error = result.failed
            problems.append(f"{path.stem}, {at(nb, cell)}: {error}")
        if result.skipped:
            print(f"{path.stem}: left out without a CUDA device: {', '.join(result.skipped)}")
        print(recorded.compare(number, result.figures))
        took = sum(r.seconds for r in result.ran.values())
        print(f"{path.stem}: {len(result.ran)} cells in {took:.0f} s\n", flush=True)
    for line in problems:
        print(line, file=sys.stderr)
    return 1 if problems else 0
