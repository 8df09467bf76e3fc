import base64
import io

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import pytest

from course_lib import show


def compute(rate=0.1, steps=5, shape="bowl"):
    return {"rate": rate, "steps": steps, "shape": shape}


@pytest.fixture
def drawn(monkeypatch):
    "The data of each redraw, and what was displayed."
    plt.close("all")  # what other files of tests left open
    seen = {"data": [], "shown": []}
    monkeypatch.setattr("IPython.display.display", seen["shown"].append)

    def view(data):
        seen["data"].append(data)
        fig, ax = plt.subplots()
        ax.plot([0, data["rate"]])
        return fig

    seen["view"] = view
    yield seen
    plt.close("all")


def test_static_draws_once_at_the_defaults_or_at_what_is_given(drawn):
    explorer = show.Explorer(compute, drawn["view"], rate=(0.0, 1.0, 0.1), steps=(1, 9))
    explorer.static()
    explorer.static(rate=0.5)
    assert drawn["data"] == [
        {"rate": 0.1, "steps": 5, "shape": "bowl"},
        {"rate": 0.5, "steps": 5, "shape": "bowl"},
    ]
    assert len(drawn["shown"]) == 2
    assert plt.get_fignums() == []  # closed: the inline backend would draw a second copy


def test_a_moved_control_redraws_exactly_once_with_its_value(drawn):
    box = show.Explorer(compute, drawn["view"], rate=(0.0, 1.0, 0.1), shape=["bowl", "valley"]).interact()
    rate, shape, _ = box.children
    assert (rate.value, shape.value) == (0.1, "bowl")
    before = len(drawn["data"])
    shape.value = "valley"
    rate.value = 0.7
    assert len(drawn["data"]) == before + 2
    assert drawn["data"][-1] == {"rate": 0.7, "steps": 5, "shape": "valley"}
    assert plt.get_fignums() == []


@pytest.mark.parametrize("image", [False, True])
def test_a_figure_is_stored_sharper_than_it_is_shown(drawn, image):
    show.style()
    fig, ax = show.axes(figsize=(6, 3))
    ax.imshow([[0, 1]]) if image else ax.plot([0, 1])
    show.figure(fig)
    png, metadata = drawn["shown"][0]._repr_png_()
    pixels = plt.imread(io.BytesIO(base64.b64decode(png) if isinstance(png, str) else png)).shape[1]
    assert abs(pixels / metadata["width"] - (1 if image else show.SHARPNESS)) < 0.01
    assert 400 < metadata["width"] < 520 and plt.get_fignums() == []


def test_a_table():
    rows = [("a", 12345, None), ("bcd", 0.012345, "x"), ("", 1234.5, 7)]
    text = show.table(("", "bytes", "unit"), rows, left=(0, 2))
    assert text.splitlines() == [
        "      bytes  unit",
        "a    12,345  –",
        "bcd  0.0123  x",
        "      1,234  7",
    ]
