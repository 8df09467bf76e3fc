"What every lesson must hold to: its files, stored outputs, numbers, exercises, checks and wrong answers."

import base64
import functools
import importlib
import importlib.util
import inspect
import re
import sys
import time
import warnings

import pytest
import torch

from course_lib import checking as core
from course_lib import recorded
from course_lib.authoring import kernel, notebook, outputs, prose, record

STEMS = [p.stem for p in sorted(notebook.NBS.glob("[0-9][0-9]_*.ipynb"))]
EXERCISES = [
    (stem, e["id"])
    for stem in STEMS
    for e in notebook.exercises(notebook.load(notebook.NBS / f"{stem}.ipynb"))
]
every_lesson = pytest.mark.parametrize("stem", STEMS)
every_exercise = pytest.mark.parametrize("stem, number", EXERCISES)


@functools.cache
def worked(stem):
    return notebook.load(notebook.NBS / f"{stem}.ipynb")


@functools.cache
def checks(stem):
    return importlib.import_module(f"course_lib.{stem[3:]}.check")


@functools.cache
def mutants(stem):
    path = notebook.ROOT / "tests" / stem[3:] / "mutants.py"
    spec = importlib.util.spec_from_file_location(f"mutants_{stem[3:]}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@every_lesson
def test_one_stem_four_places(stem):
    topic = stem[3:]
    places = [f"nbs/{stem}.ipynb", f"lessons/{stem}.ipynb"]
    places += [f"course_lib/{topic}/{name}.py" for name in ("__init__", "check", "figures")]
    places += [f"tests/{topic}/test_{topic}.py", f"tests/{topic}/mutants.py"]
    assert [p for p in places if not (notebook.ROOT / p).is_file()] == []


@every_lesson
def test_begins_with_the_machine(stem):
    first = next(c for c in worked(stem)["cells"] if c["cell_type"] == "code")
    assert f'machine.start("{stem[3:]}"' in notebook.source(first)


@every_lesson
def test_stored_outputs(stem):
    assert outputs.problems(worked(stem)) == []


@every_lesson
def test_recordings_that_are_behind_are_said(stem):
    if behind := record.behind(worked(stem)):
        warnings.warn(f"{stem}: {'; '.join(behind)}", stacklevel=1)


@every_lesson
def test_solutions_can_be_imported(stem):
    if "triton" in stem:
        pytest.importorskip("triton")
    solutions = importlib.import_module(f"course_lib.{stem[3:]}.solutions")
    assert list(solutions.EXERCISES) == [e["id"] for e in notebook.exercises(worked(stem))]
    for names in solutions.EXERCISES.values():
        assert names and all(hasattr(solutions, name) for name in names), names


@every_lesson
def test_numbers_in_the_text(stem):
    figures = {f["name"]: f for f in recorded.figures(stem[3:])}
    assert prose.problems(worked(stem), figures) == []


@every_lesson
def test_the_lessons_that_it_speaks_of_exist(stem):
    text = "\n".join(notebook.source(c) for c in worked(stem)["cells"] if c["cell_type"] == "markdown")
    known = {other[3:] for other in STEMS}
    named = re.findall(r"\b[Ll]essons? ((?:\*\w+\*|, | and | to )+)", text)
    assert {n for some in named for n in re.findall(r"\*(\w+)\*", some)} <= known
    assert re.findall(r"\b[Ll]essons? \d\d", text) == [], "a lesson is called by its name"


def test_numbers_in_the_readme():
    text = (notebook.ROOT / "README.md").read_text(encoding="utf-8")
    assert prose.tag_problems(text, {f["name"]: f for f in recorded.figures()}) == []
    assert prose.untagged(text) == []


def test_the_readme_has_a_line_for_what_each_lesson_finds():
    text = (notebook.ROOT / "README.md").read_text(encoding="utf-8")
    titles = [worked(s)["metadata"]["course"]["title"] for s in STEMS if not notebook.is_draft(worked(s))]
    assert re.findall(r"^- \*\*(.+?)\.\*\*", text.split("\n## ")[1], re.MULTILINE) == titles


def test_the_readmes_picture_is_the_recorded_one():
    picture = base64.b64encode((notebook.ROOT / ".github/where-the-time-goes.png").read_bytes()).decode()
    cell = next(c for c in worked("06_roofline")["cells"] if c["id"] == "encoder-modes")
    assert picture in [o.get("data", {}).get("image/png", "").strip() for o in cell["outputs"]]


@pytest.mark.notebooks
@every_lesson
def test_unsolved_it_fails_at_its_checks_and_nowhere_else(stem, tmp_path):
    cells = [
        c for c in notebook.load(notebook.LESSONS / f"{stem}.ipynb")["cells"] if c["cell_type"] == "code"
    ]
    cells = [{**c, "source": notebook.source(c)} for c in cells if "slow" not in notebook.tags(c)]
    failed = {}
    with kernel.Session(tmp_path, timeout=60) as session:
        for cell in cells:
            ran = session.execute(cell["source"])
            assert ran.alive, f"{cell['id']}: {ran.error}"
            if ran.error:
                failed[cell["id"]] = ran.error
    expected = {e["cell"]: f"Wrong: {e['id']} not passed: " for e in notebook.exercises(worked(stem))}
    assert list(failed) == list(expected), failed
    for name, error in failed.items():
        assert error.startswith(expected[name])


@every_lesson
def test_checks_are_those_of_the_notebook(stem):
    wanted = [e["id"] for e in notebook.exercises(worked(stem))]
    assert wanted, "a lesson has exercises"
    assert list(core.exercises(checks(stem))) == wanted
    assert sorted(mutants(stem).REFERENCE) == sorted(mutants(stem).MUTANTS) == wanted


@every_exercise
def test_what_a_learner_wrote_runs_on(stem, number):
    "No cell uses an answer before its check; a later one takes it by `yours` and a cell after that calls it."
    code = [c for c in worked(stem)["cells"] if c["cell_type"] == "code"]
    text = [notebook.source(c) for c in code]
    if not any("check.yours(" in t for t in text):
        pytest.skip("not rewritten yet")
    check = next(i for i, c in enumerate(code) if c["metadata"].get("exercise", {}).get("id") == number)
    taken = next(i for i, t in enumerate(text) if f'check.yours("{number}")' in t)
    assert check < taken
    solutions = importlib.import_module(f"course_lib.{stem[3:]}.solutions")
    for name in solutions.EXERCISES[number]:
        used = [i for i, t in enumerate(text) if re.search(rf"(?<![\w.]){name}\b(?!\s*=[^=])", t)]
        defined = [
            i for i in used if i < check and re.search(rf"^(def|class) {name}\b", text[i], re.MULTILINE)
        ]
        assert len(defined) == 1 and [i for i in used if i < taken] == [*defined, check]
        assert any(i >= taken for i in used)


def as_answers(answer):
    "A check takes one object, or as many as a tuple holds."
    return answer if isinstance(answer, tuple) else (answer,)


def refusal(check, answers, capsys):
    "The sentence with which `check` refuses."
    with pytest.raises(core.Wrong) as e:
        check(*answers)
    assert "passed: " not in capsys.readouterr().out.replace("not passed: ", "")
    sentence = str(e.value)
    assert sentence.startswith(f"{check.exercise} not passed: ")
    assert "\n" not in sentence and len(sentence) < 500, sentence
    return sentence


@every_exercise
def test_the_reference_is_accepted(stem, number, capsys):
    check, answers = core.exercises(checks(stem))[number], as_answers(mutants(stem).REFERENCE[number])
    start, runs = time.perf_counter(), 0
    while runs < 5 and time.perf_counter() - start < 1:  # inputs are drawn anew each time
        check(*answers)
        runs += 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{number} passed: {check.passed}"] * runs


@every_exercise
def test_right_answers_of_another_style_are_accepted(stem, number, capsys):
    check, right = core.exercises(checks(stem))[number], getattr(mutants(stem), "RIGHT", {}).get(number, [])
    for answer in right:
        check(*as_answers(answer))
    assert capsys.readouterr().out.splitlines() == [f"{number} passed: {check.passed}"] * len(right)


@every_exercise
def test_wrong_answers_are_refused(stem, number, capsys):
    check, wrong = core.exercises(checks(stem))[number], mutants(stem).MUTANTS[number]
    width = len(as_answers(mutants(stem).REFERENCE[number]))
    computed = 0
    for mutant in wrong:
        answers = as_answers(mutant)
        assert len(answers) == width, f"{mutant} is not an answer to {number}: the check takes {width}"
        try:
            sentence = refusal(check, answers, capsys)
        except pytest.fail.Exception:
            pytest.fail(f"{number} accepts the wrong answer {mutant!r}")
        assert "not solved yet" not in sentence, f"{mutant!r} is a stub"
        computed += " raised " not in sentence
    assert computed >= 3, f"{number} has {computed} wrong answers that compute; expected three or more"


def stub(*args, **kwargs):
    raise NotImplementedError


def failing(*args, **kwargs):
    raise ValueError("a mistake\nin two lines")


ODD = {
    "stub": stub,
    "failing": failing,
    "None": None,
    "a number": 3,
    "text": "text",
    "a list": [],
    "a tensor": torch.ones(2, 3),
    "gives None": lambda *args, **kwargs: None,
    "gives NaN": lambda *args, **kwargs: float("nan"),
    "gives text": lambda *args, **kwargs: "text",
    "gives tensors of NaN": lambda *args, **kwargs: torch.full((3, 5), float("nan")),
    "gives another shape": lambda *args, **kwargs: torch.ones(1, 2, 3, 4),
    "a class": object,
}


@every_exercise
def test_odd_answers_get_one_sentence(stem, number, capsys):
    check = core.exercises(checks(stem))[number]
    width = len(inspect.signature(check).parameters)
    for name, answer in ODD.items():
        sentence = refusal(check, [answer] * width, capsys)
        if name == "stub":
            assert "not solved yet" in sentence
