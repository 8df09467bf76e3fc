"""Wrong kernels for lesson triton. Each is the lesson's own answer with one mistake put in.

The answers are read from the worked notebook, so that REFERENCE is what the lesson says and a mistake that no
longer fits its text is told. A kernel is made from text: Triton reads its source, which `linecache` gives.
"""

import linecache

import torch

import course_lib.kernels  # noqa: F401  isort: skip  before triton: it chooses the interpreter
import triton
import triton.language as tl

from course_lib.authoring import notebook

NB = notebook.load(next(notebook.NBS.glob("*_triton.ipynb")))
SOURCE = {
    f"triton.{i}": next(notebook.source(c) for c in NB["cells"] if c["id"] == f"ex{i}-stub")
    for i in range(1, 8)
}
NAMES = {
    "triton.1": "add_kernel",
    "triton.2": "softmax_kernel",
    "triton.3": "rmsnorm_kernel",
    "triton.4": "rmsnorm_backward_kernel",
    "triton.5": "matmul_kernel",
    "triton.6": "grouped",
    "triton.7": "xent_kernel",
}


def made(text, name, scope=None):
    "The function `name` that a text defines (in `scope`, a dict), with a source that `inspect` finds."
    file = (
        f"<{name}, {len(linecache.cache)}>"  # one each: a kernel's source is read when it is first launched
    )
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    scope = {} if scope is None else scope
    scope |= {"__name__": __name__, "torch": torch, "triton": triton, "tl": tl}
    exec(compile(text, file, "exec"), scope)
    return scope[name]


REFERENCE = {number: made(SOURCE[number], name) for number, name in NAMES.items()}


def mutant(name, number, *pairs):
    "The answer to an exercise, called `name`, with each (old, new) text replaced wherever it stands."
    text = SOURCE[number].replace(f"{NAMES[number]}(", f"{name}(").replace(f"{NAMES[number]}[", f"{name}[")
    for old, new in pairs:
        assert old in text, f"{name}: {old!r} is not in the answer to {number}"
        text = text.replace(old, new)
    return made(text, name)


# --- triton.1 ---------------------------------------------------------------------------

no_mask = mutant("no_mask", "triton.1", (", mask=mask", ""))
stores_without_a_mask = mutant("stores_without_a_mask", "triton.1", ("total, mask=mask", "total"))
loads_without_a_mask = mutant("loads_without_a_mask", "triton.1", ("y_ptr + at, mask=mask", "y_ptr + at"))
one_too_many = mutant("one_too_many", "triton.1", ("at < n", "at <= n"))
one_too_few = mutant("one_too_few", "triton.1", ("at < n", "at < n - 1"))
drops_the_ragged_block = mutant("drops_the_ragged_block", "triton.1", ("at < n", "at < n // BLOCK * BLOCK"))
every_program_the_first_block = mutant(
    "every_program_the_first_block", "triton.1", ("tl.program_id(0) * BLOCK + ", "")
)
blocks_overlap = mutant(
    "blocks_overlap", "triton.1", ("tl.program_id(0) * BLOCK", "tl.program_id(0) * (BLOCK - 1)")
)
adds_x_twice = mutant("adds_x_twice", "triton.1", ("y_ptr + at", "x_ptr + at"))
subtracts = mutant("subtracts", "triton.1", ("mask=mask) + tl.load", "mask=mask) - tl.load"))
into_x = mutant("into_x", "triton.1", ("tl.store(out_ptr", "tl.store(x_ptr"))
one_program_does_it_all = mutant(
    "one_program_does_it_all",
    "triton.1",
    (
        "    at = tl.program_id(0) * BLOCK +",
        "    for start in range(0, n, BLOCK):\n        at = start +",
    ),
    ("    mask = at", "        mask = at"),
    ("    total", "        total"),
    ("    tl.store", "        tl.store"),
)
interleaved_by_the_wrong_stride = mutant(
    "interleaved_by_the_wrong_stride",
    "triton.1",
    ("tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)", "tl.program_id(0) + tl.arange(0, BLOCK) * BLOCK"),
)

# --- triton.2 ---------------------------------------------------------------------------

