"The fuser on a real GPU: the same results, one kernel by the profiler, wide offsets, and the race."

import fusion_programs
import pytest
import torch
from fusion.test_fusion_random import as_near, digits
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from course_lib import fusion, meter
from course_lib.fusion import chain_race as fusion_chains
from course_lib.fusion import small as fusion_small

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def kernels(fn, *args):
    "The kernels that a call makes the GPU run, by name."
    for _ in range(2):  # the first profile of a process can miss events
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as run:
            fn(*args)
            torch.cuda.synchronize()
    return [e.name for e in run.events() if e.device_type == DeviceType.CUDA]


@pytest.mark.parametrize("name", fusion.chains())
def test_chains(name):
    chain = fusion.chains()[name]
    args = chain.inputs(1 << 20, "cuda")
    fused = fusion.fuse(chain.fn)
    fusion_chains._compare(chain, args, chain.fn, fused)
    assert fused.how == "gpu" and len(kernels(fused, *args)) == 1


@pytest.mark.parametrize("start", range(0, 40, 20))
def test_random_programs(start):
    "Fewer than on the CPU, since each is compiled."
    for seed in range(start, start + 20):
        program = fusion_programs.draw(seed)
        mine = [t.to("cuda") if 0 not in t.stride() else t.cuda() for t in program.tensors()]
        if program.twice is not None:
            mine[-1] = mine[program.twice]
        theirs = [t.clone() for t in mine]
        if program.twice is not None:
            theirs[-1] = theirs[program.twice]
        eager, (exact, wide) = program(*theirs), program.exactly([t.cpu() for t in mine])
        fused = fusion.fuse(program)
        try:
            got = fused(*mine)
        except fusion.CannotFuse as e:
            assert "in place" in str(e)
            continue
        what, open_ = f"seed {seed}\n{program}\n{fused.source}", digits(program)
        for a, b, c in zip((*got, *mine), (*eager, *theirs), (*exact, *wide), strict=True):
            as_near(a.cpu(), b.cpu(), c, open_, what)


def test_cpu_tensors_are_interpreted_beside_the_gpu():
    f = fusion.fuse(lambda x: torch.tanh(x) * 2)
    x = torch.randn(50)
    for _ in range(2):
        torch.testing.assert_close(f(x.cuda()).cpu(), torch.tanh(x) * 2)
        torch.testing.assert_close(f(x), torch.tanh(x) * 2)
    g = fusion.fuse(lambda x: torch.exp(x) + 1)  # compiled after the interpreter has run
    torch.testing.assert_close(g(x.cuda()).cpu(), torch.exp(x) + 1)


def test_the_exercises_kernel():
    def fn(x, row, column):
        t = torch.tanh(x + row) * 2.0
        return 1.5 - t, torch.where(x > column, t, x.exp() / 3)

    shapes = [(60, 70), (70,), (60, 1)]
    args = [torch.randn(s, device="cuda") for s in shapes]
    source = fusion_small.generate(fusion_small.capture(fn, 3), shapes)
    for got, want in zip(fusion_small.launch(source, args, (60, 70), 2), fn(*args), strict=True):
        torch.testing.assert_close(got, want)


def test_offsets_past_31_bits():
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GB of free memory")
    x = torch.zeros((1 << 31) + 4096, dtype=torch.bfloat16, device="cuda")
    x[-1] = 3
    f = fusion.fuse(lambda x: x * 2)
    y = f(x)
    assert y[-1] == 6 and y[0] == 0 and "int64" in f.source


def test_two_devices_are_refused():
    with pytest.raises(fusion.CannotFuse, match="move them to one device"):
        fusion.fuse(lambda x, y: x + y)(torch.ones(2, device="cuda"), torch.ones(2))


def test_compiled_counts_kernels_and_bytes():
    x = torch.randn(1 << 20, device="cuda")

    def chain(x):
        return torch.tanh(x * 2) + 1

    c = meter.compiled(chain, x)
    assert (c.kernels, c.bytes, c.eager) == (1, 2 * x.nbytes, [])


def test_the_race(capsys):
    rows = fusion.race(list(fusion.chains().values())[:2], n=1 << 24, seconds=0.1)
    with capsys.disabled():
        for r in rows:
            print(
                f"\n{r.name}: {r.bytes / r.fused / 1e12:.2f} TB/s, {r.vs_compile:.2f} of torch.compile's, "
                f"{r.vs_eager:.1f} x eager's"
            )
    assert all(r.vs_eager > 1 for r in rows)
