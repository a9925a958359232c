"""The kernels of the gradients: of right sides and biases, a group's whole sum a program; of gathered rows, the sum over all that took one."""

import triton
import triton.language as tl

from .tile import operand, right_offsets, sizes_of


@triton.jit
def _sums(
    acc, total, lhs_ptr, dz_ptr, rows_ptr, start, end, b, M, L, k, n, K: tl.constexpr, W: tl.constexpr, GATHERED: tl.constexpr,
    MATRIX: tl.constexpr, TOTAL: tl.constexpr, BLOCK_M: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`acc + x^T dz` over these rows, and with `TOTAL` also `total` plus the sums of `dz`. Rows of other groups may be NaN."""
    r = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    dz_at = dz_ptr + (b * M + start + r)[:, None] * W + n[None, :]  # [BLOCK_M, BLOCK_N]
    lhs_at = lhs_ptr + (b * L + start + r)[None, :] * K + k[:, None]  # [BLOCK_K, BLOCK_M]
    for first in range(start, end, BLOCK_M):
        mine = first + r < end  # [BLOCK_M]
        dz = tl.load(dz_at, mask=mine[:, None] & (n < W)[None, :], other=0.0)  # [BLOCK_M, BLOCK_N]
        dz_at += BLOCK_M * W
        # Without a matrix only the bias's gradient is asked for.
        if MATRIX:
            if GATHERED:
                row = tl.load(rows_ptr + b * M + first + r, mask=mine, other=0)  # [BLOCK_M]
                row = b * L + tl.minimum(tl.maximum(row, 0), L - 1)
                lhs_at = lhs_ptr + row[None, :] * K + k[:, None]
            x = tl.load(lhs_at, mask=mine[None, :] & (k < K)[:, None], other=0.0)  # [BLOCK_K, BLOCK_M]
            lhs_at += BLOCK_M * K
            acc = tl.dot(operand(x, OPERAND), operand(dz, OPERAND), acc, input_precision=PRECISION)
        if TOTAL:
            total += tl.sum(dz.to(tl.float32), 0)  # [BLOCK_N]
    return acc, total


@triton.jit
def right_kernel(
    lhs_ptr, dz_ptr, sizes_ptr, rows_ptr, order_ptr, M, L, E,  # [B, L, K], [B, M, W], [B, E], [B, M], [E] or, mapped, [B, E]
    B, dright_ptr, dbias_ptr,  # [E, K, W] or [E, W, K], and [E, W]; all with the axis B if mapped
    K: tl.constexpr, W: tl.constexpr, TRANSPOSED: tl.constexpr, GATHERED: tl.constexpr, MAPPED: tl.constexpr, MATRIX: tl.constexpr,
    BIAS: tl.constexpr, DOWN: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    # dright = x^T dz and dbias = the sum of dz over the rows of a group. The largest groups come first, so that none of them is the last to end.
    across: tl.constexpr = (W + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    group = tl.load(order_ptr + pid // (across * DOWN))
    which = (pid // (across * DOWN)).to(tl.int64)
    k = pid % (across * DOWN) // across * BLOCK_K + tl.arange(0, BLOCK_K)  # [BLOCK_K]
    n = pid % across * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    acc = tl.zeros([BLOCK_K, BLOCK_N], tl.float32)
    total = tl.zeros([BLOCK_N], tl.float32)
    index = group.to(tl.int64)
    b = which * 0
    last = b + B
    if MAPPED:
        b = which // E
        last = b + 1
        index += b * E
    # The rows of this group in every batch row, one after the other: one program, one order of the sum.
    while b < last:
        e, sizes = sizes_of(sizes_ptr, b, E, BLOCK_E)
        start = tl.sum(tl.where(e < group, sizes, 0), 0)
        end = tl.minimum(start + tl.sum(tl.where(e == group, sizes, 0), 0), M)
        # The programs of the first rows also sum up the bias's gradient.
        if BIAS and pid % (across * DOWN) < across:
            acc, total = _sums(
                acc, total, lhs_ptr, dz_ptr, rows_ptr, start, end, b, M, L, k, n, K, W, GATHERED, MATRIX, True, BLOCK_M, OPERAND,
                PRECISION)  # fmt: skip
        else:
            acc, total = _sums(
                acc, total, lhs_ptr, dz_ptr, rows_ptr, start, end, b, M, L, k, n, K, W, GATHERED, MATRIX, False, BLOCK_M, OPERAND,
                PRECISION)  # fmt: skip
        b += 1
    if MATRIX:
        at = right_offsets(k, n, K, W, TRANSPOSED)  # [BLOCK_K, BLOCK_N]
        inside = (k < K)[:, None] & (n < W)[None, :]  # [BLOCK_K, BLOCK_N]
        tl.store(dright_ptr + index * (K * W) + at, acc.to(dright_ptr.dtype.element_ty), mask=inside)
    if BIAS and pid % (across * DOWN) < across:
        tl.store(dbias_ptr + index * W + n, total, mask=n < W)


@triton.jit
def collect_kernel(
    taken_ptr, order_ptr, starts_ptr, M, L,  # [B, M, K], [B, M], [B, L + 1]
    dlhs_ptr,  # [B, L, K]
    K: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # dlhs[l] = the sum, in order, of the rows that were taken from row l: those at order[starts[l]] up to order[starts[l + 1]].
    blocks: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    pid = tl.program_id(0)
    row = (pid // blocks).to(tl.int64)
    b = row // L
    k = pid % blocks * BLOCK_K + tl.arange(0, BLOCK_K)  # [BLOCK_K]
    start = tl.load(starts_ptr + row + b)
    end = tl.load(starts_ptr + row + b + 1)
    total = tl.zeros([BLOCK_K], tl.float32)
    # One after the other, in the order of the rows: the sum repeats bit for bit.
    for i in tl.range(start, end):
        m = tl.load(order_ptr + b * M + i)
        total += tl.load(taken_ptr + (b * M + m) * K + k, mask=k < K, other=0.0).to(tl.float32)  # [BLOCK_K]
    tl.store(dlhs_ptr + row * K + k, total.to(dlhs_ptr.dtype.element_ty), mask=k < K)
