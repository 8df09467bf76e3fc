"""A small training run that a manifest can name, since a function of a notebook can't be imported again."""

import torch
from torch.nn import functional as F

from course_lib import data, models, reproduce


def digits(config):
    """Train a small convolutional network on scikit-learn's digits, on the CPU; return what came of it.

    `config`: `lr`, `batch`, `epochs`, `width`. The result: `losses` (one a step), `accuracy` on the
    validation images, and the `weights`. Order and initial weights come from torch's global generator.
    """
    known = {"lr", "batch", "epochs", "width"}
    if set(config) != known:
        raise ValueError(f"digits takes {sorted(known)}, and was given {sorted(config)}")
    digits = data.digits()
    (x, y), (vx, vy) = digits.train, digits.valid
    reproduce.uses(digits.source, x, y, vx, vy)
    model = models.convnet(classes=10, width=config["width"])
    optimizer = torch.optim.SGD(model.parameters(), config["lr"], momentum=0.9)
    losses = []
    for _ in range(config["epochs"]):
        for at in torch.randperm(len(x)).split(config["batch"]):
            loss = F.cross_entropy(model(x[at]), y[at])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    model.eval()
    with torch.no_grad():
        accuracy = (model(vx).argmax(1) == vy).float().mean().item()
    return {"losses": torch.stack(losses), "accuracy": accuracy, "weights": dict(model.state_dict())}
