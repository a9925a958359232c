"""The Triton forward kernel: one program per query tile and head, online softmax over its key tiles."""

import triton
import triton.language as tl

from ...launch.constants import LN2, LOG2E
from .tile import (
    head_of,
    keep,
    key_tiles,
    Kind,
    load_keys,
    load_rows,
    load_values,
    program_queries,
    scores,
    Sizes,
    store_rows,
    visible,
)


@triton.jit
def _attend_tiles(
    acc, total, top, q, lo, hi, k_base, v_base,  # [BQ, BLOCK_V], [BQ], [BQ], [BQ, BLOCK_D]; where a head's rows begin
    kv_segments_ptr, key_seen_ptr, queries, head, kind, size, GUARD: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds key tiles `lo .. hi` to the running sum, denominator and maximum of a query tile."""
    for n in tl.range(lo, hi):
        j, k_segment, ok, k = load_keys(n, k_base, kv_segments_ptr, key_seen_ptr, kind, size, MASKED)
        qk = tl.dot(q, tl.trans(k), input_precision=kind.PRECISION)  # [BQ, BK]
        s, _ = scores(qk, j, queries, head, kind, size)  # [BQ, BK]
        v = load_values(n, v_base, ok, kind, size, MASKED)  # [BK, BLOCK_V]
        if MASKED:
            seen = visible(j, k_segment, queries, head, kind, size, not size.EVEN_K)  # [BQ, BK]
            s = tl.where(seen, s, float("-inf"))
            if kind.MASK:
                # A key that no row of the tile sees may hold NaN, and 0 * NaN is NaN.
                v = tl.where((tl.max(seen.to(tl.int32), axis=0) > 0)[:, None], v, 0.0)
        # Online softmax: the weights are relative to the new maximum, sums of before shrink by `alpha`.
        new_top = tl.maximum(top, tl.max(s, axis=1) * kind.MULTIPLIER)  # [BQ]
        shift = new_top
        if GUARD:
            # Rows that have seen nothing yet: minus infinity from minus infinity is NaN.
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # [BQ]
        p = tl.exp2(s * kind.MULTIPLIER - shift[:, None])  # [BQ, BK]
        alpha = tl.exp2(top - shift)  # [BQ]
        total = total * alpha + tl.sum(p, axis=1)  # [BQ]
        # Dropout thins out the weights of values, not the denominator.
        if kind.DROPOUT > 0:
            p = tl.where(keep(head, queries.position, j, kind.DROPOUT), p * kind.KEEP_SCALE, 0.0)  # [BQ, BK]
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=kind.PRECISION)  # [BQ, BLOCK_V]
        top = new_top
    return acc, total, top


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr,  # [B, T, H, D], [B, S, K, D], [B, S, K, V]
    bias_ptr, slopes_ptr, sinks_ptr, mask_ptr,  # bias and mask as in `over_scores`; [B, H] each
    q_segments_ptr, kv_segments_ptr, start_ptr, end_ptr, position_ptr, key_seen_ptr,  # [B, T] and, of keys, [B, S]
    seeds_ptr, tiles_ptr, T, S, offset, bias_run, bias_rows, mask_run, mask_rows,  # [B, H, 2], [B, tiles, 4]
    out_ptr, lse_ptr,  # [B, T, H, V], [B, H, T]
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    SCALE: tl.constexpr, CAP: tl.constexpr, FAST_TANH: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, BIAS: tl.constexpr,
    ALIBI: tl.constexpr, SINKS: tl.constexpr, MASK: tl.constexpr, ROWS: tl.constexpr, SEGMENTS: tl.constexpr,
    DROPOUT: tl.constexpr, KEEP_SCALE: tl.constexpr, PRECISION: tl.constexpr, FOLDED: tl.constexpr, MULTIPLIER: tl.constexpr,
    EVEN_Q: tl.constexpr, EVEN_K: tl.constexpr, GUARD: tl.constexpr, CLEAN: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    m, _, b, h, rows, inside, queries = program_queries(
        T, offset, position_ptr, start_ptr, end_ptr, q_segments_ptr, H, BQ, GROUP, ROWS, SEGMENTS)  # fmt: skip
    head = head_of(slopes_ptr, seeds_ptr, bias_ptr, mask_ptr, b, h, bias_run, bias_rows, mask_run, mask_rows, T, S,
                   H, ALIBI, DROPOUT, BIAS, MASK)  # fmt: skip
    first = m * BQ
    q = load_rows(q_ptr + b * T * (H * D) + h * D, first, H * D, inside, T, D, BQ, BLOCK_D, not EVEN_Q, False)  # [BQ, BLOCK_D]  # fmt: skip
    k_base = k_ptr + b * S * (K * D) + (h // (H // K)) * D
    v_base = v_ptr + b * S * (K * V) + (h // (H // K)) * V
    acc = tl.zeros([BQ, BLOCK_V], tl.float32)  # [BQ, BLOCK_V]
    # A sink is a key without a value: its score is the first maximum, its weight relative to that is 1.
    if SINKS:
        top = tl.zeros([BQ], tl.float32) + tl.load(sinks_ptr + b * H + h) * LOG2E  # [BQ]
        total = tl.full([BQ], 1.0, tl.float32)  # [BQ]
    else:
        top = tl.full([BQ], float("-inf"), tl.float32)  # [BQ]
        total = tl.zeros([BQ], tl.float32)  # [BQ]

    # Most tiles are seen whole and take no mask: three loops, as masking is compiled in or out.
    table: tl.constexpr = ROWS or SEGMENTS
    borders = key_tiles(tiles_ptr, b, m, offset, T, S, BQ, BK, LEFT, RIGHT, table, MASK)
    for part in tl.static_range(3):
        if (table or LEFT >= 0 or MASK, not MASK, not MASK and (table or RIGHT >= 0 or not EVEN_K))[part]:
            acc, total, top = _attend_tiles(
                acc, total, top, q, borders[part], borders[part + 1], k_base, v_base, kv_segments_ptr + b * S, key_seen_ptr + b * S, queries, head,
                Kind(SCALE, CAP, FAST_TANH, LEFT, RIGHT, BIAS, ALIBI, MASK, ROWS, SEGMENTS, DROPOUT, KEEP_SCALE, PRECISION, FOLDED, MULTIPLIER),
                Sizes(T, S, H, K, D, V, BLOCK_D, BLOCK_V, BQ, BK, EVEN_Q, EVEN_K), GUARD, part != 1)  # fmt: skip

    # out = acc / total, lse = top + log(total); 0 and minus infinity for a row that saw nothing.
    some = total > 0  # [BQ]
    acc = acc * (1.0 / tl.where(some, total, 1.0))[:, None]  # [BQ, BLOCK_V]
    lse = tl.where(some, (top + tl.log2(tl.where(some, total, 1.0))) * LN2, float("-inf"))  # [BQ]
    store_rows(out_ptr + b * T * (H * V) + h * V, acc.to(out_ptr.dtype.element_ty), first, H * V, T, V, BQ, BLOCK_V)  # fmt: skip
    tl.store(lse_ptr + (b * H + h) * T + rows, lse, mask=inside)
