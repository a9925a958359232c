"""Parts of all of Hopper's backward kernels: how programs come by tiles of keys, how these are loaded, and how `dq` is summed.

The kernels are persistent, so that what they begin with is paid for once: a program takes the next tile of keys when it is free. The producer warp
claims it and tells the others through a work queue. Tiles are claimed in one order, and a tile waits only for those before it, which others are at work
on: it does not matter how many programs run at a time.

The sum `dq` has one order, kept by a semaphore for each of its tiles: a tile of keys adds to a tile of queries after all tiles before it. All of them take
the last queries first, of which causal masks let every key be seen, and all heads of a group for one tile of queries: a tile that is
claimed with the one before it is behind by one addition, never by a tile."""

from collections import namedtuple

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ....launch.constants import LOG2E
from ..tile import coarse_of, query_tiles, sums_of
from .forward_kernel import _described, _tiles_of
from .scores import _capped, _log2, LEAST
from .work_queue import (
    _await_item,
    _await_semaphore,
    _claim,
    _claimed,
    _push,
    _release_semaphore,
    _sync_consumers,
    _word,
)

CONSUMERS = gl.constexpr(2)
HALF_ROPE = gl.constexpr(32)
"""Channels of a box of keys' second part."""
# Heads, padded channels and tiles; R: channels of keys' second part, 0 without one; SHARED: all heads have the same; HEAD: channels of both. DQ_...: boxes of a tile of `dq`, their columns, and how many boxes shared memory holds; KEY_SLOTS: tiles of keys there.
Sizes = namedtuple("Sizes", "H K D R SHARED HEAD BLOCK_Q BLOCK_K NUM_STAGES GROUP DQ_BOXES DQ_COLUMNS DQ_SLOTS KEY_SLOTS WRITERS")  # fmt: skip
# Shared memory for what is loaded, and its barriers. Second parts are the first ones if there are none.
Buffers = namedtuple("Buffers", "k v q do lse delta k_rope q_rope")
Barriers = namedtuple("Barriers", "kv_full kv_empty q_full q_empty do_full do_empty")
# Boxes of `dq` in shared memory, on their way from a consumer to a writer; beside each the sums of the scores' gradients of four warps, if gates need them.
DqBuffers = namedtuple("DqBuffers", "boxes ropes full empty sums")
Descs = namedtuple("Descs", "q k v do lse delta q_rope k_rope")
# Segments, and the first key and the one behind the last of each query.
RowArrays = namedtuple("RowArrays", "q_segments kv_segments start end")
# Bounds of tiles of keys, how many tiles come before one at each tile of queries, the counter of claims, and the semaphores.
Tiles = namedtuple("Tiles", "bounds order counter semaphores")
# Pointers: sums of gates as in `tile.HeadArrays`; of the scores' gradients over each key's queries [B, H, S], and over tiles of queries [B, H, tiles].
Gates = namedtuple("Gates", "sums by_key by_tile")
# A tile of keys, its row and key head, and the tiles of queries that see it, as in `query_tiles`.
KeyTile = namedtuple("KeyTile", "n b g lo full_lo full_hi hi")


# fmt: off
@_core.builtin
def _add(desc, at, tile, _semantic=None):
    """Adds a tile in shared memory to device memory; not awaited. Gluon of Triton 3.7 has the operation, but no name for it."""
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, _semantic._convert_to_ir_values(at, require_i64=False),
                                              tile.handle)


@gluon.jit
def _next_tile(queue, r, WARPS: gl.constexpr):
    """The program's tile number `r`, -1 behind the last one. Only writers, of one warp, say that they have read it; consumers have before they give back the
    keys of the tile."""
    slot = _await_item(queue, r, 1)
    t = _word(queue, slot, WARPS)
    if WARPS == 1:
        mbarrier.arrive(queue.empty.index(slot), count=1)
    return t


