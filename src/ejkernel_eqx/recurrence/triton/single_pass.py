"""The forward pass of a linear member in one kernel, with the state in registers; used if heads and value channels yield enough programs."""

import triton
import triton.language as tl

from .tile import (
    between,
    chunks_of_split,
    decays_of,
    from_start,
    last_start,
    load_edge,
    load_state,
    load_tile,
    load_vector,
    NONE,
    operand_of,
    SCALAR,
    segment_starts,
    state_tile,
    store_tile,
)


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
    seq, split, h, _d0, v0, first, length, _chunk, own = state_tile(bounds_ptr, T, HS, D, V, CHUNK, BLOCK_K, BLOCK_V, TABLE, SPLITS)
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)  # [BK, BV]
    if SPLITS > 1:
        state = load_edge(edges_ptr, split, seq, h, 0, v0, HS, D, V, BLOCK_K, BLOCK_V, SPLITS)  # [BK, BV]
    elif INITIAL:
        state = load_state(initial_ptr + own, 0, v0, D, V, BLOCK_K, BLOCK_V).to(tl.float32)  # [BK, BV]
    r = tl.arange(0, CHUNK)  # [C]
    c = v0 + tl.arange(0, BLOCK_V)  # [BV]
    if SKIP:
        skip = tl.load(skip_ptr + (seq.to(tl.int64) * HS + h) * V + c, mask=c < V, other=0.0).to(tl.float32)  # [BV]

    # If it is the same for all chunks.
    fixed: tl.constexpr = DECAY < SCALAR and EVEN and not SEGMENTS
    if fixed:
        high, low, rest, whole = decays_of(  # [C], [C], [C], []
            g_ptr, logs_ptr, first, seq * 0 + CHUNK, seq, h, TOKENS, HS, HG, CHUNK, DECAY, EVEN, EXACT)
        pairs = between(high, low, r[:, None] >= r[None, :], DECAY, EXACT) * SCALE  # [C, C]
        enter = from_start(high, low, DECAY, EXACT) * SCALE  # [C]
        leave = tl.exp2(rest)  # [C]
        total = tl.exp2(whole + 0.0)  # []

    # Chunk by chunk: O = scale (Q e^G) S + A V, S <- e^{G_C} S + (K e^{G_C - G} b)^T V.
    begin, end = chunks_of_split(split, length, CHUNK, SPLITS)
    for n in tl.range(begin, end):
        row = first + n * CHUNK
        count = tl.minimum(length - n * CHUNK, CHUNK)
        q = load_tile(q_ptr + row * (HQ * D) + h // (HS // HQ) * D, HQ * D, count, 0, D, CHUNK, BLOCK_K, EVEN)  # [C, BK]
        k = load_tile(k_ptr + row * (HK * D) + h // (HS // HK) * D, HK * D, count, 0, D, CHUNK, BLOCK_K, EVEN)  # [C, BK]
        v = load_tile(v_ptr + row * (HV * V) + h // (HS // HV) * V, HV * V, count, v0, V, CHUNK, BLOCK_V, EVEN)  # [C, BV]
        if not fixed:
            high, low, rest, whole = decays_of(g_ptr, logs_ptr, row, count, seq, h, TOKENS, HS, HG, CHUNK, DECAY, EVEN, EXACT)  # [C], [C], [C], []
            visible = r[:, None] >= r[None, :]  # [C, C]
            if not EVEN:
                visible = visible & (r < count)[:, None]  # [C, C]
            enter = from_start(high, low, DECAY, EXACT) * SCALE  # [C]
            leave = tl.exp2(rest)  # [C]
            total = tl.exp2(whole + 0.0)  # []
            # Nothing passes from one segment to the next, neither between tokens nor through the state.
            if SEGMENTS:
                starts = segment_starts(starts_ptr, row, count, seq, T, CHUNK)  # [C]
                start = last_start(starts_ptr, row, count, seq, T)  # where the segment that is open at the end of the chunk begins
                visible = visible & (r[None, :] >= starts[:, None])  # [C, C]
                enter = tl.where(starts < 0, enter, 0.0)
                leave = tl.where(r >= start, leave, 0.0)
                total = tl.where(start < 0, total, 0.0)
            pairs = between(high, low, visible, DECAY, EXACT) * SCALE  # [C, C]
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * pairs  # [C, C]
        weight = leave  # [C]
        if BETA:
            beta = load_vector(beta_ptr + row * HB + h // (HS // HB), HB, count, CHUNK, EVEN)  # [C]
            scores *= beta[None, :]
            weight *= beta
        read = operand_of(state, q.dtype, PRECISION)  # [BK, BV]
        out = tl.dot(q, read, input_precision=PRECISION)  # [C, BV]
        out *= enter[:, None]
        scores = operand_of(scores, v.dtype, PRECISION)  # [C, C]
        out = tl.dot(scores, v, out, input_precision=PRECISION)  # [C, BV]
        if SKIP:
            out += v.to(tl.float32) * skip[None, :]
        store_tile(out_ptr + row * (HS * V) + h * V, out, HS * V, count, v0, V, CHUNK, BLOCK_V)
        if DECAY != NONE or BETA or SEGMENTS:
            v = operand_of(v.to(tl.float32) * weight[:, None], k.dtype, PRECISION)  # [C, BV]
        state = tl.dot(tl.trans(k), v, state * total, input_precision=PRECISION)  # [BK, BV]

    if SPLITS == 1:
        store_tile(final_ptr + own, state, V, D, v0, V, BLOCK_K, BLOCK_V)
    elif split == SPLITS - 1:
        store_tile(final_ptr + own, state, V, D, v0, V, BLOCK_K, BLOCK_V)
