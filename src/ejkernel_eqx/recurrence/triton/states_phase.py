"""The serial phase: states from chunk to chunk (forward) and their gradients (backward), with one kernel each for all kinds of decay.

Each program has a tile of the state of a linear member, whose channels are independent. With a decay per key channel, queries and keys
already include their decays, masks and the scale.

If there are few programs, sequences are split, and each split begins with the state that `split_phase` found.
"""

import triton
import triton.language as tl

from .tile import (
    chunks_of_split,
    decays_of,
    from_start,
    KEY,
    last_start,
    load_carry,
    load_edge,
    load_state,
    load_tile,
    load_vector,
    NONE,
    operand_of,
    segment_starts,
    state_tile,
    store_tile,
)


# fmt: off
@triton.jit
def states_kernel(
    k_ptr, v_ptr, g_ptr, logs_ptr, carry_ptr, beta_ptr, initial_ptr, edges_ptr, starts_ptr, bounds_ptr, T, TOKENS,
    states_ptr, final_ptr,
    HS: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, HG: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, DECAY: tl.constexpr, BETA: tl.constexpr,
    INITIAL: tl.constexpr, SEGMENTS: tl.constexpr, TABLE: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """The state at the start of each chunk and the final state."""
    seq, split, h, d0, v0, first, length, chunk, own = state_tile(bounds_ptr, T, HS, D, V, CHUNK, BLOCK_K, BLOCK_V, TABLE, SPLITS)
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)  # [BK, BV]
    if SPLITS > 1:
        state = load_edge(edges_ptr, split, seq, h, d0, v0, HS, D, V, BLOCK_K, BLOCK_V, SPLITS)  # [BK, BV]
    elif INITIAL:
        state = load_state(initial_ptr + own, d0, v0, D, V, BLOCK_K, BLOCK_V).to(tl.float32)  # [BK, BV]

    # S <- e^{G_C} S + sum_j k_j (e^{G_C - G_j} b_j v_j)^T, chunk by chunk.
    begin, end = chunks_of_split(split, length, CHUNK, SPLITS)
    for c in tl.range(begin, end):
        row = first + c * CHUNK
        count = tl.minimum(length - c * CHUNK, CHUNK)
        stored = operand_of(state, states_ptr.dtype.element_ty, PRECISION)  # [BK, BV], on entering the chunk
        store_tile(states_ptr + ((chunk + c) * HS + h) * (D * V) + d0 * V, stored, V, D - d0, v0, V, BLOCK_K, BLOCK_V)
        k = load_tile(k_ptr + row * (HK * D) + h // (HS // HK) * D, HK * D, count, d0, D, CHUNK, BLOCK_K, EVEN)  # [C, BK]
        v = load_tile(v_ptr + row * (HV * V) + h // (HS // HV) * V, HV * V, count, v0, V, CHUNK, BLOCK_V, EVEN)  # [C, BV]
        carried = 1.0
        # Only what the segment open at the end of the chunk writes is carried on, and the old state if that segment began before the chunk.
        if SEGMENTS:
            start = last_start(starts_ptr, row, count, seq, T)  # its first token, relative to the chunk's
            v = tl.where((tl.arange(0, CHUNK) >= start)[:, None], v, 0.0)  # [C, BV]
            carried = tl.where(start < 0, 1.0, 0.0)
        # With a decay per key channel, keys include theirs up to the end of the chunk; the chunk's own decay is one number per row of the state.
        if DECAY == KEY:
            factor = load_carry(carry_ptr + ((chunk + c) * HS + h) * D, d0, D, BLOCK_K)  # [BK]
            state *= factor[:, None]
        else:
            _high, _low, rest, whole = decays_of(g_ptr, logs_ptr, row, count, seq, h, TOKENS, HS, HG, CHUNK, DECAY, EVEN, EXACT)  # [C], [C], [C], []
            weight = tl.exp2(rest)  # [C]
            if BETA:
                weight *= load_vector(beta_ptr + row * HB + h // (HS // HB), HB, count, CHUNK, EVEN)
            if DECAY != NONE or BETA:
                v = operand_of(v.to(tl.float32) * weight[:, None], k.dtype, PRECISION)  # [C, BV]
            factor = tl.exp2(whole + 0.0) * carried  # []
            state *= factor
        state = tl.dot(tl.trans(k), v, state, input_precision=PRECISION)  # [BK, BV]

    if SPLITS == 1:
        store_tile(final_ptr + own + d0 * V, state, V, D - d0, v0, V, BLOCK_K, BLOCK_V)
    elif split == SPLITS - 1:
        store_tile(final_ptr + own + d0 * V, state, V, D - d0, v0, V, BLOCK_K, BLOCK_V)


@triton.jit
def dstates_kernel(
    q_ptr, do_ptr, g_ptr, logs_ptr, carry_ptr, dfinal_ptr, edges_ptr, starts_ptr, bounds_ptr, T, TOKENS,
    dstates_ptr, dinitial_ptr,
    HS: tl.constexpr, HQ: tl.constexpr, HG: tl.constexpr, D: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, SCALE: tl.constexpr, DECAY: tl.constexpr, SEGMENTS: tl.constexpr,
    TABLE: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr, SPLITS: tl.constexpr,
):
    """The gradient with respect to the state at the end of each chunk and to the initial state."""
    seq, split, h, d0, v0, first, length, chunk, own = state_tile(bounds_ptr, T, HS, D, V, CHUNK, BLOCK_K, BLOCK_V, TABLE, SPLITS)
    if SPLITS > 1:
        state = load_edge(edges_ptr, split, seq, h, d0, v0, HS, D, V, BLOCK_K, BLOCK_V, SPLITS)  # [BK, BV]
    else:
        state = load_state(dfinal_ptr + own, d0, v0, D, V, BLOCK_K, BLOCK_V).to(tl.float32)  # [BK, BV]

    begin, end = chunks_of_split(split, length, CHUNK, SPLITS)
    # dS <- e^{G_C} dS + sum_i scale e^{G_i} q_i do_i^T, from the last chunk to the first.
    for n in tl.range(0, end - begin):
        c = end - 1 - n
        row = first + c * CHUNK
        count = tl.minimum(length - c * CHUNK, CHUNK)
        stored = operand_of(state, dstates_ptr.dtype.element_ty, PRECISION)  # [BK, BV], at the end of the chunk
        store_tile(dstates_ptr + ((chunk + c) * HS + h) * (D * V) + d0 * V, stored, V, D - d0, v0, V, BLOCK_K, BLOCK_V)
        q = load_tile(q_ptr + row * (HQ * D) + h // (HS // HQ) * D, HQ * D, count, d0, D, CHUNK, BLOCK_K, EVEN)  # [C, BK]
        do = load_tile(do_ptr + row * (HS * V) + h * V, HS * V, count, v0, V, CHUNK, BLOCK_V, EVEN)  # [C, BV]
        sees = tl.zeros([CHUNK], tl.float32) + SCALE  # [C]
        carried = 1.0
        # Only the segment open at the start of the chunk reads the old state, which is carried on only if that segment continues.
        if SEGMENTS:
            start = last_start(starts_ptr, row, count, seq, T)
            starts = segment_starts(starts_ptr, row, count, seq, T, CHUNK)  # [C]
            sees = tl.where(starts < 0, sees, 0.0)  # [C]
            carried = tl.where(start < 0, 1.0, 0.0)
        if DECAY == KEY:
            factor = load_carry(carry_ptr + ((chunk + c) * HS + h) * D, d0, D, BLOCK_K)  # [BK]
            state *= factor[:, None]
        else:
            high, low, _rest, whole = decays_of(g_ptr, logs_ptr, row, count, seq, h, TOKENS, HS, HG, CHUNK, DECAY, EVEN, EXACT)  # [C], [C], [C], []
            read = from_start(high, low, DECAY, EXACT) * sees  # [C]
            do = operand_of(do.to(tl.float32) * read[:, None], q.dtype, PRECISION)  # [C, BV]
            factor = tl.exp2(whole + 0.0) * carried  # []
            state *= factor
        state = tl.dot(tl.trans(q), do, state, input_precision=PRECISION)  # [BK, BV]

    if SPLITS == 1:
        store_tile(dinitial_ptr + own + d0 * V, state, V, D - d0, v0, V, BLOCK_K, BLOCK_V)
    elif split == 0:
        store_tile(dinitial_ptr + own + d0 * V, state, V, D - d0, v0, V, BLOCK_K, BLOCK_V)
