"""The gradients of a chunk's operands, from the state at its start and the gradient in the state at its end.

Kinds of decay without key channels. A decay's gradient is made of terms that all hold that decay as a factor, each exactly once:
pairs of tokens on either side of it, what comes in and is read behind it, what is written before it and goes out, and what passes
through. So no large terms cancel where decays are strong, and no error goes from chunk to chunk.

One program takes either the side of the queries or that of the keys; both run together and find their operands in the cache.
"""

import triton
import triton.language as tl

from .tile import (
    between,
    between_transposed,
    chunk_of,
    decays_of,
    from_start,
    last_start,
    load_tile,
    load_vector,
    operand_of,
    segment_starts,
    store_tile,
)


@triton.jit
def _products(a_ptr, b_ptr, a_stride, b_stride, count, D: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
              PRECISION: tl.constexpr):  # fmt: skip
    """The products of a chunk's rows of two operands, over all key channels."""
    products = tl.zeros([CHUNK, CHUNK], tl.float32)
    for d in tl.static_range(0, D, BLOCK_K):
        a = load_tile(a_ptr, a_stride, count, d, D, CHUNK, BLOCK_K, EVEN)
        b = load_tile(b_ptr, b_stride, count, d, D, CHUNK, BLOCK_K, EVEN)
        products = tl.dot(a, tl.trans(b), products, input_precision=PRECISION)
    return products


