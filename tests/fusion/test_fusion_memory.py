"Lesson fusion: what a step holds in memory, recomputing, and choosing what to recompute within a budget."

import random

import pytest
import torch
from torch import nn

from course_lib import meter, models
from course_lib.fusion import budget as fusion_budget
from course_lib.fusion import memory as fusion_memory


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
    random.seed(0)


def blocks():
    return [models.EncoderLayer(16, 2, 24), fusion_memory.FeedForward(16, 40), models.EncoderLayer(16, 4, 8)]


def test_saved_counts_each_storage_once():
    x, w = torch.randn(5, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    assert fusion_memory.saved(lambda: (x * x).exp()) == [((5, 3), 60), ((5, 3), 60)]
    assert fusion_memory.saved(lambda: x @ w, leave_out=[w]) == [((5, 3), 60)]


@pytest.mark.parametrize("again", [(), (1,), (0, 2), (0, 1, 2)])
def test_recomputing_changes_memory_and_not_gradients(again):
    stack, x = blocks(), torch.randn(2, 7, 16, requires_grad=True)
    cost = fusion_budget.costs(stack, x)
    grads, kept = [], None
    for chosen in ((), again):
        x.grad = None
        with meter.Memory() as watch:
            out = fusion_memory.run(stack, x, chosen)
            watch.mark()
        kept = watch.marks[0][1] + x.nbytes - out.nbytes
        out.square().sum().backward()
        grads.append([x.grad, *(p.grad.clone() for p in stack[0].parameters())])
        stack[0].zero_grad()
    torch.testing.assert_close(*grads)
    # What autograd's hooks saw block by block is what is alive in the whole stack.
    assert kept == sum(cost.inputs[i] if i in again else cost.saved[i] for i in range(3))
    more = fusion_budget.step_flops(stack, x, again) - fusion_budget.step_flops(stack, x)
    assert more == sum(cost.flops[i] for i in again)


@pytest.mark.parametrize("policy", ["matmuls", "all_but_scores", "everything"])
def test_selective_policies(policy):
    layer, x = models.EncoderLayer(16, 2, 24), torch.randn(2, 9, 16, requires_grad=True)
    context = fusion_memory.keeping(getattr(fusion_memory, policy))
    with meter.count(portable=False) as c:
        fusion_memory.run([layer], x, (0,), context_fn=context).sum().backward()
    spent = c.flops - fusion_budget.step_flops([layer], x)
    # Two heads of 8: the scores are 2 * 2 * 9 * 9 sums of 8 products.
    assert spent == (2 * 2 * 2 * 9 * 9 * 8 if policy == "all_but_scores" else 0)
    got = x.grad.clone()
    x.grad = None
    layer(x).sum().backward()
    torch.testing.assert_close(got, x.grad)


def test_an_unknown_block_is_refused():
    with pytest.raises(ValueError, match="there is no block 3: the 3 blocks are numbered from 0"):
        fusion_memory.run(blocks(), torch.randn(1, 2, 16), [3])


@pytest.mark.parametrize("training", [True, False])
def test_frozen_statistics(training):
    def stepped(again, frozen):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh()).train(training)
        x = torch.randn(9, 3, requires_grad=True)
        context = fusion_memory.frozen_statistics(net) if frozen else None
        fusion_memory.run([net], x, again, context_fn=context).square().sum().backward()
        return net, x.grad

    plain, grad = stepped((), False)
    twice, _ = stepped((0,), False)
    frozen, same = stepped((0,), True)
    assert [n[1].num_batches_tracked.item() for n in (plain, twice, frozen)] == [
        training,
        2 * training,
        training,
    ]
    torch.testing.assert_close(frozen.state_dict(), plain.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(same, grad)
    assert all(m.track_running_stats for m in frozen.modules() if isinstance(m, nn.BatchNorm1d))


# --- budgets ------------------------------------------------------------------------


def moments(saved, inputs, again):
    "Bytes held at every moment of a forward and a backward pass."
    alive, found = {}, [0]
    for i in range(len(saved)):
        alive[i] = inputs[i] if i in again else saved[i]
        found.append(sum(alive.values()))
    for i in reversed(range(len(saved))):
        alive[i] = saved[i]
        found.append(sum(alive.values()))
        del alive[i]
    return found


def test_held_is_the_worst_moment():
    for _ in range(200):
        n = random.randrange(0, 8)
        inputs = [random.randrange(1, 30) for _ in range(n)]
        saved = [i + random.randrange(90) for i in inputs]
        again = {i for i in range(n) if random.random() < 0.5}
        assert fusion_budget.held(saved, inputs, again) == max(moments(saved, inputs, again))


def test_choices_in_known_cases():
    saved, inputs, flops = [60, 50, 50], [10, 10, 10], [119, 80, 81]
    assert fusion_budget.choose(saved, inputs, flops, 160) == []
    assert fusion_budget.choose(saved, inputs, flops, 159) == [1]
    assert fusion_budget.choose(saved, inputs, flops, 112) == [0]
    assert fusion_budget.choose([], [], [], 0) == []
    with pytest.raises(ValueError, match=r"a budget of 69 bytes can't be met: .* at least 70 bytes"):
        fusion_budget.choose(saved, inputs, flops, 69)
    with pytest.raises(ValueError, match="have 3, 2 and 3 numbers"):
        fusion_budget.choose(saved, inputs[1:], flops, 69)


def test_the_frontier_is_what_choose_gives():
    cost = fusion_budget.costs(blocks(), torch.randn(2, 7, 16))
    points = fusion_budget.frontier(cost)
    assert [p[0] for p in points] == sorted((p[0] for p in points), reverse=True)
    assert points[0][1] == 0 and points[0][2] == ()
    for size, spent, _ in points:
        again = fusion_budget.choose(*cost, size)
        assert sum(cost.flops[i] for i in again) == spent
        assert fusion_budget.held(cost.saved, cost.inputs, set(again)) <= size
