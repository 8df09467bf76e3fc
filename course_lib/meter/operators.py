"""What an operator of the portable list reads, writes and computes. `meter` counts with it.

The portable list holds operators that are the same on a CPU and on a GPU, so a count made on CPU tensors
is true of both. FLOPs by class:

    contraction    mm bmm addmm baddbmm mv addmv dot convolution, fused attention    2 a multiply-add
    normalisation  softmax, log_softmax 5 an element, backward 4 · var, std 4 · mse_loss 3 · norm 2 ·
                   layer_norm 5, and 1 for weight and bias each; backward 10, 3 for weight and bias ·
                   other reductions, scans, pooling, losses 1 for each element they read
    elementwise    point-wise operators 1 an element of the result, whatever the function;
                   fills, copies, casts, cat, indexing, random numbers 0

Those of contractions are exact. torch's FLOP counter gives the same, except for the backward pass of a
grouped convolution, where it counts the weight's gradient once for each group. The others are customary
estimates, as in "Data Movement Is All You Need" (arXiv 2007.00072), whose three classes these are. Off the
list, point-wise operators and those of NO_MATMUL count 1 for each element that they write; others what
torch's FLOP counter says, or None.
"""

import functools
import math

import torch

CONTRACTION, NORMALISATION, ELEMENTWISE, OTHER = "contraction", "normalisation", "elementwise", "other"
CLASSES = (CONTRACTION, NORMALISATION, ELEMENTWISE)


def _words(text):
    return frozenset(text.split())


# Names as in torch.ops.aten, without overload and without the underscore of the in-place form.
ALLOCATIONS = _words("empty empty_like empty_strided empty_permuted new_empty new_empty_strided")
RELABELS = _words("_unsafe_view lift_fresh set resize resize_as")  # nothing moves, whatever the schema says
FILLS = _words(
    "zero fill zeros zeros_like new_zeros ones ones_like new_ones full full_like new_full scalar_tensor eye "
    "arange linspace rand rand_like randn randn_like randint randint_like normal uniform exponential random"
)
COPIES = _words(
    "copy clone _to_copy cat stack repeat flip roll constant_pad_nd tril triu slice_backward "
    "select_backward diagonal_backward unfold_backward index_select gather take index embedding "
    "embedding_dense_backward masked_select nonzero repeat_interleave index_put _index_put_impl index_add "
    "index_copy index_fill scatter scatter_add scatter_reduce sort topk"
)
POINTWISE = _words(
    "add sub rsub mul div neg abs sign pow sqrt rsqrt reciprocal exp exp2 expm1 log log2 log10 log1p sin "
    "cos tan asin acos atan atan2 sinh cosh tanh erf erfc erfinv sigmoid logit relu leaky_relu elu celu "
    "gelu silu mish softplus hardtanh hardsigmoid hardswish log_sigmoid_forward threshold maximum minimum "
    "fmax fmin clamp clamp_min clamp_max floor ceil round trunc frac fmod remainder floor_divide where "
    "masked_fill addcmul addcdiv lerp xlogy hypot sgn sinc logaddexp nan_to_num eq ne lt le gt ge isnan "
    "isinf logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not "
    "threshold_backward gelu_backward silu_backward tanh_backward sigmoid_backward leaky_relu_backward "
    "elu_backward hardtanh_backward softplus_backward hardsigmoid_backward hardswish_backward mish_backward "
    "log_sigmoid_backward mse_loss_backward smooth_l1_loss_backward huber_loss_backward nll_loss_backward "
    "nll_loss2d_backward binary_cross_entropy_backward"
)
REDUCTIONS = _words(
    "sum nansum mean prod max min amax amin aminmax argmax argmin any all logsumexp count_nonzero cumsum "
    "cumprod nll_loss_forward nll_loss2d_forward smooth_l1_loss huber_loss binary_cross_entropy "
    "binary_cross_entropy_with_logits max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d "
    "max_pool2d_with_indices_backward avg_pool2d_backward _adaptive_avg_pool2d_backward"
)
PER_ELEMENT = {
    "_softmax": 5, "_log_softmax": 5, "_safe_softmax": 5,
    "_softmax_backward_data": 4, "_log_softmax_backward_data": 4,
    "var": 4, "std": 4, "var_mean": 4, "std_mean": 4, "mse_loss": 3, "linalg_vector_norm": 2, "norm": 2,
}  # fmt: skip
LAYER_NORM = _words("native_layer_norm native_layer_norm_backward")
# The argument whose last dimension is summed over.
FIRST_FACTOR = {
    "mm": "self", "bmm": "self", "mv": "self", "dot": "self",
    "addmm": "mat1", "addmv": "mat", "baddbmm": "batch1",
}  # fmt: skip
CONTRACTIONS = frozenset(FIRST_FACTOR) | {"convolution", "convolution_backward"}

