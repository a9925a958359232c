"""The outputs of a chunk, from the state at its start, its scores and its values."""

import triton
import triton.language as tl

from .tile import (
    between,
    chunk_of,
    decays_of,
    from_start,
    load_tile,
    load_vector,
    operand_of,
    segment_starts,
    store_tile,
)


@triton.jit
def out_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, logs_ptr, beta_ptr, skip_ptr, scores_ptr, states_ptr, starts_ptr, chunks_ptr, T, TOKENS,
    out_ptr,
    HS: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, HG: tl.constexpr, HB: tl.constexpr, D: tl.constexpr,
    V: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, HEADS: tl.constexpr, SCALE: tl.constexpr,
    DECAY: tl.constexpr, SCORES: tl.constexpr, BETA: tl.constexpr, SKIP: tl.constexpr, SEGMENTS: tl.constexpr, TABLE: tl.constexpr,
    EVEN: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`scale (q e^G) S + A v + skip v` of one chunk, some value channels and `HEADS` heads that share a query and a key head.

    `SCORES`: `A [.., HS, CHUNK]` is read, all of its columns, with scale, decay, mask and write strength in it; else made here. With a
    decay per key channel queries come with it, mask and scale inside.
    """
    tiles_v: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    index = tl.program_id(0)
    v0 = (index % tiles_v) * BLOCK_V
    index = index // tiles_v
    h0 = (index % (HS // HEADS)) * HEADS
    index = index // (HS // HEADS)
    first, count, seq = chunk_of(index, chunks_ptr, T, CHUNK, TABLE)
    q_base = q_ptr + first * (HQ * D) + h0 // (HS // HQ) * D
    k_base = k_ptr + first * (HK * D) + h0 // (HS // HK) * D
    r = tl.arange(0, CHUNK)
    visible = (r[:, None] >= r[None, :]) & (r < count)[:, None]
    sees = tl.zeros([CHUNK], tl.float32) + SCALE
    if SEGMENTS:
        starts = segment_starts(starts_ptr, first, count, seq, T, CHUNK)
        visible = visible & (r[None, :] >= starts[:, None])
        sees = tl.where(starts < 0, sees, 0.0)
    if not SCORES:
        products = tl.zeros([CHUNK, CHUNK], tl.float32)
        for d0 in tl.static_range(0, D, BLOCK_K):
            q = load_tile(q_base, HQ * D, count, d0, D, CHUNK, BLOCK_K, EVEN)
            k = load_tile(k_base, HK * D, count, d0, D, CHUNK, BLOCK_K, EVEN)
            products = tl.dot(q, tl.trans(k), products, input_precision=PRECISION)

    for n in tl.range(0, HEADS):
        h = h0 + n
        v = load_tile(
            v_ptr + first * (HV * V) + h // (HS // HV) * V, HV * V, count, v0, V, CHUNK, BLOCK_V, EVEN
        )
        states = states_ptr + (index.to(tl.int64) * HS + h) * (D * V)
        out = tl.zeros([CHUNK, BLOCK_V], tl.float32)
        for d0 in tl.static_range(0, D, BLOCK_K):
            q = load_tile(q_base, HQ * D, count, d0, D, CHUNK, BLOCK_K, EVEN)
            state = load_tile(states + d0 * V, V, D - d0, v0, V, BLOCK_K, BLOCK_V, D % BLOCK_K == 0)
            out = tl.dot(q, state, out, input_precision=PRECISION)
        if DECAY != 3:
            high, low, _rest, _whole = decays_of(
                g_ptr, logs_ptr, first, count, seq, h, TOKENS, HS, HG, CHUNK, DECAY, EVEN, EXACT
            )
            out *= (from_start(high, low, DECAY, EXACT) * sees)[:, None]
        if SCORES:
            scores = load_tile(
                scores_ptr + first * (HS * CHUNK) + h * CHUNK, HS * CHUNK, count, 0, CHUNK, CHUNK, CHUNK, EVEN
            )
        else:
            scores = products * between(high, low, visible, DECAY, EXACT) * SCALE
            if BETA:
                scores *= load_vector(beta_ptr + first * HB + h // (HS // HB), HB, count, CHUNK, EVEN)[
                    None, :
                ]
            scores = operand_of(scores, v.dtype, PRECISION)
        out = tl.dot(scores, v, out, input_precision=PRECISION)
        if SKIP:
            c = v0 + tl.arange(0, BLOCK_V)
            skip = tl.load(skip_ptr + (seq.to(tl.int64) * HS + h) * V + c, mask=c < V, other=0.0).to(
                tl.float32
            )
            out += v.to(tl.float32) * skip[None, :]
        store_tile(out_ptr + first * (HS * V) + h * V, out, HS * V, count, v0, V, CHUNK, BLOCK_V)
