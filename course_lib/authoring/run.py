"`course run`: execute worked lessons, several at a time, and report each cell to CI as JUnit's XML."

import concurrent.futures
import contextlib
import os
import re
import sys
import time
from xml.etree import ElementTree as xml

import psutil

from course_lib import machine, recorded
from course_lib.authoring import notebook, record
from course_lib.authoring.notebook import CourseError

# XML has no place for these, as in a terminal's colours.
NOT_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def run_cmd(args):
    "Execute worked lessons; writes nothing into the repository. Returns 1 if a cell failed."
    if not (args.lessons or args.all or args.needs):
        raise CourseError("name a lesson, or use --all")
    if args.jobs < 1:
        raise CourseError(f"--jobs {args.jobs} executes no lesson: expected 1 or more")
    paths = [p for p in record.worked(args.lessons) if not args.needs or needs(notebook.load(p), args.needs)]
    if not paths:
        raise CourseError(f"--needs {args.needs} leaves no lesson to execute")
    report, began, env = xml.Element("testsuites", name="course run"), time.monotonic(), {}
    junit = args.junit and args.junit.absolute()
    _write(report, junit)  # first of all, so that a path that can't be written costs no run
    if args.jobs > 1 and "OMP_NUM_THREADS" not in os.environ:  # threads that share a core wait for each other
        env["OMP_NUM_THREADS"] = str(max(1, machine.cores() // args.jobs))
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        lessons = [pool.submit(_lesson, p, args, env) for p in paths]
        try:
            for done in concurrent.futures.as_completed(lessons):
                suite, figures = done.result()
                print(figures, end="", flush=True)
                for failure in suite.iter("failure"):
                    print(failure.text, file=sys.stderr, flush=True)
                report.append(suite)
                report[:] = sorted(report, key=lambda suite: suite.get("name"))
                _write(report, junit)  # a run that CI ends has reported the lessons before
        except BaseException:  # Ctrl-C does not reach the kernels
            pool.shutdown(wait=False, cancel_futures=True)
            while not all(lesson.done() for lesson in lessons):  # one may still start its kernel
                for process in psutil.Process().children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
                time.sleep(0.1)
            raise
    if len(paths) > 1:
        for suite in report:
            said = "passed" if suite.find(".//failure") is None else "failed"
            print(f"{suite.get('name'):<20} {said} {float(suite.get('time')):5.0f} s")
        print(f"{len(paths)} lessons in {time.monotonic() - began:.0f} s")
    return int(report.find(".//failure") is not None)


def needs(nb, kind):
    """Whether a worked notebook suits a machine with a "cpu" alone, with a "gpu", with several "gpus".

    "cpu": it runs without a GPU. "gpu": it has cells for one. "gpus": it measures on all that there are.
    """
    course = nb["metadata"]["course"]
    if kind == "gpus":
        return course.get("gpus") == "all"
    if kind == "gpu":
        return any(map(notebook.needs_gpu, nb["cells"]))
    wants = course["needs"].partition(";")[0]  # a lesson can do without what follows the semicolon
    return not re.search(r"(?<!without a )GPU", wants)


def _lesson(path, args, env):
    "Execute a lesson; returns its test suite, where each cell is a test case, and its figures as text."
    began, cells, done, error, figures = time.monotonic(), [], {}, "", ""
    try:
        nb = notebook.load(path)
        cells = record.code_cells(nb)
        _, noted = record.execute(nb, path.stem, env, done, args.timeout)
        figures = f"{recorded.compare(path.stem[3:], noted)}\n\n"
    except CourseError as e:
        error = NOT_XML.sub("?", str(e))
    suite = xml.Element("testsuite", name=path.stem, time=f"{time.monotonic() - began:.3f}")
    # A damaged notebook and a kernel that does not start have no cell.
    last = [*done][-1] if done else "start"
    for name in [c["id"] for c in cells] if done else [last]:
        seconds = done[name].seconds if name in done else 0
        case = xml.SubElement(suite, "testcase", classname=path.stem, name=name, time=f"{seconds:.3f}")
        if error and name == last:
            xml.SubElement(case, "failure", message=error).text = error
        elif name not in done:
            xml.SubElement(case, "skipped", message="a cell above failed")
    return suite, figures


def _write(report, path):
    "Write the report with its counts to `path`, whole or not at all. Raises CourseError where that fails."
    if path:
        for part in (report, *report):
            for count, kind in (("tests", "testcase"), ("failures", "failure"), ("skipped", "skipped")):
                part.set(count, str(len(part.findall(f".//{kind}"))))
        xml.indent(report)
        with contextlib.suppress(OSError):  # what can't be made can't be written to either, and that is said
            path.parent.mkdir(parents=True, exist_ok=True)
        notebook.save(xml.tostring(report, "utf-8", xml_declaration=True).decode() + "\n", path)
