"""Notebooks as plain JSON: find lessons, read and write them, hash them, list their exercises.

No nbformat here, so that `course list` answers at once.
"""

import hashlib
import json
import os
from pathlib import Path

from course_lib import files

# COURSE_ROOT names another checkout; tests point it at a small course of their own.
ROOT = Path(os.environ.get("COURSE_ROOT") or Path(__file__).resolve().parent.parent.parent)
NBS, LESSONS, WORK = ROOT / "nbs", ROOT / "lessons", ROOT / "work"


class CourseError(Exception):
    "Bad input: one sentence for the user. The command prints it and exits with a non-zero status."


def load(path):
    "The notebook at `path` as a dict. Raises CourseError where it can't be read as a notebook."
    try:
        nb = json.loads(Path(path).read_text(encoding="utf-8"))
        cells = nb["cells"]
        if not (
            isinstance(cells, list)
            and all(isinstance(c["cell_type"], str) and _is_text(c["source"]) for c in cells)
        ):
            raise ValueError
        for part in (nb, *cells):  # hand-edited files may lack it, and readers rely on it
            if not isinstance(part.get("metadata"), dict):
                part["metadata"] = {}
    except OSError as e:
        raise CourseError(f"{path} can't be read: {e.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        if Path(path).parent in (NBS, LESSONS):
            cure = "take it from git again"
        else:
            cure = f"`course reset {Path(path).name[:2]}` gives a fresh copy and keeps this one aside"
        raise CourseError(f"{path} is not a notebook (damaged JSON, or no cells): {cure}") from None
    return nb


def _is_text(source):
    return isinstance(source, str) or (
        isinstance(source, list) and all(isinstance(line, str) for line in source)
    )


def dump(nb):
    "A notebook as text: sorted keys, one-space indent, a newline at the end, as nbformat writes it."
    return json.dumps(nb, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def save(nb, path):
    "Write a notebook so that a reader sees the old one or the new one whole."
    write(dump(nb), path)


def write(text, path):
    """Write a text file so that a reader, or a full disk, leaves the old one or the new one whole.

    Raises CourseError where the folder is read-only or the disk is full.
    """
    try:
        with files.replacing(path) as tmp:
            tmp.write_text(text, encoding="utf-8", newline="\n")
    except OSError as e:
        raise CourseError(f"{path} can't be written ({e.strerror}); nothing was lost") from None


def source(cell):
    "A cell's source as one string."
    s = cell["source"]
    return s if isinstance(s, str) else "".join(s)


def tags(cell):
    "A cell's tags, as a set."
    found = cell.get("metadata", {}).get("tags", [])
    return {t for t in found if isinstance(t, str)} if isinstance(found, list) else set()


def _digest(rows):
    return hashlib.sha256(json.dumps(rows, ensure_ascii=False).encode()).hexdigest()[:16]


def lesson_hash(nb):
    "The version of a lesson: its cells' ids, types, tags, exercises and sources."
    return _digest(
        [
            [c.get("id"), c["cell_type"], sorted(tags(c)), c["metadata"].get("exercise"), source(c)]
            for c in nb["cells"]
        ]
    )


def code_hash(nb):
    "What recorded outputs depend on: the code cells' ids, tags and sources, in order."
    return _digest(
        [[c.get("id"), sorted(tags(c)), source(c)] for c in nb["cells"] if c["cell_type"] == "code"]
    )


def exercises(nb):
    "A notebook's exercises in order: dicts of `id title minutes difficulty`, and `cell`: the check's id."
    return [{**c["metadata"]["exercise"], "cell": c["id"]} for c in nb["cells"] if "check" in tags(c)]


def progress(work):
    """What the learner has passed, from `work`/.progress.json: {"05.1": {"passed": date, "version": hash}}.

    Absent or damaged, it is empty: progress is a comfort, and never a reason to stop.
    """
    try:
        found = json.loads((Path(work) / ".progress.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return {k: v for k, v in found.items() if isinstance(v, dict)} if isinstance(found, dict) else {}


def lessons():
    "The lessons that exist, by number: {'05': path in lessons/}."
    return {p.name[:2]: p for p in sorted(LESSONS.glob("[0-9][0-9]_*.ipynb"))}


def resolve(word):
    """The number of the lesson that `word` means: "5", "05", "roofline", "05_roofline", or a path to it.

    Raises CourseError that lists the lessons.
    """
    known = lessons()
    stem = Path(str(word)).stem
    for number, path in known.items():
        if stem in (number, number.lstrip("0"), path.stem, path.stem[3:]):
            return number
    listed = ", ".join(f"{p.stem[:2]} {p.stem[3:]}" for p in known.values()) or "none yet"
    raise CourseError(f"there is no lesson {word!r}; the lessons are: {listed}")
