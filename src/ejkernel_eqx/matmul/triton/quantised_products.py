"""The product by the codes of a group's right side, or by their transpose."""
# pyright: reportAssignmentType=false

import triton
import triton.language as tl

from .coded import few_times_codes, rows_times_codes
from .codes import dequantised, Form, UINT4
from .tile import operand


@triton.jit
def _transposed_rows(
    lhs, codes_ptr, scales_ptr, zeros_ptr, first, K: tl.constexpr, W: tl.constexpr, form: Form, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows at `lhs` `[BLOCK_M, 1]` times columns from `first` on of codes `[K, W]`: the gradient of the left side."""
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)  # [BLOCK_K]
        x = tl.load(lhs + k[None, :], mask=(k < K)[None, :], other=0.0)  # [BLOCK_M, BLOCK_K]
        # Rows past the last are read as the last: their products are with 0.
        n = tl.minimum(k, K - 1)
        w = dequantised(codes_ptr, scales_ptr, zeros_ptr, n, first, W, form, BLOCK_K, BLOCK_N)
        acc = tl.dot(operand(x, OPERAND), operand(w, OPERAND), acc, input_precision=PRECISION)
    return acc


@triton.jit
def product_of_codes(
    lhs_ptr, row, codes_ptr, scales_ptr, zeros_ptr, factor_ptr, index, first, K: tl.constexpr, W: tl.constexpr,
    N: tl.constexpr, form: Form, TRANSPOSED: tl.constexpr, FACTOR: tl.constexpr, FAST: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`lhs[row] right[:, first:]`, `[BLOCK_M, BLOCK_N]`, of the right side of group `index`, whose codes are `[W, K]` if `TRANSPOSED`, else
    `[K, W]`. Columns from `N` on are arbitrary."""
    OUT: tl.constexpr = W if TRANSPOSED else K
    IN: tl.constexpr = K if TRANSPOSED else W
    blocks: tl.constexpr = (tl.cdiv(OUT, form.ROWS) if form.ROWS else 1) * (
        tl.cdiv(IN, form.COLUMNS) if form.COLUMNS else 1
    )
    codes_ptr += index * (OUT * IN // 2 if form.ELEMENT >= UINT4 else OUT * IN)
    scales_ptr += index * blocks
    zeros_ptr += index * blocks
    n = tl.minimum(first + tl.arange(0, BLOCK_N), N - 1)  # [BLOCK_N]
    lhs = lhs_ptr + row.to(tl.int64)[:, None] * K  # [BLOCK_M, 1]
    if BLOCK_M == 1:
        unit: tl.constexpr = 16 if form.ELEMENT < UINT4 or form.COLUMNS == 16 else 32
        z, _ = few_times_codes(  # pyright: ignore[reportGeneralTypeIssues]
            lhs_ptr, lhs_ptr, codes_ptr, scales_ptr, zeros_ptr, row, n, K, form, unit, False, False, 1, BLOCK_N, BLOCK_K, None,
            FAST)  # fmt: skip
    elif TRANSPOSED:
        z = rows_times_codes(
            lhs_ptr, codes_ptr, scales_ptr, zeros_ptr, row, n, K, form, form.COLUMNS, OPERAND, PRECISION, BLOCK_M, BLOCK_N,
            BLOCK_K, 1, None)  # fmt: skip
    else:
        z = _transposed_rows(
            lhs, codes_ptr, scales_ptr, zeros_ptr, first, K, W, form, BLOCK_M, BLOCK_N, BLOCK_K, OPERAND,
            PRECISION)  # fmt: skip
    if FACTOR:
        z *= tl.load(factor_ptr + index)
    return z
