"What `watch` counts and finds, and Triton's interpreter with its faults mended."

import contextlib
import importlib.util

import pytest
import torch

from course_lib import kernels  # before Triton: it chooses the interpreter

pytest.importorskip("triton")

import triton
import triton.language as tl

from course_lib.kernels import interpret, softmax
from course_lib.kernels.watch import Access, watch


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + at, mask=at < n), tl.load(y_ptr + at, mask=at < n)
    tl.store(out_ptr + at, x + y, mask=at < n)


def add(x, y, block=16):
    out, n = torch.empty_like(x), x.numel()
    add_kernel[(triton.cdiv(n, block),)](x, y, out, n, BLOCK=block)
    return out


@triton.jit
def copy_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr, MASKED: tl.constexpr, OTHER: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if OTHER:  # noqa: SIM108 (the compiler leaves one branch out)
        x = tl.load(x_ptr + at, mask=at < n, other=0)
    else:
        x = tl.load(x_ptr + at, mask=at < n)
    if MASKED:
        tl.store(out_ptr + at, x, mask=at < n)
    else:
        tl.store(out_ptr + at, x)


@triton.jit
def total_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr, HOW: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.sum(tl.load(x_ptr + at, mask=at < n, other=0.0), axis=0)
    if HOW == "atomic":
        tl.atomic_add(out_ptr, total)
    elif HOW == "store":
        tl.store(out_ptr, total)
    else:
        tl.store(out_ptr, tl.load(out_ptr) + total)


@triton.jit
def shift_kernel(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at + 1, tl.load(x_ptr + at, mask=at < n - 1), mask=at < n - 1)


@triton.jit
def stray_kernel(x_ptr, where):
    tl.atomic_add(x_ptr + where + tl.arange(0, 1), 1.0)


@triton.jit
def multiply_kernel(a_ptr, b_ptr, c_ptr, sum_ptr, N: tl.constexpr):
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    a, b = tl.load(a_ptr + i * N + j), tl.load(b_ptr + i * N + j)
    tl.store(c_ptr + i * N + j, tl.dot(a, b))
    tl.store(sum_ptr + i * N + j, a + b * b)


def copied(n, block, masked=True, other=False, dtype=torch.float32):
    x = torch.randn(n).to(dtype)
    out = torch.zeros(n, dtype=dtype)
    with watch() as w:
        copy_kernel[(triton.cdiv(n, block),)](x, out, n, BLOCK=block, MASKED=masked, OTHER=other)
    return w, x, out


def test_lanes_are_counted():
    w, x, out = copied(19, 8)
    assert w.loads["x_ptr"] == Access(elements=19, bytes=76, masked=5, most=1, fewest=1)
    assert w.stores["out_ptr"] == w.loads["x_ptr"]
    assert w.loads["out_ptr"] == w.stores["x_ptr"] == Access(0, 0, 0, 0, 0)
    assert w.launches[0].programs == 3 and w.races == w.outside == []
    assert torch.equal(x, out)


def test_launches_add_up():
    x, y = torch.randn(2, 30)
    with watch() as w:
        add(x, y, block=8)
        add(x, x, block=16)
    assert [launch.fn.__name__ for launch in w.launches] == ["add_kernel"] * 2
    # In the second launch both arguments are the same memory.
    assert w.loads["x_ptr"].most == 3 and w.stores["out_ptr"].elements == 60
    assert [launch.programs for launch in w.launches] == [4, 2]


def test_a_view_counts_as_its_elements():
    x = torch.randn(40)[3:30]
    with watch() as w:
        out = add(x, x, block=16)
    assert torch.equal(out, x + x) and w.loads["x_ptr"].most == 2 and w.outside == []


def test_a_store_past_the_end_is_told_and_not_done():
    w, x, out = copied(19, 8, masked=False, other=True)
    assert torch.equal(x, out) and len(w.outside) == 1 and w.races == []
    assert w.outside[0][:5] == ("outside", "out_ptr", (19,), (2,), 5)
    assert str(w.outside[0]).startswith("program 2 stores to out_ptr + 19, which is no element")


def test_an_atomic_past_the_end_is_told():
    x = torch.zeros(4)
    with watch() as w:
        stray_kernel[(1,)](x, 2)
        stray_kernel[(2,)](x, 4)
    assert x.tolist() == [0, 0, 1, 0]
    assert "program 0 changes x_ptr + 4" in str(w.outside[0]) and w.outside[0].count == 2


@pytest.mark.parametrize("how, kinds", [("atomic", []), ("store", ["store/store"]),
                                        ("both", ["load/store", "store/store"])])  # fmt: skip
