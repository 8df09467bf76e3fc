"Lesson triton beside its checks: other right answers, sentences for odd ones, its counting and its figures."

import importlib.util

import pytest
import torch
from torch.nn import functional as F

from course_lib import checking as core
from course_lib import kernels, show
from course_lib.authoring import notebook
from course_lib.triton import charts as triton_charts
from course_lib.triton import check
from course_lib.triton import figures as triton_figures
from course_lib.triton import missing as triton_missing

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def answers():
    spec = importlib.util.spec_from_file_location(
        "triton_answers", notebook.ROOT / "tests" / "mutants" / "triton.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def said(judge, answer):
    with pytest.raises(core.Wrong) as e:
        judge(answer)
    return str(e.value)


ROWS = "range(tl.program_id(0), rows, tl.num_programs(0))"
RUN = """range(
        tl.program_id(0) * tl.cdiv(rows, tl.num_programs(0)),
        tl.minimum(rows, (tl.program_id(0) + 1) * tl.cdiv(rows, tl.num_programs(0))),
    )"""
LINE_M = "m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)\n"
LINE_N = "n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)\n"
# Right in another way: each must pass. (exercise, [(old, new), …])
OTHERS = {
    "named_otherwise": ("triton.1", [("x_ptr", "left"), ("y_ptr", "right"), ("out_ptr", "sum_ptr")]),
    "loads_with_other": ("triton.1", [("mask=mask) + ", "mask=mask, other=0.0) + ")]),
    "wide_offsets": ("triton.1", [("tl.program_id(0) * BLOCK", "tl.program_id(0).to(tl.int64) * BLOCK")]),
    "powers_of_two": (
        "triton.2",
        [("tl.exp(x - tl.max(x, axis=0))", "tl.exp2((x - tl.max(x, axis=0)) * 1.44269504)")],
    ),
    "times_the_reciprocal": ("triton.2", [("e / tl.sum(e, axis=0)", "e * (1.0 / tl.sum(e, axis=0))")]),
    "the_lowest_number": ("triton.2", [('-float("inf")', "-65504.0")]),
    "promoted_by_the_maximum": ("triton.2", [(".to(tl.float32)", "")]),
    "a_root_and_a_quotient": ("triton.3", [("tl.rsqrt(", "1.0 / tl.sqrt(")]),
    "the_weight_late": (
        "triton.3",
        [
            ("x * rstd * w", "x * rstd * tl.load(w_ptr + cols, mask=mask, other=0.0)"),
            ("    w = tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)\n", ""),
        ],
    ),
    "rows_in_a_run": ("triton.4", [(ROWS, RUN)]),
    "indices_wrap_around": (
        "triton.5",
        [
            (LINE_M, LINE_M[:-1] + "\n    m_there = m\n    m = m % M\n"),
            (LINE_N, LINE_N[:-1] + "\n    n_there = n\n    n = n % N\n"),
            ("    c_at =", "    m, n = m_there, n_there\n    c_at ="),
        ],
    ),
    "adds_the_product": ("triton.5", [("acc = tl.dot(a, b, acc, input", "acc += tl.dot(a, b, input")]),
    "loads_the_target": (
        "triton.7",
        [
            ("    chosen = 0.0\n", "    chosen = tl.load(row_ptr + tl.maximum(target, 0)).to(tl.float32)\n"),
            ("        chosen += tl.sum(tl.where(cols == target, x, 0.0), axis=0)\n", ""),
        ],
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_right_answers_pass(name, answers, capsys):
    number, pairs = OTHERS[name]
    answer = answers.mutant(name, number, *pairs)
    for _ in range(3):
        core.exercises(check)[number](answer)


def test_the_tutorials_own_grouping_passes(capsys):
    def grouped(pid, tiles_m, tiles_n, group):
        per_group = group * tiles_n
        first = pid // per_group * group
        size = min(tiles_m - first, group)
        return first + (pid % per_group) % size, (pid % per_group) // size

    check.grouped(grouped)


@pytest.mark.parametrize("number", [f"triton.{i}" for i in range(1, 8)])
def test_a_kernel_without_an_answer_is_not_solved_yet(number, answers):
    name = answers.NAMES[number]
    lines, keep = [], True
    for line in answers.SOURCE[number].splitlines():  # as `course build` makes it
        keep = keep or "### END SOLUTION" in line
        if "### BEGIN SOLUTION" in line:
            lines.append("    raise NotImplementedError")
            keep = False
        elif keep:
            lines.append(line)
    stub = answers.made("\n".join(lines) + "\n", name)
    assert "not solved yet" in said(core.exercises(check)[number], stub)


def test_what_is_no_kernel_gets_a_sentence(answers):
    assert "put @triton.jit above it" in said(check.add, lambda *args: None)
    assert "expected the 5 arguments of the lesson" in said(check.add, answers.REFERENCE["triton.2"])


def test_a_mistake_in_a_kernel_is_told_without_the_interpreters_wrapping(answers):
    broken = answers.mutant("broken", "triton.1", ("mask = at < n", "mask = at < m"))
    assert "broken raised NameError: name 'm' is not defined on " in said(check.add, broken)


def test_no_triton_is_one_sentence(answers, monkeypatch):
    def missing():
        raise kernels.KernelError("Triton isn't installed here")

    monkeypatch.setattr(kernels, "require", missing)
    assert (
        said(check.softmax, answers.REFERENCE["triton.2"])
        == "triton.2 not passed: Triton isn't installed here"
    )


def test_the_stand_in_refuses_kernels_in_one_sentence(capsys):
    tl = triton = triton_missing.stand_in()
    assert capsys.readouterr().out.strip() == triton_missing.SENTENCE

    @triton.jit
    def kernel(x_ptr, BLOCK: tl.constexpr):
        "Nothing."

    for launch in (lambda: kernel[(1,)](None, BLOCK=4), lambda: tl.load(), lambda: tl()):
        with pytest.raises(kernels.KernelError, match="Triton isn't installed here"):
            launch()


@pytest.mark.parametrize("n, block", [(1, 4), (19, 8), (32, 8), (33, 32)])
def test_the_drawn_lanes_are_those_of_a_launch(n, block, answers):
    from course_lib.kernels.watch import watch

    x, y, out = torch.randn(n), torch.randn(n), torch.empty(n)
    data = triton_figures.lanes(n, block)
    with watch() as w:
        answers.REFERENCE["triton.1"][(data["programs"],)](x, y, out, n, BLOCK=block)
    assert w.launches[0].programs == data["programs"]
    assert w.loads["x_ptr"].masked == data["idle"] and w.loads["x_ptr"].elements == n


def test_lanes_refuse_an_empty_launch():
    with pytest.raises(ValueError, match="two positive integers"):
        triton_figures.lanes(0, 8)


@pytest.mark.parametrize("m, n, group", [(5, 7, 2), (4, 3, 4), (3, 8, 5), (6, 6, 1)])
def test_every_tile_is_taken_once(m, n, group):
    tiles = [triton_figures.grouped(pid, m, n, group) for pid in range(m * n)]
    assert sorted(tiles) == [(i, j) for i in range(m) for j in range(n)]
    if group == 1:
        assert tiles == sorted(tiles)
    assert [sum(w) for w in triton_figures.waves(tiles, m * n)] == [m + n]


def test_waves_count_what_they_need():
    tiles = [triton_figures.grouped(pid, 8, 8, 4) for pid in range(64)]
    assert triton_figures.waves(tiles, 16)[0] == (4, 4)
    rows = [triton_figures.grouped(pid, 8, 8, 1) for pid in range(64)]
    assert triton_figures.waves(rows, 16) == [(2, 8)] * 4


def test_figures_draw():
    show.style()
    found = {(64, 64, 4): 4e-3, (64, 64, 8): 8e-3, (128, 64, 4): None, (128, 64, 8): None}
    bars = {"eager": 3.0, "Triton": 4.0}
    tiles = [triton_figures.grouped(pid, 4, 4, 2) for pid in range(16)]
    name, peaks = triton_charts.peaks()
    drawn = [
        triton_figures.view_lanes(triton_figures.lanes()),
        triton_figures.view_lanes(triton_figures.lanes(64, 4)),
        triton_figures.draw_orders({"a": tiles, "b": tiles[::-1]}, wave=4),
        triton_charts.draw_traffic({"a": (5, 3), "b": (1, 1)}),
        triton_charts.draw_bars({"eager": 0.1, "Triton": 4.0}, roof=4.2),
        triton_charts.draw_groups({"forward": bars, "backward": bars}, roof=4.2),
        triton_charts.draw_roofline(name, peaks, [("a", 0.2, None), ("b", 300.0, 5e14)]),
        triton_charts.draw_search(found, 2 * 4096**3),
    ]
    import matplotlib.pyplot as plt

    for fig in drawn:
        fig.canvas.draw()
        plt.close(fig)
    assert "2 timed, 2 would not run" in drawn[-1].axes[1].get_title(loc="left")


def test_the_kernel_in_what_inductor_wrote():
    from course_lib.triton import timing as triton_timing

    code = "x = 1\nk = async_compile.triton('triton_red_0', '''\nimport triton\n@triton.jit\n"
    code += "def triton_red_0(in_ptr0, n):\n    tl.load(in_ptr0)\n''', device_str='cuda')\ncall()\n"
    assert triton_timing.kernel_in(code) == "def triton_red_0(in_ptr0, n):\n    tl.load(in_ptr0)"
    assert triton_timing.kernel_in("no kernel") == "no kernel"


def test_what_needs_a_gpu_says_so():
    cells = notebook.load(next(notebook.NBS.glob("*_triton.ipynb")))["cells"]
    timed = {c["id"] for c in cells if "triton_timing." in notebook.source(c)}
    assert timed and timed <= {c["id"] for c in cells if "gpu" in notebook.tags(c)}


@pytest.mark.gpu
def test_the_answers_compile_and_are_right_on_a_gpu(answers):
    def launcher(number, name):
        scope = {"__name__": "lesson"}
        answers.made(answers.SOURCE[number], answers.NAMES[number], scope)
        return scope[name]

    def near(got, want, rtol):
        torch.testing.assert_close(got.double(), want.double(), rtol=rtol, atol=1e-3)

    x, y = torch.randn(2, 1000, device="cuda")
    near(launcher("triton.1", "run_add")(x, y), x + y, 1e-6)
    x = torch.randn(37, 701, device="cuda", dtype=torch.bfloat16)
    near(launcher("triton.2", "run_softmax")(x), torch.softmax(x.double(), -1), 5e-3)
    w, dy = torch.randn(701, device="cuda").bfloat16(), torch.randn_like(x)
    leaves = [t.double().requires_grad_() for t in (x, w)]
    want = F.rms_norm(leaves[0], (701,), leaves[1], 1e-6)
    y, rstd = launcher("triton.3", "run_rmsnorm")(x, w)
    near(y, want.detach(), 5e-3)
    dx, dw = launcher("triton.4", "run_rmsnorm_backward")(dy, x, w, rstd)
    want_dx, want_dw = torch.autograd.grad(want, leaves, dy.double())
    torch.testing.assert_close(dx.double(), want_dx, rtol=5e-3, atol=1e-2)
    near(dw, want_dw, 1e-3)
    a, b = (torch.randn(*s, device="cuda") for s in ((100, 150), (150, 70)))
    near(launcher("triton.5", "run_matmul")(a, b), a.double() @ b.double(), 1e-4)
    logits = 3 * torch.randn(20, 3001, device="cuda")
    target = torch.randint(3001, (20,), device="cuda")
    target[3] = -100
    leaf = logits.double().requires_grad_()
    want = F.cross_entropy(leaf, target)
    loss = launcher("triton.7", "run_xent")(logits, target)
    near(loss.sum() / 19, want.detach(), 1e-5)
    torch.testing.assert_close(logits.double(), torch.autograd.grad(want, leaf)[0], rtol=1e-4, atol=1e-7)


@pytest.mark.gpu
def test_the_timings_run_on_a_gpu():
    from course_lib.triton import timing as triton_timing

    assert min(triton_timing.softmax_versions(torch.clone, 512, 1024).values()) > 0
    assert min(triton_timing.softmax_rates(512, 1024).values()) > 0
    source = triton_timing.compiled_source(lambda x: torch.softmax(x, -1), (512, 4096))
    assert source.startswith("def triton_") and "tl.load(in_ptr0" in source
    assert all(min(r.values()) > 0 for r in triton_timing.rmsnorm_rates(512, 1024))
    assert min(triton_timing.group_rates(1024, (1, 4)).values()) > 0
    rows = triton_timing.matmul_rates([(256, 512, 128), (250, 130, 70)])
    assert len(rows) == 2 and min(rate for _, *rates in rows for rate in rates) > 0
    eager, fused, size = triton_timing.loss_memory(256, 4001)
    assert eager > 2 * fused and fused >= size
