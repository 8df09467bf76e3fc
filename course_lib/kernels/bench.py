"""Every kernel beside eager, torch.compile and the vendor's library, in one process on a GPU.

    python -m course_lib.kernels.bench [softmax|rmsnorm|matmul|xent|host|all] [--search]

With --search every configuration of the kernel's space is timed, printed as it comes, and the best of them
are timed once more by turns; without it the default alone. One line a result: the rate (each input and
output counted once), the time, and how far the samples' 20th and 80th percentile lie apart. Times are of
kernels alone, by CUDA graphs (`replay`); "host" is what a call costs the host, a table of its own.
"""

import argparse
import functools
import statistics
import sys
import time

import torch

from course_lib import machine, timing
from course_lib.kernels import KernelError, interpreted, matmul, replay, rmsnorm, softmax, tune, xent
from course_lib.triton.timing import SHAPES

BF16 = torch.bfloat16
# Beside the ten of the lesson: smaller ones, where a tile's shape and a split of k matter most.
SMALL = [(2048, 2048, 2048), (1000, 3000, 5000), (512, 8192, 8192), (128, 4096, 4096), (333, 4097, 2049)]


def say(*words):
    print(*words, flush=True)


def line(what, took, amount, unit):
    "One result: `amount` of bytes or FLOPs in `took` (a Timing, or seconds)."
    seconds = getattr(took, "median", took)
    spread = f"±{(took.high - took.low) / 2 / took.median * 100:4.1f} %" if hasattr(took, "low") else " " * 7
    return f"{amount / seconds / 1e12:8.3f} {unit}  {seconds * 1e6:9.1f} us {spread}  {what}"


def reason(error):
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:150]


def compiled(fn):
    torch._dynamo.reset()
    torch._functorch.config.donated_buffer = False
    return torch.compile(fn, dynamic=False)


def words(config):
    return " ".join(f"{k}={v}" for k, v in config.items())


def gaussian(*shape):
    return torch.randn(*shape, device="cuda").to(BF16)


def race(name, turns, amount, unit, contenders, seconds=0.3):
    "Time `contenders` by turns and print a line each; {label: Timing}."
    graphs = {}
    for label, fn in contenders.items():
        try:
            graphs[label] = turns.capture(fn)
        except Exception as e:
            say(f"{name} {label} failed: {reason(e)}")
    took = turns.measure(graphs, seconds)
    for label, t in took.items():
        say(line(f"{name} {label}", t, amount, unit))
    return took


def searched(name, turns, launch, space, amount, unit, right, seconds=0.03, keep=16, finals=6, others=None):
    """Search `space`, print every trial, and time the best by turns with `others`; {label: Timing} of those.

    `right(out)` is the error of a result of the first set of inputs.
    """
    begin = time.perf_counter()
    # The inputs that come first decide which kernels are compiled.
    tune.compile_all(functools.partial(launch, *turns.sets[0]), space)
    took = time.perf_counter() - begin
    say(f"{name}: {len(tune.configurations(space))} configurations compiled in {took:.0f} s")

    def report(trial):
        if trial.error:
            say(f"  failed                           {words(trial.config)}: {trial.error}")
            return
        error = right(launch(*turns.sets[0], **trial.config))
        say(" ", line(f"{words(trial.config)}  error {error:.1e}", trial.seconds, amount, unit))

    found = tune.search(launch, space, seconds, report, turns)
    ranked = found.ranked()
    say(f"{name}, the best of {len(found.trials)} ({time.perf_counter() - begin:.0f} s):")
    for trial in ranked[:keep]:
        say("*", line(words(trial.config), trial.seconds, amount, unit))
    # By turns, and longer: the best of many noisy times is a lucky one.
    last = {words(t.config): functools.partial(launch, **t.config) for t in ranked[:finals]}
    return race(f"** {name}", turns, amount, unit, {**(others or {}), **last})


def error(out, want):
    "Relative error ‖out - want‖ / ‖want‖."
    return float((out.double() - want.double()).norm() / want.double().norm())


def bench_softmax(rows, columns, search):
    turns = replay.Turns(lambda: (gaussian(rows, columns),))
    amount = softmax.bytes_moved(rows, columns, BF16)
    want = softmax.softmax_reference(turns.sets[0][0].float())
    copy = {"copy": torch.clone}
    race("softmax", turns, amount, "TB/s", copy | {
        "eager": softmax.softmax_reference, "compile": compiled(softmax.softmax_reference),
        "three passes": softmax.three_passes,
        "three passes, block=4096 warps=8": functools.partial(softmax.three_passes, block=4096, warps=8),
        "ours": softmax.softmax,
    })  # fmt: skip
    if search:
        searched("softmax", turns, softmax.softmax, softmax.space(rows, columns), amount, "TB/s",
                 lambda out: error(out, want), others=copy)  # fmt: skip


