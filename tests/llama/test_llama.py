"Lesson llama beside its checks: the model, its files, its text, its training on ranks, its estimates."

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from course_lib import llama as lesson
from course_lib import meter, ranks, show
from course_lib.llama import figures, solutions, text, train
from course_lib.llama import model as llama
from course_lib.llama.model import Config, Llama

TINY = Config(vocab=61, width=32, layers=2, heads=4, kv_heads=4, ffn=48, context=16, pad=8)


def network(config=TINY, **blocks):
    torch.manual_seed(0)
    model = Llama(config, **blocks)
    for p in model.parameters():
        if p.ndim == 1:
            torch.nn.init.uniform_(p, 0.5, 1.5)
    return model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_folder_is_read_by_transformers_and_by_load(tmp_path, tied, kv_heads):
    config = replace(TINY, tied=tied, kv_heads=kv_heads, theta=5e4)
    model, ids = network(config), torch.randint(0, 61, (2, 13))
    llama.save(model, tmp_path)
    loaded = llama.load(tmp_path)
    assert replace(loaded.config, pad=8) == config
    assert torch.allclose(loaded(ids), model(ids), atol=1e-6)
    transformers = pytest.importorskip("transformers")
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert torch.allclose(theirs(ids).logits, model(ids), atol=1e-5)
    theirs.save_pretrained(tmp_path / "theirs")
    assert torch.allclose(llama.load(tmp_path / "theirs")(ids), model(ids), atol=1e-6)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"ffn": 64}, "gate_proj.weight is [48, 32]"),
        ({"layers": 3}, "lacks weight model.layers.2"),
        ({"layers": 1}, "has an unknown weight model.layers.1"),
        ({"vocab": 60}, "embed_tokens.weight is [61, 32]"),
    ],
)
def test_a_checkpoint_of_another_shape_is_one_sentence(tmp_path, change, words):
    llama.save(network(), tmp_path)
    with pytest.raises(llama.CheckpointError) as e:
        llama.load(tmp_path, replace(TINY, **change))
    assert words in str(e.value) and len(e.value._render_traceback_()) == 1


def test_scaled_positions_are_refused(tmp_path):
    llama.save(network(), tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(about | {"rope_scaling": {"rope_type": "llama3"}}))
    with pytest.raises(llama.CheckpointError, match="scaled positions"):
        llama.load(tmp_path)


@pytest.mark.parametrize("attend", [llama.fused_attend, llama.plain_attend, solutions.attend])
def test_blocks_agree_and_rotation_is_fp32_in_bf16(attend):
    ids = torch.randint(0, 61, (2, 16))
    config = replace(TINY, kv_heads=2)
    assert torch.allclose(network(config, attend=attend)(ids), network(config)(ids), atol=1e-5)
    assert network(config).bfloat16().cos.dtype == torch.float32


def test_writing_with_a_cache_is_writing_without():
    model, ids = network(replace(TINY, kv_heads=2)), torch.randint(0, 61, (2, 5))
    wanted = ids
    for _ in range(8):
        wanted = torch.cat((wanted, model(wanted)[:, -1:].argmax(-1)), 1)
    assert torch.equal(llama.generate(model, ids, 8, temperature=0), wanted)
    assert llama.generate(model, ids, 100).shape[1] == TINY.context
    cache = [[] for _ in range(TINY.layers)]  # a long prompt in pieces
    model = network(replace(TINY, kv_heads=2), attend=solutions.attend)
    pieces = [model(wanted[:, a:b], cache=cache) for a, b in ((0, 4), (4, 9), (9, 10), (10, 13))]
    assert torch.allclose(torch.cat(pieces, 1), model(wanted), atol=1e-5)


def test_flops_are_those_that_run():
    model, ids = network(attend=llama.plain_attend), torch.zeros(2, 3, 16, dtype=torch.long)
    with meter.count(portable=False) as c:
        model(*ids).backward()
    whole = (
        6 * TINY.layers * TINY.width * (2 * TINY.context - (TINY.context + 1))
    )  # the half that is not counted
    assert c.flops == 48 * (train.flops(TINY, TINY.context) + whole)


@pytest.mark.parametrize(
    "scores, logits, blocks", [(True, 12, {"attend": llama.plain_attend}), (False, 12, {})]
)
def test_the_estimate_of_memory_is_near_what_a_step_holds(scores, logits, blocks):
    config = Config(vocab=500, width=64, layers=4, heads=4, kv_heads=2, ffn=176, context=128)
    model, ids = network(config, **blocks), torch.zeros(2, 2, 128, dtype=torch.long)
    held = meter.peak_memory(lambda: model(*ids).backward())
    need = train.needed(config, 2, 4, scores, logits)
    assert 0.6 < (sum(need.values()) - need["weights"] * 0.75) / held < 1.4