LOAD2 = 'tl.load(x_ptr + row * x_stride + cols, mask=mask, other=-float("inf"))'
no_other = mutant("no_other", "triton.2", (', other=-float("inf")', ""))
other_zero = mutant("other_zero", "triton.2", ('-float("inf")', "0.0"))
other_small = mutant("other_small", "triton.2", ('-float("inf")', "-10.0"))
no_maximum = mutant("no_maximum", "triton.2", (" - tl.max(x, axis=0)", ""))
in_half_precision = mutant("in_half_precision", "triton.2", (".to(tl.float32)", ".to(tl.float16)"))
reads_twice = mutant("reads_twice", "triton.2", ("tl.max(x, axis=0)", f"tl.max({LOAD2}, axis=0)"))
stores_past_the_row = mutant("stores_past_the_row", "triton.2", ("axis=0), mask=mask", "axis=0)"))
contiguous_x = mutant("contiguous_x", "triton.2", ("row * x_stride", "row * n_cols"))
contiguous_out = mutant("contiguous_out", "triton.2", ("row * out_stride", "row * n_cols"))
strides_mixed_up = mutant("strides_mixed_up", "triton.2", ("row * out_stride", "row * x_stride"))
always_the_first_row = mutant("always_the_first_row", "triton.2", ("row = tl.program_id(0)", "row = 0"))
not_normalised = mutant("not_normalised", "triton.2", ("e / tl.sum(e, axis=0)", "e"))
divides_by_the_largest = mutant(
    "divides_by_the_largest", "triton.2", ("tl.sum(e, axis=0)", "tl.max(e, axis=0)")
)
log_softmax = mutant("log_softmax", "triton.2", ("e / tl.sum(e, axis=0)", "tl.log(e / tl.sum(e, axis=0))"))
powers_of_two = mutant("powers_of_two", "triton.2", ("tl.exp(", "tl.exp2("))
without_the_last_column = mutant(
    "without_the_last_column", "triton.2", ("cols < n_cols", "cols < n_cols - 1")
)
rounds_before_it_divides = mutant(
    "rounds_before_it_divides", "triton.2", ("e / tl.sum(e, axis=0)", "e.to(tl.bfloat16) / tl.sum(e, axis=0)")
)
adds_a_small_number = mutant(
    "adds_a_small_number", "triton.2", ("tl.sum(e, axis=0)", "(tl.sum(e, axis=0) + 1e-3)")
)

# --- triton.3 ---------------------------------------------------------------------------

squares_in_the_dtype_of_x = mutant(
    "squares_in_the_dtype_of_x",
    "triton.3",
    ("mask=mask, other=0.0).to(tl.float32)\n    w", "mask=mask, other=0.0)\n    w"),
)
mean_over_the_block = mutant("mean_over_the_block", "triton.3", ("/ n_cols", "/ BLOCK"))
sum_not_mean = mutant("sum_not_mean", "triton.3", ("tl.sum(x * x, axis=0) / n_cols", "tl.sum(x * x, axis=0)"))
eps_outside_the_root = mutant(
    "eps_outside_the_root",
    "triton.3",
    ("tl.rsqrt(tl.sum(x * x, axis=0) / n_cols + eps)", "1 / (tl.sqrt(tl.sum(x * x, axis=0) / n_cols) + eps)"),
)
no_eps = mutant("no_eps", "triton.3", (" + eps", ""))
eps_times_the_columns = mutant(
    "eps_times_the_columns", "triton.3", ("/ n_cols + eps)", "/ n_cols + eps * n_cols)")
)
layer_norm = mutant(
    "layer_norm",
    "triton.3",
    ("    rstd =", "    x = tl.where(mask, x - tl.sum(x, axis=0) / n_cols, 0.0)\n    rstd ="),
)
no_weight = mutant("no_weight", "triton.3", ("x * rstd * w", "x * rstd"))
one_plus_weight = mutant("one_plus_weight", "triton.3", ("x * rstd * w", "x * rstd * (1 + w)"))
norm_no_other = mutant("norm_no_other", "triton.3", (", other=0.0", ""))
masked_lanes_are_one = mutant("masked_lanes_are_one", "triton.3", ("other=0.0", "other=1.0"))
keeps_the_variance = mutant(
    "keeps_the_variance", "triton.3", ("rstd_ptr + row, rstd", "rstd_ptr + row, 1 / (rstd * rstd)")
)
keeps_a_rounded_rstd = mutant(
    "keeps_a_rounded_rstd", "triton.3", ("rstd_ptr + row, rstd", "rstd_ptr + row, rstd.to(tl.float16)")
)
forgets_rstd = mutant("forgets_rstd", "triton.3", ("    tl.store(rstd_ptr + row, rstd)\n", ""))
rounds_before_the_weight = mutant(
    "rounds_before_the_weight", "triton.3", ("x * rstd * w", "(x * rstd).to(tl.bfloat16) * w.to(tl.bfloat16)")
)
rounds_in_between = mutant(
    "rounds_in_between", "triton.3", ("x * rstd * w", "(x * rstd).to(x_ptr.dtype.element_ty) * w")
)
norm_contiguous = mutant("norm_contiguous", "triton.3", ("row * x_stride", "row * n_cols"))
norm_contiguous_y = mutant("norm_contiguous_y", "triton.3", ("row * y_stride", "row * x_stride"))
a_weight_for_each_row = mutant(
    "a_weight_for_each_row", "triton.3", ("w_ptr + cols", "w_ptr + row * n_cols + cols")
)
reads_the_row_twice = mutant(
    "reads_the_row_twice",
    "triton.3",
    (
        "x * rstd * w",
        "tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32) * rstd * w",
    ),
)

