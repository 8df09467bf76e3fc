"A cell that shows widgets comes to an end."

from course_lib.authoring import kernel

EXPLORER = """
from course_lib import show


def compute(a=1.0, b=2.0):
    return [a, b]


def view(data):
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots()
    ax.plot(data)
    return fig
"""
SHOWN = "show.Explorer(compute, view, a=(0.0, 2.0, 0.1), b=(0.0, 3.0, 0.1)).interact()"


def test_a_widget_never_stalls_a_session(tmp_path):
    # nbclient answers a widget on the socket on which it waits for the cell's end, and used to miss that end.
    sources = [EXPLORER, *[SHOWN] * 12]
    cells = [{"cell_type": "code", "id": f"c{i}", "metadata": {}, "source": s} for i, s in enumerate(sources)]
    with kernel.Session(cells, tmp_path, timeout=60) as session:
        assert [session.execute(i).error for i in range(len(cells))] == [""] * len(cells)
