"""Tiles of weights as numbers: of arrays, and of codes with scales in 8 and 4 bits."""
# pyright: reportAssignmentType=false, reportOperatorIssue=false

from collections import namedtuple

import triton
import triton.language as tl

INT8, E4M3, E5M2, UINT4, E2M1 = (tl.constexpr(i) for i in range(1, 6))
FLOAT32, BFLOAT16, FLOAT16, E8M0, SCALE_E4M3 = (tl.constexpr(i) for i in range(5))

Form = namedtuple("Form", "ELEMENT ROWS COLUMNS SCALE ZEROS")
"""How numbers are stored: codes of which element, in blocks of how many rows and columns that share a scale (0: all), scales of which dtype, and
whether there are zero points. Constants; `ELEMENT` 0 is an array of numbers."""


@triton.jit
def from_e4m3(code):
    """float32 numbers of float8_e4m3fn codes: sign, 4 bits of exponent with bias 7, 3 of mantissa; no infinities."""
    code = code.to(tl.int32)
    magnitude = code & 0x7F
    # In float16's fields the exponent is too small by 8, also for subnormal numbers.
    x = ((magnitude << 7) | ((code & 0x80) << 8)).to(tl.int16).to(tl.float16, bitcast=True).to(
        tl.float32
    ) * 256.0
    return tl.where(magnitude == 0x7F, float("nan"), x)


