"How lessons draw and print: one style for figures, explorers that keep computing and drawing apart, tables."

import inspect
import io

# Okabe and Ito's palette: colour-blind readers can distinguish them.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555"]
# Pixels of a stored figure for each that it is shown at; 2 makes notebooks larger than 500 kB.
SHARPNESS = 1.5


def style():
    "Set the course's look for every later figure of this notebook."
    import matplotlib.pyplot as plt

    plt.rc("figure", figsize=(6.4, 3.6), dpi=80)
    plt.rc("figure.constrained_layout", use=True)
    plt.rc("axes", grid=True, titlesize=11, titlelocation="left", prop_cycle=plt.cycler(color=COLOURS))
    plt.rc("axes.spines", top=False, right=False)
    plt.rc("grid", alpha=0.25)
    plt.rc("font", size=10)
    plt.rc("legend", frameon=False)


def axes(nrows=1, ncols=1, **kw):
    "`plt.subplots(nrows, ncols, ...)`; matplotlib is imported when something is drawn."
    import matplotlib.pyplot as plt

    return plt.subplots(nrows, ncols, **kw)


def figure(fig):
    "Show a matplotlib figure once and close it, so that the inline backend does not draw it again."
    import matplotlib.pyplot as plt
    from IPython.display import Image, display

    # An image of pixels gains nothing from more of them.
    scale = 1 if any(ax.images for ax in fig.axes) else SHARPNESS
    png = io.BytesIO()
    fig.savefig(png, format="png", dpi=scale * fig.dpi, bbox_inches="tight")
    plt.close(fig)
    width = int.from_bytes(png.getvalue()[16:20], "big")  # where PNG's header has it
    display(Image(png.getvalue(), width=round(width / scale)))


def number(x):
    "A number as text: three significant digits, thousands separated; a dash for None."
    if x is None:
        return "–"
    return f"{x:,}" if isinstance(x, int) else f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.3g}"


def table(header, rows, left=(0,)):
    "Rows of text and numbers as lines in columns; the columns in `left` are aligned left, the others right."
    cells = [[c if isinstance(c, str) else number(c) for c in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        columns = enumerate(zip(row, widths, strict=True))
        lines.append("  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in columns).rstrip())
    return "\n".join(lines)


class Explorer:
    """A figure with controls: `compute(**values)` gives data, `view(data)` draws it and returns the figure.

    `controls` are ipywidgets abbreviations or widgets by parameter name: a range `(low, high, step)`, a
    list of choices, a `FloatLogSlider`. Their starting values are the defaults of `compute`'s parameters.
    """

    def __init__(self, compute, view, **controls):
        parameters = inspect.signature(compute).parameters
        self.compute, self.view, self.controls = compute, view, controls
        self.defaults = {k: parameters[k].default for k in controls}

    def static(self, **values):
        "Draw once, at the defaults or at `values`."
        figure(self.view(self.compute(**{**self.defaults, **values})))

    def interact(self):
        "The controls above a figure that is redrawn when one moves. Returns the widget."
        import ipywidgets as widgets

        controls = {}
        for name, widget in self.controls.items():
            if not isinstance(widget, widgets.Widget):
                widget = widgets.interactive.widget_from_abbrev(widget, self.defaults[name])
            widget.value = self.defaults[name]
            widget.description = name.replace("_", " ")
            widget.style.description_width = "initial"
            if hasattr(widget, "continuous_update"):
                widget.continuous_update = False  # redraw on release: a slow compute would queue up otherwise
            controls[name] = widget
        out = widgets.interactive_output(self.static, controls)
        return widgets.VBox([*controls.values(), out])
