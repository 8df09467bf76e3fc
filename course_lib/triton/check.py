"""Checks of triton. Oracles: torch in float64, autograd, a list of tiles.

Kernels run under `watch`: on CPU tensors in the interpreter, on a GPU host too. Outputs are poisoned
beforehand, matrices are parts of larger ones full of NaN, and masked lanes without `other` hold inf and NaN.
What is right in the interpreter is then compiled for an H200, which needs no GPU.
"""

import ast
import contextlib
import functools
import inspect
import random
import textwrap

import numpy as np
import torch
from torch.nn import functional as F

from course_lib import checking as core
from course_lib import kernels
from course_lib.checking import Wrong, close, exercise, require, yours  # noqa: F401

HALF, BF16, FULL = torch.float16, torch.bfloat16, torch.float32
NAMES = {FULL: "fp32", HALF: "fp16", BF16: "bf16"}
# Half a unit in the last place of the result, and room for the sums in fp32 before it.
RTOL = {FULL: 2e-5, HALF: 6e-4, BF16: 4.5e-3}


class Kernel:
    "A learner's kernel with `count` arguments, among them the constants by name. `Wrong` for anything else."

    def __init__(self, answer, count, *constants):
        try:
            kernels.require()
        except kernels.KernelError as e:
            raise Wrong(str(e)) from None
        fn = getattr(answer, "fn", None)
        if not inspect.isfunction(fn) or not hasattr(answer, "run"):
            if inspect.isfunction(answer):
                with contextlib.suppress(TypeError, ValueError):
                    answer()  # an unsolved one
                raise Wrong("expected a kernel, got a function: put @triton.jit above it")
            raise Wrong(f"expected a kernel, got {core.kind(answer)}: pass the function under @triton.jit")
        self.kernel, self.name, self.names = answer, fn.__name__, list(inspect.signature(fn).parameters)
        self.launched = {}  # {dtypes: the arguments of a launch}
        if len(self.names) != count or not set(constants) <= set(self.names):
            raise Wrong(
                f"{self.name} takes ({', '.join(self.names)}); expected the {count} arguments of the lesson, "
                f"{' and '.join(constants)} among them: copy the first lines from there"
            )

    def run(self, grid, *args, what, once, limits=None, owners=None, changes=(), wide=None, **constants):
        """Launch it under `watch`; returns {position: the program that stored each element} of the outputs.

        `Wrong`: an exception, a race, a stray access, a changed input, a count. `once` are the loads and the
        stores of which each element is touched once, as ({position: label}, …); `limits` are {position: most
        loads in all}; `owners` {position: the program that should store each element}; no product with the
        integer `wide` may have 32 bits.
        """
        whole = [a._base if isinstance(a, torch.Tensor) and a._base is not None else a for a in args]
        kept = [w.clone() if isinstance(w, torch.Tensor) else None for w in whole]
        w = watched(lambda: self.kernel[grid](*args, **constants), self.name, what, wide)
        dtypes = tuple(a.dtype for a in args if isinstance(a, torch.Tensor))
        self.factors = w.factors
        self.launched[dtypes] = dict(zip(self.names, args, strict=False)) | constants
        for i, (now, before) in enumerate(zip(whole, kept, strict=True)):
            if before is None or i in changes or (before.is_floating_point() and before.isnan().all()):
                continue  # no tensor, or one to be written
            same = torch.equal(now.nan_to_num(), before.nan_to_num())
            require(same, f"{what}: {self.name} stores to {self.names[i]}, which it should only read")
        for accesses, labels, verb in zip((w.loads, w.stores), once, ("loaded", "stored"), strict=True):
            for i, label in labels.items():
                found = accesses.get(self.names[i])
                require(found and found.fewest, f"{what}: some element of {label} is never {verb}")
                often = f"{what}: some element of {label} is {verb} {found.most} times; expected once"
                require(found.most == 1, often)
        for i, most in (limits or {}).items():
            found = w.loads.get(self.names[i])
            require(found and found.elements, f"{what}: {self.names[i]} is never loaded by tl.load")
            often = f"{found.elements:,} elements of {self.names[i]} are loaded, where {most:,} are enough"
            require(found.elements <= most, f"{what}: {often}")
        homes = {n: r for r in w.launches[-1].regions for n in r.names}
        writers = {i: of_elements(homes[self.names[i]].writer, args[i]) for i in once[1]}
        for i, programs in (owners or {}).items():
            found, want = writers[i], programs.expand_as(writers[i])
            if not torch.equal(found, want):
                at = (found != want).nonzero()[0].tolist()
                which = f"program {found[tuple(at)]} stores element {at} of {once[1][i]}"
                raise Wrong(f"{what}: {which}; that is the part of program {want[tuple(at)]}")
        self.lanes = {n: a.elements + a.masked for n, a in w.loads.items()}
        return writers

    def multiplies(self, dtype, what):
        "Require that in the last launch tl.dot multiplied numbers of this dtype only."
        other = " and ".join(sorted(self.factors - {NAMES[dtype]}))
        require(not other, f"{what}: tl.dot multiplies {other}; expected factors in {NAMES[dtype]}")

    def compiles(self):
        "Require the compiler for a GPU to take it too, for the dtypes of each launch; no GPU is needed."
        from course_lib.kernels import compiled

        for arguments in self.launched.values():
            reason = compiled.refusal(self.kernel, arguments)
            require(not reason, f"{self.name} is right in the interpreter, but {reason}")


