"Answers to the exercises of tensor_parallel: the course's, right ones of another style, and wrong ones."

import torch
from torch.nn import functional as F

from course_lib.tensor_parallel import solutions


def _reference(number):
    answers = tuple(getattr(solutions, name) for name in solutions.EXERCISES[number])
    return answers if len(answers) > 1 else answers[0]


REFERENCE = {number: _reference(number) for number in solutions.EXERCISES}


# --- tensor_parallel.1: a pair of layers, cut -------------------------------------------------


def by_chunk(x, up, down, dist):
    "Right: chunks, a bias on rank 0 alone, whole layers called by torch.func."
    rank, size = dist.get_rank(), dist.get_world_size()
    if up.weight.shape[0] % size != 0:
        raise ValueError("the hidden width can't be cut")
    first = {k: p.chunk(size)[rank] for k, p in up.named_parameters()}
    hidden = F.gelu(torch.func.functional_call(up, first, (x,)))
    out = hidden @ down.weight.chunk(size, dim=1)[rank].T
    if down.bias is not None and rank == 0:
        out = out + down.bias
    dist.all_reduce(out)
    return out


@torch.no_grad()
def by_view(x, up, down, dist):
    "Right: a view with an axis for ranks, the bias divided by their number."
    rank, size = dist.get_rank(), dist.get_world_size()
    if divmod(len(up.weight), size)[1]:
        raise ValueError("uneven")
    hidden = torch.einsum("...i,ji->...j", x, up.weight.view(size, -1, x.shape[-1])[rank])
    if up.bias is not None:
        hidden = hidden + up.bias.view(size, -1)[rank]
    weight = down.weight.view(len(down.weight), size, -1)[:, rank]
    out = torch.einsum("...j,oj->...o", F.gelu(hidden), weight)
    if down.bias is not None:
        out = out + down.bias / size
    dist.all_reduce(out)
    return out


def _mlp(cut=None, first_bias=True, last_bias="once", reduce="after", check=True, flat=False):
    "The reference in parts that the wrong answers change."

    def parallel_mlp(x, up, down, dist):
        rank, size = dist.get_rank(), dist.get_world_size()
        if check and up.out_features % size:
            raise ValueError("uneven")
        mine = cut(up.out_features, rank, size) if cut else slice(*_range(up.out_features, rank, size))
        bias = up.bias[mine] if first_bias and up.bias is not None else None
        hidden = F.linear(x, up.weight[mine], bias)
        out = F.linear(F.gelu(hidden), down.weight[:, mine])
        if last_bias == "each" and down.bias is not None:
            out = out + down.bias
        dist.all_reduce(out)
        return out + down.bias if last_bias == "once" and down.bias is not None else out

    return parallel_mlp


def _range(n, rank, size):
    return n // size * rank, n // size * (rank + 1)


def cuts_afterwards(x, up, down, dist):
    if up.out_features % dist.get_world_size():
        raise ValueError("uneven")
    mine = slice(*_range(up.out_features, dist.get_rank(), dist.get_world_size()))
    out = F.linear(F.gelu(up(x))[..., mine], down.weight[:, mine])
    dist.all_reduce(out)
    return out if down.bias is None else out + down.bias


def one_question_for_both_biases(x, up, down, dist):
    "As if both layers had a bias, or neither."
    if up.out_features % dist.get_world_size():
        raise ValueError("uneven")
    mine = slice(*_range(up.out_features, dist.get_rank(), dist.get_world_size()))
    biased = up.bias is not None
    out = F.linear(x, up.weight[mine], up.bias[mine] if biased else None)
    out = F.linear(F.gelu(out), down.weight[:, mine])
    dist.all_reduce(out)
    return out + down.bias if biased else out


def leaves_gradients_off(x, up, down, dist):
    torch.set_grad_enabled(False)
    return solutions.parallel_mlp(x, up, down, dist)


