"""The Triton backward: three kernels, each recomputing the weights from `lse`, none with atomics.

`lse` is in log2 units, with `+inf` for a query that sees no key, so that its weights are zero without a branch.
"""

import triton
import triton.language as tl

from .tile import (
    head_scalars,
    keep,
    key_tiles,
    listed_program,
    listed_tiles,
    lists_partly,
    load_bits,
    load_queries,
    load_rows,
    map_of,
    OVER_HEADS,
    OVER_KEYS,
    OVER_QUERIES,
    over_scores,
    program,
    query_rows,
    query_tiles,
    scores,
    store_rows,
    visible,
)


@triton.jit
def _weights(qk, lse, i, j, position, start, end, q_segment, k_segment, slope, bias_ptr, mask_ptr, T, S, listed, map_row,
             SCALE: tl.constexpr, CAP: tl.constexpr, FAST_TANH: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
             BIAS: tl.constexpr, ALIBI: tl.constexpr, MASK: tl.constexpr, ROWS: tl.constexpr, SEGMENTS: tl.constexpr,
             FOLDED: tl.constexpr, MULTIPLIER: tl.constexpr, MASKED: tl.constexpr, BOUND: tl.constexpr,
             BITS: tl.constexpr, MAP_Q: tl.constexpr, MAP_K: tl.constexpr):  # fmt: skip
    """The softmax weights of a tile, its tanh, and which of its entries are visible."""
    s, t = scores(qk, i, j, position, slope, bias_ptr, T, S, SCALE, CAP, FAST_TANH, BIAS, ALIBI, FOLDED)  # [BQ, BK] or [BK, BQ], both  # fmt: skip
    seen = True
    if MASKED:
        seen = visible(i, j, position, start, end, q_segment, k_segment, mask_ptr, T, S, listed, map_row,
                       LEFT, RIGHT, ROWS, SEGMENTS, MASK, BOUND, BITS, MAP_Q, MAP_K)  # of the shape of qk  # fmt: skip
        s = tl.where(seen, s, float("-inf"))
    exponent = s * MULTIPLIER - lse  # of the shape of qk
    if BIAS:
        # Where all scores of a row are large, the lse is rounded by more than 1.
        exponent = tl.minimum(exponent, 0.0)
    return tl.exp2(exponent), t, seen  # of the shape of qk