def of_elements(values, t):
    "Values by the elements of a storage, as a tensor with the shape of `t`."
    return torch.from_numpy(values).as_strided(t.shape, t.stride(), t.storage_offset())


def watched(launch, name, what, wide=None):
    """What `watch` saw of `launch()`.

    `Wrong` for an exception, a race, a stray access, a product in tf32, or a product with `wide` in 32 bits.
    """
    from course_lib.kernels import interpret
    from course_lib.kernels.watch import watch

    rounded, narrow, factors = [], [], set()
    create_dot, binary_op = interpret.Builder.create_dot, interpret.Builder.binary_op

    def seen_dot(self, a, b, d, input_precision, *args, **kwargs):
        # A GPU would compute this in tf32; the interpreter can't show it.
        if a.dtype.scalar == interpret.tl.float32 and getattr(input_precision, "name", "") == "TF32":
            rounded.append(True)
        factors.update(side.dtype.scalar.name for side in (a, b))
        return create_dot(self, a, b, d, input_precision, *args, **kwargs)

    def seen_op(self, lhs, rhs, op, *args):
        # Rows far down would overflow; the small ones here don't.
        sides = [x for x in (lhs, rhs) if op is np.multiply and x.dtype.scalar == interpret.tl.int32]
        narrow.extend(x for x in sides if wide is not None and (x.data == wide).all())
        return binary_op(self, lhs, rhs, op, *args)

    interpret.Builder.create_dot, interpret.Builder.binary_op = seen_dot, seen_op
    try:
        with watch() as w:
            launch()
    except Exception as e:
        if core._is_stub(e):
            raise NotImplementedError from None
        while type(e).__name__ == "InterpreterError" and e.__cause__ is not None:
            e = e.__cause__
        raise Wrong(f"{name} raised {core.describe(e)} on {what}") from None
    finally:
        interpret.Builder.create_dot, interpret.Builder.binary_op = create_dot, binary_op
    require(not rounded, f'{what}: fp32 factors would become tf32; tell tl.dot input_precision="ieee"')
    require(not narrow, f"{what}: the row times its stride has 32 bits; tl.program_id(0).to(tl.int64) has 64")
    w.factors = factors  # the names of the dtypes that tl.dot multiplies
    for fault in [*w.outside, *w.races]:
        raise Wrong(f"{what}: {fault}".replace("a mask is", "a mask or an offset is"))
    return w


def within(t, transposed=False):
    "`t` as a part of a larger tensor full of poison, with an offset and rows apart."
    wide = [s + random.randrange(3, 12) for s in t.shape]
    poison = core.poison(*(reversed(wide) if transposed else wide), dtype=t.dtype)
    return (poison.T if transposed else poison)[tuple(slice(1, 1 + s) for s in t.shape)].copy_(t)


def poisoned(*shape, dtype=FULL, transposed=False):
    return within(core.poison(*shape, dtype=dtype), transposed)


def row_sizes(ragged):
    "(rows, columns, BLOCK); `ragged`: columns are no power of two, so that a block has lanes to mask."
    n = random.choice((random.randrange(3, 40), random.randrange(65, 127), 64))
    n += ragged and not n & (n - 1)
    return random.randrange(2, 5), n, max(2, 1 << (n - 1).bit_length()) * random.choice((1, 1, 2))