# --- triton.4 ---------------------------------------------------------------------------

ROWS4 = "range(tl.program_id(0), rows, tl.num_programs(0))"
LAST4 = "    tl.store(dw_ptr + tl.program_id(0) * dw_stride + cols, dw, mask=mask)"
one_row_for_all = mutant("one_row_for_all", "triton.4", ("tl.program_id(0) * dw_stride + cols", "cols"))
reads_adds_and_writes_one_row = mutant(
    "reads_adds_and_writes_one_row",
    "triton.4",
    (
        LAST4,
        "    dw += tl.load(dw_ptr + cols, mask=mask, other=0.0)\n    tl.store(dw_ptr + cols, dw, mask=mask)",
    ),
)
adds_into_memory_row_by_row = mutant(
    "adds_into_memory_row_by_row",
    "triton.4",
    (LAST4, ""),
    (
        "        dw += dy * hat",
        "        at = dw_ptr + tl.program_id(0) * dw_stride + cols\n"
        "        tl.store(at, tl.load(at, mask=mask, other=0.0) + dy * hat, mask=mask)",
    ),
)
adds_atomically = mutant(
    "adds_atomically", "triton.4", (LAST4, "    tl.atomic_add(dw_ptr + cols, dw, mask=mask)")
)
every_program_every_row = mutant("every_program_every_row", "triton.4", (ROWS4, "range(0, rows)"))
one_row_a_program = mutant(
    "one_row_a_program", "triton.4", (ROWS4, "range(tl.program_id(0), tl.program_id(0) + 1)")
)
drops_the_rest = mutant(
    "drops_the_rest",
    "triton.4",
    (ROWS4, ROWS4.replace("rows,", "rows // tl.num_programs(0) * tl.num_programs(0),")),
)
idle_programs_store_nothing = mutant(
    "idle_programs_store_nothing", "triton.4", ("dw, mask=mask", "dw, mask=mask & (tl.program_id(0) < rows)")
)
no_mean_term = mutant("no_mean_term", "triton.4", ("g - hat * tl.sum(g * hat, axis=0) / n_cols", "g"))
mean_term_over_the_block = mutant("mean_term_over_the_block", "triton.4", ("/ n_cols", "/ BLOCK"))
mean_term_of_dy = mutant(
    "mean_term_of_dy", "triton.4", ("tl.sum(g * hat, axis=0)", "tl.sum(dy * hat, axis=0)")
)
mean_term_of_x = mutant("mean_term_of_x", "triton.4", ("tl.sum(g * hat, axis=0)", "tl.sum(g * x, axis=0)"))
dx_without_rstd = mutant("dx_without_rstd", "triton.4", ("dx = rstd * (", "dx = ("))
dx_without_the_weight = mutant("dx_without_the_weight", "triton.4", ("g = dy * w", "g = dy"))
dw_of_x = mutant("dw_of_x", "triton.4", ("dw += dy * hat", "dw += dy * x"))
dw_with_the_weight = mutant("dw_with_the_weight", "triton.4", ("dw += dy * hat", "dw += g * hat"))
dw_of_the_last_row = mutant("dw_of_the_last_row", "triton.4", ("dw += dy * hat", "dw = dy * hat"))
dw_in_half_precision = mutant(
    "dw_in_half_precision",
    "triton.4",
    ("tl.zeros((BLOCK,), tl.float32)", "tl.zeros((BLOCK,), tl.float16)"),
    ("dw += dy * hat", "dw = (dw + dy * hat).to(tl.float16)"),
)
reads_x_twice = mutant(
    "reads_x_twice",
    "triton.4",
    ("dw += dy * hat", "dw += dy * rstd * tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0)"),
)
dy_has_the_stride_of_x = mutant("dy_has_the_stride_of_x", "triton.4", ("row * dy_stride", "row * x_stride"))
partials_are_contiguous = mutant(
    "partials_are_contiguous", "triton.4", ("tl.program_id(0) * dw_stride", "tl.program_id(0) * n_cols")
)
layer_norm_backward = mutant(
    "layer_norm_backward",
    "triton.4",
    ("dx = rstd * (g - ", "dx = rstd * (g - tl.sum(g, axis=0) / n_cols - "),
)

