"""Decay per key channel within a chunk: scores `sum_d q_id k_jd 2^(G_id - G_jd)` and their gradients, by matrix products.

`2^(G_i - G_j)` is split into `2^(G_i - G_m) 2^(G_m - G_j)` about a row `m`, with one factor for the queries and the other for the keys.
If no factor exceeds `2^80`, one middle row serves the whole chunk. Otherwise `m` is the first row of the chunk's second half, queries are
taken from the second half and keys from the first, so that both exponents are negative, and each half is split in the same way, down to
pairs of rows. So any decay is exact, and no pair of rows is computed alone.
"""

import triton
import triton.language as tl

from .tile import load_tile, operand_of

MOST_EXPONENT = tl.constexpr(80.0)  # the largest exponent of a factor about a row, in either direction
LEAST_MIDDLE = tl.constexpr(-100.0)  # log2 of the decay of the incoming state at the middle row


# fmt: off
@triton.jit
def load_gates(ptr, low_ptr, rows, stride, column, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, EXACT: tl.constexpr):
    """Summed log decays of the given rows, `[len(rows), COLUMNS]`, and their low part (the same if not `EXACT`)."""
    c = column + tl.arange(0, COLUMNS)  # [COLUMNS]
    at = rows[:, None] * stride + c[None, :]  # [len(rows), COLUMNS]
    if WIDTH % COLUMNS == 0:
        high = tl.load(ptr + at)
        low = high
        if EXACT:
            low = tl.load(low_ptr + at)
    else:
        inside = (rows >= 0)[:, None] & (c < WIDTH)[None, :]
        high = tl.load(ptr + at, mask=inside, other=0.0)
        low = high
        if EXACT:
            low = tl.load(low_ptr + at, mask=inside, other=0.0)
    return high, low


@triton.jit
def between_rows(high, low, high2, low2, EXACT: tl.constexpr):
    """The difference of gates."""
    exponent = high - high2
    if EXACT:
        exponent += low - low2
    return exponent


