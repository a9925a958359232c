"""Triton: the two serial passes of a delta rule over the chunks of a sequence, a program for each state head and tile of values.

A state is held transposed, `[BLOCK_V, D]`. So every matrix of the chain from a state to the next is the left operand of a product, and
stays in the registers of the threads that made it. With a decay per key, `q`, `k` and `k_end` come with their decays inside
(`DECAYED`), over tokens and state heads, and `carry [chunks, HS, D]` is the decay of a whole chunk.
"""

import triton
import triton.language as tl

from .tile import load_tile, load_vector, operand_of, sequence_of, store_tile


@triton.jit
def transposed(start, D: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
    """Offsets in `[D, V]`, and the mask, of a `[BLOCK_V, BLOCK_K]` tile from value `start` on."""
    v = start + tl.arange(0, BLOCK_V)[:, None]
    d = tl.arange(0, BLOCK_K)[None, :]
    return d * V + v, (v < V) & (d < D)


@triton.jit
def factors_at(factors_ptr, row, h, T, HS: tl.constexpr):
    """Where the factors `[B, HS, 3, T]` of a row and head lie."""
    b = row // T
    return factors_ptr + (b * HS + h) * 3 * T + (row - b * T)


@triton.jit
def factors_of(factors, count, T, CHUNK: tl.constexpr, EVEN: tl.constexpr):
    """The decays from the chunk's start and to its end, and the decay of the whole chunk."""
    before = load_vector(factors, 1, count, CHUNK, EVEN)
    after = load_vector(factors + T, 1, count, CHUNK, EVEN)
    return before, after, tl.load(factors + tl.maximum(count, 1) - 1)


@triton.jit
def identity(CHUNK: tl.constexpr, DTYPE: tl.constexpr):
    """The product with it brings a tile from memory to where accumulators are, sooner than Triton's own change of layout."""
    r = tl.arange(0, CHUNK)
    return tl.where(r[:, None] == r[None, :], 1.0, 0.0).to(DTYPE)


@triton.jit
def delta_states_kernel(
    q_ptr, k_ptr, k_end_ptr, v_ptr, scores_ptr, inverse_ptr, factors_ptr, carry_ptr, initial_ptr, bounds_ptr, T,
    out_ptr, final_ptr, states_ptr, written_ptr,
    HS: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, SCALE: tl.constexpr, DECAYED: tl.constexpr, INITIAL: tl.constexpr, TABLE: tl.constexpr,
    EVEN: tl.constexpr, OUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`OUT`: the outputs and the final state; else the state before each chunk, `[chunks, HS, V, D]`, and the rows written to it."""
    tiles: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    start = tl.program_id(0) % tiles * BLOCK_V
    index = tl.program_id(0) // tiles
    h = index % HS
    first, length, chunk = sequence_of(index // HS, bounds_ptr, T, CHUNK, TABLE)
    own = index.to(tl.int64) * (D * V)
    offsets, mask = transposed(start, D, V, BLOCK_K, BLOCK_V)
    state = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
    if INITIAL:
        state = tl.load(initial_ptr + own + offsets, mask=mask, other=0.0).to(tl.float32)
    factors = factors_at(factors_ptr, first, h, T, HS)
    one = identity(CHUNK, k_ptr.dtype.element_ty)
    for n in tl.range(0, tl.cdiv(length, CHUNK)):
        row = first + n * CHUNK
        count = tl.minimum(length - n * CHUNK, CHUNK)
        k = load_tile(k_ptr + row * (HK * D) + h // (HS // HK) * D, HK * D, count, 0, D, CHUNK, BLOCK_K, EVEN)
        v = load_tile(
            v_ptr + row * (HV * V) + h // (HS // HV) * V, HV * V, count, start, V, CHUNK, BLOCK_V, EVEN
        )
        place = (row * HS + h) * CHUNK
        inverse = load_tile(inverse_ptr + place, HS * CHUNK, count, 0, CHUNK, CHUNK, CHUNK, EVEN)
        beta = load_vector(factors + n * CHUNK + T * 2, 1, count, CHUNK, EVEN)
        if not DECAYED:
            before, after, carry = factors_of(factors + n * CHUNK, count, T, CHUNK, EVEN)
        old = operand_of(state, k.dtype, PRECISION)
        read = tl.dot(old, tl.trans(k), input_precision=PRECISION)  # [BLOCK_V, CHUNK]
        if not DECAYED:
            read *= before[None, :]
        error = (tl.dot(tl.trans(v), one, input_precision=PRECISION) - read) * beta[None, :]
        error = operand_of(error, k.dtype, PRECISION)
        write = tl.dot(error, tl.trans(inverse), input_precision=PRECISION)
        written = operand_of(write, k.dtype, PRECISION)
        if DECAYED:
            d = tl.arange(0, BLOCK_K)
            carried = tl.load(carry_ptr + ((chunk + n) * HS + h) * D + d, mask=d < D, other=0.0)
            k_end = load_tile(k_end_ptr + (row * HS + h) * D, HS * D, count, 0, D, CHUNK, BLOCK_K, EVEN)
            state = tl.dot(written, k_end, state * carried[None, :], input_precision=PRECISION)
        else:
            kept = operand_of(write * after[None, :], k.dtype, PRECISION)
            state = tl.dot(kept, k, state * carry, input_precision=PRECISION)
        if OUT:
            q = load_tile(
                q_ptr + row * (HQ * D) + h // (HS // HQ) * D, HQ * D, count, 0, D, CHUNK, BLOCK_K, EVEN
            )
            scores = load_tile(scores_ptr + place, HS * CHUNK, count, 0, CHUNK, CHUNK, CHUNK, EVEN)
            out = tl.dot(old, tl.trans(q), input_precision=PRECISION)
            if not DECAYED:
                out *= (before * SCALE)[None, :]
            out = tl.dot(written, tl.trans(scores), out, input_precision=PRECISION)
            store_tile(out_ptr + (row * HS + h) * V, tl.trans(out), HS * V, count, start, V, CHUNK, BLOCK_V)
        else:
            stored = states_ptr + ((chunk + n) * HS + h) * (D * V) + start * D
            store_tile(stored, old, D, V - start, 0, D, BLOCK_V, BLOCK_K)
            store_tile(
                written_ptr + (row * HS + h) * V, tl.trans(written), HS * V, count, start, V, CHUNK, BLOCK_V
            )
    if OUT:
        tl.store(final_ptr + own + offsets, state.to(final_ptr.dtype.element_ty), mask=mask)


@triton.jit
def delta_dstates_kernel(
    q_ptr, k_ptr, k_end_ptr, do_ptr, scores_ptr, inverse_ptr, factors_ptr, carry_ptr, dfinal_ptr, bounds_ptr, T,
    dstates_ptr, derrors_ptr, dinitial_ptr,
    HS: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, SCALE: tl.constexpr, DECAYED: tl.constexpr, TABLE: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients in the state after each chunk, `[chunks, HS, V, D]`, in `beta (v - e^G k S)`, and in the initial state."""
    tiles: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    start = tl.program_id(0) % tiles * BLOCK_V
    index = tl.program_id(0) // tiles
    h = index % HS
    first, length, chunk = sequence_of(index // HS, bounds_ptr, T, CHUNK, TABLE)
    own = index.to(tl.int64) * (D * V)
    offsets, mask = transposed(start, D, V, BLOCK_K, BLOCK_V)
    dstate = tl.load(dfinal_ptr + own + offsets, mask=mask, other=0.0).to(tl.float32)
    chunks = tl.cdiv(length, CHUNK)
    factors = factors_at(factors_ptr, first, h, T, HS)
    one = identity(CHUNK, k_ptr.dtype.element_ty)
    for step in tl.range(0, chunks):
        n = chunks - 1 - step
        row = first + n * CHUNK
        count = tl.minimum(length - n * CHUNK, CHUNK)
        k = load_tile(k_ptr + row * (HK * D) + h // (HS // HK) * D, HK * D, count, 0, D, CHUNK, BLOCK_K, EVEN)
        q = load_tile(q_ptr + row * (HQ * D) + h // (HS // HQ) * D, HQ * D, count, 0, D, CHUNK, BLOCK_K, EVEN)
        do = load_tile(do_ptr + (row * HS + h) * V, HS * V, count, start, V, CHUNK, BLOCK_V, EVEN)
        place = (row * HS + h) * CHUNK
        scores = load_tile(scores_ptr + place, HS * CHUNK, count, 0, CHUNK, CHUNK, CHUNK, EVEN)
        inverse = load_tile(inverse_ptr + place, HS * CHUNK, count, 0, CHUNK, CHUNK, CHUNK, EVEN)
        beta = load_vector(factors + n * CHUNK + T * 2, 1, count, CHUNK, EVEN)
        if not DECAYED:
            before, after, carry = factors_of(factors + n * CHUNK, count, T, CHUNK, EVEN)
        old = operand_of(dstate, k.dtype, PRECISION)
        stored = dstates_ptr + ((chunk + n) * HS + h) * (D * V) + start * D
        store_tile(stored, old, D, V - start, 0, D, BLOCK_V, BLOCK_K)
        do = tl.trans(do)  # [BLOCK_V, CHUNK]
        if DECAYED:
            k_end = load_tile(k_end_ptr + (row * HS + h) * D, HS * D, count, 0, D, CHUNK, BLOCK_K, EVEN)
            dwrite = tl.dot(old, tl.trans(k_end), input_precision=PRECISION)
        else:
            dwrite = tl.dot(old, tl.trans(k), input_precision=PRECISION) * after[None, :]
        dwrite = tl.dot(do, scores, dwrite, input_precision=PRECISION)
        dwrite = operand_of(dwrite, k.dtype, PRECISION)
        derror = tl.dot(dwrite, inverse, input_precision=PRECISION)
        stored = operand_of(derror, k.dtype, PRECISION)
        store_tile(
            derrors_ptr + (row * HS + h) * V, tl.trans(stored), HS * V, count, start, V, CHUNK, BLOCK_V
        )
        if DECAYED:
            d = tl.arange(0, BLOCK_K)
            carried = tl.load(carry_ptr + ((chunk + n) * HS + h) * D + d, mask=d < D, other=0.0)
            dstate = tl.dot(do, q, dstate * carried[None, :], input_precision=PRECISION)
            dread = operand_of(derror * -beta[None, :], k.dtype, PRECISION)
        else:
            seen = tl.dot(do, one, input_precision=PRECISION) * (before * SCALE)[None, :]
            seen = operand_of(seen, k.dtype, PRECISION)
            dstate = tl.dot(seen, q, dstate * carry, input_precision=PRECISION)
            dread = operand_of(derror * -(beta * before)[None, :], k.dtype, PRECISION)
        dstate = tl.dot(dread, k, dstate, input_precision=PRECISION)
    tl.store(dinitial_ptr + own + offsets, dstate, mask=mask)
