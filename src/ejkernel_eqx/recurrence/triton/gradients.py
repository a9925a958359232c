"""The gradients of a chunk's operands, from the state at its start and the gradient with respect to the state at its end.

For kinds of decay without key channels, head by head; for heads that share queries and keys, `shared_gradients.py` does the same. A decay's
gradient is a sum of terms that each contain that decay as a factor exactly once: pairs of tokens on either side of it, the incoming state read
after it, tokens written before it that reach the outgoing state, and the state that passes through. So no large terms cancel when decays are
strong, and no error carries over from chunk to chunk.

A program computes either the query side or the key side; both run side by side and find their operands in the cache.
"""

import triton
import triton.language as tl

from .decays import between, CONSTANT, Decay, decays_of, from_start, Gates, NONE, strengths_of
from .operands import load_head, load_skip, Operand, operand_of, products_of, store_head
from .places import chunk_tile, last_start, readers_of, visible_to
from .tile import load_state, load_tile, store_tile


# fmt: off
@triton.jit
def gradients_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, g_ptr, logs_ptr, beta_ptr, skip_ptr, states_ptr, dstates_ptr, starts_ptr, chunks_ptr, T, TOKENS,
    dq_ptr, dk_ptr, dv_ptr, dg_ptr, dbeta_ptr, dskip_ptr,
    HS: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, HG: tl.constexpr, HB: tl.constexpr, D: tl.constexpr,
    V: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, SCALE: tl.constexpr,
    DECAY: tl.constexpr, BETA: tl.constexpr, SKIP: tl.constexpr, SEGMENTS: tl.constexpr, TABLE: tl.constexpr, EVEN: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr,
):
    """Gradients of one chunk, state head, `BLOCK_K` key channels and one side.

    `dq [parts, .., HQ, D]` and `dk [parts, .., HK, D]`: one part per state head that shares the head. `dg`, `dbeta [2 tiles, .., HS]`: one
    part per side and tile of key channels; `dg` of a constant is `[2 tiles, chunks, HS]`. `dv [.., HS, V]`, `dskip [chunks, HS, V]`.
    """
    # A program: a chunk, a state head, a tile of key channels, a side (fastest).
    tiles: tl.constexpr = (D + BLOCK_K - 1) // BLOCK_K
    kind: tl.constexpr = Decay(HS, HG, CHUNK, DECAY, EVEN, EXACT)
    values: tl.constexpr = Operand(HS, HV, V, CHUNK, BLOCK_V, EVEN)
    outs: tl.constexpr = Operand(HS, HS, V, CHUNK, BLOCK_V, EVEN)
    side = tl.program_id(0) % 2
    index, h, tile, d0, at = chunk_tile(tl.program_id(0) // 2, chunks_ptr, T, HS, D, BLOCK_K, CHUNK, TABLE)
    chunks = tl.num_programs(0) // (2 * tiles * HS)
    first, count = at.first, at.count
    q_base = q_ptr + first * (HQ * D) + h // (HS // HQ) * D
    k_base = k_ptr + first * (HK * D) + h // (HS // HK) * D
    states = states_ptr + (index.to(tl.int64) * HS + h) * (D * V)
    dstates = dstates_ptr + (index.to(tl.int64) * HS + h) * (D * V)
    r = tl.arange(0, CHUNK)  # [C]

    # The query side: rows of pairs are tokens i that read, columns are tokens j <= i that were written.
    if side == 0:
        visible, sees = visible_to(starts_ptr, at, T, CHUNK, SCALE, SEGMENTS)  # [C, C], [C]
        carried = 1.0
        if SEGMENTS:
            carried = tl.where(last_start(starts_ptr, at, T) < 0, 1.0, 0.0)
        high, low, _rest, whole = decays_of(Gates(g_ptr, logs_ptr, TOKENS), at, h, kind)  # [C], [C], [C], []
        part = (tile.to(tl.int64) * TOKENS + first + r) * HS + h  # [C]
        ds = tl.zeros([CHUNK, CHUNK], tl.float32)  # [C, C]
        dq = tl.zeros([CHUNK, BLOCK_K], tl.float32)  # [C, BK]
        through = 0.0  # []
        # do v^T, the contribution of the state to q_i, scale e^{G_i} S do_i, and that of the state passing through, sum (S o dS).
        for v0 in tl.range(0, V, BLOCK_V):
            v = load_head(v_ptr, at, h, v0, values)  # [C, BV]
            do = load_head(do_ptr, at, h, v0, outs)  # [C, BV]
            state = load_state(states, d0, v0, D, V, BLOCK_K, BLOCK_V)  # [BK, BV]
            ds = tl.dot(do, tl.trans(v), ds, input_precision=PRECISION)  # [C, C]
            dq = tl.dot(do, tl.trans(state), dq, input_precision=PRECISION)  # [C, BK]
            if DECAY != NONE:
                dstate = load_state(dstates, d0, v0, D, V, BLOCK_K, BLOCK_V)  # [BK, BV]
                through += tl.sum(tl.sum(state.to(tl.float32) * dstate.to(tl.float32), axis=1), axis=0)
        dq *= (from_start(high, low, kind) * sees)[:, None]
        if DECAY != NONE:
            q = load_tile(q_base, HQ * D, count, d0, D, CHUNK, BLOCK_K, EVEN)  # [C, BK]
            read = tl.sum(q.to(tl.float32) * dq, axis=1)  # [C], the gradient of G_i

        # The gradient of q_i k_j^T, and from it those of beta and of the decays between j and i.
        ds *= between(high, low, visible, kind) * SCALE
        if DECAY != NONE or BETA:
            products = products_of(q_base, k_base, HQ * D, HK * D, count, D, CHUNK, BLOCK_K, EVEN, PRECISION)  # [C, C]
        if BETA:
            beta = strengths_of(beta_ptr, at, h, HB, kind)  # [C]
            dbeta = tl.where(tile == 0, tl.sum(ds * products, axis=0), 0.0)  # [C]; `products` cover all channels, so only one tile counts
            tl.store(dbeta_ptr + part, dbeta, mask=r < count)
            ds *= beta[None, :]
        if DECAY != NONE:
            # A pair has the decays after j up to i: plus in G_i, minus in G_j. The sum from the end yields each token's own gradient.
            strict = tl.where((r[:, None] > r[None, :]) & (tile == 0), ds * products, 0.0)  # [C, C]
            read += tl.sum(strict, axis=1) - tl.sum(strict, axis=0)
            dg = tl.cumsum(read, axis=0, reverse=True)  # [C]
            dg += through * tl.exp2(whole + 0.0) * carried
            if DECAY == CONSTANT:
                total = tl.sum(tl.where(r < count, dg, 0.0), axis=0)
                tl.store(dg_ptr + (tile.to(tl.int64) * chunks + index) * HS + h, total)
            else:
                tl.store(dg_ptr + part, dg, mask=r < count)
        k = load_tile(k_base, HK * D, count, d0, D, CHUNK, BLOCK_K, EVEN)  # [C, BK]
        dq = tl.dot(operand_of(ds, k.dtype, PRECISION), k, dq, input_precision=PRECISION)  # [C, BK]
        number = h % (HS // HQ)  # which part of the shared head's gradient
        row = (number.to(tl.int64) * TOKENS + first) * (HQ * D) + h // (HS // HQ) * D
        store_tile(dq_ptr + row, dq, HQ * D, count, d0, D, CHUNK, BLOCK_K)

    else:
        # The key side: rows of pairs are tokens j that were written, columns are tokens i >= j that read.
        visible, leaves = readers_of(r, starts_ptr, at, T, CHUNK, SEGMENTS)  # [C, C], [C]
        high, low, rest, _whole = decays_of(Gates(g_ptr, logs_ptr, TOKENS), at, h, kind)  # [C], [C], [C], []
        part = ((tiles + tile).to(tl.int64) * TOKENS + first + r) * HS + h  # [C]
        leave = tl.where(leaves, tl.exp2(rest), 0.0)  # [C], e^{G_C - G_j}
        decay = between(high, low, visible, kind, True) * SCALE  # [C, C]
        kept = leave  # [C], with beta
        if BETA:
            beta = strengths_of(beta_ptr, at, h, HB, kind)  # [C]
            decay *= beta[:, None]
            kept *= beta
        products = products_of(k_base, q_base, HK * D, HQ * D, count, D, CHUNK, BLOCK_K, EVEN, PRECISION)  # [C, C]
        weights = operand_of(products * decay, k_ptr.dtype.element_ty, PRECISION)  # [C, C], A^T
        k = load_tile(k_base, HK * D, count, d0, D, CHUNK, BLOCK_K, EVEN)  # [C, BK]
        ds = tl.zeros([CHUNK, CHUNK], tl.float32)  # [C, C]
        dk = tl.zeros([CHUNK, BLOCK_K], tl.float32)  # [C, BK]
        # v do^T, and the contribution to k_j of the state it is written to, e^{G_C - G_j} b_j dS v_j.
        for v0 in tl.range(0, V, BLOCK_V):
            v = load_head(v_ptr, at, h, v0, values)  # [C, BV]
            do = load_head(do_ptr, at, h, v0, outs)  # [C, BV]
            dstate = load_state(dstates, d0, v0, D, V, BLOCK_K, BLOCK_V)  # [BK, BV]
            ds = tl.dot(v, tl.trans(do), ds, input_precision=PRECISION)  # [C, C]
            dk = tl.dot(v, tl.trans(dstate), dk, input_precision=PRECISION)  # [C, BK]
            # dv = A^T do + e^{G_C - G} b k dS, over all key channels: the programs of a chunk divide the value channels among themselves.
            if (v0 // BLOCK_V) % tiles == tile:
                dv = tl.zeros([CHUNK, BLOCK_V], tl.float32)  # [C, BV]
                if tiles == 1:
                    dv = tl.dot(k, dstate, dv, input_precision=PRECISION)  # [C, BV]
                else:
                    for d in tl.static_range(0, D, BLOCK_K):
                        keys = load_tile(k_base, HK * D, count, d, D, CHUNK, BLOCK_K, EVEN)  # [C, BK]
                        tail = load_state(dstates, d, v0, D, V, BLOCK_K, BLOCK_V)  # [BK, BV]
                        dv = tl.dot(keys, tail, dv, input_precision=PRECISION)  # [C, BV]
                dv = tl.dot(weights, do, dv * kept[:, None], input_precision=PRECISION)  # [C, BV]
                if SKIP:
                    c = v0 + tl.arange(0, BLOCK_V)  # [BV]
                    skip = load_skip(skip_ptr, at.seq, h, v0, HS, V, BLOCK_V)  # [BV]
                    dv += do.to(tl.float32) * skip[None, :]
                    dskip = tl.sum(do.to(tl.float32) * v.to(tl.float32), axis=0)  # [BV]
                    tl.store(dskip_ptr + (index.to(tl.int64) * HS + h) * V + c, dskip, mask=c < V)
                store_head(dv_ptr, dv, at, h, v0, outs)
        ds *= decay
        if DECAY != NONE or BETA:
            written = tl.sum(k.to(tl.float32) * dk, axis=1)  # [C], this tile's part of k_j^T dS v_j
            if BETA:
                tl.store(dbeta_ptr + part, written * leave, mask=r < count)
            if DECAY != NONE:
                # A token's decay applies to what was written before it: row t takes the columns before t.
                written = tl.where(r[:, None] > r[None, :], (written * kept)[None, :], 0.0)  # [C, C]
                dg = tl.sum(written, axis=1)  # [C]
                if DECAY == CONSTANT:
                    total = tl.sum(tl.where(r < count, dg, 0.0), axis=0)
                    tl.store(dg_ptr + ((tiles + tile).to(tl.int64) * chunks + index) * HS + h, total)
                else:
                    tl.store(dg_ptr + part, dg, mask=r < count)
        dk *= kept[:, None]
        q = load_tile(q_base, HQ * D, count, d0, D, CHUNK, BLOCK_K, EVEN)  # [C, BK]
        dk = tl.dot(operand_of(ds, q.dtype, PRECISION), q, dk, input_precision=PRECISION)  # [C, BK]
        number = h % (HS // HK)  # which part of the shared head's gradient
        row = (number.to(tl.int64) * TOKENS + first) * (HK * D) + h // (HS // HK) * D
        store_tile(dk_ptr + row, dk, HK * D, count, d0, D, CHUNK, BLOCK_K)