def bench_rmsnorm(rows, columns, search):
    eps = 1e-6
    turns = replay.Turns(lambda: (gaussian(rows, columns), gaussian(rows, columns), gaussian(columns)))
    amount = rmsnorm.bytes_moved(rows, columns, BF16)

    def library(x, weight, eps):
        return torch.nn.functional.rms_norm(x, (columns,), weight, eps)

    def forward(fn):
        return lambda x, dy, weight: fn(x, weight, eps)

    def ours(x, dy, weight, **config):
        return rmsnorm.forward(x, weight, eps, **config)

    copy = {"copy": lambda x, dy, weight: x.clone()}
    with torch.no_grad():
        race("rmsnorm forward", turns, amount, "TB/s", copy | {
            "eager": forward(rmsnorm.rmsnorm_reference), "library": forward(library),
            "compile": forward(compiled(rmsnorm.rmsnorm_reference)),
            "compile of library": forward(torch.compile(library, dynamic=False)), "ours": ours,
        })  # fmt: skip
    x, dy, weight = turns.sets[0]
    want = rmsnorm.rmsnorm_reference(x.float(), weight.float(), eps)
    if search:
        searched("rmsnorm forward", turns, ours, rmsnorm.space(rows, columns), amount, "TB/s",
                 lambda out: error(out[0], want), others=copy)  # fmt: skip
    amount = rmsnorm.bytes_moved_backward(rows, columns, BF16)

    def gradients(fn):
        def prepare(x, dy, weight):
            leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
            y = fn(*leaves, eps)
            return lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)

        return replay.Prepared(prepare)

    rstds = {id(each[0]): rmsnorm.forward(each[0], each[2], eps)[1] for each in turns.sets}

    def ours_backward(x, dy, weight, **config):
        return rmsnorm.backward(dy, x, weight, rstds[id(x)], **config)

    race("rmsnorm backward", turns, amount, "TB/s", {
        "eager": gradients(rmsnorm.rmsnorm_reference), "library": gradients(library),
        "compile": gradients(compiled(rmsnorm.rmsnorm_reference)),
        "compile of library": gradients(torch.compile(library, dynamic=False)),
        "ours": ours_backward, "ours by autograd": gradients(rmsnorm.rmsnorm),
    })  # fmt: skip
    wide = x.double().requires_grad_(), weight.double().requires_grad_()
    wants = torch.autograd.grad(rmsnorm.rmsnorm_reference(*wide, eps), wide, dy.double())
    if search:
        space = rmsnorm.space_backward(rows, columns)
        searched("rmsnorm backward", turns, ours_backward, space, amount, "TB/s",
                 lambda out: max(map(error, out, wants)))  # fmt: skip


def bench_matmul(search):
    ratios = {}
    for m, n, k in SHAPES + SMALL:
        turns = replay.Turns(lambda m=m, n=n, k=k: (gaussian(m, k), gaussian(k, n)))
        name, amount, unit = f"matmul {m}x{n}x{k}", matmul.flops(m, n, k), "TFLOP/s"
        want = (turns.sets[0][0] @ turns.sets[0][1]).float()
        ours = matmul.default(m, n, k, BF16, torch.cuda.get_device_properties(0).multi_processor_count)
        default = f"ours {words(ours._asdict())} error {error(matmul.matmul(*turns.sets[0]), want):.1e}"
        contenders = {"cuBLAS": torch.mm, default: matmul.matmul}
        if any(matmul.aligned(t)[0] is not t for t in turns.sets[0]):
            contenders["the copies alone"] = lambda a, b: (matmul.aligned(a), matmul.aligned(b))
        if search:
            space = matmul.space_large() if m * n * k > matmul.LARGE else matmul.space(m, n, k)
            right = functools.partial(error, want=want)
            took = searched(name, turns, matmul.matmul, space, amount, unit, right, seconds=0.02, keep=0,
                            finals=5, others=contenders)  # fmt: skip
        else:
            took = race(name, turns, amount, unit, contenders)
        vendor = took["cuBLAS"].median
        best = min(t.median for label, t in took.items() if label not in ("cuBLAS", "the copies alone"))
        ratios[m, n, k] = vendor / took[default].median, vendor / best
        say(f"= {name}: default {ratios[m, n, k][0]:.3f}, best {ratios[m, n, k][1]:.3f} of cuBLAS\n")
        del turns, want
    for shape, (default, best) in ratios.items():
        say(f"== {'x'.join(map(str, shape))}: default {default:.3f}, best {best:.3f} of cuBLAS")
    for i, which in enumerate(("default", "best")):
        ten, every = ([ratios[s][i] for s in shapes] for shapes in (SHAPES, ratios))
        say(f"== median of {which}: {statistics.median(ten):.3f} of {len(SHAPES)} shapes, "
            f"{statistics.median(every):.3f} with the small ones")  # fmt: skip
    turns = replay.Turns(lambda: (gaussian(8192, 8192), gaussian(8192, 8192)))
    race("matmul 8192^3 by pointers", turns, matmul.flops(8192, 8192, 8192), "TFLOP/s", {
        f"block={block} group={group}": functools.partial(matmul.in_rows, block=block, group=group)
        for block in ((128, 128, 64), (128, 256, 64)) for group in (1, 8)
    })  # fmt: skip


