"""Operations on one tile of scores, shared by all Triton kernels of attention.

A tile is `[BQ, BK]` or, where keys are the rows, `[BK, BQ]`: the functions below take query and key vectors already shaped to
broadcast either way, and comments say `[BQ, BK]` for both. Scores are kept in units of log2, so that `exp2` needs no further multiplication.

Kernels bundle their parameters into the tuples below. Names in capitals are constants of the compiler, and a kernel annotates a tuple of them as one.
"""

from collections import namedtuple

import triton
import triton.language as tl

from ...launch.constants import LOG2E, MOST_NATURAL
from .. import log_forget, philox

# Bits of BIAS and MASK besides 1 (present): which of the batch, head, query and key axes are not broadcast, and whether batch rows share rows.
OVER_BATCH, OVER_HEADS, OVER_QUERIES, OVER_KEYS, SHARED = (tl.constexpr(2 << axis) for axis in range(5))

PHILOX_ROUNDS = tl.constexpr(philox.ROUNDS)
SLOPES, GATES = tl.constexpr(1), tl.constexpr(2)  # of ALIBI: what the pointer `slopes` holds
CHUNK = tl.constexpr(log_forget.CHUNK)
LARGE_CAP = tl.constexpr(100.0)  # a cap from which on absolute errors of its tanh would be seen
PHILOX_M0, PHILOX_M1 = (tl.constexpr(word) for word in philox.MULTIPLIERS)
PHILOX_W0, PHILOX_W1 = (tl.constexpr(word) for word in philox.WEYL)


# Heads, channels and tiles; EVEN_Q and EVEN_K say that tiles divide the lengths.
Sizes = namedtuple("Sizes", "H K D R V BLOCK_D BLOCK_R BLOCK_V BQ BK EVEN_Q EVEN_K")
# From products to weights. FOLDED: MULTIPLIER, the scores' last factor, is fused with the subtraction of the maximum.
Scoring = namedtuple("Scoring", "SCALE CAP FAST_TANH FOLDED MULTIPLIER BIAS ALIBI DROPOUT SEED_WORDS KEEP_SCALE PRECISION")  # fmt: skip
# Which keys are hidden. CLEAN: hidden rows may hold NaN, which is cleared. LISTED, BITS: lists of tiles, and words of a row of their patterns.
Masking = namedtuple("Masking", "LEFT RIGHT ROWS SEGMENTS MASK LISTED BITS MAP_HEADS MAP_Q MAP_K CLEAN")
# Queries, keys, and the position of the first query.
Lengths = namedtuple("Lengths", "T S offset")
# Pointers to numbers of each query, [B, T], and of each key, [B, S].
RowArrays = namedtuple("RowArrays", "position start end q_segments kv_segments key_seen query_seen", defaults=(0,))  # fmt: skip
# Pointers to what differs between heads: [B, H] or of forget gates [B, H, n] as in `log_forget.for_tiles` in units of log2,
# [B, H, SEED_WORDS], bias and mask as in `over_scores`, the map as in `map_of`.
HeadArrays = namedtuple("HeadArrays", "slopes seeds bias bias_run bias_rows mask mask_run mask_rows map")
# Pointers to bounds of tiles, [B, tiles, 4] or of lists [rows, tiles, 8], and to the lists as in `TileLists`.
TileArrays = namedtuple("TileArrays", "tiles row list pattern bits")
# One head's slope, [], or where its gates' sums of keys begin, and of queries; seed words and place in dropout's counter, [] each; and where its bias, its
# mask and its map begin.
Head = namedtuple("Head", "slope gates seed0 seed1 ahead bias mask map")
# The numbers of a tile's queries, [BQ, 1] each, and of its keys, [1, BK] each; where keys are the rows, [1, BQ] and [BK, 1]. `gates`: what is
# left of their sums beside `coarse`, [].
Queries = namedtuple("Queries", "i position start end segment")
Keys = namedtuple("Keys", "j segment gates coarse")
# Where one head's queries, cotangents, terms of the softmax and the numbers of its queries begin; and the same of its keys.
QueryRows = namedtuple("QueryRows", "q do lse delta position start end segments seen")
KeyRows = namedtuple("KeyRows", "k rope v segments seen")
# Tiles `[lo, full_lo)` and `[full_hi, hi)` need the mask, those between do not. Of lists: the first entry of either kind, and its patterns.
Spans = namedtuple("Spans", "lo full_lo full_hi hi whole partial patterns")
LEADING, FULL, TRAILING = (tl.constexpr(part) for part in range(3))


