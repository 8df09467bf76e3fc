"Notebooks as plain JSON, without nbformat, so that `course list` answers at once."

import hashlib
import json
import os
import re
from pathlib import Path

from course_lib import files

# COURSE_ROOT names another checkout; tests point it at a small course of their own.
ROOT = Path(os.environ.get("COURSE_ROOT") or Path(__file__).resolve().parent.parent.parent)
NBS, LESSONS, WORK = ROOT / "nbs", ROOT / "lessons", ROOT / "work"
AGAIN = "`course reset {}` gives a fresh copy and keeps yours under its date"


class CourseError(Exception):
    "Bad input: one sentence for the user. The command prints it and exits with a non-zero status."


def load(path):
    "The notebook at `path` as a dict. Raises CourseError where it can't be read as a notebook."
    try:
        nb = json.loads(Path(path).read_text(encoding="utf-8"))
        for part in (nb, *nb["cells"]):  # hand-edited files may lack it, and readers rely on it
            if not isinstance(part.get("metadata"), dict):
                part["metadata"] = {}
        if not all(isinstance(c["cell_type"], str) and isinstance(source(c), str) for c in nb["cells"]):
            raise ValueError
    except OSError as e:
        raise CourseError(f"{path} can't be read: {e.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        ours = Path(path).parent in (NBS, LESSONS)
        cure = "take it from git again" if ours else AGAIN.format(Path(path).stem[3:])
        raise CourseError(f"{path} is not a notebook (damaged JSON, or no cells): {cure}") from None
    return nb


def dump(nb):
    "JSON data as text: sorted keys, one-space indent, a newline at the end, as nbformat writes it."
    return json.dumps(nb, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def save(data, path):
    """Write JSON data, or a text, so that a full disk leaves the old file whole.

    Raises CourseError where the folder is read-only or the disk is full.
    """
    try:
        with files.replacing(path) as tmp:
            tmp.write_bytes((data if isinstance(data, str) else dump(data)).encode())
    except OSError as e:
        raise CourseError(f"{path} can't be written ({e.strerror}); nothing was lost") from None


def source(cell):
    "A cell's source as one string."
    return "".join(cell["source"])


def python(cell):
    "A cell's Python: its source without the lines of magics, `%%gpu …` among them."
    return re.sub(r"^[%!].*\n?", "", source(cell), flags=re.MULTILINE)


def needs_gpu(cell):
    "Whether a cell begins with `%%gpu`."
    return cell["cell_type"] == "code" and re.match(r"%%gpu\b", source(cell)) is not None


def tags(cell):
    "A cell's tags, as a set."
    found = cell.get("metadata", {}).get("tags", [])
    return {t for t in found if isinstance(t, str)} if isinstance(found, list) else set()


def digest(data):
    "A short hash of JSON data."
    return hashlib.sha256(json.dumps(data, ensure_ascii=False).encode()).hexdigest()[:16]


def lesson_hash(nb):
    "The version of a lesson: its cells' ids, types, tags, exercises and sources."
    rows = []
    for c in nb["cells"]:
        rows.append([c.get("id"), c["cell_type"], sorted(tags(c)), c["metadata"].get("exercise"), source(c)])
    return digest(rows)


def version(nb):
    "The version of the lesson that a learner's notebook was made from, or None."
    course = nb["metadata"].get("course")
    return course.get("version") if isinstance(course, dict) else None


def is_marked(cell):
    "Whether a code cell's output is compared with the recorded one, by nbval."
    return re.search(r"^\s*#+\s*NBVAL_CHECK_OUTPUT\s*$", source(cell), re.MULTILINE) is not None


def stamp(nb):
    "What `course record` noted: `gpu torch date commit …`, `figures` and `cells`; empty where it never ran."
    found = nb["metadata"].get("recorded")
    return found if isinstance(found, dict) else {}


def is_draft(nb):
    "Whether a worked notebook has no recording from a GPU: it is in no list then, and has no figures."
    return "gpu" not in stamp(nb)


def exercises(nb):
    "A notebook's exercises in order: dicts of `id title minutes difficulty`, and `cell`: the check's id."
    return [{**c["metadata"]["exercise"], "cell": c["id"]} for c in nb["cells"] if "check" in tags(c)]


def lessons(folder=None):
    "The lessons in a folder, lessons/ unless another is given, by number: {'06': path}."
    return {p.name[:2]: p for p in sorted((folder or LESSONS).glob("[0-9][0-9]_*.ipynb"))}


def resolve(word, folder=None):
    """The number of the lesson that `word` means: "6", "06", "roofline", "06_roofline", or a path to it.

    Raises CourseError that lists the lessons.
    """
    known, stem = lessons(folder), Path(str(word)).stem
    for number, path in known.items():
        if stem in (number, number.lstrip("0"), path.stem[3:]) or stem[2:] == path.stem[2:]:
            return number
    listed = ", ".join(f"{p.stem[:2]} {p.stem[3:]}" for p in known.values()) or "none yet"
    raise CourseError(f"there is no lesson {word!r}; the lessons are: {listed}")
