"Kernels are compiled for an H200 here, without one, and what the compiler refuses is said in one sentence."

import re
import subprocess

import pytest
import torch

from course_lib import kernels  # before Triton: it chooses the interpreter

pytest.importorskip("triton")

import triton
import triton.language as tl

from course_lib.kernels import compiled, interpret, matmul, rmsnorm, softmax

LOWEST = -float("inf")
LOWEST_CONSTANT = tl.constexpr(-float("inf"))


def python_helper(x):
    return x * 2


@triton.jit
def helper(x):
    return inner(x) / x.sum(axis=0)


@triton.jit
def inner(x):
    return tl.exp(x - tl.max(x, axis=0))


@triton.jit
def mistaken_helper(x):
    return x.no_such_method()


@triton.jit
def right(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, helper(tl.load(x_ptr + at, mask=at < n, other=LOWEST_CONSTANT)), mask=at < n)


@triton.jit
def global_other(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at, mask=at < n, other=LOWEST), mask=at < n)


@triton.jit
def plain_helper(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, python_helper(tl.load(x_ptr + at)))


@triton.jit
def torchs_function(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, torch.exp(tl.load(x_ptr + at)))


@triton.jit
def tries(x_ptr, n, BLOCK: tl.constexpr):
    try:
        tl.store(x_ptr, 1.0)
    finally:
        tl.store(x_ptr, 2.0)


@triton.jit
def no_constant(x_ptr, n, BLOCK):
    tl.store(x_ptr + tl.arange(0, BLOCK), 1.0)


@triton.jit
def mistake_in_a_helper(x_ptr, n, BLOCK: tl.constexpr):
    tl.store(x_ptr, mistaken_helper(tl.load(x_ptr)))


def refusal(kernel):
    return compiled.refusal(kernel, {"x_ptr": torch.ones(5), "n": 5, "BLOCK": 8})


def test_what_is_right_compiles_and_runs_afterwards():
    before = [dict(vars(owner)) for owner in interpret.LANGUAGE]
    assert refusal(right) is None
    assert [dict(vars(owner)) for owner in interpret.LANGUAGE] == before
    assert isinstance(helper, type(right)) and isinstance(inner, type(right))
    if kernels.interpreted():
        x = torch.rand(8)
        want = torch.exp(x - x.max()) / x.sum()
        right[(1,)](x, 8, BLOCK=8)
        torch.testing.assert_close(x, want)


@pytest.mark.parametrize("kernel, line, reason", [
    (global_other, "tl.store(x_ptr + at, tl.load(", "LOWEST is outside Triton"),
    (plain_helper, "python_helper(tl.load(x_ptr + at)", "python_helper is outside Triton: put"),
    (torchs_function, "torch.exp(tl.load(x_ptr + at)", "exp is outside Triton"),
    (tries, "`try:`", "unsupported AST node type: Try"),
    (no_constant, "tl.arange(0, BLOCK)", "constexpr"),
    (mistake_in_a_helper, "return x.no_such_method()", "no_such_method"),
])  # fmt: skip
def test_what_only_the_interpreter_runs_is_refused(kernel, line, reason):
    said = refusal(kernel)
    assert said.startswith("the compiler for a GPU refuses it at `") and line in said and reason in said
    assert "\n" not in said and len(said) < 350


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernels_of_the_library_compile(dtype):
    x, wide = torch.ones(1, dtype=dtype), torch.ones(1)
    pointers = {"weight_ptr": x, "y_ptr": x, "rstd_ptr": wide, "partial_ptr": wide, "dx_ptr": x, "dy_ptr": x}
    pointers |= {"x_ptr": x, "out_ptr": x, "a_ptr": x, "b_ptr": x, "c_ptr": x, "eps": 1e-6}
    constants = {"ROWS": 2, "BLOCK": 64, "STAGES": 2, "PARTS": 4, "PRECISION": "ieee", "BM": 32, "BN": 32}
    constants |= {"BK": 32, "GROUP": 8}
    found = [softmax.softmax_kernel, rmsnorm.forward_kernel, rmsnorm.backward_kernel]
    found += [rmsnorm.sum_parts_kernel, matmul.matmul_kernel]
    for kernel in found:
        for on in (True, False):  # LONG, EVEN and their like
            given = {n: pointers.get(n, constants.get(n, on if n.isupper() else 7)) for n in kernel.arg_names}
            assert compiled.refusal(kernel, given) is None


@triton.jit
def product(a_ptr, out_ptr, SIDE: tl.constexpr):
    at = tl.arange(0, 128)[:, None] * 128 + tl.arange(0, 128)[None, :]
    total = tl.zeros((128, 128), tl.float32)
    for start in range(SIDE):
        a = tl.load(a_ptr + start * 128 * 128 + at)
        total = tl.dot(a, tl.trans(a), total)
    tl.store(out_ptr + at, total)


def test_resources_are_those_that_cuobjdump_reads(tmp_path, monkeypatch):
    original, made = triton.compile, []
    monkeypatch.setattr(triton, "compile", lambda *args, **kw: made.append(original(*args, **kw)) or made[-1])
    given = {"a_ptr": torch.empty(2, dtype=torch.bfloat16), "out_ptr": torch.empty(2), "SIDE": 8}
    found = {}
    for limit in (None, 128):
        found[limit] = compiled.resources(product, given, num_warps=4, num_stages=3, maxnreg=limit)
        code = tmp_path / "code.cubin"
        code.write_bytes(made[-1].asm["cubin"])
        tool = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", code]
        said = subprocess.run(tool, capture_output=True, text=True).stdout
        want = [int(re.search(rf"{word}:(\d+)", said)[1]) for word in ("REG", "STACK")]
        assert [*found[limit][:2]] == want
    assert found[None][0] > 128 >= found[128][0]
    assert found[None][1] == 0 < found[128][1]
    assert found[None][2] - 1024 == 3 * 128 * 128 * 2  # three stages of a
