"""The Triton backward of latent attention: two kernels, each recomputing the weights from `lse`, neither with atomics.

`lse` is in log2 units, with `+inf` for a query that sees no key, so that its weights are zero without a branch.
"""

import triton
import triton.language as tl

from ...attention.triton.tile import key_tiles, load_rows, program, query_rows, query_tiles, store_rows
from .tile import load_keys, load_queries, masked_scores, score_gradient


@triton.jit
def _query_gradient_tiles(
    dq, dq_rope, q, q_rope, do, lse, delta, lo, hi, k_base, rope_base, v_base,  # [BQ, BLOCK_D], [BQ, BLOCK_R], twice; [BQ, BLOCK_V]; [BQ, 1] each
    kv_segments_ptr, key_seen_ptr, i, position, start, end, q_segment, T, S,  # the queries' numbers, [BQ, 1] each
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr, FAST_TANH: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, ROWS: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
    FOLDED: tl.constexpr, MULTIPLIER: tl.constexpr, EVEN_K: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    # Adds key tiles `lo .. hi` to the gradients of a query tile.
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
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)  # [BQ, BK]
        s, t, seen = masked_scores(qk, i, j, position, start, end, q_segment, k_segment, T, S, SCALE, CAP, FAST_TANH,
                                   LEFT, RIGHT, ROWS, SEGMENTS, FOLDED, MASKED, not EVEN_K)  # [BQ, BK]  # fmt: skip
        _, ds = score_gradient(s, t, seen, dp, lse, delta, CAP, MULTIPLIER, MASKED)  # [BQ, BK]
        ds = ds.to(k.dtype)
        dq = tl.dot(ds, k, dq, input_precision=PRECISION)  # [BQ, BLOCK_D]
        dq_rope = tl.dot(ds, rope, dq_rope, input_precision=PRECISION)  # [BQ, BLOCK_R]
    return dq, dq_rope


