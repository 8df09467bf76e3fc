"""A pytest plugin beside nbval: `pytest -p course_lib.authoring.plugin --nbval-lax nbs/`.

It also tests the cells that begin with `%%gpu`: without a CUDA device each prints one line.
"""

import os

import pytest


def pytest_configure(config):
    config.option.nbval_current_env = True  # an unknown kernel name would fail every cell
    # A backend named by the shell would draw nothing into the notebook.
    os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"


def pytest_collection_modifyitems(items):
    for item in items:
        if hasattr(item.parent, "skip_compare"):  # a cell of nbval's
            item.output_timeout = 30  # nbval waits 5 s for output; a loaded machine needs longer
            if "stderr" not in item.parent.skip_compare:
                item.parent.skip_compare += ("stderr",)  # one warning with a time in it fails a marked cell


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    done = yield
    if getattr(item, "cell", {}).get("source", "").startswith("%%gpu"):
        said = "".join(out.get("text", "?\n") for out in item.test_outputs)
        if not said.startswith("Needs a CUDA GPU") or said.count("\n") != 1:
            from course_lib import machine  # imports torch

            if not machine.has_gpu():
                pytest.fail(f"without a GPU the cell must print one line, and it printed {said[:200]!r}")
    return done
