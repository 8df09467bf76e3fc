"The small networks."

import pytest
import torch
from torch import nn

from course_lib import models


def test_mlp_has_an_activation_between_layers_and_none_at_the_end():
    net = models.mlp([5, 7, 6, 3], activation=nn.Tanh)
    assert [type(m) for m in net] == [nn.Linear, nn.Tanh, nn.Linear, nn.Tanh, nn.Linear]
    assert net(torch.randn(2, 4, 5)).shape == (2, 4, 3)
    assert [type(m) for m in models.mlp((4, 2))] == [nn.Linear]


@pytest.mark.parametrize("size", [(8, 8), (13, 9), (32, 32)])
def test_convnet_takes_any_size(size):
    net = models.convnet(classes=7, width=4)
    assert net(torch.randn(3, 1, *size)).shape == (3, 7)


def test_convnet_has_dropout_in_training_only():
    net, x = models.convnet(dropout=0.5), torch.randn(4, 1, 8, 8)
    assert not torch.equal(net(x), net(x))
    net.eval()
    assert torch.equal(net(x), net(x))
