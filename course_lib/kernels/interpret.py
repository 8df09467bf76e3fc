"""Triton's interpreter, its faults mended: the one place in this repository that knows its insides.

- bfloat16 is computed with as the 16-bit integers that hold it: here in float32, rounded as a GPU rounds.
- `@triton.autotune` needs a GPU to choose: here its first configuration runs.
- A launch leaves functions in `triton.language`, which a compiler would find later: they are taken out again.
Importing this module mends the interpreter of the process; kernels that are compiled are as before.
"""

import contextlib
import functools

import numpy as np
import torch
import triton.language as tl
from triton.runtime import autotuner, interpreter, jit

from course_lib.kernels import interpreted

Builder = interpreter.InterpreterBuilder
Handle = interpreter.TensorHandle
LANGUAGE = (tl, tl.core, tl.math, tl.standard, tl.tensor, tl.dtype, tl.core.tensor_descriptor_base)
RUNTIME = (Builder, jit.JITFunction, interpreter.InterpretedFunction, autotuner.Autotuner)


def to_bfloat16(x):
    "The bits (uint16) of the numbers in an array as bfloat16."
    wide = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32).reshape(np.shape(x)))
    return wide.bfloat16().view(torch.int16).numpy().view(np.uint16)


def _is_bf16(handle):
    return handle is not None and handle.dtype.scalar == tl.bfloat16


def _wide(handle):
    if not _is_bf16(handle):
        return handle
    return Handle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _in_float32(fn, operands):
    "`fn`, whose first `operands` arguments are computed with in float32 where they are bfloat16."

    def mended(self, *args):
        out = fn(self, *map(_wide, args[:operands]), *args[operands:])
        if not any(map(_is_bf16, args[:operands])) or out.data.dtype == np.bool_:  # a comparison
            return out
        return Handle(to_bfloat16(out.data), tl.bfloat16)

    return mended


def _dot(self, a, b, *args, original=Builder.create_dot, **kwargs):
    return original(self, _wide(a), _wide(b), *args, **kwargs)


def _cast(self, src, dst_type, *args, original=Builder.cast_impl):
    if dst_type.scalar != tl.bfloat16:
        return original(self, _wide(src), dst_type, *args)
    return src if _is_bf16(src) else Handle(to_bfloat16(src.data), tl.bfloat16)


def _launch(self, *args, original=interpreter.GridExecutor.__call__, **kwargs):
    with np.errstate(all="ignore"), as_before(LANGUAGE):  # a GPU computes with inf and NaN in silence
        return original(self, *args, **kwargs)


def _indexed(tensor, scope, original=interpreter._patch_lang_tensor):
    "Triton 3.6 makes an int of an array of one element, which newer NumPy refuses."
    original(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))


@contextlib.contextmanager
def as_before(owners):
    before = [(owner, dict(vars(owner))) for owner in owners]
    try:
        yield
    finally:
        for owner, attributes in before:
            now = dict(vars(owner))
            for name in now.keys() - attributes.keys():
                # What a rewritten function (it is cached) looks up in its module stays: it is put there once.
                if now[name] is not getattr(interpreter, name, None):
                    delattr(owner, name)
            for name, value in attributes.items():
                if now.get(name, now) is not value:
                    setattr(owner, name, value)


def _interpret_what_was_made_for_the_compiler():
    # Where something (torch.compile, say) imported Triton first, `tl.sum` and its like are of the other kind.
    jit.JITFunction.__call__ = lambda self, *args, **kwargs: _interpreted(self.fn)(*args, **kwargs)
    autotuner.Autotuner.run = lambda self, *a, **k: self.fn.run(*a, **k, **self.configs[0].all_kwargs())
    for name, member in list(vars(tl.tensor).items()):
        if isinstance(member, jit.JITFunction):
            method = functools.partialmethod(lambda self, f, *a, **k: f(self, *a, **k), member)
            setattr(tl.tensor, name, method)


if not getattr(Builder, "mended", False):
    Builder.mended = True
    Builder.binary_op = _in_float32(Builder.binary_op, 2)
    Builder.unary_op = _in_float32(Builder.unary_op, 1)
    Builder.ternary_op = _in_float32(Builder.ternary_op, 3)
    Builder.create_fma = _in_float32(Builder.create_fma, 3)
    Builder.create_dot, Builder.cast_impl = _dot, _cast
    interpreter._patch_lang_tensor, interpreter.GridExecutor.__call__ = _indexed, _launch
    if interpreted():
        _interpret_what_was_made_for_the_compiler()


@contextlib.contextmanager
def everything(run, **methods):
    """Interpret every kernel launched inside: `run(fn, grid, args, kwargs)` gets its Python function.

    `methods` replace those of the interpreter's builder, by name. Afterwards everything is as it was.
    """

    def launch(self, *args, grid, warmup=False, **kwargs):
        if not warmup:
            run(self.fn, grid, args, kwargs)

    with as_before((*LANGUAGE, *RUNTIME)):
        jit.JITFunction.run = interpreter.InterpretedFunction.run = launch
        _interpret_what_was_made_for_the_compiler()
        for name, method in methods.items():
            setattr(Builder, name, method)
        yield


@functools.cache
def _interpreted(fn):
    return interpreter.InterpretedFunction(fn)


def execute(fn, grid, arguments):
    "Run the kernel with Python function `fn` over `grid` in the interpreter; `arguments` by name."
    kernel = _interpreted(fn)
    interpreter.GridExecutor(kernel.rewrite(), kernel.arg_names, grid)(**arguments)