def gathers_the_hidden(x, up, down, dist):
    rank, size = dist.get_rank(), dist.get_world_size()
    if up.out_features % size:
        raise ValueError("uneven")
    mine = slice(*_range(up.out_features, rank, size))
    hidden = F.gelu(F.linear(x, up.weight[mine], None if up.bias is None else up.bias[mine])).movedim(-1, 0)
    whole = hidden.new_empty(size * len(hidden), *hidden.shape[1:])
    dist.all_gather_into_tensor(whole, hidden.contiguous())
    return down(whole.movedim(0, -1))


# --- tensor_parallel.2: backward through ranks ------------------------------------------------


def _function(forward, backward):
    class Made(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, dist):
            ctx.dist = dist
            return forward(x, dist)

        @staticmethod
        def backward(ctx, grad):
            return backward(grad, ctx.dist), None

    def through(x, dist):
        return Made.apply(x, dist)

    return through


def _same(x, dist):
    return x.view_as(x)


def _sum(x, dist):
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)
    dist.all_reduce(total)
    return total


def _sum_with_strides(x, dist):
    total = x.clone()
    dist.all_reduce(total)
    return total


def _in_place(x, dist):
    dist.all_reduce(x)
    return x


def _mean(x, dist):
    return _sum(x, dist) / dist.get_world_size()


def _hooked(x, dist):
    out = x * 1
    out.register_hook(lambda grad: _sum(grad, dist))
    return out


def _straight_through(x, dist):
    with torch.no_grad():
        total = _sum(x, dist)
    return x + (total - x.detach())


def _gathered(x, dist):
    out = x.new_empty(dist.get_world_size() * len(x), *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous())
    return out


def _both_by_gather(x, dist):
    return _gathered(x[None], dist).sum(0)


copies, sums = _function(_same, _sum), _function(_sum, _same)


# --- tensor_parallel.3: attention by heads ----------------------------------------------------


def by_index(qkv, out, heads, kv_heads, rank, size):
    "Right: the numbers of the rows in a list."
    if heads % size or kv_heads % size:
        raise ValueError("heads can't be cut")
    dim, rows = out.shape[1] // heads, []
    for first, count in ((0, heads), (heads, kv_heads), (heads + kv_heads, kv_heads)):
        n = count // size
        rows += range((first + rank * n) * dim, (first + (rank + 1) * n) * dim)
    n = heads // size * dim
    return qkv[rows], out[:, rank * n : (rank + 1) * n].clone()


def by_heads(qkv, out, heads, kv_heads, rank, size):
    "Right: an axis for heads."
    if any(n % size for n in (heads, kv_heads)):
        raise ValueError("heads can't be cut")
    each = qkv.unflatten(0, (heads + 2 * kv_heads, -1))
    parts = [each[:heads], each[heads:-kv_heads], each[-kv_heads:]]
    mine = torch.cat([p.tensor_split(size)[rank] for p in parts]).flatten(0, 1)
    return [mine, out.unflatten(1, (heads, -1)).tensor_split(size, 1)[rank].flatten(1)]


def _attention(rows=None, columns=None, check=True):
    def cut_attention(qkv, out, heads, kv_heads, rank, size):
        if check and (heads % size or (kv_heads % size and check != "heads")):
            raise ValueError("heads can't be cut")
        dim = out.shape[1] // heads
        groups = qkv.split([heads * dim, kv_heads * dim, kv_heads * dim])
        mine = rows(qkv, groups, rank, size) if rows else torch.cat([g.chunk(size)[rank] for g in groups])
        return mine, columns(out, heads, rank, size) if columns else out.chunk(size, 1)[rank]

    return cut_attention


def _interleaved(out, heads, rank, size):
    return out.unflatten(1, (heads, -1))[:, rank::size].flatten(1)


def _every_other(qkv, groups, rank, size):
    return torch.cat([g[rank::size] for g in groups])


def copies_heads_that_are_too_few(qkv, out, heads, kv_heads, rank, size):
    "Fewer key heads than ranks: several ranks get the same one."
    if kv_heads >= size:
        return solutions.cut_attention(qkv, out, heads, kv_heads, rank, size)
    if heads % size:
        raise ValueError("heads can't be cut")
    dim, one = out.shape[1] // heads, rank * kv_heads // size
    q, *kv = qkv.split([heads * dim, kv_heads * dim, kv_heads * dim])
    mine = [q.chunk(size)[rank], *(t[one * dim :][:dim] for t in kv)]
    return torch.cat(mine), out.chunk(size, 1)[rank]


