"The search, the configurations without a search, and what launchers share."

import math

import pytest
import torch

from course_lib import kernels  # before Triton, which asks only once whether to interpret

pytest.importorskip("triton")

from course_lib.kernels import launch, matmul, rmsnorm, softmax, tune, xent

SPACE = {"block": [16, 32], "warps": [4, 8], "group": [1]}
needs_interpreter = pytest.mark.skipif(not kernels.interpreted(), reason="a GPU times what is searched")


def found():
    seconds = {(16, 4): 4e-3, (16, 8): 3e-3, (32, 4): 2e-3, (32, 8): None}
    trials = []
    for c in tune.configurations(SPACE):
        took = seconds[c["block"], c["warps"]]
        trials.append(tune.Trial(c, took, None if took else "out of resources"))
    return tune.Map(SPACE, trials)


def test_a_space_is_every_combination():
    assert len(tune.configurations(SPACE)) == 4
    assert tune.configurations(SPACE)[1] == {"block": 16, "warps": 8, "group": 1}
    assert tune.configurations([{"block": 3}]) == [{"block": 3}]


def test_the_best_and_the_table():
    m = found()
    assert m.best == {"block": 32, "warps": 4, "group": 1}
    assert [t.seconds for t in m.ranked()] == [2e-3, 3e-3, 4e-3]
    table = m.table("block", "warps")
    assert table[:, 0].tolist() == [4e-3, 2e-3] and math.isnan(table[1, 1])
    assert m.table("group", "block").tolist() == [[3e-3, 2e-3]]  # the best over warps


@needs_interpreter
def test_the_interpreter_times_nothing():
    ran, told = [], []
    m = tune.search(lambda **c: ran.append(c), SPACE, report=told.append)
    assert ran == [] and [t.seconds for t in m.trials] == [None] and told == m.trials
    assert m.best == tune.configurations(SPACE)[0] and m.ranked() == []


def test_what_was_remembered_is_used_and_what_is_given_wins(monkeypatch):
    monkeypatch.setattr(tune, "_best", {})
    default = {"rows": 1, "warps": 4}
    assert tune.settle("k", (3, 5), default, {"rows": None, "warps": 8}) == {"rows": 1, "warps": 8}
    tune.remember("k", (3, 5), {"rows": 2, "warps": 2})
    assert tune.settle("k", (3, 5), default, {"rows": None, "warps": None}) == {"rows": 2, "warps": 2}
    assert tune.settle("k", (3, 5), default, {"rows": 8, "warps": None}) == {"rows": 8, "warps": 2}
    assert tune.settle("k", (5, 3), default, {}) == default and tune.recall("k", (5, 3)) is None


def test_a_kernel_takes_what_was_remembered_for_its_shape(monkeypatch):
    from course_lib.kernels import access

    monkeypatch.setattr(tune, "_best", {})
    x = torch.randn(8, 5)
    tune.remember("softmax", softmax.key(x), softmax.default(8, 5) | {"rows": 4})
    with access.watch() as w:
        softmax.softmax(x)
        softmax.softmax(x[:7])
    assert [launched.programs for launched in w.launches] == [2, 7]


# --- configurations without a search ------------------------------------------------


def is_power_of_two(n):
    return n > 0 and n & (n - 1) == 0


@pytest.mark.parametrize("columns", [1, 5, 128, 1000, 1025, 4096, 8192, 16384, 65536])
@pytest.mark.parametrize("rows", [1, 100, 16384, 2**21])
def test_row_tiles(rows, columns):
    block = 2 ** math.ceil(math.log2(columns))
    for c, largest in [(softmax.default(rows, columns), 8192), (rmsnorm.default(rows, columns), 4096)]:
        assert is_power_of_two(c["rows"]) and is_power_of_two(c["warps"]) and c["warps"] <= 32
        assert c["rows"] * block <= max(largest, block)
        # Small batches are spread over programs, and not gathered in a few.
        assert c["rows"] == 1 or math.ceil(rows / c["rows"]) >= 256
    for itemsize in (2, 4):
        c = rmsnorm.default_backward(rows, columns, itemsize, shared=101_376)  # a small GPU's
        assert is_power_of_two(c["rows"]) and is_power_of_two(c["warps"]) and c["programs"] == 1
        held = c["stages"] * 2 * c["rows"] * block * itemsize
        assert c["stages"] == 1 or held < 101_376


