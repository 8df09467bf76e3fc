"The simulated GPU of lesson launches: its times, its order, its memory, its captures."

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from course_lib import launches, models
from course_lib.launches import Device, Race, figures, solutions


def end(gpu):
    return max(s.end for s in gpu.spans)


@pytest.mark.parametrize("kernel, total", [(2, 5 * 8 + 2), (8, 48), (20, 8 + 5 * 20)])
def test_launches_and_kernels_overlap(kernel, total):
    gpu = Device(launch=8)
    for _ in range(5):
        gpu.launch("k", kernel)
    assert (gpu.now, end(gpu)) == (40, total)
    gpu.synchronize()
    assert gpu.now == total


def test_the_explorer_says_what_the_text_says():
    data = launches.explore(launch=8, kernel=7, kernels=12)
    assert [max(s.end for s in spans) for spans in data.values()] == [103, 94]
    data = launches.explore(launch=8, kernel=8, kernels=12)
    assert [max(s.end for s in spans) for spans in data.values()] == [104, 106]


def test_an_order_must_be_made_whatever_the_times_are():
    with Device() as gpu:
        x, side = torch.ones(4, device="cuda"), gpu.Stream()
        gpu.now += 1000  # all is done by the clock, but nobody asked
        with (
            gpu.stream(side),
            pytest.raises(Race, match=r"use before ready: mul on stream 1 reads .* ones on default"),
        ):
            x * 2
        with (
            gpu.stream(side),
            pytest.raises(Race, match="reuse before done: copy to the GPU on stream 1 writes"),
        ):
            x.copy_(torch.ones(4))
        side.wait_stream(gpu.current_stream())
        with gpu.stream(side):
            y = x * 2
        with pytest.raises(Race, match="use before ready"):
            y.tolist()
        side.record_event().synchronize()
        assert y.tolist() == [2.0] * 4


@pytest.mark.parametrize("recorded", [True, False])
def test_freed_memory_is_used_again_on_its_stream(recorded):
    with Device() as gpu:
        side, main = gpu.Stream(), gpu.current_stream()
        with gpu.stream(side):
            x = torch.ones(5, device="cuda")
        main.wait_stream(side)
        gpu.launch("work", 1000, reads=[x])
        if recorded:
            x.record_stream(main)
        del x
        with gpu.stream(side):
            if recorded:
                torch.zeros(5, device="cuda")
            else:
                with pytest.raises(Race, match=r"reuse before done: .* reads"):
                    torch.zeros(5, device="cuda")


@pytest.mark.parametrize("foreach", [None, True, False])
def test_pytorchs_clipping_can_be_captured(foreach):
    with Device() as gpu:
        net = nn.Linear(3, 2).to("cuda")
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        graph = gpu.CUDAGraph()
        with gpu.graph(graph):
            nn.utils.clip_grad_norm_(net.parameters(), 1.0, foreach=foreach)
        graph.replay()
        assert sum(p.grad.square().sum().item() for p in net.parameters()) == pytest.approx(1, abs=1e-4)


def test_copies_wait_unless_they_are_pinned_and_non_blocking():
    for pinned, non_blocking, now in ((True, True, 1), (True, False, 401), (False, True, 401)):
        with Device(launch=1.0, kernel=0.0, bus=1.0) as gpu:
            host = torch.randn(100)
            host = host.pin_memory() if pinned else host
            assert not host.is_cuda
            x = host.to("cuda", non_blocking=non_blocking)
            assert x.is_cuda and gpu.now == now and end(gpu) == 401
            assert torch.equal(x.cpu(), host)
            with pytest.raises(RuntimeError, match="same device"):
                x + host


def test_a_capture_computes_nothing_and_a_replay_what_eager_code_does():
    with Device() as gpu:
        twins = []
        for _ in range(2):
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.3), nn.Tanh(), nn.Linear(7, 3)).to("cuda")
            rate = torch.tensor(0.01, device="cuda")
            twins.append((net, torch.optim.Adam(net.parameters(), lr=rate, capturable=True)))
        x, y = torch.randn(4, 5).to("cuda"), torch.tensor([0, 2, 1, 1], device="cuda")

        def step(net, opt):
            opt.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            opt.step()
            return loss.detach()

        for twin in twins:
            torch.manual_seed(1)
            step(*twin)
        before, random = [p.clone() for p in twins[0][0].parameters()], torch.get_rng_state()
        graph = gpu.CUDAGraph()
        with gpu.graph(graph):
            loss = step(*twins[0])
        assert all(map(torch.equal, before, twins[0][0].parameters()))
        assert torch.equal(random, torch.get_rng_state()) and loss.isnan()
        for seed in range(3):
            x.copy_(torch.randn(4, 5))
            torch.manual_seed(seed)
            graph.replay()
            torch.manual_seed(seed)
            assert torch.equal(step(*twins[1]), loss)
        assert all(map(torch.equal, twins[1][0].parameters(), twins[0][0].parameters()))


@pytest.mark.parametrize(
    "fn, says",
    [
        (lambda x: x.sum().item(), "operation not permitted .* waits"),
        (lambda x: x[x > 0], "operation not permitted"),
        (lambda x: x.tolist(), "operation not permitted"),
        (lambda x: x + torch.tensor(3.0, device="cuda"), "unless the CPU tensor is pinned"),
        (lambda x: x + torch.ones(4).to("cuda"), "unless the CPU tensor is pinned"),
        (lambda x: x + torch.ones(4), "same device"),
        (lambda x: 1 / 0, "division"),
    ],
)
def test_what_a_capture_refuses(fn, says):
    with Device() as gpu:
        x, graph = torch.ones(4, device="cuda"), gpu.CUDAGraph()
        with pytest.raises((RuntimeError, ZeroDivisionError), match=says), gpu.graph(graph):
            fn(x)
        assert graph.nodes == [] and gpu.capturing is None
        with gpu.graph(graph):
            y = x + torch.tensor(3.0)  # a number of the host is recorded as it is
        graph.replay()
        assert y.tolist() == [4.0] * 4


def test_a_trace_of_the_simulated_gpu():
    gpu = Device(launch=8)
    gpu.launch("k", 2)
    gpu.launch("k", 2)
    gpu.synchronize()
    assert solutions.launch_report(launches.events(gpu.spans)) == (2, 2, pytest.approx(4 / 10))


def test_figures_can_be_drawn():
    rows = {"eager": [3.0, 4.0, 5.0], "graph": [1.0, 1.0, 1.5]}
    for fig in (
        figures.draw_bars({"a": rows, "b": rows}),
        figures.draw_floor({8: [3.0, 4.0], 32: [5.0, 6.0]}),
        figures.draw_gains({"matmul": {1: 1.0, 2: 1.3}, "1 µs": {1: 1.0, 2: 2.0}}),
        figures.view_graph(launches.explore()),
    ):
        assert all(ax.get_xlabel() for ax in fig.axes[-1:])


@pytest.mark.gpu
def test_on_a_gpu_the_graph_trains_as_the_step_does():
    ends = []
    for graph in (False, True):
        torch.manual_seed(0)
        step = solutions.Step(models.mlp([64, 64, 10]).cuda(), 1e-3)
        batches = [(torch.randn(8, 64).cuda(), torch.randint(10, (8,)).cuda()) for _ in range(5)]
        torch.cuda.manual_seed(1)
        run = solutions.GraphedStep(step, list(batches[0]), step.state(), torch.cuda) if graph else step
        ends.append([run(*b) for b in batches] + [t.detach().clone() for t in step.state()])
    assert all(map(torch.equal, *ends))