@triton.jit
def latent_query_gradient_kernel(
    q_ptr, k_ptr, k_rope_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr,  # do as out, lse and delta [B, H, T]; all else as in the forward kernel
    q_segments_ptr, kv_segments_ptr, start_ptr, end_ptr, position_ptr, key_seen_ptr, tiles_ptr, T, S, offset,
    dq_ptr,  # [B, T, H, D + R]
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    SCALE: tl.constexpr, CAP: tl.constexpr, FAST_TANH: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    ROWS: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr, FOLDED: tl.constexpr, MULTIPLIER: tl.constexpr,
    EVEN_Q: tl.constexpr, EVEN_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """`dq` of one query tile and head."""
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

    # Loaded once for all keys: the tile's queries, their cotangents and their softmax terms.
    q, q_rope = load_queries(q_ptr + (b * T * H + h) * (D + R), first, inside, T, H, D, R, BQ, BLOCK_D, BLOCK_R, not EVEN_Q, False)  # fmt: skip
    do = load_rows(do_ptr + (b * T * H + h) * V, first, H * V, inside, T, V, BQ, BLOCK_V, not EVEN_Q, False)  # [BQ, BLOCK_V]  # fmt: skip
    lse = tl.load(lse_ptr + (b * H + h) * T + rows, mask=inside, other=float("inf"))[:, None]  # [BQ, 1]
    delta = tl.load(delta_ptr + (b * H + h) * T + rows, mask=inside, other=0.0)[:, None]  # [BQ, 1]
    k_base = k_ptr + (b * S * H + h) * D
    rope_base = k_rope_ptr + b * S * R
    v_base = v_ptr + (b * S * H + h) * V
    dq = tl.zeros([BQ, BLOCK_D], tl.float32)  # [BQ, BLOCK_D]
    dq_rope = tl.zeros([BQ, BLOCK_R], tl.float32)  # [BQ, BLOCK_R]

    # dq = scale * sum over keys of ds k: partly visible tiles, fully visible ones, partly visible ones, as in the forward kernel.
    table: tl.constexpr = ROWS or SEGMENTS
    lo, full_lo, full_hi, hi = key_tiles(tiles_ptr, b, m, offset, T, S, BQ, BK, LEFT, RIGHT, table, 0)
    if table or LEFT >= 0:
        dq, dq_rope = _query_gradient_tiles(
            dq, dq_rope, q, q_rope, do, lse, delta, lo, full_lo, k_base, rope_base, v_base, kv_segments_ptr + b * S, key_seen_ptr + b * S,
            i, position, start, end, q_segment, T, S, H, D, R, V, BK, BLOCK_D, BLOCK_R, BLOCK_V, SCALE, CAP, FAST_TANH,
            LEFT, RIGHT, ROWS, SEGMENTS, PRECISION, FOLDED, MULTIPLIER, EVEN_K, True)  # fmt: skip
    dq, dq_rope = _query_gradient_tiles(
        dq, dq_rope, q, q_rope, do, lse, delta, full_lo, full_hi, k_base, rope_base, v_base, kv_segments_ptr, key_seen_ptr,
        i, position, start, end, q_segment, T, S, H, D, R, V, BK, BLOCK_D, BLOCK_R, BLOCK_V, SCALE, CAP, FAST_TANH,
        LEFT, RIGHT, ROWS, SEGMENTS, PRECISION, FOLDED, MULTIPLIER, EVEN_K, False)  # fmt: skip
    if table or RIGHT >= 0 or not EVEN_K:
        dq, dq_rope = _query_gradient_tiles(
            dq, dq_rope, q, q_rope, do, lse, delta, full_hi, hi, k_base, rope_base, v_base, kv_segments_ptr + b * S, key_seen_ptr + b * S,
            i, position, start, end, q_segment, T, S, H, D, R, V, BK, BLOCK_D, BLOCK_R, BLOCK_V, SCALE, CAP, FAST_TANH,
            LEFT, RIGHT, ROWS, SEGMENTS, PRECISION, FOLDED, MULTIPLIER, EVEN_K, True)  # fmt: skip

    out = dq_ptr + (b * T * H + h) * (D + R)
    store_rows(out, (dq * SCALE).to(dq_ptr.dtype.element_ty), first, H * (D + R), T, D, BQ, BLOCK_D)
    store_rows(out + D, (dq_rope * SCALE).to(dq_ptr.dtype.element_ty), first, H * (D + R), T, R, BQ, BLOCK_R)


@triton.jit
def _key_gradient_tiles(
    dk, dk_rope, dv, k, rope, v, lo, hi, q_base, do_base, lse_base, delta_base,  # [BK, BLOCK_D], [BK, BLOCK_R], [BK, BLOCK_V], twice
    q_segments_ptr, start_ptr, end_ptr, position_ptr, query_seen_ptr, offset, j, k_segment, T, S,  # the keys' numbers, [BK, 1] each
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, V: tl.constexpr, BQ: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr, FAST_TANH: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, ROWS: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
    FOLDED: tl.constexpr, MULTIPLIER: tl.constexpr, EVEN_Q: tl.constexpr, EVEN_K: tl.constexpr, CLEAN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    # Adds query tiles `lo .. hi` of one head to the gradients of a key tile. Keys are the rows: no gradient needs transposed weights.
    guarded: tl.constexpr = ROWS or SEGMENTS
    for m in tl.range(lo, hi):
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
        # Queries that see no key can hold anything, so they are not read.
        if MASKED and guarded:
            ok = ok & (tl.load(query_seen_ptr + rows, mask=inside, other=0) != 0)
            if ROWS:
                position = tl.load(position_ptr + rows, mask=inside, other=0)[None, :]
                start = tl.load(start_ptr + rows, mask=inside, other=0)[None, :]
                end = tl.load(end_ptr + rows, mask=inside, other=0)[None, :]
            if SEGMENTS:
                q_segment = tl.load(q_segments_ptr + rows, mask=inside, other=-1)[None, :]
        q, q_rope = load_queries(
            q_base, first, ok, T, H, D, R, BQ, BLOCK_D, BLOCK_R, not EVEN_Q, MASKED and guarded
        )
        do = load_rows(
            do_base, first, H * V, ok, T, V, BQ, BLOCK_V, not EVEN_Q, MASKED and guarded
        )  # [BQ, BLOCK_V]
        lse = tl.load(lse_base + rows, mask=inside, other=float("inf"))[None, :]  # [1, BQ]
        delta = tl.load(delta_base + rows, mask=inside, other=0.0)[None, :]  # [1, BQ]
        qk = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [BK, BQ]
        qk = tl.dot(rope, tl.trans(q_rope), qk, input_precision=PRECISION)  # [BK, BQ]
        dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)  # [BK, BQ]
        s, t, seen = masked_scores(qk, i, j, position, start, end, q_segment, k_segment, T, S, SCALE, CAP, FAST_TANH,
                                   LEFT, RIGHT, ROWS, SEGMENTS, FOLDED, MASKED, False)  # [BK, BQ]  # fmt: skip
        p, ds = score_gradient(s, t, seen, dp, lse, delta, CAP, MULTIPLIER, MASKED)  # [BK, BQ]
        # A query that sees no key of the tile may hold NaN, and 0 * NaN is NaN.
        if MASKED and CLEAN:
            row_seen = (tl.max(seen.to(tl.int32), axis=0) > 0)[:, None]  # [BQ, 1]
            q = tl.where(row_seen, q, 0.0)
            q_rope = tl.where(row_seen, q_rope, 0.0)
            do = tl.where(row_seen, do, 0.0)
        ds = ds.to(q.dtype)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)  # [BK, BLOCK_V]
        dk = tl.dot(ds, q, dk, input_precision=PRECISION)  # [BK, BLOCK_D]
        dk_rope = tl.dot(ds, q_rope, dk_rope, input_precision=PRECISION)  # [BK, BLOCK_R]
    return dk, dk_rope, dv