SHAPES = [(8192, 8192, 8192), (4096, 4096, 4096), (1024, 1024, 16384), (4095, 4097, 4093), (1, 1, 1),
          (333, 4097, 2049), (128, 4096, 4096), (4096, 1, 4096), (17, 9**5, 64), (2**20, 16, 16)]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_matmul_tiles(shape, dtype, monkeypatch):
    monkeypatch.setattr(matmul, "interpreted", lambda: False)
    matmul.default.cache_clear()
    m, n, k = shape
    for multiprocessors in (20, 132):
        c = matmul.default(m, n, k, dtype, multiprocessors)
        assert all(is_power_of_two(size) and size >= 16 for size in (c.bm, c.bn, c.bk))
        assert is_power_of_two(c.warps) and c.group >= 1
        assert c.split == 1 or k // c.split >= 512
        held = c.stages * (c.bm + c.bn) * c.bk * dtype.itemsize
        assert c.programs * held < launch.SHARED
    matmul.default.cache_clear()


def test_matmul_splits_only_where_multiprocessors_would_be_idle(monkeypatch):
    monkeypatch.setattr(matmul, "interpreted", lambda: False)
    matmul.default.cache_clear()
    assert matmul.default(8192, 8192, 8192, torch.bfloat16, 132).split == 1
    assert matmul.default(128, 256, 16384, torch.bfloat16, 132).split > 1
    matmul.default.cache_clear()


def test_spaces_hold_what_can_run():
    for c in softmax.space(512, 4096) + rmsnorm.space_backward(512, 4096):
        assert set(c) == {"rows", "warps", "stages", "programs", "evict"}
    for c in matmul.space(512, 4096, 4096) + matmul.space_large():
        matmul.Config(**c)


# --- what launchers share -----------------------------------------------------------


@pytest.mark.parametrize(
    "tiles, programs", [(16384, 264), (5, 132), (132, 132), (133, 132), (1, 1), (1000, 7)]
)
def test_balanced_programs_take_no_more_rounds(tiles, programs):
    few = launch.balanced(tiles, programs)
    assert 1 <= few <= min(tiles, programs)
    rounds = math.ceil(tiles / min(tiles, programs))
    assert math.ceil(tiles / few) == rounds and few * rounds - tiles < rounds


def test_rows_and_reach():
    x = torch.randn(2, 3, 4)
    assert launch.as_rows(x).shape == (6, 4) and launch.as_rows(x).data_ptr() == x.data_ptr()
    assert launch.as_rows(torch.empty(2, 0)).shape == (0, 0)
    assert launch.reach(x) == 24 and launch.reach(x[:, :, ::3]) == 24 and launch.reach(x[:1, :1, :1]) == 1
    assert launch.reach(torch.zeros(1).expand(5, 5)) == 1
    assert launch.evictions("loads") == {"LOADS": "evict_first", "STORES": ""}
    assert launch.short(torch.bfloat16) == "bfloat16"


def test_bytes_and_places_on_the_roofline():
    bf16 = torch.bfloat16
    assert softmax.bytes_moved(16384, 4096, bf16) == 4 * 16384 * 4096
    assert softmax.intensity(16384, 4096, bf16) == 1.25
    assert matmul.intensity(8192, 8192, 8192, bf16) == pytest.approx(8192 / 3)
    assert rmsnorm.intensity(16384, 4096, bf16) == pytest.approx(1, rel=1e-2)
    assert rmsnorm.intensity_backward(16384, 4096, bf16) == pytest.approx(4 / 3, rel=1e-2)
    assert xent.bytes_moved(8, 1000, bf16, backward=False) == 16000 + 8 * 16
