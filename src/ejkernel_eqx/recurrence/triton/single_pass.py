"""The forward pass of a linear member in one kernel, the state in registers: where heads and value channels are enough programs."""

import triton
import triton.language as tl

from .tile import (
    between,
    decays_of,
    from_start,
    last_start,
    load_tile,
    load_vector,
    operand_of,
    segment_starts,
    sequence_of,
    store_tile,
)


@triton.jit
def single_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, logs_ptr, beta_ptr, skip_ptr, initial_ptr, starts_ptr, bounds_ptr, T, TOKENS,
    out_ptr, final_ptr,
    HS: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, HG: tl.constexpr, HB: tl.constexpr, D: tl.constexpr,
    V: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, SCALE: tl.constexpr, DECAY: tl.constexpr,
    BETA: tl.constexpr, SKIP: tl.constexpr, INITIAL: tl.constexpr, SEGMENTS: tl.constexpr, TABLE: tl.constexpr, EVEN: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The outputs and the final state of one sequence and head, some value channels (`BLOCK_K >= D`)."""
    tiles: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    index = tl.program_id(0)
    v0 = (index % tiles) * BLOCK_V
    index = index // tiles
    h = index % HS
    seq = index // HS
    first, length, _ = sequence_of(seq, bounds_ptr, T, CHUNK, TABLE)
    own = index.to(tl.int64) * (D * V)
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if INITIAL:
        state = load_tile(initial_ptr + own, V, D, v0, V, BLOCK_K, BLOCK_V, D == BLOCK_K).to(tl.float32)
    r = tl.arange(0, CHUNK)
    c = v0 + tl.arange(0, BLOCK_V)
    if SKIP:
        skip = tl.load(skip_ptr + (seq.to(tl.int64) * HS + h) * V + c, mask=c < V, other=0.0).to(tl.float32)

    # Where it is the same for all chunks.
    fixed: tl.constexpr = DECAY < 2 and EVEN and not SEGMENTS
    if fixed:
        high, low, rest, whole = decays_of(
            g_ptr, logs_ptr, first, seq * 0 + CHUNK, seq, h, TOKENS, HS, HG, CHUNK, DECAY, EVEN, EXACT
        )
        pairs = between(high, low, r[:, None] >= r[None, :], DECAY, EXACT) * SCALE
        enter = from_start(high, low, DECAY, EXACT) * SCALE
        leave = tl.exp2(rest)
        total = tl.exp2(whole + 0.0)

    for n in tl.range(0, tl.cdiv(length, CHUNK)):
        row = first + n * CHUNK
        count = tl.minimum(length - n * CHUNK, CHUNK)
        q = load_tile(q_ptr + row * (HQ * D) + h // (HS // HQ) * D, HQ * D, count, 0, D, CHUNK, BLOCK_K, EVEN)
        k = load_tile(k_ptr + row * (HK * D) + h // (HS // HK) * D, HK * D, count, 0, D, CHUNK, BLOCK_K, EVEN)
        v = load_tile(
            v_ptr + row * (HV * V) + h // (HS // HV) * V, HV * V, count, v0, V, CHUNK, BLOCK_V, EVEN
        )
        if not fixed:
            high, low, rest, whole = decays_of(
                g_ptr, logs_ptr, row, count, seq, h, TOKENS, HS, HG, CHUNK, DECAY, EVEN, EXACT
            )
            visible = r[:, None] >= r[None, :]
            if not EVEN:
                visible = visible & (r < count)[:, None]
            enter = from_start(high, low, DECAY, EXACT) * SCALE
            leave = tl.exp2(rest)
            total = tl.exp2(whole + 0.0)
            if SEGMENTS:
                starts = segment_starts(starts_ptr, row, count, seq, T, CHUNK)
                start = last_start(starts_ptr, row, count, seq, T)
                visible = visible & (r[None, :] >= starts[:, None])
                enter = tl.where(starts < 0, enter, 0.0)
                leave = tl.where(r >= start, leave, 0.0)
                total = tl.where(start < 0, total, 0.0)
            pairs = between(high, low, visible, DECAY, EXACT) * SCALE
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * pairs
        weight = leave
        if BETA:
            beta = load_vector(beta_ptr + row * HB + h // (HS // HB), HB, count, CHUNK, EVEN)
            scores *= beta[None, :]
            weight *= beta
        read = operand_of(state, q.dtype, PRECISION)
        out = tl.dot(q, read, input_precision=PRECISION)
        out *= enter[:, None]
        scores = operand_of(scores, v.dtype, PRECISION)
        out = tl.dot(scores, v, out, input_precision=PRECISION)
        if SKIP:
            out += v.to(tl.float32) * skip[None, :]
        store_tile(out_ptr + row * (HS * V) + h * V, out, HS * V, count, v0, V, CHUNK, BLOCK_V)
        if DECAY != 0 or BETA or SEGMENTS:
            v = operand_of(v.to(tl.float32) * weight[:, None], k.dtype, PRECISION)
        state = tl.dot(tl.trans(k), v, state * total, input_precision=PRECISION)

    store_tile(final_ptr + own, state, V, D, v0, V, BLOCK_K, BLOCK_V)
