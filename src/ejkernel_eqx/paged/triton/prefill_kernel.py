"""The kernel for sequences with many queries: one program per tile of rows (queries times the heads that read one key head) loops over the
pages of the sequence."""

import triton
import triton.language as tl

from ...core import Named
from ...launch.constants import LN2, LOG2E
from . import tile
from .call import Call

_SCANNED = 256  # entries of a page table searched at once


@triton.jit
def _first_tile(q_start_ptr, n, GROUP: tl.constexpr, BM: tl.constexpr):
    """The first tile of sequence `n`. The tiles suffice, since `c_{n+1} G // BM - c_n G // BM + 1` is at least the number of tiles of
    `c_{n+1} - c_n` queries of `G` heads. Starts `c` must not decrease."""
    return tl.load(q_start_ptr + n) * GROUP // BM + n


@triton.jit
def _sequence_of(q_start_ptr, m, N, GROUP: tl.constexpr, BM: tl.constexpr):
    """The sequence of tile `m`: the last one whose tiles start at or before it."""
    # By bisection: low <= the sequence < high.
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
    """Reports whether a page of the keys `first .. end` is missing."""
    missing = tl.zeros([BLOCK], tl.int32)  # [BLOCK]
    last = tl.where(end > first, (end + PAGE - 1) // PAGE, 0)
    for start in tl.range(first // PAGE, last, BLOCK):
        index = start + tl.arange(0, BLOCK)  # [BLOCK]
        page = tl.load(table_ptr + index, mask=index < last, other=0)  # [BLOCK]
        missing |= ((page < 0) | (page >= P)).to(tl.int32)
    return tl.max(missing, axis=0) > 0


@triton.jit
def prefill_kernel(
    q_ptr, k_ptr, v_ptr, rope_ptr,  # [T, H, D + R], [P, PAGE, K, D], [P, PAGE, K, V], [P, PAGE, K, R]
    table_ptr, q_start_ptr, q_len_ptr, kv_len_ptr, kv_start_ptr,  # [N, M], [N] each
    k_scale_ptr, v_scale_ptr, rope_scale_ptr,  # [P, PAGE, K] or, as all that follow, of a row of sequences: [K]
    sinks_ptr, slopes_ptr, qq_bias_ptr, gates_ptr, own_gates_ptr,  # [H], [H], [Q, Q], [P, PAGE, H, 2], [T, H, 2]
    out_before_ptr, lse_before_ptr,  # see out and lse
    P, M, N, Q, ROW, T, LEAST, MOST,
    out_ptr, lse_ptr,  # [T, H, V], [T, H]
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, V: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr, FAR: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, LATENT: tl.constexpr,
    K_SCALES: tl.constexpr, V_SCALES: tl.constexpr, R_SCALES: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr,
    FAST_TANH: tl.constexpr, LEFT: tl.constexpr, RANGED: tl.constexpr, SINKS: tl.constexpr, ALIBI: tl.constexpr, QQ: tl.constexpr,
    GATES: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr, SCANNED: tl.constexpr, FAST_BYTES: tl.constexpr,
):  # fmt: skip
    # Which tile of which sequence; grids have more programs than tiles.
    group: tl.constexpr = H // K
    m = tl.num_programs(0) // K - 1 - tl.program_id(0) // K  # the tiles with the most keys first
    kv_head = tl.program_id(0) % K
    n = _sequence_of(q_start_ptr, m, N, group, BM)
    row = (m - _first_tile(q_start_ptr, n, group, BM)) * BM
    q_len = tl.load(q_len_ptr + n)
    if q_len <= LEAST:  # the decode kernel takes these sequences
        return
    chunk = tl.load(kv_len_ptr + n) - q_len
    q_start = tl.load(q_start_ptr + n)
    queries = tl.minimum(tl.minimum(q_len, MOST), T - q_start)
    if (row < 0) | (row >= queries * group):
        return
    t, h = tile.query_rows(row, kv_head, H, K, BM)  # [BM] each
    inside = t < queries  # [BM]
    token = (q_start + t).to(tl.int64)  # [BM]

    q = tile.load_queries(q_ptr, token, h, inside, 0, D, BLOCK_D, D + R, H, WIDE)  # [BM, BLOCK_D]
    q_rope = q
    if R > 0:
        q_rope = tile.load_queries(q_ptr, token, h, inside, D, R, BLOCK_R, D + R, H, WIDE)  # [BM, BLOCK_R]

    # The keys visible to the tile's first and last query: all of tiles `full_lo` to `full_hi`, parts of those around them.
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
    # A bias between queries requires the loop with masks.
    if QQ:
        full_end = tl.maximum(tl.minimum(full_end, chunk), 0)
    lo = first // BK
    hi = tl.maximum((end + BK - 1) // BK, lo)
    full_lo = tl.minimum((full_first + BK - 1) // BK, hi)
    full_hi = tl.maximum(full_end // BK, full_lo)
    # With a missing page, which is masked, no tile is entirely visible.
    table_ptr += n.to(tl.int64) * M
    holes = _has_holes(table_ptr, full_lo * BK, full_hi * BK, P, PAGE, SCANNED)
    full_lo = tl.where(holes, lo, full_lo)
    full_hi = tl.where(holes, lo, full_hi)

    # Constants that travel together, for the function that adds a tile.
    sizes: tl.constexpr = tile.Sizes(D, V, R, BLOCK_D, BLOCK_V, BLOCK_R, BM, BK)  # pyright: ignore[reportAssignmentType]
    form: tl.constexpr = tile.Format(K, LATENT, K_SCALES, V_SCALES, R_SCALES, FAST_BYTES)  # pyright: ignore[reportAssignmentType]
    scoring: tl.constexpr = tile.Scoring(SCALE, CAP, FAST_TANH, LEFT, ALIBI, QQ, PRECISION, GATES)  # pyright: ignore[reportAssignmentType]
    # Slopes, scales for each head and the bias are those of a row of sequences.
    small = n // ROW
    pages = tile.Pages(k_ptr, v_ptr, rope_ptr, k_scale_ptr, v_scale_ptr, rope_scale_ptr, kv_head)
    factors = tile.head_factors(pages, small, form, R)
    slope = 0.0
    if ALIBI:
        slope = (tl.load(slopes_ptr + small * H + h) * LOG2E)[:, None]  # [BM, 1]
    qq_bias_ptr += small.to(tl.int64) * Q * Q
    acc = tl.zeros([BM, BLOCK_V], tl.float32)  # [BM, BLOCK_V]
    # A sink is a key without a value: its score is the first maximum, its weight relative to that is 1.
    if SINKS:
        top = tl.load(sinks_ptr + small * H + h) * LOG2E  # [BM]
        total = tl.full([BM], 1.0, tl.float32)  # [BM]
    else:
        top = tl.full([BM], float("-inf"), tl.float32)  # [BM]
        total = tl.zeros([BM], tl.float32)  # [BM]
    gates, own, rest = tile.own_gates(gates_ptr, own_gates_ptr, token, h, inside, GATES)  # pyright: ignore[reportGeneralTypeIssues]
    t = t[:, None]  # [BM, 1]
    rows = tile.Queries(chunk + t, t, slope, chunk, qq_bias_ptr, Q, gates, own, rest)

    # Page numbers are loaded one tile ahead, so that loads of keys do not wait. From 0: if the first index comes from a reduction, the compiler
    # does not pipeline the loop.
    page = tile.load_pages(table_ptr, full_lo, room, PAGE, BK)
    for nth in tl.range(0, full_hi - full_lo):
        j, slot, ok = tile.locate(page, full_lo + nth, first, end, P, PAGE, BK, FAR)
        page = tile.load_pages(table_ptr, full_lo + nth + 1, room, PAGE, BK)
        keys = tile.Keys(j, slot, ok)
        acc, total, top = tile.attend_tile(
            acc, total, top, q, q_rope, keys, rows, pages, factors, sizes, form, scoring, False)  # fmt: skip
    # The tiles around those, `lo .. full_lo` and `full_hi .. hi`, in one loop with masks.
    index = tl.where(lo < full_lo, lo, full_hi)
    page = tile.load_pages(table_ptr, index, end, PAGE, BK)
    for _ in tl.range(0, full_lo - lo + hi - full_hi):
        j, slot, ok = tile.locate(page, index, first, end, P, PAGE, BK, FAR)
        index = tl.where(index + 1 == full_lo, full_hi, index + 1)
        page = tile.load_pages(table_ptr, index, end, PAGE, BK)
        keys = tile.Keys(j, slot, ok)
        acc, total, top = tile.attend_tile(
            acc, total, top, q, q_rope, keys, rows, pages, factors, sizes, form, scoring, True)  # fmt: skip

    # out = acc / total, lse = top + log(total); 0 and minus infinity for a row without visible keys.
    some = total != 0  # [BM]; NaN in a visible key appears in both results
    acc = acc * (factors.v / tl.where(some, total, 1.0))[:, None]  # [BM, BLOCK_V]
    lse = tl.where(some, (top + tl.log2(tl.where(some, total, 1.0))) * LN2, float("-inf"))  # [BM]
    tl.store(lse_ptr + token * H + h, lse, mask=inside)
    c = tl.arange(0, BLOCK_V)  # [BLOCK_V]
    stored = inside[:, None]  # [BM, 1], and then [BM, BLOCK_V]
    if V != BLOCK_V:
        stored = stored & (c < V)[None, :]
    out = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + ((token * H + h) * V)[:, None] + c[None, :], out, mask=stored)


def prefill(call: Call, results: Named, least: int) -> Named:
    """Writes the tokens of sequences with more than `least` queries into `results`, in place."""
    sizes, before = call.config.prefill, {f"{name}_before": x for name, x in results.items()}
    tiles = most_tiles(call.arrays.q.shape[0], call.sequences, call.group, sizes.block_m)
    # Run-time numbers, so that buckets of tokens share one compiled kernel.
    numbers = {"LEAST": least, "MOST": call.spec.max_query_len}
    constants = {"SCANNED": _SCANNED, "BM": sizes.block_m, "BK": sizes.block_k}
    aliases, programs = {f"{name}_before": name for name in results}, tiles * call.kv_heads
    launch = call.launch.knowing({}, **numbers, **constants)
    return launch(prefill_kernel, sizes, call.result_types, programs, before, aliases=aliases)


def most_tiles(tokens: int, sequences: int, group: int, rows: int) -> int:
    """The end of the last sequence's tiles, for any starts of the sequences."""
    return tokens * group // rows + sequences if sequences else 0
