"""The forward pass of a linear member in one kernel, with the state in registers; used if heads and value channels yield enough programs."""

import triton
import triton.language as tl

from .decays import between, Decay, decays_of, from_start, Gates, NONE, SCALAR, strengths_of
from .operands import load_head, load_skip, Operand, operand_of, store_head
from .places import Chunk, last_start, segment_starts
from .state_tiles import chunks_of_split, entering_state, nth_chunk, state_tile, States, store_leaving


# fmt: off
@triton.jit
def single_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, logs_ptr, beta_ptr, skip_ptr, initial_ptr, starts_ptr, bounds_ptr, edges_ptr, T, TOKENS,
    out_ptr, final_ptr,
    HS: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, HG: tl.constexpr, HB: tl.constexpr, D: tl.constexpr,
    V: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, SCALE: tl.constexpr, DECAY: tl.constexpr,
    BETA: tl.constexpr, SKIP: tl.constexpr, INITIAL: tl.constexpr, SEGMENTS: tl.constexpr, TABLE: tl.constexpr, EVEN: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr, SPLITS: tl.constexpr,
):
    """The outputs and the final state for one split of a sequence, head and tile of value channels (`BLOCK_K >= D`)."""
    sizes: tl.constexpr = States(HS, D, V, BLOCK_K, BLOCK_V, SPLITS)
    kind: tl.constexpr = Decay(HS, HG, CHUNK, DECAY, EVEN, EXACT)
    values: tl.constexpr = Operand(HS, HV, V, CHUNK, BLOCK_V, EVEN)
    at = state_tile(bounds_ptr, T, sizes, CHUNK, TABLE)
    h, v0 = at.h, at.v0
    state = entering_state(edges_ptr, initial_ptr, at, sizes, INITIAL)  # [BK, BV]
    r = tl.arange(0, CHUNK)  # [C]
    if SKIP:
        skip = load_skip(skip_ptr, at.seq, h, v0, HS, V, BLOCK_V)  # [BV]

    # Decays are computed here if they are the same for all chunks.
    fixed: tl.constexpr = DECAY < SCALAR and EVEN and not SEGMENTS
    if fixed:
        high, low, rest, whole = decays_of(  # [C], [C], [C], []
            Gates(g_ptr, logs_ptr, TOKENS), Chunk(at.first, at.seq * 0 + CHUNK, at.seq), h, kind)
        pairs = between(high, low, r[:, None] >= r[None, :], kind) * SCALE  # [C, C]
        enter = from_start(high, low, kind) * SCALE  # [C]
        leave = tl.exp2(rest)  # [C]
        total = tl.exp2(whole + 0.0)  # []

    # Chunk by chunk: O = scale (Q e^G) S + A V, S <- e^{G_C} S + (K e^{G_C - G} b)^T V.
    begin, end = chunks_of_split(at.split, at.length, CHUNK, SPLITS)
    for n in tl.range(begin, end):
        chunk = nth_chunk(at, n, CHUNK)
        q = load_head(q_ptr, chunk, h, 0, Operand(HS, HQ, D, CHUNK, BLOCK_K, EVEN))  # [C, BK]
        k = load_head(k_ptr, chunk, h, 0, Operand(HS, HK, D, CHUNK, BLOCK_K, EVEN))  # [C, BK]
        v = load_head(v_ptr, chunk, h, v0, values)  # [C, BV]
        if not fixed:
            high, low, rest, whole = decays_of(Gates(g_ptr, logs_ptr, TOKENS), chunk, h, kind)  # [C], [C], [C], []
            visible = r[:, None] >= r[None, :]  # [C, C]
            if not EVEN:
                visible = visible & (r < chunk.count)[:, None]  # [C, C]
            enter = from_start(high, low, kind) * SCALE  # [C]
            leave = tl.exp2(rest)  # [C]
            total = tl.exp2(whole + 0.0)  # []
            # Nothing passes from one segment to the next, neither between tokens nor through the state.
            if SEGMENTS:
                starts = segment_starts(starts_ptr, chunk, T, CHUNK)  # [C]
                start = last_start(starts_ptr, chunk, T)  # where the segment that is open at the end of the chunk begins
                visible = visible & (r[None, :] >= starts[:, None])  # [C, C]
                enter = tl.where(starts < 0, enter, 0.0)
                leave = tl.where(r >= start, leave, 0.0)
                total = tl.where(start < 0, total, 0.0)
            pairs = between(high, low, visible, kind) * SCALE  # [C, C]
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * pairs  # [C, C]
        weight = leave  # [C]
        if BETA:
            beta = strengths_of(beta_ptr, chunk, h, HB, kind)  # [C]
            scores *= beta[None, :]
            weight *= beta
        # The outputs: what queries read of the state, then of the chunk's own values.
        read = operand_of(state, q.dtype, PRECISION)  # [BK, BV]
        out = tl.dot(q, read, input_precision=PRECISION)  # [C, BV]
        out *= enter[:, None]
        scores = operand_of(scores, v.dtype, PRECISION)  # [C, C]
        out = tl.dot(scores, v, out, input_precision=PRECISION)  # [C, BV]
        if SKIP:
            out += v.to(tl.float32) * skip[None, :]
        store_head(out_ptr, out, chunk, h, v0, Operand(HS, HS, V, CHUNK, BLOCK_V, EVEN))
        # The state after the chunk.
        if DECAY != NONE or BETA or SEGMENTS:
            v = operand_of(v.to(tl.float32) * weight[:, None], k.dtype, PRECISION)  # [C, BV]
        state = tl.dot(tl.trans(k), v, state * total, input_precision=PRECISION)  # [BK, BV]
    store_leaving(final_ptr, state, at, sizes, SPLITS - 1)
