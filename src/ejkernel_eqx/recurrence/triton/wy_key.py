"""Triton: as `wy`, with a decay per key channel. Queries and keys are also written with their decays included.

`gates_ptr` holds the summed log decays and, for float32 operands, `low_ptr` their rounding errors.
"""

import triton
import triton.language as tl

from .delta_states import factors_at
from .key_tile import add_key_scores, load_gates
from .tile import chunk_of, last_start, load_tile, load_vector, operand_of, segment_starts, store_tile
from .wy import SCRATCH, unit_inverse


# fmt: off
@triton.jit
def _fold(
    q, k, gates, low, visible, kept, carried, q_in_ptr, k_in_ptr, k_end_ptr, carry_ptr, stride, count, column,
    HS: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, SCALE: tl.constexpr, EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Writes a slice of channels: queries and keys with the decay from the start of the chunk, keys with that to its end, and the decay of
    the whole chunk."""
    high, rest = load_gates(gates, low, tl.minimum(tl.arange(0, CHUNK), count - 1), stride, column, D, BLOCK_K, EXACT)  # [C, BK] each
    end, end_rest = load_gates(gates, low, tl.zeros([CHUNK], tl.int32) + count - 1, stride, column, D, BLOCK_K, EXACT)  # [C, BK], the last row
    before = high  # [C, BK]
    after = end - high  # [C, BK]
    if EXACT:
        before += rest
        after += end_rest - rest
    before = tl.exp2(before) * visible[:, None]  # [C, BK]
    after = tl.exp2(after) * kept[:, None]  # [C, BK]
    operand: tl.constexpr = q.dtype
    q = operand_of(q.to(tl.float32) * before * SCALE, operand, PRECISION)  # [C, BK]
    k = k.to(tl.float32)  # [C, BK]
    store_tile(q_in_ptr, q, HS * D, count, column, D, CHUNK, BLOCK_K)
    store_tile(k_in_ptr, operand_of(k * before, operand, PRECISION), HS * D, count, column, D, CHUNK, BLOCK_K)
    store_tile(k_end_ptr, operand_of(k * after, operand, PRECISION), HS * D, count, column, D, CHUNK, BLOCK_K)
    d = column + tl.arange(0, BLOCK_K)  # [BK]
    last = tl.load(gates + (count - 1) * stride + d, mask=d < D, other=0.0)  # [BK]
    if EXACT:
        last += tl.load(low + (count - 1) * stride + d, mask=d < D, other=0.0)
    tl.store(carry_ptr + d, tl.exp2(last) * carried, mask=d < D)


@triton.jit
def delta_key_scores_kernel(
    q_ptr, k_ptr, gates_ptr, low_ptr, beta_ptr, starts_ptr, chunks_ptr, T,
    scores_ptr, inverse_ptr, factors_ptr, q_in_ptr, k_in_ptr, k_end_ptr, carry_ptr, scratch_ptr,
    HS: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HG: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BETA: tl.constexpr, SEGMENTS: tl.constexpr, TABLE: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr,
    SCALE: tl.constexpr, PRECISION: tl.constexpr, SOLVE: tl.constexpr, SOLVING: tl.constexpr,
):
    """For one chunk and state head: the results of `delta_scores_kernel` (only with `SOLVING`; the factors are without decays), the operands
    with their decays included, over tokens and state heads, and the decay of the chunk `[chunks, HS, D]`."""
    # A program: a chunk, a state head (fastest).
    index = tl.program_id(0)
    h = index % HS
    row, count, _ = chunk_of(index // HS, chunks_ptr, T, CHUNK, TABLE)
    if count > 0:
        r = tl.arange(0, CHUNK)  # [C]
        below = r[:, None] > r[None, :]  # [C, C]
        visible = tl.full([CHUNK], 1.0, tl.float32)  # [C], 1 where the incoming state is seen
        kept = visible  # [C], 1 where the outgoing state holds the token
        carried = 1.0  # [], 1 if it holds the incoming state
        if SEGMENTS:
            starts = segment_starts(starts_ptr, row, count, row // T, T, CHUNK)  # [C]
            below = below & (r[None, :] >= starts[:, None])  # [C, C]
            last = last_start(starts_ptr, row, count, row // T, T)
            visible = tl.where(starts < 0, 1.0, 0.0)  # [C]
            kept = tl.where(r >= last, 1.0, 0.0)  # [C]
            carried = tl.where(last < 0, 1.0, 0.0)
        gates = gates_ptr + row * (HG * D) + h // (HS // HG) * D
        low = low_ptr + row * (HG * D) + h // (HS // HG) * D
        scores = tl.zeros([CHUNK, CHUNK], tl.float32)  # [C, C]
        lower = tl.zeros([CHUNK, CHUNK], tl.float32)  # [C, C]
        own = tl.zeros([CHUNK], tl.float32)  # [C]
        wide = (row * HS + h) * D
        # Sums over slices of channels, as each channel has its own decays: q_i k_j and k_i k_j below the diagonal, q_i k_i on it.
        for column in tl.range(0, D, BLOCK_K):
            q = load_tile(q_ptr + row * (HQ * D) + h // (HS // HQ) * D, HQ * D, count, column, D, CHUNK, BLOCK_K, EVEN)  # [C, BK]
            k = load_tile(k_ptr + row * (HK * D) + h // (HS // HK) * D, HK * D, count, column, D, CHUNK, BLOCK_K, EVEN)  # [C, BK]
            _fold(q, k, gates, low, visible, kept, carried, q_in_ptr + wide, k_in_ptr + wide, k_end_ptr + wide,
                  carry_ptr + index.to(tl.int64) * D, HG * D, count, column, HS, D, CHUNK, BLOCK_K, SCALE, EXACT, PRECISION)
            if SOLVING:
                own += tl.sum(q.to(tl.float32) * k.to(tl.float32), axis=1)
                scores, lower = add_key_scores(  # [C, C] each
                    scores, lower, q, k, gates, low, HG * D, count, column, D, CHUNK, BLOCK_K, EXACT, True, PRECISION)
        # The products are undefined on and above the diagonal: corrected here, before L is inverted.
        if SOLVING:
            beta = tl.where(r < count, 1.0, 0.0)  # [C]
            if BETA:
                beta = load_vector(beta_ptr + row * HB + h // (HS // HB), HB, count, CHUNK, EVEN)  # [C]
            place = (row * HS + h) * CHUNK
            scores = tl.where(below, scores, 0.0)  # [C, C]
            scores = tl.where(r[:, None] == r[None, :], own[:, None], scores) * SCALE  # [C, C]
            store_tile(scores_ptr + place, operand_of(scores, k_ptr.dtype.element_ty, PRECISION), HS * CHUNK, count, 0, CHUNK, CHUNK, CHUNK)
            lower = tl.where(below, lower * beta[:, None], 0.0)  # [C, C]
            inverse = unit_inverse(lower, scratch_ptr + index.to(tl.int64) * (CHUNK * SCRATCH), CHUNK, SOLVE)  # [C, C]
            inverse = operand_of(inverse, k_ptr.dtype.element_ty, PRECISION)  # [C, C]
            store_tile(inverse_ptr + place, inverse, HS * CHUNK, count, 0, CHUNK, CHUNK, CHUNK)
            factors = factors_at(factors_ptr, row, h, T, HS) + r  # [C]
            tl.store(factors, visible, mask=r < count)
            tl.store(factors + T, kept, mask=r < count)
            tl.store(factors + T * 2, beta, mask=r < count)
