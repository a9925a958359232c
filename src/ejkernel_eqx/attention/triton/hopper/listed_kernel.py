"""Hopper's forward kernel over lists of tiles: as `forward_kernel`, but programs go from entry to entry, not from tile to tile of queries.

A list may have few entries, so that what happens before and after its loop would cost as much as the entries. Here one loop runs over the
entries of all tiles of queries of a program: the last product of a tile runs under the first softmax of the next one, whose queries have a place of
their own, and a tile is stored while the other consumers multiply."""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from .forward_kernel import (
    _begun,
    _described,
    _load,
    _log_sums,
    _scores,
    _shared_memory,
    _store_out,
    _weighted,
    ROWS_EACH,
    Sizes,
)
from .scores import _capped, _rescaled, _softmax, BOUND, Lengths, Masking, Scoring
from .work_queue import _arrive_named, _await_named

QUERY_SLOTS = gl.constexpr(2)
"""Tiles of queries in shared memory: while the entries of one run, the next one is loaded."""
# A tile of queries of this program: its number, or -1 behind the last one; where its list begins, its partly visible entries begin, and it ends; and how far
# patterns are from entries.
Record = namedtuple("Record", "t lo partly hi patterns")
# Pointers to entries, patterns and bits as in `TileLists`, and to the schedule.
Lists = namedtuple("Lists", "entries patterns bits schedule")


# fmt: off
@gluon.jit
def _record(schedule_ptr, r):
    """Tile `r` of this program."""
    record = schedule_ptr + (r * gl.num_programs(0) + gl.program_id(0)) * 8
    return Record(gl.load(record), gl.load(record + 1), gl.load(record + 2), gl.load(record + 3), gl.load(record + 4))


@gluon.jit
def _copied(record):
    """Copies of the numbers, which a loop may carry beside those of `record`."""
    return Record(record.t + 0, record.lo + 0, record.partly + 0, record.hi + 0, record.patterns + 0)


