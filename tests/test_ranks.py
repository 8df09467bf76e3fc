"Ranks that work: results, output, functions of a notebook, cells, what is refused before anything starts."

import os
import random
import subprocess
import sys

import numpy
import pytest
import ranks_processes as processes
import ranks_programs as programs
import torch
import torch.distributed as dist

from course_lib import machine
from course_lib.authoring import notebook
from course_lib.parallel import ranks, room, wire


@pytest.fixture(scope="module", autouse=True)
def marked():
    with pytest.MonkeyPatch.context() as patch:
        mark = processes.mark(patch)
        yield mark
        ranks.stop()
        assert processes.none_left(mark) == []


@pytest.fixture(scope="module")
def group(marked):
    return ranks.start(3, backend="gloo", quiet=True)


def test_results_come_by_rank(group, capsys):
    assert group.run(programs.add, x=2) == [9.0, 9.0, 9.0]
    assert capsys.readouterr().out == "".join(f"rank {r}: rank {r} of 3\n" for r in range(3))
    assert ranks.run(programs.rank) == [0, 1, 2]
    assert group.run(programs.add, 2, show=False) == [9.0] * 3
    assert capsys.readouterr().out == "" and group.output[1] == "rank 1 of 3\n"


def test_output_of_stderr_and_of_compiled_code_is_shown_too(group):
    def both():
        print("to stderr", file=sys.stderr)
        os.write(1, b"by the system\n")

    group.run(both, show=False)
    assert group.output == ["by the system\nto stderr\n"] * 3


def test_much_output_is_cut(group):
    def much():
        print("x" * 3_000_000)

    group.run(much, show=False)
    assert all(len(text) < 1_100_000 and "2,000,001 bytes more" in text for text in group.output)


def test_functions_of_a_notebook(group):
    k = 3
    source = "def helper(x):\n    return x * k\n"
    source += "def fn(x):\n    return helper(x) + dist.get_rank(), ranks.__name__\n"
    space = {"__name__": "__main__", "k": k, "dist": dist, "ranks": ranks}
    exec(source, space)
    assert group.run(space["fn"], 5) == [(15 + r, "course_lib.parallel.ranks") for r in range(3)]
    assert group.run(lambda: k + 1) == [4, 4, 4]


def test_tensors_come_back_plain(group):
    def make():
        x = torch.arange(6.0, requires_grad=True)
        return {
            "grad": x * 2,
            "view": x.detach()[1:3],
            "parameter": torch.nn.Parameter(torch.ones(2)),
            "n": None,
        }

    for got in group.run(make):
        assert not got["grad"].requires_grad and got["grad"].tolist() == [0, 2, 4, 6, 8, 10]
        assert got["view"].tolist() == [1, 2] and got["view"].untyped_storage().nbytes() == 8
        assert got["parameter"].tolist() == [1, 1]


def test_each_rank_has_its_seed_threads_and_device(group):
    def state():
        drawn = torch.rand(1).item(), random.random(), numpy.random.rand()
        return drawn, torch.get_num_threads(), str(machine.device()), os.environ["LOCAL_RANK"]

    with ranks(2, seed=7, backend="gloo") as one, ranks(2, seed=7, backend="gloo") as other:
        first, again = one.run(state), other.run(state)
    assert first == again
    assert all(a != b for a, b in zip(first[0][0], first[1][0], strict=True))
    assert [s[1:] for s in first] == [(max(1, machine.cores() // 2), "cpu", str(r)) for r in range(2)]


def test_cells_keep_their_variables_and_show_their_last_line(group, capsys):
    group.put(scale=10)
    group.execute("x = torch.ones(2) * scale * rank\ndist.all_reduce(x)\nx")
    assert capsys.readouterr().out == "".join(f"rank {r}: tensor([30., 30.])\n" for r in range(3))
    group.execute("x + 1;")
    assert capsys.readouterr().out == ""
    assert [x.tolist() for x in group.get("x")] == [[30, 30]] * 3
    with pytest.raises(ranks.RankFailed, match=r"rank 0 of 3 raised NameError: .*\n"):
        group.get("nothing")
    assert len(group.get("x")) == 3  # an exception costs no variable


def test_one_group_serves_a_lesson(group):
    assert ranks.start(3, backend="gloo") is group and ranks.current() is group
    pids = group.pids
    with ranks(3, backend="gloo", timeout=7) as same:
        assert same is group and group.timeout == 7
    assert group.timeout == 60
    assert group.run(programs.rank) == [0, 1, 2] and group.pids == pids


def test_another_size_beside_it(group, marked):
    before = len(processes.of(marked))
    with ranks(2, backend="gloo") as two:
        assert two.run(programs.add) == [3.0, 3.0]
        assert len(processes.of(marked)) == before + 2
        assert group.run(programs.rank) == [0, 1, 2]
    assert group.run(programs.rank) == [0, 1, 2]
    with pytest.raises(ranks.RankError, match="were stopped"):
        two.run(programs.rank)


def test_a_fresh_process_group_has_no_old_messages(group):
    def send_too_much():
        if dist.get_rank() == 0:
            dist.isend(torch.full((1,), 99.0), 1)

    def send():
        x = torch.zeros(1)
        if dist.get_rank() == 0:
            dist.send(torch.full((1,), 1.0), 1)
        elif dist.get_rank() == 1:
            dist.recv(x, 0)
        return x.item()

    group.run(send_too_much)
    group.reset()
    assert group.run(send)[1] == 1.0


def test_ranks_cannot_start_ranks(group):
    with pytest.raises(ranks.RankFailed, match="runs on rank 0 of 3 already"):
        group.run(lambda: ranks.start(2))


@pytest.mark.parametrize(
    "n, says",
    [
        (0, "must be 1 or more, and was 0"), (-2, "must be 1 or more, and was -2"),
        (2.0, "must be a whole number, and was 2.0"), ("4", "must be a whole number, and was '4'"),
        (True, "must be a whole number, and was True"),
        (100_000, r"may need .* GB are free: start \d+ at most"),
    ],
)  # fmt: skip
def test_numbers_of_ranks_that_cannot_be(group, n, says):
    with pytest.raises(ValueError, match=says) as caught:
        ranks.start(n, backend="gloo")
    assert "\n" not in str(caught.value)
    assert group.run(programs.rank) == [0, 1, 2]  # those that ran are kept


@pytest.mark.parametrize(
    "options, says",
    [
        ({"backend": "mpi"}, "must be 'gloo' or 'nccl', and was 'mpi'"),
        ({"backend": "nccl"}, "NCCL wants a GPU for each of 3000 ranks"),
        ({"timeout": 0}, "positive number of seconds"), ({"timeout": "9"}, "positive number of seconds"),
        ({"seed": -1}, "whole number from 0"), ({"preload": [3]}, "names of modules"),
    ],
)  # fmt: skip
def test_options_that_cannot_be(options, says):
    with pytest.raises(ValueError, match=says), ranks(3000, **options):
        pass


def test_preload(group):
    with ranks(2, backend="gloo", preload="wave") as two:
        assert two.run(lambda: "wave" in sys.modules) == [True, True]
    with pytest.raises(ranks.RankError, match="ModuleNotFoundError: No module named 'no_such'"):
        ranks(2, backend="gloo", preload=["no_such"]).__enter__()


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda g: g.run(3), "pass the function itself"),
        (lambda g: g.run(programs.add, (x for x in "abc")), "can't be sent to the ranks"),
        (lambda g: g.run(programs.add, timeout=-1), "positive number of seconds"),
    ],
)
def test_calls_that_cannot_be(group, call, says):
    with pytest.raises((TypeError, ValueError), match=says):
        call(group)


