"""Products by quantised right sides: words of codes become a tile of numbers in registers."""

import triton
import triton.language as tl

from .codes import block_of, dequantised, E2M1, factor_of, Form, numbers_in, scale_of, UINT4
from .tile import operand


@triton.jit
def _bytes_of(low, high, select):
    """Four of eight bytes, by the hexadecimal digits of `select`; those from 8 on give 0 for a byte below 128."""
    prmt: tl.constexpr = "prmt.b32 $0, $1, $2, $3;"
    return tl.inline_asm_elementwise(
        prmt, "=r,r,r,r", [low, high, select], dtype=tl.uint32, is_pure=True, pack=1
    )


@triton.jit
def _mantissa(words, i: tl.constexpr, nothing, ELEMENT: tl.constexpr):
    """Codes `i` of words as the first bits of mantissas: 1 + code / 16, and of `E2M1`, by NVIDIA's instructions, 1.125 + number / 64. `nothing` as
    in `numbers_in`."""
    if ELEMENT == UINT4:
        bits = words << (19 - 4 * i) if i < 5 else words >> (4 * i - 19)
        x = (bits & 0x780000) | (0x3F800000 - nothing)
    else:
        # One instruction looks four codes up in a table of 8 bytes, and gives 0 for negative ones.
        codes = words >> 16 * (i // 4)
        low, high = 0x03020100 - nothing, 0x0C080604 - nothing
        numbers = _bytes_of(low, high, codes) + 0x90909090 - _bytes_of(low, high, codes ^ 0x8888)
        select: tl.constexpr = 0x7044 + 0x100 * (i % 4)
        x = _bytes_of(numbers, 0x3F000000 - nothing, select)
    return x.to(tl.float32, bitcast=True)


@triton.jit
def _mantissas(words, nothing, ELEMENT: tl.constexpr):
    """Those of words in the order of their codes, `[..., 2, 2, 2]`."""
    a = tl.join(_mantissa(words, 0, nothing, ELEMENT), _mantissa(words, 4, nothing, ELEMENT))
    b = tl.join(_mantissa(words, 2, nothing, ELEMENT), _mantissa(words, 6, nothing, ELEMENT))
    c = tl.join(_mantissa(words, 1, nothing, ELEMENT), _mantissa(words, 5, nothing, ELEMENT))
    d = tl.join(_mantissa(words, 3, nothing, ELEMENT), _mantissa(words, 7, nothing, ELEMENT))
    return tl.join(tl.join(a, b), tl.join(c, d))


@triton.jit
def _one_row(
    lhs_ptr, words_ptr, scales_ptr, zeros_ptr, n, nothing, K: tl.constexpr, form: Form, FAST: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`lhs w[n]^T` of one row `[K]`: `[BLOCK_N]`, without tensor cores. A thread adds up runs of columns, whose scale multiplies the sum."""
    each: tl.constexpr = 8 if form.ELEMENT >= UINT4 else 4  # codes of a word
    run: tl.constexpr = 16 if each == 4 or form.COLUMNS == 16 else 32
    runs: tl.constexpr = BLOCK_K // run
    mantissas: tl.constexpr = form.ELEMENT == UINT4 or (form.ELEMENT == E2M1 and FAST)
    acc = tl.zeros([BLOCK_N, runs], tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)  # [BLOCK_K]
        word = start // each + tl.arange(0, BLOCK_K // each)  # [BLOCK_K / each]
        first = (start + tl.arange(0, runs) * run)[None, :]  # [1, runs]
        at = n.to(tl.int64)[:, None] * (K // each) + word[None, :]  # [BLOCK_N, BLOCK_K / each]
        if K % BLOCK_K == 0:
            words = tl.load(words_ptr + at)
            x = tl.load(lhs_ptr + k).to(tl.float32)
        else:
            words = tl.load(words_ptr + at, mask=(word < K // each)[None, :], other=0)
            x = tl.load(lhs_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        if mantissas:
            w = _mantissas(words, nothing, form.ELEMENT)
        else:
            w = numbers_in(words, nothing, form.ELEMENT)
        w = tl.reshape(w, (BLOCK_N, BLOCK_K))
        part = tl.sum(tl.reshape(w * x[None, :], (BLOCK_N, runs, run)), 2)  # [BLOCK_N, runs]
        block = block_of(n[:, None], first, K, form)  # [BLOCK_N, runs]
        if mantissas:
            if form.ZEROS:
                zero = tl.load(zeros_ptr + block, mask=first < K, other=0).to(tl.float32) + 16.0
            elif form.ELEMENT == UINT4:
                zero = 24.0
            else:
                zero = 72.0
            ones: tl.constexpr = 16.0 if form.ELEMENT == UINT4 else 64.0
            part = ones * part - zero * tl.sum(tl.reshape(x, (runs, run)), 1)[None, :]
        if form.COLUMNS:
            part *= scale_of(tl.load(scales_ptr + block, mask=first < K, other=0), form.SCALE)
        acc += part
    total = tl.sum(acc, 1)
    if not mantissas:
        total *= factor_of(form.ELEMENT)
    if not form.COLUMNS:
        total *= scale_of(tl.load(scales_ptr + block_of(n, 0, K, form)), form.SCALE)
    return total


@triton.jit
def _rows(
    lhs, words_ptr, scales_ptr, zeros_ptr, n, nothing, K: tl.constexpr, form: Form, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows at `lhs` `[BLOCK_M, 1]` times `w[n]^T`: `[BLOCK_M, BLOCK_N]`, by tensor cores. Where a tile has one scale a row, it multiplies the
    product."""
    each: tl.constexpr = 8 if form.ELEMENT >= UINT4 else 4  # codes of a word
    alike: tl.constexpr = form.COLUMNS % BLOCK_K == 0
    unit: tl.constexpr = BLOCK_K if alike else form.COLUMNS
    units: tl.constexpr = BLOCK_K // unit
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)  # [BLOCK_K]
        word = start // each + tl.arange(0, BLOCK_K // each)  # [BLOCK_K / each]
        first = (start + tl.arange(0, units) * unit)[None, :]  # [1, units]
        at = n.to(tl.int64)[:, None] * (K // each) + word[None, :]  # [BLOCK_N, BLOCK_K / each]
        words = tl.load(words_ptr + at, mask=(word < K // each)[None, :], other=0)
        x = tl.load(lhs + k[None, :], mask=(k < K)[None, :], other=0.0)  # [BLOCK_M, BLOCK_K]
        w = tl.reshape(numbers_in(words, nothing, form.ELEMENT), (BLOCK_N, units, unit))
        block = block_of(n[:, None], first, K, form)  # [BLOCK_N, units]
        if form.ZEROS:
            w -= (tl.load(zeros_ptr + block, mask=first < K, other=8).to(tl.float32) - 8.0)[:, :, None]
        if form.COLUMNS:
            scale = scale_of(
                tl.load(scales_ptr + block, mask=first < K, other=0), form.SCALE
            )  # [BLOCK_N, units]
            if not alike:
                w *= (scale * factor_of(form.ELEMENT))[:, :, None]
        w = tl.trans(operand(tl.reshape(w, (BLOCK_N, BLOCK_K)), OPERAND))  # [BLOCK_K, BLOCK_N]
        if form.COLUMNS and alike:
            acc += tl.dot(operand(x, OPERAND), w, input_precision=PRECISION) * tl.reshape(scale, (1, BLOCK_N))
        else:
            acc = tl.dot(operand(x, OPERAND), w, acc, input_precision=PRECISION)
    if alike:
        acc *= factor_of(form.ELEMENT)
    if not form.COLUMNS:
        acc *= scale_of(tl.load(scales_ptr + block_of(n, 0, K, form)), form.SCALE)[None, :]
    return acc


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
    lhs_ptr, row, codes_ptr, scales_ptr, zeros_ptr, factor_ptr, index, first, nothing, K: tl.constexpr, W: tl.constexpr,
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
    words_ptr = codes_ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
    n = tl.minimum(first + tl.arange(0, BLOCK_N), N - 1)  # [BLOCK_N]
    lhs = lhs_ptr + row.to(tl.int64)[:, None] * K  # [BLOCK_M, 1]
    if BLOCK_M == 1:
        lhs = lhs_ptr + tl.sum(row, 0).to(tl.int64) * K
        z = _one_row(lhs, words_ptr, scales_ptr, zeros_ptr, n, nothing, K, form, FAST, BLOCK_N, BLOCK_K)
        z = z[None, :]
    elif TRANSPOSED:
        z = _rows(
            lhs, words_ptr, scales_ptr, zeros_ptr, n, nothing, K, form, BLOCK_M, BLOCK_N, BLOCK_K, OPERAND,
            PRECISION)  # fmt: skip
    else:
        z = _transposed_rows(
            lhs, codes_ptr, scales_ptr, zeros_ptr, first, K, W, form, BLOCK_M, BLOCK_N, BLOCK_K, OPERAND,
            PRECISION)  # fmt: skip
    if FACTOR:
        z *= tl.load(factor_ptr + index)
    return z
