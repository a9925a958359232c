"""Functions that the kernels of the grouped matmul share: which rows a tile has, and operands of its products."""

import triton
import triton.language as tl

FLOAT32, FLOAT16 = tl.constexpr(0), tl.constexpr(1)
"""The dtypes that tiles are multiplied in, besides bfloat16."""


@triton.jit
def operand(x, OPERAND: tl.constexpr):
    """`x`, which may be stored in 8 bits or in float32, in the dtype of products."""
    if OPERAND == FLOAT32:
        y = x.to(tl.float32)
    elif OPERAND == FLOAT16:
        y = x.to(tl.float16)
    else:
        y = x.to(tl.bfloat16)
    return y


@triton.jit
def sizes_of(sizes_ptr, b, E, BLOCK_E: tl.constexpr):
    """The sizes of the groups of one batch row, `[BLOCK_E]`, 0 past the last."""
    e = tl.arange(0, BLOCK_E)  # [BLOCK_E]
    return e, tl.maximum(tl.load(sizes_ptr + b * E + e, mask=e < E, other=0), 0)  # [BLOCK_E] twice


@triton.jit
def place_of(sizes_ptr, b, number, M, E, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr):
    """Group, first row, and the row past the last one of tile `number`. Rows past the last group are tiles of group `E`; a group after it means
    that there is no such tile."""
    # Every program counts the tiles of all groups: a table of them would be another launch.
    e, sizes = sizes_of(sizes_ptr, b, E, BLOCK_E)  # pyright: ignore[reportGeneralTypeIssues]
    sizes = tl.where(e == E, tl.maximum(M - tl.sum(sizes, 0), 0), sizes)  # [BLOCK_E]
    tiles = (sizes + (BLOCK_M - 1)) // BLOCK_M  # [BLOCK_E]
    group = tl.sum((tl.cumsum(tiles, 0) <= number).to(tl.int32), 0)
    before = tl.sum(tl.where(e < group, tiles, 0), 0)
    start = tl.sum(tl.where(e < group, sizes, 0), 0)
    end = start + tl.sum(tl.where(e == group, sizes, 0), 0)
    return group, start + (number - before) * BLOCK_M, tl.minimum(end, M)


@triton.jit
def swizzled(pid, rows, columns, SWIZZLE: tl.constexpr):
    """Row and column of tile `pid` in an order in which `SWIZZLE` rows of tiles share columns that were loaded shortly before."""
    width = SWIZZLE * columns
    first = pid // width * SWIZZLE
    size = tl.minimum(rows - first, SWIZZLE)
    return first + pid % width % size, pid % width // size


@triton.jit
def right_offsets(k, n, K: tl.constexpr, W: tl.constexpr, TRANSPOSED: tl.constexpr):
    """`[BLOCK_K, BLOCK_N]`: where the entries of a group's matrix are, `[K, W]` or `[W, K]`."""
    if TRANSPOSED:
        return n[None, :].to(tl.int64) * K + k[:, None]
    return k[:, None].to(tl.int64) * W + n[None, :]


@triton.jit
def product(
    acc, other_acc, lhs_ptr, row, right_ptr, other_ptr, scale_ptr, n, K: tl.constexpr, W: tl.constexpr, N: tl.constexpr,
    TWO: tl.constexpr, TRANSPOSED: tl.constexpr, SCALED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`acc + lhs[row] right[:, n]` and, if `TWO`, `other_acc + lhs[row] other[:, n]`. `SCALED`: rows of the right side have scales, as the columns
    of its transpose have. They are multiplied with its entries: in float16, their products with the left side could be too small."""
    k = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    lhs = lhs_ptr + row.to(tl.int64)[:, None] * K + k[None, :]  # [BLOCK_M, BLOCK_K]
    at = right_offsets(k, n, K, W, TRANSPOSED)  # [BLOCK_K, BLOCK_N]
    step: tl.constexpr = BLOCK_K if TRANSPOSED else BLOCK_K * W
    whole: tl.constexpr = K % BLOCK_K == 0
    right = right_ptr + at
    other = other_ptr + at
    # Without a rest there is no mask in the loop.
    inside = (n < N)[None, :] & tl.full([BLOCK_K, 1], 1, tl.int1)  # [BLOCK_K, BLOCK_N]
    for turn in tl.range(0, (K + BLOCK_K - 1) // BLOCK_K):
        if whole:
            x = tl.load(lhs)  # [BLOCK_M, BLOCK_K]
        else:
            left = K - turn * BLOCK_K
            inside = (k < left)[:, None] & (n < N)[None, :]  # [BLOCK_K, BLOCK_N]
            x = tl.load(lhs, mask=(k < left)[None, :], other=0.0)
        if whole and N % BLOCK_N == 0:
            w = tl.load(right)  # [BLOCK_K, BLOCK_N]
            if TWO:
                u = tl.load(other)  # [BLOCK_K, BLOCK_N]
        else:
            w = tl.load(right, mask=inside, other=0.0)
            if TWO:
                u = tl.load(other, mask=inside, other=0.0)
        # In float32, before the operands are rounded.
        if SCALED:
            at_k = turn * BLOCK_K + k  # [BLOCK_K]
            w = w.to(tl.float32)  # [BLOCK_K, BLOCK_N]
            w *= tl.load(scale_ptr + at_k, mask=at_k < K, other=0.0)[:, None]
        acc = tl.dot(operand(x, OPERAND), operand(w, OPERAND), acc, input_precision=PRECISION)
        if TWO:
            other_acc = tl.dot(operand(x, OPERAND), operand(u, OPERAND), other_acc, input_precision=PRECISION)
        lhs += BLOCK_K
        right += step
        other += step
    return acc, other_acc
