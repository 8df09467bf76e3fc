"meter.Memory and meter.peak_memory: the bytes alive on CPU tensors, and by the allocator on a GPU."

import functools

import pytest
import torch
import torch.nn.functional as F

from course_lib import meter


def test_the_line_the_peak_and_the_marks():
    x = torch.zeros(1000)
    with meter.Memory() as m:
        a = x + 1  # 4,000 bytes
        b = a.double()  # 8,000
        view = b.view(10, 100)
        m.mark()
        assert (m.now, m.tensors) == (12000, 2)
        del a
        c = b + 1
        del b, view
        c.add_(1)  # in place
        del c
    assert m.line == [("add", 4000), ("_to_copy", 12000), ("view", 12000), ("add", 16000), ("add_", 8000)]
    assert (m.peak, m.most_tensors, m.marks, m.now) == (16000, 2, [(3, 12000)], 0)


def test_what_was_there_before_is_left_out():
    x = torch.zeros(100, 10)
    with meter.Memory() as m:
        x.T.add_(1)
        x[3:].mul_(2)
    assert m.peak == 0


def test_small_and_ignored_storages_do_not_count():
    ignored = False
    with meter.Memory(at_least=400, ignore=lambda: ignored) as m:
        a = torch.randn(100)
        b = torch.randn(10)
        ignored = True
        c = torch.randn(500)
        ignored = False
        d = c.view(5, 100)  # a view of what was ignored
        assert (m.tensors, m.now) == (1, 400)
        del a, b, c, d
        assert (m.tensors, m.now, m.peak) == (0, 0, 400)


def test_the_peak_is_not_the_sum():
    x = torch.randn(50, 40)
    assert meter.peak_memory(lambda x: x + 1, x) == x.nbytes
    assert meter.peak_memory(lambda x: (((x + 1) * 2) - 3).exp(), x) == 2 * x.nbytes
    assert meter.peak_memory(lambda x: x.view(40, 50), x) == 0
    assert meter.peak_memory(lambda x, n: [x + i for i in range(n)], x, n=5) == 5 * x.nbytes


def test_the_peak_of_a_loss():
    x, target = torch.randn(40, 300), torch.randint(300, (40,))

    def loss(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(F.cross_entropy(x, target), x)

    # Log-probabilities, the gradient of the loss for them, and that for the logits.
    assert 2.9 < meter.peak_memory(loss, x) / x.nbytes < 3.1


def test_compiled_code_is_refused():
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    for step in (lambda: compiled(torch.ones(3)), functools.partial(compiled, torch.ones(3))):
        with pytest.raises(RuntimeError, match="memory of a compiled function can't be watched"):
            meter.peak_memory(step)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_it_is_the_allocators():
    x = torch.randn(1000, 1024, device="cuda")  # whole blocks of the allocator

    def twice(x):
        return (x + 1).exp()

    for fn in (twice, torch.compile(twice, backend="eager")):
        assert meter.peak_memory(fn, x, device="cuda") == 2 * x.nbytes
    with meter.Memory("cuda") as m:
        y = twice(x)
    assert m.peak == 2 * x.nbytes and m.now == y.nbytes
