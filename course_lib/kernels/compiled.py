"""A kernel compiled for an H200 without one: Triton's interpreter runs Python that a compiler refuses.

Where kernels are interpreted, `@triton.jit` makes other objects than the compiler takes, of helpers and of
`tl.sum` too. While a kernel is compiled, what the compiler takes is in their places.
"""

import contextlib
import functools
import inspect
import re
import struct

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import interpreter, jit

from course_lib.kernels import interpret

TARGET = GPUTarget("cuda", 90, 32)
REGISTERS, FRAME = 0x2F, 0x11  # attributes in .nv.info: EIATTR_REGCOUNT, EIATTR_FRAME_SIZE
# What Triton says of a helper without @triton.jit, and of a number from outside.
OUTSIDE = r"Unsupported function referenced: <[\w-]+ (?:method )?(\S+)|Cannot access global variable (\w+)"


def refusal(kernel, arguments):
    """What the compiler refuses about a kernel under @triton.jit, in half a sentence; None where it compiles.

    `arguments` by name, as a launch has them: tensors count by their dtypes, numbers by their types, and what
    is annotated as `tl.constexpr` by its value.
    """
    fn = _python(kernel)
    with _for_the_compiler(fn):
        try:
            _compiled(fn, arguments)
        except OSError:  # nowhere to keep what is compiled
            return None
        except Exception as e:
            return _sentence(e, fn)
    return None


def resources(kernel, arguments, **options):
    """What a kernel takes of an H200: (registers of a thread, bytes of a thread that spill, shared bytes).

    `arguments` as for `refusal`; `options` are launch options, num_warps=8. The shared bytes are a program's,
    with the 1,024 that CUDA keeps of each. The first two stand in the section .nv.info of the machine code.
    """
    fn = _python(kernel)
    with _for_the_compiler(fn):
        made = _compiled(fn, arguments, aligned=True, **options)
    code = made.asm["cubin"]  # an ELF file
    (table,), (size, count, names) = struct.unpack_from("<Q", code, 40), struct.unpack_from("<3H", code, 58)
    sections = [struct.unpack_from("<2I4Q", code, table + i * size) for i in range(count)]
    at, end, found = 0, 0, {}
    for name, *_, start, length in sections:
        if code.startswith(b".nv.info\0", sections[names][4] + name):
            at, end = start, start + length
    while at < end:  # entries of a format, an attribute, a size; the values of format 4 follow
        form, attribute, length = struct.unpack_from("<2BH", code, at)
        if form == 4:
            found[attribute] = struct.unpack_from("<I", code, at + 8)[0]  # after the function's number
        at += 4 + length * (form == 4)
    return found[REGISTERS], found.get(FRAME, 0), made.metadata.shared + 1024


def _python(kernel):
    while not inspect.isfunction(kernel):  # under @triton.autotune, say
        kernel = kernel.fn
    return kernel


def _compiled(fn, arguments, aligned=False, **options):
    made = jit.JITFunction(fn)
    constants = {p.name: arguments[p.name] for p in made.params if p.is_constexpr}
    types = {name: jit.mangle_type(arguments[name]) for name in arguments.keys() - constants.keys()}
    signature = {p.name: types.get(p.name, "constexpr") for p in made.params}
    hints = {}
    if aligned:  # as a launch says: addresses, and integers, that are multiples of 16
        even = [p.num for p in made.params if types.get(p.name, "f").startswith(("*", "i"))]
        hints = {(i,): [["tt.divisibility", 16]] for i in even}
    return triton.compile(ASTSource(made, signature, constants, hints), target=TARGET, options=options)


def _sentence(e, fn):
    where = ""
    while e is not None:  # a mistake in a helper is the cause of one where it is called
        said = getattr(e, "error_message", None) or str(e)
        if line := getattr(getattr(e, "node", None), "lineno", None):
            where = f" at `{e.src.splitlines()[line - 1].strip()[:80]}`"
        e = e.__cause__
    if found := re.search(OUTSIDE, said):
        name = found[1] or found[2]
        said = f"{name} is outside Triton: put @triton.jit above a helper, make a number tl.constexpr(...), "
        said += "and take functions from tl"
        lines = inspect.getsource(fn).splitlines()
        named = [line.strip() for line in lines if re.search(rf"(?<!tl\.)\b{name}\(", line)]
        where = where or "".join(f" at `{line[:80]}`" for line in named[:1])
    said = re.sub(r"""^\w+\((["'])(.*)\1\)$""", r"\2", " ".join(said.split()))[:200]
    return f"the compiler for a GPU refuses it{where}: {said}"


@contextlib.contextmanager
def _for_the_compiler(fn):
    "Functions of the interpreter replaced wherever `fn` and its helpers find them, while this lasts."
    spaces = {id(space): space for space in (*map(vars, interpret.LANGUAGE[:4]), fn.__globals__)}
    before, todo = [], list(spaces.values())
    with interpret.as_before(interpret.LANGUAGE):
        try:
            for space in todo:  # which grows
                before.append((space, dict(space)))
                for name, value in before[-1][1].items():
                    if isinstance(value, interpreter.InterpretedFunction):
                        space[name] = _compilable(value.fn)
                        if id(value.fn.__globals__) not in spaces:
                            spaces[id(value.fn.__globals__)] = value.fn.__globals__
                            todo.append(value.fn.__globals__)
            for name in vars(tl.tensor).keys() & vars(tl.standard).keys():  # x.sum() for tl.sum(x)
                if isinstance(function := vars(tl.standard)[name], jit.JITFunction):
                    setattr(tl.tensor, name, function)
            yield
        finally:
            for space, names in before:
                space.update(names)


def _compilable(fn):
    return _of_triton(fn) if fn.__module__.startswith("triton.") else jit.JITFunction(fn)


@functools.cache
def _of_triton(fn):
    return jit.JITFunction(fn)
