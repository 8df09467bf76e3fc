"What lesson precision keeps: number formats by their bits, a model of bytes, and the text that it reads."

import math
import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from course_lib import data


class Format(NamedTuple):
    """A binary floating-point format: one sign bit, `exponent` bits, `fraction` bits.

    The codes above `top` (without the sign) stand for infinity and NaN: `special` of them. IEEE 754 keeps all
    codes of the highest exponent for them, e4m3 one, e2m1 none.
    """

    name: str
    exponent: int
    fraction: int
    special: int

    @property
    def bits(self):
        return 1 + self.exponent + self.fraction

    @property
    def top(self):
        "The code of the largest finite number, as an int."
        return 2 ** (self.exponent + self.fraction) - 1 - self.special

    @property
    def normal(self):
        "The smallest number with the full fraction."
        return 2.0 ** (2 - 2 ** (self.exponent - 1))

    @property
    def smallest(self):
        "The smallest positive number, a subnormal one."
        return self.normal * 2.0**-self.fraction

    @property
    def largest(self):
        "The largest finite number."
        power, steps = divmod(self.top, 2**self.fraction)
        return math.ldexp(self.normal, power - 1) * (1 + steps * 2.0**-self.fraction)


FORMATS = {
    f.name: f
    for f in (
        Format("fp32", 8, 23, 2**23),
        Format("tf32", 8, 10, 2**10),
        Format("fp16", 5, 10, 2**10),
        Format("bf16", 8, 7, 2**7),
        Format("e5m2", 5, 2, 2**2),
        Format("e4m3", 4, 3, 1),
        Format("e2m1", 2, 1, 0),
    )
}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
          "e5m2": torch.float8_e5m2, "e4m3": torch.float8_e4m3fn}  # fmt: skip


def explore(encode, decode, number=0.1, power=0):
    "How each format holds `number` times 2^power, by an `encode` and a `decode`: rows for `view_bits`."
    wanted, rows = math.ldexp(number, power), []
    for fmt in FORMATS.values():
        code = encode(wanted, fmt)
        stored = decode(code, fmt)
        if abs(wanted) > fmt.largest:
            state = "too large"
        elif stored == 0 and wanted:
            state = "too small"
        else:
            state = "normal" if abs(stored) >= fmt.normal or not wanted else "subnormal"
        error = abs(stored - wanted) / abs(wanted) if wanted else 0.0
        rows.append({"name": fmt.name, "bits": format(code, f"0{fmt.bits}b"), "exponent": fmt.exponent,
                     "stored": stored, "error": error, "state": state})  # fmt: skip
    return {"wanted": wanted, "number": number, "power": power, "rows": rows}


# --- Text, and a model of its bytes ---------------------------------------------------


def text(folder=None):
    """The source of Python's standard library as bytes: uint8 tensors (train, valid), every 20th file valid.

    `folder` is where the library lies, by default where this Python has it. DataError where less than a
    megabyte is found.
    """
    folder = Path(folder or sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"))
    parts = [
        b"".join(f.read_bytes() for i, f in enumerate(files) if (i % 20 == 0) is v) for v in (False, True)
    ]
    if sum(map(len, parts)) < 1_000_000:
        raise data.DataError(
            f"this Python's standard library lies in {folder} without its source, which the lesson reads as "
            "text: use a Python that ships it, as those of python.org, conda and uv do"
        )
    return tuple(torch.frombuffer(bytearray(p), dtype=torch.uint8) for p in parts)


def batches(source, n, length, steps, seed, device):
    "`steps` batches of `n` random windows of `length` bytes: pairs (bytes, the byte after each), int64."
    draw = torch.Generator().manual_seed(seed)
    # All at once: a copy to the GPU at every step would be one more thing to wait for.
    starts = torch.randint(len(source) - length, (steps, n, 1), generator=draw).to(device)
    source, offsets = source.to(device), torch.arange(length + 1, device=device)
    for at in starts:
        window = source[at + offsets].long()
        yield window[:, :-1], window[:, 1:]


class Block(nn.Module):
    "A transformer layer, normalised before attention and feed-forward; attention is causal; no biases."

    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        n, t, width = x.shape
        parts = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, t, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ByteModel(nn.Module):
    "A language model of bytes: ids [N, T], T up to `length`, to logits [N, T, 256] of the next byte."

    def __init__(self, layers, width, heads, length):
        super().__init__()
        self.embed, self.positions = nn.Embedding(256, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for table in (self.embed, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, ids):
        x = self.embed(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def scheduled(opt, batches, steps, lr):
    "The batches; before each, its learning rate is set: up to `lr` in 5 % of the steps, then down to zero."
    for i, batch in enumerate(batches):
        opt.param_groups[0]["lr"] = lr * min((i + 1) / (0.05 * steps), 1 - i / steps)
        yield batch


@torch.no_grad()
def validate(net, batches, dtype):
    "Mean loss of `net` over batches (x, y), under autocast to `dtype` unless that is float32."
    losses = []
    for x, y in batches:
        with torch.autocast(x.device.type, dtype=dtype, enabled=dtype != torch.float32):
            losses.append(F.cross_entropy(net(x).flatten(0, 1), y.flatten()))
    return torch.stack(losses).mean().item()
