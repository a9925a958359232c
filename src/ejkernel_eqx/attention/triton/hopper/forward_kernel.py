"""Hopper's forward kernel: a persistent kernel that goes from tile to tile of queries.

A program has one warp that loads and two or three groups of four warps, the consumers, each with 64 of a tile's queries. Products run
asynchronously: those of one tile of keys with the weights of the tile before, under the softmax of the tile itself; and the consumers
start theirs one after the other, by named barriers, so that one's softmax runs under another's products. Memory moves by tensor descriptors (TMA), which read 0
past the end of a head's rows and write nothing there."""

from collections import namedtuple

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
from ..tile import coarse_of, GATES, key_tiles, sums_of
from .scores import (
    _clear,
    _own_sum,
    _rescaled,
    _row_sum,
    _scored,
    _softmax,
    BOUND,
    Lengths,
    Masking,
    Queries,
    Scoring,
)
from .work_queue import (
    _arrive_named,
    _await_item,
    _await_named,
    _barriers_of,
    _claim,
    _claimed,
    _push,
    _queue_of,
    _uniform,
    _word,
    _zero,
    WorkQueue,
)

ROWS_EACH = gl.constexpr(64)
QUEUE_SLOTS = gl.constexpr(2)
"""The tile that consumers work on, and the next one."""
WORDS = gl.constexpr(6)
# An item of the queue: a tile of queries, its bounds as in `key_tiles`, and the kind of its keys as in `scores.SCATTERED`.
Work = namedtuple("Work", "t lo full_lo full_hi hi kind")
# Heads, channels as they are and padded, and tiles. R: channels of keys' second part, of which there is none if it is 0; SHARED: all heads have the same one.
# PARTS: tiles of values for each tile of queries and keys.
Sizes = namedtuple(
    "Sizes", "CONSUMERS H K D V R SHARED PARTS BLOCK_D BLOCK_V BLOCK_R BLOCK_Q BLOCK_K NUM_STAGES"
)
# The second parts of queries and keys are those of the first if there are none. Of keys they have barriers of their own where there is one stage: then
# either part is loaded while the other one is multiplied.
Buffers = namedtuple("Buffers", "q k v out q_rope k_rope")
Barriers = namedtuple("Barriers", "q_full q_empty k_full k_empty v_full v_empty")
# Of each tile of queries its bounds and its kind, of each program its tiles, and the counter that tiles are claimed from.
Tiles = namedtuple("Tiles", "bounds kinds schedule counter")
# The range of keys of each query, [B, T], segments of queries, and marks of keys, [B, S rounded up to whole tiles].
RowArrays = namedtuple("RowArrays", "first past segments marks")


# fmt: off
@gluon.constexpr_function
def _apart(sizes):
    """Whether parts of keys have their own barriers."""
    return sizes.R > 0 and sizes.NUM_STAGES == 1


@gluon.jit
def _key_tiles(tiles_ptr, b, m, offset, T, S, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
               TABLE: gl.constexpr):
    """Works as `key_tiles`, but at least one tile."""
    lo, full_lo, full_hi, hi = key_tiles(tiles_ptr, b, m, offset, T, S, BLOCK_Q, BLOCK_K, LEFT, RIGHT, TABLE, False)
    lo = gl.maximum(gl.minimum(lo, (S + BLOCK_K - 1) // BLOCK_K - 1), 0)
    return lo, full_lo, full_hi, gl.maximum(hi, lo + 1)


@gluon.jit
def _scores(q, ks, at, q_rope=None, k_ropes=None, k_full=None, R: gl.constexpr = 0, APART: gl.constexpr = False):
    """The product by the keys that were loaded as number `at`, `[64, BLOCK_K]`, that of their second parts with it; not awaited."""
    STAGES: gl.constexpr = ks.shape[0]
    BLOCK_K: gl.constexpr = ks.shape[3]
    zero = gl.zeros([ROWS_EACH, BLOCK_K], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16]))
    stage = at % STAGES if STAGES > 1 else _zero(at)
    k = ks.index(stage).reshape([BLOCK_K, ks.shape[4]]).permute((1, 0))  # [D, BLOCK_K]
    qk = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
    if R > 0:
        if APART:
            mbarrier.wait(k_full.index(1), at & 1)
        k_rope = k_ropes.index(stage).reshape([BLOCK_K, k_ropes.shape[4]]).permute((1, 0))  # [R, BLOCK_K]
        qk = warpgroup_mma(q_rope, k_rope, qk, is_async=True)
    return qk


