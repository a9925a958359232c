"""Operations on one tile of scores, shared by all Triton kernels of attention.

A tile is `[BQ, BK]` or, where keys are the rows, `[BK, BQ]`: the functions below take query and key vectors already shaped to
broadcast either way, and comments say `[BQ, BK]` for both. Scores are kept in units of log2, so that `exp2` needs no further multiplication.
"""

import triton
import triton.language as tl

from ...launch.constants import LOG2E, MOST_NATURAL
from .. import philox

# Bits of BIAS and MASK besides 1 (present): which of the batch, head, query and key axes are not broadcast, and whether batch rows share rows.
OVER_BATCH, OVER_HEADS, OVER_QUERIES, OVER_KEYS, SHARED = (tl.constexpr(2 << axis) for axis in range(5))

PHILOX_ROUNDS = tl.constexpr(philox.ROUNDS)
LARGE_CAP = tl.constexpr(100.0)  # a cap from which on absolute errors of its tanh would be seen
PHILOX_M0, PHILOX_M1 = (tl.constexpr(word) for word in philox.MULTIPLIERS)
PHILOX_W0, PHILOX_W1 = (tl.constexpr(word) for word in philox.WEYL)


@triton.jit
def tanh(x, APPROXIMATE: tl.constexpr, NEAR_ZERO: tl.constexpr):
    """With an absolute error of 1e-7 or, `APPROXIMATE`, a relative one of 5e-4. `NEAR_ZERO`: with a small relative error there, by the series, for what a
    large cap multiplies."""
    if APPROXIMATE:
        return tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    decay = tl.exp2(-2.8853900817779268 * tl.abs(x))  # e^(-2|x|)
    magnitude = (1.0 - decay) / (1.0 + decay)  # of the shape of x; e^(-2|x|) is at most 1, however large x is
    y = tl.where(x < 0, -magnitude, magnitude)  # of the shape of x
    if NEAR_ZERO:
        s = x * x  # of the shape of x
        y = tl.where(tl.abs(x) < 0.2, x * (1.0 - s * (1.0 / 3.0 - s * (2.0 / 15.0 - s * (17.0 / 315.0)))), y)
    return y


@triton.jit
def query_rows(rows, inside, offset, b, T, position_ptr, start_ptr, end_ptr, q_segments_ptr,  # rows [BQ]
               ROWS: tl.constexpr, SEGMENTS: tl.constexpr):  # fmt: skip
    """Position, key range and segment of a vector of queries; absent arrays are never read."""
    # Unused numbers stand in for absent arrays.
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
    return position, start, end, segment


@triton.jit
def head_scalars(slopes_ptr, seeds_ptr, b, h, H: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr,
                 SEED_WORDS: tl.constexpr):  # fmt: skip
    """The ALiBi slope and the two seed words of a head, and by how much its positions in dropout's counter are ahead."""
    slope = 0.0  # [] each
    if ALIBI:
        slope = tl.load(slopes_ptr + b * H + h)
    seed0 = tl.zeros([], tl.uint32)
    seed1 = tl.zeros([], tl.uint32)
    ahead = tl.zeros([], tl.uint32)
    if DROPOUT > 0:
        seed0 = tl.load(seeds_ptr + (b * H + h) * SEED_WORDS)
        seed1 = tl.load(seeds_ptr + (b * H + h) * SEED_WORDS + 1)
        if SEED_WORDS == 3:
            ahead = tl.load(seeds_ptr + (b * H + h) * SEED_WORDS + 2)
    return slope, seed0, seed1, ahead