@triton.jit
def _score_gradient(p, dp, delta, t, seen, kept,
                    CAP: tl.constexpr, DROPOUT: tl.constexpr, KEEP_SCALE: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Gradients of a tile's scores before (with respect to `scale * q . k`) and after the soft cap."""
    if DROPOUT > 0:
        dp = tl.where(kept, dp * KEEP_SCALE, 0.0)
    after = p * (dp - delta)  # ds = w (dp - delta), of the shape of p
    # Invisible entries may hold NaN, which multiplying by p = 0 does not remove.
    if MASKED:
        after = tl.where(seen, after, 0.0)
    before = after
    if CAP > 0:
        before = after * (1.0 - t * t)  # d tanh = 1 - tanh^2
        if MASKED:
            before = tl.where(seen, before, 0.0)
    return before, after


@triton.jit
def _query_gradient_tiles(
    dq, dq_rope, dslope, q, q_rope, do, lse, delta,  # [BQ, BLOCK_D], [BQ, BLOCK_R], [], the shapes of dq and dq_rope, [BQ, BLOCK_V], [BQ], [BQ]
    lo, hi, entry, k_base, rope_base, v_base,
    bias_ptr, mask_ptr, kv_segments_ptr, key_seen_ptr, list_ptr, pattern_ptr, bits_ptr, map_ptr, seed0, seed1, ahead, slope,
    i, position, start, end, q_segment, T, S,  # the queries' numbers, [BQ, 1] each
    K: tl.constexpr, D: tl.constexpr, R: tl.constexpr, V: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
    SCALE: tl.constexpr, CAP: tl.constexpr, FAST_TANH: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    BIAS: tl.constexpr, ALIBI: tl.constexpr, MASK: tl.constexpr, ROWS: tl.constexpr, SEGMENTS: tl.constexpr,
    DROPOUT: tl.constexpr, KEEP_SCALE: tl.constexpr, PRECISION: tl.constexpr, FOLDED: tl.constexpr, MULTIPLIER: tl.constexpr,
    LISTED: tl.constexpr, BITS: tl.constexpr, MAP_Q: tl.constexpr, MAP_K: tl.constexpr,
    EVEN_Q: tl.constexpr, EVEN_K: tl.constexpr, CLEAN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    # Adds key tiles `lo .. hi`, or those that these entries of the list name, to the gradients of a query tile.
    guarded: tl.constexpr = ROWS or SEGMENTS
    for at in tl.range(lo, hi):
        n = at
        if LISTED:
            n = entry
            entry = tl.load(list_ptr + at + 1).to(tl.int32)
        first = n * BK
        columns = first + tl.arange(0, BK)  # [BK]
        j = columns[None, :]  # [1, BK]
        ok = columns < S  # [BK]
        k_segment = j
        # Keys that no query may see can hold anything, so they are not read.
        if MASKED and guarded:
            ok = ok & (tl.load(key_seen_ptr + columns, mask=ok, other=0) != 0)
            if SEGMENTS:
                k_segment = tl.load(kv_segments_ptr + columns, mask=columns < S, other=-1)[None, :]  # [1, BK]
        k = load_rows(k_base, first, K * D, ok, S, D, BK, BLOCK_D, MASKED and not EVEN_K, MASKED and guarded)  # [BK, BLOCK_D]  # fmt: skip
        v = load_rows(v_base, first, K * V, ok, S, V, BK, BLOCK_V, MASKED and not EVEN_K, MASKED and guarded)  # [BK, BLOCK_V]  # fmt: skip
        qk = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BQ, BK]
        if R > 0:
            rope = load_rows(rope_base, first, R, ok, S, R, BK, BLOCK_R, MASKED and not EVEN_K, MASKED and guarded)  # [BK, BLOCK_R]  # fmt: skip
            qk = tl.dot(q_rope, tl.trans(rope), qk, input_precision=PRECISION)  # [BQ, BK]
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)  # [BQ, BK]
        listed = True
        if MASKED and BITS:
            listed = load_bits(bits_ptr, tl.load(pattern_ptr + at), BQ, BK, BITS)  # [BQ, BK]
        p, t, seen = _weights(
            qk, lse[:, None], i, j, position, start, end, q_segment, k_segment, slope, bias_ptr, mask_ptr, T, S, listed, map_ptr,
            SCALE, CAP, FAST_TANH, LEFT, RIGHT, BIAS, ALIBI, MASK, ROWS, SEGMENTS, FOLDED, MULTIPLIER, MASKED, not EVEN_K, BITS, MAP_Q, MAP_K)  # [BQ, BK]  # fmt: skip
        kept = True
        if DROPOUT > 0:
            kept = keep(seed0, seed1, ahead, position, j, DROPOUT)  # [BQ, BK]
        ds, after = _score_gradient(p, dp, delta[:, None], t, seen, kept, CAP, DROPOUT, KEEP_SCALE, MASKED)  # [BQ, BK]  # fmt: skip
        if ALIBI:
            dslope += tl.sum(tl.sum(after * (j - position).to(tl.float32), axis=1), axis=0)
        # A key that no row of the tile sees may hold NaN, and 0 * NaN is NaN.
        clean: tl.constexpr = MASKED and CLEAN and (MASK or LISTED)
        if clean:
            some = (tl.max(seen.to(tl.int32), axis=0) > 0)[:, None]  # [BK, 1]
            k = tl.where(some, k, 0.0)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)  # [BQ, BLOCK_D]
        if R > 0:
            if clean:
                rope = tl.where(some, rope, 0.0)
            dq_rope = tl.dot(ds.to(k.dtype), rope, dq_rope, input_precision=PRECISION)  # [BQ, BLOCK_R]
    return dq, dq_rope, dslope


