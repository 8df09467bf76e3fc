"""The counters against a real GPU: the profiler's kernels, the driver's syncs, the memory's bandwidth."""

import pytest
import torch
import torch.nn.functional as F
from meter_programs import PROGRAMS, prepare
from test_meter import facts, snippets
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from course_lib import machine, meter, timing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# One operator is one kernel here: point-wise operators, fills, copies, cat, integer indices, softmax and
# cross-entropy forward, scans and modest sums; and what costs nothing. Layer norm has a test of its own. The
# out-of-place masked_fill is none of them: a memcpy, then a kernel that fills in place.
ONE_TO_ONE = [
    "add", "times_a_number", "same_tensor_twice", "with_its_transpose", "broadcast_row", "broadcast_both",
    "expanded_input", "transposed_input", "strided_slices", "chain", "half_precision", "mixed_precision",
    "comparison", "in_place_add", "in_place_on_one_row", "into_out", "masked_fill_in_place",
    "where", "where_with_a_number", "outer_product",
    "in_place_fills", "new_fills", "random_numbers", "copy_into", "copy_broadcast", "cast", "clones",
    "concatenate", "concatenate_with_nothing", "stack_the_same",
    "integer_index", "index_select", "gather", "embedding",
    "softmax", "log_softmax", "cross_entropy", "running_sum", "total", "sums_by_row_and_column",
    "views", "allocations", "no_elements",
]  # fmt: skip
# A copy of contiguous memory is no kernel but a memcpy within the device.
MEMCPYS = {"copy_into": 1, "clones": 1}


@pytest.fixture(scope="module", autouse=True)
def started_profiler():
    "The first profile of a process can miss events while it starts."
    device_work("add")


def device_work(name):
    "(kernels, memcpys, memsets) that a program makes the GPU do, by the profiler."
    for _ in range(2):
        prepare(PROGRAMS[name], "cuda")()
    return _device_work(prepare(PROGRAMS[name], "cuda"))


def _device_work(fn):
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as run:
        fn()
        torch.cuda.synchronize()
    names = [e.name for e in run.events()
             if e.device_type == DeviceType.CUDA and not getattr(e, "is_user_annotation", False)]  # fmt: skip
    names = [n for n in names if not n.startswith(("Optimizer.", "ProfilerStep"))]
    memcpys, memsets = (sum(n.startswith(word) for n in names) for word in ("Memcpy", "Memset"))
    return len(names) - memcpys - memsets, memcpys, memsets


@pytest.mark.parametrize("name", PROGRAMS)
def test_counts_on_cuda_are_those_on_the_cpu(name):
    counts = []
    for device in ("cpu", "cuda"):
        for _ in range(2):
            fn = prepare(PROGRAMS[name], device)
            with meter.count() as c:
                fn()
            torch.cuda.synchronize()
        counts.append(c)
    assert facts(counts[0]) == facts(counts[1]), f"CPU\n{counts[0].table()}\nCUDA\n{counts[1].table()}"
    assert counts[0].by_op == counts[1].by_op


@pytest.mark.parametrize("name", ONE_TO_ONE)
def test_an_operator_is_a_kernel(name):
    kernels, memcpys, memsets = device_work(name)
    assert (kernels + memcpys, memcpys, memsets) == (PROGRAMS[name].ops, MEMCPYS.get(name, 0), 0)


@pytest.mark.parametrize("width, kernels", [(1024, 1), (1021, 2)])
def test_layer_norm_is_one_kernel_where_rows_can_be_read_four_at_a_time(width, kernels):
    x = torch.randn(37, width, device="cuda")
    assert _device_work(lambda: F.layer_norm(x, (width,))) == (kernels, 0, 0)


def test_an_operator_is_a_kernel_or_more(capsys):
    rows = [(name, PROGRAMS[name].ops, *device_work(name)) for name in PROGRAMS]
    with capsys.disabled():
        print(f"\n{'program':34}{'ops':>5}{'kernels':>9}{'memcpys':>9}{'memsets':>9}")
        for name, ops, *work in rows:
            if sum(work) != ops:
                print(f"{name:34}{ops:5}{work[0]:9}{work[1]:9}{work[2]:9}")
    assert [name for name, ops, *work in rows if sum(work) < ops] == []


def test_syncs_are_those_the_driver_sees():
    waits, unseen, free = snippets("cuda")
    for name in ("numpy", "asarray"):
        del unseen[name]  # refuse a CUDA tensor
    for name, fn in {**waits, **unseen, **free}.items():
        with meter.count() as c:
            fn()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            fn()
            waited = 0
        except RuntimeError:
            waited = 1
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert (name, c.syncs) == (name, waited)


def large():
    "Operators on tensors several times the L2 cache: name, the function, what it does with memory."
    n, m = 16384, 4096
    x, y = (torch.randn(n, m, device="cuda") for _ in range(2))
    out, row = torch.empty_like(x), torch.randn(m, device="cuda")
    mask, labels = x > 0, torch.randint(m, (n,), device="cuda")
    order, columns = torch.randperm(n, device="cuda"), torch.argsort(y, dim=1)
    return [
        ("add", lambda: x + y, "streams"),
        ("add a row", lambda: x + row, "both"),  # not vectorised by torch: a third slower than an add
        ("in place", lambda: out.mul_(1.0), "streams"),
        ("gelu", lambda: F.gelu(x), "streams"),
        ("where", lambda: torch.where(mask, x, y), "streams"),
        ("copy", lambda: out.copy_(x), "streams"),
        ("cast", lambda: x.bfloat16(), "streams"),
        ("cat", lambda: torch.cat([x, y]), "streams"),
        ("transposed copy", lambda: x.t().contiguous(), "both"),
        ("rows", lambda: x[order], "both"),
        ("gather", lambda: x.gather(1, columns), "both"),
        ("softmax", lambda: x.softmax(-1), "both"),
        ("layer norm", lambda: F.layer_norm(x, (m,)), "both"),
        ("cumsum", lambda: x.cumsum(-1), "both"),
        ("cross-entropy", lambda: F.cross_entropy(x, labels), "both"),
        ("sum", lambda: x.sum(), "reads"),
        ("sum of rows", lambda: x.sum(1), "reads"),
        ("fill", lambda: out.fill_(1.0), "writes"),
    ]


def test_bytes_fit_in_the_time(capsys):
    copy = machine.copy_rate()
    sheet = machine.DATASHEET.get(machine.name(), {}).get("bytes", 1.3 * copy)
    lines, wrong = [f"copy rate {copy / 1e12:.2f} TB/s, datasheet {sheet / 1e12:.2f}"], []
    for name, fn, does in large():
        with meter.count() as c:
            fn()
        rate = c.bytes / timing.time(fn).median
        lines.append(f"{name:18}{rate / 1e12:6.2f} TB/s  {rate / copy:5.2f} of the copy rate")
        # Reading alone or writing alone may be faster than turning between the two, but not than the memory.
        most = sheet if does in ("reads", "writes") else 1.05 * copy
        # Where nothing but memory can limit, a rate that is too low means a byte left out of the count.
        least = 0.75 * copy if does == "streams" else 0
        if not least <= rate <= most:
            wrong.append(lines[-1])
    with capsys.disabled():
        print("\n" + "\n".join(lines))
    assert wrong == []
