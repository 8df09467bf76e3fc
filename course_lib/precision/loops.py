"""One mixed-precision training loop, four ways: by hand, autocast, Accelerate, fastai.

All train the same net from the same start on the same batches and return the loss of each step.
"""

import functools
import warnings

import torch
from torch import nn
from torch.nn import functional as F

from course_lib import data, models, precision

LR = 0.1
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


def start(device, size=100):
    "The net, and the batches of digits for training and validation."
    torch.manual_seed(1)
    net = nn.Sequential(nn.Flatten(), models.mlp([64, 128, 10])).to(device)
    digits = data.digits()
    train = data.Batches(*digits.train, size=size, seed=1).to(device)
    return net, train, data.Batches(*digits.valid, size=400).to(device)


def half_forward(net, x, dtype):
    "The net's logits with every linear layer in `dtype`: the weights stay in fp32 and are cast at each use."
    for layer in net.modules():
        if isinstance(layer, nn.Linear):
            x = F.linear(x.to(dtype), layer.weight.to(dtype), layer.bias.to(dtype))
        elif isinstance(layer, nn.ReLU | nn.Flatten):
            x = layer(x)
    return x


def by_hand(name, device="cpu"):
    "Casts written out, and `precision.Scaler` where the format is fp16."
    net, train, _ = start(device)
    opt = torch.optim.SGD(net.parameters(), lr=LR)
    scaler = precision.Scaler() if name == "fp16" else None
    losses = []
    for x, y in train:
        loss = F.cross_entropy(half_forward(net, x, HALF[name]).float(), y)
        opt.zero_grad()
        if scaler:
            scaler.scale_loss(loss).backward()
            scaler.step(opt)
        else:
            loss.backward()
            opt.step()
        losses.append(loss.item())
    return losses


def autocast(name, device="cpu"):
    "`torch.autocast` chooses the casts, `torch.amp.GradScaler` the scale."
    net, train, _ = start(device)
    opt = torch.optim.SGD(net.parameters(), lr=LR)
    kind = torch.device(device).type
    scaler = torch.amp.GradScaler(kind, enabled=name == "fp16")
    losses = []
    for x, y in train:
        with torch.autocast(kind, dtype=HALF[name]):
            loss = F.cross_entropy(net(x), y)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    return losses


def accelerate(name, device="cpu"):
    "Accelerate wraps net, optimizer and backward; `mixed_precision` is the one line that matters."
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)  # it is one for the whole process, and remembers its first precision
    accelerator = Accelerator(mixed_precision=name, cpu=torch.device(device).type == "cpu")
    net, train, _ = start(accelerator.device)
    net, opt = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=LR))
    losses = []
    for x, y in train:
        loss = F.cross_entropy(net(x), y)
        opt.zero_grad()
        accelerator.backward(loss)
        opt.step()
        losses.append(loss.item())
    AcceleratorState._reset_state(True)
    return losses


def fastai(name, device="cuda"):
    "fastai's `to_fp16` or `to_bf16`. They ask for a CUDA device: without one they would train in fp32."
    if torch.device(device).type != "cuda":
        raise ValueError(
            f"fastai's to_{name} works on a CUDA device, and {device!r} was given: on a CPU it would train "
            "in fp32; use autocast or Accelerate there"
        )
    return _fastai(name, device)


def _fastai(name, device):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # from what fastai imports
        from fastai.callback.core import Callback
        from fastai.callback.fp16 import MixedPrecision  # importing it gives Learner its to_fp16 and to_bf16
        from fastai.data.core import DataLoaders
        from fastai.learner import Learner
        from fastai.optimizer import SGD

    class KeepLosses(Callback):
        order = MixedPrecision.order + 1
        losses = None

        def before_fit(self):
            self.losses = []

        def after_loss(self):
            if self.training:
                self.losses.append(self.loss.item())

    net, train, valid = start(device)
    keep = KeepLosses()
    loaders = DataLoaders(train, valid, device=torch.device(device))
    learn = Learner(
        loaders, net, loss_func=F.cross_entropy, opt_func=functools.partial(SGD, mom=0.0), cbs=keep
    )
    learn = learn.to_fp16() if name == "fp16" else learn.to_bf16()
    with learn.no_logging(), learn.no_bar():
        learn.fit(1, lr=LR)
    return keep.losses