# --- triton.5 ---------------------------------------------------------------------------

A_THERE = "(m[:, None] < M) & (k[None, :] < K - start)"
B_THERE = "(k[:, None] < K - start) & (n[None, :] < N)"
no_mask_on_k = mutant("no_mask_on_k", "triton.5", (A_THERE, "m[:, None] < M"), (B_THERE, "n[None, :] < N"))
mask_on_k_for_a_only = mutant("mask_on_k_for_a_only", "triton.5", (B_THERE, "n[None, :] < N"))
mask_on_k_of_the_first_step = mutant("mask_on_k_of_the_first_step", "triton.5", ("K - start", "K"))
no_mask_on_m = mutant("no_mask_on_m", "triton.5", (A_THERE, "k[None, :] < K - start"))
tile_no_other = mutant("tile_no_other", "triton.5", (", other=0.0", ""))
masks_swapped = mutant(
    "masks_swapped", "triton.5", ("m[:, None] < M", "m[:, None] < N"), ("n[None, :] < N", "n[None, :] < M")
)
store_without_a_mask = mutant(
    "store_without_a_mask", "triton.5", ("acc, mask=(m[:, None] < M) & (n[None, :] < N)", "acc")
)
drops_the_rest_of_k = mutant(
    "drops_the_rest_of_k", "triton.5", ("range(0, K, BLOCK_K)", "range(0, K // BLOCK_K * BLOCK_K, BLOCK_K)")
)
accumulates_in_fp16 = mutant(
    "accumulates_in_fp16",
    "triton.5",
    ("(BLOCK_M, BLOCK_N), tl.float32", "(BLOCK_M, BLOCK_N), tl.float16"),
    (
        'tl.dot(a, b, acc, input_precision="ieee")',
        '(acc + tl.dot(a, b, input_precision="ieee")).to(tl.float16)',
    ),
)
rounds_the_factors = mutant(
    "rounds_the_factors", "triton.5", ("tl.dot(a, b,", "tl.dot(a.to(tl.float16), b.to(tl.float16),")
)
DOT5 = 'acc = tl.dot(a, b, acc, input_precision="ieee")'
accumulates_in_the_dtype_of_c = mutant(
    "accumulates_in_the_dtype_of_c",
    "triton.5",
    (DOT5, 'acc = (acc + tl.dot(a, b, input_precision="ieee")).to(c_ptr.dtype.element_ty).to(tl.float32)'),
)
accumulates_in_the_dtype_of_a = mutant(
    "accumulates_in_the_dtype_of_a",
    "triton.5",
    (DOT5, 'acc = (acc + tl.dot(a, b, input_precision="ieee")).to(a_ptr.dtype.element_ty).to(tl.float32)'),
)
rounds_to_tf32 = mutant("rounds_to_tf32", "triton.5", (', input_precision="ieee"', ""))
asks_for_tf32 = mutant("asks_for_tf32", "triton.5", ('"ieee"', '"tf32"'))
keeps_the_last_step = mutant(
    "keeps_the_last_step", "triton.5", ("tl.dot(a, b, acc, input", "tl.dot(a, b, input")
)
never_moves_on = mutant(
    "never_moves_on", "triton.5", ("        a_at += BLOCK_K * a_col\n        b_at += BLOCK_K * b_row\n", "")
)
a_never_moves_on = mutant("a_never_moves_on", "triton.5", ("        a_at += BLOCK_K * a_col\n", ""))
steps_by_one_element = mutant(
    "steps_by_one_element", "triton.5", ("a_at += BLOCK_K * a_col", "a_at += BLOCK_K")
)
b_steps_along_its_row = mutant(
    "b_steps_along_its_row", "triton.5", ("b_at += BLOCK_K * b_row", "b_at += BLOCK_K * b_col")
)
rows_are_contiguous = mutant("rows_are_contiguous", "triton.5", ("k[None, :] * a_col", "k[None, :]"))
c_is_contiguous = mutant("c_is_contiguous", "triton.5", ("m[:, None] * c_row", "m[:, None] * N"))
b_transposed = mutant(
    "b_transposed",
    "triton.5",
    ("k[:, None] * b_row + n[None, :] * b_col", "k[:, None] * b_col + n[None, :] * b_row"),
)
axes_swapped = mutant(
    "axes_swapped",
    "triton.5",
    ("tl.program_id(0) * BLOCK_M", "tl.program_id(1) * BLOCK_M"),
    ("tl.program_id(1) * BLOCK_N", "tl.program_id(0) * BLOCK_N"),
)
loads_a_twice = mutant(
    "loads_a_twice",
    "triton.5",
    ("        a_at +=", f"        a = tl.load(a_at, mask={A_THERE}, other=0.0)\n        a_at +="),
)
blocks_of_the_wrong_side = mutant(
    "blocks_of_the_wrong_side", "triton.5", ("tl.program_id(0) * BLOCK_M", "tl.program_id(0) * BLOCK_N")
)

