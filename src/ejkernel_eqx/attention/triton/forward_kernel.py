"""The Triton forward kernel: one program per query tile and head, online softmax over its key tiles."""

import triton
import triton.language as tl

from ...launch.constants import LN2, LOG2E
from . import tile


# fmt: off
@triton.jit
def _attend_tiles(
    acc, total, top, q, q_rope, coarse,  # [BQ, BLOCK_V], [BQ], [BQ], [BQ, BLOCK_D], [BQ, BLOCK_R], []
    spans, tiles, key_rows, queries, head, lengths,
    sizes: tl.constexpr, scoring: tl.constexpr, masking: tl.constexpr, GUARD: tl.constexpr, PART: tl.constexpr,
):
    """Adds a part of the key tiles, or those that its entries of the list name, to the running sum, denominator and maximum of a query tile."""
    S = lengths.S
    BQ: tl.constexpr = sizes.BQ
    BK: tl.constexpr = sizes.BK
    PRECISION: tl.constexpr = scoring.PRECISION
    MASKED: tl.constexpr = PART != tile.FULL
    BOUND: tl.constexpr = MASKED and not sizes.EVEN_K
    CHECK: tl.constexpr = MASKED and (masking.ROWS or masking.SEGMENTS)
    lo, hi, entry = tile.span(spans, PART)
    # A list's next entry is carried: were it read where it is used, the compiler would prefetch keys and values later.
    for at in tl.range(lo, hi):
        n = at
        if masking.LISTED:
            n = entry
            entry = tl.load(tiles.list + at + 1).to(tl.int32)
        first = n * BK
        keys, ok = tile.key_columns(first, key_rows, head, S, BK, BOUND, CHECK, MASKED and masking.SEGMENTS, scoring.ALIBI)
        # Products by the head's keys and by those that all heads share.
        k = tile.load_rows(key_rows.k, first, sizes.K * sizes.D, ok, S, sizes.D, BK, sizes.BLOCK_D, BOUND, CHECK)  # [BK, BLOCK_D]
        qk = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BQ, BK]
        if sizes.R > 0:
            rope = tile.load_rows(key_rows.rope, first, sizes.R, ok, S, sizes.R, BK, sizes.BLOCK_R, BOUND, CHECK)  # [BK, BLOCK_R]
            qk = tl.dot(q_rope, tl.trans(rope), qk, input_precision=PRECISION)  # [BQ, BK]
        s, _ = tile.scores(qk, queries, keys, head, lengths, scoring)  # [BQ, BK]
        v = tile.load_rows(key_rows.v, first, sizes.K * sizes.V, ok, S, sizes.V, BK, sizes.BLOCK_V, BOUND, CHECK)  # [BK, BLOCK_V]
        if MASKED:
            bits = True
            if masking.BITS:
                bits = tile.load_bits(
                    tiles.bits, tl.load(spans.patterns + at), BQ, BK, masking.BITS
                )  # [BQ, BK]
            seen = tile.visible(queries, keys, bits, head, lengths, masking, not sizes.EVEN_K)  # [BQ, BK]
            s = tl.where(seen, s, float("-inf"))
            if masking.CLEAN and (masking.MASK or masking.LISTED):
                # A key that no row of the tile sees may hold NaN, and 0 * NaN is NaN.
                v = tl.where((tl.max(seen.to(tl.int32), axis=0) > 0)[:, None], v, 0.0)
        # Online softmax: weights are relative to the new maximum, and earlier sums are scaled by `alpha`.
        most = tl.max(s, axis=1) * scoring.MULTIPLIER  # [BQ]
        if scoring.ALIBI == tile.GATES:  # all scores lack what coarse sums add to them
            most += coarse - keys.coarse
        new_top = tl.maximum(top, most)  # [BQ]
        shift = new_top
        if GUARD:
            # Rows that have seen no key yet: subtracting minus infinity from itself would be NaN.
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # [BQ]
        lower = shift
        if scoring.ALIBI == tile.GATES:
            lower = shift - (coarse - keys.coarse)  # [BQ]
        p = tl.exp2(s * scoring.MULTIPLIER - lower[:, None])  # [BQ, BK]
        alpha = tl.exp2(top - shift)  # [BQ]
        total = total * alpha + tl.sum(p, axis=1)  # [BQ]
        # Dropout applies to the weights of the values, not to the denominator.
        if scoring.DROPOUT > 0:
            p = tl.where(
                tile.keep(queries, keys, head, scoring.DROPOUT), p * scoring.KEEP_SCALE, 0.0
            )  # [BQ, BK]
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)  # [BQ, BLOCK_V]
        top = new_top
    return acc, total, top


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, k_rope_ptr, v_ptr,  # [B, T, H, D + R], [B, S, K, D], [B, S, R] if R > 0, [B, S, K, V]
    bias_ptr, slopes_ptr, sinks_ptr, mask_ptr,  # bias and mask as in `over_scores`; slopes as in `HeadArrays`; [B, H]
    q_segments_ptr, kv_segments_ptr, start_ptr, end_ptr, position_ptr, key_seen_ptr,  # [B, T] and, of keys, [B, S]
    seeds_ptr, tiles_ptr,  # [B, H, SEED_WORDS], [B, tiles, 4] or of lists [rows, tiles, 8]
    row_ptr, list_ptr, pattern_ptr, bits_ptr, map_ptr,  # of lists, as in `TileLists`; the map as in `map_of`
    T, S, offset, bias_run, bias_rows, mask_run, mask_rows,
    out_ptr, lse_ptr,  # [B, T, H, V], [B, H, T]
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, R: tl.constexpr, V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    SCALE: tl.constexpr, CAP: tl.constexpr, FAST_TANH: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, BIAS: tl.constexpr,
    ALIBI: tl.constexpr, SINKS: tl.constexpr, MASK: tl.constexpr, ROWS: tl.constexpr, SEGMENTS: tl.constexpr,
    DROPOUT: tl.constexpr, SEED_WORDS: tl.constexpr, KEEP_SCALE: tl.constexpr, PRECISION: tl.constexpr, FOLDED: tl.constexpr, MULTIPLIER: tl.constexpr,
    LISTED: tl.constexpr, BITS: tl.constexpr, MAP_HEADS: tl.constexpr, MAP_Q: tl.constexpr, MAP_K: tl.constexpr,
    EVEN_Q: tl.constexpr, EVEN_K: tl.constexpr, GUARD: tl.constexpr, CLEAN: tl.constexpr, GROUP: tl.constexpr,
):
    sizes: tl.constexpr = tile.Sizes(H, K, D, R, V, BLOCK_D, BLOCK_R, BLOCK_V, BQ, BK, EVEN_Q, EVEN_K)
    scoring: tl.constexpr = tile.Scoring(SCALE, CAP, FAST_TANH, FOLDED, MULTIPLIER, BIAS, ALIBI, DROPOUT, SEED_WORDS, KEEP_SCALE, PRECISION)
    masking: tl.constexpr = tile.Masking(LEFT, RIGHT, ROWS, SEGMENTS, MASK, LISTED, BITS, MAP_HEADS, MAP_Q, MAP_K, CLEAN)
    lengths = tile.Lengths(T, S, offset)
    tiles = tile.TileArrays(tiles_ptr, row_ptr, list_ptr, pattern_ptr, bits_ptr)
    row_arrays = tile.RowArrays(
        position_ptr, start_ptr, end_ptr, q_segments_ptr, kv_segments_ptr, key_seen_ptr
    )
    head_arrays = tile.HeadArrays(slopes_ptr, seeds_ptr, bias_ptr, bias_run, bias_rows, mask_ptr, mask_run, mask_rows, map_ptr)

    m, bh, count, at = tile.query_program(tiles, lengths, sizes, LISTED, GROUP)
    b = (bh // H).to(tl.int64)
    h = bh % H
    first = m * BQ
    rows = first + tl.arange(0, BQ)  # [BQ]
    inside = rows < T  # [BQ]

    # What determines the visibility of these queries, and the terms of their scores besides q . k.
    queries = tile.query_rows(rows, b, row_arrays, lengths, masking)
    head = tile.head_of(head_arrays, b, h, lengths, H, scoring, masking)
    coarse = 0.0
    if ALIBI == tile.GATES:
        coarse = tile.coarse_of(head.gates, T, first)

    q, q_rope = tile.load_queries(q_ptr + b * T * (H * (D + R)) + h * (D + R), first, inside, T, sizes, not EVEN_Q, False)
    key_rows = tile.KeyRows(
        k_ptr + b * S * (K * D) + (h // (H // K)) * D, k_rope_ptr + b * S * R, v_ptr + b * S * (K * V) + (h // (H // K)) * V,
        kv_segments_ptr + b * S, key_seen_ptr + b * S)
    acc = tl.zeros([BQ, BLOCK_V], tl.float32)  # [BQ, BLOCK_V]
    # A sink is a key without a value: its score is the first maximum, its weight relative to that is 1.
    if SINKS:
        top = tl.zeros([BQ], tl.float32) + tl.load(sinks_ptr + b * H + h) * LOG2E  # [BQ]
        total = tl.full([BQ], 1.0, tl.float32)  # [BQ]
        if ALIBI == tile.GATES:  # scores lack the rest of the queries' sums
            top -= tl.load(head.gates + rows, mask=inside, other=0.0)  # [BQ]
    else:
        top = tl.full([BQ], float("-inf"), tl.float32)  # [BQ]
        total = tl.zeros([BQ], tl.float32)  # [BQ]

    # Partly visible tiles, fully visible ones, partly visible ones: three loops, since masking is compiled in or out.
    spans = tile.key_spans(tiles, b, bh, m, at, count, lengths, sizes, masking)
    for part in tl.static_range(3):
        if tile.part_runs(part, sizes, masking, LEFT >= 0, RIGHT >= 0 or not EVEN_K):
            acc, total, top = _attend_tiles(
                acc, total, top, q, q_rope, coarse, spans, tiles, key_rows, queries, head, lengths, sizes, scoring, masking, GUARD, part)

    # out = acc / total, lse = top + log(total); 0 and minus infinity for a row that saw no key.
    some = total > 0  # [BQ]
    acc = acc * (1.0 / tl.where(some, total, 1.0))[:, None]  # [BQ, BLOCK_V]
    if ALIBI == tile.GATES:
        top += tl.load(head.gates + rows, mask=inside, other=0.0)  # [BQ]
    lse = tl.where(some, (top + tl.log2(tl.where(some, total, 1.0))) * LN2, float("-inf"))  # [BQ]
    tile.store_rows(out_ptr + b * T * (H * V) + h * V, acc.to(out_ptr.dtype.element_ty), first, H * V, T, V, BQ, BLOCK_V)
    tl.store(lse_ptr + (b * H + h) * T + rows, lse, mask=inside)