@triton.jit
def latent_key_gradient_kernel(
    q_ptr, k_ptr, k_rope_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr,
    q_segments_ptr, kv_segments_ptr, start_ptr, end_ptr, position_ptr, query_seen_ptr, tiles_ptr, T, S, offset,
    dk_ptr, dk_rope_ptr, dv_ptr,  # [B, S, H, D], float32 [B, H, S, R], [B, S, H, V]
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    SCALE: tl.constexpr, CAP: tl.constexpr, FAST_TANH: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    ROWS: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr, FOLDED: tl.constexpr, MULTIPLIER: tl.constexpr,
    EVEN_Q: tl.constexpr, EVEN_K: tl.constexpr, CLEAN: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """`dk` and `dv` of one key tile and head, and the head's part of the gradient of the shared keys."""
    n, bh, _ = program(S, BK, GROUP)
    b = (bh // H).to(tl.int64)
    h = bh % H
    first = n * BK
    columns = first + tl.arange(0, BK)  # [BK]
    j = columns[:, None]  # [BK, 1]
    k_segment = j
    if SEGMENTS:
        k_segment = tl.load(kv_segments_ptr + b * S + columns, mask=columns < S, other=-1)[:, None]  # [BK, 1]

    # dv = sum of p do, dk = scale * sum of ds q, over the query tiles that see this one.
    table: tl.constexpr = ROWS or SEGMENTS
    lo, full_lo, full_hi, hi = query_tiles(tiles_ptr, b, n, offset, T, S, BQ, BK, LEFT, RIGHT, table, 0)
    k, rope, v = load_keys(k_ptr + (b * S * H + h) * D, k_rope_ptr + b * S * R, v_ptr + (b * S * H + h) * V, first, columns < S, S,
                           H, D, R, V, BK, BLOCK_D, BLOCK_R, BLOCK_V, not EVEN_K, False)  # fmt: skip
    q_base = q_ptr + (b * T * H + h) * (D + R)
    do_base = do_ptr + (b * T * H + h) * V
    lse_base = lse_ptr + (b * H + h) * T
    delta_base = delta_ptr + (b * H + h) * T
    dk = tl.zeros([BK, BLOCK_D], tl.float32)  # [BK, BLOCK_D]
    dk_rope = tl.zeros([BK, BLOCK_R], tl.float32)  # [BK, BLOCK_R]
    dv = tl.zeros([BK, BLOCK_V], tl.float32)  # [BK, BLOCK_V]
    if table or RIGHT >= 0:
        dk, dk_rope, dv = _key_gradient_tiles(
            dk, dk_rope, dv, k, rope, v, lo, full_lo, q_base, do_base, lse_base, delta_base, q_segments_ptr + b * T,
            start_ptr + b * T, end_ptr + b * T, position_ptr + b * T, query_seen_ptr + b * T, offset, j, k_segment, T, S,
            H, D, R, V, BQ, BLOCK_D, BLOCK_R, BLOCK_V, SCALE, CAP, FAST_TANH, LEFT, RIGHT, ROWS, SEGMENTS, PRECISION,
            FOLDED, MULTIPLIER, EVEN_Q, EVEN_K, CLEAN, True)  # fmt: skip
    dk, dk_rope, dv = _key_gradient_tiles(
        dk, dk_rope, dv, k, rope, v, full_lo, full_hi, q_base, do_base, lse_base, delta_base, q_segments_ptr, start_ptr, end_ptr,
        position_ptr, query_seen_ptr, offset, j, k_segment, T, S, H, D, R, V, BQ, BLOCK_D, BLOCK_R, BLOCK_V,
        SCALE, CAP, FAST_TANH, LEFT, RIGHT, ROWS, SEGMENTS, PRECISION, FOLDED, MULTIPLIER, EVEN_Q, EVEN_K, CLEAN, False)  # fmt: skip
    if table or LEFT >= 0:
        dk, dk_rope, dv = _key_gradient_tiles(
            dk, dk_rope, dv, k, rope, v, full_hi, hi, q_base, do_base, lse_base, delta_base, q_segments_ptr + b * T,
            start_ptr + b * T, end_ptr + b * T, position_ptr + b * T, query_seen_ptr + b * T, offset, j, k_segment, T, S,
            H, D, R, V, BQ, BLOCK_D, BLOCK_R, BLOCK_V, SCALE, CAP, FAST_TANH, LEFT, RIGHT, ROWS, SEGMENTS, PRECISION,
            FOLDED, MULTIPLIER, EVEN_Q, EVEN_K, CLEAN, True)  # fmt: skip
    store_rows(dk_ptr + (b * S * H + h) * D, (dk * SCALE).to(dk_ptr.dtype.element_ty), first, H * D, S, D, BK, BLOCK_D)  # fmt: skip
    store_rows(dv_ptr + (b * S * H + h) * V, dv.to(dv_ptr.dtype.element_ty), first, H * V, S, V, BK, BLOCK_V)
    store_rows(dk_rope_ptr + (b * H + h) * S * R, dk_rope * SCALE, first, R, S, R, BK, BLOCK_R)