def test_races(how, kinds):
    x, out = torch.ones(40), torch.zeros(1)
    with watch() as w:
        total_kernel[(5,)](x, out, 40, BLOCK=8, HOW=how)
    assert sorted(f.kind for f in w.races) == kinds
    if how == "atomic":
        assert out == 40 and w.atomics["out_ptr"].most == 5
    for fault in w.races:
        assert fault.argument == "out_ptr" and fault.where == (0,) and "a race" in str(fault)


def test_a_race_of_one_programs_loads_with_anothers_stores():
    with watch() as w:
        shift_kernel[(3,)](torch.randn(24), 24, BLOCK=8)
    assert [f.kind for f in w.races] == ["load/store"]
    assert w.races[0].where == (8,) and w.races[0].programs == (0, 1)
    with watch() as w:
        shift_kernel[(1,)](torch.randn(24), 24, BLOCK=32)  # one program: in order
    assert w.races == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_masked_lanes_without_other_are_undefined(dtype):
    out = torch.zeros(8, dtype=dtype)
    with watch() as w:
        copy_kernel[(1,)](torch.ones(2, dtype=dtype), out[:8], 2, BLOCK=8, MASKED=False, OTHER=False)
    assert w.outside == [] and out[:2].tolist() == [1, 1]
    assert out.isnan().sum() == 2 and out.isinf().sum() == 4


def test_memory_that_nobody_stored_is_nan_inside():
    before = torch.are_deterministic_algorithms_enabled()
    with watch():
        assert torch.empty(5).isnan().all() and torch.empty_like(torch.ones(2)).isnan().all()
    assert torch.are_deterministic_algorithms_enabled() == before


def test_a_watch_inside_a_watch_has_its_launches_alone():
    x = torch.randn(5)
    with watch() as outer:
        add(x, x)
        with watch() as inner:
            add(x, x)
        add(x, x)
    assert len(inner.launches) == 1 and len(outer.launches) == 2
    assert inner.outside == outer.outside == [] and outer.loads["x_ptr"].most == 4


def test_after_an_exception_all_is_as_it_was():
    owners = (*interpret.LANGUAGE, *interpret.RUNTIME)
    before = [dict(vars(owner)) for owner in owners]
    with pytest.raises(KeyError, match="takes no such"), watch() as w:
        raise KeyError("takes no such")
    assert w.launches == [] and [dict(vars(owner)) for owner in owners] == before
    if kernels.interpreted():  # and kernels run
        assert torch.equal(add(torch.ones(3), torch.ones(3)), torch.full((3,), 2.0))


def test_without_triton_it_is_one_sentence(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(kernels.KernelError, match=r"^Triton isn't installed here .* run this"), watch():
        pass


@triton.autotune([triton.Config({"BLOCK": 8}), triton.Config({"BLOCK": 16}, num_warps=2)], key=["n"])
@triton.jit
def tuned_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    tl.store(out_ptr + at, x - x.sum(axis=0), mask=at < n)


@pytest.mark.parametrize("inside", [True, False])
def test_autotune_takes_its_first_configuration_where_there_is_no_gpu(inside):
    if not (inside or kernels.interpreted()):
        pytest.skip("kernels are compiled here")
    x, out = torch.ones(16), torch.empty(16)
    with watch() if inside else contextlib.nullcontext():
        tuned_kernel[lambda c: (triton.cdiv(16, c["BLOCK"]),)](x, out, 16)
        assert torch.equal(softmax.softmax(x), torch.full((16,), 1 / 16))
    assert torch.equal(out, torch.full((16,), -7.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_interpreter_computes_in_16_bits_as_a_gpu_does(dtype):
    a, b = (torch.randn(16, 16).to(dtype) for _ in range(2))
    c, total = torch.zeros(16, 16), torch.zeros(16, 16, dtype=dtype)
    with watch():
        multiply_kernel[(1,)](a, b, c, total, N=16)
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(total, a + b * b)


def test_numbers_become_bfloat16_as_torch_makes_them():
    x, out = torch.tensor([1.00390625, -3.1, 1e30, float("inf"), 7.0, 300.3]), torch.empty(8).bfloat16()
    with watch():
        copy_kernel[(1,)](x, out[:6], 6, BLOCK=8, MASKED=True, OTHER=True)
        copy_kernel[(1,)](torch.tensor([3, 301]), out[6:], 2, BLOCK=8, MASKED=True, OTHER=True)
    assert torch.equal(out, torch.cat([x, torch.tensor([3.0, 301.0])]).bfloat16())
