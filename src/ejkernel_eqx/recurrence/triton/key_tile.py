"""Decay per key channel within a chunk: scores `sum_d q_id k_jd 2^(G_id - G_jd)` and their gradients, by matrix products.

`2^(G_i - G_j)` is split into `2^(G_i - G_m) 2^(G_m - G_j)` about a row `m`, with one factor for the queries and the other for the keys.
If no factor exceeds `2^80`, one middle row serves the whole chunk. Otherwise `m` is the first row of the chunk's second half, queries are
taken from the second half and keys from the first, so that both exponents are negative, and each half is split in the same way, down to
pairs of rows. So any decay is exact, and no pair of rows is computed alone.
"""

from collections import namedtuple

import triton
import triton.language as tl

from .operands import operand_of
from .tile import load_tile, load_transposed

MOST_EXPONENT = tl.constexpr(80.0)  # the largest exponent of a factor about a row, in either direction
LEAST_MIDDLE = tl.constexpr(-100.0)  # log2 of the decay of the incoming state at the middle row


KeyGates = namedtuple("KeyGates", "ptr low_ptr count")
"""The summed log decays of a chunk and their rounding errors, from its first row on, and the number of its rows, at least one."""


Channels = namedtuple("Channels", "STRIDE D CHUNK BLOCK_K EXACT")
"""The stride of rows of gates, their channels, and the tile that is processed at a time; `EXACT`: with rounding errors. All are constants."""


# fmt: off
@triton.jit
def gates_of(ptr, low_ptr, chunk, h, HS: tl.constexpr, HG: tl.constexpr, D: tl.constexpr):
    """The `KeyGates` of a chunk that the state head h has."""
    high = ptr + chunk.first * (HG * D) + h // (HS // HG) * D
    low = low_ptr + chunk.first * (HG * D) + h // (HS // HG) * D
    return KeyGates(high, low, chunk.count)


@triton.jit
def load_gates(gates, rows, column, of):
    """Gates of the given rows, and their low part (the same if not `EXACT`)."""
    c = column + tl.arange(0, of.BLOCK_K)  # [BK]
    at = rows[:, None] * of.STRIDE + c[None, :]  # [len(rows), BK]
    if of.D % of.BLOCK_K == 0:
        high = tl.load(gates.ptr + at)
        low = high
        if of.EXACT:
            low = tl.load(gates.low_ptr + at)
    else:
        inside = (rows >= 0)[:, None] & (c < of.D)[None, :]
        high = tl.load(gates.ptr + at, mask=inside, other=0.0)
        low = high
        if of.EXACT:
            low = tl.load(gates.low_ptr + at, mask=inside, other=0.0)
    return high, low  # [len(rows), BK] each


@triton.jit
def chunk_gates(gates, column, of):
    """The gates of a chunk's rows; those past the last repeat it."""
    return load_gates(gates, tl.minimum(tl.arange(0, of.CHUNK), gates.count - 1), column, of)  # [C, BK] each


@triton.jit
def between_rows(high, low, high2, low2, EXACT: tl.constexpr):
    """The difference of gates."""
    exponent = high - high2
    if EXACT:
        exponent += low - low2
    return exponent


