"""Transitions of rank one: the serial passes over the chunks of a sequence, one program per state head and tile of values.

States are held transposed, and sequences are split, as in `delta_states`. All operands include their decays (`rank_one_scores`).
"""

import triton
import triton.language as tl

from .delta_states import load_rows, transposed
from .operands import load_head, Operand, operand_of
from .places import Chunk
from .state_tiles import chunks_of_split, state_tile, States
from .tile import load_carry, store_tile


# fmt: off
@triton.jit
def rank_one_states_kernel(
    q_in_ptr, a_in_ptr, k_end_ptr, b_end_ptr, v_ptr, do_ptr, qk_ptr, qb_ptr, mixed_ptr, carry_ptr, initial_ptr, edges_ptr, bounds_ptr, T,
    out_ptr, final_ptr, states_ptr, written_ptr, local_ptr, turns_ptr,
    HS: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    INITIAL: tl.constexpr, TABLE: tl.constexpr, EVEN: tl.constexpr, OUT: tl.constexpr, PRECISION: tl.constexpr, SPLITS: tl.constexpr,
    LOCAL: tl.constexpr, REVERSE: tl.constexpr,
):
    """The results of `delta_states_kernel`; here `written` is what the vectors `a` read and `b` write and, with `REVERSE`, its gradient."""
    # Tiles of rows of the identity follow those of values.
    values: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V * BLOCK_V
    turns: tl.constexpr = LOCAL and not REVERSE
    parts: tl.constexpr = SPLITS - 1 if LOCAL and REVERSE else SPLITS
    sizes: tl.constexpr = States(HS, D, values + D if turns else V, BLOCK_K, BLOCK_V, parts)
    keys: tl.constexpr = Operand(HS, HS, D, CHUNK, BLOCK_K, EVEN)
    square: tl.constexpr = Operand(HS, HS, CHUNK, CHUNK, CHUNK, EVEN)
    rows: tl.constexpr = Operand(HS, HS, V, CHUNK, BLOCK_V, EVEN)
    seq, split, h, _d0, start, first, length, chunk, state_offset = state_tile(bounds_ptr, T, sizes, CHUNK, TABLE)
    offsets, mask = transposed(start, D, V, BLOCK_K, BLOCK_V)  # [BV, BK] each
    state = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)  # [BV, BK], all key channels
    if turns:
        row = start - values + tl.arange(0, BLOCK_V)[:, None]  # [BV, 1], of the identity
        state = tl.where(row == tl.arange(0, BLOCK_K)[None, :], 1.0, state)  # [BV, BK]
    elif SPLITS > 1 and not LOCAL:
        state = load_rows(edges_ptr, seq * SPLITS + split, h, start, HS, D, V, BLOCK_K, BLOCK_V)  # [BV, BK]
    elif INITIAL and not LOCAL:
        state = tl.load(initial_ptr + state_offset + offsets, mask=mask, other=0.0).to(tl.float32)  # [BV, BK]
    begin, end = chunks_of_split(split + 1 if LOCAL and REVERSE else split, length, CHUNK, SPLITS)
    # From the first chunk to the last, or back.
    for step in tl.range(0 if REVERSE else begin, end - begin if REVERSE else end):
        n = end - 1 - step if REVERSE else step
        tokens = Chunk(first + n * CHUNK, tl.minimum(length - n * CHUNK, CHUNK), seq)
        a_in = load_head(a_in_ptr, tokens, h, 0, keys)  # [C, BK]
        b_end = load_head(b_end_ptr, tokens, h, 0, keys)  # [C, BK]
        carried = load_carry(carry_ptr + ((chunk + n) * HS + h) * D, 0, D, BLOCK_K)  # [BK]
        old = operand_of(state, a_in.dtype, PRECISION)  # [BV, BK]
        if REVERSE:
            # dU = (qb)^T do + b_end dS, and dS <- e^{G_C} dS + q_in^T do + a_in^T dU; all transposed.
            do = tl.trans(load_head(do_ptr, tokens, h, start, rows))  # [BV, C]
            q = load_head(q_in_ptr, tokens, h, 0, keys)  # [C, BK]
            qb = load_head(qb_ptr, tokens, h, 0, square)  # [C, C]
            read = tl.dot(old, tl.trans(b_end), input_precision=PRECISION)  # [BV, C]
            read = operand_of(tl.dot(do, qb, read, input_precision=PRECISION), a_in.dtype, PRECISION)  # [BV, C]
            state = tl.dot(do, q, state * carried[None, :], input_precision=PRECISION)  # [BV, BK]
            state = tl.dot(read, a_in, state, input_precision=PRECISION)  # [BV, BK]
        else:
            # U = a_in S + mixed v, and S <- e^{G_C} S + k_end^T v + b_end^T U; all transposed.
            count = tl.where(start < V, tokens.count, 0) if LOCAL else tokens.count  # no values are written to the identity
            v = load_head(v_ptr, Chunk(tokens.first, count, seq), h, start, Operand(HS, HV, V, CHUNK, BLOCK_V, EVEN and not LOCAL))  # [C, BV]
            v = tl.trans(v)  # [BV, C]
            k_end = load_head(k_end_ptr, tokens, h, 0, keys)  # [C, BK]
            mixed = load_head(mixed_ptr, tokens, h, 0, square)  # [C, C]
            read = tl.dot(old, tl.trans(a_in), input_precision=PRECISION)  # [BV, C]
            read = operand_of(tl.dot(v, tl.trans(mixed), read, input_precision=PRECISION), a_in.dtype, PRECISION)  # [BV, C]
            state = tl.dot(v, k_end, state * carried[None, :], input_precision=PRECISION)  # [BV, BK]
            state = tl.dot(read, b_end, state, input_precision=PRECISION)  # [BV, BK]
        # o = q_in S + (qk) v + (qb) U.
        if OUT:
            q = load_head(q_in_ptr, tokens, h, 0, keys)  # [C, BK]
            qk = load_head(qk_ptr, tokens, h, 0, square)  # [C, C]
            qb = load_head(qb_ptr, tokens, h, 0, square)  # [C, C]
            out = tl.dot(old, tl.trans(q), input_precision=PRECISION)  # [BV, C]
            out = tl.dot(v, tl.trans(qk), out, input_precision=PRECISION)  # [BV, C]
            out = tl.dot(read, tl.trans(qb), out, input_precision=PRECISION)  # [BV, C]
            store_tile(out_ptr + (tokens.first * HS + h) * V, tl.trans(out), HS * V, tokens.count, start, V, CHUNK, BLOCK_V)
        elif not LOCAL:
            store_tile(states_ptr + ((chunk + n) * HS + h) * (D * V) + start * D, old, D, V - start, 0, D, BLOCK_V, BLOCK_K)
            store_tile(written_ptr + (tokens.first * HS + h) * V, tl.trans(read), HS * V, tokens.count, start, V, CHUNK, BLOCK_V)
    if LOCAL:
        at = (seq.to(tl.int64) * parts + split) * HS + h
        store_tile(local_ptr + at * (V * D) + start * D, state, D, V - start, 0, D, BLOCK_V, BLOCK_K)
        # The rest of the tile has rows of the identity; none in tiles of values.
        if turns:
            left = tl.where(start < values, 0, values + D - start)
            store_tile(turns_ptr + at * (D * D) + (start - values) * D, state, D, left, 0, D, BLOCK_V, BLOCK_K)
    elif OUT or REVERSE:
        mask = mask & (split == (0 if REVERSE else SPLITS - 1)) if SPLITS > 1 else mask  # [BV, BK]
        tl.store(final_ptr + state_offset + offsets, state.to(final_ptr.dtype.element_ty), mask=mask)