# --- tensor_parallel.4: cross-entropy on a cut vocabulary -------------------------------------


def by_logsumexp(logits, targets, start, dist):
    "Right: the maximum, then sums and target logits in a stacked all-reduce; loops for targets."
    top = logits.max(dim=1).values
    dist.all_reduce(top, op=dist.ReduceOp.MAX)
    shifted = logits - top.unsqueeze(1)
    own, hot = torch.zeros_like(top), torch.zeros_like(logits)
    for i, t in enumerate(targets.tolist()):
        if 0 <= t - start < logits.shape[1]:
            own[i], hot[i, t - start] = shifted[i, t - start], 1
    both = torch.stack([torch.exp(torch.logsumexp(shifted, 1)), own])
    dist.all_reduce(both)
    count = (targets >= 0).sum()
    loss = torch.where(targets >= 0, both[0].log() - both[1], 0).sum() / count
    grad = shifted.exp() / both[0].unsqueeze(1) - hot
    return loss, torch.where((targets >= 0).unsqueeze(1), grad, 0) / count


def by_one_hot(logits, targets, start, dist):
    "Right: comparisons with all words of this rank."
    words = start + torch.arange(logits.shape[1])
    hot = (targets[:, None] == words).to(logits.dtype)
    most = logits.amax(1, keepdim=True)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    e = torch.exp(logits - most)
    z, t = e.sum(1, keepdim=True), (hot * (logits - most)).sum(1, keepdim=True)
    for x in (z, t):
        dist.all_reduce(x)
    weight = (targets != -100).to(logits.dtype)[:, None]
    weight /= weight.sum()
    return (weight * (z.log() - t)).sum(), weight * (e / z - hot)


def _loss(top="all", edge=0, mean="known", hot=True, target="summed", dtype=None, double=False):
    "The reference in parts that the wrong answers change."

    def vocab_cross_entropy(logits, targets, start, dist):
        m = logits.amax(-1) if top else logits.new_zeros(len(logits))
        m = m.clamp(min=0) if top == "or zero" else m
        if top in ("all", "or zero"):
            dist.all_reduce(m, op=dist.ReduceOp.MAX)
        exps = (logits - m[:, None]).exp()
        total = exps.sum(-1)
        dist.all_reduce(total)
        known = targets != -100
        here = (targets >= start) & (targets < start + logits.shape[1] + edge)
        at = (targets - start).clamp(0, logits.shape[1] - 1)[:, None]
        own = logits.gather(1, at)[:, 0] - m
        own = own.where(here, 0) if target == "summed" else own
        dist.all_reduce(own)
        grad = exps / total[:, None]
        if hot:
            grad.scatter_add_(1, at, -here.to(grad.dtype)[:, None])
        count = known.sum() if mean == "known" else len(targets)
        loss = (total.log() - own)[known].sum() / count
        grad = grad * known[:, None] if mean != "all of the gradient" else grad
        return loss.double() if double else loss, (grad / count).to(dtype or grad.dtype)

    return vocab_cross_entropy


def gathers_the_logits(logits, targets, start, dist):
    n, width = dist.get_world_size(), torch.tensor([logits.shape[1]])
    widths = torch.empty(n, dtype=width.dtype)
    dist.all_gather_into_tensor(widths, width)
    most = int(widths.max())
    padded = F.pad(logits, (0, most - logits.shape[1]), value=-torch.inf).T.contiguous()
    whole = logits.new_empty(n * most, len(logits))
    dist.all_gather_into_tensor(whole, padded)
    parts = zip(whole.split(most), widths, strict=True)
    whole = torch.cat([p[:w] for p, w in parts]).T.contiguous().requires_grad_()
    loss = F.cross_entropy(whole, targets)
    (grad,) = torch.autograd.grad(loss, whole)
    return loss.detach(), grad[:, start : start + logits.shape[1]]


