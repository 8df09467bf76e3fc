"What lesson llama keeps out of its cells: counts and times of a step, cross-entropy in place, Meta's Llama."

import importlib.util
import itertools
import json
import math
import os
import sys
import tempfile
from pathlib import Path

import torch
from torch.nn import functional as F

from course_lib import checking, meter, ranks, timing


def count_step(step, *args):
    "(operators, bytes alive at the peak beyond weights and state, syncs) of a step, after two that warm up."
    for _ in range(2):
        step(*args)
    with meter.count(portable=False) as c:
        step(*args)
    return c.ops, meter.peak_memory(step, *args), c.syncs


def time_step(step, runs=7, warmup=3, device=None):
    "`timing.Timing` of `step()` from start to the next start, which CUDA events mark; on a CPU by the clock."
    if device == "cpu" or not torch.cuda.is_available():
        return timing.time(step, seconds=0.2, device="cpu")
    for _ in range(warmup):
        step()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(runs + 1)]
    with timing.no_gc():
        for mark in marks[:-1]:
            mark.record()
            step()
        marks[-1].record()
        torch.cuda.synchronize()
    took = [a.elapsed_time(b) * 1e-3 for a, b in itertools.pairwise(marks)]
    return timing.summary(took, runs)


def xent(logits, target):
    """A loss for each row of logits [n, vocab]; 0 where the target is negative.

    The logits become the gradient of the mean over the rows that count, as in lesson triton.
    """
    counts = target >= 0
    wide, index = logits.float(), target.clamp(min=0)[:, None]
    lse = wide.logsumexp(1, keepdim=True)
    loss = torch.where(counts, (lse - wide.gather(1, index))[:, 0], 0.0)
    grad = (wide - lse).exp().scatter_add(1, index, torch.full_like(lse, -1.0))
    logits.copy_(grad * counts[:, None] / counts.sum().clamp(min=1))
    return loss


def flat_xent(logits, target):
    "`xent` where every target is 0 or more, with no second matrix: for counting what its caller keeps."
    n = torch.arange(len(target))
    loss = logits.logsumexp(1) - logits[n, target]
    logits.sub_(logits.logsumexp(1, keepdim=True)).exp_()
    logits[n, target] -= 1
    logits.div_(len(target))
    return loss


def meta_names(config):
    "{Meta's name: shape} of a Llama's weights in their first release."
    kv, shapes = config.kv_heads * config.head_dim, {"tok_embeddings.weight": (config.vocab, config.width)}
    for i in range(config.layers):
        rows = {
            "attention.wq": config.width,
            "attention.wk": kv,
            "attention.wv": kv,
            "attention.wo": config.width,
        }
        rows |= {
            "feed_forward.w1": config.ffn,
            "feed_forward.w2": config.width,
            "feed_forward.w3": config.ffn,
        }
        sizes = {k: (n, config.ffn if k.endswith("w2") else config.width) for k, n in rows.items()}
        sizes |= {"attention_norm": (config.width,), "ffn_norm": (config.width,)}
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in sizes.items()}
    return shapes | {"norm.weight": (config.width,), "output.weight": (config.vocab, config.width)}


