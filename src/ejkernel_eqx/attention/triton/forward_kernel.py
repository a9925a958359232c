"""The Triton forward kernel: one program per query tile and head, online softmax over its key tiles."""

import triton
import triton.language as tl

from .tile import (
    head_scalars,
    keep,
    key_tiles,
    load_rows,
    over_scores,
    program,
    query_rows,
    scores,
    store_rows,
    visible,
)


@triton.jit
def _attend_tiles(
    acc, total, top, q, lo, hi, k_base, v_base, bias_ptr, mask_ptr, kv_segments_ptr, key_seen_ptr, seed0, seed1, slope,
    i, position, start, end, q_segment, T, S,
    K: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    SCALE: tl.constexpr, CAP: tl.constexpr, FAST_TANH: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, BIAS: tl.constexpr,
    ALIBI: tl.constexpr, MASK: tl.constexpr, ROWS: tl.constexpr, SEGMENTS: tl.constexpr, DROPOUT: tl.constexpr, KEEP_SCALE: tl.constexpr,
    PRECISION: tl.constexpr, FOLDED: tl.constexpr, MULTIPLIER: tl.constexpr, EVEN_K: tl.constexpr, GUARD: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Adds key tiles `lo .. hi` to the running sum, denominator and maximum of a query tile."""
    guarded: tl.constexpr = ROWS or SEGMENTS
    for n in tl.range(lo, hi):
        first = n * BK
        columns = first + tl.arange(0, BK)
        j = columns[None, :]
        ok = columns < S
        k_segment = j
        if MASKED and guarded:
            ok = ok & (tl.load(key_seen_ptr + columns, mask=ok, other=0) != 0)
            if SEGMENTS:
                k_segment = tl.load(kv_segments_ptr + columns, mask=columns < S, other=-1)[None, :]
        k = load_rows(k_base, first, K * D, ok, S, D, BK, BLOCK_D, MASKED and not EVEN_K, MASKED and guarded)
        qk = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BQ, BK]
        s, _ = scores(qk, i, j, position, slope, bias_ptr, T, S, SCALE, CAP, FAST_TANH, BIAS, ALIBI, FOLDED)
        v = load_rows(v_base, first, K * V, ok, S, V, BK, BLOCK_V, MASKED and not EVEN_K, MASKED and guarded)
        if MASKED:
            seen = visible(i, j, position, start, end, q_segment, k_segment, mask_ptr, T, S, LEFT, RIGHT, ROWS, SEGMENTS, MASK,
                           not EVEN_K)  # fmt: skip
            s = tl.where(seen, s, float("-inf"))
            if MASK:
                v = tl.where((tl.max(seen.to(tl.int32), axis=0) > 0)[:, None], v, 0.0)
        new_top = tl.maximum(top, tl.max(s, axis=1) * MULTIPLIER)
        shift = new_top
        if GUARD:
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(s * MULTIPLIER - shift[:, None])
        alpha = tl.exp2(top - shift)
        total = total * alpha + tl.sum(p, axis=1)
        if DROPOUT > 0:
            p = tl.where(keep(seed0, seed1, position, j, DROPOUT), p * KEEP_SCALE, 0.0)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)  # [BQ, BLOCK_V]
        top = new_top
    return acc, total, top


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, slopes_ptr, sinks_ptr, mask_ptr, q_segments_ptr, kv_segments_ptr, start_ptr, end_ptr,
    position_ptr, key_seen_ptr, seeds_ptr, tiles_ptr, T, S, offset, bias_run, bias_rows, mask_run, mask_rows,
    out_ptr, lse_ptr,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BQ: tl.constexpr,
    BK: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr, FAST_TANH: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    BIAS: tl.constexpr, ALIBI: tl.constexpr, SINKS: tl.constexpr, MASK: tl.constexpr, ROWS: tl.constexpr, SEGMENTS: tl.constexpr,
    DROPOUT: tl.constexpr, KEEP_SCALE: tl.constexpr, PRECISION: tl.constexpr, FOLDED: tl.constexpr, MULTIPLIER: tl.constexpr,
    EVEN_Q: tl.constexpr, EVEN_K: tl.constexpr, GUARD: tl.constexpr, CLEAN: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    m, bh, count = program(T, BQ, GROUP)
    m = count - 1 - m  # causal rows with the most keys first
    b = (bh // H).to(tl.int64)
    h = bh % H
    first = m * BQ
    rows = first + tl.arange(0, BQ)
    i = rows[:, None]
    inside = rows < T

    position, start, end, q_segment = query_rows(
        rows, inside, offset, b, T, position_ptr, start_ptr, end_ptr, q_segments_ptr, ROWS, SEGMENTS)  # fmt: skip
    position, start, end, q_segment = position[:, None], start[:, None], end[:, None], q_segment[:, None]
    slope, seed0, seed1 = head_scalars(slopes_ptr, seeds_ptr, b, h, H, ALIBI, DROPOUT)
    bias_row = over_scores(bias_ptr, b, h, bias_run, bias_rows, T, S, H, BIAS)
    mask_row = over_scores(mask_ptr, b, h, mask_run, mask_rows, T, S, H, MASK)

    q = load_rows(q_ptr + b * T * (H * D) + h * D, first, H * D, inside, T, D, BQ, BLOCK_D, not EVEN_Q, False)
    k_base = k_ptr + b * S * (K * D) + (h // (H // K)) * D
    v_base = v_ptr + b * S * (K * V) + (h // (H // K)) * V
    acc = tl.zeros([BQ, BLOCK_V], tl.float32)
    if SINKS:
        top = tl.zeros([BQ], tl.float32) + tl.load(sinks_ptr + b * H + h) * 1.4426950408889634
        total = tl.full([BQ], 1.0, tl.float32)
    else:
        top = tl.full([BQ], float("-inf"), tl.float32)
        total = tl.zeros([BQ], tl.float32)

    table: tl.constexpr = ROWS or SEGMENTS
    lo, full_lo, full_hi, hi = key_tiles(tiles_ptr, b, m, offset, T, S, BQ, BK, LEFT, RIGHT, table, MASK)
    if table or LEFT >= 0 or MASK:
        acc, total, top = _attend_tiles(
            acc, total, top, q, lo, full_lo, k_base, v_base, bias_row, mask_row, kv_segments_ptr + b * S, key_seen_ptr + b * S, seed0, seed1,
            slope, i, position, start, end, q_segment, T, S, K, D, V, BK, BLOCK_D, BLOCK_V, SCALE, CAP, FAST_TANH, LEFT, RIGHT, BIAS,
            ALIBI, MASK, ROWS, SEGMENTS, DROPOUT, KEEP_SCALE, PRECISION, FOLDED, MULTIPLIER, EVEN_K, GUARD, True)  # fmt: skip
    if not MASK:
        acc, total, top = _attend_tiles(
            acc, total, top, q, full_lo, full_hi, k_base, v_base, bias_row, mask_row, kv_segments_ptr, key_seen_ptr, seed0, seed1,
            slope, i, position, start, end, q_segment, T, S, K, D, V, BK, BLOCK_D, BLOCK_V, SCALE, CAP, FAST_TANH, LEFT, RIGHT, BIAS,
            ALIBI, MASK, ROWS, SEGMENTS, DROPOUT, KEEP_SCALE, PRECISION, FOLDED, MULTIPLIER, EVEN_K, GUARD, False)  # fmt: skip
        if table or RIGHT >= 0 or not EVEN_K:
            acc, total, top = _attend_tiles(
                acc, total, top, q, full_hi, hi, k_base, v_base, bias_row, mask_row, kv_segments_ptr + b * S, key_seen_ptr + b * S, seed0, seed1,
                slope, i, position, start, end, q_segment, T, S, K, D, V, BK, BLOCK_D, BLOCK_V, SCALE, CAP, FAST_TANH, LEFT, RIGHT, BIAS,
                ALIBI, MASK, ROWS, SEGMENTS, DROPOUT, KEEP_SCALE, PRECISION, FOLDED, MULTIPLIER, EVEN_K, GUARD, True)  # fmt: skip

    some = total > 0
    acc = acc * (1.0 / tl.where(some, total, 1.0))[:, None]
    lse = tl.where(some, (top + tl.log2(tl.where(some, total, 1.0))) * 0.6931471805599453, float("-inf"))
    store_rows(
        out_ptr + b * T * (H * V) + h * V, acc.to(out_ptr.dtype.element_ty), first, H * V, T, V, BQ, BLOCK_V
    )
    tl.store(lse_ptr + (b * H + h) * T + rows, lse, mask=inside)