# --- tensor_parallel.5: sequence parallelism --------------------------------------------------


def _scattered(x, dist):
    out = x.new_empty(len(x) // dist.get_world_size(), *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous())
    return out


def _gathered_with_strides(x, dist):
    out = x.new_empty(dist.get_world_size() * len(x), *x.shape[1:])
    dist.all_gather_into_tensor(out, x)
    return out


def _gathered_of_matrices(x, dist):
    out = x.new_empty(dist.get_world_size() * x.shape[0], x.shape[1])
    dist.all_gather_into_tensor(out, x.contiguous())
    return out


def _flat_gather(x, dist):
    "Right: through one flat row."
    row = torch.zeros(dist.get_world_size() * x.numel(), dtype=x.dtype)
    dist.all_gather_into_tensor(row, x.reshape(-1).contiguous())
    return row.reshape(-1, *x.shape[1:])


def _flat_scatter(x, dist):
    row = torch.zeros(x.numel() // dist.get_world_size(), dtype=x.dtype)
    dist.reduce_scatter_tensor(row, x.flatten().contiguous())
    return row.view(-1, *x.shape[1:])


def _own_rows(x, dist):
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def _summed_rows(x, dist):
    return _own_rows(_sum(x, dist), dist).clone()


def _mean_rows(x, dist):
    return _scattered(x, dist) / dist.get_world_size()


def _other_order(x, dist):
    return _gathered(x, dist).unflatten(0, (-1, len(x))).transpose(0, 1).flatten(0, 1)


gathers, scatters = _function(_gathered, _scattered), _function(_scattered, _gathered)


# --- tensor_parallel.6: all-gather matmul in pieces -------------------------------------------


def by_owner(x, w, ring, pieces):
    "Right: results in lists by owner, joined at the end; a counter of hops."
    n, hops, blocks = ring.size, ring.size - 1, {}
    line = [ring.pass_on(p) for p in torch.tensor_split(x, pieces)] if hops else []
    blocks[ring.rank] = [x @ w]
    owner = ring.rank
    while hops:
        hops, owner, following = hops - 1, (owner - 1) % n, []
        blocks[owner] = []
        for passing in line:
            rows = passing.wait()
            following += [ring.pass_on(rows)] if hops else []
            blocks[owner].append(rows @ w)
        line = following
    return torch.cat([block for r in range(n) for block in blocks[r]])


def own_pieces_first(x, w, ring, pieces):
    "Right: a queue; the own rows are multiplied in pieces too."
    total, rows = ring.size * pieces, len(x)
    out = torch.zeros(ring.size * rows, w.shape[1], dtype=x.dtype)
    ready, starts = list(x.tensor_split(pieces)), [0]
    for piece in ready:
        starts.append(starts[-1] + len(piece))
    handles = [ring.pass_on(piece) for piece in ready] if ring.size > 1 else []
    for i in range(total):
        step, k = divmod(i, pieces)
        piece = ready[i] if step == 0 else handles[i - pieces].wait()
        if 0 < step < ring.size - 1:
            handles.append(ring.pass_on(piece))
        at = (ring.rank - step) % ring.size * rows + starts[k]
        torch.mm(piece, w, out=out[at : at + len(piece)])
    return out


def _ring(
    first="pass", cut=torch.tensor_split, order="pass", owner=-1, last=False, what="arrived", wait="each"
):
    "The reference in parts that the wrong answers change."

    def gather_matmul(x, w, ring, pieces):
        size, rows, out = ring.size, len(x), x.new_empty(ring.size * len(x), w.shape[1])
        cuts = cut(x, pieces)

        def launch():
            return [ring.pass_on(p) for p in cuts] if size > 1 else []

        coming = launch() if first == "pass" else []
        torch.mm(x, w, out=out[ring.rank * rows :][:rows])
        coming = coming or launch()
        for step in range(1, size):
            waiting, coming, at = coming, [], (ring.rank + owner * step) % size * rows
            arrived = [p.wait() for p in waiting] if wait == "all" else None
            for i, passing in enumerate(waiting):
                piece = arrived[i] if arrived else passing.wait()
                again = step + 1 < size or last
                given = piece if what == "arrived" else cuts[i]
                if again and order == "pass":
                    coming.append(ring.pass_on(given))
                torch.mm(piece, w, out=out[at : at + len(piece)])
                if again and order != "pass":
                    coming.append(ring.pass_on(given))
                at += len(piece)
        for passing in coming:
            passing.wait()
        return out

    return gather_matmul


def gathers_first(x, w, ring, pieces):
    rows = {ring.rank: list(x.tensor_split(pieces))}
    for step in range(1, ring.size):
        passing = [ring.pass_on(p) for p in rows[(ring.rank - step + 1) % ring.size]]
        rows[(ring.rank - step) % ring.size] = [p.wait() for p in passing]
    return torch.cat([p for r in range(ring.size) for p in rows[r]]) @ w


RIGHT = {
    "tensor_parallel.1": [by_chunk, by_view],
    "tensor_parallel.2": [(_hooked, sums), (copies, _straight_through)],
    "tensor_parallel.3": [by_index, by_heads],
    "tensor_parallel.4": [by_logsumexp, by_one_hot],
    "tensor_parallel.5": [
        (_function(_flat_gather, _flat_scatter), scatters),
        (gathers, _function(_flat_scatter, _flat_gather)),
    ],
    "tensor_parallel.6": [by_owner, own_pieces_first],
}
MUTANTS = {
    "tensor_parallel.1": [
        _mlp(last_bias="each"),
        _mlp(last_bias="none"),
        _mlp(first_bias=False),
        _mlp(check=False),
        _mlp(cut=lambda n, rank, size: slice(rank, None, size) if size < 3 else slice(0, n // size)),
        cuts_afterwards,
        one_question_for_both_biases,
        leaves_gradients_off,
        gathers_the_hidden,
    ],
    "tensor_parallel.2": [
        (copies, _function(_sum, _sum)),
        (copies, _function(_sum, _mean)),
        (_function(_same, _same), sums),
        (_function(_same, _in_place), sums),
        (_function(_same, _mean), sums),
        (copies, _function(_in_place, _same)),
        (_function(_same, _both_by_gather), sums),
        (_function(_same, _sum_with_strides), sums),
        (copies, _function(_sum_with_strides, _same)),
        (sums, copies),
    ],
    "tensor_parallel.3": [
        _attention(rows=lambda qkv, groups, rank, size: qkv.chunk(size)[rank]),
        _attention(
            rows=lambda qkv, groups, rank, size: torch.cat([groups[0].chunk(size)[rank], *groups[1:]])
        ),
        _attention(rows=_every_other),
        _attention(columns=_interleaved),
        _attention(columns=lambda out, heads, rank, size: out.chunk(size, 0)[rank]),
        _attention(check="heads"),
        copies_heads_that_are_too_few,
    ],
    "tensor_parallel.4": [
        _loss(top="own"),
        _loss(top=None),
        _loss(top="or zero"),
        _loss(double=True),
        _loss(edge=1),
        _loss(mean="tokens"),
        _loss(mean="all of the gradient"),
        _loss(hot=False),
        _loss(target="each"),
        _loss(dtype=torch.float32),
        gathers_the_logits,
    ],
    "tensor_parallel.5": [
        (_function(_gathered, _own_rows), scatters),
        (_function(_gathered, _mean_rows), scatters),
        (_function(_gathered, _summed_rows), scatters),
        (gathers, _function(_summed_rows, _gathered)),
        (_function(_other_order, _scattered), scatters),
        (_function(_gathered_with_strides, _scattered), scatters),
        (_function(_gathered_of_matrices, _scattered), scatters),
        (scatters, gathers),
    ],
    "tensor_parallel.6": [
        gathers_first,
        _ring(first="multiply"),
        _ring(cut=lambda x, pieces: [x]),
        _ring(cut=lambda x, pieces: x.split(1)),
        _ring(cut=torch.chunk),
        _ring(order="multiply"),
        _ring(owner=1),
        _ring(last=True),
        _ring(what="own"),
        _ring(wait="all"),
    ],
}
