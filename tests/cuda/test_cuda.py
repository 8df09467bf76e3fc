"Lesson cuda beside its checks: kernels on a CPU, what they say where they fail, the model, the figures."

import re

import matplotlib
import pytest
import torch

from course_lib import checking as core
from course_lib import cuda, show
from course_lib.cuda import Kernel, KernelError, check, figures, kernel, solutions


def source(body, head="int n, const float* x, float* y", before=""):
    return f'{before}\nextern "C" __global__ void k({head}) {{\n    int t = threadIdx.x;\n{body}\n}}\n'


def error(text, *args, grid=1, block=32):
    with pytest.raises(KernelError) as e:
        Kernel(text).count(grid, block, *args)
    assert e.value._render_traceback_() == [str(e.value)]
    return str(e.value)


def vectors(n=32):
    return n, torch.randn(n), torch.zeros(n)


def test_places_of_threads_in_three_dimensions():
    body = """int b = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    int i = t + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    y[b * blockDim.x * blockDim.y * blockDim.z + i] = 100 * b + i;"""
    n, x, y = vectors(2 * 3 * 2 * 24)
    Kernel(source(body))[(2, 3, 2), (4, 3, 2)](n, x, y)
    assert y.tolist() == [100 * b + i for b in range(12) for i in range(24)]


TYPES = {"double": torch.float64, "long long": torch.int64, "unsigned char": torch.uint8}


@pytest.mark.parametrize("name, dtype", TYPES.items())
def test_other_types(name, dtype):
    x, y = torch.arange(50).to(dtype), torch.zeros(50, dtype=dtype)
    Kernel(source("    if (t < 50) y[t] = x[t] + x[49 - t];", f"const {name}* x, {name}* y"))[1, 64](x, y)
    assert torch.equal(y, x + x.flip(0))


def test_a_tensor_that_is_given_twice_is_one():
    x = torch.arange(32.0)
    counts = Kernel(source("    y[t] = 2 * x[t];")).count(1, 32, 32, x, x)
    assert torch.equal(x, 2 * torch.arange(32.0)) and not counts.problems


def test_sectors_and_banks_of_wide_accesses():
    body = "    __shared__ float4 part[32];\n    part[t] = ((float4*)x)[t];\n    ((float4*)y)[t] = part[t];"
    n, x, y = vectors(128)
    counts = Kernel(source(body)).count(1, 32, n, x, y)
    assert torch.equal(x, y)
    loads, shared = counts.loads["x"], counts.stores["shared"]
    assert (loads.accesses, loads.requests, loads.sectors, loads.moved) == (32, 1, 16, 512)
    assert (shared.passes, shared.needed) == (4, 4)
    assert counts.sectors() == 32 and counts.passes() == 8


@pytest.mark.parametrize("stride, passes", [(1, 1), (2, 2), (3, 1), (16, 16), (32, 32), (0, 1)])
def test_bank_conflicts(stride, passes):
    body = f"    __shared__ float part[1024];\n    part[t * {stride}] = 1;"
    assert Kernel(source(body)).count(1, 32, *vectors()).stores["shared"].passes == passes


SHUFFLES = {
    "__shfl_down_sync(0xffffffff, v, 3)": lambda i: i + 3 if i + 3 < 32 else i,
    "__shfl_up_sync(0xffffffff, v, 3)": lambda i: i - 3 if i >= 3 else i,
    "__shfl_xor_sync(0xffffffff, v, 5)": lambda i: i ^ 5,
    "__shfl_sync(0xffffffff, v, 7)": lambda i: 7,
    "__shfl_down_sync(0xffffffff, v, 3, 8)": lambda i: i + 3 if i % 8 < 5 else i,
}


