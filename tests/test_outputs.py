"What may be stored in a worked notebook."

import base64
import io
import platform
import re

import numpy as np
import pytest
import small_course
from PIL import Image
from small_course import code

from course_lib.authoring import notebook, outputs


def stream(text, name="stdout"):
    return {"output_type": "stream", "name": name, "text": text}


def display(**data):
    return {"output_type": "display_data", "data": data, "metadata": {}, "transient": {}}


HTML = "text/html"
CLEANED = {
    "/home/ada/course/nbs/x.ipynb": "x.ipynb",
    "see /usr/lib/python3.12/dist-packages/torch/fx.py:12: UserWarning": "see fx.py:12: UserWarning",
    "/tmp/ipykernel_42/123.py:1: FutureWarning": "cell:1: FutureWarning",
    "'/root/.cache/course'": "'course'",
    r"C:\Users\ada\x.txt": "x.txt",
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
            stream("loss 1\nloss 2\n"),
            stream("100%|████| 10/10 [00:01<00:00]\n", "stderr"),
            display(**{outputs.WIDGET: {"model_id": "a"}, "text/plain": "VBox(...)"}),
            display(**{HTML: "<style> progress { border: none; } </style>"}),
            display(**{HTML: "<div><progress value='1'></progress></div>"}),
            display(**{HTML: table, "text/plain": "a\nb"}),
            display(**{"image/png": "iVBORw0KGgo/home/x/y="}),
        ]
    )
    assert kept == [
        stream(["loss 1\n", "loss 2\n"]),
        {"output_type": "display_data", "metadata": {}, "data": {HTML: [table], "text/plain": ["a\n", "b"]}},
        {"output_type": "display_data", "metadata": {}, "data": {"image/png": "iVBORw0KGgo/home/x/y="}},
    ]


def png(array):
    packed = io.BytesIO()
    Image.fromarray(array).save(packed, "PNG")
    return base64.b64encode(packed.getvalue()).decode()


def test_plots_are_stored_in_fewer_colours_and_photographs_as_they_are():
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots()
    ax.plot([1, 3, 2], label="a line")
    ax.legend()
    fig.canvas.draw()
    plot = np.asarray(fig.canvas.buffer_rgba())
    plt.close(fig)
    (kept,) = outputs.clean([display(**{"image/png": png(plot)})])
    small = kept["data"]["image/png"]
    assert len(small) < 0.5 * len(png(plot))
    assert outputs.clean([kept]) == [kept]
    again = np.asarray(Image.open(io.BytesIO(base64.b64decode(small))).convert("RGB")).astype(int)
    assert again.shape == (*plot.shape[:2], 3) and abs(again - plot[..., :3]).mean() < 1
    noise = png(np.random.default_rng(0).integers(0, 256, (60, 60, 3), dtype=np.uint8))
    assert outputs.clean([display(**{"image/png": noise})])[0]["data"]["image/png"] == noise


def clean_notebook():
    nb = small_course.worked()
    del nb["metadata"]["widgets"]
    nb["cells"] = [code("one", "1"), code("two", "# NBVAL_CHECK_OUTPUT\n2"), code("three", "3", ["gpu"])]
    for i, cell in enumerate(nb["cells"], 1):
        cell["execution_count"] = i
    nb["metadata"]["recorded"] |= {"clean": True, "python": "3.12.1"}
    return nb


def store(out):
    return lambda nb: nb["cells"][0]["outputs"].append(out)


def count(i, value):
    return lambda nb: nb["cells"][i].update(execution_count=value)


FAULTS = {
    "never recorded": (lambda nb: nb["metadata"].pop("recorded"), "it has not been recorded"),
    "other code": (lambda nb: nb["cells"][0].update(source="0"), "its code has changed"),
    "half a stamp": (lambda nb: nb["metadata"]["recorded"].pop("python"), "its stamp lacks python"),
    "widget state": (lambda nb: nb["metadata"].update(widgets={}), "the state of widgets"),
    "huge": (store(display(**{"image/png": "x" * 500_000})), "expected less than 500,000"),
    "order": (count(0, 2), r"counts are \[2, 2, 3\]"),
    "no count": (count(1, None), "cell `two` was never executed"),
    "no output": (lambda nb: nb["cells"][1].update(outputs=[]), "cell `two` is compared and has no output"),
    "times": (lambda nb: nb["cells"][0]["metadata"].update(execution={}), "`one` stores times"),
    "an error": (store({"output_type": "error", "ename": "E"}), "`one` stores an error"),
    "a widget": (store(display(**{outputs.WIDGET: {}})), "`one` stores a widget"),
    "pieces": (store(stream("x\n")), "`one` stores a stream in pieces"),
    "a bar": (store(stream("5%|█  |", "stderr")), "`one` stores a progress bar"),
    "a path": (store(display(**{"text/plain": ["'/home/ada/x'"]})), "`one` shows a path of one machine"),
    "a host": (store(stream("on gpu-17", "stderr")), "`one` shows a host name"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_found(fault, monkeypatch):
    monkeypatch.setattr(platform, "node", lambda: "gpu-17")
    nb = clean_notebook()
    nb["metadata"]["recorded"]["source"] = notebook.code_hash(nb)
    assert outputs.problems(nb) == []
    change, sentence = FAULTS[fault]
    change(nb)
    found = outputs.problems(nb)
    assert len([f for f in found if re.search(sentence, f)]) == 1, found


def test_a_gpu_cell_may_lack_its_count():
    nb = clean_notebook()
    nb["cells"][2] |= {"execution_count": None, "outputs": []}
    nb["metadata"]["recorded"]["source"] = notebook.code_hash(nb)
    assert outputs.problems(nb) == []