@triton.jit
def tanh(x, APPROXIMATE: tl.constexpr, NEAR_ZERO: tl.constexpr):
    """Hyperbolic tangent with an absolute error of 1e-7 or, `APPROXIMATE`, a relative one of 5e-4. `NEAR_ZERO`: with a small relative error there, by
    the series, for what a large cap multiplies."""
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
def query_rows(rows, b, arrays, lengths, masking: tl.constexpr):  # rows [BQ]
    """The numbers of a vector of queries, as a column; absent arrays are never read."""
    T = lengths.T
    inside = rows < T  # [BQ]
    # Unused numbers stand in for absent arrays.
    position = rows + lengths.offset  # [BQ], as all four
    start = rows
    end = rows
    segment = rows
    if masking.ROWS:
        position = tl.load(arrays.position + b * T + rows, mask=inside, other=0)
        start = tl.load(arrays.start + b * T + rows, mask=inside, other=0)
        end = tl.load(arrays.end + b * T + rows, mask=inside, other=0)
    if masking.SEGMENTS:
        segment = tl.load(arrays.q_segments + b * T + rows, mask=inside, other=-1)  # -1, as padding has
    return Queries(rows[:, None], position[:, None], start[:, None], end[:, None], segment[:, None])


@triton.jit
def key_columns(first, key_rows, head, S, BK: tl.constexpr, BOUND: tl.constexpr, CHECK: tl.constexpr, SEGMENTS: tl.constexpr,
                ALIBI: tl.constexpr):  # fmt: skip
    """The numbers of the keys from `first` on, as a row, and which of them are read `[BK]`. `CHECK`: keys that no query may see can hold anything, so they
    are not read."""
    columns = first + tl.arange(0, BK)  # [BK]
    j = columns[None, :]  # [1, BK]
    ok = columns < S  # [BK]
    segment = j
    if CHECK:
        ok = ok & (tl.load(key_rows.seen + columns, mask=ok, other=0) != 0)
    if SEGMENTS:
        segment = tl.load(key_rows.segments + columns, mask=columns < S, other=-1)[None, :]  # [1, BK]
    gates = j
    coarse = 0.0
    if ALIBI == GATES:
        within = columns < S if BOUND else columns >= 0  # [BK]
        gates = tl.load(head.slope + columns, mask=within, other=0.0)[None, :]  # [1, BK]
        coarse = coarse_of(head.slope, S, first)
    return Keys(j, segment, gates, coarse), ok


