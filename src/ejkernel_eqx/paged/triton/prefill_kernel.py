"""The kernel for sequences with many queries: one program per tile of rows (queries times the heads that read one key head) of a
sequence, over its pages."""

import triton
import triton.language as tl
from jax import Array

from .call import Call
from .tile import attend_tile, head_factors, load_pages, load_queries, locate, query_rows

_SCANNED = 256  # entries of a page table looked through at once


@triton.jit
def _first_tile(q_start_ptr, n, GROUP: tl.constexpr, BM: tl.constexpr):
    """Sequence `n` has the tiles from here on, which are enough: `c_{n+1} G // BM - c_n G // BM + 1` is no less than the tiles of
    `c_{n+1} - c_n` queries of `G` heads. Starts `c` must not decrease."""
    return tl.load(q_start_ptr + n) * GROUP // BM + n


@triton.jit
def _sequence_of(q_start_ptr, m, N, GROUP: tl.constexpr, BM: tl.constexpr):
    """The sequence that has tile `m`: the last one whose tiles begin at or before it."""
    low = m * 0
    high = low + N
    while high - low > 1:
        middle = (low + high) // 2
        before = _first_tile(q_start_ptr, middle, GROUP, BM) <= m
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@triton.jit
def _has_holes(table_ptr, first, end, P, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Whether a page of the keys `first .. end` is missing."""
    missing = tl.zeros([BLOCK], tl.int32)
    last = tl.where(end > first, (end + PAGE - 1) // PAGE, 0)
    for start in tl.range(first // PAGE, last, BLOCK):
        index = start + tl.arange(0, BLOCK)
        page = tl.load(table_ptr + index, mask=index < last, other=0)
        missing |= ((page < 0) | (page >= P)).to(tl.int32)
    return tl.max(missing, axis=0) > 0


@triton.jit
def prefill_kernel(
    q_ptr, k_ptr, v_ptr, rope_ptr, table_ptr, q_start_ptr, q_len_ptr, kv_len_ptr, kv_start_ptr, k_scale_ptr, v_scale_ptr,
    rope_scale_ptr, sinks_ptr, slopes_ptr, qq_bias_ptr, out_before_ptr, lse_before_ptr, P, M, N, Q, ROW, T, LEAST, MOST,
    out_ptr, lse_ptr,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, V: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr, FAR: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, LATENT: tl.constexpr, SCALES: tl.constexpr,
    SCALE: tl.constexpr, CAP: tl.constexpr, FAST_TANH: tl.constexpr, LEFT: tl.constexpr, RANGED: tl.constexpr, SINKS: tl.constexpr,
    ALIBI: tl.constexpr, QQ: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr, SCANNED: tl.constexpr,
):  # fmt: skip
    group: tl.constexpr = H // K
    m = tl.num_programs(0) // K - 1 - tl.program_id(0) // K  # the tiles with the most keys first
    kv_head = tl.program_id(0) % K
    n = _sequence_of(q_start_ptr, m, N, group, BM)
    row = (m - _first_tile(q_start_ptr, n, group, BM)) * BM
    q_len = tl.load(q_len_ptr + n)
    if q_len <= LEAST:  # another kernel's
        return
    chunk = tl.load(kv_len_ptr + n) - q_len
    q_start = tl.load(q_start_ptr + n)
    queries = tl.minimum(tl.minimum(q_len, MOST), T - q_start)
    if (row < 0) | (row >= queries * group):
        return
    t, h = query_rows(row, kv_head, H, K, BM)
    inside = t < queries
    token = (q_start + t).to(tl.int64)

    q = load_queries(q_ptr, token, h, inside, 0, D, BLOCK_D, D + R, H, WIDE)
    q_rope = q
    if R > 0:
        q_rope = load_queries(q_ptr, token, h, inside, D, R, BLOCK_R, D + R, H, WIDE)

    # What the tile's first and last query see: tiles of keys from `full_lo` to `full_hi` all, those around them in part.
    i_first = chunk + row // group
    i_last = chunk + tl.minimum((row + BM - 1) // group, queries - 1)
    room = M * PAGE
    first = i_first * 0
    if RANGED:
        first = tl.maximum(tl.load(kv_start_ptr + n), 0)
    full_first = first
    if LEFT >= 0:
        first = tl.maximum(first, i_first - LEFT)
        full_first = tl.maximum(full_first, i_last - LEFT)
    end = tl.maximum(tl.minimum(i_last + 1, room), 0)
    full_end = tl.maximum(tl.minimum(i_first + 1, room), 0)
    if QQ:
        full_end = tl.maximum(tl.minimum(full_end, chunk), 0)
    lo = first // BK
    hi = tl.maximum((end + BK - 1) // BK, lo)
    full_lo = tl.minimum((full_first + BK - 1) // BK, hi)
    full_hi = tl.maximum(full_end // BK, full_lo)
    table_ptr += n.to(tl.int64) * M
    holes = _has_holes(table_ptr, full_lo * BK, full_hi * BK, P, PAGE, SCANNED)
    full_lo = tl.where(holes, lo, full_lo)
    full_hi = tl.where(holes, lo, full_hi)

    small = n // ROW
    k_factor, v_factor, rope_factor = head_factors(
        k_scale_ptr, v_scale_ptr, rope_scale_ptr, small, kv_head, K, R, LATENT, SCALES)  # fmt: skip
    slope = 0.0
    if ALIBI:
        slope = (tl.load(slopes_ptr + small * H + h) * 1.4426950408889634)[:, None]
    qq_bias_ptr += small.to(tl.int64) * Q * Q
    acc = tl.zeros([BM, BLOCK_V], tl.float32)
    if SINKS:
        top = tl.load(sinks_ptr + small * H + h) * 1.4426950408889634
        total = tl.full([BM], 1.0, tl.float32)
    else:
        top = tl.full([BM], float("-inf"), tl.float32)
        total = tl.zeros([BM], tl.float32)
    t = t[:, None]
    i = chunk + t

    # Page numbers come one tile ahead: loads of keys do not wait for them. From 0: with a first index out of a reduction, the compiler
    # does not pipeline the loop.
    page = load_pages(table_ptr, full_lo, room, PAGE, BK)
    for index in tl.range(0, full_hi - full_lo):
        j, slot, ok = locate(page, full_lo + index, first, end, P, PAGE, BK, FAR)
        page = load_pages(table_ptr, full_lo + index + 1, room, PAGE, BK)
        acc, total, top = attend_tile(
            acc, total, top, q, q_rope, j, slot, ok, i, t, slope, chunk, kv_head, k_factor, rope_factor, qq_bias_ptr, Q,
            k_ptr, v_ptr, rope_ptr, k_scale_ptr, v_scale_ptr, rope_scale_ptr, K, D, V, R, BLOCK_D, BLOCK_V, BLOCK_R, LATENT, SCALES,
            SCALE, CAP, FAST_TANH, LEFT, ALIBI, False, PRECISION, False)  # fmt: skip
    tile = tl.where(lo < full_lo, lo, full_hi)
    page = load_pages(table_ptr, tile, end, PAGE, BK)
    for _ in tl.range(0, full_lo - lo + hi - full_hi):
        j, slot, ok = locate(page, tile, first, end, P, PAGE, BK, FAR)
        tile = tl.where(tile + 1 == full_lo, full_hi, tile + 1)
        page = load_pages(table_ptr, tile, end, PAGE, BK)
        acc, total, top = attend_tile(
            acc, total, top, q, q_rope, j, slot, ok, i, t, slope, chunk, kv_head, k_factor, rope_factor, qq_bias_ptr, Q,
            k_ptr, v_ptr, rope_ptr, k_scale_ptr, v_scale_ptr, rope_scale_ptr, K, D, V, R, BLOCK_D, BLOCK_V, BLOCK_R, LATENT, SCALES,
            SCALE, CAP, FAST_TANH, LEFT, ALIBI, QQ, PRECISION, True)  # fmt: skip

    some = total != 0  # NaN of a key that is seen shows in both results
    acc = acc * (v_factor / tl.where(some, total, 1.0))[:, None]
    lse = tl.where(some, (top + tl.log2(tl.where(some, total, 1.0))) * 0.6931471805599453, float("-inf"))
    tl.store(lse_ptr + token * H + h, lse, mask=inside)
    c = tl.arange(0, BLOCK_V)
    stored = inside[:, None]
    if V != BLOCK_V:
        stored = stored & (c < V)[None, :]
    out = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + ((token * H + h) * V)[:, None] + c[None, :], out, mask=stored)


def prefill(call: Call, results: dict[str, Array], least: int) -> dict[str, Array]:
    """`results` with the tokens of the sequences that have more than `least` queries written into them, in place."""
    tile = call.config.prefill
    tiles = most_tiles(call.arrays.q.shape[0], call.num_sequences, call.group, tile.block_m)
    written = call.launch(
        prefill_kernel,
        tile,
        (tiles * call.heads[1],),
        call.result_types,
        before=results,
        # Numbers at run time: buckets of tokens share one compiled kernel.
        scalars={"LEAST": least, "MOST": call.spec.max_query_len},
        SCANNED=_SCANNED,
    )
    return {name: written[f"{name}_ptr"] for name in results}


def most_tiles(tokens: int, sequences: int, group: int, rows: int) -> int:
    """The end of the last sequence's tiles, wherever the sequences begin."""
    return tokens * group // rows + sequences if sequences else 0