def bench_host():
    "What a call costs the host, and what a single call takes between two events, with all of it."
    x, weight = gaussian(64, 64), gaussian(64)
    _, rstd = rmsnorm.forward(x, weight)
    for label, fn in {
        "torch.mm": lambda: torch.mm(x, x), "matmul": lambda: matmul.matmul(x, x),
        "matmul by pointers": lambda: matmul.in_rows(x, x, block=(64, 64, 64)),
        "torch.softmax": lambda: torch.softmax(x, -1), "softmax": lambda: softmax.softmax(x),
        "rms_norm": lambda: torch.nn.functional.rms_norm(x, (64,), weight, 1e-6),
        "rmsnorm forward": lambda: rmsnorm.forward(x, weight),
        "rmsnorm backward": lambda: rmsnorm.backward(x, x, weight, rstd),
    }.items():  # fmt: skip
        say(f"host {replay.host_seconds(fn) * 1e6:7.1f} us a call of {label}")
    for m, n, k in ((2048, 2048, 2048), (128, 4096, 4096)):
        a, b = gaussian(m, k), gaussian(k, n)
        for label, fn in (("cuBLAS", torch.mm), ("ours", matmul.matmul)):
            took = timing.time(fn, a, b, device="cuda")
            say(
                line(
                    f"one launch with its host: matmul {m}x{n}x{k} {label}",
                    took,
                    matmul.flops(m, n, k),
                    "TFLOP/s",
                )
            )


def bench_xent(search):
    rows, classes = 8192, 131072
    target = torch.randint(classes, (rows,), device="cuda")
    base = gaussian(rows, classes)
    amount = xent.bytes_moved(rows, classes, BF16)
    eager = functools.partial(torch.nn.functional.cross_entropy, target=target)
    fns = {
        "eager": eager,
        "eager in float32": functools.partial(xent.cross_entropy_reference, target=target),
        "compile": compiled(lambda x: eager(x)),
        "ours": functools.partial(xent.cross_entropy, target=target),
    }
    if search:
        for block in (2048, 4096, 8192, 16384):
            for warps in (4, 8, 16):
                fns[f"ours block={block} warps={warps}"] = functools.partial(
                    xent.cross_entropy, target=target, block=block, warps=warps
                )

    def step(fn):
        # What makes the logits is not counted: they are a leaf's own memory, made anew for each run.
        x = base.clone().requires_grad_()
        logits = x.view_as(x)
        fn(logits).backward()
        return x.grad

    copy = timing.time(base.clone, device="cuda").median
    for name, fn in fns.items():
        try:
            torch.cuda.empty_cache()
            step(fn)
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            step(fn)
            peak = torch.cuda.max_memory_allocated() - before
            # Milliseconds of GPU time: the host needs no care here.
            took = timing.time(lambda fn=fn: step(fn), device="cuda").median - copy
            say(line(f"cross-entropy {name}", took, amount, "TB/s"),
                f" peak {peak / 1e9:.2f} GB, {peak / (base.numel() * 2):.2f} of the logits")  # fmt: skip
        except Exception as e:
            say(f"cross-entropy {name} failed: {reason(e)}")


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m course_lib.kernels.bench", description=__doc__.splitlines()[0]
    )
    kernels = ["host", "softmax", "rmsnorm", "matmul", "xent"]
    parser.add_argument("kernel", nargs="?", default="all", choices=[*kernels, "all"])
    parser.add_argument(
        "--search", action="store_true", help="time every configuration of the kernel's space"
    )
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--columns", type=int, default=4096)
    given = parser.parse_args(argv)
    if interpreted():
        raise KernelError("the bench times kernels on a GPU, and there is none here")
    say(f"{machine.name()}, torch {torch.__version__}, Triton {machine.triton_version()}")
    say(f"{machine.copy_rate() / 1e12:8.3f} TB/s  device copy of 1 GB, read + written")
    size = given.rows, given.columns
    for name, run in {
        "host": bench_host,
        "softmax": lambda: bench_softmax(*size, given.search),
        "rmsnorm": lambda: bench_rmsnorm(*size, given.search),
        "matmul": lambda: bench_matmul(given.search),
        "xent": lambda: bench_xent(given.search),
    }.items():
        if given.kernel in (name, "all"):
            begin = time.perf_counter()
            try:
                run()
            except Exception as e:  # the other kernels are still worth their time
                say(f"{name} stopped: {type(e).__name__}: {e}")
            say(f"{name} took {time.perf_counter() - begin:.0f} s\n")
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
