"""A pytest plugin beside nbval: `pytest -p course_lib.authoring.plugin --nbval-lax nbs/`.

Cells tagged gpu are left out where there is no CUDA device, and with --without-slow cells tagged slow; the
run ends with a list of what was left out and why. (A root conftest.py is not seen for notebooks elsewhere.)
"""

import os

import pytest

INLINE = "module://matplotlib_inline.backend_inline"
NBVAL_TIMEOUT = 2000  # nbval's own default, of which a dead kernel uses up every second
TIMEOUT = 120


def pytest_addoption(parser):
    parser.getgroup("nbval").addoption(
        "--without-slow", action="store_true", help="leave out notebook cells tagged slow"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    config.left_out = []
    if not (config.option.nbval or config.option.nbval_lax):
        return
    config.option.nbval_current_env = True  # an unknown kernel name would fail every cell
    if config.option.nbval_cell_timeout == NBVAL_TIMEOUT:
        config.option.nbval_cell_timeout = TIMEOUT
    os.environ["MPLBACKEND"] = INLINE  # a backend named by the shell would draw nothing into the notebook


def pytest_collection_modifyitems(config, items):
    for item in items:
        cell = getattr(item, "cell", None)
        if cell is None or not hasattr(item.parent, "skip_compare"):
            continue  # no cell of nbval's
        item.output_timeout = 30  # nbval waits 5 s for output; a loaded machine needs longer
        if "stderr" not in item.parent.skip_compare:
            item.parent.skip_compare += ("stderr",)  # one warning with a time in it fails a marked cell
        if why := _why_not(set(cell.metadata.get("tags", [])), config):
            item.add_marker(pytest.mark.skip(reason=why))
            config.left_out.append((item.path.name, cell.get("id", item.name), why))


def _why_not(tags, config):
    if "gpu" in tags and not _has_cuda():
        return "no CUDA device"
    if "slow" in tags and config.option.without_slow:
        return "--without-slow"
    return ""


def _has_cuda():
    from course_lib.authoring import kernel  # costs a second, and most notebooks have no gpu cell

    return kernel.has_cuda()


def pytest_terminal_summary(terminalreporter, config):
    if config.left_out:
        terminalreporter.section("notebook cells left out")
        for name, cell, why in config.left_out:
            terminalreporter.write_line(f"{name}  {cell}: {why}")