def test_a_small_gpu_is_refused_before_the_run():
    need = train.needed(TINY, 64)
    with pytest.raises(train.MemoryNeed, match=r"a rung needs about 0[.]0 GB"):
        train.refuse_small_gpu(need, "a rung", free=1e3)
    train.refuse_small_gpu(need, "a rung", free=1e12)


def test_cross_entropies_in_place_agree():
    logits, y = torch.randn(9, 13), torch.randint(0, 13, (9,))
    leaf = logits.clone().requires_grad_()
    F.cross_entropy(leaf, y).backward()
    for fn in (lesson.xent, lesson.flat_xent):
        own = logits.clone()
        assert torch.allclose(fn(own, y), F.cross_entropy(logits, y, reduction="none"), atol=1e-5)
        assert torch.allclose(own, leaf.grad, atol=1e-6)


# --- text -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sides():
    return text.corpus(())


def test_no_paragraph_is_in_both_parts_and_tokens_are_the_text(sides):
    training, validation = sides
    assert sum(map(len, training)) > 1e6 and sum(map(len, validation)) > 2e4
    assert not {p for d in training for p in d.split("\n\n")} & {
        p for d in validation for p in d.split("\n\n")
    }
    tokenizer = text.train_tokenizer(training[:200], 400)
    ids = text.encode(tokenizer, validation[:3])
    assert ids.max() < 400 and (ids == tokenizer.token_to_id(text.END)).sum() == 3
    assert tokenizer.decode(ids.tolist(), skip_special_tokens=True) == "".join(validation[:3])


def kneser_ney(ids, vocab, context):
    "Probabilities of what follows `context` (two ids), as Chen and Goodman write it, by dictionaries."
    rows = [tuple(ids[i : i + 3]) for i in range(len(ids) - 2)]
    levels = [{}, {}, {}]
    for gram in rows:
        levels[2][gram] = levels[2].get(gram, 0) + 1
    for n in (1, 0):
        for gram in levels[n + 1]:
            levels[n][gram[1:]] = levels[n].get(gram[1:], 0) + 1
    p = [1 / vocab] * vocab
    for n, counts in enumerate(levels):
        number = [max(1, sum(c == k for c in counts.values())) for k in (1, 2, 3, 4)]
        y = number[0] / (number[0] + 2 * number[1])
        cut = [max(0.01, k - (k + 1) * y * number[k] / number[k - 1]) for k in (1, 2, 3)]
        before = tuple(context[2 - n :])
        mine = {g[-1]: c for g, c in counts.items() if g[:-1] == before}
        if mine:
            left = sum(cut[min(c, 3) - 1] for c in mine.values())
            total = sum(mine.values())
            p = [
                (max(mine.get(w, 0) - (cut[min(mine[w], 3) - 1] if w in mine else 0), 0) + left * p[w])
                / total
                for w in range(vocab)
            ]
    return p


def test_the_ngram_model_is_kneser_neys():
    ids = np.random.RandomState(0).geometric(0.3, 400) % 7
    model = text.NGram(torch.tensor(ids), 7, 3)
    for context in ((1, 2), (6, 6), (3, 0), (5, 1)):
        mine = [np.exp(-model.loss([*context, w])) for w in range(7)]
        assert np.allclose(mine, kneser_ney(ids.tolist(), 7, context), atol=1e-9)
        assert abs(sum(mine) - 1) < 1e-9


def test_a_text_shorter_than_the_context_is_one_sentence():
    for run in (lambda ids: train.train(TINY, ids, steps=1), lambda ids: train.evaluate(network(), ids)):
        with pytest.raises(text.TextError, match="16 tokens, and a context of 16 needs 17"):
            run(torch.zeros(16, dtype=torch.long))
    assert len(list(zip(range(2), text.batches(torch.zeros(17, dtype=torch.long), 2, 16), strict=False))) == 2


# --- training ---------------------------------------------------------------------------------


def losses_of(way):
    ids = torch.randint(0, 61, (900,), generator=torch.Generator().manual_seed(1))
    return [float(x) for x in train.train(TINY, ids, way=way, batch=8, steps=5)[1]]


def test_four_ranks_train_as_one_process():
    alone = losses_of("one")
    assert len(set(alone)) == 5
    with ranks.Group(4, backend="gloo") as group:
        for way in ("data", "sharded", "tensor"):
            for losses in group.run(losses_of, way):
                assert np.allclose(losses, alone, atol=1e-5), way


