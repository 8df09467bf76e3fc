"""Encoder against torch's own post-norm encoder, and the operators it is made of."""

import pytest
import torch
from torch import nn

from course_lib import models


def theirs(layer, width, heads, ffn):
    "torch's encoder layer, in float64, with the weights of ours."
    t = nn.TransformerEncoderLayer(
        width, heads, ffn, dropout=0.0, activation="gelu", batch_first=True, dtype=torch.float64
    )
    with torch.no_grad():
        parts = (layer.query, layer.key, layer.value)
        t.self_attn.in_proj_weight.copy_(torch.cat([p.weight for p in parts]))
        t.self_attn.in_proj_bias.copy_(torch.cat([p.bias for p in parts]))
    pairs = {
        "out": t.self_attn.out_proj,
        "up": t.linear1,
        "down": t.linear2,
        "norm1": t.norm1,
        "norm2": t.norm2,
    }
    for name, module in pairs.items():
        module.load_state_dict(getattr(layer, name).state_dict())
    return t


@pytest.mark.parametrize("width, heads, ffn, n, t", [(24, 3, 40, 2, 7), (16, 4, 64, 3, 5), (10, 1, 6, 1, 11)])
def test_layer_equals_torch(width, heads, ffn, n, t):
    layer = models.EncoderLayer(width, heads, ffn).double()
    for p in (layer.norm1, layer.norm2):
        nn.init.normal_(p.weight)
        nn.init.normal_(p.bias)
    other = theirs(layer, width, heads, ffn)
    x = torch.randn(n, t, width, dtype=torch.float64, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    a, b = layer(x), other(y)
    torch.testing.assert_close(a, b)
    g = torch.randn_like(a)
    a.backward(g)
    b.backward(g)
    torch.testing.assert_close(x.grad, y.grad)
    torch.testing.assert_close(layer.down.weight.grad, other.linear2.weight.grad)


def test_encoder_stacks_layers():
    net = models.Encoder(3, 24, 4, ffn=20)
    x = torch.randn(2, 5, 24)
    want = x
    for layer in net.layers:
        want = layer(want)
    torch.testing.assert_close(net(x), want)
    assert len(net.layers) == 3 and net.layers[0].up.out_features == 20


def test_encoder_with_a_vocabulary():
    net = models.Encoder(2, 24, 4, vocab=37, length=9)
    ids = torch.randint(37, (3, 7))
    assert net(ids).shape == (3, 7, 37)
    # A position is known: the same token twice gives two different rows.
    same = torch.full((1, 7), 5)
    out = net(same)
    assert not torch.allclose(out[0, 0], out[0, 1])
    net(ids).sum().backward()
    assert all(p.grad is not None for p in net.parameters())


def test_default_feed_forward_is_four_times_the_width():
    assert models.EncoderLayer(24, 2).up.out_features == 96


def test_parameter_count_of_a_bert_large_layer():
    net = models.Encoder(1, 1024, 16)
    assert sum(p.numel() for p in net.parameters()) == 12 * 1024**2 + 13 * 1024


def test_meter_counts_forward_and_backward():
    meter = pytest.importorskip("course_lib.meter")
    net = models.Encoder(2, 16, 2, ffn=24)
    x = torch.randn(3, 5, 16, requires_grad=True)

    def step():
        net.zero_grad()
        x.grad = None
        net(x).backward(torch.ones(3, 5, 16))

    counts = meter.of(step)
    tokens, pairs = 3 * 5, 3 * 5 * 5
    forward = 2 * (2 * tokens * (4 * 16 * 16 + 2 * 16 * 24) + 4 * pairs * 16)
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as f:
        step()
    assert f.get_total_flops() == 3 * forward
    assert counts.flops >= 3 * forward and counts.syncs == 0 and counts.bytes > 0