PORTABLE = {
    **dict.fromkeys(FILLS | COPIES | POINTWISE, ELEMENTWISE),
    **dict.fromkeys(REDUCTIONS | set(PER_ELEMENT) | LAYER_NORM, NORMALISATION),
    **dict.fromkeys(CONTRACTIONS, CONTRACTION),
}
# Off the list; a name stands for all that hold it. No matmul is in them.
NO_MATMUL = (
    "batch_norm", "group_norm", "rms_norm", "dropout", "bernoulli", "one_hot", "_foreach", "_fused_adam",
    "_fused_sgd", "unique", "bincount", "multinomial", "randperm", "upsample", "pool", "pad", "grid_sampler",
)  # fmt: skip

# Not the same operators on the CPU and on a GPU, and what to use; a word stands for all names that hold it.
INSTEAD = {
    "rms_norm": "write x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt()",
    "one_hot": "write (labels[:, None] == torch.arange(classes)).float()",
    "bernoulli dropout": "draw a mask with torch.rand(shape) < p, or switch dropout off with model.eval()",
    "batch_norm": "use layer norm, or eval mode with the normalisation written out",
    "scaled_dot_product attention": "write it out, torch.softmax(q @ k.mT / d**0.5, -1) @ v",
    "_transformer_encoder": "write the layer out",
    "_foreach": "pass foreach=False to the optimizer or to clip_grad_norm_",
    "_fused_": "pass fused=False and foreach=False to the optimizer",
    "allclose": "use torch.isclose and .all()",
    "equal": "use (a == b).all()",
    "rnn lstm gru": "write the cell out",
}

# An argument that the kernel is handed and does not read.
UNREAD = {
    "nll_loss_backward": "self", "nll_loss2d_backward": "self", "max_pool2d_with_indices_backward": "self",
    "_adaptive_avg_pool2d_backward": "self", "avg_pool2d_backward": "self",
    "native_layer_norm_backward": "bias",
}  # fmt: skip
# Tables: of these only the elements that are taken are read.
TABLES = {
    "embedding": "weight", "index_select": "self", "gather": "self", "take": "self", "index": "self",
    "masked_select": "self",
}  # fmt: skip
# In-place forms that touch only the elements an index names.
PUTS = _words("index_put _index_put_impl index_add index_copy index_fill scatter scatter_add scatter_reduce")


@functools.cache
def name(func):
    "An operator's name as the tables have it: without overload, in-place underscore and `aten::`."
    base = func._schema.name.removeprefix("aten::")
    return base[:-1] if base.endswith("_") and not base.endswith("__") and func._schema.is_mutable else base


@functools.cache
def op_class(op):
    "The class of an operator by its name (in-place forms too): one of CLASSES, or 'other'."
    kind = PORTABLE.get(op) or PORTABLE.get(op.removesuffix("_"))
    return kind or (CONTRACTION if "scaled_dot_product" in op or _formula(op) else OTHER)


def _formula(op):
    "What torch's FLOP counter has for an operator, or None."
    from torch.utils.flop_counter import flop_registry

    space, _, base = op.rpartition("::")
    known = base.isidentifier() and (space or "aten").isidentifier()
    return flop_registry.get(getattr(getattr(torch.ops, space or "aten"), base, None)) if known else None


@functools.cache
def is_free(func):
    "Does this operator only make a view, relabel a tensor or allocate? Such operators count nothing."
    return func.is_view or name(func) in ALLOCATIONS | RELABELS or torch.Tag.inplace_view in func.tags


@functools.cache
def is_composite(func):
    "Does torch define this operator by others, with no kernel of its own?"
    has = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, func.name())
    return has("CompositeImplicitAutograd") and not has("CPU")


def instead_of(op):
    "What to use in place of an operator that is not portable."
    return next((text for parts, text in INSTEAD.items() if any(p in op for p in parts.split())), None)


def tensors(value):
    "The tensors in nested lists and tuples."
    if isinstance(value, list | tuple):
        return [t for v in value for t in tensors(v)]
    return [value] if isinstance(value, torch.Tensor) else []