@triton.jit
def gradients_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, g_ptr, logs_ptr, beta_ptr, skip_ptr, states_ptr, dstates_ptr, starts_ptr, chunks_ptr, T, TOKENS,
    dq_ptr, dk_ptr, dv_ptr, dg_ptr, dbeta_ptr, dskip_ptr,
    HS: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, HG: tl.constexpr, HB: tl.constexpr, D: tl.constexpr,
    V: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, HEADS: tl.constexpr, SCALE: tl.constexpr,
    DECAY: tl.constexpr, BETA: tl.constexpr, SKIP: tl.constexpr, SEGMENTS: tl.constexpr, TABLE: tl.constexpr, EVEN: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of one chunk, `HEADS` heads that share a query and a key head, `BLOCK_K` key channels and one side.

    `dq [parts, .., HQ, D]` and `dk [parts, .., HK, D]`: a part for each program that has the head. `dg`, `dbeta [2 tiles, .., HS]`: a part
    for each side and tile of key channels; `dg` of a constant is `[2 tiles, chunks, HS]`. `dv [.., HS, V]`, `dskip [chunks, HS, V]`.
    Several heads add to one accumulator of `dq` or `dk`, their decays folded into the other operand.
    """
    tiles: tl.constexpr = (D + BLOCK_K - 1) // BLOCK_K
    slices: tl.constexpr = HS // HEADS
    index = tl.program_id(0)
    side = index % 2
    tile = index // 2 % tiles
    h0 = index // (2 * tiles) % slices * HEADS
    index = index // (2 * tiles * slices)
    chunks = tl.num_programs(0) // (2 * tiles * slices)
    d0 = tile * BLOCK_K
    first, count, seq = chunk_of(index, chunks_ptr, T, CHUNK, TABLE)
    q_base = q_ptr + first * (HQ * D) + h0 // (HS // HQ) * D
    k_base = k_ptr + first * (HK * D) + h0 // (HS // HK) * D
    r = tl.arange(0, CHUNK)

    if side == 0:
        visible = (r[:, None] >= r[None, :]) & (r < count)[:, None]
        sees = tl.zeros([CHUNK], tl.float32) + SCALE
        carried = 1.0
        if SEGMENTS:
            starts = segment_starts(starts_ptr, first, count, seq, T, CHUNK)
            visible = visible & (r[None, :] >= starts[:, None])
            sees = tl.where(starts < 0, sees, 0.0)
            carried = tl.where(last_start(starts_ptr, first, count, seq, T) < 0, 1.0, 0.0)
        dq = tl.zeros([CHUNK, BLOCK_K], tl.float32)
        ds_all = tl.zeros([CHUNK, CHUNK], tl.float32)
        for n in tl.range(0, HEADS):
            h = h0 + n
            high, low, _rest, whole = decays_of(
                g_ptr, logs_ptr, first, count, seq, h, TOKENS, HS, HG, CHUNK, DECAY, EVEN, EXACT
            )
            part = (tile.to(tl.int64) * TOKENS + first + r) * HS + h
            states = states_ptr + (index.to(tl.int64) * HS + h) * (D * V)
            dstates = dstates_ptr + (index.to(tl.int64) * HS + h) * (D * V)
            enter = from_start(high, low, DECAY, EXACT) * sees
            q = load_tile(q_base, HQ * D, count, d0, D, CHUNK, BLOCK_K, EVEN)
            read = tl.zeros([CHUNK], tl.float32)
            ds = tl.zeros([CHUNK, CHUNK], tl.float32)
            if HEADS == 1:
                dq_state = tl.zeros([CHUNK, BLOCK_K], tl.float32)
            through = 0.0
            for v0 in tl.range(0, V, BLOCK_V):
                v = load_tile(
                    v_ptr + first * (HV * V) + h // (HS // HV) * V, HV * V, count, v0, V, CHUNK, BLOCK_V, EVEN
                )
                do = load_tile(do_ptr + first * (HS * V) + h * V, HS * V, count, v0, V, CHUNK, BLOCK_V, EVEN)
                state = load_tile(states + d0 * V, V, D - d0, v0, V, BLOCK_K, BLOCK_V, D % BLOCK_K == 0)
                ds = tl.dot(do, tl.trans(v), ds, input_precision=PRECISION)
                if HEADS == 1:
                    dq_state = tl.dot(do, tl.trans(state), dq_state, input_precision=PRECISION)
                else:
                    do = operand_of(do.to(tl.float32) * enter[:, None], q.dtype, PRECISION)
                    dq = tl.dot(do, tl.trans(state), dq, input_precision=PRECISION)
                    if DECAY != 0:
                        out = tl.dot(q, state, input_precision=PRECISION)
                        read += tl.sum(do.to(tl.float32) * out, axis=1)
                if DECAY != 0:
                    dstate = load_tile(dstates + d0 * V, V, D - d0, v0, V, BLOCK_K, BLOCK_V, D % BLOCK_K == 0)
                    through += tl.sum(tl.sum(state.to(tl.float32) * dstate.to(tl.float32), axis=1), axis=0)
            if HEADS == 1:
                dq_state *= enter[:, None]
                dq += dq_state
                read += tl.sum(q.to(tl.float32) * dq_state, axis=1)

            ds *= between(high, low, visible, DECAY, EXACT) * SCALE
            products = _products(q_base, k_base, HQ * D, HK * D, count, D, CHUNK, BLOCK_K, EVEN, PRECISION)
            if BETA:
                beta = load_vector(beta_ptr + first * HB + h // (HS // HB), HB, count, CHUNK, EVEN)
                dbeta = tl.where(tile == 0, tl.sum(ds * products, axis=0), 0.0)
                tl.store(dbeta_ptr + part, dbeta, mask=r < count)
                ds *= beta[None, :]
            ds_all += ds
            if DECAY != 0:
                strict = tl.where((r[:, None] > r[None, :]) & (tile == 0), ds * products, 0.0)
                read += tl.sum(strict, axis=1) - tl.sum(strict, axis=0)
                dg = tl.cumsum(read, axis=0, reverse=True)
                dg += through * tl.exp2(whole + 0.0) * carried
                if DECAY == 1:
                    total = tl.sum(tl.where(r < count, dg, 0.0), axis=0)
                    tl.store(dg_ptr + (tile.to(tl.int64) * chunks + index) * HS + h, total)
                else:
                    tl.store(dg_ptr + part, dg, mask=r < count)
        k = load_tile(k_base, HK * D, count, d0, D, CHUNK, BLOCK_K, EVEN)
        dq = tl.dot(operand_of(ds_all, k.dtype, PRECISION), k, dq, input_precision=PRECISION)
        number = h0 // HEADS % (HS // HQ // HEADS)
        row = (number.to(tl.int64) * TOKENS + first) * (HQ * D) + h0 // (HS // HQ) * D
        store_tile(dq_ptr + row, dq, HQ * D, count, d0, D, CHUNK, BLOCK_K)

    else:
        visible = (r[:, None] <= r[None, :]) & (r < count)[None, :]
        leaves = r < count
        if SEGMENTS:
            starts = segment_starts(starts_ptr, first, count, seq, T, CHUNK)
            visible = visible & (r[:, None] >= starts[None, :])
            leaves = leaves & (r >= last_start(starts_ptr, first, count, seq, T))
        dk = tl.zeros([CHUNK, BLOCK_K], tl.float32)
        ds_all = tl.zeros([CHUNK, CHUNK], tl.float32)
        for n in tl.range(0, HEADS):
            h = h0 + n
            high, low, rest, _whole = decays_of(
                g_ptr, logs_ptr, first, count, seq, h, TOKENS, HS, HG, CHUNK, DECAY, EVEN, EXACT
            )
            part = ((tiles + tile).to(tl.int64) * TOKENS + first + r) * HS + h
            leave = tl.where(leaves, tl.exp2(rest), 0.0)
            decay = between_transposed(high, low, visible, DECAY, EXACT) * SCALE
            kept = leave
            if BETA:
                beta = load_vector(beta_ptr + first * HB + h // (HS // HB), HB, count, CHUNK, EVEN)
                decay *= beta[:, None]
                kept *= beta
            products = _products(k_base, q_base, HK * D, HQ * D, count, D, CHUNK, BLOCK_K, EVEN, PRECISION)
            weights = operand_of(products * decay, k_ptr.dtype.element_ty, PRECISION)
            k = load_tile(k_base, HK * D, count, d0, D, CHUNK, BLOCK_K, EVEN)
            dstates = dstates_ptr + (index.to(tl.int64) * HS + h) * (D * V)
            ds = tl.zeros([CHUNK, CHUNK], tl.float32)
            written = tl.zeros([CHUNK], tl.float32)
            if HEADS == 1:
                dk_state = tl.zeros([CHUNK, BLOCK_K], tl.float32)
            for v0 in tl.range(0, V, BLOCK_V):
                v = load_tile(
                    v_ptr + first * (HV * V) + h // (HS // HV) * V, HV * V, count, v0, V, CHUNK, BLOCK_V, EVEN
                )
                do = load_tile(do_ptr + first * (HS * V) + h * V, HS * V, count, v0, V, CHUNK, BLOCK_V, EVEN)
                dstate = load_tile(dstates + d0 * V, V, D - d0, v0, V, BLOCK_K, BLOCK_V, D % BLOCK_K == 0)
                ds = tl.dot(v, tl.trans(do), ds, input_precision=PRECISION)
                if HEADS == 1:
                    dk_state = tl.dot(v, tl.trans(dstate), dk_state, input_precision=PRECISION)
                else:
                    kept_v = operand_of(v.to(tl.float32) * kept[:, None], k.dtype, PRECISION)
                    dk = tl.dot(kept_v, tl.trans(dstate), dk, input_precision=PRECISION)
                if (v0 // BLOCK_V) % tiles == tile:
                    dv = tl.zeros([CHUNK, BLOCK_V], tl.float32)
                    if tiles == 1:
                        dv = tl.dot(k, dstate, dv, input_precision=PRECISION)
                    else:
                        for d in tl.static_range(0, D, BLOCK_K):
                            keys = load_tile(k_base, HK * D, count, d, D, CHUNK, BLOCK_K, EVEN)
                            tail = load_tile(
                                dstates + d * V, V, D - d, v0, V, BLOCK_K, BLOCK_V, D % BLOCK_K == 0
                            )
                            dv = tl.dot(keys, tail, dv, input_precision=PRECISION)
                    if HEADS > 1:
                        written += tl.sum(v.to(tl.float32) * dv, axis=1)
                    dv = tl.dot(weights, do, dv * kept[:, None], input_precision=PRECISION)
                    if SKIP:
                        c = v0 + tl.arange(0, BLOCK_V)
                        skip = tl.load(
                            skip_ptr + (seq.to(tl.int64) * HS + h) * V + c, mask=c < V, other=0.0
                        ).to(tl.float32)
                        dv += do.to(tl.float32) * skip[None, :]
                        dskip = tl.sum(do.to(tl.float32) * v.to(tl.float32), axis=0)
                        tl.store(dskip_ptr + (index.to(tl.int64) * HS + h) * V + c, dskip, mask=c < V)
                    store_tile(dv_ptr + first * (HS * V) + h * V, dv, HS * V, count, v0, V, CHUNK, BLOCK_V)
            ds_all += ds * decay
            if DECAY != 0 or BETA:
                if HEADS == 1:
                    written += tl.sum(k.to(tl.float32) * dk_state, axis=1)
                if BETA:
                    tl.store(dbeta_ptr + part, written * leave, mask=r < count)
                if DECAY != 0:
                    written = tl.where(r[:, None] > r[None, :], (written * kept)[None, :], 0.0)
                    dg = tl.sum(written, axis=1)
                    if DECAY == 1:
                        total = tl.sum(tl.where(r < count, dg, 0.0), axis=0)
                        tl.store(dg_ptr + ((tiles + tile).to(tl.int64) * chunks + index) * HS + h, total)
                    else:
                        tl.store(dg_ptr + part, dg, mask=r < count)
            if HEADS == 1:
                dk += dk_state * kept[:, None]
        q = load_tile(q_base, HQ * D, count, d0, D, CHUNK, BLOCK_K, EVEN)
        dk = tl.dot(operand_of(ds_all, q.dtype, PRECISION), q, dk, input_precision=PRECISION)
        number = h0 // HEADS % (HS // HK // HEADS)
        row = (number.to(tl.int64) * TOKENS + first) * (HK * D) + h0 // (HS // HK) * D
        store_tile(dk_ptr + row, dk, HK * D, count, d0, D, CHUNK, BLOCK_K)
