"Answers to the exercises of sharding: the course's, right ones of another style, and wrong ones."

import contextlib
import math

import torch
from torch import nn
from torch.nn import functional as F

from course_lib.sharding import solutions

REFERENCE = {n: getattr(solutions, names[0]) for n, names in solutions.EXERCISES.items()}


# --- sharding.1: what a rank keeps ------------------------------------------------------------


def by_chunk(model, stage, rank, ranks):
    "Right: PyTorch's chunk on meta tensors."

    def piece(p, cut):
        found = torch.empty_like(p, device="meta").chunk(ranks if cut else 1, 0)
        return found[rank if cut else 0].nbytes if not cut or rank < len(found) else 0

    params = list(model.parameters())
    trained = [p for p in params if p.requires_grad]
    return (
        sum(piece(p, stage == 3) for p in params),
        sum(piece(p, stage in (2, 3)) for p in trained),
        2 * sum(piece(p, stage != 0) for p in trained),
    )


def by_ranges(model, stage, rank, ranks):
    "Right: rows by range, a loop."
    total = [0, 0, 0]
    for p in model.parameters():
        rows = math.ceil(p.shape[0] / ranks)
        mine = len(range(p.shape[0])[rank * rows : (rank + 1) * rows])
        row = p[0].numel() * p.element_size()
        for k, first in enumerate((3, 2, 1)):
            if k == 0 or p.requires_grad:
                total[k] += row * (mine if stage >= first else p.shape[0]) * (2 if k == 2 else 1)
    return total