def arguments(func, args, kwargs):
    "The arguments of a call by their names in the operator's schema."
    return {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs


def region(t):
    """The elements a strided tensor covers, as a key and their size in bytes.

    A broadcast dimension (stride 0) covers its elements once; a transposed view has the original's key.
    """
    if not t.numel():
        return None, 0
    merged = []
    for stride, size in sorted((d, n) for d, n in zip(t.stride(), t.shape, strict=True) if d and n > 1):
        if merged and stride == merged[-1][0] * merged[-1][1]:
            merged[-1] = (merged[-1][0], merged[-1][1] * size)
        else:
            merged.append((stride, size))
    # Overlapping windows cover no more than the memory from first to last element.
    span = 1 + sum(stride * (size - 1) for stride, size in merged)
    unique = min(math.prod(size for _, size in merged), span)
    size = t.element_size()
    return (t.untyped_storage()._cdata, t.storage_offset() * size, size, tuple(merged)), unique * size


def covered(found):
    "Bytes of the distinct elements that a list of tensors covers."
    return sum(dict(region(t) for t in found).values())


def cost(func, args, kwargs, result, count_bytes=True):
    """(bytes read, bytes written, FLOPs) of a call of `func` that gave `result`; None if it wrote nothing.

    The bytes are None without `count_bytes`, the FLOPs where they are not known.
    """
    op, given = name(func), arguments(func, args, kwargs)
    changed = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if given.get("grad_scale") is None:  # without it a fused optimizer only reads the gradients
        changed = [k for k in changed if k != "grads"]
    written = tensors([given.get(k) for k in changed])
    if not changed:
        old = {_storage(t) for t in tensors(list(given.values()))}
        written = [t for t in tensors(result) if _storage(t) not in old]
    if not any(t.numel() for t in written):
        return None
    flops = _flops(op, given, written)
    if any(t.layout is not torch.strided for t in tensors(list(given.values()))):
        flops = None
    elif flops is None and (formula := _formula(op)):
        flops = formula(*args, **kwargs, out_val=result)
    elif flops is None and (torch.Tag.pointwise in func.tags or any(part in op for part in NO_MATMUL)):
        flops = sum(t.numel() for t in written)
    if not count_bytes:
        return None, None, flops
    if op in PUTS and changed and "out" not in given:
        return *_put(op, given), flops
    outs = {a.name for a in func._schema.arguments if a.is_out}
    return _read(op, given, outs, written), covered(written) + _statistics(op, written), flops


def _storage(t):
    return t.untyped_storage()._cdata if t.layout is torch.strided else id(t)


def _read(op, given, outs, written):
    skip, extra = outs | {UNREAD.get(op), TABLES.get(op)}, 0
    if op in FILLS:
        skip |= set(given) - {"value"}  # the likes of zeros_like take a tensor only for its shape
    elif op == "copy" or (op in FIRST_FACTOR and given.get("beta", 1) == 0):
        skip.add("self")
    elif op in TABLES:
        extra = sum(t.numel() * t.element_size() for t in written)
    elif op in ("nll_loss_forward", "nll_loss2d_forward"):  # one element a row
        skip.add("self")
        extra = given["target"].numel() * given["self"].element_size()
    elif op == "convolution_backward":
        skip |= {k for k, used in zip(("weight", "input"), given["output_mask"], strict=False) if not used}
    elif op == "native_layer_norm_backward":
        extra = _statistics(op, [None, given["mean"], given["rstd"]])
    return covered([t for k, v in given.items() if k not in skip for t in tensors(v)]) + extra


def _statistics(op, found):
    "For half precision a GPU keeps layer norm's mean and deviation in float32: the bytes that a CPU saves."
    if op not in LAYER_NORM:
        return 0
    return sum(t.numel() * max(0, 4 - t.element_size()) for t in found[1:3]) if len(found) == 3 else 0


def _put(op, given):
    "Bytes read and written where an index says which elements of `self` change."
    into, index, indices = given["self"], given.get("index"), given.get("indices")
    size = into.element_size()
    if is_masked(indices) and given["values"].numel() == 1:  # a masked fill: looks at every element
        return covered(tensors([into, indices, given["values"]])), covered([into])
    if indices is not None:
        at = tuple(slice(None) if t is None else t for t in indices)
        n = into.new_zeros(()).expand(into.shape)[at].numel()
    elif op == "index_fill":
        n = index.numel() * into.numel() // max(1, into.size(given["dim"]) if into.dim() else 1)
    else:
        n = given.get("source", index).numel()
    read = covered([t for k, v in given.items() if k not in ("self", "src") for t in tensors(v)])
    if "src" in given:  # may be larger than the index
        read += min(n * size, region(given["src"])[1])
    if given.get("accumulate") or given.get("reduce") or op in ("index_add", "scatter_add"):
        read += n * size
    return read, n * size


def is_masked(indices):
    "Is there a boolean mask among the tensors of an index?"
    return any(t.dtype in (torch.bool, torch.uint8) for t in tensors(indices))


def _flops(op, given, written):
    out = max((t.numel() for t in written), default=0)
    if op in FIRST_FACTOR:
        return 2 * out * given[FIRST_FACTOR[op]].shape[-1]
    if op.startswith("convolution"):
        result = given["grad_output"].numel() if "grad_output" in given else out
        image = given["input"].numel() if given["transposed"] else result
        passes = sum(given["output_mask"][:2]) if "output_mask" in given else 1
        weight = given["weight"]
        return 2 * image * (weight.numel() // weight.shape[0]) * passes
    if "scaled_dot_product" in op:
        q, k, v = given["query"], given["key"], given["value"]
        pairs = 2 * q.numel() // q.shape[-1] * k.shape[-2]
        products = (3, 2) if "backward" in op else (1, 1)
        return pairs * (products[0] * q.shape[-1] + products[1] * v.shape[-1])
    if op == "native_layer_norm":
        return given["input"].numel() * (5 + (given["weight"] is not None) + (given["bias"] is not None))
    if op == "native_layer_norm_backward":
        to_input, to_weight, to_bias = given["output_mask"]
        return given["input"].numel() * (10 * to_input + 2 * to_weight + to_bias)
    if op in ("nll_loss_forward", "nll_loss2d_forward"):
        return given["target"].numel()
    if op in PER_ELEMENT or op in REDUCTIONS:
        return PER_ELEMENT.get(op, 1) * next(t.numel() for v in given.values() for t in tensors(v))
    return out if op in POINTWISE else 0 if op in PORTABLE else None
