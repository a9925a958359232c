"""What happens to one tile of scores, shared by every Triton kernel of the core.

A tile is `[BQ, BK]` or, where keys are the rows, `[BK, BQ]`: the functions below take query and key vectors already shaped to
broadcast either way, and comments say `[BQ, BK]` for both. Scores are kept in units of log2, so that `exp2` needs no further multiplication.
"""

from collections import namedtuple

import triton
import triton.language as tl

from ...launch.constants import LOG2E
from .. import philox

# Bits of BIAS and MASK beside 1, present: which of batch, head, query and key axes are not broadcast, and whether batch rows share rows.
OVER_BATCH, OVER_HEADS, OVER_QUERIES, OVER_KEYS, SHARED = (tl.constexpr(2 << axis) for axis in range(5))

PHILOX_ROUNDS = tl.constexpr(philox.ROUNDS)
PHILOX_M0, PHILOX_M1 = (tl.constexpr(word) for word in philox.MULTIPLIERS)
PHILOX_W0, PHILOX_W1 = (tl.constexpr(word) for word in philox.WEYL)

# What travels together. A `Kind` are the kernels' constants of these names, `Sizes` too but for `T` and `S`.
Kind = namedtuple(
    "Kind",
    "SCALE CAP FAST_TANH LEFT RIGHT BIAS ALIBI MASK ROWS SEGMENTS DROPOUT KEEP_SCALE PRECISION FOLDED MULTIPLIER",
)
Sizes = namedtuple("Sizes", "T S H K D V BLOCK_D BLOCK_V BQ BK EVEN_Q EVEN_K")
# Row, position, key range and segment of a tile's queries, each shaped to broadcast to the tile.
Queries = namedtuple("Queries", "i position start end segment")
# Of a head: its ALiBi slope, the two words of its seed, where its bias and its mask begin.
Head = namedtuple("Head", "slope seed0 seed1 bias_ptr mask_ptr")


@triton.jit
def tanh(x, APPROXIMATE: tl.constexpr):
    if APPROXIMATE:
        return tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    decay = tl.exp2(-2.8853900817779268 * tl.abs(x))  # e^(-2|x|)
    magnitude = (1.0 - decay) / (1.0 + decay)  # of the shape of x; e^(-2|x|) is at most 1, however large x is
    return tl.where(x < 0, -magnitude, magnitude)


@triton.jit
def query_rows(rows, offset, b, T, position_ptr, start_ptr, end_ptr, q_segments_ptr,  # rows [BQ]
               ROWS: tl.constexpr, SEGMENTS: tl.constexpr):  # fmt: skip
    """Which of a vector of queries there are, `[BQ]`, and their numbers, as columns; what a call does not have is never read."""
    i = rows[:, None]  # [BQ, 1]
    inside = rows < T  # [BQ]
    # Numbers that nothing looks at stand for what a call does not have.
    position = rows + offset  # [BQ], as all four
    start = rows
    end = rows
    segment = rows
    if ROWS:
        position = tl.load(position_ptr + b * T + rows, mask=inside, other=0)
        start = tl.load(start_ptr + b * T + rows, mask=inside, other=0)
        end = tl.load(end_ptr + b * T + rows, mask=inside, other=0)
    if SEGMENTS:
        segment = tl.load(q_segments_ptr + b * T + rows, mask=inside, other=-1)  # -1, as padding has
    return inside, Queries(i, position[:, None], start[:, None], end[:, None], segment[:, None])  # [BQ], [BQ, 1] each  # fmt: skip


