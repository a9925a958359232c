"""The kernel of the result, and of the gradient of the left side: a tile of one group's rows by one group's columns a program."""

import triton
import triton.language as tl

from ...launch.activations import sigmoid
from .codes import Form
from .quantised_products import product_of_codes
from .tile import place_of, product, swizzled

PAIR, HALVES, INTERLEAVED, SUM = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3), tl.constexpr(4)
"""Products of a program, 0 for one: gate and up of two right sides, of the halves of one, or of its even and odd columns; the sum of two."""
SILU, GELU, GELU_TANH, RELU = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3), tl.constexpr(4)


@triton.jit
def activated(z, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, FAST: tl.constexpr):
    if ACTIVATION == SILU:
        return z * sigmoid(ALPHA * z, FAST)
    if ACTIVATION == GELU:
        return 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    if ACTIVATION == GELU_TANH:
        # 1 + tanh(y) = 2 sigmoid(2 y)
        return z * sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z), FAST)
    if ACTIVATION == RELU:
        return tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return z


@triton.jit
def rounded(z, to: tl.constexpr, LIMIT: tl.constexpr):
    """`z` in the dtype `to`, on the same side of the limit as `z`: what is clipped has no gradient."""
    rounded = z.to(to)
    if LIMIT > 0:
        is_beyond = tl.abs(z) > LIMIT
        crosses = is_beyond != (tl.abs(rounded.to(tl.float32)) > LIMIT)
        # Two steps of bfloat16 away.
        beside = tl.where(is_beyond, LIMIT * (1 + 2**-7), LIMIT * (1 - 2**-7))
        rounded = tl.where(crosses, tl.where(z < 0, -beside, beside), rounded.to(tl.float32)).to(to)
    return rounded