@triton.jit
def from_e5m2(code):
    """float32 numbers of float8_e5m2 codes, which are the high bytes of float16 numbers."""
    return (code.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def from_e2m1(code):
    """float32 numbers of float4_e2m1fn codes: sign, 2 bits of exponent with bias 1, 1 of mantissa."""
    code = code.to(tl.int32)
    # As above, too small by 14.
    x = (((code & 7) << 9) | ((code & 8) << 12)).to(tl.int16).to(tl.float16, bitcast=True)
    return x.to(tl.float32) * 16384.0


@triton.jit
def numbers_of(codes, ELEMENT: tl.constexpr):
    """The numbers that codes stand for, before zero points and scales, in float32."""
    if ELEMENT == INT8:
        x = codes.to(tl.int8, bitcast=True).to(tl.float32)
    elif ELEMENT == E4M3:
        x = from_e4m3(codes)
    elif ELEMENT == E5M2:
        x = from_e5m2(codes)
    elif ELEMENT == E2M1:
        x = from_e2m1(codes)
    else:
        x = codes.to(tl.float32)
    return x


@triton.jit
def _number_in(words, i: tl.constexpr, nothing, ELEMENT: tl.constexpr):
    """The numbers of codes `i` of words."""
    if ELEMENT == UINT4 or ELEMENT == INT8:
        # A number from 2^e on, below 2^(e + 1), of which the code counts the ones.
        bits: tl.constexpr = 4 if ELEMENT == UINT4 else 8
        # So many codes of a word lie where a mantissa has room.
        room: tl.constexpr = 5 if ELEMENT == UINT4 else 2
        shift: tl.constexpr = bits * (i % room)
        code = (words ^ 0x80808080 if ELEMENT == INT8 else words) >> (bits * room * (i // room))
        x = ((code & ((1 << bits) - 1 << shift)) | (((150 - shift) << 23) - nothing)).to(
            tl.float32, bitcast=True
        )
        x -= float((1 << (23 - shift)) + (1 << (bits - 1)))
    elif ELEMENT == E2M1:
        # Two float16 numbers of a word, codes `i` and `i + 4`.
        both = words << (12 - 4 * (i % 4))
        x = _half_of((both & 0x80008000) | ((both >> 3) & 0x0E000E00), i // 4)
    else:
        # Two float16 numbers of a word, codes `i` and `i + 2`.
        both = words << (8 - 8 * (i % 2))
        if ELEMENT == E4M3:
            x = _half_of((both & 0x80008000) | ((both >> 1) & 0x3F803F80), i // 2)
            if i == 0:
                # Any NaN of the word, by a carry into its sign: the sum that it is a part of is NaN anyway.
                carry = (((words & 0x7F7F7F7F) + 0x01010101) & 0x80808080) != 0
                x = tl.where(carry, float("nan"), x)
        else:
            x = _half_of(both & 0xFF00FF00, i // 2)
    return x


@triton.jit
def _half_of(words, i: tl.constexpr):
    """float32 of the low or the high float16 number of words."""
    return (words >> (16 * i)).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def numbers_in(words, nothing, ELEMENT: tl.constexpr):
    """float32 numbers of words `[...]`, uint32 that hold 8 or 4 codes each: `[..., 2, 2, 2]` or `[..., 2, 2]`; of `UINT4` less 8, of floats divided
    by `factor_of`, and of words with a NaN the first number is NaN. A few instructions each, as the bits of a code become those of a mantissa or of
    a float16 number.

    `nothing` is 0, and not known to the compiler: so it keeps a constant in a register, and masks and adds bits in one instruction."""
    if ELEMENT == UINT4 or ELEMENT == E2M1:
        even = tl.join(
            tl.join(_number_in(words, 0, nothing, ELEMENT), _number_in(words, 4, nothing, ELEMENT)),
            tl.join(_number_in(words, 2, nothing, ELEMENT), _number_in(words, 6, nothing, ELEMENT)),
        )
        odd = tl.join(
            tl.join(_number_in(words, 1, nothing, ELEMENT), _number_in(words, 5, nothing, ELEMENT)),
            tl.join(_number_in(words, 3, nothing, ELEMENT), _number_in(words, 7, nothing, ELEMENT)),
        )
    else:
        even = tl.join(_number_in(words, 0, nothing, ELEMENT), _number_in(words, 2, nothing, ELEMENT))
        odd = tl.join(_number_in(words, 1, nothing, ELEMENT), _number_in(words, 3, nothing, ELEMENT))
    return tl.join(even, odd)


@triton.jit
def factor_of(ELEMENT: tl.constexpr):
    """What the numbers of `numbers_in` are to be multiplied by."""
    factor: tl.constexpr = 16384.0 if ELEMENT == E2M1 else 256.0 if ELEMENT == E4M3 else 1.0
    return factor


@triton.jit
def block_of(n, k, K: tl.constexpr, form: Form):
    """The place of the scale of rows `n` and columns `k`, which broadcast."""
    row = n // form.ROWS if form.ROWS else n * 0
    if form.COLUMNS:
        at = row * ((K + form.COLUMNS - 1) // form.COLUMNS) + k // form.COLUMNS
    else:
        at = row + k * 0
    return at


@triton.jit
def scale_of(bits, SCALE: tl.constexpr):
    """float32 scales from their bits."""
    if SCALE == FLOAT32:
        x = bits.to(tl.float32, bitcast=True)
    elif SCALE == BFLOAT16:
        x = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif SCALE == FLOAT16:
        x = bits.to(tl.float16, bitcast=True).to(tl.float32)
    elif SCALE == E8M0:
        # 2^(bits - 127), of which the smallest is subnormal and the largest NaN.
        bits = bits.to(tl.int32)
        x = tl.where(bits == 0, 0x400000, bits << 23).to(tl.float32, bitcast=True)
        x = tl.where(bits == 255, float("nan"), x)
    else:
        x = from_e4m3(bits)
    return x


@triton.jit
def _over_columns(values, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Values `[BLOCK_N, BLOCK_K / COLUMNS]`, each for so many columns: `[BLOCK_N, BLOCK_K]`."""
    groups: tl.constexpr = BLOCK_K // COLUMNS
    wide = tl.broadcast_to(values[:, :, None], (BLOCK_N, groups, COLUMNS))  # [BLOCK_N, groups, COLUMNS]
    return tl.reshape(wide, (BLOCK_N, BLOCK_K))


@triton.jit
def dequantised(
    codes_ptr, scales_ptr, zeros_ptr, n, start, K: tl.constexpr, form: Form, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Rows `n` `[BLOCK_N]` of quantised weights, columns from `start` on: `(code - zero) * scale`, float32 `[BLOCK_N, BLOCK_K]`; 0 from `K` on.

    `start` is a multiple of `BLOCK_K`; a block of columns is a multiple or a part of a tile."""
    rows = n.to(tl.int64)  # [BLOCK_N]
    if form.ELEMENT == UINT4 or form.ELEMENT == E2M1:
        pair = start // 2 + tl.arange(0, BLOCK_K // 2)  # [BLOCK_K / 2]
        both = tl.load(
            codes_ptr + rows[:, None] * (K // 2) + pair[None, :], mask=(pair < K // 2)[None, :], other=0
        )
        codes = tl.interleave(both & 15, both >> 4)  # [BLOCK_N, BLOCK_K]
    else:
        k = start + tl.arange(0, BLOCK_K)  # [BLOCK_K]
        codes = tl.load(codes_ptr + rows[:, None] * K + k[None, :], mask=(k < K)[None, :], other=0)  # [BLOCK_N, BLOCK_K]  # fmt: skip
    w = numbers_of(codes, form.ELEMENT)  # [BLOCK_N, BLOCK_K]
    # Blocks of whole rows have one column of scales, blocks of whole matrices one row.
    whole: tl.constexpr = form.COLUMNS == 0
    columns: tl.constexpr = BLOCK_K if whole else form.COLUMNS
    of_row = rows
    if form.ROWS == 0:
        of_row = rows * 0
    elif form.ROWS > 1:
        of_row = rows // form.ROWS
    if not whole:
        of_row *= (K + columns - 1) // columns
    narrow: tl.constexpr = columns < BLOCK_K
    if narrow:
        block = start // columns + tl.arange(0, BLOCK_K // columns)  # [BLOCK_K / COLUMNS]
        at = of_row[:, None] + block[None, :]  # [BLOCK_N, BLOCK_K / COLUMNS]
        there = (block * columns < K)[None, :]
    else:
        at = of_row[:, None]  # [BLOCK_N, 1]
        if not whole:
            at += start // columns
        there = at >= 0
    if form.ZEROS:
        zero = tl.load(zeros_ptr + at, mask=there, other=0).to(tl.float32)
        if narrow:
            zero = _over_columns(zero, columns, BLOCK_N, BLOCK_K)
        w -= zero
    elif form.ELEMENT == UINT4:
        w -= 8.0
    scale = scale_of(tl.load(scales_ptr + at, mask=there, other=0), form.SCALE)
    if narrow:
        scale = _over_columns(scale, columns, BLOCK_N, BLOCK_K)
    w *= scale
    if K % BLOCK_K != 0:
        w = tl.where((start + tl.arange(0, BLOCK_K) < K)[None, :], w, 0.0)
    return w
