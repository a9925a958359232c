"""What happens to one tile of scores, shared by every Triton kernel of the core.

A tile is `[BQ, BK]` or, where keys are the rows, `[BK, BQ]`: the functions below take query and key vectors already shaped to
broadcast either way. Scores are kept in units of log2, so that `exp2` needs no further multiplication.
"""

import triton
import triton.language as tl

# Bits of BIAS and MASK: present, which of batch, head, query and key axes are not broadcast, and whether batch rows share rows.
PRESENT, OVER_BATCH, OVER_HEADS, OVER_QUERIES, OVER_KEYS, SHARED = 1, 2, 4, 8, 16, 32


@triton.jit
def tanh(x, APPROXIMATE: tl.constexpr):
    if APPROXIMATE:
        return tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    decay = tl.exp2(-2.8853900817779268 * tl.abs(x))  # e^(-2|x|)
    magnitude = (1.0 - decay) / (1.0 + decay)
    return tl.where(x < 0, -magnitude, magnitude)


@triton.jit
def query_rows(rows, inside, offset, b, T, position_ptr, start_ptr, end_ptr, q_segments_ptr,
               ROWS: tl.constexpr, SEGMENTS: tl.constexpr):  # fmt: skip
    """Position, key range and segment of a vector of queries; what a call does not have is never read."""
    position = rows + offset
    start = rows
    end = rows
    segment = rows
    if ROWS:
        position = tl.load(position_ptr + b * T + rows, mask=inside, other=0)
        start = tl.load(start_ptr + b * T + rows, mask=inside, other=0)
        end = tl.load(end_ptr + b * T + rows, mask=inside, other=0)
    if SEGMENTS:
        segment = tl.load(q_segments_ptr + b * T + rows, mask=inside, other=-1)
    return position, start, end, segment


@triton.jit
def head_scalars(slopes_ptr, seeds_ptr, b, h, H: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr):
    """The ALiBi slope and the two seed words of a head."""
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes_ptr + b * H + h)
    seed0 = tl.zeros([], tl.uint32)
    seed1 = tl.zeros([], tl.uint32)
    if DROPOUT > 0:
        seed0 = tl.load(seeds_ptr + (b * H + h) * 2)
        seed1 = tl.load(seeds_ptr + (b * H + h) * 2 + 1)
    return slope, seed0, seed1


@triton.jit
def over_scores(ptr, b, h, run, rows, T, S, H: tl.constexpr, BITS: tl.constexpr):
    """Where the scores of batch row `b` and head `h` begin in an array broadcastable to `[B, H, T, S]`.

    Where rows are shared, each of its `rows` serves `run` batch rows that follow one another, and all of them in turn.
    """
    start = tl.zeros([], tl.int64)
    if BITS & 32:
        start += b.to(tl.int32) // run % rows
    elif BITS & 2:
        start += b
    if BITS & 4:
        start = start * H + h
    if BITS & 8:
        start = start * T
    if BITS & 16:
        start = start * S
    return ptr + start


@triton.jit
def load_over_scores(ptr, i, j, T, S, BITS: tl.constexpr):
    """The tile at queries `i`, keys `j` of what begins at `over_scores`."""
    rows: tl.constexpr = (BITS & 8) != 0
    columns: tl.constexpr = (BITS & 16) != 0
    inside = (i < T) & (j < S)
    offset = (i + j) * 0
    if rows and columns:
        offset = i.to(tl.int64) * S + j
    elif rows:
        offset = i + j * 0
    elif columns:
        offset = i * 0 + j
    return tl.load(ptr + offset, mask=inside, other=0)


@triton.jit
def scores(qk, i, j, position, slope, bias_ptr, T, S, SCALE: tl.constexpr, CAP: tl.constexpr,
           FAST_TANH: tl.constexpr, BIAS: tl.constexpr, ALIBI: tl.constexpr, FOLDED: tl.constexpr):  # fmt: skip
    """Scores in log2 units, and the tanh whose square the backward needs. `FOLDED`: all but their last constant factor, which the
    caller multiplies in beside a subtraction, as one instruction."""
    t = qk
    if CAP > 0:
        t = tanh(qk * (SCALE / CAP), FAST_TANH)
    s = t
    if not FOLDED:
        if CAP > 0:
            s = t * (CAP * 1.4426950408889634)
        else:
            s = qk * (SCALE * 1.4426950408889634)
        if BIAS:
            s += load_over_scores(bias_ptr, i, j, T, S, BIAS).to(tl.float32) * 1.4426950408889634
        if ALIBI:
            s += (slope * 1.4426950408889634) * (j - position).to(tl.float32)
    return s, t


@triton.jit
def visible(i, j, position, start, end, q_segment, k_segment, mask_ptr, T, S,
            LEFT: tl.constexpr, RIGHT: tl.constexpr, ROWS: tl.constexpr, SEGMENTS: tl.constexpr, MASK: tl.constexpr,
            BOUND: tl.constexpr):  # fmt: skip
    """Which entries of the tile count; keys past the end are only excluded with `BOUND`, queries past the end never."""
    if ROWS:
        seen = (j >= start) & (j < end)
    elif RIGHT >= 0:
        seen = j <= position + RIGHT
        if LEFT >= 0:
            seen = seen & (j >= position - LEFT)
    elif LEFT >= 0:
        seen = j >= position - LEFT
    else:
        seen = (i >= 0) & (j >= 0)
    if BOUND and not ROWS:
        seen = seen & (j < S)
    if SEGMENTS:
        seen = seen & (q_segment == k_segment) & (q_segment >= 0)
    if MASK:
        seen = seen & (load_over_scores(mask_ptr, i, j, T, S, MASK) != 0)
    return seen


