"""The gradients of a chunk whose state heads share queries and keys, as in state spaces with few groups.

For kinds of decay without key channels. What heads share is computed once: the products of keys and queries (`shared_products_kernel`), and
the products of the gradients of queries and keys with them, as those sum over the heads (`shared_channels_kernel`). Each of these kernels holds
few tiles, so that all stay in registers:

- `shared_pairs_kernel`: from pairs of tokens, the gradients of the products, summed over some heads, or those of values;
- `shared_channels_kernel`: the gradients of queries and keys;
- `shared_decays_kernel`: the gradients of decays, whose parts are as in `gradients.py`, and of write strengths.

Rows of pairs are tokens j that were written, columns are tokens i >= j that read.
"""
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from .decays import between, closed, CONSTANT, Decay, decays_of, from_start, Gates, NONE, SCALAR, strengths_of
from .operands import load_head, load_skip, Operand, operand_of, products_of, store_head
from .places import chunk_of, chunk_tile, last_start, readers_of, segment_starts
from .tile import load_state, load_tile, load_transposed, store_tile


# fmt: off
@triton.jit
def shared_products_kernel(
    q_ptr, k_ptr, chunks_ptr, T,
    products_ptr,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, GROUPS: tl.constexpr,
    TABLE: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):
    """`products [chunks, GROUPS, C, C]`: keys times queries for one chunk and group of heads that share both. `MASKED`: queries times keys instead,
    `[B, T, GROUPS, C]`, zero where a token would see a later one."""
    index = tl.program_id(0)
    group = index % GROUPS
    first, count, _seq = chunk_of(index // GROUPS, chunks_ptr, T, CHUNK, TABLE)
    q_base = q_ptr + first * (HQ * D) + group // (GROUPS // HQ) * D
    k_base = k_ptr + first * (HK * D) + group // (GROUPS // HK) * D
    if MASKED:
        products = products_of(q_base, k_base, HQ * D, HK * D, count, D, CHUNK, BLOCK_K, EVEN, PRECISION)  # [C, C]
        # A token sees itself and those before it.
        r = tl.arange(0, CHUNK)  # [C]
        products = tl.where(r[:, None] >= r[None, :], products, 0.0)  # [C, C]
        store_tile(products_ptr + (first * GROUPS + group) * CHUNK, products, GROUPS * CHUNK, count, 0, CHUNK, CHUNK, CHUNK)
    else:
        products = products_of(k_base, q_base, HK * D, HQ * D, count, D, CHUNK, BLOCK_K, EVEN, PRECISION)  # [C, C]
        store_tile(products_ptr + index.to(tl.int64) * (CHUNK * CHUNK), products, CHUNK, CHUNK, 0, CHUNK, CHUNK, CHUNK)


@triton.jit
def shared_pairs_kernel(
    k_ptr, v_ptr, do_ptr, products_ptr, g_ptr, logs_ptr, beta_ptr, skip_ptr, dstates_ptr, starts_ptr, chunks_ptr, T, TOKENS,
    dv_ptr, dproducts_ptr, pairs_ptr, weighed_ptr, dskip_ptr,
    HS: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, HG: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, SCALE: tl.constexpr,
    DECAY: tl.constexpr, BETA: tl.constexpr, SKIP: tl.constexpr, SEGMENTS: tl.constexpr, TABLE: tl.constexpr, EVEN: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr,
):
    """One chunk, `HEADS` heads of a group and one side. The side of products: `dproducts [chunks, HS / HEADS, C, C]`, `dskip [chunks, HS, V]`,
    and from pairs the gradient of G (`pairs [.., HS]`) and of the write strength (`weighed [.., HS]`). The side of values: `dv [.., HS, V]`."""
    slices: tl.constexpr = HS // HEADS
    kind: tl.constexpr = Decay(HS, HG, CHUNK, DECAY, EVEN, EXACT)
    values: tl.constexpr = Operand(HS, HV, V, CHUNK, BLOCK_V, EVEN)
    outs: tl.constexpr = Operand(HS, HS, V, CHUNK, BLOCK_V, EVEN)
    # A program: a chunk, `HEADS` heads, a side (fastest).
    side, index = tl.program_id(0) % 2, tl.program_id(0) // 2
    chunk, slice, _tile, _start, place = chunk_tile(index, chunks_ptr, T, slices, 1, 1, CHUNK, TABLE)
    h0 = slice * HEADS
    first, count = place.first, place.count
    r = tl.arange(0, CHUNK)  # [C]
    visible, leaves = readers_of(r, starts_ptr, place, T, CHUNK, SEGMENTS)  # [C, C], [C]
    group = chunk.to(tl.int64) * GROUPS + h0 // (HS // GROUPS)
    # Keys times queries, which the heads of a group share.
    products = load_tile(products_ptr + group * (CHUNK * CHUNK), CHUNK, CHUNK, 0, CHUNK, CHUNK, CHUNK, True)  # [C, C]

    # The side of products: the gradients of pairs, summed over the heads.
    if side == 0:
        dproducts = tl.zeros([CHUNK, CHUNK], tl.float32)  # [C, C], summed over the heads
        for n in tl.range(0, HEADS):
            h = h0 + n
            high, low, _, _ = decays_of(Gates(g_ptr, logs_ptr, TOKENS), place, h, kind)  # [C], [C], [C], []
            at = (first + r) * HS + h  # [C]
            # v do^T, the gradient of A^T, and so of each of its factors times the others.
            ds = tl.zeros([CHUNK, CHUNK], tl.float32)  # [C, C]
            for v0 in tl.static_range(0, V, BLOCK_V):
                v = load_head(v_ptr, place, h, v0, values)  # [C, BV]
                do = load_head(do_ptr, place, h, v0, outs)  # [C, BV]
                ds = tl.dot(v, tl.trans(do), ds, input_precision=PRECISION)  # [C, C]
                if SKIP:
                    c = v0 + tl.arange(0, BLOCK_V)  # [BV]
                    dskip = tl.sum(do.to(tl.float32) * v.to(tl.float32), axis=0)  # [BV]
                    tl.store(dskip_ptr + (chunk.to(tl.int64) * HS + h) * V + c, dskip, mask=c < V)
            ds *= between(high, low, visible, kind, True) * SCALE
            if BETA:
                beta = strengths_of(beta_ptr, place, h, HB, kind)  # [C]
                tl.store(weighed_ptr + at, tl.sum(ds * products, axis=1), mask=r < count)
                ds *= beta[:, None]
            dproducts += ds
            if DECAY != NONE:
                # A pair has the decays after j up to i: plus in G_i, minus in G_j.
                ds = tl.where(r[:, None] < r[None, :], ds * products, 0.0)  # [C, C]
                tl.store(pairs_ptr + at, tl.sum(ds, axis=0) - tl.sum(ds, axis=1), mask=r < count)
        store_tile(dproducts_ptr + index.to(tl.int64) * (CHUNK * CHUNK), dproducts, CHUNK, CHUNK, 0, CHUNK, CHUNK, CHUNK)

    else:
        # Keys that fit one tile are loaded once for all heads.
        ONCE: tl.constexpr = D <= BLOCK_K
        k_base = k_ptr + first * (HK * D) + h0 // (HS // HK) * D
        if ONCE:
            k = load_tile(k_base, HK * D, count, 0, D, CHUNK, BLOCK_K, EVEN)  # [C, BK]
        for n in tl.range(0, HEADS):
            h = h0 + n
            high, low, rest, _whole = decays_of(Gates(g_ptr, logs_ptr, TOKENS), place, h, kind)  # [C], [C], [C], []
            kept = tl.where(leaves, tl.exp2(rest), 0.0)  # [C], e^{G_C - G_j} b_j
            weights = products * between(high, low, visible, kind, True) * SCALE  # [C, C], A^T
            if BETA:
                beta = strengths_of(beta_ptr, place, h, HB, kind)  # [C]
                kept *= beta
                weights *= beta[:, None]
            weights = operand_of(weights, k_ptr.dtype.element_ty, PRECISION)  # [C, C]
            dstates = dstates_ptr + (chunk.to(tl.int64) * HS + h) * (D * V)
            for v0 in tl.static_range(0, V, BLOCK_V):
                # dv = A^T do + e^{G_C - G} b k dS, over all key channels.
                dv = tl.zeros([CHUNK, BLOCK_V], tl.float32)  # [C, BV]
                for d0 in tl.static_range(0, D, BLOCK_K):
                    if not ONCE:
                        k = load_tile(k_base, HK * D, count, d0, D, CHUNK, BLOCK_K, EVEN)  # [C, BK]
                    dstate = load_state(dstates, d0, v0, D, V, BLOCK_K, BLOCK_V)  # [BK, BV]
                    dv = tl.dot(k, dstate, dv, input_precision=PRECISION)  # [C, BV]
                do = load_head(do_ptr, place, h, v0, outs)  # [C, BV]
                dv = tl.dot(weights, do, dv * kept[:, None], input_precision=PRECISION)  # [C, BV]
                if SKIP:
                    skip = load_skip(skip_ptr, place.seq, h, v0, HS, V, BLOCK_V)  # [BV]
                    dv += do.to(tl.float32) * skip[None, :]
                store_head(dv_ptr, dv, place, h, v0, outs)


@triton.jit
def shared_channels_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dproducts_ptr, g_ptr, logs_ptr, beta_ptr, states_ptr, dstates_ptr, starts_ptr, chunks_ptr, T, TOKENS,
    dq_ptr, dk_ptr, reads_ptr, written_ptr, through_ptr,
    HS: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, HG: tl.constexpr, HB: tl.constexpr, D: tl.constexpr,
    V: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, HEADS: tl.constexpr, SUMMED: tl.constexpr,
    SCALE: tl.constexpr, DECAY: tl.constexpr, BETA: tl.constexpr, SEGMENTS: tl.constexpr, TABLE: tl.constexpr, EVEN: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr,
):
    """One chunk, `HEADS` heads of a group and `BLOCK_K` key channels: `dq [parts, .., HQ, D]` and `dk [parts, .., HK, D]`, one part per program
    that has the head; and what decays and write strengths take part in: `reads [tiles, .., HS]`, the output from the state times its gradient,
    `written [tiles, .., HS]`, what is written to the state times its gradient, but for both factors, and `through [tiles, chunks, HS]`, the same
    of the state that passes. `SUMMED`: the number of heads that each of `dproducts` sums over."""
    tiles: tl.constexpr = (D + BLOCK_K - 1) // BLOCK_K
    slices: tl.constexpr = HS // HEADS
    kind: tl.constexpr = Decay(HS, HG, CHUNK, DECAY, EVEN, EXACT)
    values: tl.constexpr = Operand(HS, HV, V, CHUNK, BLOCK_V, EVEN)
    outs: tl.constexpr = Operand(HS, HS, V, CHUNK, BLOCK_V, EVEN)
    chunk, slice, tile, d0, place = chunk_tile(tl.program_id(0), chunks_ptr, T, slices, D, BLOCK_K, CHUNK, TABLE)
    h0 = slice * HEADS
    chunks = tl.num_programs(0) // (tiles * slices)
    first, count = place.first, place.count
    q_base = q_ptr + first * (HQ * D) + h0 // (HS // HQ) * D
    k_base = k_ptr + first * (HK * D) + h0 // (HS // HK) * D
    r = tl.arange(0, CHUNK)  # [C]
    leaves = r < count  # [C]
    sees = tl.zeros([CHUNK], tl.float32) + SCALE  # [C]
    carried = 1.0
    if SEGMENTS:
        start = last_start(starts_ptr, place, T)
        leaves = leaves & (r >= start)  # [C]
        sees = tl.where(segment_starts(starts_ptr, place, T, CHUNK) < 0, sees, 0.0)  # [C]
        carried = tl.where(start < 0, 1.0, 0.0)
    q = load_tile(q_base, HQ * D, count, d0, D, CHUNK, BLOCK_K, EVEN)  # [C, BK]
    k = load_tile(k_base, HK * D, count, d0, D, CHUNK, BLOCK_K, EVEN)  # [C, BK]
    dq = tl.zeros([CHUNK, BLOCK_K], tl.float32)  # [C, BK]
    dk = tl.zeros([CHUNK, BLOCK_K], tl.float32)  # [C, BK]
    for n in tl.range(0, HEADS):
        h = h0 + n
        high, low, rest, whole = decays_of(Gates(g_ptr, logs_ptr, TOKENS), place, h, kind)  # [C], [C], [C], []
        state = (chunk.to(tl.int64) * HS + h) * (D * V)
        # scale e^{G_i} S do_i and e^{G_C - G_j} b_j dS v_j.
        dq_head = tl.zeros([CHUNK, BLOCK_K], tl.float32)  # [C, BK]
        dk_head = tl.zeros([CHUNK, BLOCK_K], tl.float32)  # [C, BK]
        through = 0.0  # []
        for v0 in tl.static_range(0, V, BLOCK_V):
            do = load_head(do_ptr, place, h, v0, outs)  # [C, BV]
            s = load_state(states_ptr + state, d0, v0, D, V, BLOCK_K, BLOCK_V)  # [BK, BV]
            dq_head = tl.dot(do, tl.trans(s), dq_head, input_precision=PRECISION)  # [C, BK]
            v = load_head(v_ptr, place, h, v0, values)  # [C, BV]
            ds = load_state(dstates_ptr + state, d0, v0, D, V, BLOCK_K, BLOCK_V)  # [BK, BV]
            dk_head = tl.dot(v, tl.trans(ds), dk_head, input_precision=PRECISION)  # [C, BK]
            if DECAY != NONE:
                through += tl.sum(tl.sum(s.to(tl.float32) * ds.to(tl.float32), axis=1), axis=0)
        at = (tile.to(tl.int64) * TOKENS + first + r) * HS + h  # [C]
        if DECAY != NONE or BETA:
            tl.store(written_ptr + at, tl.sum(k.to(tl.float32) * dk_head, axis=1), mask=r < count)
        # What the state gave to queries, with the decay up to each token.
        dq_head *= (from_start(high, low, kind) * sees)[:, None]
        dq += dq_head
        if DECAY != NONE:
            tl.store(reads_ptr + at, tl.sum(q.to(tl.float32) * dq_head, axis=1), mask=r < count)
            tl.store(through_ptr + (tile.to(tl.int64) * chunks + chunk) * HS + h, through * tl.exp2(whole + 0.0) * carried)
        kept = tl.where(leaves, tl.exp2(rest), 0.0)  # [C]
        if BETA:
            kept *= strengths_of(beta_ptr, place, h, HB, kind)
        dk += dk_head * kept[:, None]
    # From pairs of tokens, once for all heads.
    dscores = tl.zeros([CHUNK, CHUNK], tl.float32)  # [C, C], rows are tokens that read
    dproducts = tl.zeros([CHUNK, CHUNK], tl.float32)  # [C, C], its transpose
    base = dproducts_ptr + (chunk.to(tl.int64) * (HS // SUMMED) + h0 // SUMMED) * (CHUNK * CHUNK)
    for n in tl.range(0, HEADS // SUMMED):
        dscores += load_transposed(base + n * (CHUNK * CHUNK), CHUNK, CHUNK, CHUNK)
        dproducts += load_tile(base + n * (CHUNK * CHUNK), CHUNK, CHUNK, 0, CHUNK, CHUNK, CHUNK, True)
    dq = tl.dot(operand_of(dscores, k.dtype, PRECISION), k, dq, input_precision=PRECISION)  # [C, BK]
    dk = tl.dot(operand_of(dproducts, q.dtype, PRECISION), q, dk, input_precision=PRECISION)  # [C, BK]
    part = slice % (HS // HQ // HEADS)  # which part of the shared head's gradient
    row = (part.to(tl.int64) * TOKENS + first) * (HQ * D) + h0 // (HS // HQ) * D
    store_tile(dq_ptr + row, dq, HQ * D, count, d0, D, CHUNK, BLOCK_K)
    part = slice % (HS // HK // HEADS)
    row = (part.to(tl.int64) * TOKENS + first) * (HK * D) + h0 // (HS // HK) * D
    store_tile(dk_ptr + row, dk, HK * D, count, d0, D, CHUNK, BLOCK_K)


@triton.jit
def _written(written_ptr, gates, r, h, chunk, start, kind, TILES: tl.constexpr):
    """Products of what rows `r [C, 1]` write to the states of heads `h [1, BV]` with its gradient, without write strength."""
    known = (r >= 0) & (r < chunk.count) & (h < kind.HS)  # [C, BV]
    total = tl.load(written_ptr + (chunk.first + r) * kind.HS + h, mask=known, other=0.0)  # [C, BV]
    for n in tl.static_range(1, TILES):
        total += tl.load(written_ptr + (n * gates.TOKENS.to(tl.int64) + chunk.first + r) * kind.HS + h, mask=known, other=0.0)  # [C, BV]
    # e^{G_C - G_j}, for rows of the segment that is open at the end of the chunk.
    if kind.DECAY == SCALAR:
        planes: tl.constexpr = 3 if kind.EXACT else 2  # pyright: ignore[reportAssignmentType]
        rest = gates.logs_ptr + ((h // (kind.HS // kind.HG)).to(tl.int64) * planes + 1) * gates.TOKENS + chunk.first + r  # [C, BV]
        total *= tl.exp2(tl.load(rest, mask=known, other=0.0))
    elif kind.DECAY == CONSTANT:
        g = gates.g_ptr + chunk.seq.to(tl.int64) * kind.HG + h // (kind.HS // kind.HG)  # [1, BV]
        g = closed(tl.load(g, mask=h < kind.HS, other=0.0).to(tl.float32))  # [1, BV]
        total *= tl.exp2((chunk.count - 1 - r).to(tl.float32) * g)
    return tl.where(known & (r >= start), total, 0.0)  # [C, BV]


@triton.jit
def shared_decays_kernel(
    g_ptr, logs_ptr, beta_ptr, pairs_ptr, weighed_ptr, reads_ptr, written_ptr, through_ptr, starts_ptr, chunks_ptr, T, TOKENS,
    dg_ptr, dbeta_ptr,
    HS: tl.constexpr, HG: tl.constexpr, HB: tl.constexpr, CHUNK: tl.constexpr, BLOCK_V: tl.constexpr, TILES: tl.constexpr,
    DECAY: tl.constexpr, BETA: tl.constexpr, SEGMENTS: tl.constexpr, TABLE: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr,
):
    """`dg [.., HS]`, or `[chunks, HS]` of a constant, and `dbeta [.., HS]`, for one chunk and `BLOCK_V` state heads."""
    kind: tl.constexpr = Decay(HS, HG, CHUNK, DECAY, EVEN, EXACT)
    chunk, _, _tile, h0, place = chunk_tile(tl.program_id(0), chunks_ptr, T, 1, HS, BLOCK_V, CHUNK, TABLE)
    first, count = place.first, place.count
    chunks = tl.num_programs(0) // tl.cdiv(HS, BLOCK_V)
    r = tl.arange(0, CHUNK)[:, None]  # [C, 1]
    h = h0 + tl.arange(0, BLOCK_V)[None, :]  # [1, BV]
    start = 0
    if SEGMENTS:
        start = last_start(starts_ptr, place, T)
    at = first * HS
    if BETA:
        dbeta = load_tile(weighed_ptr + at, HS, count, h0, HS, CHUNK, BLOCK_V, EVEN)  # [C, BV]
        dbeta += _written(written_ptr, Gates(g_ptr, logs_ptr, TOKENS), r, h, place, start, kind, TILES)
        store_tile(dbeta_ptr + at, dbeta, HS, count, h0, HS, CHUNK, BLOCK_V)
    if DECAY != NONE:
        # The sum from the end of what each token reads yields its own decay's gradient.
        read = load_tile(pairs_ptr + at, HS, count, h0, HS, CHUNK, BLOCK_V, EVEN)  # [C, BV]
        through = tl.zeros([1, BLOCK_V], tl.float32)  # [1, BV]
        for n in tl.static_range(TILES):
            read += load_tile(reads_ptr + n * TOKENS.to(tl.int64) * HS + at, HS, count, h0, HS, CHUNK, BLOCK_V, EVEN)  # [C, BV]
            through += tl.load(through_ptr + (n * chunks + chunk).to(tl.int64) * HS + h, mask=h < HS, other=0.0)
        dg = tl.cumsum(read, axis=0, reverse=True) + through  # [C, BV]
        # A decay applies to what was written before it: the sum up to the token before.
        before = _written(written_ptr, Gates(g_ptr, logs_ptr, TOKENS), r - 1, h, place, start, kind, TILES)  # [C, BV]
        if BETA:
            known = (r >= 1) & (r <= count) & (h < HS)  # [C, BV]
            before *= tl.load(beta_ptr + (first + r - 1) * HB + h // (HS // HB), mask=known, other=0.0).to(tl.float32)
        dg += tl.cumsum(before, axis=0)
        if DECAY == CONSTANT:
            total = tl.sum(tl.where(r < count, dg, 0.0), axis=0)[None, :]  # [1, BV]
            tl.store(dg_ptr + chunk.to(tl.int64) * HS + h, total, mask=h < HS)
        else:
            store_tile(dg_ptr + at, dg, HS, count, h0, HS, CHUNK, BLOCK_V)