@gluon.jit
def _entry(list_ptr, i, lo, hi, S, BLOCK_K: gl.constexpr):
    """The tile of keys of an entry; of an empty list the one past the end, which is read as zeros and hidden."""
    n = gl.load(list_ptr + i).to(gl.int32)
    return gl.where(hi > lo, n, (S + BLOCK_K - 1) // BLOCK_K)


@gluon.jit
def _origin(t, T, sizes: gl.constexpr):
    """Batch row, head and first query of a tile."""
    count = (T + sizes.BLOCK_Q - 1) // sizes.BLOCK_Q
    m, bh = t % count, t // count
    return bh // sizes.H, bh % sizes.H, m * sizes.BLOCK_Q


@gluon.jit
def _visible(s, row, W: gl.constexpr, first, pattern, bits_ptr, lengths, sizes: gl.constexpr, masking: gl.constexpr, BITS: gl.constexpr, HIDDEN: gl.constexpr):
    """Scores or weights `[64, BLOCK_K]` of the queries from `row` and the keys from `first` on, `HIDDEN` where hidden."""
    layout: gl.constexpr = s.type.layout
    each = gl.arange(0, s.shape[0], gl.SliceLayout(1, layout))  # [64]
    column = gl.expand_dims(gl.arange(0, s.shape[1], gl.SliceLayout(0, layout)), 0)  # [1, BLOCK_K]
    i, j = gl.expand_dims(row + each, 1), first + column  # [64, 1], [1, BLOCK_K]
    s = gl.where(j < lengths.S, s, HIDDEN)
    if masking.RIGHT >= 0:
        s = gl.where(j <= i + (lengths.offset + masking.RIGHT), s, HIDDEN)
    if masking.LEFT >= 0:
        s = gl.where(j >= i + (lengths.offset - masking.LEFT), s, HIDDEN)
    if BITS > 0:  # words of each row, as in `load_bits`
        words = bits_ptr + gl.to_tensor(pattern).to(gl.int64) * (sizes.BLOCK_Q * BITS) + (W * ROWS_EACH + each) * BITS  # [64]
        word = gl.expand_dims(gl.load(words), 1)  # [64, 1]
        for n in gl.static_range(1, BITS):
            word = gl.where(column < n * 32, word, gl.expand_dims(gl.load(words + n), 1))  # [64, BLOCK_K]
        s = gl.where(((word >> (column % 32)) & 1) != 0, s, HIDDEN)
    return s


@gluon.jit
def _weights(qk, top, total, record, i, lists, lengths, W: gl.constexpr, sizes: gl.constexpr, scoring: gl.constexpr, masking: gl.constexpr, BITS: gl.constexpr):
    """`_softmax` of entry `i` of a tile."""
    row, first, pattern = 0, 0, i
    # Of a partly visible entry, which queries and keys it has, and its pattern.
    if i >= record.partly:
        row = _origin(record.t, lengths.T, sizes)[2] + W * ROWS_EACH
        if BITS > 0:
            pattern = gl.load(lists.patterns + record.patterns + i)
        first = _entry(lists.entries, i, record.lo, record.hi, lengths.S, sizes.BLOCK_K) * sizes.BLOCK_K
        if scoring.CAP > 0:  # as in `scores._scored`
            qk = _visible(qk, row, W, first, pattern, lists.bits, lengths, sizes, masking, BITS, 0.0)
    s = _capped(qk, scoring, sizes.BLOCK_K // 2)
    if i >= record.partly:
        s = _visible(s, row, W, first, pattern, lists.bits, lengths, sizes, masking, BITS, 0.0 if scoring.BOUNDED else float("-inf"))
    return _softmax(s, top, total, scoring, True)


@gluon.jit
def _begun_tile(sinks_ptr, t, T, sizes: gl.constexpr, BOUNDED: gl.constexpr, SINKS: gl.constexpr):
    """`_begun` of a tile before its first entry."""
    return _begun(sinks_ptr, t // ((T + sizes.BLOCK_Q - 1) // sizes.BLOCK_Q), sizes.BLOCK_K, BOUNDED, SINKS)


@gluon.jit
def _finish(acc, top, total, t, staging, out_desc, lse_ptr, T, W: gl.constexpr, sizes: gl.constexpr, BOUNDED: gl.constexpr):
    b, h, row = _origin(t, T, sizes)
    row += W * ROWS_EACH
    rows = row + gl.arange(0, ROWS_EACH, top.type.layout)  # [64]
    total, some, lse = _log_sums(top, total, BOUNDED)
    gl.store(lse_ptr + gl.to_tensor(b * sizes.H + h).to(gl.int64) * T + rows, lse, mask=rows < T)
    _store_out(acc, total, some, staging.index(W), out_desc, [b, h, row, 0])


@gluon.jit
def _consumer(buffers, barriers, out_desc, lse_ptr, sinks_ptr, lists, lengths, W: gl.constexpr, sizes: gl.constexpr, scoring: gl.constexpr,
              masking: gl.constexpr, SINKS: gl.constexpr, BITS: gl.constexpr):
    """Attends with rows `64 W` to `64 W + 63` of every tile of queries."""
    CONSUMERS: gl.constexpr = sizes.CONSUMERS
    NUM_STAGES: gl.constexpr = sizes.NUM_STAGES
    D: gl.constexpr = sizes.BLOCK_D
    BOUNDED: gl.constexpr = scoring.BOUNDED
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes.BLOCK_V, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    qs, ks, vs, staging, _q_ropes, _k_ropes = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    T = lengths.T
    dtype: gl.constexpr = qs.index(0).dtype
    # The last consumer lets the first one start.
    if W == CONSUMERS - 1:
        _arrive_named(0)
    # The first entry. Nothing is weighted under its softmax.
    record = _record(lists.schedule, 0)
    mbarrier.wait(q_full.index(W), 0)
    mbarrier.wait(k_full.index(0), 0)
    qk = warpgroup_mma_wait(0, deps=[_scores(qs.index(W).reshape([ROWS_EACH, D]), ks, 0)])
    mbarrier.arrive(k_empty.index(0), count=1)
    top, total = _begun_tile(sinks_ptr, record.t, T, sizes, BOUNDED, SINKS)
    weights, alpha, top, total = _weights(qk, top, total, record, record.lo, lists, lengths, W, sizes, scoring, masking, BITS)
    p = gl.convert_layout(weights.to(dtype), weights_layout)
    acc = gl.zeros([ROWS_EACH, sizes.BLOCK_V], gl.float32, layout)  # [64, BLOCK_V]
    # The others: scores of entry `i` of tile `t`, the tile number `r` of the program, and values of the entry before it, which may be of the tile before.
    # What follows a tile is read with its first entry.
    before, i, at, r = record.t + 0, record.lo + 1, 1, 0
    is_first = False
    following = _record(lists.schedule, 1)
    if i >= record.hi:
        is_first, r = True, 1
        record = _copied(following)
        i = record.lo + 0
    more = record.lo < record.lo  # whether the entry before is not the first of its tile
    while record.t >= 0:
        slot = r % QUERY_SLOTS * CONSUMERS + W
        ended_top, ended_total = top, total
        if is_first:
            following = _record(lists.schedule, r + 1)
            top, total = _begun_tile(sinks_ptr, record.t, T, sizes, BOUNDED, SINKS)
            mbarrier.arrive(q_empty.index((r + 1) % QUERY_SLOTS * CONSUMERS + W), count=1)  # of the tile before
            mbarrier.wait(q_full.index(slot), (r // QUERY_SLOTS) & 1)
        mbarrier.wait(k_full.index(at % NUM_STAGES), (at // NUM_STAGES) & 1)
        _await_named(W)
        qk = _scores(qs.index(slot).reshape([ROWS_EACH, D]), ks, at)
        acc = _weighted(p, vs, v_full, at - 1, acc, more)
        _arrive_named((W + 1) % CONSUMERS)
        qk = warpgroup_mma_wait(1, deps=[qk])  # [64, BLOCK_K]
        mbarrier.arrive(k_empty.index(at % NUM_STAGES), count=1)
        weights, alpha, top, total = _weights(qk, top, total, record, i, lists, lengths, W, sizes, scoring, masking, BITS)
        # Never so. NVIDIA's assembler would else move the wait to before the softmax, which runs under the product; it moves none across a branch that
        # changes the weights.
        if T < 0:
            weights = weights * 2.0
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index((at - 1) % NUM_STAGES), count=1)
        p = gl.convert_layout(weights.to(dtype), weights_layout)
        if is_first:
            _finish(acc, ended_top, ended_total, before, staging, out_desc, lse_ptr, T, W, sizes, BOUNDED)
            before = record.t + 0
        # Of a new tile, what remains of the last one is not added to.
        if not BOUNDED:
            acc = _rescaled(acc, alpha, scoring.RESCALE_THRESHOLD)
        more = i > record.lo
        at += 1
        i += 1
        is_first = i >= record.hi
        if is_first:
            record = _copied(following)
            i = record.lo + 0
            r += 1
    # The last product of the program.
    acc = warpgroup_mma_wait(0, deps=[_weighted(p, vs, v_full, at - 1, acc, more)])
    mbarrier.arrive(v_empty.index((at - 1) % NUM_STAGES), count=1)
    _finish(acc, top, total, before, staging, out_desc, lse_ptr, T, W, sizes, BOUNDED)
    tma.store_wait(0)


@gluon.jit
def _loader(buffers, barriers, descs, lists, lengths, sizes: gl.constexpr):
    """Loads keys, queries with the first entry of their tile, and values one entry later."""
    BLOCK_K: gl.constexpr = sizes.BLOCK_K
    qs, ks, vs = buffers.q, buffers.k, buffers.v
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    q_desc, k_desc, v_desc = descs
    at = 0
    r = 0
    record = _record(lists.schedule, 0)
    t, lo, hi = record.t, record.lo, record.hi
    i = lo + 0
    n = _entry(lists.entries, i, lo, hi, lengths.S, BLOCK_K)
    last_b, last_g, last_n = t * 0, t * 0, t * 0  # of the entry before
    while t >= 0:
        # The entry after this one is read ahead.
        following = _record(lists.schedule, r + 1)
        over = i + 1 >= hi
        b, h, row = _origin(t, lengths.T, sizes)
        g = h // (sizes.H // sizes.K)
        next_lo = gl.where(over, following.lo, lo)
        next_hi = gl.where(over, following.hi, hi)
        next_i = gl.where(over, following.lo, i + 1)
        upcoming = _entry(lists.entries, next_i, next_lo, next_hi, lengths.S, BLOCK_K)
        _load(k_desc, b, g, n * BLOCK_K, ks, k_full, k_empty, at)
        if i == lo:
            for w in gl.static_range(sizes.CONSUMERS):
                slot = r % QUERY_SLOTS * sizes.CONSUMERS + w
                mbarrier.wait(q_empty.index(slot), ((r // QUERY_SLOTS) & 1) ^ 1)
                mbarrier.expect(q_full.index(slot), ROWS_EACH * sizes.BLOCK_D * 2)
                tma.async_copy_global_to_shared(q_desc, [b, h, row + w * ROWS_EACH, 0], q_full.index(slot), qs.index(slot))
        if at > 0:
            _load(v_desc, last_b, last_g, last_n * BLOCK_K, vs, v_full, v_empty, at - 1)
        last_b, last_g, last_n = b + 0, g + 0, n + 0
        at += 1
        r = gl.where(over, r + 1, r)
        i, n, lo, hi = next_i + 0, upcoming + 0, next_lo + 0, next_hi + 0
        t = gl.where(over, following.t, t)
    _load(v_desc, last_b, last_g, last_n * BLOCK_K, vs, v_full, v_empty, at - 1)


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
    RESCALE_THRESHOLD: gl.constexpr,
):
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    CONSUMERS: gl.constexpr = BLOCK_Q // ROWS_EACH
    BOUNDED: gl.constexpr = CAP > 0 and MULTIPLIER <= BOUND and not SINKS and dtype == gl.bfloat16
    sizes: gl.constexpr = Sizes(CONSUMERS, H, K, D, V, 0, True, 1, BLOCK_D, BLOCK_V, 0, BLOCK_Q, BLOCK_K, NUM_STAGES)
    scoring: gl.constexpr = Scoring(SCALE, CAP, FAST_TANH, MULTIPLIER, BOUNDED, RESCALE_THRESHOLD)
    masking: gl.constexpr = Masking(LEFT, RIGHT, False, False, False, False, True)
    q_desc = _described(q_ptr, B, T, H, D, ROWS_EACH, BLOCK_D)
    k_desc = _described(k_ptr, B, S, K, D, BLOCK_K, BLOCK_D)
    v_desc = _described(v_ptr, B, S, K, V, BLOCK_K, BLOCK_V)
    out_desc = _described(out_ptr, B, T, H, V, ROWS_EACH, BLOCK_V)
    buffers, barriers = _shared_memory(dtype, QUERY_SLOTS * CONSUMERS, False, sizes)
    lists = Lists(list_ptr, pattern_ptr, bits_ptr, schedule_ptr)
    lengths = Lengths(B, T, S, offset)
    descs = (q_desc, k_desc, v_desc)
    gl.warp_specialize([
        (_consumer, (buffers, barriers, out_desc, lse_ptr, sinks_ptr, lists, lengths, 0, sizes, scoring, masking, SINKS, BITS)),
        (_consumer, (buffers, barriers, out_desc, lse_ptr, sinks_ptr, lists, lengths, 1, sizes, scoring, masking, SINKS, BITS)),
        (_loader, (buffers, barriers, descs, lists, lengths, sizes)),
    ], [4, 1], [240, 24])
