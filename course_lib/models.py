"""The few networks that more than one lesson uses."""

import itertools
import math

import torch
from torch import nn
from torch.nn import functional as F


def mlp(sizes, activation=nn.ReLU):
    "A multilayer perceptron, an activation between each two layers: [..., sizes[0]] to [..., sizes[-1]]."
    layers = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), activation()]
    return nn.Sequential(*layers[:-1])


def convnet(classes=10, width=16):
    """A small convolutional network for grey images: three 3x3 convolutions, two of stride 2.

    Takes [N, 1, H, W] of any size (the last map is averaged), gives [N, classes].
    """
    layers = []
    for channels, out, stride in ((1, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2)):
        layers += [nn.Conv2d(channels, out, 3, stride=stride, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, classes))


class EncoderLayer(nn.Module):
    """One transformer encoder layer, normalised after each residual (post-norm), as in BERT.

    Written with plain operators, attention included, so that each can be counted and timed by itself. There
    is no dropout. Takes and gives [N, T, width]. Method: Vaswani et al. 2017, Devlin et al. 2018.
    """

    def __init__(self, width, heads, ffn=None):
        super().__init__()
        self.heads, ffn = heads, ffn or 4 * width
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, ffn), nn.Linear(ffn, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def attend(self, x):
        "Softmax attention of every position to every other: [N, T, width] to [N, T, width]."
        n, t, width = x.shape
        d = width // self.heads
        q, k, v = (f(x).view(n, t, self.heads, d).transpose(1, 2) for f in (self.query, self.key, self.value))
        scores = q @ k.transpose(-2, -1) / math.sqrt(d)  # [N, heads, T, T]
        mixed = scores.softmax(-1) @ v  # [N, heads, T, d]
        return self.out(mixed.transpose(1, 2).reshape(n, t, width))

    def forward(self, x):
        x = self.norm1(x + self.attend(x))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Encoder(nn.Module):
    """A BERT-like encoder: `layers` of attention and feed-forward, `width` wide, with `heads` heads.

    Without `vocab` it takes and gives [N, T, width]. With `vocab` it takes token ids [N, T] (int64, T up to
    `length`), adds learned positions, and gives logits [N, T, vocab]. `ffn` is 4 * width by default.
    """

    def __init__(self, layers, width, heads, vocab=None, ffn=None, length=512):
        super().__init__()
        self.embed = self.positions = self.head = None
        if vocab is not None:
            self.embed, self.positions = nn.Embedding(vocab, width), nn.Embedding(length, width)
            self.head = nn.Linear(width, vocab, bias=False)
        self.layers = nn.ModuleList(EncoderLayer(width, heads, ffn) for _ in range(layers))

    def forward(self, x):
        if self.embed is not None:
            x = self.embed(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(x)
