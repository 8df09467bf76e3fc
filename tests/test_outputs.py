"What may be stored in a worked notebook."

import base64
import io
import platform
import re
import sys
import tempfile
from pathlib import Path

import pytest
import small_course
from PIL import Image
from small_course import code

from course_lib.authoring import outputs


def stream(text, name="stdout"):
    return {"output_type": "stream", "name": name, "text": text}


def display(**data):
    return {"output_type": "display_data", "data": data, "metadata": {}}


HTML = "text/html"


def png():
    "One point, in a palette."
    packed = io.BytesIO()
    Image.new("P", (1, 1)).save(packed, "PNG")
    return base64.b64encode(packed.getvalue()).decode()


PLOT = png()
HOME, TEMP = str(Path.home()), tempfile.gettempdir()
CLEANED = {
    f"{HOME}/course/nbs/x.ipynb": "x.ipynb",
    f"{sys.base_prefix}/lib/python3.12/site-packages/torch/fx.py:12: UserWarning": "fx.py:12: UserWarning",
    f"{TEMP}/ipykernel_42/123.py:1: FutureWarning": "cell:1: FutureWarning",
    "'/anyone/.cache/course', '/srv/course/nbs'": "'course', 'nbs'",
    "<function f at 0x7f2a11223344>": "<function f at 0x…>",
    "0x3f800000": "0x3f800000",
    "1 / 2, km/h and https://example.org/home/page": "1 / 2, km/h and https://example.org/home/page",
    "TB/s and ~/.cache/course": "TB/s and ~/.cache/course",
}


@pytest.mark.parametrize("text", CLEANED)
def test_what_belongs_to_a_machine_goes(text):
    assert outputs.scrub(text) == CLEANED[text]
    assert outputs.scrub(CLEANED[text]) == CLEANED[text]


def test_host_names_go(monkeypatch):
    monkeypatch.setattr(platform, "node", lambda: "gpu-17.example.org")
    assert outputs.scrub("on gpu-17.example.org, gpu-17 and gpu-170") == "on host, host and gpu-170"
    monkeypatch.setattr(platform, "node", lambda: "localhost")
    assert outputs.scrub("localhost") == "localhost"


def test_clean_keeps_what_a_reader_needs():
    table = "<table><tr><td>epoch</td></tr></table>"
    kept = outputs.clean(
        [
            stream("loss 9\rloss 1\nloss 2\n"),
            stream("100%|████| 10/10 [00:01<00:00]\n", "stderr"),
            display(**{outputs.WIDGET: {"model_id": "a"}, "text/plain": "VBox(...)"}),
            display(**{HTML: "<style> progress { border: none; } </style>"}),
            display(**{HTML: "<div><progress value='1'></progress></div>"}),
            display(**{HTML: table, "text/plain": "a\nb"}),
            display(**{"image/png": PLOT}),
        ]
    )
    assert kept == [
        stream(["loss 1\n", "loss 2\n"]),
        {"output_type": "display_data", "metadata": {}, "data": {HTML: [table], "text/plain": ["a\n", "b"]}},
        {"output_type": "display_data", "metadata": {}, "data": {"image/png": PLOT}},
    ]


def test_plots_are_stored_in_fewer_colours():
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots()
    ax.plot([1, 3, 2], label="a line")
    packed = io.BytesIO()
    fig.savefig(packed)
    plt.close(fig)
    plot = base64.b64encode(packed.getvalue()).decode()
    (kept,) = outputs.clean([display(**{"image/png": plot})])
    small = kept["data"]["image/png"]
    assert len(small) < 0.5 * len(plot)
    assert outputs.clean([kept]) == [kept]


def clean_notebook():
    nb = small_course.worked()
    del nb["metadata"]["widgets"]
    nb["cells"] = [code("one", "1"), code("two", "# NBVAL_CHECK_OUTPUT\n2"), code("three", "%%gpu it\n3")]
    for i, cell in enumerate(nb["cells"], 1):
        cell["execution_count"] = i
    return nb


def store(out):
    return lambda nb: nb["cells"][0]["outputs"].append(out)


def count(i, value):
    return lambda nb: nb["cells"][i].update(execution_count=value)


LEFT_OUT = "`one` stores an error, a widget, .* which `course record` leaves out"
FAULTS = {
    "order": (count(0, 2), r"counts are \[2, 2, 3\]"),
    "no count": (count(2, None), r"counts are \[1, 2, None\]"),
    "no output": (lambda nb: nb["cells"][1].update(outputs=[]), "cell `two` is compared and has no output"),
    "an error": (store({"output_type": "error", "ename": "E"}), LEFT_OUT),
    "a widget": (store(display(**{outputs.WIDGET: {}})), LEFT_OUT),
    "a bar": (store(stream(["5%|█  |"], "stderr")), LEFT_OUT),
    "a path": (store(stream([f"{Path.home()}/x"], "stderr")), LEFT_OUT),
    "a host": (store(stream(["on gpu-17"], "stderr")), LEFT_OUT),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_found(fault, monkeypatch):
    monkeypatch.setattr(platform, "node", lambda: "gpu-17")
    nb = clean_notebook()
    assert outputs.problems(nb) == []
    change, sentence = FAULTS[fault]
    change(nb)
    found = outputs.problems(nb)
    assert len([f for f in found if re.search(sentence, f)]) == 1, found


def test_a_draft_has_outputs_where_they_are_compared():
    nb = clean_notebook()
    nb["metadata"]["recorded"] = {"cells": {}}
    nb["cells"][2] |= {"execution_count": None, "outputs": []}
    assert outputs.problems(nb) == []
    nb["cells"][1] |= {"execution_count": None}
    assert "`two` is compared and has no output" in outputs.problems(nb)[0]
