"""Hopper's forward kernel over lists of tiles: as `forward_kernel`, but programs go from entry to entry, not from tile to tile of queries.

A list may have few entries, so that what happens before and after its loop would cost as much as the entries. Here one loop runs over the
entries of all tiles of queries of a program: the last product of a tile runs under the first softmax of the next one, whose queries have a place of
their own, and a tile is stored while the other consumers multiply."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ....launch.constants import LN2, LOG2E
from .forward_kernel import (
    _await_turn,
    _barriers_of,
    _described,
    _give_turn,
    _load,
    _scores,
    _tiles_of,
    ROWS_EACH,
)
from .scores import _capped, _own_sum, _rescaled, _row_sum, _softmax, BOUND

QUERY_PLACES = gl.constexpr(2)
"""Tiles of queries in shared memory: while the entries of one run, the next one is loaded."""


# fmt: off
@gluon.jit
def _record(schedule_ptr, r):
    """Tile `r` of this program: its number, or -1 behind the last one; where its list begins, partly visible entries begin, and it ends; and how far
    patterns are from entries."""
    record = schedule_ptr + (r * gl.num_programs(0) + gl.program_id(0)) * 8
    return gl.load(record), gl.load(record + 1), gl.load(record + 2), gl.load(record + 3), gl.load(record + 4)


@gluon.jit
def _entry(list_ptr, i, lo, hi, S, BLOCK_K: gl.constexpr):
    """The tile of keys of an entry; of an empty list the one past the end, which is read as zeros and hidden."""
    n = gl.load(list_ptr + i).to(gl.int32)
    return gl.where(hi > lo, n, (S + BLOCK_K - 1) // BLOCK_K)


@gluon.jit
def _place(t, T, H: gl.constexpr, BLOCK_Q: gl.constexpr):
    """Batch row, head and first query of a tile."""
    count = (T + BLOCK_Q - 1) // BLOCK_Q
    m, bh = t % count, t // count
    return bh // H, bh % H, m * BLOCK_Q


@gluon.jit
def _visible(s, row, W: gl.constexpr, first, S, offset, bits_ptr, pattern, BLOCK_Q: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
             BITS: gl.constexpr, HIDDEN: gl.constexpr):
    """Scores or weights `[64, BLOCK_K]` of the queries from `row` and the keys from `first` on, `HIDDEN` where hidden."""
    layout: gl.constexpr = s.type.layout
    each = gl.arange(0, s.shape[0], gl.SliceLayout(1, layout))  # [64]
    column = gl.expand_dims(gl.arange(0, s.shape[1], gl.SliceLayout(0, layout)), 0)  # [1, BLOCK_K]
    i, j = gl.expand_dims(row + each, 1), first + column
    s = gl.where(j < S, s, HIDDEN)
    if RIGHT >= 0:
        s = gl.where(j <= i + (offset + RIGHT), s, HIDDEN)
    if LEFT >= 0:
        s = gl.where(j >= i + (offset - LEFT), s, HIDDEN)
    if BITS > 0:  # words of each row, as in `load_bits`
        words = bits_ptr + gl.to_tensor(pattern).to(gl.int64) * (BLOCK_Q * BITS) + (W * ROWS_EACH + each) * BITS  # [64]
        word = gl.expand_dims(gl.load(words), 1)  # [64, 1]
        for n in gl.static_range(1, BITS):
            word = gl.where(column < n * 32, word, gl.expand_dims(gl.load(words + n), 1))  # [64, BLOCK_K]
        s = gl.where(((word >> (column % 32)) & 1) != 0, s, HIDDEN)
    return s


@gluon.jit
def _weights(qk, top, total, tile, i, list_ptr, pattern_ptr, bits_ptr, T, S, offset, W: gl.constexpr, H: gl.constexpr, BLOCK_Q: gl.constexpr,
             BLOCK_K: gl.constexpr, SCALE: gl.constexpr, CAP: gl.constexpr, FAST_TANH: gl.constexpr, MULTIPLIER: gl.constexpr, LEFT: gl.constexpr,
             RIGHT: gl.constexpr, BITS: gl.constexpr, BOUNDED: gl.constexpr, PATIENCE: gl.constexpr):
    """`_softmax` of entry `i` of a tile."""
    t, lo, part, hi, away = tile
    row, first, pattern = 0, 0, i
    if i >= part:
        row = _place(t, T, H, BLOCK_Q)[2] + W * ROWS_EACH
        if BITS > 0:
            pattern = gl.load(pattern_ptr + away + i)
        first = _entry(list_ptr, i, lo, hi, S, BLOCK_K) * BLOCK_K
        if CAP > 0:  # as in `scores._scored`
            qk = _visible(qk, row, W, first, S, offset, bits_ptr, pattern, BLOCK_Q, LEFT, RIGHT, BITS, 0.0)
    s = _capped(qk, SCALE, CAP, FAST_TANH, MULTIPLIER, BOUNDED, BLOCK_K // 2)
    if i >= part:
        s = _visible(s, row, W, first, S, offset, bits_ptr, pattern, BLOCK_Q, LEFT, RIGHT, BITS, 0.0 if BOUNDED else float("-inf"))
    return _softmax(s, top, total, 1.0 if CAP > 0 else MULTIPLIER, True, BOUNDED, PATIENCE)


@gluon.jit
def _begun(sinks_ptr, t, T, BLOCK_Q: gl.constexpr, SINKS: gl.constexpr, BOUNDED: gl.constexpr, layout: gl.constexpr):
    """Maximum and denominator of a tile before its first entry."""
    top = gl.full([ROWS_EACH], 0.0 if BOUNDED else float("-inf"), gl.float32, layout)
    COLUMNS: gl.constexpr = layout.parent.instr_shape[1]
    total = _own_sum(gl.zeros([ROWS_EACH, COLUMNS], gl.float32, layout.parent))  # [64, 4]
    if SINKS:
        top = gl.zeros([ROWS_EACH], gl.float32, layout) + gl.load(sinks_ptr + t // ((T + BLOCK_Q - 1) // BLOCK_Q)) * LOG2E
        total = total + 0.25
    return top, total


@gluon.jit
def _weighted(p, vs, v_full, at, acc, more, BLOCK_K: gl.constexpr, V: gl.constexpr, NUM_STAGES: gl.constexpr):
    """The product by the values that were loaded as number `at`, added to the sum if there is `more` in it than of another tile; not awaited."""
    mbarrier.wait(v_full.index(at % NUM_STAGES), (at // NUM_STAGES) & 1)
    return warpgroup_mma(p, vs.index(at % NUM_STAGES).reshape([BLOCK_K, V]), acc, use_acc=more, is_async=True)


@gluon.jit
def _finish(acc, top, total, t, staging, out_desc, lse_ptr, T, W: gl.constexpr, H: gl.constexpr, V: gl.constexpr, BLOCK_Q: gl.constexpr,
            BOUNDED: gl.constexpr):
    """out = acc / total, lse = top + log(total); 0 and minus infinity for a row that saw no key."""
    layout: gl.constexpr = acc.type.layout
    b, h, row = _place(t, T, H, BLOCK_Q)
    row += W * ROWS_EACH
    rows = row + gl.arange(0, ROWS_EACH, top.type.layout)  # [64]
    total = _row_sum(total, top.type.layout)
    some = (total != 0) if BOUNDED else (top > float("-inf"))  # [64]
    total = gl.where(some, total, 1.0)
    lse = gl.where(some, (top + gl.log2(total)) * LN2, float("-inf"))
    gl.store(lse_ptr + gl.to_tensor(b * H + h).to(gl.int64) * T + rows, lse, mask=rows < T)
    acc = acc * gl.expand_dims(gl.convert_layout(gl.where(some, 1.0 / total, 0.0), gl.SliceLayout(1, layout)), 1)
    tma.store_wait(0)
    out = staging.index(W)
    out.reshape([ROWS_EACH, V]).store(acc.to(out.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [b, h, row, 0], out)


@gluon.jit
def _consumer(buffers, staging, barriers, out_desc, lse_ptr, sinks_ptr, list_ptr, pattern_ptr, bits_ptr, schedule_ptr, T, S, offset, W: gl.constexpr,
              CONSUMERS: gl.constexpr, H: gl.constexpr, D: gl.constexpr, V: gl.constexpr, BLOCK_K: gl.constexpr, NUM_STAGES: gl.constexpr,
              SCALE: gl.constexpr, CAP: gl.constexpr, FAST_TANH: gl.constexpr, MULTIPLIER: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
              SINKS: gl.constexpr, BITS: gl.constexpr, PATIENCE: gl.constexpr):
    """Attends with rows `64 W` to `64 W + 63` of every tile of queries."""
    BLOCK_Q: gl.constexpr = ROWS_EACH * CONSUMERS
    of_rows: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16]))
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    qs, ks, vs = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    dtype: gl.constexpr = qs.index(0).dtype
    BOUNDED: gl.constexpr = CAP > 0 and MULTIPLIER <= BOUND and not SINKS and dtype == gl.bfloat16
    if W == CONSUMERS - 1:
        _give_turn(0)
    # The first entry. Nothing is weighted under its softmax.
    t, lo, part, hi, away = _record(schedule_ptr, 0)
    mbarrier.wait(q_full.index(W), 0)
    mbarrier.wait(k_full.index(0), 0)
    qk = warpgroup_mma_wait(0, deps=[_scores(qs.index(W).reshape([ROWS_EACH, D]), ks, 0, BLOCK_K, D, NUM_STAGES)])
    mbarrier.arrive(k_empty.index(0), count=1)
    top, total = _begun(sinks_ptr, t, T, BLOCK_Q, SINKS, BOUNDED, of_rows)
    weights, alpha, top, total = _weights(
        qk, top, total, (t, lo, part, hi, away), lo, list_ptr, pattern_ptr, bits_ptr, T, S, offset, W, H, BLOCK_Q, BLOCK_K, SCALE, CAP, FAST_TANH, MULTIPLIER, LEFT,
        RIGHT, BITS, BOUNDED, PATIENCE)
    p = gl.convert_layout(weights.to(dtype), weights_layout)
    acc = gl.zeros([ROWS_EACH, V], gl.float32, layout)
    # The others: scores of entry `i` of tile `t`, the tile number `r` of the program, and values of the entry before it, which may be of the tile before.
    # What follows a tile is read with its first entry.
    before, i, at, r = t + 0, lo + 1, 1, 0
    is_first = False
    next_t, next_lo, next_part, next_hi, next_away = _record(schedule_ptr, 1)
    if i >= hi:
        is_first, r = True, 1
        t, lo, part, hi, away = next_t + 0, next_lo + 0, next_part + 0, next_hi + 0, next_away + 0
        i = lo + 0
    more = lo < lo  # whether the entry before is not the first of its tile
    while t >= 0:
        place = r % QUERY_PLACES * CONSUMERS + W
        ended_top, ended_total = top, total
        if is_first:
            next_t, next_lo, next_part, next_hi, next_away = _record(schedule_ptr, r + 1)
            top, total = _begun(sinks_ptr, t, T, BLOCK_Q, SINKS, BOUNDED, of_rows)
            mbarrier.arrive(q_empty.index((r + 1) % QUERY_PLACES * CONSUMERS + W), count=1)  # of the tile before
            mbarrier.wait(q_full.index(place), (r // QUERY_PLACES) & 1)
        mbarrier.wait(k_full.index(at % NUM_STAGES), (at // NUM_STAGES) & 1)
        _await_turn(W)
        qk = _scores(qs.index(place).reshape([ROWS_EACH, D]), ks, at, BLOCK_K, D, NUM_STAGES)
        acc = _weighted(p, vs, v_full, at - 1, acc, more, BLOCK_K, V, NUM_STAGES)
        _give_turn((W + 1) % CONSUMERS)
        qk = warpgroup_mma_wait(1, deps=[qk])
        mbarrier.arrive(k_empty.index(at % NUM_STAGES), count=1)
        weights, alpha, top, total = _weights(
            qk, top, total, (t, lo, part, hi, away), i, list_ptr, pattern_ptr, bits_ptr, T, S, offset, W, H, BLOCK_Q, BLOCK_K, SCALE, CAP, FAST_TANH, MULTIPLIER, LEFT,
            RIGHT, BITS, BOUNDED, PATIENCE)
        # Never so. NVIDIA's assembler would else move the wait to before the softmax, which runs under the product; it moves none across a branch that
        # changes the weights.
        if T < 0:
            weights = weights * 2.0
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index((at - 1) % NUM_STAGES), count=1)
        p = gl.convert_layout(weights.to(dtype), weights_layout)
        if is_first:
            _finish(acc, ended_top, ended_total, before, staging, out_desc, lse_ptr, T, W, H, V, BLOCK_Q, BOUNDED)
            before = t + 0
        # Of a new tile, what remains of the last one is not added to.
        if not BOUNDED:
            acc = _rescaled(acc, alpha, PATIENCE)
        more = i > lo
        at += 1
        i += 1
        is_first = i >= hi
        if is_first:
            t, lo, part, hi, away = next_t + 0, next_lo + 0, next_part + 0, next_hi + 0, next_away + 0
            i = lo + 0
            r += 1
    acc = warpgroup_mma_wait(0, deps=[_weighted(p, vs, v_full, at - 1, acc, more, BLOCK_K, V, NUM_STAGES)])
    mbarrier.arrive(v_empty.index((at - 1) % NUM_STAGES), count=1)
    _finish(acc, top, total, before, staging, out_desc, lse_ptr, T, W, H, V, BLOCK_Q, BOUNDED)
    tma.store_wait(0)


@gluon.jit
def _loader(buffers, barriers, q_desc, k_desc, v_desc, list_ptr, schedule_ptr, T, S, CONSUMERS: gl.constexpr, H: gl.constexpr, K: gl.constexpr,
            D: gl.constexpr, V: gl.constexpr, BLOCK_K: gl.constexpr, NUM_STAGES: gl.constexpr):
    """Loads keys, queries with the first entry of their tile, and values one entry later."""
    BLOCK_Q: gl.constexpr = ROWS_EACH * CONSUMERS
    qs, ks, vs = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    at = 0
    r = 0
    record = _record(schedule_ptr, 0)
    t, lo, hi = record[0], record[1], record[3]
    i = lo + 0
    n = _entry(list_ptr, i, lo, hi, S, BLOCK_K)
    last_b, last_g, last_n = t * 0, t * 0, t * 0  # of the entry before
    while t >= 0:
        following = _record(schedule_ptr, r + 1)
        over = i + 1 >= hi
        b, h, row = _place(t, T, H, BLOCK_Q)
        g = h // (H // K)
        next_lo = gl.where(over, following[1], lo)
        next_hi = gl.where(over, following[3], hi)
        next_i = gl.where(over, following[1], i + 1)
        upcoming = _entry(list_ptr, next_i, next_lo, next_hi, S, BLOCK_K)  # read ahead
        _load(k_desc, b, g, n * BLOCK_K, ks, k_full, k_empty, at, BLOCK_K, D, NUM_STAGES)
        if i == lo:
            for w in gl.static_range(CONSUMERS):
                place = r % QUERY_PLACES * CONSUMERS + w
                mbarrier.wait(q_empty.index(place), ((r // QUERY_PLACES) & 1) ^ 1)
                mbarrier.expect(q_full.index(place), ROWS_EACH * D * 2)
                tma.async_copy_global_to_shared(q_desc, [b, h, row + w * ROWS_EACH, 0], q_full.index(place), qs.index(place))
        if at > 0:
            _load(v_desc, last_b, last_g, last_n * BLOCK_K, vs, v_full, v_empty, at - 1, BLOCK_K, V, NUM_STAGES)
        last_b, last_g, last_n = b + 0, g + 0, n + 0
        at += 1
        r = gl.where(over, r + 1, r)
        i, n, lo, hi = next_i + 0, upcoming + 0, next_lo + 0, next_hi + 0
        t = gl.where(over, following[0], t)
    _load(v_desc, last_b, last_g, last_n * BLOCK_K, vs, v_full, v_empty, at - 1, BLOCK_K, V, NUM_STAGES)


@gluon.jit
def listed_forward_kernel(
    q_ptr, k_ptr, v_ptr, sinks_ptr,  # [B, T, H, D], [B, S, K, D], [B, S, K, V], [B, H]
    list_ptr, pattern_ptr, bits_ptr,  # as in `TileLists`
    schedule_ptr,  # [tiles of each program + 1, programs, 8], as in `_record`
    B, T, S, offset,
    out_ptr, lse_ptr,  # [B, T, H, V], [B, H, T]
    H: gl.constexpr, K: gl.constexpr, D: gl.constexpr, V: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_V: gl.constexpr,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, NUM_STAGES: gl.constexpr, SCALE: gl.constexpr, CAP: gl.constexpr,
    FAST_TANH: gl.constexpr, MULTIPLIER: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, SINKS: gl.constexpr, BITS: gl.constexpr,
    PATIENCE: gl.constexpr,
):
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    CONSUMERS: gl.constexpr = BLOCK_Q // ROWS_EACH
    q_desc = _described(q_ptr, B, T, H, D, ROWS_EACH, BLOCK_D)
    k_desc = _described(k_ptr, B, S, K, D, BLOCK_K, BLOCK_D)
    v_desc = _described(v_ptr, B, S, K, V, BLOCK_K, BLOCK_V)
    out_desc = _described(out_ptr, B, T, H, V, ROWS_EACH, BLOCK_V)
    buffers = (_tiles_of(dtype, QUERY_PLACES * CONSUMERS, ROWS_EACH, BLOCK_D), _tiles_of(dtype, NUM_STAGES, BLOCK_K, BLOCK_D),
               _tiles_of(dtype, NUM_STAGES, BLOCK_K, BLOCK_V))
    staging = _tiles_of(dtype, CONSUMERS, ROWS_EACH, BLOCK_V)
    q_full, q_empty = _barriers_of(QUERY_PLACES * CONSUMERS, 1)
    k_full, k_empty = _barriers_of(NUM_STAGES, CONSUMERS)
    v_full, v_empty = _barriers_of(NUM_STAGES, CONSUMERS)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    gl.warp_specialize([
        (_consumer, (buffers, staging, barriers, out_desc, lse_ptr, sinks_ptr, list_ptr, pattern_ptr, bits_ptr, schedule_ptr, T, S, offset, 0, CONSUMERS, H,
                     BLOCK_D, BLOCK_V, BLOCK_K, NUM_STAGES, SCALE, CAP, FAST_TANH, MULTIPLIER, LEFT, RIGHT, SINKS, BITS, PATIENCE)),
        (_consumer, (buffers, staging, barriers, out_desc, lse_ptr, sinks_ptr, list_ptr, pattern_ptr, bits_ptr, schedule_ptr, T, S, offset, 1, CONSUMERS, H,
                     BLOCK_D, BLOCK_V, BLOCK_K, NUM_STAGES, SCALE, CAP, FAST_TANH, MULTIPLIER, LEFT, RIGHT, SINKS, BITS, PATIENCE)),
        (_loader, (buffers, barriers, q_desc, k_desc, v_desc, list_ptr, schedule_ptr, T, S, CONSUMERS, H, K, BLOCK_D, BLOCK_V, BLOCK_K, NUM_STAGES)),
    ], [4, 1], [240, 24])
