"""What every launcher asks before it launches: is this something the kernel can do? One sentence if not."""

import functools

import torch
import triton

from course_lib.kernels import KernelError, interpret, interpreted

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INT32 = 2**31 - 1
MOST_PROGRAMS = INT32  # along a grid's first axis
SHARED = 232_448  # bytes of shared memory that a program may have on an H100 or H200
EVICTIONS = ("both", "loads", "stores", "none")

interpret.mend()


_compiled = {}  # {(kernel, key): what Triton compiled}


def again(kernel, key, grid, *arguments, **options):
    """Launch `kernel` with all its arguments in order, constants among them, on a `grid` of three numbers.

    Triton looks up what it compiled by all that it knows about the arguments, which takes longer than a small
    kernel runs. A `key` that says as much makes that unnecessary from the second launch on.
    """
    found = None if interpreted() else _compiled.get((kernel, key))
    if found is not None:
        found[grid](*arguments)
        return
    found = kernel[grid](*arguments, **options)
    if not interpreted():
        _compiled[kernel, key] = found


def check(name, *, dtypes=FLOATS, dims=None, **tensors):
    """Raise `KernelError` unless the tensors suit the kernel `name`: type, dtype, dimensions, one device.

    The kernels without a backward refuse a tensor that autograd watches: the result would have no gradient,
    and say nothing.
    """
    for label, t in tensors.items():
        if not isinstance(t, torch.Tensor):
            raise KernelError(
                f"{name} takes tensors, and {label} is a {type(t).__name__}: torch.tensor(...) makes one"
            )
        if t.layout != torch.strided:
            raise KernelError(
                f"{name} takes dense tensors, and {label} is {t.layout}: {label}.to_dense() makes one"
            )
        if t.dtype not in dtypes:
            known = ", ".join(map(short, dtypes))
            raise KernelError(
                f"{name} takes {known}, and {label} is {short(t.dtype)}: convert it with {label}.to(...)"
            )
        if dims is not None and t.dim() != dims:
            raise KernelError(
                f"{name} takes tensors of {dims} dimensions, and {label} has shape {list(t.shape)}"
            )
        if not (t.is_cuda or (interpreted() and t.device.type == "cpu")):
            where = "the GPU" if torch.cuda.is_available() else "the CPU"
            raise KernelError(
                f"{name} runs on {where} here, and {label} is on {t.device}: move it with {label}.to(...)"
            )
        if t.is_neg() or t.is_conj():
            raise KernelError(
                f"{name} reads memory as it is, and {label} is a lazily negated view: {label}.resolve_neg()"
            )
    devices = {str(t.device) for t in tensors.values()}
    if len(devices) > 1:
        raise KernelError(
            f"{name} needs its tensors on one device, and they are on {' and '.join(sorted(devices))}"
        )


def no_gradient(name, **tensors):
    "Raise `KernelError` where autograd expects a gradient from a kernel that has no backward."
    for label, t in tensors.items():
        if t.requires_grad and torch.is_grad_enabled():
            raise KernelError(
                f"{name} has no backward, and {label} requires a gradient: call it under torch.no_grad()"
            )


def power_of_two(name, **sizes):
    "Raise `KernelError` unless every size is a power of two: blocks are."
    for label, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1 or size & (size - 1):
            near = triton.next_power_of_2(max(int(size), 1)) if isinstance(size, int) else 128
            raise KernelError(f"{name} takes a power of two as {label}, and was given {size!r}: {near}, say")


def at_least(name, least, **sizes):
    "Raise `KernelError` unless every size is a whole number of at least `least`."
    for label, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < least:
            raise KernelError(
                f"{name} takes a whole number of at least {least} as {label}, and was given {size!r}"
            )


def at_most(name, what, size, limit, instead):
    "Raise `KernelError` where a size is past the kernel's limit."
    if size > limit:
        raise KernelError(f"{name} takes {what} of at most {limit:,}, and was given {size:,}: {instead}")


def evictions(which):
    "A kernel's LOADS and STORES: what the cache should do with them."
    if which not in EVICTIONS:
        raise KernelError(f"evict is one of {', '.join(EVICTIONS)}, and was given as {which!r}")
    return {
        "LOADS": "evict_first" if which in ("both", "loads") else "",
        "STORES": "evict_first" if which in ("both", "stores") else "",
    }


def reach(tensor):
    "One past the largest offset in a strided tensor that isn't empty."
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in sizes)


def long(*tensors):
    "Do offsets into these need 64 bits? Where 32 do, addresses take half the registers and instructions."
    return any(reach(t) > INT32 for t in tensors)


def balanced(tiles, programs):
    """How many programs share `tiles` in as few rounds as `programs` do, most of them busy to the end.

    264 programs take 16,384 tiles in 63 rounds, and in the last only 16 are busy; so do 261, and 202 are.
    """
    return triton.cdiv(tiles, triton.cdiv(tiles, min(tiles, programs)))


def as_rows(x):
    "`x` as [rows, columns] with the last dimension as columns: a view where strides allow, else a copy."
    return x.reshape(-1, x.shape[-1]) if x.shape[-1] else x.reshape(0, 0)


def multiprocessors(device):
    "Streaming multiprocessors of the GPU a kernel will run on; 4 for the interpreter."
    return _properties(device.index).multi_processor_count if _compiles(device) else 4


def shared_memory(device):
    "Bytes of shared memory that a program may have there; for the interpreter those of an H200."
    return _properties(device.index).shared_memory_per_block_optin if _compiles(device) else SHARED


def _compiles(device):
    return device.type == "cuda" and not interpreted()


@functools.cache
def _properties(index):
    return torch.cuda.get_device_properties(index)


def short(dtype):
    "'float32' for torch.float32."
    return str(dtype).removeprefix("torch.")
