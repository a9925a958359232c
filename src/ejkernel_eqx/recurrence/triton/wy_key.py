"""`wy` with a decay per key channel. Queries and keys are also written with their decays included.

`gates_ptr` holds the summed log decays and, for float32 operands, `low_ptr` their rounding errors.
"""

from collections import namedtuple

import triton
import triton.language as tl

from .decays import Decay, NONE, strengths_of
from .delta_states import factors_at, store_factors
from .key_tile import add_key_scores, Channels, chunk_gates, gates_of, load_gates
from .operands import load_head, Operand, operand_of
from .places import chunk_of, last_start, pairs_below, segment_starts
from .tile import store_tile
from .wy import SCRATCH, unit_inverse

Folded = namedtuple("Folded", "q_ptr k_ptr k_end_ptr carry_ptr")
"""Destinations of a chunk's operands with their decays, for one head, and of the decay of the chunk."""


Reach = namedtuple("Reach", "visible kept carried")
"""1 where tokens see the incoming state `[C]`, where the outgoing state holds them `[C]`, and if that holds the incoming one `[]`; else 0."""


# fmt: off
@triton.jit
def _fold(q, k, gates, reach, to, column, HS: tl.constexpr, of, SCALE: tl.constexpr, PRECISION: tl.constexpr):
    """Writes a slice of channels: queries and keys with the decay from the start of the chunk, keys with that to its end, and the decay of
    the whole chunk."""
    high, rest = chunk_gates(gates, column, of)  # [C, BK] each
    end, end_rest = load_gates(gates, tl.zeros([of.CHUNK], tl.int32) + gates.count - 1, column, of)  # [C, BK], the last row
    before = high  # [C, BK]
    after = end - high  # [C, BK]
    if of.EXACT:
        before += rest
        after += end_rest - rest
    # Decays become factors, zero for what does not pass.
    before = tl.exp2(before) * reach.visible[:, None]  # [C, BK]
    after = tl.exp2(after) * reach.kept[:, None]  # [C, BK]
    operand: tl.constexpr = q.dtype
    q = operand_of(q.to(tl.float32) * before * SCALE, operand, PRECISION)  # [C, BK]
    k = k.to(tl.float32)  # [C, BK]
    store_tile(to.q_ptr, q, HS * of.D, gates.count, column, of.D, of.CHUNK, of.BLOCK_K)
    store_tile(to.k_ptr, operand_of(k * before, operand, PRECISION), HS * of.D, gates.count, column, of.D, of.CHUNK, of.BLOCK_K)
    store_tile(to.k_end_ptr, operand_of(k * after, operand, PRECISION), HS * of.D, gates.count, column, of.D, of.CHUNK, of.BLOCK_K)
    # The decay of the whole chunk, one number per channel.
    d = column + tl.arange(0, of.BLOCK_K)  # [BK]
    last = tl.load(gates.ptr + (gates.count - 1) * of.STRIDE + d, mask=d < of.D, other=0.0)  # [BK]
    if of.EXACT:
        last += tl.load(gates.low_ptr + (gates.count - 1) * of.STRIDE + d, mask=d < of.D, other=0.0)
    tl.store(to.carry_ptr + d, tl.exp2(last) * reach.carried, mask=d < of.D)


@triton.jit
def delta_key_scores_kernel(
    q_ptr, k_ptr, gates_ptr, low_ptr, beta_ptr, starts_ptr, chunks_ptr, T,
    scores_ptr, inverse_ptr, factors_ptr, q_in_ptr, k_in_ptr, k_end_ptr, carry_ptr, scratch_ptr,
    HS: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HG: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BETA: tl.constexpr, SEGMENTS: tl.constexpr, TABLE: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr,
    SCALE: tl.constexpr, PRECISION: tl.constexpr, SOLVE: tl.constexpr, SOLVING: tl.constexpr,
):
    """Solves one chunk for a state head: the results of `delta_scores_kernel` (only with `SOLVING`; the factors are without decays), the operands
    with their decays included, over tokens and state heads, and the decay of the chunk `[chunks, HS, D]`."""
    # A program: a chunk, a state head (fastest).
    index = tl.program_id(0)
    h = index % HS
    kind: tl.constexpr = Decay(HS, 1, CHUNK, NONE, EVEN, EXACT)
    channels: tl.constexpr = Channels(HG * D, D, CHUNK, BLOCK_K, EXACT)
    chunk = chunk_of(index // HS, chunks_ptr, T, CHUNK, TABLE)
    row, count = chunk.first, chunk.count
    if count > 0:
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
        # Scores below the diagonal, the matrix L, and the scores on the diagonal.
        scores = tl.zeros([CHUNK, CHUNK], tl.float32)  # [C, C]
        lower = tl.zeros([CHUNK, CHUNK], tl.float32)  # [C, C]
        diagonal = tl.zeros([CHUNK], tl.float32)  # [C]
        wide = (row * HS + h) * D
        to = Folded(q_in_ptr + wide, k_in_ptr + wide, k_end_ptr + wide, carry_ptr + index.to(tl.int64) * D)
        # Sums over slices of channels, as each channel has its own decays: q_i k_j and k_i k_j below the diagonal, q_i k_i on it.
        for column in tl.range(0, D, BLOCK_K):
            q = load_head(q_ptr, chunk, h, column, Operand(HS, HQ, D, CHUNK, BLOCK_K, EVEN))  # [C, BK]
            k = load_head(k_ptr, chunk, h, column, Operand(HS, HK, D, CHUNK, BLOCK_K, EVEN))  # [C, BK]
            _fold(q, k, gates, Reach(visible, kept, carried), to, column, HS, channels, SCALE, PRECISION)
            if SOLVING:
                diagonal += tl.sum(q.to(tl.float32) * k.to(tl.float32), axis=1)
                scores, lower = add_key_scores(scores, lower, q, k, gates, column, channels, True, PRECISION)  # [C, C] each
        # The products are undefined on and above the diagonal: corrected here, before L is inverted.
        if SOLVING:
            beta = tl.where(r < count, 1.0, 0.0)  # [C]
            if BETA:
                beta = strengths_of(beta_ptr, chunk, h, HB, kind)  # [C]
            place = (row * HS + h) * CHUNK
            scores = tl.where(below, scores, 0.0)  # [C, C]
            scores = tl.where(r[:, None] == r[None, :], diagonal[:, None], scores) * SCALE  # [C, C]
            store_tile(scores_ptr + place, operand_of(scores, k_ptr.dtype.element_ty, PRECISION), HS * CHUNK, count, 0, CHUNK, CHUNK, CHUNK)
            lower = tl.where(below, lower * beta[:, None], 0.0)  # [C, C]
            inverse = unit_inverse(lower, scratch_ptr + index.to(tl.int64) * (CHUNK * SCRATCH), CHUNK, SOLVE)  # [C, C]
            inverse = operand_of(inverse, k_ptr.dtype.element_ty, PRECISION)  # [C, C]
            store_tile(inverse_ptr + place, inverse, HS * CHUNK, count, 0, CHUNK, CHUNK, CHUNK)
            store_factors(factors_at(factors_ptr, row, h, T, HS) + r, visible, kept, beta, T, r < count)