@gluon.jit
def _key_tile(t, tiles, lengths, sizes: gl.constexpr, masking: gl.constexpr):
    """Tile `t` of keys and what sees it. Rows run in groups, in which all first tiles come first."""
    B, T, S, offset = lengths
    count = (S + sizes.BLOCK_K - 1) // sizes.BLOCK_K
    group = t // (count * sizes.GROUP)
    index = t % (count * sizes.GROUP)
    size = gl.minimum(B * sizes.K - group * sizes.GROUP, sizes.GROUP)  # the last group may have fewer rows
    n, bg = index // size, group * sizes.GROUP + index % size
    b, g = bg // sizes.K, bg % sizes.K
    lo, full_lo, full_hi, hi = query_tiles(tiles.bounds, b, n, offset, T, S, sizes.BLOCK_Q, sizes.BLOCK_K, masking.LEFT, masking.RIGHT, masking.TABLE, False)
    return KeyTile(n, b, g, lo, full_lo, full_hi, hi)


@gluon.jit
def _step(e, hi, G: gl.constexpr):
    """Head of the group and tile of queries of step `e` of a tile of keys."""
    return e % G, hi - 1 - e // G


@gluon.jit
def _hidden(s, first_key, first_query, b, lengths, arrays, masking: gl.constexpr, HIDDEN: gl.constexpr):
    """Scores `[64, BLOCK_Q]` of the keys from `first_key` and the queries from `first_query` on, `HIDDEN` where hidden."""
    _, T, S, offset = lengths
    layout: gl.constexpr = s.type.layout
    keys = first_key + gl.arange(0, s.shape[0], gl.SliceLayout(1, layout))  # [64]
    queries = first_query + gl.arange(0, s.shape[1], gl.SliceLayout(0, layout))  # [BLOCK_Q]
    j = gl.expand_dims(keys, 1)  # [64, 1]
    i = gl.expand_dims(queries, 0)  # [1, BLOCK_Q]
    # The range: the query's own, or one that moves by one key per query.
    if masking.ROWS:
        start = gl.load(arrays.start + b * T + queries, mask=queries < T, other=0)  # [BLOCK_Q]
        end = gl.load(arrays.end + b * T + queries, mask=queries < T, other=0)  # [BLOCK_Q]
        s = gl.where((j >= gl.expand_dims(start, 0)) & (j < gl.expand_dims(end, 0)), s, HIDDEN)
    else:
        if masking.RIGHT >= 0:
            s = gl.where(j <= i + (offset + masking.RIGHT), s, HIDDEN)
        if masking.LEFT >= 0:
            s = gl.where(j >= i + (offset - masking.LEFT), s, HIDDEN)
        if not masking.EVEN_K:
            s = gl.where(j < S, s, HIDDEN)
    if masking.SEGMENTS:
        k_segment = gl.load(arrays.kv_segments + b * S + keys, mask=keys < S, other=-1)  # [64]
        q_segment = gl.load(arrays.q_segments + b * T + queries, mask=queries < T, other=-1)  # [BLOCK_Q]
        q_segment = gl.where(q_segment < 0, -2, q_segment)  # padding, equal to no key's
        s = gl.where(gl.expand_dims(k_segment, 1) == gl.expand_dims(q_segment, 0), s, HIDDEN)
    return s


@gluon.jit
def _key_gates(gates, bh, first_key, lengths, layout: gl.constexpr):
    """What gates take from scores of 64 keys [64], but for the coarse sums of queries; and where these are."""
    sums_ptr, own_ptr = sums_of(gates.sums, gl.to_tensor(bh).to(gl.int64), lengths)
    keys = first_key + gl.arange(0, 64, gl.SliceLayout(1, layout))  # [64]
    rest = gl.load(sums_ptr + keys, mask=keys < lengths.S, other=0.0)  # [64]
    return rest + coarse_of(sums_ptr, lengths.S, first_key), own_ptr + lengths.T