@triton.jit
def over_scores(ptr, b, h, run, rows, T, S, H: tl.constexpr, BITS: tl.constexpr):
    """Where the scores of batch row `b` and head `h` begin in an array broadcastable to `[B, H, T, S]`.

    If rows are shared, each of its `rows` serves `run` consecutive batch rows, and the rows repeat cyclically.
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
    """The tile at queries `i` and keys `j` of the array that begins at `over_scores`."""
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
def bias_in_log2(bias):
    """A bias in log2 units. A finite one stays finite: only minus infinity hides."""
    wide = bias.to(tl.float32)  # of the shape of bias
    if bias.dtype != tl.float16:  # whose numbers are too small to overflow
        wide = tl.where(tl.abs(wide) < float("inf"), tl.clamp(wide, -MOST_NATURAL, MOST_NATURAL), wide)
    return wide * LOG2E


@triton.jit
def scores(qk, i, j, position, slope, bias_ptr, T, S, SCALE: tl.constexpr, CAP: tl.constexpr,
           FAST_TANH: tl.constexpr, BIAS: tl.constexpr, ALIBI: tl.constexpr, FOLDED: tl.constexpr):  # fmt: skip
    """Scores in log2 units, and the tanh whose square the backward needs. `FOLDED`: without their last constant factor, which the
    caller fuses with a subtraction into one instruction."""
    t = qk  # [BQ, BK], as all below; the tanh if there is a soft cap
    if CAP > 0:
        t = tanh(qk * (SCALE / CAP), FAST_TANH, CAP > LARGE_CAP)
    s = t
    if not FOLDED:
        if CAP > 0:
            s = t * (CAP * LOG2E)
        else:
            s = qk * (SCALE * LOG2E)
        # Bias and ALiBi come after the soft cap, in natural units.
        if BIAS:
            s += bias_in_log2(load_over_scores(bias_ptr, i, j, T, S, BIAS))
        if ALIBI:
            s += (slope * LOG2E) * (j - position).to(tl.float32)  # [BQ, BK]
    return s, t


@triton.jit
def visible(i, j, position, start, end, q_segment, k_segment, mask_ptr, T, S,
            listed, map_row,  # `load_bits` of the tile, the head's map
            LEFT: tl.constexpr, RIGHT: tl.constexpr, ROWS: tl.constexpr, SEGMENTS: tl.constexpr, MASK: tl.constexpr,
            BOUND: tl.constexpr, BITS: tl.constexpr, MAP_Q: tl.constexpr, MAP_K: tl.constexpr):  # fmt: skip
    """Which entries of the tile are visible; keys past the end are excluded only with `BOUND`, queries past the end never."""
    # The range: the row's own, or one that moves by one key per query.
    if ROWS:
        seen = (j >= start) & (j < end)  # [BQ, BK]
    elif RIGHT >= 0:
        seen = j <= position + RIGHT  # [BQ, BK]
        if LEFT >= 0:
            seen = seen & (j >= position - LEFT)
    elif LEFT >= 0:
        seen = j >= position - LEFT  # [BQ, BK]
    else:
        seen = (i >= 0) & (j >= 0)  # [BQ, BK], all
    if BOUND and not ROWS:
        seen = seen & (j < S)
    if SEGMENTS:
        seen = seen & (q_segment == k_segment) & (q_segment >= 0)  # -1 is padding
    if MASK:
        seen = seen & (load_over_scores(mask_ptr, i, j, T, S, MASK) != 0)
    if BITS:
        seen = seen & listed
    if MAP_Q:  # one entry for every block of scores
        inside = (i < T) & (j < S)  # [BQ, BK]
        entry = tl.load(
            map_row + i // MAP_Q * tl.cdiv(S, MAP_K) + j // MAP_K, mask=inside, other=0
        )  # [BQ, BK]
        seen = seen & (entry != 0)
    return seen


@triton.jit
def keep(seed0, seed1, ahead, position, j, THRESHOLD: tl.constexpr):
    """Philox4x32-7 of (seed, query position, key position): which entries survive dropout. Both positions are `ahead` of those given."""
    # The counter: query position, key position, 0, 0. Adding a zero vector makes each word a tile.
    c0 = position.to(tl.uint32) + ahead + (j * 0).to(tl.uint32)  # [BQ, BK]
    c1 = j.to(tl.uint32) + ahead + (position * 0).to(tl.uint32)  # [BQ, BK]
    c2 = c0 * 0  # [BQ, BK]
    c3 = c0 * 0  # [BQ, BK]
    k0 = seed0  # []
    k1 = seed1  # []
    for _ in tl.static_range(PHILOX_ROUNDS):
        # A round: two 64-bit products, whose words are swapped and mixed with the key; then the next round's key.
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

    Rows run in groups of `GROUP`, few enough for the cache. Within a group all first tiles run first, so that long tiles
    do not come last when the work per tile varies.
    """
    tiles = tl.cdiv(length, BLOCK)
    rows = tl.num_programs(0) // tiles
    group = tl.program_id(0) // (tiles * GROUP)
    index = tl.program_id(0) % (tiles * GROUP)
    size = tl.minimum(rows - group * GROUP, GROUP)  # the last group may have fewer rows
    return index // size, group * GROUP + index % size, tiles