@pytest.mark.parametrize("call", SHUFFLES)
def test_shuffles(call):
    n, x, y = vectors(64)
    Kernel(source(f"    float v = x[t]; y[t] = {call};"))[1, 64](n, x, y)
    assert torch.equal(y, x[[i // 32 * 32 + SHUFFLES[call](i % 32) for i in range(64)]])


def test_a_race_needs_no_barrier_between():
    body = "    __shared__ float part[64];\n    part[t] = x[t];\n    BARRIER\n    y[t] = part[t ^ OTHER];"

    def problems(barrier, other):
        text = source(body.replace("BARRIER", barrier).replace("OTHER", other))
        return Kernel(text).count(1, 64, *vectors(64)).problems

    assert problems("__syncthreads();", "33") == [] == problems("__syncwarp();", "1") == problems("", "0")
    assert all("race on word" in p or "reads word" in p for p in problems("__syncwarp();", "32"))
    races = [p for p in problems("", "1") if "race" in p]
    assert races and all("`part[t] = x[t];`" in p and "no barrier is between (block 0)" in p for p in races)


def test_blocks_race_unless_they_add_atomically():
    text = source("    if (t == 0) ADD;")
    n, x, y = vectors()
    atomic = Kernel(text.replace("ADD", "atomicAdd(y, 1.0f)")).count(5, 32, n, x, y)
    assert y[0] == 5 and not atomic.problems and atomic.loads["y"].accesses == 5
    assert (
        "blocks run in any order"
        in Kernel(text.replace("ADD", "y[0] += 1")).count(5, 32, n, x, y).problems[0]
    )


@pytest.mark.parametrize("backwards", [False, True])
def test_a_race_is_seen_after_other_readers(backwards):
    apart = (
        "    if (t + blockIdx.x == 0) y[0] = y[64];\n    if (t == 0 && blockIdx.x == 1) y[64] = y[64] + 1;"
    )
    warps = """    __shared__ float s;
    if (t == 0) s = 1;
    __syncthreads();
    float v = s;
    if (t < 32) { __syncwarp(); if (t == 5) s = 2; }
    y[t] = v;"""
    for body in (apart, warps):
        counts = Kernel(source(body)).count(2, 64, *vectors(128), backwards=backwards)
        assert any("a race on" in p for p in counts.problems)


def test_names_of_cuda():
    body = """    __shared__ alignas(16) float part[32];
    __shared__ __align__(8) int hits;
    if (t == 0) hits = 0;
    part[t] = __fmaf_rn(2.0f, __ldg(x + t), __ldcs(&x[t]));
    bool any = __syncthreads_or(t == 31), all = __syncthreads_and(t < 32);
    atomicCAS(&hits, 0, t + 1);
    int below = __syncthreads_count(t < 7);
    double2 pair = make_double2(below, __popc(255) + __ffs(8) + __clz(1));
    y[t] = part[t] + any + all + float(pair.x + pair.y) + __int_as_float(__float_as_int(1.0f));"""
    n, x, y = vectors()
    assert not Kernel(source(body, "int n, const float x[], float y[]")).count(1, 32, n, x, y).problems
    torch.testing.assert_close(y, 3 * x + 2 + 7 + 43 + 1)


def test_the_most_that_one_thread_moves():
    counts = Kernel(source("    for (int i = 0; i < 9 && t == 3; i++) y[i] = x[i] + x[20];")).count(
        1, 32, *vectors()
    )
    assert counts.most == {("load", "x"): 72, ("store", "y"): 36}


def test_backwards_is_another_order():
    text = source("    y[0] = t + 100 * blockIdx.x;")
    for backwards, last in ((False, 131), (True, 0)):
        n, x, y = vectors()
        Kernel(text).count(2, 32, n, x, y, backwards=backwards)
        assert y[0] == last


SAID = {
    "    y[t + 1] = x[t];": "block 0 stores to y[32], and y has 32 elements: line 4, `y[t + 1] = x[t];`",
    "    y[t] = x[t - 1];": "thread 0 of block 0 loads x[-1], and x has 32 elements",
    "    y[t] = x[n << 20];": "loads an address, and it belongs to no tensor",
    "    __shared__ int part[31];\n    part[t] = t;": "stores to word 31 of part, and part has 31 words",
    "    if (t < 5) __syncthreads();": "at line 4, `if (t < 5) __syncthreads();`, and thread 5 has returned",
    "    if (t < 5) __syncwarp();\n    else __syncthreads();": "every lane that its mask names must reach it",
    "    y[t] = __shfl_down_sync(0xff, x[t], 1);": "isn't in the mask that it gives itself",
    "    ((float4*)y)[0] = *(float4*)(x + 1);": "access of 16 bytes at an address that is no multiple of 16",
    "    y[t] = z;": "the compiler refuses line 4, `y[t] = z;`:",
    "    while (n > 0) y[t] = x[t] + y[t];": "(does a loop never end?): line 4",
    "    y[t] = n / (n - 32);": "signal 8: a whole number is divided by zero",
    "    static float all;\n    all += x[t];\n    y[t] = all;": "all, and it is a static or global variable",
    "    if (t < 5) __syncthreads();\n    else\n    __syncthreads();": "must reach the same barrier",
    "    y[t] = __vadd2(1, 2);": "__vadd2 isn't known to the course's emulator (a GPU may know it)",
    "}\nint f(int i) { return i; }\n__device__ void g() {": "can't call a function without __device__",
    "    memset(y, 0, 4 * n);": "`memset`: the emulator can't count it",
    "    extern __shared__ float s[];": "no dynamic shared memory",
    "    y[t] = std::min(1, 2);": "NVRTC has no C++ headers",
    "}\n__global__ void second() {": "the source holds 2 kernels (k, second)",
}  # fmt: skip


@pytest.mark.parametrize("body", SAID)
def test_what_goes_wrong_is_one_sentence(body, monkeypatch):
    monkeypatch.setattr(kernel, "STEPS", 20_000)
    said = error(source(body), *vectors())
    assert SAID[body] in said and "\n" not in said


def test_a_loop_without_accesses_and_a_crash_end_the_child_alone(monkeypatch):
    monkeypatch.setattr(kernel, "SECONDS", 0.5)
    endless = error(source("    volatile int i = 0;\n    while (1) i++;"), *vectors())
    assert endless == "stopped after 0.5 s: does a loop never end?"
    body = "volatile int a[99]; a[1] = deep(p) + a[0]; return a[1];"
    deep = f"__device__ __noinline__ int deep(volatile int* p) {{ {body} }}"
    text = source("    int a[1]; y[0] = deep(a);", before=deep)
    assert "signal 11: look for endless recursion" in error(text, *vectors())


def test_arguments():
    text, (n, x, y) = source("    y[t] = x[t];"), vectors()
    assert error(text, n, x) == "k takes (n, x, y) and was given 2 arguments"
    assert error(text, x, x, y) == "k: the parameter `int n` was given a tensor"
    assert error(text, n, 1.0, y) == "k: the parameter `const float* x` was given float"
    assert "isn't contiguous" in error(text, n, torch.randn(8, 8).T, y)
    assert error(text, n, x.to("meta"), y) == "k: only kernels on CPU tensors are counted"
    assert "1 to 1,024 threads" in error(text, n, x, y, block=(33, 32))
    wide = "declare `long long n` as int, float or double"
    assert wide in error(source("    y[t] = n;", "long long n, float* y"), n, y)
    point = source("    y[t] = p.n;", "P p, float* y", before="struct P { int n; };")
    assert "its parameters must be pointers and numbers here" in error(point, 1, y)
    for given, said in (("int main() {}", "no `__global__ void name(…)`"), (source, "was given a function")):
        with pytest.raises(KernelError, match=re.escape(said)):
            Kernel(given)
    with pytest.raises(KernelError, match=re.escape("k[grid, block](…)")):
        Kernel(text)[32]


def test_without_a_compiler(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(KernelError, match=re.escape("install g++ (`apt install g++`")):
        cuda.compiler()


def test_errors_of_nvrtc():
    log = 'Kernel compilation failed:\nk.cu(2): error: identifier "z" is undefined\n  y[0] = z;\n'
    said = kernel.report.refusal("void k() {\n  y[0] = z;\n}", log)
    assert said == 'the compiler refuses line 2, `y[0] = z;`: identifier "z" is undefined'


def test_prints_of_a_kernel_are_shown(capsys):
    Kernel(source('    if (t == 1) printf("n is %d\\n", n);'))[1, 2](*vectors())
    assert capsys.readouterr().out == "n is 32\n"


def test_the_schedulers_model():
    assert [cuda.schedule(w, 40, 3)["busy"] == 1 for w in (10, 11)] == [False, True]
    for warps, latency, work in ((1, 9, 3), (3, 20, 1), (11, 40, 3), (16, 10, 8)):
        busy = cuda.schedule(warps, latency, work, 4000)["busy"]
        assert busy == pytest.approx(min(1, warps * (work + 1) / (latency + work + 1)), abs=0.05)


def test_the_lessons_shell(tmp_path):
    assert "isn't installed here" in cuda.shell("no-such-tool --version", tmp_path)
    assert cuda.shell("sleep 5", tmp_path, seconds=0.2) == "sleep was stopped after 0.2 s"
    assert cuda.shell("seq 5", tmp_path, most=2) == "1\n2\n… 3 more lines"


def test_figures_are_drawn():
    matplotlib.use("Agg")
    points = {"one": {4: 0.2, 64: 2.6}}
    bars = figures.draw_bars({"long": (4.0, 3.9, 4.1), "short": (0.4, 0.4, 0.4)}, roof=4.2)
    assert [t.get_color() for t in bars.axes[0].texts[:2]] == ["white", "black"]
    for fig in (bars, figures.draw_sectors({"rows": range(32)}), figures.view_schedule(cuda.schedule()),
                figures.draw_warps(points, points, 4.8), figures.draw_banks()):  # fmt: skip
        show.figure(fig)


def test_no_kernel_in_an_answer():
    for answer, said in ((lambda: 3, "expected text in CUDA C++"), (lambda: "int i;", "holds no `__global__"),
                         (solutions.scan_source, "takes (*x, *out, n); expected (n, a, *x")):  # fmt: skip
        with pytest.raises(core.Wrong, match=re.escape(said)):
            check.saxpy(answer)
