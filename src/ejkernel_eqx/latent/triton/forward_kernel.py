"""The Triton forward kernel of latent attention: one program per query tile and head, online softmax over its key tiles."""

import triton
import triton.language as tl

from ...attention.triton.tile import key_tiles, program, query_rows, store_rows
from ...launch.constants import LN2, LOG2E
from .tile import load_keys, load_queries, masked_scores


@triton.jit
def _attend_tiles(
    acc, total, top, q, q_rope, lo, hi, k_base, rope_base, v_base,  # [BQ, BLOCK_V], [BQ], [BQ], [BQ, BLOCK_D], [BQ, BLOCK_R]
    kv_segments_ptr, key_seen_ptr, i, position, start, end, q_segment, T, S,  # the queries' numbers, [BQ, 1] each
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr, FAST_TANH: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, ROWS: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
    FOLDED: tl.constexpr, MULTIPLIER: tl.constexpr, EVEN_K: tl.constexpr, GUARD: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds key tiles `lo .. hi` to the running sum, denominator and maximum of a query tile."""
    guarded: tl.constexpr = ROWS or SEGMENTS
    for n in tl.range(lo, hi):
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
        k, rope, v = load_keys(k_base, rope_base, v_base, first, ok, S, H, D, R, V, BK, BLOCK_D, BLOCK_R, BLOCK_V,
                               MASKED and not EVEN_K, MASKED and guarded)  # fmt: skip
        qk = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BQ, BK]
        qk = tl.dot(q_rope, tl.trans(rope), qk, input_precision=PRECISION)  # [BQ, BK]
        s, _, _ = masked_scores(qk, i, j, position, start, end, q_segment, k_segment, T, S, SCALE, CAP, FAST_TANH,
                                LEFT, RIGHT, ROWS, SEGMENTS, FOLDED, MASKED, not EVEN_K)  # [BQ, BK]  # fmt: skip
        # Online softmax: weights are relative to the new maximum, and earlier sums are scaled by `alpha`.
        new_top = tl.maximum(top, tl.max(s, axis=1) * MULTIPLIER)  # [BQ]
        shift = new_top
        if GUARD:
            # Rows that have seen no key yet: subtracting minus infinity from itself would be NaN.
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # [BQ]
        p = tl.exp2(s * MULTIPLIER - shift[:, None])  # [BQ, BK]
        alpha = tl.exp2(top - shift)  # [BQ]
        total = total * alpha + tl.sum(p, axis=1)  # [BQ]
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)  # [BQ, BLOCK_V]
        top = new_top
    return acc, total, top


@triton.jit
def latent_forward_kernel(
    q_ptr, k_ptr, k_rope_ptr, v_ptr, sinks_ptr,  # [B, T, H, D + R], [B, S, H, D], [B, S, R], [B, S, H, V], [B, H]
    q_segments_ptr, kv_segments_ptr, start_ptr, end_ptr, position_ptr, key_seen_ptr,  # [B, T] and, of keys, [B, S]
    tiles_ptr, T, S, offset,  # [B, tiles, 4]
    out_ptr, lse_ptr,  # [B, T, H, V], [B, H, T]
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    SCALE: tl.constexpr, CAP: tl.constexpr, FAST_TANH: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    SINKS: tl.constexpr, ROWS: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr, FOLDED: tl.constexpr,
    MULTIPLIER: tl.constexpr, EVEN_Q: tl.constexpr, EVEN_K: tl.constexpr, GUARD: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    m, bh, count = program(T, BQ, GROUP)
    m = count - 1 - m  # causal rows with the most keys first
    b = (bh // H).to(tl.int64)
    h = bh % H
    first = m * BQ
    rows = first + tl.arange(0, BQ)  # [BQ]
    i = rows[:, None]  # [BQ, 1]
    inside = rows < T  # [BQ]
    position, start, end, q_segment = query_rows(
        rows, inside, offset, b, T, position_ptr, start_ptr, end_ptr, q_segments_ptr, ROWS, SEGMENTS)  # fmt: skip
    position, start, end, q_segment = position[:, None], start[:, None], end[:, None], q_segment[:, None]  # [BQ, 1]  # fmt: skip

    q, q_rope = load_queries(q_ptr + (b * T * H + h) * (D + R), first, inside, T, H, D, R, BQ, BLOCK_D, BLOCK_R, not EVEN_Q, False)  # fmt: skip
    k_base = k_ptr + (b * S * H + h) * D
    rope_base = k_rope_ptr + b * S * R
    v_base = v_ptr + (b * S * H + h) * V
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
    lo, full_lo, full_hi, hi = key_tiles(tiles_ptr, b, m, offset, T, S, BQ, BK, LEFT, RIGHT, table, 0)
    if table or LEFT >= 0:
        acc, total, top = _attend_tiles(
            acc, total, top, q, q_rope, lo, full_lo, k_base, rope_base, v_base, kv_segments_ptr + b * S, key_seen_ptr + b * S,
            i, position, start, end, q_segment, T, S, H, D, R, V, BK, BLOCK_D, BLOCK_R, BLOCK_V, SCALE, CAP, FAST_TANH,
            LEFT, RIGHT, ROWS, SEGMENTS, PRECISION, FOLDED, MULTIPLIER, EVEN_K, GUARD, True)  # fmt: skip
    acc, total, top = _attend_tiles(
        acc, total, top, q, q_rope, full_lo, full_hi, k_base, rope_base, v_base, kv_segments_ptr, key_seen_ptr,
        i, position, start, end, q_segment, T, S, H, D, R, V, BK, BLOCK_D, BLOCK_R, BLOCK_V, SCALE, CAP, FAST_TANH,
        LEFT, RIGHT, ROWS, SEGMENTS, PRECISION, FOLDED, MULTIPLIER, EVEN_K, GUARD, False)  # fmt: skip
    if table or RIGHT >= 0 or not EVEN_K:
        acc, total, top = _attend_tiles(
            acc, total, top, q, q_rope, full_hi, hi, k_base, rope_base, v_base, kv_segments_ptr + b * S, key_seen_ptr + b * S,
            i, position, start, end, q_segment, T, S, H, D, R, V, BK, BLOCK_D, BLOCK_R, BLOCK_V, SCALE, CAP, FAST_TANH,
            LEFT, RIGHT, ROWS, SEGMENTS, PRECISION, FOLDED, MULTIPLIER, EVEN_K, GUARD, True)  # fmt: skip

    # out = acc / total, lse = top + log(total); 0 and minus infinity for a row that saw no key.
    some = total > 0  # [BQ]
    acc = acc * (1.0 / tl.where(some, total, 1.0))[:, None]  # [BQ, BLOCK_V]
    lse = tl.where(some, (top + tl.log2(tl.where(some, total, 1.0))) * LN2, float("-inf"))  # [BQ]
    store_rows(
        out_ptr + (b * T * H + h) * V, acc.to(out_ptr.dtype.element_ty), first, H * V, T, V, BQ, BLOCK_V
    )
    tl.store(lse_ptr + (b * H + h) * T + rows, lse, mask=inside)