@triton.jit
def query_gradient_kernel(
    q_ptr, k_ptr, k_rope_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr,  # do as out, lse and delta [B, H, T]; all else as in the forward kernel
    bias_ptr, slopes_ptr, mask_ptr, q_segments_ptr, kv_segments_ptr, start_ptr, end_ptr, position_ptr, query_seen_ptr, key_seen_ptr,
    seeds_ptr, tiles_ptr, row_ptr, list_ptr, pattern_ptr, bits_ptr, map_ptr, T, S, offset, bias_run, bias_rows, mask_run, mask_rows,
    dq_ptr, dslope_ptr,  # [B, T, H, D + R], [B, H, tiles]
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, R: tl.constexpr, V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    SCALE: tl.constexpr, CAP: tl.constexpr, FAST_TANH: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    BIAS: tl.constexpr, ALIBI: tl.constexpr, MASK: tl.constexpr, ROWS: tl.constexpr, SEGMENTS: tl.constexpr,
    DROPOUT: tl.constexpr, SEED_WORDS: tl.constexpr, KEEP_SCALE: tl.constexpr, PRECISION: tl.constexpr, FOLDED: tl.constexpr, MULTIPLIER: tl.constexpr,
    LISTED: tl.constexpr, BITS: tl.constexpr, MAP_HEADS: tl.constexpr, MAP_Q: tl.constexpr, MAP_K: tl.constexpr,
    EVEN_Q: tl.constexpr, EVEN_K: tl.constexpr, GUARD: tl.constexpr, CLEAN: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """`dq` of one query tile and head, and the tile's share of the slope's gradient."""
    # The tiles with the most keys first: of causal masks the last ones.
    if LISTED:
        m, bh, count, at = listed_program(tiles_ptr, T, BQ, GROUP)
    else:
        m, bh, count = program(T, BQ, GROUP)
        m = count - 1 - m
    b = (bh // H).to(tl.int64)
    h = bh % H
    first = m * BQ
    rows = first + tl.arange(0, BQ)  # [BQ]
    i = rows[:, None]  # [BQ, 1]
    inside = rows < T  # [BQ]

    position, start, end, q_segment = query_rows(
        rows, inside, offset, b, T, position_ptr, start_ptr, end_ptr, q_segments_ptr, ROWS, SEGMENTS)  # fmt: skip
    position, start, end, q_segment = position[:, None], start[:, None], end[:, None], q_segment[:, None]  # [BQ, 1]  # fmt: skip
    slope, seed0, seed1, ahead = head_scalars(slopes_ptr, seeds_ptr, b, h, H, ALIBI, DROPOUT, SEED_WORDS)
    bias_row = over_scores(bias_ptr, b, h, bias_run, bias_rows, T, S, H, BIAS)
    mask_row = over_scores(mask_ptr, b, h, mask_run, mask_rows, T, S, H, MASK)

    # Loaded once for all keys: the tile's queries, their cotangents and their softmax terms.
    q, q_rope = load_queries(q_ptr + b * T * (H * (D + R)) + h * (D + R), first, inside, T, H, D, R, BQ, BLOCK_D, BLOCK_R, not EVEN_Q, False)  # fmt: skip
    do = load_rows(do_ptr + b * T * (H * V) + h * V, first, H * V, inside, T, V, BQ, BLOCK_V, not EVEN_Q, False)  # [BQ, BLOCK_V]  # fmt: skip
    lse = tl.load(lse_ptr + (b * H + h) * T + rows, mask=inside, other=float("inf"))  # [BQ]
    delta = tl.load(delta_ptr + (b * H + h) * T + rows, mask=inside, other=0.0)  # [BQ]
    k_base = k_ptr + b * S * (K * D) + (h // (H // K)) * D
    rope_base = k_rope_ptr + b * S * R
    v_base = v_ptr + b * S * (K * V) + (h // (H // K)) * V
    dq = tl.zeros([BQ, BLOCK_D], tl.float32)  # [BQ, BLOCK_D]
    dslope = 0.0
    dq_rope = 0.0
    if R > 0:
        dq_rope = tl.zeros([BQ, BLOCK_R], tl.float32)  # [BQ, BLOCK_R]

    # dq = scale * sum over keys of dx k: partly visible tiles, fully visible ones, partly visible ones, as in the forward kernel.
    table: tl.constexpr = ROWS or SEGMENTS
    map_row = map_of(map_ptr, b, h, T, S, H, MAP_HEADS, MAP_Q, MAP_K)
    if LISTED:
        lo, full_lo, full_hi, hi, whole, partial, pattern_ptr = listed_tiles(
            tiles_ptr, row_ptr, bh, at, count, pattern_ptr, LISTED
        )
    else:
        lo, full_lo, full_hi, hi = key_tiles(tiles_ptr, b, m, offset, T, S, BQ, BK, LEFT, RIGHT, table, MASK)
        whole, partial = full_lo, full_hi
    if not LISTED and (table or LEFT >= 0 or MASK):
        dq, dq_rope, dslope = _query_gradient_tiles(
            dq, dq_rope, dslope, q, q_rope, do, lse, delta, lo, full_lo, lo, k_base, rope_base, v_base, bias_row, mask_row, kv_segments_ptr + b * S, key_seen_ptr + b * S,
            list_ptr, pattern_ptr, bits_ptr, map_row, seed0, seed1, ahead, slope, i, position, start, end, q_segment, T, S, K, D, R, V, BQ, BK, BLOCK_D, BLOCK_R, BLOCK_V, SCALE, CAP, FAST_TANH,
            LEFT, RIGHT, BIAS, ALIBI, MASK, ROWS, SEGMENTS, DROPOUT, KEEP_SCALE, PRECISION, FOLDED, MULTIPLIER,
            LISTED, BITS, MAP_Q, MAP_K, EVEN_Q, EVEN_K, CLEAN, True)  # fmt: skip
    if LISTED or not MASK:
        dq, dq_rope, dslope = _query_gradient_tiles(
            dq, dq_rope, dslope, q, q_rope, do, lse, delta, full_lo, full_hi, whole, k_base, rope_base, v_base, bias_row, mask_row, kv_segments_ptr, key_seen_ptr,
            list_ptr, pattern_ptr, bits_ptr, map_row, seed0, seed1, ahead, slope, i, position, start, end, q_segment, T, S, K, D, R, V, BQ, BK, BLOCK_D, BLOCK_R, BLOCK_V, SCALE, CAP, FAST_TANH,
            LEFT, RIGHT, BIAS, ALIBI, MASK, ROWS, SEGMENTS, DROPOUT, KEEP_SCALE, PRECISION, FOLDED, MULTIPLIER,
            LISTED, BITS, MAP_Q, MAP_K, EVEN_Q, EVEN_K, CLEAN, False)  # fmt: skip
        if LISTED:
            partly: tl.constexpr = lists_partly(BQ, BK, table, LEFT, RIGHT, MASK, BITS, MAP_Q, MAP_K, EVEN_K)
        else:
            partly: tl.constexpr = True  # pyright: ignore[reportAssignmentType]
        if partly:
            dq, dq_rope, dslope = _query_gradient_tiles(
                dq, dq_rope, dslope, q, q_rope, do, lse, delta, full_hi, hi, partial, k_base, rope_base, v_base, bias_row, mask_row, kv_segments_ptr + b * S, key_seen_ptr + b * S,
                list_ptr, pattern_ptr, bits_ptr, map_row, seed0, seed1, ahead, slope, i, position, start, end, q_segment, T, S, K, D, R, V, BQ, BK, BLOCK_D, BLOCK_R, BLOCK_V, SCALE, CAP, FAST_TANH,
                LEFT, RIGHT, BIAS, ALIBI, MASK, ROWS, SEGMENTS, DROPOUT, KEEP_SCALE, PRECISION, FOLDED, MULTIPLIER,
                LISTED, BITS, MAP_Q, MAP_K, EVEN_Q, EVEN_K, CLEAN, True)  # fmt: skip

    out = dq_ptr + b * T * (H * (D + R)) + h * (D + R)
    store_rows(out, (dq * SCALE).to(dq_ptr.dtype.element_ty), first, H * (D + R), T, D, BQ, BLOCK_D)
    if R > 0:
        store_rows(
            out + D, (dq_rope * SCALE).to(dq_ptr.dtype.element_ty), first, H * (D + R), T, R, BQ, BLOCK_R
        )
    if ALIBI:
        tl.store(dslope_ptr + (b * H + h) * count + m, dslope)


@triton.jit
def _key_gradient_tiles(
    dk, dk_rope, dv, k, rope, v,  # [BK, BLOCK_D], [BK, BLOCK_R], [BK, BLOCK_V], twice
    lo, hi, entry, q_base, do_base, lse_base, delta_base,  # where a head's rows begin
    bias_ptr, mask_ptr, q_segments_ptr, start_ptr, end_ptr, position_ptr, query_seen_ptr,
    list_ptr, pattern_ptr, bits_ptr, map_ptr, seed0, seed1, ahead, slope,
    offset, j, k_segment, T, S,  # the keys' numbers, [BK, 1] each
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, V: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
    SCALE: tl.constexpr, CAP: tl.constexpr, FAST_TANH: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    BIAS: tl.constexpr, ALIBI: tl.constexpr, MASK: tl.constexpr, ROWS: tl.constexpr, SEGMENTS: tl.constexpr,
    DROPOUT: tl.constexpr, KEEP_SCALE: tl.constexpr, PRECISION: tl.constexpr, FOLDED: tl.constexpr, MULTIPLIER: tl.constexpr,
    LISTED: tl.constexpr, BITS: tl.constexpr, MAP_Q: tl.constexpr, MAP_K: tl.constexpr,
    EVEN_Q: tl.constexpr, EVEN_K: tl.constexpr, CLEAN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    # Adds query tiles `lo .. hi` of one head, or those that these entries of the list name, to the gradients of a key tile. Keys are the rows: dk and dv need no transposed weights.
    guarded: tl.constexpr = ROWS or SEGMENTS
    for at in tl.range(lo, hi):
        m = at
        if LISTED:
            m = entry
            entry = tl.load(list_ptr + at + 1).to(tl.int32)
        first = m * BQ
        rows = first + tl.arange(0, BQ)  # [BQ]
        i = rows[None, :]  # [1, BQ]
        inside = rows < T  # [BQ]
        ok = inside
        # Each [1, BQ]; as in `query_rows`, but read only where used.
        position = i + offset
        start = i
        end = i
        q_segment = i
        if ROWS:
            if MASKED or ALIBI or DROPOUT > 0:
                position = tl.load(position_ptr + rows, mask=inside, other=0)[None, :]
        # Queries that see no key can hold anything, so they are not read.
        if MASKED and guarded:
            ok = ok & (tl.load(query_seen_ptr + rows, mask=inside, other=0) != 0)
            if ROWS:
                start = tl.load(start_ptr + rows, mask=inside, other=0)[None, :]
                end = tl.load(end_ptr + rows, mask=inside, other=0)[None, :]
            if SEGMENTS:
                q_segment = tl.load(q_segments_ptr + rows, mask=inside, other=-1)[None, :]
        q, q_rope = load_queries(q_base, first, ok, T, H, D, R, BQ, BLOCK_D, BLOCK_R, not EVEN_Q, MASKED and guarded)  # fmt: skip
        do = load_rows(do_base, first, H * V, ok, T, V, BQ, BLOCK_V, not EVEN_Q, MASKED and guarded)  # [BQ, BLOCK_V]  # fmt: skip
        lse = tl.load(lse_base + rows, mask=inside, other=float("inf"))  # [BQ]
        delta = tl.load(delta_base + rows, mask=inside, other=0.0)  # [BQ]
        qk = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [BK, BQ]
        if R > 0:
            qk = tl.dot(rope, tl.trans(q_rope), qk, input_precision=PRECISION)  # [BK, BQ]
        dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)  # [BK, BQ]
        listed = True
        if MASKED and BITS:
            listed = load_bits(bits_ptr, tl.load(pattern_ptr + at), BK, BQ, BITS)  # [BK, BQ]
        p, t, seen = _weights(
            qk, lse[None, :], i, j, position, start, end, q_segment, k_segment, slope, bias_ptr, mask_ptr, T, S, listed, map_ptr,
            SCALE, CAP, FAST_TANH, LEFT, RIGHT, BIAS, ALIBI, MASK, ROWS, SEGMENTS, FOLDED, MULTIPLIER, MASKED, False, BITS, MAP_Q, MAP_K)  # [BK, BQ]  # fmt: skip
        kept = True
        dropped = p
        if DROPOUT > 0:
            kept = keep(seed0, seed1, ahead, position, j, DROPOUT)  # [BK, BQ]
            dropped = tl.where(kept, p * KEEP_SCALE, 0.0)  # [BK, BQ]
        # A query that sees no key of the tile may hold NaN, and 0 * NaN is NaN.
        if MASKED and CLEAN:
            row_seen = tl.max(seen.to(tl.int32), axis=0) > 0  # [BQ]
            q = tl.where(row_seen[:, None], q, 0.0)
            if R > 0:
                q_rope = tl.where(row_seen[:, None], q_rope, 0.0)
            do = tl.where(row_seen[:, None], do, 0.0)
        if R == 0:
            dv = tl.dot(dropped.to(do.dtype), do, dv, input_precision=PRECISION)  # [BK, BLOCK_V]
        ds, _ = _score_gradient(p, dp, delta[None, :], t, seen, kept, CAP, DROPOUT, KEEP_SCALE, MASKED)  # [BK, BQ]  # fmt: skip
        ds = ds.to(q.dtype)
        if R > 0:  # in this order fewer registers are spilled
            dv = tl.dot(dropped.to(do.dtype), do, dv, input_precision=PRECISION)  # [BK, BLOCK_V]
        dk = tl.dot(ds, q, dk, input_precision=PRECISION)  # [BK, BLOCK_D]
        if R > 0:
            dk_rope = tl.dot(ds, q_rope, dk_rope, input_precision=PRECISION)  # [BK, BLOCK_R]
    return dk, dk_rope, dv


@triton.jit
def key_gradient_kernel(
    q_ptr, k_ptr, k_rope_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr,
    bias_ptr, slopes_ptr, mask_ptr, q_segments_ptr, kv_segments_ptr, start_ptr, end_ptr, position_ptr, query_seen_ptr, key_seen_ptr,
    seeds_ptr, tiles_ptr, row_ptr, list_ptr, pattern_ptr, bits_ptr, map_ptr, T, S, offset, bias_run, bias_rows, mask_run, mask_rows,
    dk_ptr, dk_rope_ptr, dv_ptr,  # [B, S, K, D], float32 [B, K, S, R], [B, S, K, V]
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, R: tl.constexpr, V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    SCALE: tl.constexpr, CAP: tl.constexpr, FAST_TANH: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    BIAS: tl.constexpr, ALIBI: tl.constexpr, MASK: tl.constexpr, ROWS: tl.constexpr, SEGMENTS: tl.constexpr,
    DROPOUT: tl.constexpr, SEED_WORDS: tl.constexpr, KEEP_SCALE: tl.constexpr, PRECISION: tl.constexpr, FOLDED: tl.constexpr, MULTIPLIER: tl.constexpr,
    LISTED: tl.constexpr, BITS: tl.constexpr, MAP_HEADS: tl.constexpr, MAP_Q: tl.constexpr, MAP_K: tl.constexpr,
    EVEN_Q: tl.constexpr, EVEN_K: tl.constexpr, GUARD: tl.constexpr, CLEAN: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """`dk` and `dv` of one key tile and key head, over all query heads that read it, and their part of the gradient of the shared keys."""
    if LISTED:
        n, bh, count, at = listed_program(tiles_ptr, S, BK, GROUP)
    else:
        n, bh, count = program(S, BK, GROUP)
    b = (bh // K).to(tl.int64)
    kh = bh % K
    first = n * BK
    columns = first + tl.arange(0, BK)  # [BK]
    j = columns[:, None]  # [BK, 1]
    k_segment = j
    if SEGMENTS:
        k_segment = tl.load(kv_segments_ptr + b * S + columns, mask=columns < S, other=-1)[:, None]  # [BK, 1]
    k = load_rows(k_ptr + b * S * (K * D) + kh * D, first, K * D, columns < S, S, D, BK, BLOCK_D, not EVEN_K, False)  # [BK, BLOCK_D]  # fmt: skip
    rope = k
    if R > 0:
        rope = load_rows(k_rope_ptr + b * S * R, first, R, columns < S, S, R, BK, BLOCK_R, not EVEN_K, False)  # [BK, BLOCK_R]  # fmt: skip
    v = load_rows(v_ptr + b * S * (K * V) + kh * V, first, K * V, columns < S, S, V, BK, BLOCK_V, not EVEN_K, False)  # [BK, BLOCK_V]  # fmt: skip
    dk = tl.zeros([BK, BLOCK_D], tl.float32)  # [BK, BLOCK_D]
    dk_rope = 0.0
    if R > 0:
        dk_rope = tl.zeros([BK, BLOCK_R], tl.float32)  # [BK, BLOCK_R]
    dv = tl.zeros([BK, BLOCK_V], tl.float32)  # [BK, BLOCK_V]

    # dv = sum of drop(w) do, dk = scale * sum of dx q: over the heads of the group, and of each over the query tiles that see this one.
    table: tl.constexpr = ROWS or SEGMENTS
    patterns = pattern_ptr
    if not LISTED:
        lo, full_lo, full_hi, hi = query_tiles(
            tiles_ptr, b, n, offset, T, S, BQ, BK, LEFT, RIGHT, table, MASK
        )
        whole, partial = full_lo, full_hi
    begin = kh * (H // K)
    end = (kh + 1) * (H // K)
    if (
        R > 0
    ):  # as many key heads as heads: no loop to the compiler, whose accumulators would be copied and spilled
        begin = 0
        end = 1
    for h in range(begin, end):
        if R > 0:
            h = kh
        slope, seed0, seed1, ahead = head_scalars(slopes_ptr, seeds_ptr, b, h, H, ALIBI, DROPOUT, SEED_WORDS)
        bias_row = over_scores(bias_ptr, b, h, bias_run, bias_rows, T, S, H, BIAS)
        mask_row = over_scores(mask_ptr, b, h, mask_run, mask_rows, T, S, H, MASK)
        q_base = q_ptr + b * T * (H * (D + R)) + h * (D + R)
        do_base = do_ptr + b * T * (H * V) + h * V
        lse_base = lse_ptr + (b * H + h) * T
        delta_base = delta_ptr + (b * H + h) * T
        map_row = map_of(map_ptr, b, h, T, S, H, MAP_HEADS, MAP_Q, MAP_K)
        if LISTED:
            lo, full_lo, full_hi, hi, whole, partial, patterns = listed_tiles(
                tiles_ptr, row_ptr, b * H + h, at, count, pattern_ptr, LISTED
            )
        if not LISTED and (table or RIGHT >= 0 or MASK):
            dk, dk_rope, dv = _key_gradient_tiles(
                dk, dk_rope, dv, k, rope, v, lo, full_lo, lo, q_base, do_base, lse_base, delta_base, bias_row, mask_row, q_segments_ptr + b * T,
                start_ptr + b * T, end_ptr + b * T, position_ptr + b * T, query_seen_ptr + b * T, list_ptr, patterns, bits_ptr, map_row,
                seed0, seed1, ahead, slope, offset, j, k_segment, T, S, H, D, R, V, BQ, BK, BLOCK_D, BLOCK_R, BLOCK_V, SCALE, CAP, FAST_TANH, LEFT, RIGHT, BIAS, ALIBI, MASK, ROWS, SEGMENTS, DROPOUT,
                KEEP_SCALE, PRECISION, FOLDED, MULTIPLIER, LISTED, BITS, MAP_Q, MAP_K, EVEN_Q, EVEN_K, CLEAN, True)  # fmt: skip
        if LISTED or not MASK:
            dk, dk_rope, dv = _key_gradient_tiles(
                dk, dk_rope, dv, k, rope, v, full_lo, full_hi, whole, q_base, do_base, lse_base, delta_base, bias_row, mask_row, q_segments_ptr + b * T,
                start_ptr + b * T, end_ptr + b * T, position_ptr + b * T, query_seen_ptr + b * T, list_ptr, patterns, bits_ptr, map_row,
                seed0, seed1, ahead, slope, offset, j, k_segment, T, S, H, D, R, V, BQ, BK, BLOCK_D, BLOCK_R, BLOCK_V, SCALE, CAP, FAST_TANH, LEFT, RIGHT, BIAS, ALIBI, MASK, ROWS, SEGMENTS, DROPOUT,
                KEEP_SCALE, PRECISION, FOLDED, MULTIPLIER, LISTED, BITS, MAP_Q, MAP_K, EVEN_Q, EVEN_K, CLEAN, False)  # fmt: skip
            if LISTED:
                partly: tl.constexpr = lists_partly(
                    BQ, BK, table, LEFT, RIGHT, MASK, BITS, MAP_Q, MAP_K, EVEN_K
                )
            else:
                partly: tl.constexpr = table or LEFT >= 0
            if partly:
                dk, dk_rope, dv = _key_gradient_tiles(
                    dk, dk_rope, dv, k, rope, v, full_hi, hi, partial, q_base, do_base, lse_base, delta_base, bias_row, mask_row, q_segments_ptr + b * T,
                    start_ptr + b * T, end_ptr + b * T, position_ptr + b * T, query_seen_ptr + b * T, list_ptr, patterns, bits_ptr, map_row,
                    seed0, seed1, ahead, slope, offset, j, k_segment, T, S, H, D, R, V, BQ, BK, BLOCK_D, BLOCK_R, BLOCK_V, SCALE, CAP, FAST_TANH, LEFT, RIGHT, BIAS, ALIBI, MASK, ROWS,
                    SEGMENTS, DROPOUT, KEEP_SCALE, PRECISION, FOLDED, MULTIPLIER, LISTED, BITS, MAP_Q, MAP_K, EVEN_Q, EVEN_K, CLEAN, True)  # fmt: skip

    store_rows(dk_ptr + b * S * (K * D) + kh * D, (dk * SCALE).to(dk_ptr.dtype.element_ty), first, K * D, S, D, BK, BLOCK_D)  # fmt: skip
    store_rows(dv_ptr + b * S * (K * V) + kh * V, dv.to(dv_ptr.dtype.element_ty), first, K * V, S, V, BK, BLOCK_V)  # fmt: skip
    if R > 0:
        store_rows(dk_rope_ptr + (b * K + kh) * S * R, dk_rope * SCALE, first, R, S, R, BK, BLOCK_R)


@triton.jit
def bias_gradient_kernel(
    q_ptr, k_ptr, k_rope_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr,
    bias_ptr, slopes_ptr, mask_ptr, q_segments_ptr, kv_segments_ptr, start_ptr, end_ptr, position_ptr, query_seen_ptr, key_seen_ptr,
    seeds_ptr, readers, T, S, offset, bias_run, bias_rows, mask_run, mask_rows,
    dbias_ptr,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, R: tl.constexpr, V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    SCALE: tl.constexpr, CAP: tl.constexpr, FAST_TANH: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    BIAS: tl.constexpr, ALIBI: tl.constexpr, MASK: tl.constexpr, ROWS: tl.constexpr, SEGMENTS: tl.constexpr,
    DROPOUT: tl.constexpr, SEED_WORDS: tl.constexpr, KEEP_SCALE: tl.constexpr, PRECISION: tl.constexpr, FOLDED: tl.constexpr, MULTIPLIER: tl.constexpr,
    EVEN_Q: tl.constexpr, EVEN_K: tl.constexpr, GUARD: tl.constexpr, CLEAN: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One tile of the bias gradient `[rows, H or 1, T or 1, S or 1]`, summed in a fixed order over the axes that the bias broadcasts
    and over the `readers` of its row (batch rows)."""
    over_queries: tl.constexpr = (OVER_QUERIES & BIAS) != 0
    over_keys: tl.constexpr = (OVER_KEYS & BIAS) != 0
    # The program's tile `m, n` of row `bias_row` and head of the bias. Where the bias lacks an axis, one tile covers all of it.
    count_m, count_n = 1, 1
    if over_queries:
        count_m = tl.cdiv(T, BQ)
    if over_keys:
        count_n = tl.cdiv(S, BK)
    m = tl.program_id(0) % count_m
    n = tl.program_id(0) // count_m % count_n
    owner = tl.program_id(0) // (count_m * count_n)
    bias_row, head_lo, head_hi = owner, 0, H
    if OVER_HEADS & BIAS:
        bias_row = owner // H
        head_lo = owner % H
        head_hi = head_lo + 1
    m_lo, m_hi, n_lo, n_hi = m, m + 1, n, n + 1
    if not over_queries:
        m_hi = tl.cdiv(T, BQ)
    if not over_keys:
        n_hi = tl.cdiv(S, BK)

    total = tl.zeros([BQ, BK], tl.float32)  # [BQ, BK]
    for reader in range(0, readers):
        # Batch rows that share a row of the bias: `bias_run` consecutive ones, repeated after every `bias_rows` such runs.
        batch = (reader // bias_run * bias_rows + bias_row) * bias_run + reader % bias_run
        b = (tl.zeros([], tl.int32) + batch).to(tl.int64)
        for h in range(head_lo, head_hi):
            slope, seed0, seed1, ahead = head_scalars(
                slopes_ptr, seeds_ptr, b, h, H, ALIBI, DROPOUT, SEED_WORDS
            )
            bias = over_scores(bias_ptr, b, h, bias_run, bias_rows, T, S, H, BIAS)
            mask = over_scores(mask_ptr, b, h, mask_run, mask_rows, T, S, H, MASK)
            for query_tile in range(m_lo, m_hi):
                rows = query_tile * BQ + tl.arange(0, BQ)  # [BQ]
                i = rows[:, None]  # [BQ, 1]
                inside = rows < T  # [BQ]
                position, start, end, q_segment = query_rows(
                    rows, inside, offset, b, T, position_ptr, start_ptr, end_ptr, q_segments_ptr, ROWS, SEGMENTS)  # fmt: skip
                position, start, end, q_segment = position[:, None], start[:, None], end[:, None], q_segment[:, None]  # [BQ, 1]  # fmt: skip
                q, q_rope = load_queries(
                    q_ptr + b * T * (H * (D + R)) + h * (D + R), query_tile * BQ, inside, T, H, D, R, BQ, BLOCK_D, BLOCK_R, True, False)  # fmt: skip
                do = load_rows(
                    do_ptr + b * T * (H * V) + h * V, query_tile * BQ, H * V, inside, T, V, BQ, BLOCK_V, True, False)  # [BQ, BLOCK_V]  # fmt: skip
                lse = tl.load(lse_ptr + (b * H + h) * T + rows, mask=inside, other=float("inf"))  # [BQ]
                delta = tl.load(delta_ptr + (b * H + h) * T + rows, mask=inside, other=0.0)  # [BQ]
                for key_tile in range(n_lo, n_hi):
                    columns = key_tile * BK + tl.arange(0, BK)  # [BK]
                    j = columns[None, :]  # [1, BK]
                    k_segment = j
                    if SEGMENTS:
                        k_segment = tl.load(kv_segments_ptr + b * S + columns, mask=columns < S, other=-1)[None, :]  # [1, BK]  # fmt: skip
                    kh = h // (H // K)
                    k = load_rows(
                        k_ptr + b * S * (K * D) + kh * D, key_tile * BK, K * D, inside, S, D, BK, BLOCK_D, True, False)  # [BK, BLOCK_D]  # fmt: skip
                    v = load_rows(
                        v_ptr + b * S * (K * V) + kh * V, key_tile * BK, K * V, inside, S, V, BK, BLOCK_V, True, False)  # [BK, BLOCK_V]  # fmt: skip
                    qk = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BQ, BK]
                    if R > 0:
                        rope = load_rows(k_rope_ptr + b * S * R, key_tile * BK, R, inside, S, R, BK, BLOCK_R, True, False)  # [BK, BLOCK_R]  # fmt: skip
                        qk = tl.dot(q_rope, tl.trans(rope), qk, input_precision=PRECISION)  # [BQ, BK]
                    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)  # [BQ, BK]
                    p, t, seen = _weights(
                        qk, lse[:, None], i, j, position, start, end, q_segment, k_segment, slope, bias, mask, T, S, True, mask, SCALE, CAP,
                        FAST_TANH, LEFT, RIGHT, BIAS, ALIBI, MASK, ROWS, SEGMENTS, FOLDED, MULTIPLIER, True, True, 0, 0, 0)  # [BQ, BK]  # fmt: skip
                    kept = True
                    if DROPOUT > 0:
                        kept = keep(seed0, seed1, ahead, position, j, DROPOUT)  # [BQ, BK]
                    _, after = _score_gradient(p, dp, delta[:, None], t, seen, kept, CAP, DROPOUT, KEEP_SCALE, True)  # fmt: skip
                    total += after  # [BQ, BK]

    # Stored once, by its only owner; axes that the bias lacks are summed last.
    rows = m * BQ + tl.arange(0, BQ)
    columns = n * BK + tl.arange(0, BK)
    start_of = dbias_ptr + owner.to(tl.int64) * (T if over_queries else 1) * (S if over_keys else 1)
    if over_queries and over_keys:
        tl.store(start_of + rows[:, None].to(tl.int64) * S + columns[None, :], total,
                 mask=(rows < T)[:, None] & (columns < S)[None, :])  # [BQ, BK]  # fmt: skip
    elif over_queries:
        tl.store(start_of + rows, tl.sum(total, axis=1), mask=rows < T)  # [BQ]
    elif over_keys:
        tl.store(start_of + columns, tl.sum(total, axis=0), mask=columns < S)  # [BK]
    else:
        tl.store(start_of, tl.sum(tl.sum(total, axis=1), axis=0))
