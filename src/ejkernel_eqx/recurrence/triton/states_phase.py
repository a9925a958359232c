"""The serial phase: states from chunk to chunk (forward) and their gradients (backward), with one kernel for all kinds of decay.

Each program has a tile of the state of a linear member, whose channels are independent. With a decay per key channel, queries and keys
already include their decays, masks and the scale.

If there are few programs, sequences are split, and each split begins with the state that `split_phase` computed.
"""

import triton
import triton.language as tl

from .decays import Decay, decays_of, from_start, Gates, KEY, NONE, strengths_of
from .operands import load_head, Operand, operand_of
from .places import last_start, segment_starts
from .state_tiles import chunks_of_split, entering_state, nth_chunk, state_tile, States, store_leaving
from .tile import load_carry, store_tile


# fmt: off
@triton.jit
def states_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, g_ptr, logs_ptr, carry_ptr, beta_ptr, initial_ptr, edges_ptr, starts_ptr, bounds_ptr, T, TOKENS,
    states_ptr, final_ptr,
    HS: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, HG: tl.constexpr, HB: tl.constexpr, D: tl.constexpr,
    V: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, SCALE: tl.constexpr, DECAY: tl.constexpr,
    BETA: tl.constexpr, INITIAL: tl.constexpr, SEGMENTS: tl.constexpr, TABLE: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr,
    PRECISION: tl.constexpr, SPLITS: tl.constexpr, REVERSE: tl.constexpr,
):
    """The state at the start of each chunk and the final state. With `REVERSE` the gradients with respect to the state at the end of each chunk and
    to the initial state, from `initial`, that of the final state."""
    sizes: tl.constexpr = States(HS, D, V, BLOCK_K, BLOCK_V, SPLITS)
    kind: tl.constexpr = Decay(HS, HG, CHUNK, DECAY, EVEN, EXACT)
    keys: tl.constexpr = Operand(HS, HQ if REVERSE else HK, D, CHUNK, BLOCK_K, EVEN)
    values: tl.constexpr = Operand(HS, HS if REVERSE else HV, V, CHUNK, BLOCK_V, EVEN)
    at = state_tile(bounds_ptr, T, sizes, CHUNK, TABLE)
    h, d0, v0 = at.h, at.d0, at.v0
    state = entering_state(edges_ptr, initial_ptr, at, sizes, INITIAL)  # [BK, BV]

    # S <- e^{G_C} S + sum_j k_j (e^{G_C - G_j} b_j v_j)^T, chunk by chunk.
    # dS <- e^{G_C} dS + sum_i q_i (scale e^{G_i} do_i)^T, from the last chunk to the first.
    begin, end = chunks_of_split(at.split, at.length, CHUNK, SPLITS)
    for n in tl.range(0 if REVERSE else begin, end - begin if REVERSE else end):
        c = end - 1 - n if REVERSE else n
        chunk = nth_chunk(at, c, CHUNK)
        stored = operand_of(state, states_ptr.dtype.element_ty, PRECISION)  # [BK, BV], on entering the chunk
        store_tile(states_ptr + ((at.chunk + c) * HS + h) * (D * V) + d0 * V, stored, V, D - d0, v0, V, BLOCK_K, BLOCK_V)
        k = load_head(q_ptr if REVERSE else k_ptr, chunk, h, d0, keys)  # [C, BK]
        v = load_head(do_ptr if REVERSE else v_ptr, chunk, h, v0, values)  # [C, BV]
        sees = tl.zeros([CHUNK], tl.float32) + SCALE  # [C]
        carried = 1.0
        # Only what the segment open at the end of the chunk writes is carried on, and the old state if that segment began before the chunk. Only the
        # segment open at the start of the chunk reads the old state.
        if SEGMENTS:
            start = last_start(starts_ptr, chunk, T)  # its first token, relative to the chunk's
            if REVERSE:
                sees = tl.where(segment_starts(starts_ptr, chunk, T, CHUNK) < 0, sees, 0.0)  # [C]
            else:
                v = tl.where((tl.arange(0, CHUNK) >= start)[:, None], v, 0.0)  # [C, BV]
            carried = tl.where(start < 0, 1.0, 0.0)
        # With a decay per key channel, keys include theirs up to the end of the chunk, queries those from its start; the chunk's own decay is one
        # number per row of the state.
        if DECAY == KEY:
            factor = load_carry(carry_ptr + ((at.chunk + c) * HS + h) * D, d0, D, BLOCK_K)  # [BK]
            state *= factor[:, None]
        else:
            high, low, rest, whole = decays_of(Gates(g_ptr, logs_ptr, TOKENS), chunk, h, kind)  # [C], [C], [C], []
            if REVERSE:
                weight = from_start(high, low, kind) * sees  # [C]
            else:
                weight = tl.exp2(rest)  # [C]
                if BETA:
                    weight *= strengths_of(beta_ptr, chunk, h, HB, kind)
            if REVERSE or DECAY != NONE or BETA:
                v = operand_of(v.to(tl.float32) * weight[:, None], k.dtype, PRECISION)  # [C, BV]
            factor = tl.exp2(whole + 0.0) * carried  # []
            state *= factor
        state = tl.dot(tl.trans(k), v, state, input_precision=PRECISION)  # [BK, BV]
    store_leaving(final_ptr, state, at, sizes, 0 if REVERSE else SPLITS - 1)
