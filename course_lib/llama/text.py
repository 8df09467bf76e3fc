"""Real text without a network, its tokens, and the n-gram model that a Llama must beat.

The text is the documentation that Python and this project's packages carry: the docstrings of their source
files and Python's own help topics. Whole files are held out, and a paragraph is kept once.
"""

import importlib.util
import inspect
import re
import sysconfig
import zlib
from pathlib import Path

import numpy as np
import torch

PACKAGES = ("numpy", "torch", "scipy", "sklearn", "pandas", "matplotlib")  # the project's needs, and theirs
DOCSTRING = re.compile(r':[ \t]*\n[ \t]*[rRuU]?"""(.*?)"""', re.DOTALL)
END = "<|end|>"  # between two documents


class TextError(ValueError):
    "The text can't be used; notebooks show the sentence alone."

    def _render_traceback_(self):
        return [str(self)]


def documents(packages=PACKAGES):
    "(name of a file, its docstrings as one text), of Python's library and `packages`, and its help topics."
    from pydoc_data.topics import topics

    roots = {"python": Path(sysconfig.get_path("stdlib"))}
    for name in packages:
        if (found := importlib.util.find_spec(name)) is not None:
            roots[name] = Path(found.origin).parent
    yield from ((f"topic {name}", text) for name, text in sorted(topics.items()))
    for name, root in roots.items():
        for path in sorted(root.rglob("*.py")):
            inner = path.relative_to(root).parts
            if any(part.startswith(("test", "site-packages", "dist-packages")) for part in inner):
                continue
            source = path.read_text(encoding="utf-8", errors="replace")
            found = [inspect.cleandoc(text) for text in DOCSTRING.findall(source) if len(text) > 200]
            if found:
                yield f"{name}/{'/'.join(inner)}", "\n\n".join(found)


def corpus(packages=PACKAGES):
    "(training, validation): two lists of documents. One file in 20 is held out; no paragraph is in both."
    sides, seen = ([], []), set()
    for name, text in sorted(documents(packages), key=lambda d: zlib.crc32(d[0].encode()) % 20 == 0):
        fresh = [p for p in text.split("\n\n") if p not in seen and not seen.add(p)]
        if sum(map(len, fresh)) > 200:
            sides[zlib.crc32(name.encode()) % 20 == 0].append("\n\n".join(fresh))
    return sides


def train_tokenizer(texts, vocab):
    "A byte-level BPE of `vocab` tokens, `END` among them, as `tokenizers` makes it."
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer, texts):
    "All documents as one row of ids, int64, with `END` after each."
    end = tokenizer.token_to_id(END)
    return torch.tensor([i for e in tokenizer.encode_batch(list(texts)) for i in (*e.ids, end)])


def batches(ids, batch, context, seed=0, device="cpu"):
    """Pairs (x, y) without end: `batch` rows of `context` ids from anywhere in `ids`, and what follows each.

    Raises TextError where the text is shorter than a row and its next id.
    """
    if len(ids) < context + 1:
        raise TextError(
            f"the text has {len(ids):,} tokens, and a context of {context:,} needs {context + 1:,}: "
            "take more text or a shorter context"
        )
    draw, ids = torch.Generator().manual_seed(seed), ids.to(device)
    offsets = torch.arange(context + 1, device=device)
    while True:
        at = torch.randint(len(ids) - context, (batch, 1), generator=draw).to(device, non_blocking=True)
        rows = ids[at + offsets]
        yield rows[:, :-1], rows[:, 1:]


class NGram:
    """An n-gram model with interpolated, modified Kneser-Ney smoothing (Chen and Goodman 1998).

    `ids` are training tokens below `vocab`; n * log2(vocab) is at most 63, since an n-gram is kept as one
    integer. `scale` multiplies the three discounts, which are estimated from counts of counts; tune it.
    """

    def __init__(self, ids, vocab, n=5, scale=1.0):
        self.vocab, self.n, self.scale, self.tables = vocab, n, scale, []
        ids, grams, counts = np.asarray(ids), None, None
        for order in range(n, 0, -1):
            if order == n:  # the highest order has counts, the lower ones numbers of different words before
                grams, counts = np.unique(self._keys(ids, order), return_counts=True)
            else:
                grams, counts = np.unique(grams % vocab**order, return_counts=True)
            ones, twos, threes, fours = (max(1, int((counts == c).sum())) for c in (1, 2, 3, 4))
            y = ones / (ones + 2 * twos)
            cut = np.clip(
                [1 - 2 * y * twos / ones, 2 - 3 * y * threes / twos, 3 - 4 * y * fours / threes], 0.01, None
            )
            contexts, start = np.unique(grams // vocab, return_index=True)
            total = np.add.reduceat(counts, start)
            kinds = np.stack(
                [
                    np.add.reduceat(counts == 1, start),
                    np.add.reduceat(counts == 2, start),
                    np.add.reduceat(counts > 2, start),
                ],
                1,
            )
            self.tables.append((grams, counts, contexts, total, kinds, cut))
        self.tables.reverse()

    def _keys(self, ids, order):
        "Each `order` ids in a row as one integer, the last id in the lowest digits."
        keys = np.zeros(len(ids) - order + 1, np.int64)
        for i in range(order):
            keys = keys * self.vocab + ids[i : len(ids) - order + 1 + i]
        return keys

    def loss(self, ids, scale=None):
        "Mean loss in nats of each token of `ids` that has n - 1 before it."
        ids, scale = np.asarray(ids), self.scale if scale is None else scale
        p = np.full(len(ids) - self.n + 1, 1 / self.vocab)
        for order, (grams, counts, contexts, total, kinds, cut) in enumerate(self.tables, 1):
            keys = self._keys(ids, order)[self.n - order :]
            discount = np.minimum(scale * cut, [1, 2, 3])
            at = np.minimum(np.searchsorted(grams, keys), len(grams) - 1)
            count = np.where(grams[at] == keys, counts[at], 0)
            mine = np.maximum(count - discount[np.clip(count, 1, 3) - 1], 0)
            c = np.minimum(np.searchsorted(contexts, keys // self.vocab), len(contexts) - 1)
            known = contexts[c] == keys // self.vocab
            p = np.where(known, (mine + kinds[c] @ discount * p) / total[c], p)
        return float(-np.log(p).mean())
