"Ranks from a notebook's kernel: cells, functions defined in cells, interrupts, restarts."

import pytest
import ranks_processes as processes

from course_lib.authoring.kernel import Session

CELLS = {
    "start": "from course_lib.parallel import ranks\nimport torch, torch.distributed as dist\n"
    "group = ranks.start(2, backend='gloo', quiet=True)",
    "cell": "%%ranks\nx = torch.full((2,), float(rank))\ndist.all_reduce(x)\nprint('on', rank)\nx",
    "again": "%%ranks 2 --timeout 5\nx * 2",
    "define": "scale = 3\ndef helper(x):\n    return x * scale\n"
    "def fn(x):\n    return helper(x) + dist.get_rank()",
    "run": "ranks.run(fn, 5)",
    "raise": "def bad():\n    y = 1\n    if dist.get_rank() == 1:\n        raise ValueError('bad shape')\n"
    "ranks.run(bad)",
    "raise in a cell": "%%ranks\nif rank == 1:\n    1 / 0",
    "hang": "def hang():\n    dist.recv(torch.ones(1), 1 - dist.get_rank())\nranks.run(hang, timeout=0.7)",
    "bad option": "%%ranks four\nrank",
    "resize": "%%ranks 3\nworld",
    "interrupt": "def long():\n    import time\n    time.sleep(100)\nranks.run(long)",
    "after": "ranks.run(lambda: dist.get_world_size())",
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        mark = processes.mark(patch)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        cells = [{"cell_type": "code", "source": s, "metadata": {}} for s in CELLS.values()]
        with Session(cells, tmp_path_factory.mktemp("nb"), timeout=30) as session:
            found = {}
            for i, name in enumerate(CELLS):
                if name == "interrupt":
                    session._watch.timeout = 0.5
                found[name] = session.execute(i)
                session._watch.timeout = 30
            found["processes"] = len([p for p in processes.of(mark) if "nursery" in " ".join(p.cmdline())])
        # The kernel was killed, as a restart may do.
        assert processes.none_left(mark) == []
        yield found


def shown(ran):
    "What a cell's exception shows."
    (error,) = (o for o in ran.outputs if o["output_type"] == "error")
    return "\n".join(error["traceback"])


def test_cells_are_executed_on_all_ranks(ran):
    assert ran["cell"].stdout == (
        "rank 0: on 0\nrank 0: tensor([1., 1.])\nrank 1: on 1\nrank 1: tensor([1., 1.])\n"
    )
    assert ran["again"].stdout == "rank 0: tensor([2., 2.])\nrank 1: tensor([2., 2.])\n"


def test_functions_of_cells_are_called_on_all_ranks(ran):
    assert ran["run"].outputs[-1]["data"]["text/plain"] == "[15, 16]"


def test_exceptions_are_shown_as_the_rank_had_them(ran):
    assert ran["raise"].ename == "RankFailed"
    lines = shown(ran["raise"]).splitlines()
    assert lines[0] == "rank 1 of 2 raised ValueError: bad shape"
    assert lines[2:5] == [
        "Traceback (most recent call last):",
        "  File Cell In[6], line 4, in bad",
        "    raise ValueError('bad shape')",
    ]
    assert shown(ran["raise in a cell"]).startswith(
        "rank 1 of 2 raised ZeroDivisionError: division by zero\n"
    )
    assert "    1 / 0" in shown(ran["raise in a cell"])


def test_time_outs_are_shown_with_the_cell_and_line(ran):
    text = shown(ran["hang"])
    assert text.startswith("ranks 0 and 1 of 2 did not finish hang within 0.7 s: ")
    assert "ranks 0 and 1 are in recv, line 2 of hang (Cell In[8]): " in text
    assert "dist.recv(torch.ones(1), 1 - dist.get_rank())" in text


def test_options_of_the_magic(ran):
    assert shown(ran["bad option"]) == (
        "%%ranks: argument n: invalid int value: 'four'; write for example `%%ranks 4 --timeout 30`"
    )
    assert ran["resize"].stdout.splitlines()[0] == "2 ranks stopped: 3 were asked for."
    assert ran["resize"].stdout.splitlines()[-1] == "rank 2: 3"


def test_an_interrupt_reaches_the_ranks(ran):
    assert ran["interrupt"].stopped and ran["interrupt"].alive
    assert "rank 2 was at line 3 of long (Cell In[11]): time.sleep(100)" in shown(ran["interrupt"])
    assert ran["after"].outputs[-1]["data"]["text/plain"] == "[3, 3, 3]"
    assert ran["processes"] == 4