@gluon.jit
def _weights(qk, lses, at, first_key, m, is_partly_hidden, b, lengths, arrays, scoring: gl.constexpr, masking: gl.constexpr, taken=0.0):
    """The weights `[64, BLOCK_Q]` of scores `qk` with the tile of queries `m`, whose log-sums are at `at`. `taken` [64]: by gates, of each key."""
    BLOCK_Q: gl.constexpr = qk.shape[1]
    if scoring.CAP > 0 and masking.GUARD:  # as in `scores._scored`
        if is_partly_hidden:
            qk = _hidden(qk, first_key, m * BLOCK_Q, b, lengths, arrays, masking, 0.0)
    qk = _capped(qk, scoring, 16)
    if masking.GUARD:
        if is_partly_hidden:
            qk = _hidden(qk, first_key, m * BLOCK_Q, b, lengths, arrays, masking, float("-inf"))
    lse = lses.index(at).reshape([BLOCK_Q]).load(gl.SliceLayout(0, qk.type.layout))  # [BLOCK_Q]
    if scoring.GATES:
        return gl.exp2(qk * (scoring.SCALE * LOG2E) - gl.expand_dims(taken, 1) - gl.expand_dims(lse, 0))
    # p = 2^(s - lse); capped scores are in units of log2 already.
    return gl.exp2(qk * (1.0 if scoring.CAP > 0 else scoring.MULTIPLIER) - gl.expand_dims(lse, 0))


@gluon.jit
def _score_gradients(p, dp, lses, deltas, at, scoring: gl.constexpr):
    """The gradients of the scores `[64, BLOCK_Q]` from the weights `p` and their gradients `dp`."""
    BLOCK_Q: gl.constexpr = p.shape[1]
    of_queries: gl.constexpr = gl.SliceLayout(0, p.type.layout)
    delta = deltas.index(at).reshape([BLOCK_Q]).load(of_queries)  # [BLOCK_Q]
    ds = p * (dp - gl.expand_dims(delta, 0))
    if scoring.CAP > 0:  # d tanh = 1 - tanh^2; the tanh again from the weight, because registers are scarce
        lse = lses.index(at).reshape([BLOCK_Q]).load(of_queries)  # [BLOCK_Q]
        y = (_log2(p) + gl.expand_dims(lse, 0)) * (1.0 / scoring.MULTIPLIER)
        ds = gl.where(p > LEAST, ds * (1.0 - y * y), 0.0)
    return ds


@gluon.jit
def _store_dq(dq, buffers, s, BOX: gl.constexpr, sizes: gl.constexpr, TRANSPOSED: gl.constexpr = False, sums=0.0, GATES: gl.constexpr = False):
    """Stores a box of the `dq` of step `s`, counted over all of the program's tiles, for the step's writer, and tells it when copies see it. And `sums`
    of the warps `[4]`, if there are `GATES`."""
    full = _await_box(buffers, s, BOX, sizes)
    slot = (s * sizes.DQ_BOXES + BOX) % sizes.DQ_SLOTS
    box = buffers.boxes.index(slot).reshape([64, sizes.DQ_COLUMNS])
    if TRANSPOSED:
        box = box.permute((1, 0))
    box.store(dq)
    if GATES:
        buffers.sums.index(slot).store(sums)
    fence_async_shared()
    mbarrier.arrive(full, count=1)