@triton.jit
def listed_program(tiles_ptr, length, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """As `program`, in the order of lists, longest first, and the place in it. All rows run the longer half of their tiles, then the shorter one, so that the last programs
    are short ones."""
    tiles = tl.cdiv(length, BLOCK)
    rows = tl.num_programs(0) // tiles
    longer = (tiles + 1) // 2
    late = tl.program_id(0) >= rows * longer
    pid = tl.program_id(0) - tl.where(late, rows * longer, 0)
    count = tl.where(late, tiles - longer, longer)
    group = pid // (count * GROUP)
    index = pid % (count * GROUP)
    size = tl.minimum(rows - group * GROUP, GROUP)
    at = index // size + tl.where(late, longer, 0)
    return tl.load(tiles_ptr + at * 8), group * GROUP + index % size, tiles, at


@triton.jit
def key_tiles(tiles_ptr, b, m, offset, T, S, BQ: tl.constexpr, BK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
              TABLE: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    """Key tiles of query tile `m`: `[lo, a)` and `[b, hi)` need the mask, `[a, b)` do not."""
    if TABLE:
        # Four bounds for each query tile, from `tile_table`.
        row = tiles_ptr + (b * tl.cdiv(T, BQ) + m) * 4
        lo, full_lo, full_hi, hi = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    else:
        # Positions of the tile's first and last query. Keys from the first query's start to the last one's end are seen by some query;
        # keys from the last one's start to the first one's end are seen by all.
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
    # Ordered, even if the window leaves nothing.
    hi = tl.maximum(hi, lo)
    full_lo = tl.minimum(tl.maximum(full_lo, lo), hi)
    full_hi = tl.minimum(tl.maximum(full_hi, full_lo), hi)
    if MASK:  # may hide any key
        full_lo = hi
        full_hi = hi
    return lo, full_lo, full_hi, hi


@triton.jit
def query_tiles(tiles_ptr, b, n, offset, T, S, BQ: tl.constexpr, BK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
                TABLE: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    """Query tiles of key tile `n`, as `key_tiles`. Queries past the end need no mask, because their weights are zero."""
    if TABLE:
        # Four bounds for each key tile, from `tile_table`.
        row = tiles_ptr + (b * tl.cdiv(S, BK) + n) * 4
        lo, full_lo, full_hi, hi = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    else:
        # The rows of the queries at the tile's first and last key; then as in `key_tiles`.
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
def listed_tiles(tiles_ptr, row_ptr, bh, at, count, pattern_ptr, LISTED: tl.constexpr):
    """Entries of a tile's list, as the bounds of `key_tiles`: those before `full_hi` need no mask, the others do. The first of either kind,
    and where the patterns of the latter are, counted as entries.

    Both come with the bounds: an entry that is read between the two loops makes the compiler wait for products (C7515)."""
    record = tiles_ptr + at * 8
    if LISTED > 1:  # heads have lists of their own
        record += tl.load(row_ptr + bh) * (count * 8)
    lo, full_hi, hi = tl.load(record + 1), tl.load(record + 2), tl.load(record + 3)
    whole, partial = tl.load(record + 5), tl.load(record + 6)
    return lo, lo, full_hi, hi, whole, partial, pattern_ptr + tl.load(record + 4)


@triton.constexpr_function
def lists_partly(BQ, BK, TABLE, LEFT, RIGHT, MASK, BITS, MAP_Q, MAP_K, EVEN_K):
    """Whether lists may hold tiles of which a part is visible, for which a second loop takes registers."""
    in_map = MAP_Q > 0 and (MAP_Q % BQ > 0 or MAP_K % BK > 0)
    return TABLE or LEFT >= 0 or RIGHT >= 0 or MASK > 0 or BITS > 0 or in_map or not EVEN_K


@triton.jit
def load_bits(bits_ptr, pattern, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WORDS: tl.constexpr):
    """The bits of a pattern, stored as `WORDS` words for each row of a tile `[ROWS, COLUMNS]`.

    A thread reads the words of its few rows, where one load for each entry would take registers for as many addresses."""
    column = tl.arange(0, COLUMNS)[None, :]  # [1, COLUMNS]
    words = bits_ptr + pattern.to(tl.int64) * (ROWS * WORDS) + tl.arange(0, ROWS) * WORDS  # [ROWS]
    word = tl.load(words)[:, None]  # [ROWS, 1]
    for n in tl.static_range(1, WORDS):
        word = tl.where(column < n * 32, word, tl.load(words + n)[:, None])  # [ROWS, COLUMNS]
    return (word >> (column % 32)) & 1 != 0  # [ROWS, COLUMNS]


@triton.jit
def map_of(
    map_ptr, b, h, T, S, H: tl.constexpr, HEADS: tl.constexpr, MAP_Q: tl.constexpr, MAP_K: tl.constexpr
):
    """Where the entries of a head begin in a map `[B, H or 1, cdiv(T, MAP_Q), cdiv(S, MAP_K)]`."""
    if (
        MAP_Q > 0
    ):  # not after a `return`, which would be compiled: a T of 1 is a constant, and dividing it by 0 an error
        row = b
        if HEADS:
            row = b * H + h
        map_ptr += row * tl.cdiv(T, MAP_Q) * tl.cdiv(S, MAP_K)
    return map_ptr


@triton.jit
def load_rows(ptr, start, row_stride, ok, length, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
              BOUND: tl.constexpr, CHECK: tl.constexpr):  # fmt: skip
    """Rows `start .. start + ROWS` of a matrix of `length` rows as a `[ROWS, COLUMNS]` tile, zero outside and where not `ok`.

    `BOUND`: rows may lie past the end; `CHECK`: apply the vector `ok`.
    """
    r = tl.arange(0, ROWS)  # [ROWS]
    c = tl.arange(0, COLUMNS)  # [COLUMNS]
    # [ROWS, COLUMNS]. Only the tile's start needs 64 bits.
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
def load_queries(q_base, first, ok, T, H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BQ: tl.constexpr,
                 BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BOUND: tl.constexpr, CHECK: tl.constexpr):  # fmt: skip
    """A tile of queries in two parts, `D` channels and behind them `R`, which are multiplied by keys that all heads share. Neither part is padded
    to the size of the other. Without the second part, the first one twice."""
    q = load_rows(q_base, first, H * (D + R), ok, T, D, BQ, BLOCK_D, BOUND, CHECK)  # [BQ, BLOCK_D]
    rope = q
    if R > 0:
        rope = load_rows(q_base + D, first, H * (D + R), ok, T, R, BQ, BLOCK_R, BOUND, CHECK)  # [BQ, BLOCK_R]
    return q, rope


@triton.jit
def store_rows(
    ptr, tile, start, row_stride, length, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    r = tl.arange(0, ROWS)  # [ROWS]
    c = tl.arange(0, COLUMNS)  # [COLUMNS]
    # [ROWS, COLUMNS], as in `load_rows`.
    pointers = ptr + start.to(tl.int64) * row_stride + (r[:, None] * row_stride + c[None, :])
    tl.store(pointers, tile, mask=(start + r < length)[:, None] & (c < WIDTH)[None, :])