def test_results_that_cannot_be_sent(group):
    with pytest.raises(ranks.RankFailed, match="the result, a generator, can't be sent") as caught:
        group.run(lambda: (x for x in "abc"))
    assert isinstance(caught.value.__cause__, TypeError)


def test_split():
    assert ranks.split(12, 4) == 3 and ranks.split(12, 4, 1) == slice(3, 6)
    with pytest.raises(
        ValueError, match="10 can't be split evenly over 4 ranks: 2 would be left over; take 8 or 12"
    ):
        ranks.split(10, 4)
    with pytest.raises(ValueError, match=r"3 would be left over; take 4$"):
        ranks.split(3, 4)


def test_the_reason_for_gloo_is_told_once(monkeypatch, capsys):
    class Fake:
        gpus, world = 1, 4

    monkeypatch.setattr(ranks, "_told", set())
    ranks._tell_why_gloo(Fake, None)
    ranks._tell_why_gloo(Fake, None)
    assert capsys.readouterr().out == (
        "one GPU is here for 4 ranks and NCCL wants one each: they use the CPU, with Gloo.\n"
    )
    ranks._tell_why_gloo(Fake, "gloo")
    assert capsys.readouterr().out == ""


def test_backends():
    assert room.backend(None, 2, 2) in ("nccl", "gloo")
    assert room.backend(None, 2, 1) == room.backend(None, 2, 0) == room.backend("gloo", 2, 8) == "gloo"


def test_memory_is_what_the_control_group_leaves(tmp_path):
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 300000\n")
    assert room.available(tmp_path) == 400_000
    (tmp_path / "memory.max").write_text("max\n")
    assert room.available(tmp_path) > 1e7


def test_the_file_of_a_function_travels():
    space = {"__name__": "__main__"}
    exec(compile("def f():\n    return 1", "<a cell>", "exec"), space)
    import pickle

    assert pickle.loads(wire.pack(space["f"])).__code__.co_filename == "<a cell>"


def test_folders_of_notebooks_that_were_killed_are_removed(tmp_path, monkeypatch):
    from course_lib.parallel import nurseries

    monkeypatch.setattr(nurseries.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(nurseries, "_lock", None)
    left, being_made = tmp_path / "course-ranks-1", tmp_path / "course-ranks-2"
    left.mkdir()
    being_made.mkdir()
    (left / "lock").touch()
    (left / "store").touch()
    first = nurseries._new_folder()
    held = nurseries._lock
    second = nurseries._new_folder()
    names = {str(p) for p in tmp_path.iterdir()}
    assert names == {first, second, str(being_made)} and not held.closed


def test_ranks_without_forks(marked):
    "As on macOS: each rank imports PyTorch for itself."
    code = """
from course_lib.parallel import ranks
with ranks(2, backend="gloo") as group:
    group.execute("x = torch.ones(1) * (rank + 1); dist.all_reduce(x); print(x.item())")
    try:
        group.execute("import os; os._exit(3) if rank else dist.barrier()")
    except ranks.RankDied as e:
        print(e.rank, e.code)
    print(len(set(group.get("rank"))))
"""
    env = {**os.environ, "COURSE_RANKS_FORK": "0", "PYTHONPATH": str(notebook.ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["rank 0: 3.0", "rank 1: 3.0", "1 3", "2"], done.stderr