@triton.jit
def sums_of(slopes_ptr, bh, lengths):
    """Where the sums of a head's gates begin, those of keys and those of queries."""
    keys = lengths.S + (lengths.S + CHUNK - 1) // CHUNK
    both = keys + lengths.T + (lengths.T + CHUNK - 1) // CHUNK
    sums = slopes_ptr + bh * ((both + 15) // 16 * 16)
    return sums, sums + keys


@triton.jit
def coarse_of(sums, length, first):
    """The coarse sum of gates of the tile from `first` on, behind the rests of `length` tokens."""
    return tl.load(sums + length + first // CHUNK)


@triton.jit
def head_of(arrays, b, h, lengths, H: tl.constexpr, scoring: tl.constexpr, masking: tl.constexpr):
    """Scalars and pointers of head `h` of batch row `b`."""
    slope = 0.0  # [] each
    gates = arrays.slopes
    if scoring.ALIBI == SLOPES:
        slope = tl.load(arrays.slopes + b * H + h)
    if scoring.ALIBI == GATES:
        slope, gates = sums_of(arrays.slopes, b * H + h, lengths)
    seed0 = tl.zeros([], tl.uint32)
    seed1 = tl.zeros([], tl.uint32)
    ahead = tl.zeros([], tl.uint32)
    if scoring.DROPOUT > 0:
        seeds = arrays.seeds + (b * H + h) * scoring.SEED_WORDS
        seed0 = tl.load(seeds)
        seed1 = tl.load(seeds + 1)
        if scoring.SEED_WORDS == 3:
            ahead = tl.load(seeds + 2)
    bias = over_scores(arrays.bias, b, h, arrays.bias_run, arrays.bias_rows, lengths, H, scoring.BIAS)
    mask = over_scores(arrays.mask, b, h, arrays.mask_run, arrays.mask_rows, lengths, H, masking.MASK)
    place = map_of(arrays.map, b, h, lengths, H, masking)
    return Head(slope, gates, seed0, seed1, ahead, bias, mask, place)


@triton.jit
def over_scores(ptr, b, h, run, rows, lengths, H: tl.constexpr, BITS: tl.constexpr):
    """Pointer to the scores of batch row `b` and head `h` in an array broadcastable to `[B, H, T, S]`.

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
        start = start * lengths.T
    if OVER_KEYS & BITS:
        start = start * lengths.S
    return ptr + start


@triton.jit
def load_over_scores(ptr, i, j, lengths, BITS: tl.constexpr):
    """The tile at queries `i` and keys `j` of the array that begins at `over_scores`."""
    rows: tl.constexpr = (OVER_QUERIES & BITS) != 0
    columns: tl.constexpr = (OVER_KEYS & BITS) != 0
    inside = (i < lengths.T) & (j < lengths.S)  # [BQ, BK]
    # An axis of size one is read at 0.
    offset = (i + j) * 0  # [BQ, BK]
    if rows and columns:
        offset = i.to(tl.int64) * lengths.S + j  # in 64 bits: a head's scores may be more than 2^31
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
def scores(qk, queries, keys, head, lengths, scoring: tl.constexpr):
    """Scores in log2 units, and the tanh whose square the backward needs; if `FOLDED`, without their last constant factor."""
    t = qk  # [BQ, BK], as all below; the tanh if there is a soft cap
    if scoring.CAP > 0:
        t = tanh(qk * (scoring.SCALE / scoring.CAP), scoring.FAST_TANH, scoring.CAP > LARGE_CAP)
    s = t
    if not scoring.FOLDED:
        if scoring.CAP > 0:
            s = t * (scoring.CAP * LOG2E)
        else:
            s = qk * (scoring.SCALE * LOG2E)
        # Bias and ALiBi come after the soft cap, in natural units.
        if scoring.BIAS:
            s += bias_in_log2(load_over_scores(head.bias, queries.i, keys.j, lengths, scoring.BIAS))
        if scoring.ALIBI == GATES:
            s -= keys.gates
        elif scoring.ALIBI:
            s += (head.slope * LOG2E) * (keys.j - queries.position).to(tl.float32)  # [BQ, BK]
    return s, t


@triton.jit
def visible(queries, keys, bits, head, lengths, masking: tl.constexpr, BOUND: tl.constexpr):
    """Visibility of each entry of the tile; keys past the end are excluded only with `BOUND`, queries past the end never. `bits`: those of the
    tile's pattern, `[BQ, BK]`."""
    i, position, start, end, q_segment = queries
    j, k_segment, _, _ = keys
    # The range: the row's own, or one that moves by one key per query.
    if masking.ROWS:
        seen = (j >= start) & (j < end)  # [BQ, BK]
    elif masking.RIGHT >= 0:
        seen = j <= position + masking.RIGHT  # [BQ, BK]
        if masking.LEFT >= 0:
            seen = seen & (j >= position - masking.LEFT)
    elif masking.LEFT >= 0:
        seen = j >= position - masking.LEFT  # [BQ, BK]
    else:
        seen = (i >= 0) & (j >= 0)  # [BQ, BK], all
    if BOUND and not masking.ROWS:
        seen = seen & (j < lengths.S)
    if masking.SEGMENTS:
        seen = seen & (q_segment == k_segment) & (q_segment >= 0)  # -1 is padding
    if masking.MASK:
        seen = seen & (load_over_scores(head.mask, i, j, lengths, masking.MASK) != 0)
    if masking.BITS:
        seen = seen & bits
    if masking.MAP_Q:  # one entry for every block of scores
        inside = (i < lengths.T) & (j < lengths.S)  # [BQ, BK]
        row = head.map + i // masking.MAP_Q * tl.cdiv(lengths.S, masking.MAP_K)  # [BQ, 1]
        seen = seen & (tl.load(row + j // masking.MAP_K, mask=inside, other=0) != 0)
    return seen


@triton.jit
def keep(queries, keys, head, THRESHOLD: tl.constexpr):
    """Philox4x32-7 of (seed, query position, key position): which entries survive dropout. Both positions are `ahead` of those of the call."""
    position, j = queries.position, keys.j
    # The counter: query position, key position, 0, 0. Adding a zero vector makes each word a tile.
    c0 = position.to(tl.uint32) + head.ahead + (j * 0).to(tl.uint32)  # [BQ, BK]
    c1 = j.to(tl.uint32) + head.ahead + (position * 0).to(tl.uint32)  # [BQ, BK]
    c2 = c0 * 0  # [BQ, BK]
    c3 = c0 * 0  # [BQ, BK]
    k0 = head.seed0  # []
    k1 = head.seed1  # []
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
    """Works as `program`, in the order of lists, longest first, and the place in it. All rows run the longer half of their tiles, then the shorter
    one, so that the last programs are short ones."""
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
    # Positions of the tile's first and last query. Keys from the first query's start to the last one's end are seen by some query;
    # keys from the last one's start to the first one's end are seen by all.
    first = m * BQ + offset
    last = tl.minimum(m * BQ + BQ, T) - 1 + offset
    row = tiles_ptr + (b * tl.cdiv(T, BQ) + m) * 4
    return _tiles_between(row, first, last, tl.cdiv(S, BK), S // BK, BK, LEFT, RIGHT, TABLE, MASK)


@triton.jit
def query_tiles(tiles_ptr, b, n, offset, T, S, BQ: tl.constexpr, BK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
                TABLE: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    """Query tiles of key tile `n`, as `key_tiles`. Queries past the end need no mask, because their weights are zero."""
    # The rows of the queries at the tile's first and last key.
    first = n * BK - offset
    last = n * BK + BK - 1 - offset
    row = tiles_ptr + (b * tl.cdiv(S, BK) + n) * 4
    return _tiles_between(row, first, last, tl.cdiv(T, BQ), tl.cdiv(T, BQ), BQ, RIGHT, LEFT, TABLE, MASK)


@triton.jit
def _tiles_between(row, first, last, count, whole, BLOCK: tl.constexpr, BEFORE: tl.constexpr, BEHIND: tl.constexpr,
                   TABLE: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    """Bounds among `count` tiles, of which the first `whole` are not cut: of a tile whose first and last row see others from `BEFORE` them
    to `BEHIND` them, -1 for all; or from `tile_table`, four for each tile."""
    if TABLE:
        lo, full_lo, full_hi, hi = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    else:
        lo, hi = 0, count
        full_lo, full_hi = 0, whole
        if BEFORE >= 0:
            lo = tl.minimum(tl.maximum(first - BEFORE, 0) // BLOCK, hi)
            full_lo = tl.cdiv(tl.maximum(last - BEFORE, 0), BLOCK)
        if BEHIND >= 0:
            hi = tl.minimum(hi, tl.cdiv(tl.maximum(last + BEHIND + 1, 0), BLOCK))
            full_hi = tl.minimum(full_hi, tl.maximum(first + BEHIND + 1, 0) // BLOCK)
    # Ordered, even if the window leaves nothing.
    hi = tl.maximum(hi, lo)
    full_lo = tl.minimum(tl.maximum(full_lo, lo), hi)
    full_hi = tl.minimum(tl.maximum(full_hi, full_lo), hi)
    if MASK:  # may hide any other
        full_lo = hi
        full_hi = hi
    return lo, full_lo, full_hi, hi


@triton.jit
def query_program(arrays, lengths, sizes: tl.constexpr, LISTED: tl.constexpr, GROUP: tl.constexpr):
    """This program's query tile, its row of batch times heads, the number of tiles, and the tile's place in the order of lists.

    The tiles with the most keys come first: of causal masks the last ones."""
    if LISTED:
        m, bh, count, at = listed_program(arrays.tiles, lengths.T, sizes.BQ, GROUP)
    else:
        at, bh, count = program(lengths.T, sizes.BQ, GROUP)
        m = count - 1 - at
    return m, bh, count, at


@triton.jit
def key_spans(arrays, b, bh, m, at, count, lengths, sizes: tl.constexpr, masking: tl.constexpr):
    """The key tiles of query tile `m`."""
    if masking.LISTED:
        spans = listed_spans(arrays, bh, at, count, masking.LISTED)
    else:
        table: tl.constexpr = masking.ROWS or masking.SEGMENTS
        lo, full_lo, full_hi, hi = key_tiles(
            arrays.tiles, b, m, lengths.offset, lengths.T, lengths.S, sizes.BQ, sizes.BK, masking.LEFT, masking.RIGHT, table, masking.MASK)  # fmt: skip
        spans = Spans(lo, full_lo, full_hi, hi, full_lo, full_hi, arrays.pattern)
    return spans


@triton.jit
def span(spans, PART: tl.constexpr):
    """Begin and end of a part of the tiles, and the first of its entries in a list."""
    if PART == LEADING:
        part = (spans.lo, spans.full_lo, spans.lo)
    elif PART == FULL:
        part = (spans.full_lo, spans.full_hi, spans.whole)
    else:
        part = (spans.full_hi, spans.hi, spans.partial)
    return part


@triton.jit
def listed_spans(arrays, bh, at, count, LISTED: tl.constexpr):
    """Entries of a tile's list: those before `full_hi` need no mask, the others do. The first of either kind, and where the patterns of the latter
    are, counted as entries, come with the bounds: an entry that is read between the two loops makes the compiler wait for products (C7515)."""
    record = arrays.tiles + at * 8
    if LISTED > 1:  # heads have lists of their own
        record += tl.load(arrays.row + bh) * (count * 8)
    lo, full_hi, hi = tl.load(record + 1), tl.load(record + 2), tl.load(record + 3)
    whole, partial = tl.load(record + 5), tl.load(record + 6)
    return Spans(lo, lo, full_hi, hi, whole, partial, arrays.pattern + tl.load(record + 4))


@triton.constexpr_function
def part_runs(part, sizes, masking, before, behind):
    """Tells whether a loop over a part of the tiles is compiled: most are fully visible and need no mask, and a loop with one takes registers.
    `before`, `behind`: whether tiles may be partly visible before the full ones, and behind."""
    table = masking.ROWS or masking.SEGMENTS
    if part == LEADING:
        return not masking.LISTED and (table or before or masking.MASK)
    if part == FULL:
        return masking.LISTED or not masking.MASK
    if masking.LISTED:
        return _lists_partly(sizes, masking)
    return not masking.MASK and (table or behind)


@triton.constexpr_function
def _lists_partly(sizes, masking):
    """Tells whether lists may hold tiles of which a part is visible."""
    in_map = masking.MAP_Q > 0 and (masking.MAP_Q % sizes.BQ > 0 or masking.MAP_K % sizes.BK > 0)
    ranged = masking.ROWS or masking.SEGMENTS or masking.LEFT >= 0 or masking.RIGHT >= 0
    return ranged or masking.MASK > 0 or masking.BITS > 0 or in_map or not sizes.EVEN_K


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
def map_of(map_ptr, b, h, lengths, H: tl.constexpr, masking: tl.constexpr):
    """Pointer to the entries of a head in a map `[B, H or 1, cdiv(T, MAP_Q), cdiv(S, MAP_K)]`."""
    # Not after a `return`, which would be compiled: a T of 1 is a constant, and dividing it by 0 an error.
    if masking.MAP_Q > 0:
        row = b
        if masking.MAP_HEADS:
            row = b * H + h
        map_ptr += row * tl.cdiv(lengths.T, masking.MAP_Q) * tl.cdiv(lengths.S, masking.MAP_K)
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
def load_queries(q_base, first, ok, T, sizes: tl.constexpr, BOUND: tl.constexpr, CHECK: tl.constexpr):
    """A tile of queries in two parts, `D` channels and behind them `R`, which are multiplied by keys that all heads share. Neither part is padded
    to the size of the other. Without the second part, the first one twice."""
    stride: tl.constexpr = sizes.H * (sizes.D + sizes.R)
    q = load_rows(q_base, first, stride, ok, T, sizes.D, sizes.BQ, sizes.BLOCK_D, BOUND, CHECK)  # [BQ, BLOCK_D]  # fmt: skip
    rope = q
    if sizes.R > 0:
        rope = load_rows(q_base + sizes.D, first, stride, ok, T, sizes.R, sizes.BQ, sizes.BLOCK_R, BOUND, CHECK)  # [BQ, BLOCK_R]  # fmt: skip
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