def meta_logits(weights, config, ids):
    "Logits by Meta's own names and rotation: each pair of neighbours of a head is a complex number."
    d, time = config.head_dim, ids.shape[1]
    angle = torch.outer(torch.arange(time).double(), config.theta ** -(torch.arange(0, d, 2).double() / d))
    turn = torch.polar(torch.ones_like(angle), angle)[None, :, None]  # [1, time, 1, d / 2]

    def norm(x, name):
        return x / (x.square().mean(-1, keepdim=True) + config.eps).sqrt() * weights[name]

    def heads(x, name, turned):
        out = (x @ weights[name].T).unflatten(-1, (-1, d))
        if turned:
            out = torch.view_as_real(torch.view_as_complex(out.unflatten(-1, (-1, 2))) * turn).flatten(-2)
        return out.repeat_interleave(config.heads // out.shape[2], 2).transpose(1, 2)

    x = weights["tok_embeddings.weight"][ids]
    hidden = torch.ones(time, time, dtype=torch.bool).triu(1)
    for i in range(config.layers):
        at = f"layers.{i}."
        y = norm(x, at + "attention_norm.weight")
        q, k, v = (heads(y, f"{at}attention.w{n}.weight", n != "v") for n in "qkv")
        p = (q @ k.mT / math.sqrt(d)).masked_fill(hidden, -math.inf).softmax(-1)
        x = x + (p @ v).transpose(1, 2).flatten(-2) @ weights[at + "attention.wo.weight"].T
        y = norm(x, at + "ffn_norm.weight")
        w1, w2, w3 = (weights[f"{at}feed_forward.w{n}.weight"] for n in "123")
        x = x + (F.silu(y @ w1.T) * (y @ w3.T)) @ w2.T
    return norm(x, "norm.weight") @ weights["output.weight"].T


def explore_memory(layers=8, width=1024, batch=8, context=2048, scores=True, fp32=True, gpu=141):
    "GB that a training step of a Llama needs, by part; `scores` stores them, `fp32` is of all activations."
    from course_lib.llama import train
    from course_lib.llama.model import Config

    config = Config(
        32_000, width, layers, width // 128, width // 512, -(-(11 * width // 4) // 128) * 128, context
    )
    need = train.needed(config, batch, 4 if fp32 else 2, scores, 12 if fp32 else 2)
    return {
        "need": {k: n / 1e9 for k, n in need.items()},
        "millions": sum(train.parameters(config)) / 1e6,
        "gpu": gpu,
    }


def adopt(exercise, folder="."):
    """What the learner's copy of an earlier lesson in `folder` has for `exercise`, where it passes here.

    The copy's imports and its exercises up to this one are run as a module, then the lesson's own check. Else
    the course's solution, as `checking.yours` gives it.
    """
    topic = exercise.split(".")[0]
    check = importlib.import_module(f"course_lib.{topic}.check")
    names = importlib.import_module(f"course_lib.{topic}.solutions").EXERCISES[exercise]
    for path in sorted(Path(folder).glob(f"[0-9][0-9]_{topic}.ipynb"))[-1:]:
        cells, source = json.loads(path.read_text(encoding="utf-8"))["cells"], []
        for cell in cells:
            tags, text = cell["metadata"].get("tags", []), "".join(cell["source"])
            if cell["metadata"].get("exercise", {}).get("id") == exercise:
                break
            if "exercise" in tags or cell.get("id") == "imports":
                source.append(text)
        if "BEGIN SOLUTION" in "".join(source):
            break  # a worked notebook, not a learner's
        file = Path(
            tempfile.mkdtemp(prefix="course-yours-"), f"{topic}_yours.py"
        )  # Triton reads a kernel's file
        file.write_text("\n\n\n".join(source), encoding="utf-8")
        spec = importlib.util.spec_from_file_location(file.stem, file)
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
            checking.exercises(check)[exercise](*(getattr(module, name) for name in names))
        except Exception as e:
            print(f"{path.name}: {checking.describe(e)}")
    return checking.yours(exercise)


def rank_environment(gpus=False):
    "This process's environment for ranks that `torchrun` starts from the course's folder; without GPUs."
    paths = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    return {**ranks.ENVIRONMENT, **os.environ, **paths} | ({} if gpus else {"CUDA_VISIBLE_DEVICES": ""})


def transformers_logits(folder, ids):
    "Logits that Transformers' Llama gives for a folder with weights; None where it is not installed."
    if importlib.util.find_spec("transformers") is None:
        print("Transformers is not installed here: `pip install transformers` lets this cell compare")
        return None
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers.LlamaForCausalLM.from_pretrained(folder)(ids).logits