@exercise("triton.1", "right for full, ragged and tiny vectors; each element moved once")
def add(answer):
    kernel = Kernel(answer, 5, "BLOCK")
    for dtype, block in zip((FULL, HALF, FULL, HALF), random.sample((16, 32, 64, 128), 4), strict=True):
        for n in (random.randrange(1, block), 3 * block, 3 * block + random.randrange(1, block)):
            x, y = (within(torch.randn(n).to(dtype)) for _ in range(2))
            out, what = poisoned(n, dtype=dtype), f"{n} elements of {NAMES[dtype]} in blocks of {block}"
            parts = {"once": ({0: "x", 1: "y"}, {2: "out"}), "owners": {2: torch.arange(n) // block}}
            kernel.run((-(-n // block),), x, y, out, n, BLOCK=block, what=what, **parts)
            close(out, x.double() + y.double(), f"out, {what}", RTOL[dtype])
    kernel.compiles()


ROWS = {  # each kind of rows shows another mistake
    "gaussian": lambda x: 3 * x,
    "far below zero": lambda x: x - 100_000,
    "up to 300": lambda x: 100 * x.clamp(-3, 3),
    "ending in -inf": lambda x: x.index_fill(1, torch.arange(x.shape[1] * 2 // 3, x.shape[1]), -float("inf")),
    "nearly equal": lambda x: 0.01 * x + 3,
    "one number far above the rest": lambda x: x.index_fill(1, torch.tensor([1]), 200.0),
}


@exercise("triton.2", "right for ragged rows, three dtypes and extreme numbers; each element read once")
def softmax(answer):
    kernel = Kernel(answer, 6, "BLOCK")
    dtypes = random.sample((FULL, HALF, BF16, HALF), 4)
    dtypes = [dtypes[0], FULL, *dtypes[1:], FULL]
    for dtype, (kind, make) in zip(dtypes, ROWS.items(), strict=True):
        rows, cols, block = row_sizes(ragged=kind != "gaussian")
        x, out = within(make(torch.randn(rows, cols)).to(dtype)), poisoned(rows, cols, dtype=dtype)
        what = f"{rows} x {cols} of {NAMES[dtype]}, {kind}, BLOCK {block}"
        parts = {"once": ({0: "x"}, {1: "out"}), "owners": {1: torch.arange(rows)[:, None]}}
        kernel.run((rows,), x, out, x.stride(0), out.stride(0), cols, BLOCK=block, what=what, **parts)
        close(out, torch.softmax(x.double(), -1), f"out, {what}", RTOL[dtype], 1e-6)
        if kind.startswith("one"):
            less = 1 - out[0, 1].item()
            require(less == 0, f"out, {what}: expected exactly 1 at [0, 1], got 1 - {less:.2g}: "
                               "add nothing to the sum")  # fmt: skip
    kernel.compiles()


def norm(x, w, eps):
    rstd = (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    return x * rstd * w, rstd.squeeze(-1)


@exercise("triton.3", "right for ragged rows, three dtypes, large and tiny numbers; x read once")
def rmsnorm(answer):
    kernel = Kernel(answer, 9, "BLOCK")
    small = random.sample((1e-6, 1e-5), 2)  # where numbers are tiny, another eps shows
    kinds = ((HALF, 1e-3), (FULL, 1e-3), (FULL, 1.0), (HALF, 400.0), (BF16, 30.0))
    for trial, (dtype, scale) in enumerate(kinds):
        (rows, cols, block), eps = row_sizes(ragged=scale == 1.0), small[trial % 2]
        x = within((scale * (torch.randn(rows, cols) + 0.7)).to(dtype))
        weight, y = within((torch.randn(cols) + 1).to(dtype)), poisoned(rows, cols, dtype=dtype)
        rstd, strides = poisoned(rows), (x.stride(0), y.stride(0))
        what = f"{rows} x {cols} of {NAMES[dtype]} near {scale:g}, BLOCK {block}"
        args, once = (x, weight, y, rstd, *strides, cols, eps), ({0: "x"}, {2: "y", 3: "rstd"})
        parts = {"once": once, "owners": {2: torch.arange(rows)[:, None], 3: torch.arange(rows)}}
        kernel.run((rows,), *args, BLOCK=block, what=what, limits={1: rows * cols}, **parts)
        want, want_rstd = norm(x.double(), weight.double(), eps)
        close(rstd, want_rstd, f"rstd, {what}", rtol=1e-5, atol=0)
        close(y, want, f"y, {what}", RTOL[dtype])
    kernel.compiles()


@exercise("triton.4", "dx and dw as autograd has them, for any grid and tile, without a race")
def rmsnorm_backward(kernel, function):
    kernel = Kernel(kernel, 15, "ROWS", "BLOCK", "STAGES")
    for dtype, programs, tile in ((FULL, 1, 2), (HALF, 2, 4), (BF16, 3, 2), (FULL, 4, 1), (FULL, 9, 2)):
        _, cols, block = row_sizes(ragged=programs < 3)
        rows = 41 if programs == 2 else random.choice((5, 7, 9))  # a long sum: low precision shows
        x, dy = (within((2 * torch.randn(rows, cols) + 0.7).to(dtype)) for _ in range(2))
        weight = within((torch.randn(cols) + 1).to(dtype))
        leaves = [t.double().requires_grad_() for t in (x, weight)]
        y, rstd = norm(*leaves, 1e-6)
        want_dx, want_dw = torch.autograd.grad(y, leaves, dy.double())
        dx, dw = poisoned(rows, cols, dtype=dtype), poisoned(programs, cols)
        what = f"{rows} x {cols} of {NAMES[dtype]}, {programs} programs, ROWS {tile}, BLOCK {block}"
        args = dy, x, weight, within(rstd.detach().float()), dx, dw, *(t.stride(0) for t in (dy, x, dx, dw))
        counts = {"once": ({0: "dy", 1: "x"}, {4: "dx", 5: "dw"}), "limits": {2: programs * cols}}
        meta = {"ROWS": tile, "BLOCK": block, "STAGES": 2}
        owners = {5: torch.arange(programs)[:, None]}
        writers = kernel.run((programs,), *args, rows, cols, **meta, what=what, owners=owners, **counts)[4]
        most, fair = writers[:, 0].bincount().max().item(), -(-rows // (tile * programs)) * tile
        require(most <= fair, f"{what}: one program computes {most} rows, where {fair} are its part")
        close(dx, want_dx, f"dx, {what}", rtol=RTOL[dtype], atol=5e-5)
        close(dw.double().sum(0), want_dw, f"dw summed over its {programs} rows, {what}", 2e-5, 2e-4)
    kernel.compiles()
    source = ast.parse(textwrap.dedent(inspect.getsource(kernel.kernel.fn)))
    used = any(isinstance(n, ast.Name) and n.id == "STAGES" for n in ast.walk(source))
    require(used, f"{kernel.name} doesn't use STAGES: write the loop as tl.range(…, num_stages=STAGES)")
    autograd_function(function)


def autograd_function(function):
    require(inspect.isclass(function) and issubclass(function, torch.autograd.Function),
                 f"expected a class from torch.autograd.Function, got {core.kind(function)}")  # fmt: skip
    made = []  # both forward passes come first: what one keeps, the other must not overwrite
    for case, dtype, eps in (("dy of its own", FULL, 0.3), ("the dy of y.sum()", HALF, 0.2)):
        leaves = [t.to(dtype).requires_grad_() for t in (torch.randn(24, 37), torch.randn(37) + 1)]
        leaves[1].data[5] = 0.0
        dy = torch.randn(24, 37).to(dtype) if "own" in case else torch.ones(1, dtype=dtype).expand(24, 37)
        got, what = [], f"RMSNorm, {case}, eps {eps}"
        wide, kept = [t.detach().double().requires_grad_() for t in leaves], core.clone([*leaves, dy])
        watched(lambda: got.append(function.apply(*leaves, eps)), "RMSNorm.forward", what)  # noqa: B023
        want = norm(*wide, eps)[0]
        close(got[0], want, f"y, {what}", RTOL[dtype])
        made.append((dtype, leaves, dy, what, kept, got[0], torch.autograd.grad(want, wide, dy.double())))
    for when in ("", ", the second time (retain_graph=True)"):
        for dtype, leaves, dy, what, kept, y, grads in made:
            back, got = functools.partial(torch.autograd.grad, y, leaves, dy, retain_graph=True), []
            watched(lambda: got.extend(back()), "RMSNorm.backward", what + when)  # noqa: B023
            for name, x, g, true in zip(("dx", "dw"), leaves, got, grads, strict=True):
                atol = 1e-4 if dtype == FULL else 2e-5  # where dx or dw is small, r in fp16 shows
                close(g, true, f"{name}, {what}{when}", rtol=2 * RTOL[dtype], atol=atol)
                core.equal(str(g.dtype), str(x.dtype), f"the dtype of {name}, {what}")
            for name, now, before in zip(("x", "w", "dy"), [*leaves, dy], kept, strict=True):
                require(
                    torch.equal(now, before), f"{what}: RMSNorm changes {name}, which it should only read"
                )


@exercise("triton.5", "right for ragged sizes, any strides, fp32, fp16 and bf16")
def matmul(answer):
    kernel = Kernel(answer, 15, "BLOCK_M", "BLOCK_N", "BLOCK_K")
    for trial, dtype in enumerate((FULL, HALF, BF16, FULL, HALF)):
        bm, bn, bk = random.sample((16, 32, 64), 3) if trial < 3 else random.choices((16, 32), k=3)
        # Ragged sizes; the second has long sums, where low precision shows; whole tiles; less than a tile.
        m = (1 + (trial > 0) * random.randrange(2)) * bm + random.randrange(1, bm)
        n = (2 - (trial > 0) * random.randrange(2)) * bn + random.randrange(1, bn)
        k = (512 // bk if trial == 1 else random.choice((1, 2))) * bk + random.randrange(1, bk)
        if trial == 3:
            m, n, k = bm * random.randrange(1, 3), bn * random.randrange(2, 4), bk * random.randrange(1, 4)
        elif trial == 4:
            m, n, k = (random.randrange(1, 16) for _ in range(3))
        elif trial == 2:  # one row, one column and one term more than whole blocks
            m, n, k = (size // block * block + 1 for size, block in ((m, bm), (n, bn), (k, bk)))
        a = within((torch.randn(m, k) + 0.5).to(dtype), transposed=trial in (0, 2))
        b = within((torch.randn(k, n) + 0.5).to(dtype), transposed=trial in (1, 2))
        c = poisoned(m, n, dtype=FULL if dtype == HALF else dtype, transposed=trial == 2)
        grid, tile = (-(-m // bm), -(-n // bn)), {"BLOCK_M": bm, "BLOCK_N": bn, "BLOCK_K": bk}
        what = f"{m} x {k} by {k} x {n} of {NAMES[dtype]}, tiles {bm} x {bn}, BLOCK_K {bk}"
        args, once = (a, b, c, m, n, k, *a.stride(), *b.stride(), *c.stride()), ({}, {2: "c"})
        limits = {0: grid[0] * bm * k * grid[1], 1: grid[1] * bn * k * grid[0]}
        i, j = torch.arange(m)[:, None] // bm, torch.arange(n) // bn
        kernel.run(grid, *args, **tile, what=what, once=once, limits=limits, owners={2: i + grid[0] * j})
        kernel.multiplies(dtype, what)
        steps, side = -(-k // bk), bm * bk * grid[0] * grid[1]
        if trial < 3:  # K is no multiple of BLOCK_K: a step of its own for what is left isn't one too many
            ran = kernel.lanes[kernel.names[0]] / side
            require(ran <= steps, f"{what}: a tile takes {ran:g} steps along K, where {steps} are enough")
        size = (a.double().abs() @ b.double().abs()).max().item()  # the sums of a tile can lose a part of it
        close(c, a.double() @ b.double(), f"c, {what}", rtol=RTOL[c.dtype], atol=2e-6 * size)
    kernel.compiles()


@exercise("triton.6", "every tile once, group by group, column by column")
def grouped(answer):
    fn = getattr(answer, "fn", answer)  # under @triton.jit
    core.need_callable(fn)
    shapes = [[random.randrange(1, 9), random.randrange(1, 9), random.randrange(1, 6)] for _ in range(12)]
    shapes += [(5, 5, 3), (5, 7, 8), (7, 5, 1), (1, 6, 3), (6, 1, 3), (6, 4, 3)]
    for tiles_m, tiles_n, group in shapes:
        want = [(m, n) for first in range(0, tiles_m, group) for n in range(tiles_n)
                for m in range(first, min(first + group, tiles_m))]  # fmt: skip
        for pid, tile in enumerate(want):
            what = f"the tile of program {pid} of {tiles_m} x {tiles_n} tiles in groups of {group}"
            got = core.parts(core.call(fn, pid, tiles_m, tiles_n, group), "row column", what)
            got = [core.number(g, what) for g in got]
            core.equal(tuple(int(g) if g.is_integer() else g for g in got), tile, what)
    written = f"expected a function made with def, which a kernel can call, got {core.kind(fn)}"
    require(inspect.isfunction(fn), written)
    kernels.require()
    from course_lib.kernels import compiled, interpret

    require(fn.__name__ != "<lambda>", "write it with def: the compiler takes no lambda")
    called, tl = interpret.jit.JITFunction(fn), interpret.tl

    def tile_kernel(out_ptr, pid, tiles_m, tiles_n, group):
        row, column = called(pid, tiles_m, tiles_n, group)
        tl.store(out_ptr, row)
        tl.store(out_ptr + 1, column)

    given = {"out_ptr": torch.zeros(2), "pid": 3, "tiles_m": 5, "tiles_n": 7, "group": 2}
    reason = compiled.refusal(tile_kernel, given)
    require(not reason, f"{fn.__name__} is right, but a kernel can't call it: {reason}")


@exercise("triton.7", "loss and gradient as autograd has them, in place; each logit read twice")
def cross_entropy(answer):
    kernel = Kernel(answer, 7, "BLOCK")
    kinds = ((FULL, 16, 4.0, -1e5), (HALF, 32, 9.0, 0.0), (BF16, 32, 1.0, 0.0), (FULL, 128, 99.0, 0.0),
             (HALF, 64, 4.0, -60.0), (FULL, 32, 1.0, -90.0), (BF16, 32, 1.0, 0.0))  # fmt: skip
    for trial, (dtype, block, wide, offset) in enumerate(kinds):
        cols = random.choice((random.randrange(33, 48), 65, 129, 96)[: 4 if trial else 3])
        cols = random.randrange(33, 48) if trial == 4 else cols  # fewer than BLOCK
        rows, cols = random.randrange(3, 6) + 9 * (trial == 2), cols + 200 * (trial == 3)
        logits = (wide * torch.randn(rows, cols) + offset).to(dtype)
        target = torch.randint(cols, (rows,))
        target[0], target[1] = cols - 1, 0
        if sure := trial == 5:  # a logit of 0 far above the others: the loss is 0 to the last bit
            logits[torch.arange(rows), target] = 0.0
        elif trial == 6:  # the target has about 0.98: p - 1 cancels
            others = logits.double().scatter(1, target[:, None], -float("inf")).logsumexp(1)
            logits[torch.arange(rows), target] = (others + 4).to(dtype)
        elif trial != 1:
            target[random.randrange(rows)] = (-1, 0, -7, -100, -2)[trial]
        logits, before = within(logits), logits.double().requires_grad_()
        want = torch.where(target >= 0, F.cross_entropy(before, target.clamp(min=0), reduction="none"), 0.0)
        scale = torch.tensor(random.uniform(0.3, 0.4))
        (grad,) = torch.autograd.grad(want.sum() * scale, before)
        what = f"{rows} x {cols} of {NAMES[dtype]}, BLOCK {block}" + ", sure of the target" * sure
        loss, program = poisoned(rows), torch.arange(rows)
        counts = {"once": ({}, {0: "logits", 2: "loss"}), "limits": {0: 2 * rows * cols + rows}}
        counts |= {"owners": {0: program[:, None], 2: program}, "wide": logits.stride(0)}
        args = logits, within(target), loss, scale, logits.stride(0), cols
        kernel.run((rows,), *args, BLOCK=block, what=what, changes=(0,), **counts)
        lost = 4e-7 * before.detach().abs().max().item()  # of the sum's logarithm, in fp32
        close(loss, want.detach(), f"loss, {what}", rtol=2e-5, atol=5e-8 if sure else 2e-5 + lost)
        atol = 2e-6 + lost
        close(logits, grad + 0.0, f"the gradient, {what}", rtol=RTOL[dtype], atol=5e-8 if sure else atol)
    kernel.compiles()
