"""The outputs of a chunk from the state at its start, its scores and its values."""

import triton
import triton.language as tl

from .decays import between, Decay, decays_of, from_start, Gates, KEY, strengths_of
from .operands import load_head, load_skip, Operand, operand_of, products_of, store_head
from .places import chunk_tile, visible_to
from .tile import load_state, load_tile


# fmt: off
@triton.jit
def out_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, logs_ptr, beta_ptr, skip_ptr, scores_ptr, states_ptr, starts_ptr, chunks_ptr, T, TOKENS,
    out_ptr,
    HS: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, HG: tl.constexpr, HB: tl.constexpr, D: tl.constexpr,
    V: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, HEADS: tl.constexpr, SCALE: tl.constexpr,
    DECAY: tl.constexpr, SCORES: tl.constexpr, BETA: tl.constexpr, SKIP: tl.constexpr, SEGMENTS: tl.constexpr, TABLE: tl.constexpr,
    EVEN: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):
    """`scale (q e^G) S + A v + skip v` for one chunk, a tile of value channels and `HEADS` heads that share a query and a key head.

    `SCORES`: `A [.., HS, CHUNK]` is read, all of its columns, and includes scale, decay, mask and write strength; else it is computed here.
    With a decay per key channel, queries already include decay, mask and scale.
    """
    kind: tl.constexpr = Decay(HS, HG, CHUNK, DECAY, EVEN, EXACT)
    index, group, _tile, v0, chunk = chunk_tile(tl.program_id(0), chunks_ptr, T, HS // HEADS, V, BLOCK_V, CHUNK, TABLE)
    h0 = group * HEADS
    q_base = q_ptr + chunk.first * (HQ * D) + h0 // (HS // HQ) * D
    k_base = k_ptr + chunk.first * (HK * D) + h0 // (HS // HK) * D
    visible, sees = visible_to(starts_ptr, chunk, T, CHUNK, SCALE, SEGMENTS)  # [C, C], [C]
    # q k^T, once for all heads that share them.
    if not SCORES:
        products = products_of(q_base, k_base, HQ * D, HK * D, chunk.count, D, CHUNK, BLOCK_K, EVEN, PRECISION)  # [C, C]

    for n in tl.range(0, HEADS):
        h = h0 + n
        v = load_head(v_ptr, chunk, h, v0, Operand(HS, HV, V, CHUNK, BLOCK_V, EVEN))  # [C, BV]
        states = states_ptr + (index.to(tl.int64) * HS + h) * (D * V)
        # scale (q e^G) S: the decay of a token is a factor of its row, so it is applied after the product.
        out = tl.zeros([CHUNK, BLOCK_V], tl.float32)  # [C, BV]
        for d0 in tl.static_range(0, D, BLOCK_K):
            q = load_tile(q_base, HQ * D, chunk.count, d0, D, CHUNK, BLOCK_K, EVEN)  # [C, BK]
            state = load_state(states, d0, v0, D, V, BLOCK_K, BLOCK_V)  # [BK, BV]
            out = tl.dot(q, state, out, input_precision=PRECISION)  # [C, BV]
        if DECAY != KEY:
            high, low, _rest, _whole = decays_of(Gates(g_ptr, logs_ptr, TOKENS), chunk, h, kind)  # [C], [C], [C], []
            out *= (from_start(high, low, kind) * sees)[:, None]
        # A v, A_ij = scale q_i k_j^T e^{G_i - G_j} b_j for j <= i.
        if SCORES:
            scores = load_head(scores_ptr, chunk, h, 0, Operand(HS, HS, CHUNK, CHUNK, CHUNK, EVEN))  # [C, C]
        else:
            scores = products * between(high, low, visible, kind) * SCALE  # [C, C]
            if BETA:
                scores *= strengths_of(beta_ptr, chunk, h, HB, kind)[None, :]
            scores = operand_of(scores, v.dtype, PRECISION)  # [C, C]
        out = tl.dot(scores, v, out, input_precision=PRECISION)  # [C, BV]
        if SKIP:
            skip = load_skip(skip_ptr, chunk.seq, h, v0, HS, V, BLOCK_V)  # [BV]
            out += v.to(tl.float32) * skip[None, :]
        store_head(out_ptr, out, chunk, h, v0, Operand(HS, HS, V, CHUNK, BLOCK_V, EVEN))
