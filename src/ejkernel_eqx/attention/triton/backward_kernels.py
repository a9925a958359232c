"""The Triton backward: three kernels, each recomputing the weights from `lse`, none with atomics.

`lse` is in log2 units, with `+inf` for a query that sees no key, so that its weights are zero without a branch.
"""

from collections import namedtuple

import triton
import triton.language as tl

from . import tile

# A tile of queries, both parts, with cotangents and terms of the softmax: [BQ, BLOCK_D], [BQ, BLOCK_R], [BQ, BLOCK_V], [BQ], [BQ]; and their
# coarse sum of gates, [].
QueryTile = namedtuple("QueryTile", "q rope do lse delta coarse")


# fmt: off
@triton.jit
def _weights(qk, lse, queries, keys, bits, head, lengths, scoring: tl.constexpr, masking: tl.constexpr, MASKED: tl.constexpr, BOUND: tl.constexpr):
    """The softmax weights of a tile, its tanh, and which of its entries are visible."""
    s, t = tile.scores(qk, queries, keys, head, lengths, scoring)  # [BQ, BK] or [BK, BQ], both
    seen = True
    if MASKED:
        seen = tile.visible(queries, keys, bits, head, lengths, masking, BOUND)  # of the shape of qk
        s = tl.where(seen, s, float("-inf"))
    exponent = s * scoring.MULTIPLIER - lse  # of the shape of qk
    if scoring.BIAS:
        # Where all scores of a row are large, the lse is rounded by more than 1.
        exponent = tl.minimum(exponent, 0.0)
    return tl.exp2(exponent), t, seen  # of the shape of qk


@triton.jit
def _score_gradient(p, dp, delta, t, seen, kept, scoring: tl.constexpr, MASKED: tl.constexpr):
    """Gradients of a tile's scores before (with respect to `scale * q . k`) and after the soft cap."""
    if scoring.DROPOUT > 0:
        dp = tl.where(kept, dp * scoring.KEEP_SCALE, 0.0)
    after = p * (dp - delta)  # ds = w (dp - delta), of the shape of p
    # Invisible entries may hold NaN, which multiplying by p = 0 does not remove.
    if MASKED:
        after = tl.where(seen, after, 0.0)
    before = after
    if scoring.CAP > 0:
        before = after * (1.0 - t * t)  # d tanh = 1 - tanh^2
        if MASKED:
            before = tl.where(seen, before, 0.0)
    return before, after


@triton.jit
def _load_query_tile(q_ptr, do_ptr, lse_ptr, delta_ptr, b, h, first, rows, inside, head, T, sizes: tl.constexpr, ALIBI: tl.constexpr, BOUND: tl.constexpr):
    width: tl.constexpr = sizes.D + sizes.R
    q_ptr = q_ptr + b * T * (sizes.H * width) + h * width
    q, rope = tile.load_queries(q_ptr, first, inside, T, sizes, BOUND, False)  # [BQ, BLOCK_D], [BQ, BLOCK_R]
    do_ptr = do_ptr + b * T * (sizes.H * sizes.V) + h * sizes.V
    do = tile.load_rows(do_ptr, first, sizes.H * sizes.V, inside, T, sizes.V, sizes.BQ, sizes.BLOCK_V, BOUND, False)  # [BQ, BLOCK_V]
    lse = tl.load(lse_ptr + (b * sizes.H + h) * T + rows, mask=inside, other=float("inf"))  # [BQ]
    delta = tl.load(delta_ptr + (b * sizes.H + h) * T + rows, mask=inside, other=0.0)  # [BQ]
    coarse = 0.0
    if ALIBI == tile.GATES:
        coarse = tile.coarse_of(head.gates, T, first)
    return QueryTile(q, rope, do, lse, delta, coarse)