@triton.jit
def about_middle(high, low, gates, column, of):
    """The exponents of a chunk's rows about its middle row, and whether that row suffices for the whole chunk."""
    middle = tl.zeros([1], tl.int32) + tl.minimum(of.CHUNK // 2, gates.count - 1)  # [1]
    reference, reference_low = load_gates(gates, middle, column, of)  # [1, BK] each
    exponent = between_rows(high, low, reference, reference_low, of.EXACT)  # [C, BK]
    return exponent, tl.max(tl.abs(exponent)) <= MOST_EXPONENT


@triton.jit
def about_halves(high, low, gates, column, level, of):
    """Factors within blocks of `2^level` rows, of queries and of keys; whether the middle row suffices for all pairs of a block, and which
    pairs are in the same block."""
    r = tl.arange(0, of.CHUNK)  # [C]
    middle = tl.minimum((r >> level << level) + (1 << level >> 1), gates.count - 1)  # [C], where the second half of a row's block starts
    reference, reference_low = load_gates(gates, middle, column, of)  # [C, BK] each
    exponent = between_rows(high, low, reference, reference_low, of.EXACT)  # [C, BK]
    whole = tl.max(tl.abs(exponent)) <= MOST_EXPONENT  # []
    # The second half reads the first; all other rows get the factor zero.
    second = ((r >> (level - 1)) & 1)[:, None] == 1  # [C, 1]
    rows = tl.exp2(tl.where(second | whole, exponent, float("-inf")))  # [C, BK]
    columns = tl.exp2(tl.where(second & (whole == 0), float("-inf"), -exponent))  # [C, BK]
    return rows, columns, whole, (r >> level)[:, None] == (r >> level)[None, :]  # [C, BK], [C, BK], [], [C, C]


@triton.jit
def scaled(x, factors, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """A tile times factors, as an operand of products."""
    return operand_of(x.to(tl.float32) * factors, OPERAND, PRECISION)  # [C, BK]


@triton.jit
def edge_gates(gates, column, of):
    """The gates of a chunk's middle and last row, each with its low part."""
    one = tl.zeros([1], tl.int32)  # [1]
    middle, middle_low = load_gates(gates, one + tl.minimum(of.CHUNK // 2, gates.count - 1), column, of)  # [1, BK] each
    last, last_low = load_gates(gates, one + (gates.count - 1), column, of)  # [1, BK] each
    return middle, middle_low, last, last_low


@triton.jit
def is_usual(exponent, middle):
    """True if the middle row suffices for the whole chunk: no factor about it, nor that of the incoming state, is out of range."""
    return (tl.max(tl.abs(exponent)) <= MOST_EXPONENT) & (tl.min(middle) >= LEAST_MIDDLE)


@triton.jit
def scores_by_halves(a, kk, q, k, high, low, gates, column, of, KK: tl.constexpr, PRECISION: tl.constexpr):
    """`add_key_scores` for arbitrary gates."""
    operand: tl.constexpr = tl.bfloat16 if q.dtype == tl.bfloat16 else tl.float32
    level = gates.count * 0 + (of.CHUNK.bit_length() - 1)  # a tensor, as the loop changes it
    # From the whole chunk down to pairs of rows; a level at which the middle row suffices is the last.
    while level > 0:
        rows, columns, whole, together = about_halves(high, low, gates, column, level, of)  # [C, BK], [C, BK], [], [C, C]
        keys = tl.trans(scaled(k, columns, operand, PRECISION))  # [BK, C]
        # Products of rows in different blocks belong to a higher level and are left out.
        a += tl.where(together, tl.dot(scaled(q, rows, operand, PRECISION), keys, input_precision=PRECISION), 0.0)  # [C, C]
        if KK:
            kk += tl.where(together, tl.dot(scaled(k, rows, operand, PRECISION), keys, input_precision=PRECISION), 0.0)  # [C, C]
        level = tl.where(whole, 0, level - 1)
    return a, kk


@triton.jit
def add_key_scores(a, kk, q, k, gates, column, of, KK: tl.constexpr, PRECISION: tl.constexpr):
    """Adds to `a` the scores of a slice of channels, and with `KK` to `kk` those of keys with keys. Valid only below the diagonal."""
    operand: tl.constexpr = tl.bfloat16 if q.dtype == tl.bfloat16 else tl.float32
    high, low = chunk_gates(gates, column, of)  # [C, BK] each
    exponent, whole = about_middle(high, low, gates, column, of)  # [C, BK], []
    # About one middle row for all pairs, or by halves if a factor would be too large.
    if whole:
        rows = tl.exp2(exponent)  # [C, BK]
        keys = tl.trans(scaled(k, tl.exp2(-exponent), operand, PRECISION))  # [BK, C]
        a = tl.dot(scaled(q, rows, operand, PRECISION), keys, a, input_precision=PRECISION)  # [C, C]
        if KK:
            kk = tl.dot(scaled(k, rows, operand, PRECISION), keys, kk, input_precision=PRECISION)  # [C, C]
    else:
        a, kk = scores_by_halves(a, kk, q, k, high, low, gates, column, of, KK, PRECISION)
    return a, kk


@triton.jit
def gradients_by_halves(
    dq, dk, rise, q_ptr, q_stride, k_ptr, k_stride, da_ptr, da_stride, gates, column, of, PRECISION: tl.constexpr,
):
    """Adds the contributions to a slice of channels of the scores' gradient `da [i, j]`, which is zero on and above the diagonal and has the
    operands' dtype. `rise` is the gradient with respect to the summed log decays: a pair of tokens contributes to its two rows with opposite
    signs, equal to the last digit."""
    operand: tl.constexpr = q_ptr.dtype.element_ty
    level = gates.count * 0 + (of.CHUNK.bit_length() - 1)  # a tensor, as the loop changes it
    # As `scores_by_halves`.
    while level > 0:
        # Everything is reloaded each time, so that this case does not take registers from the typical one.
        high, low = chunk_gates(gates, column, of)  # [C, BK] each
        rows, columns, whole, together = about_halves(high, low, gates, column, level, of)  # [C, BK], [C, BK], [], [C, C]
        q = load_tile(q_ptr, q_stride, gates.count, column, of.D, of.CHUNK, of.BLOCK_K, False)  # [C, BK]
        k = load_tile(k_ptr, k_stride, gates.count, column, of.D, of.CHUNK, of.BLOCK_K, False)  # [C, BK]
        queries = scaled(q, rows, operand, PRECISION)  # [C, BK]
        keys = scaled(k, columns, operand, PRECISION)  # [C, BK]
        da = load_tile(da_ptr, da_stride, gates.count, 0, of.CHUNK, of.CHUNK, of.CHUNK, False)  # [C, C]
        # dq_i = sum_j da_ij k_j e^{G_i - G_j}; G_i receives q_i dq_i.
        part = tl.dot(tl.where(together, da, 0.0), keys, input_precision=PRECISION)  # [C, BK]
        dq += part * rows
        rise += part * queries.to(tl.float32)
        dat = load_transposed(da_ptr, da_stride, gates.count, of.CHUNK)  # [C, C]
        # dk_j = sum_i da_ij q_i e^{G_i - G_j}; G_j receives -k_j dk_j.
        part = tl.dot(tl.where(together, dat, 0.0), queries, input_precision=PRECISION)  # [C, BK]
        dk += part * columns
        rise -= part * keys.to(tl.float32)
        level = tl.where(whole, 0, level - 1)
    return dq, dk, rise