@triton.jit
def scaled(acc, scale_ptr, bias_ptr, at, n, W: tl.constexpr, SCALE: tl.constexpr, BIAS: tl.constexpr):
    """`acc scale + bias`, those of one group, at its columns `n`."""
    if SCALE:
        acc *= tl.load(scale_ptr + at + n, mask=n < W, other=0.0)[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + at + n, mask=n < W, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit
def grouped_kernel(
    lhs_ptr, right_ptr, sizes_ptr, other_lhs_ptr, up_ptr, rows_ptr,  # [B, L, K], [E, K, W] or, mapped, [B, E, K, W], [B, E], as both, [B, M]
    bias_ptr, up_bias_ptr, scale_ptr, up_scale_ptr,  # [E, W] or, mapped, [B, E, W]
    scales_ptr, zeros_ptr, factor_ptr, up_scales_ptr, up_zeros_ptr, up_factor_ptr, M, L, E, TILES,  # of codes: blocks, and [E]
    out_ptr, gate_ptr, up_z_ptr,  # [B, M, N]
    K: tl.constexpr, W: tl.constexpr, N: tl.constexpr, KIND: tl.constexpr, TRANSPOSED: tl.constexpr, GATHERED: tl.constexpr,
    MAPPED: tl.constexpr, BIAS: tl.constexpr, UP_BIAS: tl.constexpr, SCALE: tl.constexpr, ROW_SCALE: tl.constexpr,
    ELEMENT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr, FACTOR: tl.constexpr,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_SHIFT: tl.constexpr, SAVE: tl.constexpr, FAST: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SWIZZLE: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    # out = act(z) or act(gate) (up + UP_SHIFT), where z, gate and up are lhs right[g] scale + bias; or the sum of two products.
    gated: tl.constexpr = KIND == PAIR or KIND == HALVES or KIND == INTERLEAVED
    two: tl.constexpr = KIND == PAIR or KIND == HALVES
    # Columns of the right side that a program multiplies at once: `BLOCK_N`, and an interleaved pair for each.
    wide: tl.constexpr = 2 * BLOCK_N if KIND == INTERLEAVED else BLOCK_N
    # The tile of this program: rows of one group, columns of its matrix.
    pid = tl.program_id(0)
    columns: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    b = (pid // (TILES * columns)).to(tl.int64)
    tile, column = swizzled(pid % (TILES * columns), TILES, columns, SWIZZLE)  # pyright: ignore[reportGeneralTypeIssues]
    group, first, end = place_of(sizes_ptr, b, tile, M, E, BLOCK_M, BLOCK_E)
    if group > E:
        return
    m = first + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    out = (b * M + m)[:, None] * N + n[None, :]  # [BLOCK_M, BLOCK_N]
    mine = (m < end)[:, None] & (n < N)[None, :]  # [BLOCK_M, BLOCK_N]
    # Rows of no group are 0.
    if group == E:
        zeros = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        tl.store(out_ptr + out, zeros.to(out_ptr.dtype.element_ty), mask=mine)
        if SAVE:
            tl.store(gate_ptr + out, zeros.to(gate_ptr.dtype.element_ty), mask=mine)
            if gated:
                tl.store(up_z_ptr + out, zeros.to(up_z_ptr.dtype.element_ty), mask=mine)
        return
    # Rows of the next group are loaded, not stored.
    row = tl.minimum(m, M - 1)  # [BLOCK_M]
    if GATHERED:
        row = tl.load(rows_ptr + b * M + row)  # [BLOCK_M]
        row = tl.minimum(tl.maximum(row, 0), L - 1)
    # The matrices of the group, and the products, which are summed in float32.
    index = group.to(tl.int64)
    if MAPPED:
        index += b * E
    start = column * wide + tl.arange(0, wide)  # [wide]
    acc = tl.zeros([BLOCK_M, wide], tl.float32)
    other = acc
    lhs = lhs_ptr + b * L * K
    count: tl.constexpr = 2 * N if KIND == INTERLEAVED else N
    if ELEMENT > 0:
        form: tl.constexpr = Form(ELEMENT, ROWS, COLUMNS, SCALES, ZEROS)
        acc = product_of_codes(
            lhs, row, right_ptr, scales_ptr, zeros_ptr, factor_ptr, index, column * wide, K, W, count, form, TRANSPOSED, FACTOR, FAST,
            BLOCK_M, wide, BLOCK_K, OPERAND, PRECISION)  # fmt: skip
        if KIND == HALVES:
            other = product_of_codes(
                lhs, row, right_ptr, scales_ptr, zeros_ptr, factor_ptr, index, N + column * wide, K, W, W, form, TRANSPOSED,
                FACTOR, FAST, BLOCK_M, wide, BLOCK_K, OPERAND, PRECISION)  # fmt: skip
        if KIND == PAIR or KIND == SUM:
            if KIND == SUM:
                lhs = other_lhs_ptr + b * L * K
            other = product_of_codes(
                lhs, row, up_ptr, up_scales_ptr, up_zeros_ptr, up_factor_ptr, index, column * wide, K, W, count, form,
                TRANSPOSED, FACTOR, FAST, BLOCK_M, wide, BLOCK_K, OPERAND, PRECISION)  # fmt: skip
        if KIND == SUM:
            acc += other
    else:
        right = right_ptr + index * (K * W)
        up = up_ptr + index * (K * W)
        if KIND == HALVES:
            up = right + (N * K if TRANSPOSED else N)
        row_scale = scale_ptr + index * K
        acc, other = product(
            acc, other, lhs, row, right, up, row_scale, start, K, W, count, two, TRANSPOSED, ROW_SCALE, wide, BLOCK_K, OPERAND,
            PRECISION)  # fmt: skip
        if KIND == SUM:
            lhs = other_lhs_ptr + b * L * K
            row_scale = up_scale_ptr + index * K
            acc, other = product(
                acc, other, lhs, row, up, up, row_scale, start, K, W, count, False, TRANSPOSED, ROW_SCALE, wide, BLOCK_K, OPERAND,
                PRECISION)  # fmt: skip
    # The epilogue: scale and bias, the activation, the gate.
    at = index * W
    acc = scaled(acc, scale_ptr, bias_ptr, at, start, W, SCALE, BIAS)  # [BLOCK_M, wide]
    if not gated:
        # The backward reads the products before the activation.
        if SAVE:
            tl.store(gate_ptr + out, acc.to(gate_ptr.dtype.element_ty), mask=mine)
        result = activated(acc, ACTIVATION, ALPHA, FAST)
    else:
        if KIND == INTERLEAVED:
            gate, up_z = tl.split(tl.reshape(acc, (BLOCK_M, BLOCK_N, 2)))  # [BLOCK_M, BLOCK_N] twice
        elif KIND == HALVES:
            gate = acc
            up_z = scaled(other, scale_ptr, bias_ptr, at + N, start, W - N, SCALE, BIAS)  # [BLOCK_M, BLOCK_N]
        else:
            gate = acc
            up_z = scaled(other, up_scale_ptr, up_bias_ptr, at, start, W, SCALE, UP_BIAS)  # as gate
        if SAVE:
            tl.store(gate_ptr + out, rounded(gate, gate_ptr.dtype.element_ty, LIMIT), mask=mine)
            tl.store(up_z_ptr + out, rounded(up_z, up_z_ptr.dtype.element_ty, LIMIT), mask=mine)
        if LIMIT > 0:
            # Comparisons keep NaN.
            gate = tl.where(gate > LIMIT, LIMIT, gate)
            up_z = tl.where(up_z > LIMIT, LIMIT, tl.where(up_z < -LIMIT, -LIMIT, up_z))
        result = activated(gate, ACTIVATION, ALPHA, FAST) * (up_z + UP_SHIFT)
    tl.store(out_ptr + out, result.to(out_ptr.dtype.element_ty), mask=mine)