@triton.jit
def _score_gradients(
    first, key_rows, query_tile, queries, bits_ptr, patterns_ptr, at, head, lengths,
    sizes: tl.constexpr, scoring: tl.constexpr, masking: tl.constexpr, MASKED: tl.constexpr, BOUND: tl.constexpr, CHECK: tl.constexpr,
):
    """A tile of keys from `first` on, in two parts as queries, with their numbers; and for a tile of queries both gradients of `_score_gradient`, and
    which entries are visible."""
    S = lengths.S
    q, q_rope, do, lse, delta, coarse = query_tile
    BK: tl.constexpr = sizes.BK
    PRECISION: tl.constexpr = scoring.PRECISION
    keys, ok = tile.key_columns(first, key_rows, head, S, BK, BOUND, CHECK, MASKED and masking.SEGMENTS, scoring.ALIBI)
    k = tile.load_rows(key_rows.k, first, sizes.K * sizes.D, ok, S, sizes.D, BK, sizes.BLOCK_D, BOUND, CHECK)  # [BK, BLOCK_D]
    if sizes.R == 0:
        v = tile.load_rows(key_rows.v, first, sizes.K * sizes.V, ok, S, sizes.V, BK, sizes.BLOCK_V, BOUND, CHECK)  # [BK, BLOCK_V]
    # The weights again, from the scores.
    qk = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BQ, BK]
    rope = k
    if sizes.R > 0:
        rope = tile.load_rows(key_rows.rope, first, sizes.R, ok, S, sizes.R, BK, sizes.BLOCK_R, BOUND, CHECK)  # [BK, BLOCK_R]
        qk = tl.dot(q_rope, tl.trans(rope), qk, input_precision=PRECISION)  # [BQ, BK]
        # In this order fewer registers are spilled.
        v = tile.load_rows(key_rows.v, first, sizes.K * sizes.V, ok, S, sizes.V, BK, sizes.BLOCK_V, BOUND, CHECK)  # [BK, BLOCK_V]
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)  # [BQ, BK]
    if scoring.ALIBI == tile.GATES:
        lse -= coarse - keys.coarse
    bits = True
    if MASKED and masking.BITS:
        bits = tile.load_bits(bits_ptr, tl.load(patterns_ptr + at), sizes.BQ, BK, masking.BITS)  # [BQ, BK]
    p, t, seen = _weights(qk, lse[:, None], queries, keys, bits, head, lengths, scoring, masking, MASKED, BOUND)  # [BQ, BK]
    kept = True
    if scoring.DROPOUT > 0:
        kept = tile.keep(queries, keys, head, scoring.DROPOUT)  # [BQ, BK]
    ds, after = _score_gradient(p, dp, delta[:, None], t, seen, kept, scoring, MASKED)  # [BQ, BK]
    return k, rope, keys, ds, after, seen


@triton.jit
def _query_gradient_tiles(
    dq, dq_rope, dslope, query_tile,  # [BQ, BLOCK_D], [BQ, BLOCK_R], []
    spans, tiles, key_rows, queries, head, lengths,
    sizes: tl.constexpr, scoring: tl.constexpr, masking: tl.constexpr, PART: tl.constexpr,
):
    """Adds a part of the key tiles, or those that its entries of the list name, to the gradients of a query tile."""
    BK: tl.constexpr = sizes.BK
    PRECISION: tl.constexpr = scoring.PRECISION
    MASKED: tl.constexpr = PART != tile.FULL
    BOUND: tl.constexpr = MASKED and not sizes.EVEN_K
    CHECK: tl.constexpr = MASKED and (masking.ROWS or masking.SEGMENTS)
    lo, hi, entry = tile.span(spans, PART)
    for at in tl.range(lo, hi):
        n = at
        if masking.LISTED:
            n = entry
            entry = tl.load(tiles.list + at + 1).to(tl.int32)
        k, rope, keys, ds, after, seen = _score_gradients(
            n * BK, key_rows, query_tile, queries, tiles.bits, spans.patterns, at, head, lengths, sizes, scoring, masking, MASKED, BOUND, CHECK)
        if scoring.ALIBI == tile.GATES:
            dslope += tl.sum(after, axis=1)
        elif scoring.ALIBI:
            dslope += tl.sum(tl.sum(after * (keys.j - queries.position).to(tl.float32), axis=1), axis=0)
        # A key that no row of the tile sees may hold NaN, and 0 * NaN is NaN.
        clean: tl.constexpr = MASKED and masking.CLEAN and (masking.MASK or masking.LISTED)
        if clean:
            some = (tl.max(seen.to(tl.int32), axis=0) > 0)[:, None]  # [BK, 1]
            k = tl.where(some, k, 0.0)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)  # [BQ, BLOCK_D]
        if sizes.R > 0:
            if clean:
                rope = tl.where(some, rope, 0.0)
            dq_rope = tl.dot(ds.to(k.dtype), rope, dq_rope, input_precision=PRECISION)  # [BQ, BLOCK_R]
    return dq, dq_rope, dslope