@triton.jit
def _about_middle(high, low, g_ptr, low_ptr, stride, count, column, D: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
                  EXACT: tl.constexpr):
    """The exponents of a chunk's rows about its middle row, and whether that row suffices for the whole chunk."""
    middle = tl.zeros([1], tl.int32) + tl.minimum(CHUNK // 2, count - 1)  # [1]
    reference, reference_low = load_gates(g_ptr, low_ptr, middle, stride, column, D, BLOCK_K, EXACT)  # [1, BK] each
    exponent = between_rows(high, low, reference, reference_low, EXACT)  # [C, BK]
    return exponent, tl.max(tl.abs(exponent)) <= MOST_EXPONENT


@triton.jit
def _about_halves(high, low, g_ptr, low_ptr, stride, count, column, level, D: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
                  EXACT: tl.constexpr):
    """For blocks of `2^level` rows: the factors of queries and keys, whether the middle row suffices for all pairs of a block, and which
    pairs are in the same block."""
    r = tl.arange(0, CHUNK)  # [C]
    middle = tl.minimum((r >> level << level) + (1 << level >> 1), count - 1)  # [C], where the second half of a row's block starts
    reference, reference_low = load_gates(g_ptr, low_ptr, middle, stride, column, D, BLOCK_K, EXACT)  # [C, BK] each
    exponent = between_rows(high, low, reference, reference_low, EXACT)  # [C, BK]
    whole = tl.max(tl.abs(exponent)) <= MOST_EXPONENT  # []
    # The second half reads the first; all other rows get the factor zero.
    second = ((r >> (level - 1)) & 1)[:, None] == 1  # [C, 1]
    rows = tl.exp2(tl.where(second | whole, exponent, float("-inf")))  # [C, BK]
    columns = tl.exp2(tl.where(second & (whole == 0), float("-inf"), -exponent))  # [C, BK]
    return rows, columns, whole, (r >> level)[:, None] == (r >> level)[None, :]  # [C, BK], [C, BK], [], [C, C]


@triton.jit
def _scale(x, factors, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    return operand_of(x.to(tl.float32) * factors, OPERAND, PRECISION)  # [C, BK]


@triton.jit
def edge_gates(g_ptr, low_ptr, stride, count, column, D: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, EXACT: tl.constexpr):
    """The gates of a chunk's middle and last row, `[1, BLOCK_K]` each, with their low parts."""
    one = tl.zeros([1], tl.int32)  # [1]
    middle, middle_low = load_gates(g_ptr, low_ptr, one + tl.minimum(CHUNK // 2, count - 1), stride, column, D, BLOCK_K, EXACT)  # [1, BK]
    last, last_low = load_gates(g_ptr, low_ptr, one + (count - 1), stride, column, D, BLOCK_K, EXACT)  # [1, BK]
    return middle, middle_low, last, last_low


@triton.jit
def is_usual(exponent, middle):
    """Whether the middle row suffices for the whole chunk: no factor about it, nor that of the incoming state, is out of range."""
    return (tl.max(tl.abs(exponent)) <= MOST_EXPONENT) & (tl.min(middle) >= LEAST_MIDDLE)


@triton.jit
def add_scores_by_halves(
    a, kk, q, k, high, low, g_ptr, low_ptr, stride, count, column,
    D: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, EXACT: tl.constexpr, KK: tl.constexpr, PRECISION: tl.constexpr,
):
    """`add_key_scores` for arbitrary gates."""
    operand: tl.constexpr = tl.bfloat16 if q.dtype == tl.bfloat16 else tl.float32
    level = count * 0 + (CHUNK.bit_length() - 1)  # a tensor, as the loop changes it
    # From the whole chunk down to pairs of rows; a level at which the middle row suffices is the last.
    while level > 0:
        rows, columns, whole, together = _about_halves(  # [C, BK], [C, BK], [], [C, C]
            high, low, g_ptr, low_ptr, stride, count, column, level, D, CHUNK, BLOCK_K, EXACT)
        keys = tl.trans(_scale(k, columns, operand, PRECISION))  # [BK, C]
        # Products of rows in different blocks belong to a higher level and are left out.
        a += tl.where(together, tl.dot(_scale(q, rows, operand, PRECISION), keys, input_precision=PRECISION), 0.0)  # [C, C]
        if KK:
            kk += tl.where(together, tl.dot(_scale(k, rows, operand, PRECISION), keys, input_precision=PRECISION), 0.0)  # [C, C]
        level = tl.where(whole, 0, level - 1)
    return a, kk


@triton.jit
def add_key_scores(
    a, kk, q, k, g_ptr, low_ptr, stride, count, column,
    D: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, EXACT: tl.constexpr, KK: tl.constexpr, PRECISION: tl.constexpr,
):
    """Adds to `a` the scores of a slice of channels, and with `KK` to `kk` those of keys with keys. Valid only below the
    diagonal. `g_ptr`, `low_ptr`: the chunk's first row; `count > 0`."""
    operand: tl.constexpr = tl.bfloat16 if q.dtype == tl.bfloat16 else tl.float32
    last = tl.minimum(tl.arange(0, CHUNK), count - 1)  # [C]; rows past the chunk's last repeat it
    high, low = load_gates(g_ptr, low_ptr, last, stride, column, D, BLOCK_K, EXACT)  # [C, BK] each
    exponent, whole = _about_middle(high, low, g_ptr, low_ptr, stride, count, column, D, CHUNK, BLOCK_K, EXACT)  # [C, BK], []
    # About one middle row for all pairs, or by halves if a factor would be too large.
    if whole:
        rows = tl.exp2(exponent)  # [C, BK]
        keys = tl.trans(_scale(k, tl.exp2(-exponent), operand, PRECISION))  # [BK, C]
        a = tl.dot(_scale(q, rows, operand, PRECISION), keys, a, input_precision=PRECISION)  # [C, C]
        if KK:
            kk = tl.dot(_scale(k, rows, operand, PRECISION), keys, kk, input_precision=PRECISION)  # [C, C]
    else:
        a, kk = add_scores_by_halves(a, kk, q, k, high, low, g_ptr, low_ptr, stride, count, column, D, CHUNK, BLOCK_K, EXACT, KK, PRECISION)
    return a, kk


@triton.jit
def load_transposed(ptr, stride, count, CHUNK: tl.constexpr):
    """`[j, i]` of a matrix `[count, CHUNK]`, zero past its rows."""
    r = tl.arange(0, CHUNK)  # [C]
    return tl.load(ptr + (r[None, :] * stride + r[:, None]), mask=(r < count)[None, :] & (r >= 0)[:, None], other=0.0)  # [C, C]


@triton.jit
def load_both(ptr, stride, count, CHUNK: tl.constexpr):
    """A matrix `[count, CHUNK]` and its transpose, zero past its rows."""
    return load_tile(ptr, stride, count, 0, CHUNK, CHUNK, CHUNK, False), load_transposed(ptr, stride, count, CHUNK)  # [C, C] each


@triton.jit
def add_gradients_by_halves(
    dq, dk, rise, q_ptr, q_stride, k_ptr, k_stride, g_ptr, low_ptr, g_stride, da_ptr, da_stride, count, column,
    D: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):
    """Adds the contributions to a slice of channels of the scores' gradient `da [i, j]`, which is zero on and above the diagonal and has the
    operands' dtype. All pointers are to the chunk's first row; `count > 0`. `rise` is the gradient with respect to the summed log decays:
    a pair of tokens contributes to its two rows with opposite signs, equal to the last digit."""
    operand: tl.constexpr = q_ptr.dtype.element_ty
    last = tl.minimum(tl.arange(0, CHUNK), count - 1)  # [C]
    level = count * 0 + (CHUNK.bit_length() - 1)  # a tensor, as the loop changes it
    # As `add_scores_by_halves`.
    while level > 0:
        # Everything is reloaded each time, so that this case does not take registers from the typical one.
        high, low = load_gates(g_ptr, low_ptr, last, g_stride, column, D, BLOCK_K, EXACT)  # [C, BK] each
        rows, columns, whole, together = _about_halves(  # [C, BK], [C, BK], [], [C, C]
            high, low, g_ptr, low_ptr, g_stride, count, column, level, D, CHUNK, BLOCK_K, EXACT)
        q = load_tile(q_ptr, q_stride, count, column, D, CHUNK, BLOCK_K, False)  # [C, BK]
        k = load_tile(k_ptr, k_stride, count, column, D, CHUNK, BLOCK_K, False)  # [C, BK]
        queries = _scale(q, rows, operand, PRECISION)  # [C, BK]
        keys = _scale(k, columns, operand, PRECISION)  # [C, BK]
        da = load_tile(da_ptr, da_stride, count, 0, CHUNK, CHUNK, CHUNK, False)  # [C, C]
        # dq_i = sum_j da_ij k_j e^{G_i - G_j}; G_i receives q_i dq_i.
        part = tl.dot(tl.where(together, da, 0.0), keys, input_precision=PRECISION)  # [C, BK]
        dq += part * rows
        rise += part * queries.to(tl.float32)
        dat = load_transposed(da_ptr, da_stride, count, CHUNK)  # [C, C]
        # dk_j = sum_i da_ij q_i e^{G_i - G_j}; G_j receives -k_j dk_j.
        part = tl.dot(tl.where(together, dat, 0.0), queries, input_precision=PRECISION)  # [C, BK]
        dk += part * columns
        rise -= part * keys.to(tl.float32)
        level = tl.where(whole, 0, level - 1)
    return dq, dk, rise