@gluon.jit
def _await_box(buffers, s, BOX: gl.constexpr, sizes: gl.constexpr):
    """Waits until a box of step `s` is free. Returns the barrier by which its writer is told."""
    BOXES: gl.constexpr = sizes.DQ_BOXES
    number = s * BOXES + BOX
    before = number + (sizes.WRITERS * BOXES - sizes.DQ_SLOTS)  # the box that was in its slot, and a phase of the barriers before theirs
    step = before // BOXES
    mbarrier.wait(buffers.empty.index((step % sizes.WRITERS) * BOXES + before % BOXES), ((step // sizes.WRITERS) & 1) ^ 1)
    return buffers.full.index((s % sizes.WRITERS) * BOXES + BOX)


@gluon.jit
def _writer(queue, buffers, dq_descs, gates, tiles, lengths, W: gl.constexpr, sizes: gl.constexpr, masking: gl.constexpr, GATES: gl.constexpr):
    """Adds `dq` of every `WRITERS`-th step, when all tiles of keys before this one have added theirs; with gates the sums beside it, too."""
    WRITERS: gl.constexpr = sizes.WRITERS
    BOXES: gl.constexpr = sizes.DQ_BOXES
    PARTS: gl.constexpr = BOXES if BOXES < CONSUMERS else CONSUMERS  # boxes that are added together
    G: gl.constexpr = sizes.H // sizes.K
    _, T, S, offset = lengths
    count = (T + sizes.BLOCK_Q - 1) // sizes.BLOCK_Q
    done = 0  # steps of earlier tiles
    r = 0
    t = _next_tile(queue, r, 1)
    while t >= 0:
        n, b, g, lo, _, _, hi = _key_tile(t, tiles, lengths, sizes, masking)
        steps = (hi - lo) * G
        for e in range((W + (WRITERS - 1) * done) % WRITERS, steps, WRITERS):
            s = done + e
            head, m = _step(e, hi, G)
            h = g * G + head
            # How many tiles of keys add to these queries before this one.
            before = n
            if masking.TABLE:
                before = gl.load(tiles.order + (b * ((S + sizes.BLOCK_K - 1) // sizes.BLOCK_K) + n) * count + m)
            elif masking.LEFT >= 0:  # the tiles that are too far before the queries do not count
                before = n - gl.maximum(m * sizes.BLOCK_Q + (offset - masking.LEFT), 0) // sizes.BLOCK_K
            # Each box is freed when it has been read; the semaphore is released when all are in device memory.
            semaphore_ptr = tiles.semaphores + (b * sizes.H + h) * count + m
            _await_semaphore(semaphore_ptr, before)
            total = 0.0
            for pair in gl.static_range(BOXES // PARTS):
                for part in gl.static_range(PARTS):
                    mbarrier.wait(buffers.full.index(W * BOXES + pair * PARTS + part), (s // WRITERS) & 1)
                    row = m * sizes.BLOCK_Q
                    column = part * (sizes.D // PARTS) + pair * sizes.DQ_COLUMNS
                    slot = (s * BOXES + pair * PARTS + part) % sizes.DQ_SLOTS
                    # The first tile of keys stores, the others add.
                    if before == 0:
                        tma.async_copy_shared_to_global(dq_descs[0], [b, h, row, column], buffers.boxes.index(slot))
                        if sizes.R > 0:
                            tma.async_copy_shared_to_global(dq_descs[1], [b, h, row, part * HALF_ROPE], buffers.ropes.index(slot))
                    else:
                        _add(dq_descs[0], [b, h, row, column], buffers.boxes.index(slot))
                        if sizes.R > 0:
                            _add(dq_descs[1], [b, h, row, part * HALF_ROPE], buffers.ropes.index(slot))
                    if GATES:
                        total += gl.sum(buffers.sums.index(slot).load(gl.BlockedLayout([1], [32], [1], [0])), 0)
                tma.store_wait(0)
                for part in gl.static_range(PARTS):
                    mbarrier.arrive(buffers.empty.index(W * BOXES + pair * PARTS + part), count=1)
            if GATES:
                sum_ptr = gates.by_tile + (b * sizes.H + h) * count + m
                if before > 0:  # others have stored it: the first cache may hold what was there before
                    total += gl.load(sum_ptr, cache_modifier=".cg")
                gl.store(sum_ptr, total)
            _release_semaphore(semaphore_ptr, before)
        done += steps
        r += 1
        t = _next_tile(queue, r, 1)


@gluon.jit
def _loader(queue, buffers, barriers, descs, tiles, lengths, sizes: gl.constexpr, masking: gl.constexpr):
    """Claims tiles of keys, loads each with its values once, and the queries and their cotangents as far ahead as there are stages."""
    H: gl.constexpr = sizes.H
    BLOCK_Q: gl.constexpr = sizes.BLOCK_Q
    BLOCK_K: gl.constexpr = sizes.BLOCK_K
    D: gl.constexpr = sizes.D
    SLOTS: gl.constexpr = sizes.KEY_SLOTS
    G: gl.constexpr = H // sizes.K
    WIDE: gl.constexpr = D > 128  # halves are channels, not keys
    ROPES: gl.constexpr = 2 if sizes.R > 0 else 0
    kv_full, kv_empty, q_full, q_empty, do_full, do_empty = barriers
    count = (lengths.S + BLOCK_K - 1) // BLOCK_K * lengths.B * sizes.K
    done = 0  # steps of earlier tiles
    r = 0
    t = _claimed(_claim(tiles.counter))
    while t < count:
        _push(queue, r, (t,), 1)
        n, b, g, lo, _, _, hi = _key_tile(t, tiles, lengths, sizes, masking)
        # Keys and values of the tile, in two halves each.
        slot = r % SLOTS
        mbarrier.wait(kv_empty.index(slot), ((r // SLOTS) & 1) ^ 1)
        mbarrier.expect(kv_full.index(slot), 2 * BLOCK_K * D * 2 + ROPES * BLOCK_K * HALF_ROPE * 2)
        for half in gl.static_range(2):
            row = n * BLOCK_K + (0 if WIDE else half * 64)
            column = half * 128 if WIDE else 0
            tma.async_copy_global_to_shared(descs.k, [b, g, row, column], kv_full.index(slot), buffers.k.index(slot * 2 + half))
            tma.async_copy_global_to_shared(descs.v, [b, g, row, column], kv_full.index(slot), buffers.v.index(slot * 2 + half))
            for part in gl.static_range(ROPES):
                tma.async_copy_global_to_shared(descs.k_rope, [b, 0 if sizes.SHARED else g, row, part * HALF_ROPE], kv_full.index(slot), buffers.k_rope.index(half * 2 + part))
        # Queries and cotangents of every step.
        steps = (hi - lo) * G
        for e in range(steps):
            head, m = _step(e, hi, G)
            h = g * G + head
            _load(descs.q, descs.lse, buffers.q, buffers.lse, q_full, q_empty, b, h, b * H + h, m * BLOCK_Q, done + e, sizes, ROPES)
            for part in gl.static_range(ROPES):
                at = (done + e) % sizes.NUM_STAGES
                place = [b, h, m * BLOCK_Q, part * HALF_ROPE]
                tma.async_copy_global_to_shared(descs.q_rope, place, q_full.index(at), buffers.q_rope.index(at * 2 + part))
            _load(descs.do, descs.delta, buffers.do, buffers.delta, do_full, do_empty, b, h, b * H + h, m * BLOCK_Q, done + e, sizes)
        done += steps
        r += 1
        t = _claimed(_claim(tiles.counter))
    _push(queue, r, (-1,), 1)


@gluon.jit
def _load(desc, terms_desc, tiles, terms, full, empty, b, h, bh, row, s, sizes: gl.constexpr, ROPES: gl.constexpr = 0):
    """Queries with the logarithms of their sums, or cotangents with their deltas, of step `s`; so many boxes of second parts come with them."""
    D: gl.constexpr = sizes.D
    STAGES: gl.constexpr = sizes.NUM_STAGES
    HALVES: gl.constexpr = 2 if D > 128 else 1
    at = s % STAGES
    mbarrier.wait(empty.index(at), ((s // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(at), sizes.BLOCK_Q * (D * 2 + 4 + ROPES * HALF_ROPE * 2))
    for half in gl.static_range(HALVES):
        tma.async_copy_global_to_shared(desc, [b, h, row, half * 128], full.index(at), tiles.index(at * HALVES + half))
    # The terms of the softmax, `[BLOCK_Q]`.
    tma.async_copy_global_to_shared(terms_desc, [bh, row], full.index(at), terms.index(at))


@gluon.jit
def _store_key_gradients(dk, dv, buffers, descs, kv_empty, at, W: gl.constexpr, COLUMNS: gl.constexpr):
    """The gradients take the place of keys and values, which the other consumer has read, too; then the next ones may come."""
    dk_desc, dv_desc = descs
    _sync_consumers()
    buffers.k.index(W).reshape([64, COLUMNS]).store(dk)
    buffers.v.index(W).reshape([64, COLUMNS]).store(dv)
    fence_async_shared()
    tma.async_copy_shared_to_global(dk_desc, at, buffers.k.index(W))
    tma.async_copy_shared_to_global(dv_desc, at, buffers.v.index(W))
    tma.store_wait(0)
    mbarrier.arrive(kv_empty.index(0), count=1)


@gluon.jit
def _operands(pointers, lengths, terms, HEAD_D: gl.constexpr, HEAD_V: gl.constexpr, sizes: gl.constexpr, KEYS: gl.constexpr, COLUMNS: gl.constexpr):
    """Descriptors of what is loaded, of `dk` and `dv`, and of `dq`, with boxes of so many keys or a tile's queries, and so many columns; and shared memory
    for what is loaded and for `dq`. Keys, and queries of more than 128 channels, take two boxes."""
    HALVES: gl.constexpr = 2 if sizes.D > 128 else 1
    STAGES: gl.constexpr = sizes.NUM_STAGES
    BLOCK_Q: gl.constexpr = sizes.BLOCK_Q
    B, T, S, _ = lengths
    R: gl.constexpr = sizes.R
    q_ptr, k_ptr, k_rope_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, dq_ptr = pointers
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    q_desc = _described(q_ptr, B, T, sizes.H, HEAD_D, BLOCK_Q, COLUMNS, R)
    do_desc = _described(do_ptr, B, T, sizes.H, HEAD_V, BLOCK_Q, COLUMNS)
    OTHER: gl.constexpr = 0 if sizes.SHARED else R
    k_desc = _described(k_ptr, B, S, sizes.K, HEAD_D, KEYS, COLUMNS, OTHER)
    v_desc = _described(v_ptr, B, S, sizes.K, HEAD_V, KEYS, COLUMNS)
    dk_desc = _described(dk_ptr, B, S, sizes.K, HEAD_D, KEYS, COLUMNS, OTHER)
    dv_desc = _described(dv_ptr, B, S, sizes.K, HEAD_V, KEYS, COLUMNS)
    dq_desc = _described(dq_ptr, B, T, sizes.H, HEAD_D, 64, sizes.DQ_COLUMNS, R)
    k = _tiles_of(dtype, sizes.KEY_SLOTS * 2, KEYS, COLUMNS)
    v = _tiles_of(dtype, sizes.KEY_SLOTS * 2, KEYS, COLUMNS)
    q = _tiles_of(dtype, STAGES * HALVES, BLOCK_Q, COLUMNS)
    do = _tiles_of(dtype, STAGES * HALVES, BLOCK_Q, COLUMNS)
    dqs = _tiles_of(gl.float32, sizes.DQ_SLOTS, 64, sizes.DQ_COLUMNS)
    q_rope, k_rope, dq_ropes = q, k, dqs
    q_rope_desc, k_rope_desc, dq_rope_desc = q_desc, k_desc, dq_desc
    if R > 0:
        q_rope_desc = _described(q_ptr + HEAD_D, B, T, sizes.H, R, BLOCK_Q, HALF_ROPE, HEAD_D)
        if sizes.SHARED:
            k_rope_desc = _described(k_rope_ptr, B, S, 1, R, KEYS, HALF_ROPE)
        else:
            k_rope_desc = _described(k_ptr + HEAD_D, B, S, sizes.K, R, KEYS, HALF_ROPE, HEAD_D)
        dq_rope_desc = _described(dq_ptr + HEAD_D, B, T, sizes.H, R, 64, HALF_ROPE, HEAD_D)
        q_rope = _tiles_of(dtype, STAGES * 2, BLOCK_Q, HALF_ROPE)
        k_rope = _tiles_of(dtype, CONSUMERS * 2, KEYS, HALF_ROPE)
        dq_ropes = _tiles_of(gl.float32, sizes.DQ_SLOTS, 64, HALF_ROPE)
    # The terms of the softmax, a row for each head.
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    lse_desc = tma.make_tensor_descriptor(lse_ptr, [B * sizes.H, terms], [terms, 1], [1, BLOCK_Q], layout)
    delta_desc = tma.make_tensor_descriptor(delta_ptr, [B * sizes.H, terms], [terms, 1], [1, BLOCK_Q], layout)
    lse = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_Q], layout)
    delta = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_Q], layout)
    descs = Descs(q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, q_rope_desc, k_rope_desc)
    return descs, (dk_desc, dv_desc), (dq_desc, dq_rope_desc), Buffers(k, v, q, do, lse, delta, k_rope, q_rope), (dqs, dq_ropes)
