"""Triton: the two serial passes of a delta rule over the chunks of a sequence, one program per state head and tile of values.

A state is held transposed, `[BV, BK]`, so that every matrix in the chain from one state to the next is the left operand of a product
and stays in the registers of the threads that computed it. With a decay per key, `q`, `k` and `k_end` already include their decays
(`DECAYED`), over tokens and state heads, and `carry [chunks, HS, D]` is the decay of a whole chunk.

If there are few programs, sequences are split. A split takes the state before it, a row of `D` numbers for every value, to `S M + L`: `L` is what it
makes of a zero state, and `M` of the identity. A first launch (`LOCAL`) computes both side by side, `delta_chain_kernel` goes from split to split,
and then each split begins with its own state. Gradients of states go the other way, to `dS M^T + dL`, with the same `M`.
"""

import triton
import triton.language as tl

from .operands import load_head, Operand, operand_of
from .places import Chunk
from .state_tiles import chunks_of_split, state_tile, States
from .tile import load_carry, load_tile, load_vector, store_tile


# fmt: off
@triton.jit
def transposed(start, D: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
    """Offsets in `[D, V]` and mask of a `[BLOCK_V, BLOCK_K]` tile that begins at value `start`."""
    v = start + tl.arange(0, BLOCK_V)[:, None]  # [BV, 1]
    d = tl.arange(0, BLOCK_K)[None, :]  # [1, BK]
    return d * V + v, (v < V) & (d < D)  # [BV, BK] each


@triton.jit
def factors_at(factors_ptr, row, h, T, HS: tl.constexpr):
    """Pointer to the factors `[B, HS, 3, T]` of a row and head."""
    b = row // T
    return factors_ptr + (b * HS + h) * 3 * T + (row - b * T)


@triton.jit
def factors_of(factors, count, T, CHUNK: tl.constexpr, EVEN: tl.constexpr):
    """The decays from the chunk's start and to its end, and the decay of the whole chunk."""
    before = load_vector(factors, 1, count, CHUNK, EVEN)  # [C]
    after = load_vector(factors + T, 1, count, CHUNK, EVEN)  # [C]
    return before, after, tl.load(factors + tl.maximum(count, 1) - 1)


@triton.jit
def store_factors(factors, before, after, beta, T, mask):
    """Stores the factors of tokens: the decays from the chunk's start and to its end, and the write strengths."""
    tl.store(factors, before, mask=mask)
    tl.store(factors + T, after, mask=mask)
    tl.store(factors + T * 2, beta, mask=mask)


@triton.jit
def identity(CHUNK: tl.constexpr, DTYPE: tl.constexpr):
    """Multiplying by it moves a tile from memory to where accumulators are, faster than Triton's own layout conversion."""
    r = tl.arange(0, CHUNK)  # [C]
    return tl.where(r[:, None] == r[None, :], 1.0, 0.0).to(DTYPE)  # [C, C]


@triton.jit
def load_rows(ptr, split, h, start, HS: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
    """Rows from `start` on of a head's part of `[splits, HS, V, D]`."""
    at = split.to(tl.int64) * HS + h
    return load_tile(ptr + at * (V * D) + start * D, D, V - start, 0, D, BLOCK_V, BLOCK_K, V % BLOCK_V == 0)  # [BV, BK]


@triton.jit
def delta_states_kernel(
    q_ptr, k_ptr, k_end_ptr, v_ptr, do_ptr, scores_ptr, inverse_ptr, factors_ptr, carry_ptr, initial_ptr, edges_ptr, bounds_ptr, T,
    out_ptr, final_ptr, states_ptr, written_ptr, local_ptr, turns_ptr,
    HS: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, SCALE: tl.constexpr, DECAYED: tl.constexpr, INITIAL: tl.constexpr, TABLE: tl.constexpr,
    EVEN: tl.constexpr, OUT: tl.constexpr, PRECISION: tl.constexpr, SPLITS: tl.constexpr, LOCAL: tl.constexpr, REVERSE: tl.constexpr,
):
    """Computes with `OUT` the outputs and the final state; else the state before each chunk, `[chunks, HS, V, D]`, and the rows written to it. With
    `LOCAL` what every split makes of a zero state, `local [sequences, SPLITS, HS, V, D]`, and of the identity, `turns [.., D, D]`.

    With `REVERSE` gradients, from `initial`, that of the final state: of the state after each chunk, of `beta (v - e^G k S)` (`written`), and of the
    initial state (`final`); with `LOCAL` what every split but the first makes of a zero gradient, `local [sequences, SPLITS - 1, HS, V, D]`."""
    # Tiles of rows of the identity follow those of values.
    values: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V * BLOCK_V
    turns: tl.constexpr = LOCAL and not REVERSE
    parts: tl.constexpr = SPLITS - 1 if LOCAL and REVERSE else SPLITS
    sizes: tl.constexpr = States(HS, D, values + D if turns else V, BLOCK_K, BLOCK_V, parts)
    seq, split, h, _d0, start, first, length, chunk, state_offset = state_tile(bounds_ptr, T, sizes, CHUNK, TABLE)
    offsets, mask = transposed(start, D, V, BLOCK_K, BLOCK_V)  # [BV, BK] each
    state = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)  # [BV, BK], all key channels
    if turns:
        # Tiles past those of values begin as rows of the identity.
        rows = start - values + tl.arange(0, BLOCK_V)[:, None]  # [BV, 1], of the identity
        state = tl.where(rows == tl.arange(0, BLOCK_K)[None, :], 1.0, state)  # [BV, BK]
    elif SPLITS > 1 and not LOCAL:
        state = load_rows(edges_ptr, seq * SPLITS + split, h, start, HS, D, V, BLOCK_K, BLOCK_V)  # [BV, BK]
    elif INITIAL and not LOCAL:
        state = tl.load(initial_ptr + state_offset + offsets, mask=mask, other=0.0).to(tl.float32)  # [BV, BK]
    factors = factors_at(factors_ptr, first, h, T, HS)
    one = identity(CHUNK, k_ptr.dtype.element_ty)  # [C, C]
    begin, end = chunks_of_split(split + 1 if LOCAL and REVERSE else split, length, CHUNK, SPLITS)
    # From the first chunk to the last, or back.
    for step in tl.range(0 if REVERSE else begin, end - begin if REVERSE else end):
        n = end - 1 - step if REVERSE else step
        row, count = first + n * CHUNK, tl.minimum(length - n * CHUNK, CHUNK)
        tokens = Chunk(row, count, seq)
        k = load_head(k_ptr, tokens, h, 0, Operand(HS, HK, D, CHUNK, BLOCK_K, EVEN))  # [C, BK]
        place = (row * HS + h) * CHUNK
        if REVERSE:
            q = load_head(q_ptr, tokens, h, 0, Operand(HS, HQ, D, CHUNK, BLOCK_K, EVEN))  # [C, BK]
            v = load_tile(do_ptr + (row * HS + h) * V, HS * V, count, start, V, CHUNK, BLOCK_V, EVEN)  # [C, BV]
            scores = load_tile(scores_ptr + place, HS * CHUNK, count, 0, CHUNK, CHUNK, CHUNK, EVEN)  # [C, C]
        else:
            written_count = tl.where(start < V, count, 0) if LOCAL else count  # no values are written to the identity
            v = load_head(v_ptr, Chunk(row, written_count, seq), h, start, Operand(HS, HV, V, CHUNK, BLOCK_V, EVEN and not LOCAL))  # [C, BV]
        inverse = load_tile(inverse_ptr + place, HS * CHUNK, count, 0, CHUNK, CHUNK, CHUNK, EVEN)  # [C, C]
        # Factors are stored by head, a token after the other.
        beta = load_vector(factors + n * CHUNK + T * 2, 1, count, CHUNK, EVEN)  # [C]
        if not DECAYED:
            before, after, carry = factors_of(factors + n * CHUNK, count, T, CHUNK, EVEN)  # [C], [C], []
        old = operand_of(state, k.dtype, PRECISION)  # [BV, BK]
        stored = states_ptr + ((chunk + n) * HS + h) * (D * V) + start * D
        if REVERSE:
            if not LOCAL:
                store_tile(stored, old, D, V - start, 0, D, BLOCK_V, BLOCK_K)
            # dv' = A^T do + e^{G_C - G} k dS, and dv'^T (I + L)^-1 is the gradient of beta (v - e^G k S); all transposed.
            do = tl.trans(v)  # [BV, C]
            if DECAYED:
                k_end = load_tile(k_end_ptr + (row * HS + h) * D, HS * D, count, 0, D, CHUNK, BLOCK_K, EVEN)  # [C, BK]
                write = tl.dot(old, tl.trans(k_end), input_precision=PRECISION)  # [BV, C]
            else:
                write = tl.dot(old, tl.trans(k), input_precision=PRECISION) * after[None, :]  # [BV, C]
            write = tl.dot(do, scores, write, input_precision=PRECISION)  # [BV, C]
            write = operand_of(write, k.dtype, PRECISION)  # [BV, C]
            error = tl.dot(write, inverse, input_precision=PRECISION)  # [BV, C]
            if not LOCAL:
                written = operand_of(error, k.dtype, PRECISION)  # [BV, C]
                store_tile(written_ptr + (row * HS + h) * V, tl.trans(written), HS * V, count, start, V, CHUNK, BLOCK_V)
            # dS <- e^{G_C} dS + (scale e^G q)^T do - (beta e^G k)^T derror.
            if DECAYED:
                carried = load_carry(carry_ptr + ((chunk + n) * HS + h) * D, 0, D, BLOCK_K)  # [BK]
                state = tl.dot(do, q, state * carried[None, :], input_precision=PRECISION)  # [BV, BK]
                dread = operand_of(error * -beta[None, :], k.dtype, PRECISION)  # [BV, C]
            else:
                seen = tl.dot(do, one, input_precision=PRECISION) * (before * SCALE)[None, :]  # [BV, C]
                seen = operand_of(seen, k.dtype, PRECISION)  # [BV, C]
                state = tl.dot(seen, q, state * carry, input_precision=PRECISION)  # [BV, BK]
                dread = operand_of(error * -(beta * before)[None, :], k.dtype, PRECISION)  # [BV, C]
            state = tl.dot(dread, k, state, input_precision=PRECISION)  # [BV, BK]
        else:
            # The written rows: v' = (I + L)^-1 beta (v - e^G k S), all transposed here.
            read = tl.dot(old, tl.trans(k), input_precision=PRECISION)  # [BV, C]
            if not DECAYED:
                read *= before[None, :]
            error = (tl.dot(tl.trans(v), one, input_precision=PRECISION) - read) * beta[None, :]  # [BV, C]
            error = operand_of(error, k.dtype, PRECISION)  # [BV, C]
            write = tl.dot(error, tl.trans(inverse), input_precision=PRECISION)  # [BV, C]
            written = operand_of(write, k.dtype, PRECISION)  # [BV, C]
            # S <- e^{G_C} S + (e^{G_C - G} k)^T v'.
            if DECAYED:
                carried = load_carry(carry_ptr + ((chunk + n) * HS + h) * D, 0, D, BLOCK_K)  # [BK]
                k_end = load_tile(k_end_ptr + (row * HS + h) * D, HS * D, count, 0, D, CHUNK, BLOCK_K, EVEN)  # [C, BK]
                state = tl.dot(written, k_end, state * carried[None, :], input_precision=PRECISION)  # [BV, BK]
            else:
                kept = operand_of(write * after[None, :], k.dtype, PRECISION)  # [BV, C]
                state = tl.dot(kept, k, state * carry, input_precision=PRECISION)  # [BV, BK]
        # o = scale e^G q S + A v'.
        if OUT:
            q = load_head(q_ptr, tokens, h, 0, Operand(HS, HQ, D, CHUNK, BLOCK_K, EVEN))  # [C, BK]
            scores = load_tile(scores_ptr + place, HS * CHUNK, count, 0, CHUNK, CHUNK, CHUNK, EVEN)  # [C, C]
            out = tl.dot(old, tl.trans(q), input_precision=PRECISION)  # [BV, C]
            if not DECAYED:
                out *= (before * SCALE)[None, :]
            out = tl.dot(written, tl.trans(scores), out, input_precision=PRECISION)  # [BV, C]
            store_tile(out_ptr + (row * HS + h) * V, tl.trans(out), HS * V, count, start, V, CHUNK, BLOCK_V)
        elif not LOCAL and not REVERSE:
            store_tile(stored, old, D, V - start, 0, D, BLOCK_V, BLOCK_K)
            store_tile(written_ptr + (row * HS + h) * V, tl.trans(written), HS * V, count, start, V, CHUNK, BLOCK_V)
    if LOCAL:
        at = (seq.to(tl.int64) * parts + split) * HS + h
        store_tile(local_ptr + at * (V * D) + start * D, state, D, V - start, 0, D, BLOCK_V, BLOCK_K)
        # The rest of the tile has rows of the identity; none in tiles of values.
        if turns:
            rows = tl.where(start < values, 0, values + D - start)
            store_tile(turns_ptr + at * (D * D) + (start - values) * D, state, D, rows, 0, D, BLOCK_V, BLOCK_K)
    elif OUT or REVERSE:
        mask = mask & (split == (0 if REVERSE else SPLITS - 1)) if SPLITS > 1 else mask  # [BV, BK]
        tl.store(final_ptr + state_offset + offsets, state.to(final_ptr.dtype.element_ty), mask=mask)


@triton.jit
def delta_chain_kernel(
    edge_ptr, local_ptr, turns_ptr, bounds_ptr, T,
    edges_ptr,
    HS: tl.constexpr, D: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr, PASS: tl.constexpr, GIVEN: tl.constexpr, TABLE: tl.constexpr, SPLITS: tl.constexpr, FORWARD: tl.constexpr,
):
    """The state before each split, or the gradient of the state after it, `edges [sequences, SPLITS, HS, V, D]`: from `edge [.., D, V]`, that of the
    whole sequence, and the results of the `LOCAL` kernels."""
    seq, _split, h, _d0, start, _first, _length, _chunk, state_offset = state_tile(
        bounds_ptr, T, States(HS, D, V, BLOCK_K, BLOCK_V, 1), CHUNK, TABLE)
    state = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)  # [BV, BK]
    if GIVEN:
        offsets, mask = transposed(start, D, V, BLOCK_K, BLOCK_V)  # [BV, BK] each
        state = tl.load(edge_ptr + state_offset + offsets, mask=mask, other=0.0).to(tl.float32)  # [BV, BK]
    for n in tl.range(0, SPLITS):
        split = n if FORWARD else SPLITS - 1 - n
        place = (seq.to(tl.int64) * SPLITS + split) * HS + h
        store_tile(edges_ptr + place * (V * D) + start * D, state, D, V - start, 0, D, BLOCK_V, BLOCK_K)
        if n < SPLITS - 1:
            at = seq * SPLITS + split if FORWARD else seq * (SPLITS - 1) + split - 1  # the first split has no gradient of its own
            state = load_rows(local_ptr, at, h, start, HS, D, V, BLOCK_K, BLOCK_V)  # [BV, BK]
            turn = turns_ptr + ((seq * SPLITS + split).to(tl.int64) * HS + h) * (D * D)
            # A part of the channels at a time, of the state as it is in memory now.
            tl.debug_barrier()
            for d in tl.range(0, D, BLOCK_D):
                part = load_tile(edges_ptr + place * (V * D) + start * D, D, V - start, d, D, BLOCK_V, BLOCK_D, V % BLOCK_V == 0)  # [BV, BD]
                if FORWARD:
                    through = load_tile(turn + d * D, D, D - d, 0, D, BLOCK_D, BLOCK_K, D % BLOCK_D == 0)  # [BD, BK]
                else:
                    through = tl.trans(load_tile(turn, D, D, d, D, BLOCK_K, BLOCK_D, D % BLOCK_K == 0))  # [BD, BK]
                state = tl.dot(part, through, state, input_precision=PASS)  # [BV, BK]
