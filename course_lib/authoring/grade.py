"""`course grade`: judge the notebooks of a class, several side by side, each in a process of its own.

The engine is that of `course check`; what a notebook does to its process or kernel is a row of the table, and
the others go on. A process has a copy of the learner's files: nothing that was handed in is written to.
The code of learners runs with the rights of the caller: this isolates accidents, and is no sandbox.
"""

import concurrent.futures
import contextlib
import csv
import io
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

from course_lib import ram, show
from course_lib.authoring import check, kernel, lab, notebook, reached
from course_lib.authoring.notebook import CourseError

MEMORY = 2e9  # bytes for each notebook, where the number of jobs is ours to choose
LONGER = 5  # a cell that races on a GPU compiles and tunes: so many times a check's seconds


def grade_cmd(args):
    "Print a table, learner by exercise, for each lesson. Returns 1 where a notebook could not be judged."
    known = notebook.lessons()
    wanted = [known[notebook.resolve(word)] for word in args.lessons]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    jobs = args.jobs if args.jobs is not None else max(1, min(cores, int(ram.available() / MEMORY)))
    if jobs < 1 or not args.timeout > 0:
        raise CourseError("--jobs takes a number from 1 on, and --timeout seconds above 0")
    if args.csv and not args.csv.absolute().parent.is_dir():
        raise CourseError(f"{args.csv} can't be written: its folder is not there")
    gpus = reached.gpus() if args.figures else []
    tasks, remarks = handed_in(args.folder, wanted)
    print("".join(f"{line}\n" for line in remarks), end="", file=sys.stderr)
    lessons = {task["topic"]: notebook.load(task["lesson"]) for task in tasks}

    def run(chosen, places, **what):
        env = {"OMP_NUM_THREADS": str(max(1, cores // len(places)))}
        for task in chosen:
            task |= {"jobs": len(places), "timeout": args.timeout, **what}
        _all(chosen, [env | place for place in places])

    run(tasks, [{}] * jobs)
    if args.figures:  # one learner on each GPU, or on all of them where the lesson is about several
        wide = {topic for topic, nb in lessons.items() if nb["metadata"]["course"].get("gpus") == "all"}
        for alone, places in ((True, gpus), (False, [",".join(gpus)])):
            chosen = [t for t in tasks if "verdicts" in t and alone == (t["topic"] not in wide)]
            places = [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in places]
            run(chosen, places, timeout=LONGER * args.timeout, figures={})
    if args.csv:
        notebook.save(_csv(lessons, tasks), args.csv)
    for topic, lesson in lessons.items():
        mine = [task for task in tasks if task["topic"] == topic]
        print(f"\n{topic}: {lesson['metadata']['course']['title']}\n{_table(lesson, mine)}")
        if args.figures and (text := reached.table(topic, mine)):
            print(f"\n{text}")
    return int(any("verdicts" not in task for task in tasks))


def handed_in(folder, wanted):
    """(dicts of `learner topic lesson mine trouble`, one a notebook in `folder`; sentences on the others).

    They are of the lessons `wanted` (paths in lessons/), or of all. `trouble` says why one can't be read.
    """
    if not folder.is_dir():
        raise CourseError(f"{folder} is no folder: name one of notebooks, or of the learners' folders")
    topics = {p.stem[3:]: p for p in notebook.lessons().values()}
    paths = sorted([*folder.glob("*.ipynb"), *folder.glob("*/*.ipynb")])
    hidden = [p for p in paths if any(part.startswith(".") for part in p.relative_to(folder).parts)]
    read = {p: _topic(p, topics) for p in paths if p.is_file() and p not in hidden}
    several, remarks = {}, []
    only = {p.stem[3:] for p in wanted} or {topic for topic, _ in read.values() if topic}
    for path, (topic, trouble) in read.items():
        topic = next(iter(only)) if trouble and not topic and len(only) == 1 else topic
        if topic is None:
            remarks.append(f"{path} {trouble or 'names no lesson'}: it was not judged")
        elif topic in only:
            flat = path.parent == folder
            learner = re.sub(rf"(^|[ _-])(\d\d_)?{topic}$", "", path.stem) if flat else path.parent.name
            row = {"lesson": str(topics[topic]), "mine": str(path), "trouble": trouble, "flat": flat}
            several.setdefault((topic, learner or folder.resolve().name), []).append(row)
    rows = []
    for (topic, learner), found in several.items():
        paths = [Path(row["mine"]) for row in found]
        usual = lab.copy_of(topics[topic], paths[0].parent)  # not one that `course reset` kept
        chosen = usual if usual in paths else max(paths, key=lambda p: p.stat().st_mtime)
        rows.append({"learner": learner, "topic": topic, **found[paths.index(chosen)]})
        if len(paths) > 1:
            remarks.append(f"{learner} has {len(paths)} notebooks of {topic}: {chosen.name} was judged")
    if not rows:
        raise CourseError(f"{folder} holds no notebook of {'these lessons' if wanted else 'the course'}")
    order = list(topics)
    return sorted(rows, key=lambda row: (order.index(row["topic"]), row["learner"])), remarks


def _topic(path, topics):
    "(the topic of a learner's notebook or None, why it can't be read or '')."
    try:
        course, trouble = notebook.load(path)["metadata"].get("course"), ""
        slug = course.get("slug") if isinstance(course, dict) else None
    except CourseError as e:
        slug, trouble = None, re.sub(r": .*`course reset.*", "", str(e).removeprefix(f"{path} "))
    if not isinstance(slug, str) or slug not in topics:
        slug = next((t for t in topics if re.search(rf"(^|[ _-]){t}$", path.stem)), None)
    return slug, trouble


def _all(tasks, places):
    "Run each task in a process of its own, with the variables of a free place; add its answer to the task."
    free, running = queue.SimpleQueue(), set()
    for place in places:
        free.put(place)

    def one(task):
        if task["trouble"]:
            return
        place, words = free.get(), [sys.executable, "-m", "course_lib.authoring.grade"]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        path = os.pathsep.join([kernel.CODE, *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**os.environ, **place, "PYTHONPATH": path}
        process = subprocess.Popen(
            words, env=env, text=True, errors="replace", start_new_session=True, **pipes
        )
        running.add(process)
        try:
            out, err = process.communicate(json.dumps(task))
            if process.returncode == 0:
                task |= json.loads(out)
            else:
                last = (err.strip().splitlines() or [f"its process ended with {process.returncode}"])[-1]
                task["trouble"] = f"{'no figures' if 'verdicts' in task else 'not judged'}: {last}"
        finally:
            running.discard(process)
            free.put(place)

    pool = concurrent.futures.ThreadPoolExecutor(len(places))
    try:
        futures = {pool.submit(one, task): task for task in tasks}
        for i, future in enumerate(concurrent.futures.as_completed(futures)):
            future.result()
            print(f"{i + 1}/{len(tasks)}  {futures[future]['learner']}", file=sys.stderr, flush=True)
    finally:  # after an interrupt nothing more is started, and what runs ends its kernel
        for process in list(running):
            process.send_signal(signal.SIGINT)
        pool.shutdown(cancel_futures=True)


def _alone(task):
    "What this process finds out about one notebook, as a dict that is added to the task."
    lesson, mine = notebook.load(task["lesson"]), notebook.load(task["mine"])
    with tempfile.TemporaryDirectory(prefix="course-grade-", ignore_cleanup_errors=True) as scratch:
        work = Path(scratch, "work")
        if task["flat"]:  # what lies beside it is the others'
            work.mkdir()
        else:
            hidden = shutil.ignore_patterns(".*", "*.ipynb")
            with contextlib.suppress(shutil.Error):  # pipes, dead links and what can't be read are left out
                shutil.copytree(Path(task["mine"]).parent, work, ignore=hidden, ignore_dangling_symlinks=True)
        args = SimpleNamespace(work=work, timeout=task["timeout"], jobs=task["jobs"])
        if "figures" in task:
            return reached.figures(lesson, mine, task["topic"], args)
        same = notebook.version(mine) == notebook.version(lesson)
        chosen = [e["id"] for e in notebook.exercises(lesson)]
        verdicts = check.judge(lesson, mine, task["topic"], chosen, args)
        return {"verdicts": verdicts, "same": same, "altered": check.altered(lesson, mine) if same else []}


def notes(task):
    "What is to be said about a notebook beside its verdicts, in a few words."
    verdicts = {name.rpartition(".")[2]: why for name, why in task.get("verdicts", {}).items()}
    causes = {"hangs": "time limit: ", "its kernel died": "the kernel died ", "memory": " of memory"}
    run = {n: why for n, why in verdicts.items() if not why.startswith("not judged")}
    found = {what: [n for n, why in run.items() if words in why] for what, words in causes.items()}
    found["not judged"] = [n for n in verdicts if n not in run]
    found["altered check cells"] = [name.rpartition(".")[2] for name in task.get("altered", ())]
    said = [task["trouble"], task.get("stopped"), "" if task.get("same", True) else "from another version"]
    return "; ".join([*filter(None, said), *(f"{what}: {', '.join(n)}" for what, n in found.items() if n)])


def _table(lesson, tasks):
    names = [e["id"] for e in notebook.exercises(lesson)]
    rows, passes = [], dict.fromkeys(names, 0)
    for task in tasks:
        verdicts = task.get("verdicts", {})
        marks = ["–" if verdicts.get(name, "?") else "passed" for name in names]
        first = next((f"{n.rpartition('.')[2]}: {why}" for n, why in verdicts.items() if why), "")
        rows.append((task["learner"], *marks, notes(task), first))
        passes |= {name: passes[name] + (verdicts.get(name) == "") for name in names}
    rows.append((f"passed, of {len(tasks)}", *map(str, passes.values()), "", ""))
    head = ("learner", *(name.rpartition(".")[2] for name in names), "note", "the first that is not passed")
    text = show.table(head, rows, left=range(len(head)))
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    return "\n".join(line[:width] for line in text.splitlines())


def _csv(lessons, tasks):
    "The table as CSV: a row for each learner, a column for each exercise, note and figure."
    rows = {task["learner"]: {} for task in sorted(tasks, key=lambda task: task["learner"])}
    columns = {}
    for topic, lesson in lessons.items():
        mine = [task for task in tasks if task["topic"] == topic]
        columns |= dict.fromkeys([e["id"] for e in notebook.exercises(lesson)] + [f"{topic} note"])
        for task in mine:
            verdicts = {name: why or "passed" for name, why in task.get("verdicts", {}).items()}
            reached = {f"{n} ({r['unit']})": r["value"] for n, r in task.get("figures", {}).items()}
            columns |= dict.fromkeys(reached)
            rows[task["learner"]] |= {**verdicts, f"{topic} note": notes(task), **reached}
        for learner in rows.keys() - {task["learner"] for task in mine}:
            rows[learner][f"{topic} note"] = "no notebook"
    text = io.StringIO()
    writer = csv.DictWriter(text, ["learner", *columns], lineterminator="\n")
    writer.writeheader()
    writer.writerows({"learner": learner, **row} for learner, row in rows.items())
    return text.getvalue()


if __name__ == "__main__":
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # the lines of `course check`
            result = _alone(json.load(sys.stdin))
        print(json.dumps(result))
    except CourseError as e:
        sys.exit(str(e))
    except KeyboardInterrupt:
        sys.exit(130)