@triton.jit
def keep(seed0, seed1, position, j, THRESHOLD: tl.constexpr):
    """Philox4x32-7 of (seed, query position, key position): which entries survive dropout."""
    c0 = position.to(tl.uint32) + (j * 0).to(tl.uint32)
    c1 = j.to(tl.uint32) + (position * 0).to(tl.uint32)
    c2 = c0 * 0
    c3 = c0 * 0
    k0 = seed0
    k1 = seed1
    for _ in tl.static_range(7):
        hi0 = tl.umulhi(c0, 0xD2511F53)
        lo0 = c0 * 0xD2511F53
        hi1 = tl.umulhi(c2, 0xCD9E8D57)
        lo1 = c2 * 0xCD9E8D57
        c0 = hi1 ^ c1 ^ k0
        c1 = lo1
        c2 = hi0 ^ c3 ^ k1
        c3 = lo0
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0 >= THRESHOLD


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
    size = tl.minimum(rows - group * GROUP, GROUP)
    return index // size, group * GROUP + index % size, tiles


@triton.jit
def key_tiles(tiles_ptr, b, m, offset, T, S, BQ: tl.constexpr, BK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
              TABLE: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    """Key tiles of query tile `m`: `[lo, a)` and `[b, hi)` need the mask, `[a, b)` do not."""
    if TABLE:
        row = tiles_ptr + (b * tl.cdiv(T, BQ) + m) * 4
        lo, full_lo, full_hi, hi = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    else:
        first = m * BQ + offset
        last = tl.minimum(m * BQ + BQ, T) - 1 + offset
        lo, hi = 0, tl.cdiv(S, BK)
        full_lo, full_hi = 0, S // BK
        if LEFT >= 0:
            lo = tl.minimum(tl.maximum(first - LEFT, 0) // BK, hi)
            full_lo = tl.cdiv(tl.maximum(last - LEFT, 0), BK)
        if RIGHT >= 0:
            hi = tl.minimum(hi, tl.cdiv(tl.maximum(last + RIGHT + 1, 0), BK))
            full_hi = tl.minimum(full_hi, tl.maximum(first + RIGHT + 1, 0) // BK)
    hi = tl.maximum(hi, lo)
    full_lo = tl.minimum(tl.maximum(full_lo, lo), hi)
    full_hi = tl.minimum(tl.maximum(full_hi, full_lo), hi)
    if MASK:
        full_lo = hi
        full_hi = hi
    return lo, full_lo, full_hi, hi


@triton.jit
def query_tiles(tiles_ptr, b, n, offset, T, S, BQ: tl.constexpr, BK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
                TABLE: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    """Query tiles of key tile `n`, as `key_tiles`. Queries past the end need no mask: their weights come out zero."""
    if TABLE:
        row = tiles_ptr + (b * tl.cdiv(S, BK) + n) * 4
        lo, full_lo, full_hi, hi = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    else:
        first = n * BK - offset
        last = n * BK + BK - 1 - offset
        lo, hi = 0, tl.cdiv(T, BQ)
        full_lo, full_hi = 0, hi
        if RIGHT >= 0:
            lo = tl.minimum(tl.maximum(first - RIGHT, 0) // BQ, hi)
            full_lo = tl.cdiv(tl.maximum(last - RIGHT, 0), BQ)
        if LEFT >= 0:
            hi = tl.minimum(hi, tl.cdiv(tl.maximum(last + LEFT + 1, 0), BQ))
            full_hi = tl.minimum(full_hi, tl.maximum(first + LEFT + 1, 0) // BQ)
    hi = tl.maximum(hi, lo)
    full_lo = tl.minimum(tl.maximum(full_lo, lo), hi)
    full_hi = tl.minimum(tl.maximum(full_hi, full_lo), hi)
    if MASK:
        full_lo = hi
        full_hi = hi
    return lo, full_lo, full_hi, hi


@triton.jit
def load_rows(ptr, start, row_stride, ok, length, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
              BOUND: tl.constexpr, CHECK: tl.constexpr):  # fmt: skip
    """Rows `start .. start + ROWS` of a matrix of `length` rows as a `[ROWS, COLUMNS]` tile, zero outside and where not `ok`.

    `BOUND`: rows may lie past the end; `CHECK`: `ok` is a vector to obey.
    """
    r = tl.arange(0, ROWS)
    c = tl.arange(0, COLUMNS)
    pointers = ptr + start.to(tl.int64) * row_stride + (r[:, None] * row_stride + c[None, :])
    if BOUND or CHECK:
        inside = start + r < length
        if CHECK:
            inside = inside & ok
        if WIDTH == COLUMNS:
            return tl.load(pointers, mask=inside[:, None], other=0.0)
        return tl.load(pointers, mask=inside[:, None] & (c < WIDTH)[None, :], other=0.0)
    if WIDTH == COLUMNS:
        return tl.load(pointers)
    return tl.load(pointers, mask=(c < WIDTH)[None, :], other=0.0)


@triton.jit
def store_rows(
    ptr, tile, start, row_stride, length, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    r = tl.arange(0, ROWS)
    c = tl.arange(0, COLUMNS)
    pointers = ptr + start.to(tl.int64) * row_stride + (r[:, None] * row_stride + c[None, :])
    tl.store(pointers, tile, mask=(start + r < length)[:, None] & (c < WIDTH)[None, :])