# --- triton.6 ---------------------------------------------------------------------------


def row_by_row(pid, tiles_m, tiles_n, group):
    return pid // tiles_n, pid % tiles_n


def column_by_column(pid, tiles_m, tiles_n, group):
    return pid % tiles_m, pid // tiles_m


def row_by_row_in_each_group(pid, tiles_m, tiles_n, group):
    first = pid // (group * tiles_n) * group
    within = pid % (group * tiles_n)
    return first + within // tiles_n, within % tiles_n


def the_last_group_is_full(pid, tiles_m, tiles_n, group):
    first = pid // (group * tiles_n) * group
    within = pid % (group * tiles_n)
    return first + within % group, within // group


def the_last_group_is_cut_off(pid, tiles_m, tiles_n, group):
    row, column = the_last_group_is_full(pid, tiles_m, tiles_n, group)
    return min(row, tiles_m - 1), column


def groups_of_columns(pid, tiles_m, tiles_n, group):
    column, row = REFERENCE["triton.6"](pid, tiles_n, tiles_m, group)
    return row, column


def column_then_row(pid, tiles_m, tiles_n, group):
    return REFERENCE["triton.6"](pid, tiles_m, tiles_n, group)[::-1]


def the_group_is_the_number_of_groups(pid, tiles_m, tiles_n, group):
    return REFERENCE["triton.6"](pid, tiles_m, tiles_n, max(1, tiles_m // group))


def groups_as_long_as_the_grid_is_high(pid, tiles_m, tiles_n, group):
    first = pid // (group * tiles_m) * group
    height = max(1, min(tiles_m - first, group))
    within = pid % (group * tiles_m)
    return first + within % height, within // height


def the_tutorials_old_slip(pid, tiles_m, tiles_n, group):
    first = pid // (group * tiles_n) * group
    height = min(tiles_m - first, group)
    return first + pid % height, (pid % (group * tiles_n)) // height


def snakes(pid, tiles_m, tiles_n, group):
    row, column = REFERENCE["triton.6"](pid, tiles_m, tiles_n, group)
    return row, tiles_n - 1 - column if row // group % 2 else column


# --- triton.7 ---------------------------------------------------------------------------

SUM7 = "total * tl.exp(top - new) + tl.sum(tl.exp(x - new), axis=0)"
forgets_to_rescale = mutant(
    "forgets_to_rescale", "triton.7", (SUM7, "total + tl.sum(tl.exp(x - new), axis=0)")
)
rescales_the_wrong_way = mutant(
    "rescales_the_wrong_way", "triton.7", ("tl.exp(top - new)", "tl.exp(new - top)")
)
maximum_of_the_last_chunk = mutant(
    "maximum_of_the_last_chunk",
    "triton.7",
    ("tl.maximum(top, tl.max(x, axis=0))", "tl.max(x, axis=0)"),
    ("total * tl.exp(top - new)", "total"),
)
no_maximum_at_all = mutant(
    "no_maximum_at_all",
    "triton.7",
    (SUM7, "total + tl.sum(tl.exp(x), axis=0)"),
    ("lse = top + tl.log(total)", "lse = tl.log(total)"),
)
first_chunk_only = mutant(
    "first_chunk_only",
    "triton.7",
    ("= 0.0\n    for start in range(0, n_cols, B", "= 0.0\n    for start in range(0, BLOCK, B"),
)
xent_no_other = mutant("xent_no_other", "triton.7", (', other=-float("inf")', ""))
xent_other_zero = mutant("xent_other_zero", "triton.7", ('other=-float("inf")', "other=0.0"))
xent_in_half_precision = mutant("xent_in_half_precision", "triton.7", (".to(tl.float32)", ".to(tl.float16)"))
forgets_the_target = mutant("forgets_the_target", "triton.7", ("tl.where(cols == target, p - 1.0, p)", "p"))
gradient_of_the_wrong_sign = mutant(
    "gradient_of_the_wrong_sign",
    "triton.7",
    ("tl.where(cols == target, p - 1.0, p)", "tl.where(cols == target, 1.0 - p, -p)"),
)
one_off_target = mutant("one_off_target", "triton.7", ("cols == target, p", "cols == target - 1, p"))
forgets_the_scale = mutant(
    "forgets_the_scale",
    "triton.7",
    ("scale * tl.where(cols", "tl.where(target < 0, 0.0, 1.0) * tl.where(cols"),
)
scales_the_loss = mutant("scales_the_loss", "triton.7", ("0.0, lse - chosen", "0.0, scale * (lse - chosen)"))
ignored_rows_count = mutant(
    "ignored_rows_count", "triton.7", ("    scale = tl.where(target < 0, 0.0, scale)\n", "")
)
ignored_rows_have_a_loss = mutant(
    "ignored_rows_have_a_loss", "triton.7", ("tl.where(target < 0, 0.0, lse - chosen)", "lse - chosen")
)
ignored_rows_keep_their_logits = mutant(
    "ignored_rows_keep_their_logits", "triton.7", ("p), mask=mask", "p), mask=mask & (target >= 0)")
)
ignores_minus_100_only = mutant("ignores_minus_100_only", "triton.7", ("target < 0", "target == -100"))
ignores_class_zero = mutant("ignores_class_zero", "triton.7", ("target < 0", "target <= 0"))
overwrites_too_early = mutant(
    "overwrites_too_early",
    "triton.7",
    (
        "        top = new\n",
        "        top = new\n        tl.store(row_ptr + cols, tl.exp(x - new), mask=cols < n_cols)\n",
    ),
    ("p = tl.exp(x - lse)", "p = x / total"),
)
LOSS7 = "    tl.store(loss_ptr + row, tl.where(target < 0, 0.0, lse - chosen))\n"
reads_the_target_after_writing = mutant(
    "reads_the_target_after_writing",
    "triton.7",
    ("        chosen += tl.sum(tl.where(cols == target, x, 0.0), axis=0)\n", ""),
    (LOSS7, ""),
    (
        "p), mask=mask)\n",
        "p), mask=mask)\n    chosen = tl.load(row_ptr + tl.maximum(target, 0)).to(tl.float32)\n" + LOSS7,
    ),
)
target_beyond_the_row = mutant(
    "target_beyond_the_row",
    "triton.7",
    ("    chosen = 0.0\n", "    chosen = tl.load(row_ptr + target).to(tl.float32)\n"),
    ("        chosen += tl.sum(tl.where(cols == target, x, 0.0), axis=0)\n", ""),
)
reads_three_times = mutant(
    "reads_three_times",
    "triton.7",
    ("tl.max(x, axis=0)", 'tl.max(tl.load(row_ptr + cols, mask=cols < n_cols, other=-float("inf")), axis=0)'),
)
logits_are_contiguous = mutant("logits_are_contiguous", "triton.7", ("row * stride", "row * n_cols"))
probabilities_not_normalised = mutant(
    "probabilities_not_normalised", "triton.7", ("tl.exp(x - lse)", "tl.exp(x - top)")
)
stores_past_the_end = mutant("stores_past_the_end", "triton.7", ("p), mask=mask", "p)"))

# --- right for most inputs ----------------------------------------------------------

a_block_of_64 = mutant("a_block_of_64", "triton.1", ("tl.program_id(0) * BLOCK", "tl.program_id(0) * 64"))
maximum_not_below_zero = mutant(
    "maximum_not_below_zero", "triton.2", ("tl.max(x, axis=0)", "tl.maximum(tl.max(x, axis=0), 0.0)")
)
masks_with_a_large_number = mutant("masks_with_a_large_number", "triton.2", ('-float("inf")', "-10000.0"))
eps_of_its_own = mutant("eps_of_its_own", "triton.3", ("/ n_cols + eps", "/ n_cols + 1e-6"))
another_eps_of_its_own = mutant("another_eps_of_its_own", "triton.3", ("/ n_cols + eps", "/ n_cols + 1e-5"))
W4 = "    w = tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)\n"
loads_w_for_each_row = mutant(
    "loads_w_for_each_row",
    "triton.4",
    (W4, ""),
    ("        hat = x * rstd\n", "    " + W4 + "        hat = x * rstd\n"),
)
maximum_from_zero = mutant("maximum_from_zero", "triton.7", ('top = -float("inf")', "top = 0.0"))
ignores_two_numbers = mutant(
    "ignores_two_numbers", "triton.7", ("target < 0", "(target == -1) | (target == -100)")
)

# --- legal Python, illegal Triton: right in the interpreter, and refused by the compi


a_global_zero = mutant(
    "a_global_zero",
    "triton.1",
    ("@triton.jit", "ZERO = 0.0\n\n\n@triton.jit"),
    ("x_ptr + at, mask=mask", "x_ptr + at, mask=mask, other=ZERO"),
)
a_global_other = mutant(
    "a_global_other",
    "triton.2",
    ("@triton.jit", 'LOWEST = -float("inf")\n\n\n@triton.jit'),
    ('other=-float("inf")', "other=LOWEST"),
)
a_plain_helper = mutant(
    "a_plain_helper",
    "triton.2",
    ("@triton.jit", "def shifted(x):\n    return tl.exp(x - tl.max(x, 0))\n\n\n@triton.jit"),
    ("tl.exp(x - tl.max(x, axis=0))", "shifted(x)"),
)
tries = mutant(
    "tries", "triton.2", ("    e = ", "    try:\n        pass\n    finally:\n        pass\n    e = ")
)
a_dictionary = mutant(
    "a_dictionary",
    "triton.3",
    ("    rstd = ", '    kept = {"x": x}\n    rstd = '),
    ("x * x", 'kept["x"] * x'),
)
python_sums = mutant(
    "python_sums",
    "triton.4",
    ("tl.zeros((BLOCK,), tl.float32)", "0"),  # an integer at first and a block later
)
breaks_off = mutant(
    "breaks_off",
    "triton.5",
    (
        "range(0, K, BLOCK_K):\n",
        "range(0, K + BLOCK_K, BLOCK_K):\n        if start >= K:\n            break\n",
    ),
)


def a_list_of_tiles(pid, tiles_m, tiles_n, group):
    tiles = []
    for first in range(0, tiles_m, group):
        for column in range(tiles_n):
            tiles += [(row, column) for row in range(first, min(first + group, tiles_m))]
    return tiles[pid]


def pythons_integers(pid, tiles_m, tiles_n, group):
    first = int(pid / (group * tiles_n)) * group
    height = min(tiles_m - first, group)
    within = pid % (group * tiles_n)
    return first + within % height, int(within / height)


an_integer_maximum = mutant(
    "an_integer_maximum", "triton.7", ("top = -float", "top = -10**9 if True else -float")
)

MUTANTS = {
    "triton.1": [
        no_mask,
        stores_without_a_mask,
        loads_without_a_mask,
        one_too_many,
        one_too_few,
        drops_the_ragged_block,
        every_program_the_first_block,
        blocks_overlap,
        adds_x_twice,
        subtracts,
        into_x,
        one_program_does_it_all,
        interleaved_by_the_wrong_stride,
        a_global_zero,
        a_block_of_64,
    ],
    "triton.2": [
        no_other,
        other_zero,
        other_small,
        no_maximum,
        in_half_precision,
        reads_twice,
        stores_past_the_row,
        contiguous_x,
        contiguous_out,
        strides_mixed_up,
        always_the_first_row,
        not_normalised,
        divides_by_the_largest,
        log_softmax,
        powers_of_two,
        without_the_last_column,
        rounds_before_it_divides,
        adds_a_small_number,
        a_global_other,
        a_plain_helper,
        tries,
        maximum_not_below_zero,
        masks_with_a_large_number,
    ],
    "triton.3": [
        squares_in_the_dtype_of_x,
        mean_over_the_block,
        sum_not_mean,
        eps_outside_the_root,
        no_eps,
        eps_times_the_columns,
        layer_norm,
        no_weight,
        one_plus_weight,
        norm_no_other,
        masked_lanes_are_one,
        keeps_the_variance,
        keeps_a_rounded_rstd,
        forgets_rstd,
        rounds_before_the_weight,
        rounds_in_between,
        norm_contiguous,
        norm_contiguous_y,
        a_weight_for_each_row,
        reads_the_row_twice,
        a_dictionary,
        eps_of_its_own,
        another_eps_of_its_own,
    ],
    "triton.4": [
        one_row_for_all,
        reads_adds_and_writes_one_row,
        adds_into_memory_row_by_row,
        adds_atomically,
        every_program_every_row,
        one_row_a_program,
        drops_the_rest,
        idle_programs_store_nothing,
        no_mean_term,
        mean_term_over_the_block,
        mean_term_of_dy,
        mean_term_of_x,
        dx_without_rstd,
        dx_without_the_weight,
        dw_of_x,
        dw_with_the_weight,
        dw_of_the_last_row,
        dw_in_half_precision,
        reads_x_twice,
        dy_has_the_stride_of_x,
        partials_are_contiguous,
        layer_norm_backward,
        python_sums,
        loads_w_for_each_row,
    ],
    "triton.5": [
        no_mask_on_k,
        mask_on_k_for_a_only,
        mask_on_k_of_the_first_step,
        no_mask_on_m,
        tile_no_other,
        masks_swapped,
        store_without_a_mask,
        drops_the_rest_of_k,
        accumulates_in_fp16,
        rounds_the_factors,
        accumulates_in_the_dtype_of_c,
        accumulates_in_the_dtype_of_a,
        rounds_to_tf32,
        asks_for_tf32,
        keeps_the_last_step,
        never_moves_on,
        a_never_moves_on,
        steps_by_one_element,
        b_steps_along_its_row,
        rows_are_contiguous,
        c_is_contiguous,
        b_transposed,
        axes_swapped,
        loads_a_twice,
        blocks_of_the_wrong_side,
        breaks_off,
    ],
    "triton.6": [
        row_by_row,
        column_by_column,
        row_by_row_in_each_group,
        the_last_group_is_full,
        the_last_group_is_cut_off,
        groups_of_columns,
        column_then_row,
        the_group_is_the_number_of_groups,
        groups_as_long_as_the_grid_is_high,
        the_tutorials_old_slip,
        snakes,
        a_list_of_tiles,
        pythons_integers,
    ],
    "triton.7": [
        forgets_to_rescale,
        rescales_the_wrong_way,
        maximum_of_the_last_chunk,
        no_maximum_at_all,
        first_chunk_only,
        xent_no_other,
        xent_other_zero,
        xent_in_half_precision,
        forgets_the_target,
        gradient_of_the_wrong_sign,
        one_off_target,
        forgets_the_scale,
        scales_the_loss,
        ignored_rows_count,
        ignored_rows_have_a_loss,
        ignored_rows_keep_their_logits,
        ignores_minus_100_only,
        ignores_class_zero,
        overwrites_too_early,
        reads_the_target_after_writing,
        target_beyond_the_row,
        reads_three_times,
        logits_are_contiguous,
        probabilities_not_normalised,
        stores_past_the_end,
        an_integer_maximum,
        maximum_from_zero,
        ignores_two_numbers,
    ],
}
