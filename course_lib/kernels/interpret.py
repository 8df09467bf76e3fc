"""Triton's interpreter: its bfloat16 mended, and any kernel run through it, in any process.

The interpreter keeps bfloat16 as 16-bit integers and computes with those: `tl.dot` of two bfloat16 blocks
is off by 1e10, and so are sums and products. `mend()` has it compute in float32, and round as a GPU does.
Triton chooses between compiling and interpreting when it is imported; `everything()` interprets regardless,
so that a kernel's loads can be counted on a machine that compiles it.
"""

import contextlib
import functools
import os

import numpy as np
import triton.language as tl
from triton.runtime import interpreter, jit

Builder = interpreter.InterpreterBuilder
Handle = interpreter.TensorHandle


def to_float32(bits):
    "The float32 numbers of bfloat16 `bits` (uint16)."
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(x):
    "The bits (uint16) of float32 `x`, rounded to nearest, ties to even; NaN stays NaN."
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded).reshape(np.shape(x))


def _is_bf16(handle):
    return handle is not None and handle.dtype.scalar == tl.bfloat16


def _wide(handle):
    return Handle(to_float32(handle.data), tl.float32) if _is_bf16(handle) else handle


def _in_float32(fn, operands):
    "`fn`, whose first `operands` arguments are computed with in float32 where they are bfloat16."

    @functools.wraps(fn)
    def mended(self, *args):
        given = args[:operands]
        if not any(_is_bf16(h) for h in given):
            return fn(self, *args)
        out = fn(self, *map(_wide, given), *args[operands:])
        if out.data.dtype == np.bool_:  # a comparison
            return out
        return Handle(to_bfloat16(out.data), tl.bfloat16)

    return mended


def _dot(fn):
    @functools.wraps(fn)
    def mended(self, a, b, d, *args, **kwargs):
        return fn(self, _wide(a), _wide(b), d, *args, **kwargs)

    return mended


def _cast(fn):
    @functools.wraps(fn)
    def mended(self, src, dst_type, *args):
        if dst_type.scalar == tl.bfloat16 and not _is_bf16(src) and src.dtype.scalar.is_floating():
            return Handle(to_bfloat16(src.data.astype(np.float32)), tl.bfloat16)
        if _is_bf16(src) and dst_type.scalar != tl.bfloat16:
            if dst_type.scalar == tl.float32:
                return _wide(src)
            return fn(self, _wide(src), dst_type, *args)
        return fn(self, src, dst_type, *args)

    return mended


def _quiet(call):
    @functools.wraps(call)
    def mended(self, *args, **kwargs):
        with np.errstate(all="ignore"):  # a GPU computes with inf and NaN, and says nothing
            return call(self, *args, **kwargs)

    return mended


def _indexed(patch):
    "Triton 3.6 makes an int of an array of one element, which newer NumPy refuses."

    @functools.wraps(patch)
    def mended(tensor, *scope):
        patch(tensor, *scope)
        put = scope[0].set_attr if scope else setattr
        put(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).item()))

    return mended


def mend():
    "Have the interpreter of this process compute bfloat16 as a GPU does. Done once; harmless elsewhere."
    if getattr(Builder, "_mended", False):
        return
    Builder._mended = True
    Builder.binary_op = _in_float32(Builder.binary_op, 2)
    Builder.unary_op = _in_float32(Builder.unary_op, 1)
    Builder.ternary_op = _in_float32(Builder.ternary_op, 3)
    Builder.create_fma = _in_float32(Builder.create_fma, 3)
    Builder.create_dot = _dot(Builder.create_dot)
    Builder.cast_impl = _cast(Builder.cast_impl)
    interpreter._patch_lang_tensor = _indexed(interpreter._patch_lang_tensor)
    interpreter.GridExecutor.__call__ = _quiet(interpreter.GridExecutor.__call__)
    if os.environ.get("TRITON_INTERPRET") == "1":
        _interpret_what_was_made_for_the_compiler()


def _interpret_what_was_made_for_the_compiler():
    # Where something (torch.compile, say) imported Triton first, `tl.sum` and its like are of the other kind.
    jit.JITFunction.__call__ = lambda self, *args, **kwargs: _interpreted(self.fn)(*args, **kwargs)
    for name, member in list(vars(tl.tensor).items()):
        if isinstance(member, jit.JITFunction):
            setattr(tl.tensor, name, _method(member))


@contextlib.contextmanager
def everything(run, **builder):
    """Interpret every kernel launched inside: `run(fn, grid, args, kwargs)` gets its Python function.

    `builder` replaces methods of the interpreter, each given as a function of the original that returns the
    new one: `create_masked_load=lambda original: ...`. Afterwards everything is as it was: the interpreter
    leaves `triton.language` changed behind it, and what is compiled later would fail.
    """
    mend()
    before = [(owner, dict(vars(owner))) for owner in _owners()]

    def launch(self, *args, grid, warmup=False, **kwargs):
        if not warmup:
            run(self.fn, grid, args, kwargs)

    try:
        jit.JITFunction.run = launch
        interpreter.InterpretedFunction.run = launch
        _interpret_what_was_made_for_the_compiler()
        for name, make in builder.items():
            setattr(Builder, name, make(getattr(Builder, name)))
        yield
    finally:
        for owner, attributes in before:
            _restore(owner, attributes)


def _owners():
    "Whatever the interpreter, or `everything`, changes."
    found = [tl, tl.core, tl.math, tl.standard, tl.tensor, tl.dtype, tl.core.tensor_descriptor_base]
    return [*found, Builder, jit.JITFunction, interpreter.InterpretedFunction]


def _restore(owner, attributes):
    now = dict(vars(owner))
    for name in now.keys() - attributes.keys():
        # What a rewritten function (it is cached) looks up in its module stays: Triton puts it there once.
        if now[name] is not getattr(interpreter, name, None):
            delattr(owner, name)
    for name, value in attributes.items():
        if now.get(name, now) is not value:
            setattr(owner, name, value)


def _method(function):
    return lambda self, *args, **kwargs: function(self, *args, **kwargs)


@functools.cache
def _interpreted(fn):
    return interpreter.InterpretedFunction(fn)


def execute(fn, grid, arguments):
    "Run the kernel with Python function `fn` over `grid` in the interpreter; `arguments` by name."
    kernel = _interpreted(fn)
    interpreter.GridExecutor(kernel.rewrite(), kernel.arg_names, grid)(**arguments)


def numpy_type(kind):
    "How the interpreter holds numbers of a Triton type."
    return interpreter._get_np_dtype(kind)


def program():
    "The running program as (its number, counted along the grid's first axis first, and the programs in all)."
    (x, y, z), (nx, ny, nz) = (
        interpreter.interpreter_builder.grid_idx,
        interpreter.interpreter_builder.grid_dim,
    )
    return int(x + nx * (y + ny * z)), int(nx * ny * nz)
