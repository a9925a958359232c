"""Transitions of rank one: scores of a chunk, the inverse that solves it, and operands that include their decays.

With the state S before a chunk, what the vectors `a` read, U, solves (I - A) U = L V + (a e^E) S, where E are the gates before a token's own.
"""

from collections import namedtuple

import triton
import triton.language as tl

from .key_tile import between_rows, Channels, chunk_gates, gates_of, load_gates, MOST_EXPONENT, scaled
from .operands import load_head, Operand, operand_of, store_head
from .places import chunk_of, last_start, pairs_below, segment_starts
from .tile import store_tile
from .wy import SCRATCH, unit_inverse

Four = namedtuple("Four", "q a k b")
"""A slice of channels of a chunk's vectors `[C, BK]`: `q` and `a` read what `k` and `b` write."""


Scores = namedtuple("Scores", "qk qb ak ab")
"""What each reader of a token i has to do with each writer of a token j, `[C, C]`."""


Factors = namedtuple("Factors", "q a columns")
"""Factors `[C, BK]` of queries, of the vectors `a`, and of what is written, whose products are the decays between two tokens."""


# fmt: off
@triton.jit
def factors_about(gates, column, level, of):
    """The `Factors` within blocks of `2^level` rows; whether one row suffices for all pairs of a block, and which pairs are in the same block.

    As `key_tile.about_halves`, but about the last row of a block's first half: the vector `a` of the next row has the gates of that row."""
    r = tl.arange(0, of.CHUNK)  # [C]
    start = r >> level << level  # [C], where a row's block starts
    high, low = chunk_gates(gates, column, of)  # [C, BK] each
    reference, reference_low = load_gates(gates, tl.minimum(start + (1 << level >> 1), gates.count) - 1, column, of)  # [C, BK] each
    # The first row of a block reads nothing in it.
    early, early_low = load_gates(gates, tl.minimum(tl.maximum(r - 1, start), gates.count - 1), column, of)  # [C, BK] each
    exponent = between_rows(high, low, reference, reference_low, of.EXACT)  # [C, BK]
    early = between_rows(early, early_low, reference, reference_low, of.EXACT)  # [C, BK]
    whole = tl.max(tl.abs(exponent)) <= MOST_EXPONENT  # []
    # The second half reads the first; all other rows get the factor zero.
    second = ((r >> (level - 1)) & 1)[:, None] == 1  # [C, 1]
    queries = tl.exp2(tl.where(second | whole, exponent, float("-inf")))  # [C, BK]
    early = tl.exp2(tl.where(second | whole, early, float("-inf")))  # [C, BK]
    columns = tl.exp2(tl.where(second & (whole == 0), float("-inf"), -exponent))  # [C, BK]
    return Factors(queries, early, columns), whole, (r >> level)[:, None] == (r >> level)[None, :]  # [C, BK] each, [], [C, C]


