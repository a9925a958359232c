"""Products of rows and quantised weights: words of codes become a tile of numbers in registers."""
# pyright: reportAssignmentType=false, reportArgumentType=false

import triton
import triton.language as tl

from .codes import block_of, E2M1, factor_of, Form, numbers_in, scale_of, UINT4
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
def few_times_codes(
    x_ptr, norm_ptr, codes_ptr, scales_ptr, zeros_ptr, row, n, K: tl.constexpr, form: Form, UNIT: tl.constexpr,
    NORM: tl.constexpr, NORM_WEIGHT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, FAST: tl.constexpr = False,
):  # fmt: skip
    """Rows `row` `[BLOCK_M]`, which follow each other, times rows `n` `[BLOCK_N]` of quantised weights: `[BLOCK_M, BLOCK_N]`; and with `NORM`, of
    which only the weight is applied, the sum of the squares of a single row. Without tensor cores: a number, once made, multiplies all rows. A thread
    sums units of `UNIT` features, whose scale multiplies the sum. `FAST`: whether NVIDIA's instructions are used."""
    four: tl.constexpr = form.ELEMENT == UINT4 or form.ELEMENT == E2M1
    each: tl.constexpr = 8 if four else 4
    units: tl.constexpr = BLOCK_K // UNIT
    whole: tl.constexpr = K % BLOCK_K == 0
    # With several rows, sums of each for zero points would take more registers than there are.
    mantissas: tl.constexpr = BLOCK_M == 1 and (form.ELEMENT == UINT4 or (form.ELEMENT == E2M1 and FAST))
    ones: tl.constexpr = 64.0 if form.ELEMENT == E2M1 else 16.0
    nothing = tl.program_id(1).to(tl.uint32)
    words_ptr = codes_ptr.to(tl.pointer_type(tl.uint32))
    first, last = tl.min(row, 0), tl.max(row, 0)
    # A sum for each row, as one tensor of all would be laid out over threads in another way.
    sums = ()
    for _ in tl.static_range(BLOCK_M):
        sums = sums + (tl.zeros([BLOCK_N, units], tl.float32),)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)  # [BLOCK_K]
        word = start // each + tl.arange(0, BLOCK_K // each)  # [BLOCK_K / 8 or 4]
        unit = start + tl.arange(0, units) * UNIT  # [units]
        at = words_ptr + n.to(tl.int64)[:, None] * (K // each) + word[None, :]  # [BLOCK_N, BLOCK_K / 8 or 4]
        if whole:
            words = tl.load(at)  # [BLOCK_N, BLOCK_K / 8 or 4]
        else:
            words = tl.load(at, mask=(word < K // each)[None, :], other=0)
        w = (
            _mantissas(words, nothing, form.ELEMENT)
            if mantissas
            else numbers_in(words, nothing, form.ELEMENT)
        )
        w = tl.reshape(w, (BLOCK_N, BLOCK_K))
        block = block_of(n[:, None], unit[None, :], K, form)  # [BLOCK_N, units]
        there = (unit < K)[None, :]
        zeros = 72.0 if form.ELEMENT == E2M1 else 24.0  # of mantissas
        if form.ZEROS:
            zeros = tl.load(zeros_ptr + block, mask=there, other=8).to(tl.float32)
            if BLOCK_M == 1:
                zeros += 16.0
            else:
                zeros -= 8.0
                w = tl.reshape(tl.reshape(w, (BLOCK_N, units, UNIT)) - zeros[:, :, None], (BLOCK_N, BLOCK_K))
        if form.COLUMNS:
            scales = scale_of(tl.load(scales_ptr + block, mask=there, other=0), form.SCALE)
        added = ()
        for m in tl.static_range(BLOCK_M):
            x_at = x_ptr + tl.minimum(first + m, last).to(tl.int64) * K + k  # [BLOCK_K]
            if whole:
                x = tl.load(x_at).to(tl.float32)
            else:
                x = tl.load(x_at, mask=k < K, other=0.0).to(tl.float32)
            if NORM:
                squares += x * x
                if NORM_WEIGHT:
                    x *= tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)
            part = tl.sum(tl.reshape(w * x[None, :], (BLOCK_N, units, UNIT)), 2)  # [BLOCK_N, units]
            if mantissas:
                part = ones * part - zeros * tl.sum(tl.reshape(x, (units, UNIT)), 1)[None, :]
            if form.COLUMNS:
                part *= scales
            added = added + (sums[m] + part,)
        sums = added
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for m in tl.static_range(BLOCK_M):
        total = tl.where((tl.arange(0, BLOCK_M) == m)[:, None], tl.sum(sums[m], 1)[None, :], total)
    if not mantissas:
        total *= factor_of(form.ELEMENT)
    if not form.COLUMNS:
        total *= scale_of(tl.load(scales_ptr + block_of(n, 0, K, form)), form.SCALE)[None, :]
    return total, tl.zeros([BLOCK_M], tl.float32) + tl.sum(squares, 0)


@triton.jit
def _scales_of(scales_ptr, zeros_ptr, n, unit, K: tl.constexpr, form: Form):
    """The bits of the scales of features from `unit` on of rows `n`, and their zero points."""
    block = block_of(n, unit, K, form)
    scales = tl.load(scales_ptr + block, mask=unit < K, other=0)
    zeros = scales
    if form.ZEROS:
        zeros = tl.load(zeros_ptr + block, mask=unit < K, other=8)
    return scales, zeros


@triton.jit
def rows_times_codes(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, row, n, K: tl.constexpr, form: Form, UNIT: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows `row` `[BLOCK_M]` times rows `n` `[BLOCK_N]` of quantised weights, by tensor cores: `[BLOCK_M, BLOCK_N]`. Warps take `SPLIT_K` parts of
    `BLOCK_K` features at once. A tile of numbers is scaled before it is rounded, or if it has one scale a row, its product is."""
    four: tl.constexpr = form.ELEMENT == UINT4 or form.ELEMENT == E2M1
    each: tl.constexpr = 8 if four else 4
    alike: tl.constexpr = form.COLUMNS % BLOCK_K == 0
    unit: tl.constexpr = BLOCK_K if alike else UNIT
    units: tl.constexpr = BLOCK_K // unit
    whole: tl.constexpr = K % (BLOCK_K * SPLIT_K) == 0
    nothing = tl.program_id(1).to(tl.uint32)
    words_ptr = codes_ptr.to(tl.pointer_type(tl.uint32))
    # With one part tiles have two axes, as all warps share in their products. Numbers of 64 rows and more are the left side, which Hopper's tensor
    # cores take from registers, where they are made.
    left_side: tl.constexpr = SPLIT_K == 1 and BLOCK_N >= 64
    if left_side:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    elif SPLIT_K == 1:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    else:
        acc = tl.zeros([SPLIT_K, BLOCK_M, BLOCK_N], tl.float32)
    step: tl.constexpr = BLOCK_K * SPLIT_K
    parts = (tl.arange(0, SPLIT_K) * BLOCK_K)[:, None, None]  # [SPLIT_K, 1, 1]
    unit_at = parts + (tl.arange(0, units) * unit)[None, None, :]  # [SPLIT_K, 1, units]
    # Scales are loaded a step before they are used: their few bytes are not copied in stages.
    if form.COLUMNS or form.ZEROS:
        bits, zeros = _scales_of(
            scales_ptr, zeros_ptr, n[None, :, None], unit_at, K, form
        )  # [SPLIT_K, BLOCK_N, units]
    for start in tl.range(0, K, step, num_stages=STAGES):
        first = start + parts  # [SPLIT_K, 1, 1]
        k = first + tl.arange(0, BLOCK_K)[None, None, :]  # [SPLIT_K, 1, BLOCK_K]
        word = first // each + tl.arange(0, BLOCK_K // each)[None, None, :]  # [SPLIT_K, 1, BLOCK_K / 8 or 4]
        x_at = x_ptr + row.to(tl.int64)[None, :, None] * K + k  # [SPLIT_K, BLOCK_M, BLOCK_K]
        at = (
            words_ptr + n.to(tl.int64)[None, :, None] * (K // each) + word
        )  # [SPLIT_K, BLOCK_N, BLOCK_K / 8 or 4]
        if whole:
            words = tl.load(at)
            x = tl.load(x_at)
        else:
            words = tl.load(at, mask=word < K // each, other=0)
            x = tl.load(x_at, mask=k < K, other=0.0)
        w = tl.reshape(numbers_in(words, nothing, form.ELEMENT), (SPLIT_K, BLOCK_N, units, unit))
        if form.ZEROS:
            w -= (zeros.to(tl.float32) - 8.0)[:, :, :, None]
        if form.COLUMNS:
            scales = scale_of(bits, form.SCALE)
            if not alike:
                w *= (scales * factor_of(form.ELEMENT))[:, :, :, None]
        if form.COLUMNS or form.ZEROS:
            bits, zeros = _scales_of(scales_ptr, zeros_ptr, n[None, :, None], unit_at + start + step, K, form)
        if left_side:
            left = operand(tl.reshape(w, (BLOCK_N, BLOCK_K)), OPERAND)
            right = tl.trans(tl.reshape(x, (BLOCK_M, BLOCK_K)))  # [BLOCK_K, BLOCK_M]
        elif SPLIT_K == 1:
            left = tl.reshape(x, (BLOCK_M, BLOCK_K))
            right = tl.trans(operand(tl.reshape(w, (BLOCK_N, BLOCK_K)), OPERAND))  # [BLOCK_K, BLOCK_N]
        else:
            left = x
            right = operand(tl.reshape(w, (SPLIT_K, BLOCK_N, BLOCK_K)), OPERAND)
            right = tl.permute(right, (0, 2, 1))  # [SPLIT_K, BLOCK_K, BLOCK_N]
        if form.COLUMNS and alike:
            part = tl.dot(left, right, input_precision=PRECISION)  # as acc
            if left_side:
                acc += part * tl.reshape(scales, (BLOCK_N, 1))
            elif SPLIT_K == 1:
                acc += part * tl.reshape(scales, (1, BLOCK_N))
            else:
                acc += part * tl.reshape(scales, (SPLIT_K, 1, BLOCK_N))
        else:
            acc = tl.dot(left, right, acc, input_precision=PRECISION)
    total = acc
    if left_side:
        total = tl.trans(acc)
    elif SPLIT_K > 1:
        total = tl.sum(acc, 0)  # [BLOCK_M, BLOCK_N]
    if alike:
        total *= factor_of(form.ELEMENT)
    if not form.COLUMNS:
        total *= scale_of(tl.load(scales_ptr + block_of(n, 0, K, form)), form.SCALE)[None, :]
    return total