def test_training_lowers_the_loss_of_a_pattern():
    ids = torch.arange(400) % 17
    model, losses, seconds = train.train(TINY, ids, batch=8, steps=63, lr=1e-2)
    assert losses[-1] < 0.5 * losses[0] and len(losses) == len(seconds) == 63
    assert all(isinstance(loss, float) for loss in losses)
    rows = train.evaluate(model, ids)
    total, number = solutions.score(model, ids, 4)
    assert number == 399 and abs(total / number - rows) < 0.01 and rows < 0.5 * losses[0]


def script(*options, ranks_=0):
    launch = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    launch += ["--nproc-per-node", str(ranks_)]
    words = [sys.executable, *(launch if ranks_ else []), "-m", "course_lib.llama.train", *options]
    return subprocess.run(words, capture_output=True, text=True, env=lesson.rank_environment(), timeout=200)


def test_the_script_under_torchrun_writes_a_folder(tmp_path):
    shape = ["--shape", "32", "2", "4", "2", "48", "32", "--vocab", "300", "--packages"]
    done = script(
        "--way", "sharded", "--steps", "2", "--batch", "4", "--out", str(tmp_path), *shape, ranks_=2
    )
    assert done.returncode == 0, done.stderr
    assert "step      2  loss" in done.stdout and "validation loss" in done.stdout
    assert llama.load(tmp_path)(torch.zeros(1, 4, dtype=torch.long)).shape == (1, 4, 300)
    assert (tmp_path / "tokenizer.json").exists()


def test_the_script_says_what_is_wrong_in_one_line():
    done = script("--way", "data")
    assert done.returncode == 1 and done.stderr.startswith("--way data, sharded and tensor need torchrun")
    with pytest.raises(ValueError, match="8 rows can't be shared"), ranks.Group(3, backend="gloo") as group:
        try:
            group.run(losses_of, "data")
        except ranks.RankError as e:
            raise e.__cause__ from None


# --- the lesson's own -------------------------------------------------------------------------


def test_an_answer_of_an_earlier_lesson_is_taken_where_it_passes(tmp_path, capsys):
    answer = "class MasterWeights(solutions.MasterWeights):\n    'mine'"
    cells = [
        {"id": "imports", "metadata": {}, "source": ["from course_lib.precision import solutions"]},
        {"id": "ex1-stub", "metadata": {"tags": ["exercise"]}, "source": [answer]},
        {"id": "ex1-check", "metadata": {"exercise": {"id": "precision.1"}}, "source": []},
    ]
    (tmp_path / "07_precision.ipynb").write_text(json.dumps({"cells": cells}))
    assert lesson.adopt("precision.1", tmp_path).__doc__ == "mine"
    assert "precision.1 passed" in capsys.readouterr().out
    cells[1]["source"] = ["class MasterWeights:\n    def __init__(self, params, make):\n        pass"]
    (tmp_path / "07_precision.ipynb").write_text(json.dumps({"cells": cells}))
    assert lesson.adopt("precision.1", tmp_path).__doc__ != "mine"
    out = capsys.readouterr().out
    assert "precision.1 not passed" in out and "the course's own solution" in out


def test_meta_names_and_rotation():
    config = replace(TINY, tied=False, pad=1, kv_heads=2)
    weights = {k: torch.randn(s).double() / 5 for k, s in lesson.meta_names(config).items()}
    model = Llama(config)
    model.load_state_dict(solutions.from_meta(weights, config))
    ids = torch.randint(0, 61, (2, 7))
    want = lesson.meta_logits({k: v.float().double() for k, v in weights.items()}, config, ids)
    assert torch.allclose(model.double()(ids), want, atol=1e-4)


def test_ranks_see_gpus_only_where_they_are_asked_for(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert lesson.rank_environment()["CUDA_VISIBLE_DEVICES"] == ""
    assert lesson.rank_environment(gpus=True)["CUDA_VISIBLE_DEVICES"] == "1"


def test_figures_are_drawn():
    show.style()
    memory = show.Explorer(lesson.explore_memory, figures.view_memory, batch=[1, 8], scores=[True, False])
    drawn = [
        figures.draw_ladder({"naive": 2e4, "all": 5e5}),
        memory.view(memory.compute()),
        figures.draw_losses([3.0, 2.0], 2.5, 2.2),
        figures.draw_ways({("one", 1): 1e5, ("data", 2): 1.9e5, ("tensor", 2): 8e4, ("data", 4): 3.7e5}),
    ]
    names = [label.get_text().split()[:2] for label in drawn[-1].axes[0].get_xticklabels()]
    assert names == [["one", "1"], ["data", "2"], ["data", "4"], ["tensor", "2"]]
    assert all(fig.axes and fig.axes[0].get_xlabel() + fig.axes[0].get_ylabel() for fig in drawn)