@gluon.jit
def _weighted(p, vs, v_full, at, acc, use_acc=True):
    """Adds the product by the values that were loaded as number `at`, `[64, V]`; not awaited."""
    STAGES: gl.constexpr = vs.shape[0]
    mbarrier.wait(v_full.index(at % STAGES), (at // STAGES) & 1)
    return warpgroup_mma(p, vs.index(at % STAGES).reshape([vs.shape[3], vs.shape[4]]), acc, use_acc=use_acc, is_async=True)


@gluon.jit
def _receive(queue, r):
    """Item `r` of the queue, and its slot is free again for this consumer."""
    slot = _await_item(queue, r, WORDS)
    at = slot * WORDS
    t, lo, full_lo = _uniform(_word(queue, at, 4)), _uniform(_word(queue, at + 1, 4)), _uniform(_word(queue, at + 2, 4))
    full_hi, hi, kind = _uniform(_word(queue, at + 3, 4)), _uniform(_word(queue, at + 4, 4)), _uniform(_word(queue, at + 5, 4))
    mbarrier.arrive(queue.empty.index(slot), count=1)
    return Work(t, lo, full_lo, full_hi, hi, kind)


@gluon.jit
def _begun(sinks_ptr, bh, BLOCK_K: gl.constexpr, BOUNDED: gl.constexpr, SINKS: gl.constexpr):
    """Maximum `[64]` and denominator `[64, 4]` of 64 queries before their first keys. A sink is a key without a value."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    of_rows: gl.constexpr = gl.SliceLayout(1, layout)
    total = _own_sum(gl.zeros([ROWS_EACH, BLOCK_K], gl.float32, layout))
    top = gl.full([ROWS_EACH], 0.0 if BOUNDED else float("-inf"), gl.float32, of_rows)
    if SINKS:
        top = gl.full([ROWS_EACH], 0.0, gl.float32, of_rows) + gl.load(sinks_ptr + bh) * LOG2E
        total = total + 0.25
    return top, total


@gluon.jit
def _log_sums(top, total, BOUNDED: gl.constexpr):
    """Denominators, which rows saw a key, and lse = top + log(total), `[64]` each; 1 and minus infinity for a row that saw none."""
    total = _row_sum(total, top.type.layout)  # [64]
    some = (total != 0) if BOUNDED else (top > float("-inf"))  # [64]
    total = gl.where(some, total, 1.0)
    return total, some, gl.where(some, (top + gl.log2(total)) * LN2, float("-inf"))


@gluon.jit
def _store_out(acc, total, some, staging, out_desc, at):
    """out = acc / total, 0 for a row that saw no key. The copy is not awaited."""
    acc = acc * gl.expand_dims(gl.convert_layout(gl.where(some, 1.0 / total, 0.0), gl.SliceLayout(1, acc.type.layout)), 1)
    tma.store_wait(0)
    staging.reshape([ROWS_EACH, acc.shape[1]]).store(acc.to(staging.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, at, staging)


@gluon.jit
def _shared_memory(dtype: gl.constexpr, QUERY_TILES: gl.constexpr, IN_PLACE: gl.constexpr, sizes: gl.constexpr):
    """Shared memory for tiles, whose output may take the place of the queries, and their barriers."""
    CONSUMERS: gl.constexpr = sizes.CONSUMERS
    qs = _tiles_of(dtype, QUERY_TILES, ROWS_EACH, sizes.BLOCK_D)
    ks = _tiles_of(dtype, sizes.NUM_STAGES, sizes.BLOCK_K, sizes.BLOCK_D)
    vs = _tiles_of(dtype, sizes.NUM_STAGES, sizes.BLOCK_K, sizes.BLOCK_V)
    q_ropes, k_ropes = qs, ks
    if sizes.R > 0:
        q_ropes = _tiles_of(dtype, QUERY_TILES, ROWS_EACH, sizes.BLOCK_R)
        k_ropes = _tiles_of(dtype, sizes.NUM_STAGES, sizes.BLOCK_K, sizes.BLOCK_R)
    staging = qs
    if not IN_PLACE:
        staging = _tiles_of(dtype, CONSUMERS, ROWS_EACH, sizes.BLOCK_V)
    q_full, q_empty = _barriers_of(QUERY_TILES, 1)
    k_full, k_empty = _barriers_of(2 if _apart(sizes) else sizes.NUM_STAGES, CONSUMERS)
    v_full, v_empty = _barriers_of(sizes.NUM_STAGES, CONSUMERS)
    return Buffers(qs, ks, vs, staging, q_ropes, k_ropes), Barriers(q_full, q_empty, k_full, k_empty, v_full, v_empty)


@gluon.jit
def _key_gates(sums_ptr, first, coarse, S, BLOCK_K: gl.constexpr):
    """What gates take from the scores of the keys from `first` on: of each `[BLOCK_K]` and, for queries whose coarse sum is `coarse`, of all. Those past the
    end are any numbers of the same head."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    gates = gl.load(gl.multiple_of(sums_ptr + first + gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout)), [16]))  # [BLOCK_K]
    return gates, coarse_of(sums_ptr, S, first) - coarse


@gluon.jit
def _consumer(queue, buffers, barriers, outputs, sinks_ptr, slopes_ptr, tiles, row_arrays, lengths, W: gl.constexpr, sizes: gl.constexpr, scoring: gl.constexpr,
              masking: gl.constexpr, SINKS: gl.constexpr, IN_PLACE: gl.constexpr):
    """Attends with rows `64 W` to `64 W + 63` of every tile of queries."""
    CONSUMERS: gl.constexpr = sizes.CONSUMERS
    V: gl.constexpr = sizes.BLOCK_V
    BLOCK_Q: gl.constexpr = sizes.BLOCK_Q
    BLOCK_K: gl.constexpr = sizes.BLOCK_K
    NUM_STAGES: gl.constexpr = sizes.NUM_STAGES
    TABLE: gl.constexpr = masking.TABLE
    GUARD: gl.constexpr = masking.GUARD
    BOUNDED: gl.constexpr = scoring.BOUNDED
    # Where it was measured to be faster, or as fast: not with three consumers, without a mask, or at 256 channels.
    UNDER: gl.constexpr = CONSUMERS == 2 and GUARD and V < 256 and (V > 64 or TABLE or masking.LEFT >= 0 or scoring.CAP > 0)
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    of_rows: gl.constexpr = gl.SliceLayout(1, scores_layout)
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    ks, vs = buffers.k, buffers.v
    B, T, S, offset = lengths
    out_ptr, lse_ptr = outputs
    out_desc = _described(out_ptr, B, T, sizes.H, sizes.V, ROWS_EACH, V)
    q = buffers.q.index(W).reshape([ROWS_EACH, sizes.BLOCK_D])
    q_rope, k_ropes = q, buffers.k_rope
    if sizes.R > 0:
        q_rope = buffers.q_rope.index(W).reshape([ROWS_EACH, sizes.BLOCK_R])
    dtype: gl.constexpr = q.dtype
    APART: gl.constexpr = _apart(sizes)
    # The last consumer lets the first one start.
    if W == CONSUMERS - 1:
        _arrive_named(0)
    done = 0  # tiles of keys before this tile of queries
    r = 0
    if TABLE:
        t, lo, full_lo, full_hi, hi, kind = _receive(queue, r)
    else:
        t, kind = gl.load(tiles.schedule + gl.program_id(0)), 0
    while t >= 0:
        # Which queries, and what they see.
        count = (T + BLOCK_Q - 1) // BLOCK_Q
        m, part, bh = t % count, t // count % sizes.PARTS, t // count // sizes.PARTS
        b, h = bh // sizes.H, bh % sizes.H
        if not TABLE:
            upcoming = gl.load(tiles.schedule + (r + 1) * gl.num_programs(0) + gl.program_id(0))
            lo, full_lo, full_hi, hi = _key_tiles(tiles.bounds, b, m, offset, T, S, BLOCK_Q, BLOCK_K, masking.LEFT, masking.RIGHT, False)
        row = m * BLOCK_Q + W * ROWS_EACH
        rows = row + gl.arange(0, ROWS_EACH, of_rows)  # [64]
        first, past = rows, rows
        if TABLE:
            first = gl.load(row_arrays.first + b * T + rows, mask=rows < T, other=0)  # [64]
            past = gl.load(row_arrays.past + b * T + rows, mask=rows < T, other=0)  # [64]
        marks = row_arrays.marks + b * ((S + BLOCK_K - 1) // BLOCK_K * BLOCK_K)
        top, total = _begun(sinks_ptr, bh, BLOCK_K, BOUNDED, SINKS)
        if not scoring.GATES:
            far = 0.0
        else:
            sums_ptr, own_ptr = sums_of(slopes_ptr, gl.to_tensor(bh).to(gl.int64), lengths)
            coarse = coarse_of(own_ptr, T, m * BLOCK_Q)
            gates, far = _key_gates(sums_ptr, (hi - 1) * BLOCK_K, coarse, S, BLOCK_K)  # [BLOCK_K], []
            # Until they end, rows lack the rest of their own sums.
            if SINKS:
                top -= gl.load(own_ptr + rows, mask=rows < T, other=0.0)
        acc = gl.zeros([ROWS_EACH, V], gl.float32, layout)  # [64, BLOCK_V]
        # The last tile of keys, which may be partly hidden or past the end. (A sum that two loops or branches carry would be spilled or unpacked:
        # there is one loop, and what hides keys is a branch in it.)
        mbarrier.wait(q_full.index(W), r & 1)
        mbarrier.wait(k_full.index(done % NUM_STAGES), (done // NUM_STAGES) & 1)
        qk = warpgroup_mma_wait(0, deps=[_scores(q, ks, done, q_rope, k_ropes, k_full, sizes.R, APART)])  # [64, BLOCK_K]
        mbarrier.arrive(k_empty.index(done % NUM_STAGES), count=1)
        if APART:
            mbarrier.arrive(k_empty.index(1), count=1)
        queries = Queries(row, first, past, row_arrays.segments + b * T)
        s, unseen = _scored(qk, True, queries, (hi - 1) * BLOCK_K, kind, marks, lengths, scoring, masking)
        if scoring.GATES:
            s = s * (scoring.SCALE * LOG2E) - gl.expand_dims(gates, 0)
        p, alpha, top, total = _softmax(s, top, total, scoring, GUARD, far)
        if TABLE:
            if unseen:
                _clear(vs, v_full, done, marks + (hi - 1) * BLOCK_K)
        p = gl.convert_layout(p.to(dtype), weights_layout)
        # The others: scores of tile `n` and values of the one before it.
        for i in range(1, hi - lo):
            n = hi - 1 - i
            at = done + i
            if scoring.GATES:
                gates, far = _key_gates(sums_ptr, n * BLOCK_K, coarse, S, BLOCK_K)  # [BLOCK_K], []
            mbarrier.wait(k_full.index(at % NUM_STAGES), (at // NUM_STAGES) & 1)
            _await_named(W)
            qk = _scores(q, ks, at, q_rope, k_ropes, k_full, sizes.R, APART)
            acc = _weighted(p, vs, v_full, at - 1, acc)
            _arrive_named((W + 1) % CONSUMERS)
            if APART:  # the product by the first part has ended
                top = warpgroup_mma_wait(2, deps=[top])
                mbarrier.arrive(k_empty.index(0), count=1)
            qk = warpgroup_mma_wait(1, deps=[qk])
            mbarrier.arrive(k_empty.index(1 if APART else at % NUM_STAGES), count=1)
            partly = GUARD
            if GUARD:
                partly = (n >= full_hi) | (n < full_lo)
            s, unseen = _scored(qk, partly, queries, n * BLOCK_K, kind, marks, lengths, scoring, masking)
            if scoring.GATES:
                s = s * (scoring.SCALE * LOG2E) - gl.expand_dims(gates, 0)
            weights, alpha, top, total = _softmax(s, top, total, scoring, GUARD, far)
            if UNDER:
                # Never so. NVIDIA's assembler would else move the wait to before the softmax, which runs under the product; it moves none across a branch
                # that changes the weights.
                if T < 0:
                    weights = weights * 2.0
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_empty.index((at - 1) % NUM_STAGES), count=1)
            if TABLE:
                if unseen:
                    _clear(vs, v_full, at, marks + n * BLOCK_K)
            if not BOUNDED:
                acc = _rescaled(acc, alpha, scoring.RESCALE_THRESHOLD)
            p = gl.convert_layout(weights.to(dtype), weights_layout)
        if not IN_PLACE:
            mbarrier.arrive(q_empty.index(W), count=1)
        done += hi - lo
        # The last product runs while the next tile is received.
        acc = _weighted(p, vs, v_full, done - 1, acc)
        r += 1
        if TABLE:
            following = _receive(queue, r)
            upcoming = following.t
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index((done - 1) % NUM_STAGES), count=1)
        if scoring.GATES:
            top += gl.load(own_ptr + rows, mask=rows < T, other=0.0)
        total, some, lse = _log_sums(top, total, BOUNDED)
        gl.store(lse_ptr + gl.to_tensor(bh).to(gl.int64) * T + rows, lse, mask=rows < T)
        _store_out(acc, total, some, buffers.out.index(W), out_desc, [b, h, row, part * V])
        if IN_PLACE:
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(W), count=1)
        t = upcoming
        if TABLE:
            _, lo, full_lo, full_hi, hi, kind = following
    tma.store_wait(0)


@gluon.jit
def _loader(queue, buffers, barriers, operands, tiles, lengths, sizes: gl.constexpr, masking: gl.constexpr):
    """Loads the queries of every tile, and keys and values as far ahead as there are stages; across tiles of queries, too."""
    H: gl.constexpr = sizes.H
    BLOCK_Q: gl.constexpr = sizes.BLOCK_Q
    BLOCK_K: gl.constexpr = sizes.BLOCK_K
    TABLE: gl.constexpr = masking.TABLE
    qs, vs = buffers.q, buffers.v
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    q_ptr, k_ptr, k_rope_ptr, v_ptr = operands
    B, T, S, offset = lengths
    k_desc = _described(k_ptr, B, S, sizes.K, sizes.D, BLOCK_K, sizes.BLOCK_D, 0 if sizes.SHARED else sizes.R)
    q_desc = _described(q_ptr, B, T, H, sizes.D, ROWS_EACH, sizes.BLOCK_D, sizes.R)
    v_desc = _described(v_ptr, B, S, sizes.K, sizes.V, BLOCK_K, sizes.BLOCK_V)
    q_rope_desc, k_rope_desc = q_desc, k_desc
    if sizes.R > 0:
        q_rope_desc = _described(q_ptr + sizes.D, B, T, H, sizes.R, ROWS_EACH, sizes.BLOCK_R, sizes.D)
        if sizes.SHARED:
            k_rope_desc = _described(k_rope_ptr, B, S, 1, sizes.R, BLOCK_K, sizes.BLOCK_R)
        else:
            k_rope_desc = _described(k_ptr + sizes.D, B, S, sizes.K, sizes.R, BLOCK_K, sizes.BLOCK_R, sizes.D)
    k_descs = (k_desc, k_rope_desc)
    done = 0  # tiles of keys before this tile of queries
    r = 0
    if TABLE:
        t = _tile_number(gl.program_id(0), T, B * H * sizes.PARTS, BLOCK_Q)
        following = _bounds(t, tiles, lengths, sizes)
        lo, hi = following.lo, following.hi
        _push(queue, 0, following, WORDS)
    else:
        t = gl.load(tiles.schedule + gl.program_id(0))
    while t >= 0:
        if not TABLE:
            upcoming = gl.load(tiles.schedule + (r + 1) * gl.num_programs(0) + gl.program_id(0))
        count = (T + BLOCK_Q - 1) // BLOCK_Q
        m, part, bh = t % count, t // count % sizes.PARTS, t // count // sizes.PARTS
        b, h = bh // H, bh % H
        g = h // (H // sizes.K)
        if not TABLE:
            lo, _, _, hi = _key_tiles(tiles.bounds, b, m, offset, T, S, BLOCK_Q, BLOCK_K, masking.LEFT, masking.RIGHT, False)
        # The first keys and the queries, which the first product needs.
        _load_keys(k_descs, b, g, (hi - 1) * BLOCK_K, buffers, k_full, k_empty, done, sizes)
        for w in gl.static_range(sizes.CONSUMERS):
            mbarrier.wait(q_empty.index(w), (r & 1) ^ 1)
            mbarrier.expect(q_full.index(w), ROWS_EACH * (sizes.BLOCK_D + sizes.BLOCK_R) * 2)
            tma.async_copy_global_to_shared(q_desc, [b, h, m * BLOCK_Q + w * ROWS_EACH, 0], q_full.index(w), qs.index(w))
            if sizes.R > 0:
                tma.async_copy_global_to_shared(q_rope_desc, [b, h, m * BLOCK_Q + w * ROWS_EACH, 0], q_full.index(w), buffers.q_rope.index(w))
        if TABLE:
            number = _claim(tiles.counter)
        # Keys a tile ahead of values.
        for i in range(1, hi - lo):
            _load_keys(k_descs, b, g, (hi - 1 - i) * BLOCK_K, buffers, k_full, k_empty, done + i, sizes)
            _load(v_desc, b, g, (hi - i) * BLOCK_K, vs, v_full, v_empty, done + i - 1, part * sizes.BLOCK_V)
        done += hi - lo
        r += 1
        if TABLE:  # while all but the last values are on their way
            upcoming = _tile_number(gl.num_programs(0) + _claimed(number), T, B * H * sizes.PARTS, BLOCK_Q)
            following = _bounds(upcoming, tiles, lengths, sizes)
            _push(queue, r, following, WORDS)
        _load(v_desc, b, g, lo * BLOCK_K, vs, v_full, v_empty, done - 1, part * sizes.BLOCK_V)
        t = upcoming
        if TABLE:
            lo, hi = following.lo, following.hi


@gluon.jit
def _tile_number(i, T, rows, BLOCK_Q: gl.constexpr):
    """Tile number `i` of those that programs claim, -1 behind the last one: the last queries of all rows of batch, heads and parts of values first."""
    tiles = (T + BLOCK_Q - 1) // BLOCK_Q
    return gl.where(i < tiles * rows, i % rows * tiles + (tiles - 1 - i // rows), -1)


@gluon.jit
def _bounds(t, tiles, lengths, sizes: gl.constexpr):
    """The item of the queue for tile `t`, with bounds from the table; of any tile if `t` is -1."""
    _, T, S, _ = lengths
    count = (T + sizes.BLOCK_Q - 1) // sizes.BLOCK_Q
    any_t = gl.maximum(t, 0)
    b, m = any_t // count // (sizes.H * sizes.PARTS), any_t % count
    lo, full_lo, full_hi, hi = _key_tiles(tiles.bounds, b, m, 0, T, S, sizes.BLOCK_Q, sizes.BLOCK_K, -1, -1, True)
    return Work(t, lo, full_lo, full_hi, hi, gl.load(tiles.kinds + b * count + m))


@gluon.jit
def _load(desc, b, head, row, buffer, full, empty, at, column=0, MORE: gl.constexpr = 0):
    """A tile of keys or values as number `at`; so many bytes come with it."""
    STAGES: gl.constexpr = buffer.shape[0]
    s = at % STAGES
    mbarrier.wait(empty.index(s), ((at // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(s), buffer.shape[3] * buffer.shape[4] * 2 + MORE)
    tma.async_copy_global_to_shared(desc, [b, head, row, column], full.index(s), buffer.index(s))


@gluon.jit
def _load_keys(descs, b, head, row, buffers, full, empty, at, sizes: gl.constexpr):
    """A tile of keys as number `at`, with its second part."""
    APART: gl.constexpr = _apart(sizes)
    _load(descs[0], b, head, row, buffers.k, full, empty, at, 0, 0 if APART else sizes.BLOCK_K * sizes.BLOCK_R * 2)
    if APART:
        mbarrier.wait(empty.index(1), (at & 1) ^ 1)
        mbarrier.expect(full.index(1), sizes.BLOCK_K * sizes.BLOCK_R * 2)
        tma.async_copy_global_to_shared(descs[1], [b, 0 if sizes.SHARED else head, row, 0], full.index(1), buffers.k_rope.index(0))
    elif sizes.R > 0:
        s = at % sizes.NUM_STAGES
        tma.async_copy_global_to_shared(descs[1], [b, 0 if sizes.SHARED else head, row, 0], full.index(s), buffers.k_rope.index(s))


@gluon.jit
def _described(ptr, B, length, HEADS: gl.constexpr, WIDTH: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, OTHER: gl.constexpr = 0):
    """A descriptor of `[B, length, HEADS, WIDTH]`, with so many other channels between heads, and with boxes of rows of one head."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, ROWS, COLUMNS], ptr.dtype.element_ty)
    head: gl.constexpr = WIDTH + OTHER
    row: gl.constexpr = HEADS * head
    return tma.make_tensor_descriptor(ptr, [B, HEADS, length, WIDTH], [gl.to_tensor(length).to(gl.int64) * row, head, row, 1], [1, 1, ROWS, COLUMNS], layout)


@gluon.jit
def _tiles_of(dtype: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, ROWS, COLUMNS], dtype)
    return gl.allocate_shared_memory(dtype, [COUNT, 1, 1, ROWS, COLUMNS], layout)


@gluon.jit
def hopper_forward_kernel(
    q_ptr, k_ptr, k_rope_ptr, v_ptr, sinks_ptr, slopes_ptr,  # [B, T, H, D + R], [B, S, K, D], [B, S, R], [B, S, K, V], [B, H], of gates as in `HeadArrays`
    q_segments_ptr, marks_ptr, first_ptr, past_ptr,  # [B, T] and, of keys, [B, S rounded up to whole tiles]
    tiles_ptr, kinds_ptr, schedule_ptr, no_claims_ptr,  # [B, tiles, 4], [B, tiles], [tiles of each program + 1, programs], as claims
    B, T, S, offset,
    claims_ptr, out_ptr, lse_ptr,  # 0 [1], [B, T, H, V], [B, H, T]
    H: gl.constexpr, K: gl.constexpr, D: gl.constexpr, V: gl.constexpr, R: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_V: gl.constexpr,
    BLOCK_R: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, NUM_STAGES: gl.constexpr, SCALE: gl.constexpr, CAP: gl.constexpr,
    FAST_TANH: gl.constexpr, MULTIPLIER: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, SINKS: gl.constexpr,
    ALIBI: gl.constexpr,
    ROWS: gl.constexpr, SEGMENTS: gl.constexpr, EVEN_K: gl.constexpr, GUARD: gl.constexpr, IN_PLACE: gl.constexpr,
    RESCALE_THRESHOLD: gl.constexpr, SHARED: gl.constexpr, PARTS: gl.constexpr,
):
    # As `forward_kernel`. `GUARD`: whether any tile of keys is partly hidden, except for keys past the end. Which tiles of keys are seen may be known on
    # the device only, in `tiles_ptr`: then programs have no schedule, and claim the next tile when they have loaded one. Descriptors are made by who uses
    # them, side by side: each takes most of a microsecond.
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    CONSUMERS: gl.constexpr = BLOCK_Q // ROWS_EACH
    BOUNDED: gl.constexpr = CAP > 0 and MULTIPLIER <= BOUND and not SINKS and dtype == gl.bfloat16
    sizes: gl.constexpr = Sizes(CONSUMERS, H, K, D, V, R, SHARED, PARTS, BLOCK_D, BLOCK_V, BLOCK_R, BLOCK_Q, BLOCK_K, NUM_STAGES)
    scoring: gl.constexpr = Scoring(SCALE, CAP, FAST_TANH, MULTIPLIER, BOUNDED, RESCALE_THRESHOLD, ALIBI == GATES)
    masking: gl.constexpr = Masking(LEFT, RIGHT, ROWS, SEGMENTS, ROWS or SEGMENTS, EVEN_K, GUARD)
    buffers, barriers = _shared_memory(dtype, CONSUMERS, IN_PLACE, sizes)
    queue = WorkQueue(barriers.q_full, barriers.q_full, barriers.q_empty)  # not used
    if ROWS or SEGMENTS:
        queue = _queue_of(QUEUE_SLOTS, WORDS, CONSUMERS)
    lengths = Lengths(B, T, S, offset)
    operands = (q_ptr, k_ptr, k_rope_ptr, v_ptr)
    outputs = (out_ptr, lse_ptr)
    tiles = Tiles(tiles_ptr, kinds_ptr, schedule_ptr, claims_ptr)
    row_arrays = RowArrays(first_ptr, past_ptr, q_segments_ptr, marks_ptr)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consumer, (queue, buffers, barriers, outputs, sinks_ptr, slopes_ptr, tiles, row_arrays, lengths, 0, sizes, scoring, masking, SINKS, IN_PLACE)),
            (_consumer, (queue, buffers, barriers, outputs, sinks_ptr, slopes_ptr, tiles, row_arrays, lengths, 1, sizes, scoring, masking, SINKS, IN_PLACE)),
            (_loader, (queue, buffers, barriers, operands, tiles, lengths, sizes, masking)),
        ], [4, 1], [240, 24])
    else:
        gl.warp_specialize([
            (_consumer, (queue, buffers, barriers, outputs, sinks_ptr, slopes_ptr, tiles, row_arrays, lengths, 0, sizes, scoring, masking, SINKS, IN_PLACE)),
            (_consumer, (queue, buffers, barriers, outputs, sinks_ptr, slopes_ptr, tiles, row_arrays, lengths, 1, sizes, scoring, masking, SINKS, IN_PLACE)),
            (_consumer, (queue, buffers, barriers, outputs, sinks_ptr, slopes_ptr, tiles, row_arrays, lengths, 2, sizes, scoring, masking, SINKS, IN_PLACE)),
            (_loader, (queue, buffers, barriers, operands, tiles, lengths, sizes, masking)),
        ], [4, 4, 1], [160, 160, 24])
