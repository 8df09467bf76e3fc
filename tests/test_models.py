"The small networks, and the encoder against torch's own."

import pytest
import torch
from torch import nn

from course_lib import models


def test_mlp_has_an_activation_between_layers_and_none_at_the_end():
    net = models.mlp([5, 7, 6, 3], activation=nn.Tanh)
    assert [type(m) for m in net] == [nn.Linear, nn.Tanh, nn.Linear, nn.Tanh, nn.Linear]
    assert net(torch.randn(2, 4, 5)).shape == (2, 4, 3)


def test_convnet_takes_any_size():
    for size in ((8, 8), (13, 9), (32, 32)):
        assert models.convnet(classes=7, width=4)(torch.randn(3, 1, *size)).shape == (3, 7)


def theirs(layer, width, heads, ffn):
    "torch's encoder layer, in float64, with the weights of ours."
    t = nn.TransformerEncoderLayer(
        width, heads, ffn, dropout=0.0, activation="gelu", batch_first=True, dtype=torch.float64
    )
    with torch.no_grad():
        parts = (layer.query, layer.key, layer.value)
        t.self_attn.in_proj_weight.copy_(torch.cat([p.weight for p in parts]))
        t.self_attn.in_proj_bias.copy_(torch.cat([p.bias for p in parts]))
    t.self_attn.out_proj.load_state_dict(layer.out.state_dict())
    pairs = {"up": t.linear1, "down": t.linear2, "norm1": t.norm1, "norm2": t.norm2}
    for name, module in pairs.items():
        module.load_state_dict(getattr(layer, name).state_dict())
    return t


@pytest.mark.parametrize("width, heads, ffn, n, t", [(24, 3, 40, 2, 7), (16, 4, 64, 3, 5), (10, 1, 6, 1, 11)])
def test_encoder_layer_equals_torch(width, heads, ffn, n, t):
    layer = models.EncoderLayer(width, heads, ffn).double()
    for p in (layer.norm1, layer.norm2):
        nn.init.normal_(p.weight)
        nn.init.normal_(p.bias)
    other = theirs(layer, width, heads, ffn)
    x = torch.randn(n, t, width, dtype=torch.float64, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    a, b = layer(x), other(y)
    g = torch.randn_like(a)
    a.backward(g)
    b.backward(g)
    torch.testing.assert_close([a, x.grad], [b, y.grad])
    torch.testing.assert_close(layer.down.weight.grad, other.linear2.weight.grad)


def test_encoder_stacks_layers_and_knows_positions():
    net, x = models.Encoder(3, 24, 4, ffn=20), torch.randn(2, 5, 24)
    torch.testing.assert_close(net(x), nn.Sequential(*net.layers)(x))
    assert len(net.layers) == 3 and net.layers[0].up.out_features == 20
    net = models.Encoder(2, 24, 4, vocab=37, length=9)
    out = net(torch.full((3, 7), 5))
    assert out.shape == (3, 7, 37) and not torch.allclose(out[0, 0], out[0, 1])
    out.sum().backward()
    assert all(p.grad is not None for p in net.parameters())


def test_parameter_count_of_a_bert_large_layer():
    assert sum(p.numel() for p in models.Encoder(1, 1024, 16).parameters()) == 12 * 1024**2 + 13 * 1024