@triton.jit
def weighed(four, factors, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """The four operands times their factors."""
    k = scaled(four.k, factors.columns, OPERAND, PRECISION)  # [C, BK]
    b = scaled(four.b, factors.columns, OPERAND, PRECISION)  # [C, BK]
    return Four(scaled(four.q, factors.q, OPERAND, PRECISION), scaled(four.a, factors.a, OPERAND, PRECISION), k, b)


@triton.jit
def _add_scores(scores, four, gates, column, of, PRECISION: tl.constexpr):
    """Adds the scores of a slice of channels. Valid only below the diagonal."""
    operand: tl.constexpr = tl.bfloat16 if four.q.dtype == tl.bfloat16 else tl.float32
    qk, qb, ak, ab = scores
    level = gates.count * 0 + (of.CHUNK.bit_length() - 1)  # a tensor, as the loop changes it
    factors, whole, together = factors_about(gates, column, level, of)
    # About one row for all pairs, or by halves if a factor would be too large.
    if whole:
        q, a, k, b = weighed(four, factors, operand, PRECISION)
        qk = tl.dot(q, tl.trans(k), qk, input_precision=PRECISION)  # [C, C]
        qb = tl.dot(q, tl.trans(b), qb, input_precision=PRECISION)  # [C, C]
        ak = tl.dot(a, tl.trans(k), ak, input_precision=PRECISION)  # [C, C]
        ab = tl.dot(a, tl.trans(b), ab, input_precision=PRECISION)  # [C, C]
    else:
        while level > 0:
            factors, whole, together = factors_about(gates, column, level, of)
            q, a, k, b = weighed(four, factors, operand, PRECISION)
            qk += tl.where(together, tl.dot(q, tl.trans(k), input_precision=PRECISION), 0.0)  # [C, C]
            qb += tl.where(together, tl.dot(q, tl.trans(b), input_precision=PRECISION), 0.0)  # [C, C]
            ak += tl.where(together, tl.dot(a, tl.trans(k), input_precision=PRECISION), 0.0)  # [C, C]
            ab += tl.where(together, tl.dot(a, tl.trans(b), input_precision=PRECISION), 0.0)  # [C, C]
            level = tl.where(whole, 0, level - 1)
    return Scores(qk, qb, ak, ab)


@triton.jit
def gates_before(gates, column, of):
    """The log2 decays from the start of the chunk to the token before each."""
    r = tl.arange(0, of.CHUNK)  # [C]
    before, rest = load_gates(gates, tl.minimum(tl.maximum(r - 1, 0), gates.count - 1), column, of)  # [C, BK] each
    if of.EXACT:
        before += rest
    return tl.where((r == 0)[:, None], 0.0, before)  # [C, BK]


@triton.jit
def rank_one_scores_kernel(
    q_ptr, k_ptr, a_ptr, b_ptr, gates_ptr, low_ptr, solved_ptr, starts_ptr, chunks_ptr, T,
    qk_ptr, qb_ptr, mixed_ptr, inverse_ptr, q_in_ptr, a_in_ptr, k_end_ptr, b_end_ptr, carry_ptr, scratch_ptr,
    HS: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HA: tl.constexpr, HW: tl.constexpr, HG: tl.constexpr, D: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, SEGMENTS: tl.constexpr, TABLE: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr,
    SCALE: tl.constexpr, PRECISION: tl.constexpr, SOLVE: tl.constexpr, SOLVING: tl.constexpr,
):
    """Solves one chunk for a state head. With `SOLVING` the scores `qk`, `qb`, the inverse of `I - A`, and `mixed`, its product with L; else that
    inverse is given, `solved`. And over tokens and state heads: `q` from the start of the chunk, the product of the inverse and `a` (`a_in`), `k` and
    `b` to the end; and the decay of the chunk `[chunks, HS, D]`."""
    # A program: a chunk, a state head (fastest).
    index = tl.program_id(0)
    h = index % HS
    channels: tl.constexpr = Channels(HG * D, D, CHUNK, BLOCK_K, EXACT)
    square: tl.constexpr = Operand(HS, HS, CHUNK, CHUNK, CHUNK, EVEN)
    wide: tl.constexpr = Operand(HS, HS, D, CHUNK, BLOCK_K, EVEN)
    operand: tl.constexpr = q_ptr.dtype.element_ty
    chunk = chunk_of(index // HS, chunks_ptr, T, CHUNK, TABLE)
    if chunk.count > 0:
        r = tl.arange(0, CHUNK)  # [C]
        below = pairs_below(starts_ptr, chunk, T, CHUNK, SEGMENTS)  # [C, C]
        visible = tl.full([CHUNK], 1.0, tl.float32)  # [C], 1 where the incoming state is seen
        kept = visible  # [C], 1 where the outgoing state holds the token
        carried = 1.0  # [], 1 if it holds the incoming state
        if SEGMENTS:
            last = last_start(starts_ptr, chunk, T)
            visible = tl.where(segment_starts(starts_ptr, chunk, T, CHUNK) < 0, 1.0, 0.0)  # [C]
            kept = tl.where(r >= last, 1.0, 0.0)  # [C]
            carried = tl.where(last < 0, 1.0, 0.0)
        gates = gates_of(gates_ptr, low_ptr, chunk, h, HS, HG, D)
        zeros = tl.zeros([CHUNK, CHUNK], tl.float32)  # [C, C]
        scores = Scores(zeros, zeros, zeros, zeros)
        own_k = tl.zeros([CHUNK], tl.float32)  # [C], the diagonal of qk
        own_b = tl.zeros([CHUNK], tl.float32)  # [C], that of qb
        # Sums over slices of channels, as each channel has its own decays; each slice also writes its operands.
        for column in tl.range(0, D, BLOCK_K):
            q = load_head(q_ptr, chunk, h, column, Operand(HS, HQ, D, CHUNK, BLOCK_K, EVEN))  # [C, BK]
            k = load_head(k_ptr, chunk, h, column, Operand(HS, HK, D, CHUNK, BLOCK_K, EVEN))  # [C, BK]
            b = load_head(b_ptr, chunk, h, column, Operand(HS, HW, D, CHUNK, BLOCK_K, EVEN))  # [C, BK]
            high, low = chunk_gates(gates, column, channels)  # [C, BK] each
            end, end_low = load_gates(gates, tl.zeros([1], tl.int32) + gates.count - 1, column, channels)  # [1, BK] each
            after = tl.exp2(between_rows(end, end_low, high, low, EXACT)) * kept[:, None]  # [C, BK]
            store_head(k_end_ptr, scaled(k, after, operand, PRECISION), chunk, h, column, wide)
            store_head(b_end_ptr, scaled(b, after, operand, PRECISION), chunk, h, column, wide)
            if EXACT:
                high += low
                end += end_low
            before = tl.exp2(high) * visible[:, None] * SCALE  # [C, BK]
            store_head(q_in_ptr, scaled(q, before, operand, PRECISION), chunk, h, column, wide)
            store_tile(carry_ptr + index.to(tl.int64) * D, tl.exp2(end) * carried, 0, 1, column, D, 1, BLOCK_K)
            if SOLVING:
                a = load_head(a_ptr, chunk, h, column, Operand(HS, HA, D, CHUNK, BLOCK_K, EVEN))  # [C, BK]
                own_k += tl.sum(q.to(tl.float32) * k.to(tl.float32), axis=1)
                own_b += tl.sum(q.to(tl.float32) * b.to(tl.float32), axis=1)
                scores = _add_scores(scores, Four(q, a, k, b), gates, column, channels, PRECISION)
        # The products are undefined on and above the diagonal: corrected here, before the system is solved.
        if SOLVING:
            diagonal = r[:, None] == r[None, :]  # [C, C]
            qk = tl.where(diagonal, own_k[:, None], tl.where(below, scores.qk, 0.0)) * SCALE  # [C, C]
            store_head(qk_ptr, operand_of(qk, operand, PRECISION), chunk, h, 0, square)
            qb = tl.where(diagonal, own_b[:, None], tl.where(below, scores.qb, 0.0)) * SCALE  # [C, C]
            store_head(qb_ptr, operand_of(qb, operand, PRECISION), chunk, h, 0, square)
            scratch = scratch_ptr + index.to(tl.int64) * (CHUNK * SCRATCH)
            inverse = unit_inverse(tl.where(below, -scores.ab, 0.0), scratch, CHUNK, SOLVE)  # [C, C]
            mixed = tl.dot(inverse, tl.where(below, scores.ak, 0.0), input_precision=SOLVE)  # [C, C]
            store_head(mixed_ptr, operand_of(mixed, operand, PRECISION), chunk, h, 0, square)
            inverse = operand_of(inverse, operand, PRECISION)  # [C, C]
            store_head(inverse_ptr, inverse, chunk, h, 0, square)
        else:
            inverse = load_head(solved_ptr, chunk, h, 0, square)  # [C, C]
        for column in tl.range(0, D, BLOCK_K):
            a = load_head(a_ptr, chunk, h, column, Operand(HS, HA, D, CHUNK, BLOCK_K, EVEN))  # [C, BK]
            before = tl.exp2(gates_before(gates, column, channels)) * visible[:, None]  # [C, BK]
            read = tl.dot(inverse, scaled(a, before, operand, PRECISION), input_precision=PRECISION)  # [C, BK]
            store_head(a_in_ptr, operand_of(read, operand, PRECISION), chunk, h, column, wide)