@triton.jit
def program_queries(T, offset, position_ptr, start_ptr, end_ptr, q_segments_ptr,
                    H: tl.constexpr, BQ: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SEGMENTS: tl.constexpr):  # fmt: skip
    """This program's tile of queries and the number of tiles, its batch row and head, its rows, and of these what `query_rows` tells."""
    m, bh, count = program(T, BQ, GROUP)
    m = count - 1 - m  # causal rows with the most keys first
    b = (bh // H).to(tl.int64)
    h = bh % H
    rows = m * BQ + tl.arange(0, BQ)  # [BQ]
    inside, queries = query_rows(
        rows, offset, b, T, position_ptr, start_ptr, end_ptr, q_segments_ptr, ROWS, SEGMENTS)  # [BQ], [BQ, 1] each  # fmt: skip
    return m, count, b, h, rows, inside, queries


@triton.jit
def head_of(slopes_ptr, seeds_ptr, bias_ptr, mask_ptr, b, h, bias_run, bias_rows, mask_run, mask_rows, T, S,
            H: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    slope = 0.0  # [] each
    if ALIBI:
        slope = tl.load(slopes_ptr + b * H + h)
    seed0 = tl.zeros([], tl.uint32)
    seed1 = tl.zeros([], tl.uint32)
    if DROPOUT > 0:
        seed0 = tl.load(seeds_ptr + (b * H + h) * 2)
        seed1 = tl.load(seeds_ptr + (b * H + h) * 2 + 1)
    bias = over_scores(bias_ptr, b, h, bias_run, bias_rows, T, S, H, BIAS)
    mask = over_scores(mask_ptr, b, h, mask_run, mask_rows, T, S, H, MASK)
    return Head(slope, seed0, seed1, bias, mask)


@triton.jit
def over_scores(ptr, b, h, run, rows, T, S, H: tl.constexpr, BITS: tl.constexpr):
    """Where the scores of batch row `b` and head `h` begin in an array broadcastable to `[B, H, T, S]`.

    Where rows are shared, each of its `rows` serves `run` batch rows that follow one another, and all of them in turn.
    """
    start = tl.zeros([], tl.int64)
    if SHARED & BITS:  # in turn
        start += b.to(tl.int32) // run % rows
    elif OVER_BATCH & BITS:
        start += b
    if OVER_HEADS & BITS:
        start = start * H + h
    if OVER_QUERIES & BITS:
        start = start * T
    if OVER_KEYS & BITS:
        start = start * S
    return ptr + start


@triton.jit
def load_over_scores(ptr, i, j, T, S, BITS: tl.constexpr):
    """The tile at queries `i`, keys `j` of what begins at `over_scores`."""
    rows: tl.constexpr = (OVER_QUERIES & BITS) != 0
    columns: tl.constexpr = (OVER_KEYS & BITS) != 0
    inside = (i < T) & (j < S)  # [BQ, BK]
    # An axis of size one is read at 0.
    offset = (i + j) * 0  # [BQ, BK]
    if rows and columns:
        offset = i.to(tl.int64) * S + j  # in 64 bits: a head's scores may be more than 2^31
    elif rows:
        offset = i + j * 0
    elif columns:
        offset = i * 0 + j
    return tl.load(ptr + offset, mask=inside, other=0)  # [BQ, BK]


@triton.jit
def scores(qk, j, queries, head, kind, size):
    """Scores in log2 units, and the tanh whose square the backward needs. `FOLDED`: all but their last constant factor, `MULTIPLIER`, which
    the caller multiplies in beside a subtraction, as one instruction."""
    t = qk  # [BQ, BK], of what it has until the end
    if kind.CAP > 0:
        t = tanh(qk * (kind.SCALE / kind.CAP), kind.FAST_TANH)
    s = t
    if not kind.FOLDED:
        if kind.CAP > 0:
            s = t * (kind.CAP * LOG2E)
        else:
            s = qk * (kind.SCALE * LOG2E)
        # Bias and ALiBi come after the soft cap, in natural units.
        if kind.BIAS:
            bias = load_over_scores(head.bias_ptr, queries.i, j, size.T, size.S, kind.BIAS)  # [BQ, BK]
            s += bias.to(tl.float32) * LOG2E
        if kind.ALIBI:
            s += (head.slope * LOG2E) * (j - queries.position).to(tl.float32)  # [BQ, BK]
    return s, t


@triton.jit
def visible(j, k_segment, queries, head, kind, size, BOUND: tl.constexpr):
    """Which entries of the tile count; keys past the end are only excluded with `BOUND`, queries past the end never."""
    # The range: of the row's own, or moving by one key a query.
    if kind.ROWS:
        seen = (j >= queries.start) & (j < queries.end)  # [BQ, BK]
    elif kind.RIGHT >= 0:
        seen = j <= queries.position + kind.RIGHT  # [BQ, BK]
        if kind.LEFT >= 0:
            seen = seen & (j >= queries.position - kind.LEFT)
    elif kind.LEFT >= 0:
        seen = j >= queries.position - kind.LEFT  # [BQ, BK]
    else:
        seen = (queries.i >= 0) & (j >= 0)  # [BQ, BK], all
    if BOUND and not kind.ROWS:
        seen = seen & (j < size.S)
    if kind.SEGMENTS:
        seen = seen & (queries.segment == k_segment) & (queries.segment >= 0)  # -1 is padding
    if kind.MASK:
        seen = seen & (load_over_scores(head.mask_ptr, queries.i, j, size.T, size.S, kind.MASK) != 0)
    return seen


@triton.jit
def keep(head, position, j, THRESHOLD: tl.constexpr):
    """Philox4x32-7 of (seed, query position, key position): which entries survive dropout."""
    # The counter: query position, key position, 0, 0. Adding a zero vector makes each word a tile.
    c0 = position.to(tl.uint32) + (j * 0).to(tl.uint32)  # [BQ, BK]
    c1 = j.to(tl.uint32) + (position * 0).to(tl.uint32)  # [BQ, BK]
    c2 = c0 * 0  # [BQ, BK]
    c3 = c0 * 0  # [BQ, BK]
    k0 = head.seed0  # []
    k1 = head.seed1  # []
    for _ in tl.static_range(PHILOX_ROUNDS):
        # A round: two products of 64 bits, whose words are exchanged and mixed with the key; then the next round's key.
        hi0 = tl.umulhi(c0, PHILOX_M0)
        lo0 = c0 * PHILOX_M0
        hi1 = tl.umulhi(c2, PHILOX_M1)
        lo1 = c2 * PHILOX_M1
        c0 = hi1 ^ c1 ^ k0
        c1 = lo1
        c2 = hi0 ^ c3 ^ k1
        c3 = lo0
        k0 = k0 + PHILOX_W0
        k1 = k1 + PHILOX_W1
    return c0 >= THRESHOLD  # [BQ, BK]


@triton.jit
def program(length, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """This program's tile of `length`, its row of batch times heads, and the number of tiles.

    Rows go in groups of `GROUP`, few enough for the cache; within a group all first tiles run first, so that where tiles
    differ in work the long ones do not come last.
    """
    tiles = tl.cdiv(length, BLOCK)
    rows = tl.num_programs(0) // tiles
    group = tl.program_id(0) // (tiles * GROUP)
    index = tl.program_id(0) % (tiles * GROUP)
    size = tl.minimum(rows - group * GROUP, GROUP)  # the last group may have fewer rows
    return index // size, group * GROUP + index % size, tiles


@triton.jit
def key_tiles(tiles_ptr, b, m, offset, T, S, BQ: tl.constexpr, BK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
              TABLE: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    """Borders between key tiles of query tile `m`: those from the first to the second and from the third to the fourth need the mask,
    those from the second to the third do not."""
    # Positions of the tile's first and last query. Some query sees each key from the first one's start to the last one's end, and all
    # see those from the last one's start to the first one's end.
    first = m * BQ + offset
    last = tl.minimum(m * BQ + BQ, T) - 1 + offset
    row = b * tl.cdiv(T, BQ) + m
    return _borders(tiles_ptr, row, first, last, tl.cdiv(S, BK), S // BK, BK, LEFT, RIGHT, TABLE, MASK)


@triton.jit
def query_tiles(tiles_ptr, b, n, offset, T, S, BQ: tl.constexpr, BK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
                TABLE: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    """Query tiles of key tile `n`, as `key_tiles`. Queries past the end need no mask: their weights come out zero."""
    # The rows of the queries at the tile's first and last key; then as in `key_tiles`.
    first = n * BK - offset
    last = n * BK + BK - 1 - offset
    row = b * tl.cdiv(S, BK) + n
    return _borders(tiles_ptr, row, first, last, tl.cdiv(T, BQ), tl.cdiv(T, BQ), BQ, RIGHT, LEFT, TABLE, MASK)


@triton.jit
def _borders(tiles_ptr, row, first, last, hi, full_hi, BLOCK: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr,
             TABLE: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    if TABLE:
        # Four borders for each tile, from `tile_table`.
        row = tiles_ptr + row * 4
        lo, full_lo, full_hi, hi = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    else:
        lo, full_lo = 0, 0
        if BEFORE >= 0:
            lo = tl.minimum(tl.maximum(first - BEFORE, 0) // BLOCK, hi)
            full_lo = tl.cdiv(tl.maximum(last - BEFORE, 0), BLOCK)
        if AFTER >= 0:
            hi = tl.minimum(hi, tl.cdiv(tl.maximum(last + AFTER + 1, 0), BLOCK))
            full_hi = tl.minimum(full_hi, tl.maximum(first + AFTER + 1, 0) // BLOCK)
    # In this order, also where the window leaves nothing.
    hi = tl.maximum(hi, lo)
    full_lo = tl.minimum(tl.maximum(full_lo, lo), hi)
    full_hi = tl.minimum(tl.maximum(full_hi, full_lo), hi)
    if MASK:  # may hide any key
        full_lo = hi
        full_hi = hi
    return lo, full_lo, full_hi, hi


@triton.jit
def load_rows(ptr, start, row_stride, ok, length, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
              BOUND: tl.constexpr, CHECK: tl.constexpr):  # fmt: skip
    """Rows `start .. start + ROWS` of a matrix of `length` rows as a `[ROWS, COLUMNS]` tile, zero outside and where not `ok`.

    `BOUND`: rows may lie past the end; `CHECK`: `ok` is a vector to obey.
    """
    r = tl.arange(0, ROWS)  # [ROWS]
    c = tl.arange(0, COLUMNS)  # [COLUMNS]
    # [ROWS, COLUMNS]. Only the tile's start takes 64 bits.
    pointers = ptr + start.to(tl.int64) * row_stride + (r[:, None] * row_stride + c[None, :])
    if BOUND or CHECK:
        inside = start + r < length  # [ROWS]
        if CHECK:
            inside = inside & ok
        if WIDTH == COLUMNS:
            return tl.load(pointers, mask=inside[:, None], other=0.0)
        return tl.load(pointers, mask=inside[:, None] & (c < WIDTH)[None, :], other=0.0)
    if WIDTH == COLUMNS:
        return tl.load(pointers)
    return tl.load(pointers, mask=(c < WIDTH)[None, :], other=0.0)


@triton.jit
def load_keys(n, k_base, segments_ptr, seen_ptr, kind, size, MASKED: tl.constexpr):
    """Of key tile `n`: numbers and segments, `[1, BK]`, which keys to read, `[BK]`, and the keys, `[BK, BLOCK_D]`."""
    first = n * size.BK
    columns = first + tl.arange(0, size.BK)  # [BK]
    j = columns[None, :]  # [1, BK]
    ok = columns < size.S  # [BK]
    segment = j
    # Keys that no query may see hold anything: they are not read.
    guarded: tl.constexpr = MASKED and (kind.ROWS or kind.SEGMENTS)
    if guarded:
        ok = ok & (tl.load(seen_ptr + columns, mask=ok, other=0) != 0)
        if kind.SEGMENTS:
            segment = tl.load(segments_ptr + columns, mask=columns < size.S, other=-1)[None, :]  # [1, BK]
    bound: tl.constexpr = MASKED and not size.EVEN_K
    k = load_rows(k_base, first, size.K * size.D, ok, size.S, size.D, size.BK, size.BLOCK_D, bound, guarded)
    return j, segment, ok, k


@triton.jit
def load_values(n, v_base, ok, kind, size, MASKED: tl.constexpr):
    """The values of key tile `n`, `[BK, BLOCK_V]`."""
    guarded: tl.constexpr = MASKED and (kind.ROWS or kind.SEGMENTS)
    bound: tl.constexpr = MASKED and not size.EVEN_K
    return load_rows(
        v_base, n * size.BK, size.K * size.V, ok, size.S, size.V, size.BK, size.BLOCK_V, bound, guarded
    )


@triton.jit
def store_rows(
    ptr, tile, start, row_stride, length, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    r = tl.arange(0, ROWS)  # [ROWS]
    c = tl.arange(0, COLUMNS)  # [COLUMNS]
    # [ROWS, COLUMNS], as in `load_rows`.
    pointers = ptr + start.to(tl.int64) * row_stride + (r[:, None] * row_stride + c[None, :])
    tl.store(pointers, tile, mask=(start + r < length)[:, None] & (c < WIDTH)[None, :])