@triton.jit
def query_gradient_kernel(
    q_ptr, k_ptr, k_rope_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr,  # do as out, lse and delta [B, H, T]; all else as in the forward kernel
    bias_ptr, slopes_ptr, mask_ptr, q_segments_ptr, kv_segments_ptr, start_ptr, end_ptr, position_ptr, query_seen_ptr, key_seen_ptr,
    seeds_ptr, tiles_ptr, row_ptr, list_ptr, pattern_ptr, bits_ptr, map_ptr, T, S, offset, bias_run, bias_rows, mask_run, mask_rows,
    dq_ptr, dslope_ptr,  # [B, T, H, D + R], [B, H, tiles] or of gates [B, H, T]
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, R: tl.constexpr, V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    SCALE: tl.constexpr, CAP: tl.constexpr, FAST_TANH: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    BIAS: tl.constexpr, ALIBI: tl.constexpr, MASK: tl.constexpr, ROWS: tl.constexpr, SEGMENTS: tl.constexpr,
    DROPOUT: tl.constexpr, SEED_WORDS: tl.constexpr, KEEP_SCALE: tl.constexpr, PRECISION: tl.constexpr, FOLDED: tl.constexpr, MULTIPLIER: tl.constexpr,
    LISTED: tl.constexpr, BITS: tl.constexpr, MAP_HEADS: tl.constexpr, MAP_Q: tl.constexpr, MAP_K: tl.constexpr,
    EVEN_Q: tl.constexpr, EVEN_K: tl.constexpr, GUARD: tl.constexpr, CLEAN: tl.constexpr, GROUP: tl.constexpr,
):
    """`dq` of one query tile and head, and the tile's share of the slope's gradient or, with gates, the sum of each row of the scores' gradient."""
    sizes: tl.constexpr = tile.Sizes(H, K, D, R, V, BLOCK_D, BLOCK_R, BLOCK_V, BQ, BK, EVEN_Q, EVEN_K)
    scoring: tl.constexpr = tile.Scoring(SCALE, CAP, FAST_TANH, FOLDED, MULTIPLIER, BIAS, ALIBI, DROPOUT, SEED_WORDS, KEEP_SCALE, PRECISION)
    masking: tl.constexpr = tile.Masking(LEFT, RIGHT, ROWS, SEGMENTS, MASK, LISTED, BITS, MAP_HEADS, MAP_Q, MAP_K, CLEAN)
    lengths = tile.Lengths(T, S, offset)
    tiles = tile.TileArrays(tiles_ptr, row_ptr, list_ptr, pattern_ptr, bits_ptr)
    row_arrays = tile.RowArrays(position_ptr, start_ptr, end_ptr, q_segments_ptr, kv_segments_ptr, key_seen_ptr, query_seen_ptr)
    head_arrays = tile.HeadArrays(slopes_ptr, seeds_ptr, bias_ptr, bias_run, bias_rows, mask_ptr, mask_run, mask_rows, map_ptr)

    m, bh, count, at = tile.query_program(tiles, lengths, sizes, LISTED, GROUP)
    b = (bh // H).to(tl.int64)
    h = bh % H
    first = m * BQ
    rows = first + tl.arange(0, BQ)  # [BQ]
    inside = rows < T  # [BQ]
    queries = tile.query_rows(rows, b, row_arrays, lengths, masking)
    head = tile.head_of(head_arrays, b, h, lengths, H, scoring, masking)

    # Loaded once for all keys: the tile's queries, their cotangents and their softmax terms.
    query_tile = _load_query_tile(q_ptr, do_ptr, lse_ptr, delta_ptr, b, h, first, rows, inside, head, T, sizes, ALIBI, not EVEN_Q)
    key_rows = tile.KeyRows(
        k_ptr + b * S * (K * D) + (h // (H // K)) * D, k_rope_ptr + b * S * R, v_ptr + b * S * (K * V) + (h // (H // K)) * V,
        kv_segments_ptr + b * S, key_seen_ptr + b * S)
    dq = tl.zeros([BQ, BLOCK_D], tl.float32)  # [BQ, BLOCK_D]
    dslope = 0.0
    if ALIBI == tile.GATES:
        dslope = tl.zeros([BQ], tl.float32)  # [BQ]
    dq_rope = 0.0
    if R > 0:
        dq_rope = tl.zeros([BQ, BLOCK_R], tl.float32)  # [BQ, BLOCK_R]

    # dq = scale * sum over keys of dx k: partly visible tiles, fully visible ones, partly visible ones, as in the forward kernel.
    spans = tile.key_spans(tiles, b, bh, m, at, count, lengths, sizes, masking)
    for part in tl.static_range(3):
        if tile.part_runs(part, sizes, masking, LEFT >= 0, True):
            dq, dq_rope, dslope = _query_gradient_tiles(
                dq, dq_rope, dslope, query_tile, spans, tiles, key_rows, queries, head, lengths, sizes, scoring, masking, part)

    out = dq_ptr + b * T * (H * (D + R)) + h * (D + R)
    tile.store_rows(out, (dq * SCALE).to(dq_ptr.dtype.element_ty), first, H * (D + R), T, D, BQ, BLOCK_D)
    if R > 0:
        tile.store_rows(out + D, (dq_rope * SCALE).to(dq_ptr.dtype.element_ty), first, H * (D + R), T, R, BQ, BLOCK_R)
    if ALIBI == tile.GATES:
        tl.store(dslope_ptr + (b * H + h) * T + rows, dslope, mask=inside)
    elif ALIBI:
        tl.store(dslope_ptr + (b * H + h) * count + m, dslope)


@triton.jit
def _key_gradient_tiles(
    dk, dk_rope, dgates, dv, k, rope, v,  # [BK, BLOCK_D], [BK, BLOCK_R], [BK], [BK, BLOCK_V], and again without the third
    spans, tiles, query_rows, keys, head, lengths,
    sizes: tl.constexpr, scoring: tl.constexpr, masking: tl.constexpr, PART: tl.constexpr,
):
    """Adds a part of one head's query tiles, or those that its entries of the list name, to the gradients of a key tile. Keys are the rows:
    dk and dv need no transposed weights."""
    T = lengths.T
    BQ: tl.constexpr = sizes.BQ
    PRECISION: tl.constexpr = scoring.PRECISION
    MASKED: tl.constexpr = PART != tile.FULL
    CHECK: tl.constexpr = MASKED and (masking.ROWS or masking.SEGMENTS)
    lo, hi, entry = tile.span(spans, PART)
    for at in tl.range(lo, hi):
        m = at
        if masking.LISTED:
            m = entry
            entry = tl.load(tiles.list + at + 1).to(tl.int32)
        first = m * BQ
        rows = first + tl.arange(0, BQ)  # [BQ]
        i = rows[None, :]  # [1, BQ]
        inside = rows < T  # [BQ]
        ok = inside
        # Each [1, BQ]; as in `query_rows`, but read only where used.
        position = i + lengths.offset
        start = i
        end = i
        q_segment = i
        if masking.ROWS:
            if MASKED or scoring.ALIBI or scoring.DROPOUT > 0:
                position = tl.load(query_rows.position + rows, mask=inside, other=0)[None, :]
        # Queries that see no key can hold anything, so they are not read.
        if CHECK:
            ok = ok & (tl.load(query_rows.seen + rows, mask=inside, other=0) != 0)
            if masking.ROWS:
                start = tl.load(query_rows.start + rows, mask=inside, other=0)[None, :]
                end = tl.load(query_rows.end + rows, mask=inside, other=0)[None, :]
            if masking.SEGMENTS:
                q_segment = tl.load(query_rows.segments + rows, mask=inside, other=-1)[None, :]
        queries = tile.Queries(i, position, start, end, q_segment)
        q, q_rope = tile.load_queries(query_rows.q, first, ok, T, sizes, not sizes.EVEN_Q, CHECK)
        do = tile.load_rows(query_rows.do, first, sizes.H * sizes.V, ok, T, sizes.V, BQ, sizes.BLOCK_V, not sizes.EVEN_Q, CHECK)  # [BQ, BLOCK_V]
        lse = tl.load(query_rows.lse + rows, mask=inside, other=float("inf"))  # [BQ]
        delta = tl.load(query_rows.delta + rows, mask=inside, other=0.0)  # [BQ]
        of_keys = keys
        if scoring.ALIBI == tile.GATES:
            of_keys = tile.Keys(keys.j, keys.segment, keys.gates - (tile.coarse_of(head.gates, T, first) - keys.coarse), 0.0)
        # The weights again, from the scores.
        qk = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [BK, BQ]
        if sizes.R > 0:
            qk = tl.dot(rope, tl.trans(q_rope), qk, input_precision=PRECISION)  # [BK, BQ]
        dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)  # [BK, BQ]
        bits = True
        if MASKED and masking.BITS:
            bits = tile.load_bits(
                tiles.bits, tl.load(spans.patterns + at), sizes.BK, BQ, masking.BITS
            )  # [BK, BQ]
        p, t, seen = _weights(qk, lse[None, :], queries, of_keys, bits, head, lengths, scoring, masking, MASKED, False)  # [BK, BQ]
        # Dropout hides weights in dv, and their gradients in dk.
        kept = True
        dropped = p
        if scoring.DROPOUT > 0:
            kept = tile.keep(queries, keys, head, scoring.DROPOUT)  # [BK, BQ]
            dropped = tl.where(kept, p * scoring.KEEP_SCALE, 0.0)  # [BK, BQ]
        # A query that sees no key of the tile may hold NaN, and 0 * NaN is NaN.
        if MASKED and masking.CLEAN:
            row_seen = (tl.max(seen.to(tl.int32), axis=0) > 0)[:, None]  # [BQ, 1]
            q = tl.where(row_seen, q, 0.0)
            if sizes.R > 0:
                q_rope = tl.where(row_seen, q_rope, 0.0)
            do = tl.where(row_seen, do, 0.0)
        if sizes.R == 0:
            dv = tl.dot(dropped.to(do.dtype), do, dv, input_precision=PRECISION)  # [BK, BLOCK_V]
        ds, after = _score_gradient(p, dp, delta[None, :], t, seen, kept, scoring, MASKED)  # [BK, BQ]
        if scoring.ALIBI == tile.GATES:
            dgates += tl.sum(after, axis=1)
        ds = ds.to(q.dtype)
        if sizes.R > 0:  # in this order fewer registers are spilled
            dv = tl.dot(dropped.to(do.dtype), do, dv, input_precision=PRECISION)  # [BK, BLOCK_V]
        dk = tl.dot(ds, q, dk, input_precision=PRECISION)  # [BK, BLOCK_D]
        if sizes.R > 0:
            dk_rope = tl.dot(ds, q_rope, dk_rope, input_precision=PRECISION)  # [BK, BLOCK_R]
    return dk, dk_rope, dgates, dv


@triton.jit
def key_gradient_kernel(
    q_ptr, k_ptr, k_rope_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr,
    bias_ptr, slopes_ptr, mask_ptr, q_segments_ptr, kv_segments_ptr, start_ptr, end_ptr, position_ptr, query_seen_ptr, key_seen_ptr,
    seeds_ptr, tiles_ptr, row_ptr, list_ptr, pattern_ptr, bits_ptr, map_ptr, T, S, offset, bias_run, bias_rows, mask_run, mask_rows,
    dk_ptr, dmore_ptr, dv_ptr,  # [B, S, K, D], float32 [B, K, S, R] of shared keys or [B, H, S] of gates, [B, S, K, V]
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, R: tl.constexpr, V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    SCALE: tl.constexpr, CAP: tl.constexpr, FAST_TANH: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    BIAS: tl.constexpr, ALIBI: tl.constexpr, MASK: tl.constexpr, ROWS: tl.constexpr, SEGMENTS: tl.constexpr,
    DROPOUT: tl.constexpr, SEED_WORDS: tl.constexpr, KEEP_SCALE: tl.constexpr, PRECISION: tl.constexpr, FOLDED: tl.constexpr, MULTIPLIER: tl.constexpr,
    LISTED: tl.constexpr, BITS: tl.constexpr, MAP_HEADS: tl.constexpr, MAP_Q: tl.constexpr, MAP_K: tl.constexpr,
    EVEN_Q: tl.constexpr, EVEN_K: tl.constexpr, GUARD: tl.constexpr, CLEAN: tl.constexpr, GROUP: tl.constexpr,
):
    """`dk` and `dv` of one key tile and key head, over all query heads that read it, and their part of the gradient of the shared keys or, with gates, the
    sum of each key's column of the scores' gradient."""
    sizes: tl.constexpr = tile.Sizes(H, K, D, R, V, BLOCK_D, BLOCK_R, BLOCK_V, BQ, BK, EVEN_Q, EVEN_K)
    scoring: tl.constexpr = tile.Scoring(SCALE, CAP, FAST_TANH, FOLDED, MULTIPLIER, BIAS, ALIBI, DROPOUT, SEED_WORDS, KEEP_SCALE, PRECISION)
    masking: tl.constexpr = tile.Masking(LEFT, RIGHT, ROWS, SEGMENTS, MASK, LISTED, BITS, MAP_HEADS, MAP_Q, MAP_K, CLEAN)
    lengths = tile.Lengths(T, S, offset)
    tiles = tile.TileArrays(tiles_ptr, row_ptr, list_ptr, pattern_ptr, bits_ptr)
    head_arrays = tile.HeadArrays(slopes_ptr, seeds_ptr, bias_ptr, bias_run, bias_rows, mask_ptr, mask_run, mask_rows, map_ptr)

    if LISTED:
        n, bh, count, at = tile.listed_program(tiles_ptr, S, BK, GROUP)
    else:
        n, bh, count = tile.program(S, BK, GROUP)
    b = (bh // K).to(tl.int64)
    kh = bh % K
    first = n * BK
    columns = first + tl.arange(0, BK)  # [BK]
    j = columns[:, None]  # [BK, 1]
    k_segment = j
    if SEGMENTS:
        k_segment = tl.load(kv_segments_ptr + b * S + columns, mask=columns < S, other=-1)[:, None]  # [BK, 1]
    # Loaded once for all queries: the tile's keys, shared keys and values.
    k = tile.load_rows(k_ptr + b * S * (K * D) + kh * D, first, K * D, columns < S, S, D, BK, BLOCK_D, not EVEN_K, False)  # [BK, BLOCK_D]
    rope = k
    if R > 0:
        rope = tile.load_rows(k_rope_ptr + b * S * R, first, R, columns < S, S, R, BK, BLOCK_R, not EVEN_K, False)  # [BK, BLOCK_R]
    v = tile.load_rows(v_ptr + b * S * (K * V) + kh * V, first, K * V, columns < S, S, V, BK, BLOCK_V, not EVEN_K, False)  # [BK, BLOCK_V]
    dk = tl.zeros([BK, BLOCK_D], tl.float32)  # [BK, BLOCK_D]
    dk_rope = 0.0
    if R > 0:
        dk_rope = tl.zeros([BK, BLOCK_R], tl.float32)  # [BK, BLOCK_R]
    dv = tl.zeros([BK, BLOCK_V], tl.float32)  # [BK, BLOCK_V]

    # dv = sum of drop(w) do, dk = scale * sum of dx q: over the heads of the group, and of each over the query tiles that see this one.
    if not LISTED:
        table: tl.constexpr = ROWS or SEGMENTS
        lo, full_lo, full_hi, hi = tile.query_tiles(tiles_ptr, b, n, offset, T, S, BQ, BK, LEFT, RIGHT, table, MASK)
        spans = tile.Spans(lo, full_lo, full_hi, hi, full_lo, full_hi, pattern_ptr)
    begin = kh * (H // K)
    end = (kh + 1) * (H // K)
    # With shared keys there are as many key heads as heads: no loop to the compiler, whose accumulators would be copied and spilled.
    if R > 0:
        begin = 0
        end = 1
    for h in range(begin, end):
        if R > 0:
            h = kh
        head = tile.head_of(head_arrays, b, h, lengths, H, scoring, masking)
        gates = j
        coarse = 0.0
        dgates = 0.0
        if ALIBI == tile.GATES:
            gates = tl.load(head.slope + columns, mask=columns < S, other=0.0)[:, None]  # [BK, 1]
            coarse = tile.coarse_of(head.slope, S, first)
            dgates = tl.zeros([BK], tl.float32)  # [BK]
        keys = tile.Keys(j, k_segment, gates, coarse)
        query_rows = tile.QueryRows(
            q_ptr + b * T * (H * (D + R)) + h * (D + R), do_ptr + b * T * (H * V) + h * V, lse_ptr + (b * H + h) * T, delta_ptr + (b * H + h) * T,
            position_ptr + b * T, start_ptr + b * T, end_ptr + b * T, q_segments_ptr + b * T, query_seen_ptr + b * T)
        if LISTED:
            spans = tile.listed_spans(tiles, b * H + h, at, count, LISTED)
        # Partly visible tiles, fully visible ones, partly visible ones, as in the forward kernel.
        for part in tl.static_range(3):
            if tile.part_runs(part, sizes, masking, RIGHT >= 0, LEFT >= 0):
                dk, dk_rope, dgates, dv = _key_gradient_tiles(
                    dk, dk_rope, dgates, dv, k, rope, v, spans, tiles, query_rows, keys, head, lengths, sizes, scoring, masking, part)
        if ALIBI == tile.GATES:
            tl.store(dmore_ptr + (b * H + h) * S + columns, dgates, mask=columns < S)

    tile.store_rows(dk_ptr + b * S * (K * D) + kh * D, (dk * SCALE).to(dk_ptr.dtype.element_ty), first, K * D, S, D, BK, BLOCK_D)
    tile.store_rows(dv_ptr + b * S * (K * V) + kh * V, dv.to(dv_ptr.dtype.element_ty), first, K * V, S, V, BK, BLOCK_V)
    if R > 0:
        tile.store_rows(dmore_ptr + (b * K + kh) * S * R, dk_rope * SCALE, first, R, S, R, BK, BLOCK_R)


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
):
    """One tile of the bias gradient `[rows, H or 1, T or 1, S or 1]`, summed in a fixed order over the axes that the bias broadcasts
    and over the `readers` of its row (batch rows)."""
    sizes: tl.constexpr = tile.Sizes(H, K, D, R, V, BLOCK_D, BLOCK_R, BLOCK_V, BQ, BK, EVEN_Q, EVEN_K)
    scoring: tl.constexpr = tile.Scoring(SCALE, CAP, FAST_TANH, FOLDED, MULTIPLIER, BIAS, ALIBI, DROPOUT, SEED_WORDS, KEEP_SCALE, PRECISION)
    # Without lists.
    masking: tl.constexpr = tile.Masking(LEFT, RIGHT, ROWS, SEGMENTS, MASK, 0, 0, False, 0, 0, CLEAN)
    lengths = tile.Lengths(T, S, offset)
    row_arrays = tile.RowArrays(position_ptr, start_ptr, end_ptr, q_segments_ptr, kv_segments_ptr, key_seen_ptr, query_seen_ptr)
    head_arrays = tile.HeadArrays(slopes_ptr, seeds_ptr, bias_ptr, bias_run, bias_rows, mask_ptr, mask_run, mask_rows, mask_ptr)
    over_queries: tl.constexpr = (tile.OVER_QUERIES & BIAS) != 0
    over_keys: tl.constexpr = (tile.OVER_KEYS & BIAS) != 0
    # The program's tile `m, n` of row `bias_row` and head of the bias. Where the bias lacks an axis, one tile covers all of it.
    count_m = tl.cdiv(T, BQ) if over_queries else 1
    count_n = tl.cdiv(S, BK) if over_keys else 1
    m = tl.program_id(0) % count_m
    n = tl.program_id(0) // count_m % count_n
    owner = tl.program_id(0) // (count_m * count_n)
    bias_row, head_lo, head_hi = owner, 0, H
    if tile.OVER_HEADS & BIAS:
        bias_row = owner // H
        head_lo = owner % H
        head_hi = head_lo + 1
    m_hi = m + 1 if over_queries else tl.cdiv(T, BQ)
    n_hi = n + 1 if over_keys else tl.cdiv(S, BK)

    total = tl.zeros([BQ, BK], tl.float32)  # [BQ, BK]
    for reader in range(0, readers):
        # Batch rows that share a row of the bias: `bias_run` consecutive ones, repeated after every `bias_rows` such runs.
        batch = (reader // bias_run * bias_rows + bias_row) * bias_run + reader % bias_run
        b = (tl.zeros([], tl.int32) + batch).to(tl.int64)
        for h in range(head_lo, head_hi):
            head = tile.head_of(head_arrays, b, h, lengths, H, scoring, masking)
            key_rows = tile.KeyRows(
                k_ptr + b * S * (K * D) + (h // (H // K)) * D, k_rope_ptr + b * S * R, v_ptr + b * S * (K * V) + (h // (H // K)) * V,
                kv_segments_ptr + b * S, key_seen_ptr + b * S)
            for i in range(m, m_hi):
                rows = i * BQ + tl.arange(0, BQ)  # [BQ]
                queries = tile.query_rows(rows, b, row_arrays, lengths, masking)
                query_tile = _load_query_tile(q_ptr, do_ptr, lse_ptr, delta_ptr, b, h, i * BQ, rows, rows < T, head, T, sizes, ALIBI, True)
                # The gradient of the scores after the soft cap, which the bias is added to.
                for j in range(n, n_hi):
                    _, _, _, _, after, _ = _score_gradients(
                        j * BK, key_rows, query_tile, queries, mask_ptr, mask_ptr, 0, head, lengths, sizes, scoring, masking, True, True, False)
                    total += after  # [BQ, BK]

    # Stored once, by its only owner; axes that the bias lacks are summed last.
    rows = m * BQ + tl.arange(0, BQ)
    columns = n * BK + tl.arange(0, BK)
    start_of = dbias_ptr + owner.to(tl.int64) * (T if over_queries else 1) * (S if over_keys else 1)
    if over_queries and over_keys:
        tl.store(start_of + rows[:, None].to(tl.int64) * S + columns[None, :], total,
                 mask=(rows < T)[:, None] & (columns < S)[None, :])  # [BQ, BK]
    elif over_queries:
        tl.store(start_of + rows, tl.sum(total, axis=1), mask=rows < T)  # [BQ]
    elif over_keys:
        tl.store(start_of + columns, tl.sum(total, axis=0), mask=columns < S)  # [BK]
    else:
        tl.store(start_of, tl.sum(tl.sum(total, axis=1), axis=0))
