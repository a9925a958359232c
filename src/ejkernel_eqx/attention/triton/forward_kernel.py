"""The Triton forward kernel: one program per query tile and head, online softmax over its key tiles."""

import triton
import triton.language as tl

from ...launch.constants import LN2, LOG2E
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
    over_scores,
    program,
    query_rows,
    scores,
    store_rows,
    visible,
)


@triton.jit
def _attend_tiles(
    acc, total, top, q, q_rope, lo, hi, entry, k_base, rope_base, v_base,  # [BQ, BLOCK_V], [BQ], [BQ], [BQ, BLOCK_D], [BQ, BLOCK_R]; where a head's rows begin
    bias_ptr, mask_ptr, kv_segments_ptr, key_seen_ptr, list_ptr, pattern_ptr, bits_ptr, map_ptr, seed0, seed1, ahead, slope,
    i, position, start, end, q_segment, T, S,  # the queries' numbers, [BQ, 1] each
    K: tl.constexpr, D: tl.constexpr, R: tl.constexpr, V: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
    SCALE: tl.constexpr, CAP: tl.constexpr, FAST_TANH: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    BIAS: tl.constexpr, ALIBI: tl.constexpr, MASK: tl.constexpr, ROWS: tl.constexpr, SEGMENTS: tl.constexpr,
    DROPOUT: tl.constexpr, KEEP_SCALE: tl.constexpr, PRECISION: tl.constexpr, FOLDED: tl.constexpr, MULTIPLIER: tl.constexpr,
    LISTED: tl.constexpr, BITS: tl.constexpr, MAP_Q: tl.constexpr, MAP_K: tl.constexpr,
    EVEN_K: tl.constexpr, GUARD: tl.constexpr, CLEAN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds key tiles `lo .. hi`, or those that these entries of the list name, to the running sum, denominator and maximum of a query
    tile."""
    guarded: tl.constexpr = ROWS or SEGMENTS
    # A list's next entry is carried: were it read where it is used, the compiler would prefetch keys and values later.
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
        qk = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BQ, BK]
        if R > 0:
            rope = load_rows(rope_base, first, R, ok, S, R, BK, BLOCK_R, MASKED and not EVEN_K, MASKED and guarded)  # [BK, BLOCK_R]  # fmt: skip
            qk = tl.dot(q_rope, tl.trans(rope), qk, input_precision=PRECISION)  # [BQ, BK]
        s, _ = scores(qk, i, j, position, slope, bias_ptr, T, S, SCALE, CAP, FAST_TANH, BIAS, ALIBI, FOLDED)  # [BQ, BK]  # fmt: skip
        v = load_rows(v_base, first, K * V, ok, S, V, BK, BLOCK_V, MASKED and not EVEN_K, MASKED and guarded)  # [BK, BLOCK_V]  # fmt: skip
        if MASKED:
            listed = True
            if BITS:
                listed = load_bits(bits_ptr, tl.load(pattern_ptr + at), BQ, BK, BITS)  # [BQ, BK]
            seen = visible(i, j, position, start, end, q_segment, k_segment, mask_ptr, T, S, listed, map_ptr,
                           LEFT, RIGHT, ROWS, SEGMENTS, MASK, not EVEN_K, BITS, MAP_Q, MAP_K)  # [BQ, BK]  # fmt: skip
            s = tl.where(seen, s, float("-inf"))
            if CLEAN and (MASK or LISTED):
                # A key that no row of the tile sees may hold NaN, and 0 * NaN is NaN.
                v = tl.where((tl.max(seen.to(tl.int32), axis=0) > 0)[:, None], v, 0.0)
        # Online softmax: weights are relative to the new maximum, and earlier sums are scaled by `alpha`.
        new_top = tl.maximum(top, tl.max(s, axis=1) * MULTIPLIER)  # [BQ]
        shift = new_top
        if GUARD:
            # Rows that have seen no key yet: subtracting minus infinity from itself would be NaN.
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # [BQ]
        p = tl.exp2(s * MULTIPLIER - shift[:, None])  # [BQ, BK]
        alpha = tl.exp2(top - shift)  # [BQ]
        total = total * alpha + tl.sum(p, axis=1)  # [BQ]
        # Dropout applies to the weights of the values, not to the denominator.
        if DROPOUT > 0:
            p = tl.where(keep(seed0, seed1, ahead, position, j, DROPOUT), p * KEEP_SCALE, 0.0)  # [BQ, BK]
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)  # [BQ, BLOCK_V]
        top = new_top
    return acc, total, top


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, k_rope_ptr, v_ptr,  # [B, T, H, D + R], [B, S, K, D], [B, S, R] if R > 0, [B, S, K, V]
    bias_ptr, slopes_ptr, sinks_ptr, mask_ptr,  # bias and mask as in `over_scores`; [B, H] each
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
):  # fmt: skip
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

    # What determines the visibility of these queries, and the terms of their scores besides q . k.
    position, start, end, q_segment = query_rows(
        rows, inside, offset, b, T, position_ptr, start_ptr, end_ptr, q_segments_ptr, ROWS, SEGMENTS)  # fmt: skip
    position, start, end, q_segment = position[:, None], start[:, None], end[:, None], q_segment[:, None]  # [BQ, 1]  # fmt: skip
    slope, seed0, seed1, ahead = head_scalars(slopes_ptr, seeds_ptr, b, h, H, ALIBI, DROPOUT, SEED_WORDS)
    bias_row = over_scores(bias_ptr, b, h, bias_run, bias_rows, T, S, H, BIAS)
    mask_row = over_scores(mask_ptr, b, h, mask_run, mask_rows, T, S, H, MASK)

    q, q_rope = load_queries(q_ptr + b * T * (H * (D + R)) + h * (D + R), first, inside, T, H, D, R, BQ, BLOCK_D, BLOCK_R, not EVEN_Q, False)  # fmt: skip
    k_base = k_ptr + b * S * (K * D) + (h // (H // K)) * D
    rope_base = k_rope_ptr + b * S * R
    v_base = v_ptr + b * S * (K * V) + (h // (H // K)) * V
    acc = tl.zeros([BQ, BLOCK_V], tl.float32)  # [BQ, BLOCK_V]
    # A sink is a key without a value: its score is the first maximum, its weight relative to that is 1.
    if SINKS:
        top = tl.zeros([BQ], tl.float32) + tl.load(sinks_ptr + b * H + h) * LOG2E  # [BQ]
        total = tl.full([BQ], 1.0, tl.float32)  # [BQ]
    else:
        top = tl.full([BQ], float("-inf"), tl.float32)  # [BQ]
        total = tl.zeros([BQ], tl.float32)  # [BQ]

    # Most tiles are fully visible and need no mask: three loops, since masking is compiled in or out.
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
        acc, total, top = _attend_tiles(
            acc, total, top, q, q_rope, lo, full_lo, lo, k_base, rope_base, v_base, bias_row, mask_row, kv_segments_ptr + b * S, key_seen_ptr + b * S,
            list_ptr, pattern_ptr, bits_ptr, map_row, seed0, seed1, ahead, slope, i, position, start, end, q_segment, T, S, K, D, R, V, BQ, BK, BLOCK_D, BLOCK_R, BLOCK_V, SCALE, CAP, FAST_TANH, LEFT, RIGHT,
            BIAS, ALIBI, MASK, ROWS, SEGMENTS, DROPOUT, KEEP_SCALE, PRECISION, FOLDED, MULTIPLIER, LISTED, BITS, MAP_Q, MAP_K, EVEN_K, GUARD, CLEAN, True)  # fmt: skip
    if LISTED or not MASK:
        acc, total, top = _attend_tiles(
            acc, total, top, q, q_rope, full_lo, full_hi, whole, k_base, rope_base, v_base, bias_row, mask_row, kv_segments_ptr, key_seen_ptr,
            list_ptr, pattern_ptr, bits_ptr, map_row, seed0, seed1, ahead, slope, i, position, start, end, q_segment, T, S, K, D, R, V, BQ, BK, BLOCK_D, BLOCK_R, BLOCK_V, SCALE, CAP, FAST_TANH, LEFT, RIGHT,
            BIAS, ALIBI, MASK, ROWS, SEGMENTS, DROPOUT, KEEP_SCALE, PRECISION, FOLDED, MULTIPLIER, LISTED, BITS, MAP_Q, MAP_K, EVEN_K, GUARD, CLEAN, False)  # fmt: skip
        if LISTED:
            partly: tl.constexpr = lists_partly(BQ, BK, table, LEFT, RIGHT, MASK, BITS, MAP_Q, MAP_K, EVEN_K)
        else:
            partly: tl.constexpr = table or RIGHT >= 0 or not EVEN_K
        if partly:
            acc, total, top = _attend_tiles(
                acc, total, top, q, q_rope, full_hi, hi, partial, k_base, rope_base, v_base, bias_row, mask_row, kv_segments_ptr + b * S, key_seen_ptr + b * S,
                list_ptr, pattern_ptr, bits_ptr, map_row, seed0, seed1, ahead, slope, i, position, start, end, q_segment, T, S, K, D, R, V, BQ, BK, BLOCK_D, BLOCK_R, BLOCK_V, SCALE, CAP, FAST_TANH, LEFT, RIGHT,
                BIAS, ALIBI, MASK, ROWS, SEGMENTS, DROPOUT, KEEP_SCALE, PRECISION, FOLDED, MULTIPLIER, LISTED, BITS, MAP_Q, MAP_K, EVEN_K, GUARD, CLEAN, True)  # fmt: skip

    # out = acc / total, lse = top + log(total); 0 and minus infinity for a row that saw no key.
    some = total > 0  # [BQ]
    acc = acc * (1.0 / tl.where(some, total, 1.0))[:, None]  # [BQ, BLOCK_V]
    lse = tl.where(some, (top + tl.log2(tl.where(some, total, 1.0))) * LN2, float("-inf"))  # [BQ]
    store_rows(out_ptr + b * T * (H * V) + h * V, acc.to(out_ptr.dtype.element_ty), first, H * V, T, V, BQ, BLOCK_V)  # fmt: skip
    tl.store(lse_ptr + (b * H + h) * T + rows, lse, mask=inside)