def _bytes(model, stage, rank, ranks, piece=None, params=None, trained=lambda p: p.requires_grad, moments=2):
    def chunk(p):
        rows = -(-p.shape[0] // ranks)
        return max(0, min(rows, p.shape[0] - rank * rows)) * (p.nbytes // p.shape[0])

    piece, params = piece or chunk, params or list(model.parameters())
    w = sum(piece(p) if stage >= 3 else p.nbytes for p in params)
    g = sum(piece(p) if stage >= 2 else p.nbytes for p in params if trained(p))
    s = sum(piece(p) if stage >= 1 else p.nbytes for p in params if trained(p))
    return w, g, moments * s


def spreads_the_remainder(model, stage, rank, ranks):
    def piece(p):
        return torch.empty(p.shape, dtype=p.dtype, device="meta").tensor_split(ranks)[rank].nbytes

    return _bytes(model, stage, rank, ranks, piece)


def divides_evenly(model, stage, rank, ranks):
    return _bytes(model, stage, rank, ranks, lambda p: -(-p.nbytes // ranks))


def trains_the_frozen(model, stage, rank, ranks):
    return _bytes(model, stage, rank, ranks, trained=lambda p: True)


def tied_twice(model, stage, rank, ranks):
    params = [p for _, p in model.named_parameters(remove_duplicate=False)]
    return _bytes(model, stage, rank, ranks, params=params)


def stage_2_cuts_weights(model, stage, rank, ranks):
    w, g, s = _bytes(model, stage, rank, ranks)
    return (
        (_bytes(model, 3, rank, ranks)[0], _bytes(model, 1, rank, ranks)[1], s) if stage == 2 else (w, g, s)
    )


# --- sharding.2: Adam with its state in shards ------------------------------------------------


def _moment(name):
    def load(self, value):
        self.adam.state[self.part][name] = value

    return property(lambda self: self.adam.state[self.part][name], load)


class AdamInside:
    "Right: torch's own Adam on this rank's part of the row; the gradient of the part is kept."

    def __init__(self, params, dist, lr, betas, eps):
        self.params, self.dist = list(params), dist
        self.numbers = sum(p.numel() for p in self.params)
        self.n = math.ceil(self.numbers / dist.get_world_size())
        self.part = nn.Parameter(self._row(self.params)[dist.get_rank()].clone())
        self.adam = torch.optim.Adam([self.part], lr, betas, eps, foreach=False)
        self.t, self.m, self.v = 0, torch.zeros_like(self.part), torch.zeros_like(self.part)

    m, v = _moment("exp_avg"), _moment("exp_avg_sq")

    @property
    def t(self):
        return int(self.adam.state[self.part]["step"])

    @t.setter
    def t(self, value):
        self.adam.state[self.part]["step"] = torch.tensor(float(value))

    def _row(self, tensors):
        row = torch.cat([t.detach().reshape(-1) for t in tensors])
        return F.pad(row, (0, self.n * self.dist.get_world_size() - len(row))).view(
            self.dist.get_world_size(), self.n
        )

    def step(self):
        self.part.data.copy_(self._row(self.params)[self.dist.get_rank()])
        self.part.grad = torch.empty_like(self.part)
        full = self._row(torch.zeros_like(p) if p.grad is None else p.grad for p in self.params)
        self.dist.reduce_scatter_tensor(self.part.grad, full.flatten())
        self.part.grad /= self.dist.get_world_size()
        self.adam.step()
        full = full.flatten()
        self.dist.all_gather_into_tensor(full, self.part)
        with torch.no_grad():
            sizes = [p.numel() for p in self.params]
            for p, new in zip(self.params, full[: self.numbers].split(sizes), strict=True):
                p.copy_(new.view(p.shape))


class Scaled(solutions.ShardedAdam):
    "Right: the mean before the sum, lists and torch.split, plain arithmetic."

    @torch.no_grad()
    def step(self):
        n, size, like = self.n, self.dist.get_world_size(), self.params[0]
        rows = []
        for tensors in ([p.grad for p in self.params], self.params):
            flat = [
                like.new_zeros(p.numel()) if t is None else t.reshape(-1)
                for p, t in zip(self.params, tensors, strict=True)
            ]
            rows.append(torch.cat([*flat, like.new_zeros(n * size - sum(map(len, flat)))]))
        grad = torch.empty_like(self.m)
        self.dist.reduce_scatter_tensor(grad, rows[0] / size)
        self.t = self.t + 1
        self.m = self.betas[0] * self.m + (1 - self.betas[0]) * grad
        self.v = self.betas[1] * self.v + (1 - self.betas[1]) * grad * grad
        m, v = (x / (1 - b**self.t) for x, b in zip((self.m, self.v), self.betas, strict=True))
        mine = rows[1].view(size, n)[self.dist.get_rank()] - self.lr * m / (torch.sqrt(v) + self.eps)
        out = torch.empty_like(rows[1])
        self.dist.all_gather_into_tensor(out, mine)
        for p, new in zip(self.params, out.split([p.numel() for p in self.params] + [n * size - sum(
            p.numel() for p in self.params)])[: len(self.params)], strict=True):  # fmt: skip
            p.data = new.reshape(p.shape).clone()


class _Steps:
    "A step in parts that the wrong answers change."

    def __init__(self, params, dist, lr, betas, eps):
        self.params, self.dist, self.lr, self.betas, self.eps, self.t = list(params), dist, lr, betas, eps, 0
        self.n = -(-sum(p.numel() for p in self.params) // dist.get_world_size())
        self.m, self.v = (self.params[0].detach().new_zeros(self.n) for _ in range(2))

    def row(self, tensors):
        flat = [
            (torch.zeros_like(p) if t is None else t).flatten()
            for p, t in zip(self.params, tensors, strict=True)
        ]
        flat = torch.cat(flat).detach()
        return F.pad(flat, (0, self.n * self.dist.get_world_size() - len(flat)))

    def own(self, row):
        return row[self.dist.get_rank() * self.n :][: self.n].clone()

    def grads(self):
        return self.row([p.grad for p in self.params])

    def mean(self):
        grad = torch.empty_like(self.m)
        self.dist.reduce_scatter_tensor(grad, self.grads())
        return grad / self.dist.get_world_size()

    def square(self, grad):
        return grad**2

    def corrections(self):
        return [1 - b**self.t for b in self.betas]

    def spread(self, row):
        at = 0
        for p in self.params:
            p.copy_(row[at : at + p.numel()].view_as(p))
            at += p.numel()

    @torch.no_grad()
    def step(self):
        grad = self.mean()
        self.t += 1
        self.m.lerp_(grad, 1 - self.betas[0])
        self.v.lerp_(self.square(grad), 1 - self.betas[1])
        (c1, c2), row = self.corrections(), self.row(self.params)
        mine = self.own(row) - self.lr * self.m / c1 / ((self.v / c2).sqrt() + self.eps)
        self.dist.all_gather_into_tensor(row, mine)
        self.spread(row)


def _adam(name, **changed):
    return type(name, (_Steps,), changed)


def _squares(self, grad):
    square = torch.empty_like(self.m)
    self.dist.reduce_scatter_tensor(square, self.grads() ** 2)
    return square / self.dist.get_world_size()


def _all_reduced(self):
    row = self.grads()
    self.dist.all_reduce(row)
    return self.own(row) / self.dist.get_world_size()


class keeps_full_rows(_Steps):
    def spread(self, row):
        super().spread(row)
        self.master, self.last = row, self.grads()


class drops_the_remainder(_Steps):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.n = sum(p.numel() for p in self.params) // self.dist.get_world_size()
        self.m, self.v = (self.params[0].detach().new_zeros(self.n) for _ in range(2))

    def row(self, tensors):
        flat = [torch.zeros_like(p) if t is None else t for p, t in zip(self.params, tensors, strict=True)]
        flat = torch.cat([t.flatten() for t in flat]).detach()
        self.rest = flat[self.n * self.dist.get_world_size() :].clone()
        return flat[: self.n * self.dist.get_world_size()].clone()

    def spread(self, row):
        super().spread(torch.cat([row, self.rest]))


class skips_none(_Steps):
    def row(self, tensors):
        flat = torch.cat([t.flatten() for t in tensors if t is not None]).detach()
        return F.pad(flat, (0, self.n * self.dist.get_world_size() - len(flat)))


class own_copy_of_the_weights(_Steps):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.mine = self.own(_Steps.row(self, self.params))

    def own(self, row):
        return self.mine if hasattr(self, "mine") else super().own(row)

    def spread(self, row):
        self.mine = row[self.dist.get_rank() * self.n :][: self.n].clone()
        super().spread(row)


class parameters_of_the_first_step(_Steps):
    def mean(self):
        if not self.t:
            self.params = [p for p in self.params if p.grad is not None] or self.params
        return super().mean()


class zeroes_the_gradients(_Steps):
    def spread(self, row):
        super().spread(row)
        for p in self.params:
            p.grad = torch.zeros_like(p)


class read_only_moments(_Steps):
    m, v = property(lambda self: self.kept[0]), property(lambda self: self.kept[1])

    def __init__(self, params, dist, lr, betas, eps):
        self.params, self.dist, self.lr, self.betas, self.eps, self.t = list(params), dist, lr, betas, eps, 0
        self.n = -(-sum(p.numel() for p in self.params) // dist.get_world_size())
        self.kept = [self.params[0].detach().new_zeros(self.n) for _ in range(2)]


class leaves_gradients_off(_Steps):
    def step(self):
        torch.set_grad_enabled(False)
        super().step()


class state_in_float32(_Steps):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.m, self.v = torch.zeros(self.n), torch.zeros(self.n)


# --- sharding.3: gather, compute, free --------------------------------------------------------


def _gather(part, shape, dist):
    full = part.new_empty(len(part) * dist.get_world_size())
    dist.all_gather_into_tensor(full, part)
    return full[: math.prod(shape)].view(shape)


class _Layer(torch.autograd.Function):
    "The reference in parts that the wrong answers change."

    @staticmethod
    def forward(ctx, x, part, shape, dist):
        ctx.save_for_backward(x, part)
        ctx.shape, ctx.dist = shape, dist
        return x @ _gather(part, shape, dist).T

    @staticmethod
    def backward(ctx, grad):
        x, part = ctx.saved_tensors
        return _back(ctx, grad, x, part, _gather(part, ctx.shape, ctx.dist))


def _back(ctx, grad, x, part, w, finish=None):
    grad_x = grad @ w
    del w
    padded = part.new_zeros(len(part) * ctx.dist.get_world_size())
    padded[: math.prod(ctx.shape)] = (grad.T @ x).flatten()
    out = torch.empty_like(part)
    ctx.dist.reduce_scatter_tensor(out, padded)
    return (
        grad_x,
        out / ctx.dist.get_world_size() if finish is None else finish(out, ctx.dist.get_world_size()),
        None,
        None,
    )


def _layer(forward=None, backward=None):
    changed = {"forward": forward, "backward": backward}
    return type("Layer", (_Layer,), {k: staticmethod(f) for k, f in changed.items() if f})


class Einsum(torch.autograd.Function):
    "Right: einsum, F.pad, everything on ctx."

    @staticmethod
    def forward(ctx, x, part, shape, dist):
        ctx.kept = x.detach(), part.detach(), tuple(shape), dist
        full = torch.empty(part.numel() * dist.get_world_size(), dtype=part.dtype, device=part.device)
        dist.all_gather_into_tensor(full, part.detach())
        return torch.einsum("ni,oi->no", x, full[: shape[0] * shape[1]].reshape(shape))

    @staticmethod
    def backward(ctx, grad):
        x, part, shape, dist = ctx.kept
        full = torch.empty(part.numel() * dist.get_world_size(), dtype=part.dtype, device=part.device)
        dist.all_gather_into_tensor(full, part)
        gx = torch.einsum("no,oi->ni", grad, full[: shape[0] * shape[1]].reshape(shape))
        full[: shape[0] * shape[1]] = torch.einsum("no,ni->oi", grad / dist.get_world_size(), x).flatten()
        full[shape[0] * shape[1] :] = 0
        gp = torch.empty_like(part)
        dist.reduce_scatter_tensor(gp, full)
        return gx, gp, None, None


class Linear(torch.autograd.Function):
    "Right: F.linear; the gradient into the memory of the weight."

    @staticmethod
    def forward(ctx, x, part, shape, dist):
        ctx.save_for_backward(x, part)
        ctx.args = shape, dist
        return F.linear(x, _gather(part, shape, dist))

    @staticmethod
    def backward(ctx, grad):
        (x, part), (shape, dist) = ctx.saved_tensors, ctx.args
        grad_x = F.linear(grad, _gather(part, shape, dist).T)
        flat = (grad.mT @ x).reshape(-1)
        flat = F.pad(flat, (0, len(part) * dist.get_world_size() - len(flat)))
        out = torch.zeros_like(part)
        dist.reduce_scatter_tensor(out, flat)
        return grad_x, out.div_(dist.get_world_size()), None, None


def _keeps(kept):
    def forward(ctx, x, part, shape, dist):
        w = _gather(part, shape, dist)
        ctx.save_for_backward(x, part)
        ctx.shape, ctx.dist, ctx.w = shape, dist, kept(w)
        return x @ w.T

    def backward(ctx, grad):
        x, part = ctx.saved_tensors
        return _back(ctx, grad, x, part, ctx.w.to(x.dtype))

    return _layer(forward, backward)


def _finish(finish):
    def backward(ctx, grad):
        x, part = ctx.saved_tensors
        return _back(ctx, grad, x, part, _gather(part, ctx.shape, ctx.dist), finish)

    return _layer(None, backward)


def _all_reduced_gradient(ctx, grad):
    (x, part), dist = ctx.saved_tensors, ctx.dist
    grad_x = grad @ _gather(part, ctx.shape, dist)
    full = part.new_zeros(len(part) * dist.get_world_size())
    full[: math.prod(ctx.shape)] = (grad.T @ x).flatten()
    dist.all_reduce(full)
    return grad_x, full[dist.get_rank() * len(part) :][: len(part)] / dist.get_world_size(), None, None


def _three_at_once(ctx, grad):
    (x, part), dist = ctx.saved_tensors, ctx.dist
    w = _gather(part, ctx.shape, dist)
    full = grad.T @ x
    padded = F.pad(full.flatten(), (0, len(part) * dist.get_world_size() - full.numel()))
    out = torch.empty_like(part)
    dist.reduce_scatter_tensor(out, padded)
    return grad @ w, out / dist.get_world_size(), None, None


def _into_the_part(ctx, grad):
    (x, part), n = ctx.saved_tensors, ctx.dist.get_world_size()
    grad_x, mean, *_ = _back(ctx, grad, x, part, _gather(part, ctx.shape, ctx.dist))
    part.detach().copy_(mean * n)
    return grad_x, part.detach() / n, None, None


def _divides_the_gradient(ctx, grad):
    x, part = ctx.saved_tensors
    grad_x = grad @ _gather(part, ctx.shape, ctx.dist)
    grad /= ctx.dist.get_world_size()
    nothing = grad.new_zeros(grad.shape[1], 1)
    return grad_x, _back(ctx, grad, x, part, nothing, lambda out, n: out)[1], None, None


def _whole_rows(ctx, x, part, shape, dist):
    ctx.save_for_backward(x, part)
    ctx.shape, ctx.dist = shape, dist
    w = _gather(part, shape, dist)
    w[shape[0] // dist.get_world_size() * dist.get_world_size() :] = 0
    return x @ w.T


def _on_the_default_device(ctx, x, part, shape, dist):
    ctx.save_for_backward(x, part)
    ctx.shape, ctx.dist = shape, dist
    full = torch.empty(len(part) * dist.get_world_size(), dtype=part.dtype)
    dist.all_gather_into_tensor(full, part)
    return x @ full[: math.prod(shape)].view(shape).T


# --- sharding.4: prefetch ---------------------------------------------------------------------


def two_buffers(x, parts, layer, dist):
    "Right: two buffers by turns, views of them."
    longest = max(map(len, parts), default=0) * dist.get_world_size()
    buffers = [parts[0].new_empty(longest) for _ in range(2 * bool(parts))]
    works = []
    for i in range(len(parts) + 1):
        if i < len(parts):
            view = buffers[i % 2][: len(parts[i]) * dist.get_world_size()]
            works.append((view, dist.all_gather_into_tensor(view, parts[i], async_op=True)))
        if i:
            x = layer(i - 1, x, works[i - 1][0])
        if i < len(parts):
            works[i][1].wait()
    return x


def generator(x, parts, layer, dist):
    "Right: a generator that is one gather ahead."

    def gathered():
        ahead = None
        for part in parts:
            full = torch.zeros(part.numel() * dist.get_world_size(), dtype=part.dtype, device=part.device)
            work = dist.all_gather_into_tensor(full, part, async_op=True)
            if ahead is not None:
                yield ahead.pop()
            work.wait()
            ahead, full = [full], None
        if ahead is not None:
            yield ahead.pop()

    i = 0  # enumerate would keep the weight of the last round alive
    for full in gathered():
        x, i = layer(i, x, full), i + 1
        del full
    return x


def _begin(part, dist):
    full = part.new_empty(len(part) * dist.get_world_size())
    return full, dist.all_gather_into_tensor(full, part, async_op=True)


def waits_for_each(x, parts, layer, dist):
    for i, part in enumerate(parts):
        full, work = _begin(part, dist)
        work.wait()
        x = layer(i, x, full)
        del full
    return x


def begins_after_the_layer(x, parts, layer, dist):
    following = _begin(parts[0], dist) if parts else None
    for i in range(len(parts)):
        full, work = following
        work.wait()
        x = layer(i, x, full)
        del full
        following = _begin(parts[i + 1], dist) if i + 1 < len(parts) else None
    return x


def waits_before_the_layer(x, parts, layer, dist):
    following = _begin(parts[0], dist) if parts else None
    for i in range(len(parts)):
        full, work = following
        work.wait()
        following = _begin(parts[i + 1], dist) if i + 1 < len(parts) else None
        if following:
            following[1].wait()
        x = layer(i, x, full)
        del full
    return x


def two_ahead(x, parts, layer, dist):
    waiting = [_begin(part, dist) for part in parts[:2]]
    for i in range(len(parts)):
        full, work = waiting.pop(0)
        work.wait()
        if i + 2 < len(parts):
            waiting.append(_begin(parts[i + 2], dist))
        x = layer(i, x, full)
        del full
    return x


def in_float32(x, parts, layer, dist):
    return solutions.prefetched(x, [part.float() for part in parts], layer, dist)


def in_the_dtype_of_x(x, parts, layer, dist):
    def begin(part):
        full = like.new_empty(len(part) * dist.get_world_size())
        return full, dist.all_gather_into_tensor(full, part, async_op=True)

    like, following = x, begin(parts[0]) if parts else None
    for i in range(len(parts)):
        full, work = following
        work.wait()
        following = begin(parts[i + 1]) if i + 1 < len(parts) else None
        x = layer(i, x, full)
        del full
    return x


def round_again(x, parts, layer, dist):
    following = _begin(parts[0], dist) if parts else None
    for i in range(len(parts)):
        full, work = following
        work.wait()
        following = _begin(parts[(i + 1) % len(parts)], dist)
        x = layer(i, x, full)
        del full
    if following:
        following[1].wait()
    return x


def never_waits(x, parts, layer, dist):
    works = []
    for i, part in enumerate(parts):
        full, work = _begin(part, dist)
        works.append(work)
        x = layer(i, x, full)
    for work in works:
        work.wait()
    return x


def empties_the_list(x, parts, layer, dist):
    x = solutions.prefetched(x, parts, layer, dist)
    parts.clear()
    return x


def zeroes_the_parts(x, parts, layer, dist):
    x = solutions.prefetched(x, parts, layer, dist)
    for part in parts:
        part.zero_()
    return x


def into_x(x, parts, layer, dist):
    return x.copy_(solutions.prefetched(x, parts, layer, dist))


# --- sharding.5: a checkpoint -----------------------------------------------------------------


def by_number(folder, rank, size):
    "Right: number by number, files as they are needed."
    info, files = torch.load(folder / "info.pt"), {}
    old, new = (math.ceil(info["numbers"] / n) for n in (info["ranks"], size))
    found = {name: torch.zeros(new, dtype=kind) for name, kind in info["dtypes"].items()}
    for i in range(rank * new, min(info["numbers"], rank * new + new)):
        r = i // old
        if r not in files:
            files[r] = torch.load(folder / f"{r}.pt")
        for name, row in found.items():
            row[i - rank * new] = files[r][name][i % old]
    return found


def joined(folder, rank, size):
    "Right: the needed files joined, then cut and padded."
    info = torch.load(str(folder / "info.pt"))
    total, old, new = info["numbers"], -(-info["numbers"] // info["ranks"]), -(-info["numbers"] // size)
    needed = sorted({i // old for i in range(rank * new, min(total, (rank + 1) * new))})
    files = [torch.load(folder / f"{r}.pt", mmap=True) for r in needed]
    out = {}
    for name, kind in info["dtypes"].items():
        row = torch.cat([f[name] for f in files]) if files else torch.zeros(0, dtype=kind)
        row = row[rank * new - needed[0] * old :][:new] if files else row
        row = row[: max(0, total - rank * new)]
        out[name] = F.pad(row, (0, new - len(row))).clone()
    return out


def _load(folder, rank, size, files=None, new=None, kind=None, cut=None):
    info = torch.load(folder / "info.pt")
    total, old = info["numbers"], -(-info["numbers"] // info["ranks"])
    new = new(total, size) if new else -(-total // size)
    begin, end = rank * new, min(total, (rank + 1) * new)
    found = {name: torch.zeros(new, dtype=kind or k) for name, k in info["dtypes"].items()}
    for r in (
        files(info, begin, end, old) if files else range(begin // old, -(-end // old)) if begin < end else ()
    ):
        first, last = max(begin, r * old), min(end, (r + 1) * old)
        if first < last:
            for name, saved in torch.load(folder / f"{r}.pt").items():
                found[name][first - begin : last - begin] = saved[first - r * old : last - r * old]
    return found


def reads_every_file(folder, rank, size):
    info = torch.load(folder / "info.pt")
    files = [torch.load(folder / f"{r}.pt") for r in range(info["ranks"])]
    total, new = info["numbers"], -(-info["numbers"] // size)
    rows = {k: torch.cat([f[k] for f in files])[:total] for k in info["dtypes"]}
    return {k: F.pad(row, (0, new * size - total))[rank * new :][:new].clone() for k, row in rows.items()}


def all_in_float32(folder, rank, size):
    return _load(folder, rank, size, kind=torch.float32)


def the_first_file_only(folder, rank, size):
    return _load(folder, rank, size, lambda info, begin, end, old: [begin // old] if begin < end else [])


def one_file_too_many(folder, rank, size):
    info = torch.load(folder / "info.pt")
    old, new = (-(-info["numbers"] // n) for n in (info["ranks"], size))
    for r in range(rank * new // old, (rank + 1) * new // old + 1):
        torch.load(folder / f"{r}.pt")
    return _load(folder, rank, size)


def tries_every_file(folder, rank, size):
    for r in range(torch.load(folder / "info.pt")["ranks"]):
        with contextlib.suppress(Exception):
            torch.load(folder / f"{r}.pt")
    return solutions.load_part(folder, rank, size)


def deletes_the_checkpoint(folder, rank, size):
    found = solutions.load_part(folder, rank, size)
    for path in folder.iterdir():
        path.unlink()
    return found


def without_padding(folder, rank, size):
    numbers = torch.load(folder / "info.pt")["numbers"]
    left = max(0, numbers - rank * -(-numbers // size))
    return {k: v[:left] for k, v in solutions.load_part(folder, rank, size).items()}


RIGHT = {
    "sharding.1": [by_chunk, by_ranges],
    "sharding.2": [AdamInside, Scaled],
    "sharding.3": [Einsum, Linear],
    "sharding.4": [two_buffers, generator],
    "sharding.5": [by_number, joined],
}

MUTANTS = {
    "sharding.1": [
        spreads_the_remainder,
        divides_evenly,
        trains_the_frozen,
        tied_twice,
        stage_2_cuts_weights,
    ],
    "sharding.2": [
        _adam("no_bias_correction", corrections=lambda self: (1, 1)),
        _adam("sums", mean=lambda self: _Steps.mean(self) * self.dist.get_world_size()),
        _adam("mean_of_squares", square=_squares),
        _adam("all_reduces", mean=_all_reduced),
        keeps_full_rows,
        own_copy_of_the_weights,
        parameters_of_the_first_step,
        zeroes_the_gradients,
        read_only_moments,
        drops_the_remainder,
        skips_none,
        leaves_gradients_off,
        state_in_float32,
    ],
    "sharding.3": [
        _keeps(torch.clone),
        _keeps(torch.Tensor.half),
        _finish(lambda out, n: out),
        _finish(lambda out, n: (out / n).half().to(out.dtype)),
        _layer(None, _all_reduced_gradient),
        _layer(None, _three_at_once),
        _layer(None, _into_the_part),
        _layer(None, _divides_the_gradient),
        _layer(_whole_rows),
        _layer(_on_the_default_device),
    ],
    "sharding.4": [
        waits_for_each,
        begins_after_the_layer,
        waits_before_the_layer,
        two_ahead,
        round_again,
        in_float32,
        in_the_dtype_of_x,
        never_waits,
        empties_the_list,
        zeroes_the_parts,
        into_x,
    ],
    "sharding.5": [
        reads_every_file,
        all_in_float32,
        the_first_file_only,
        one_file_too_many,
        tries_every_file,
        deletes_the_checkpoint,
        without_padding,
    ],
}
