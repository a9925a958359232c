"""What all three of Hopper's backward kernels have: how programs come by tiles of keys, how these are loaded, and how `dq` is summed.

Programs stay, so that what they begin with is paid for once, and take the next tile of keys when they are free. The loading warp claims it and tells
the others. Tiles are claimed in one order, and a tile waits only for those before it, which others are at work on: it does not matter how many
programs run at a time.

The sum `dq` has one order: a tile of keys adds to a tile of queries after all tiles before it. All of them take the last queries first, of which
causal masks let every key be seen, and all heads of a group for one tile of queries: a tile that is claimed with the one before it is behind by one
addition, never by a tile."""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ..tile import query_tiles
from .scores import _capped, _log2, LEAST

CONSUMERS = gl.constexpr(2)
WRITERS = gl.constexpr(2)
MEETING = gl.constexpr(8)
"""The number of the consumers' hardware barrier; Triton uses those from 0 on."""


# fmt: off
@_core.builtin
def _add(desc, at, tile, _semantic=None):
    """Adds a tile in shared memory to device memory; not awaited. Gluon of Triton 3.7 has the operation, but no name for it."""
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, _semantic._convert_to_ir_values(at, require_i64=False),
                                              tile.handle)


@gluon.jit
def _meet():
    """Both consumers wait for one another, and for what they have stored."""
    gl.inline_asm_elementwise("bar.sync $1, 256; mov.u32 $0, 0;", "=r,r,~{memory}", [gl.to_tensor(MEETING)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _await_turn(turn_ptr, turn):
    """Waits until `turn` tiles of keys have been added."""
    seen = _turns(turn_ptr)
    while seen != turn:
        seen = _turns(turn_ptr)
    gl.inline_asm_elementwise("fence.proxy.async; mov.u32 $0, $1;", "=r,r,~{memory}", [seen], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _turns(turn_ptr):
    return gl.inline_asm_elementwise("ld.acquire.gpu.global.b32 $0, [$1];", "=r,l,~{memory}", [turn_ptr], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _end_turn(turn_ptr, turn):
    """Waits until what this warp has added is in device memory, and says so. All its lanes store the same."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; bar.warp.sync 0xffffffff; fence.proxy.async; st.release.gpu.global.b32 [$1], $2; mov.u32 $0, 0;",
        "=r,l,r,~{memory}", [turn_ptr, turn + 1], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _claimed(claims_ptr):
    """The next number; one for the whole warp."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred first; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0; mov.u32 $0, 0; "
        "@first atom.relaxed.gpu.global.add.u32 $0, [$1], 1; shfl.sync.idx.b32 $0, $0, 0, 31, 0xffffffff; }",
        "=r,l,~{memory}", [claims_ptr], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _tell(board, r, t):
    """The loading warp says which tile is the program's number `r`."""
    told, told_full, told_empty = board
    PLACES: gl.constexpr = told.shape[0]
    at = r % PLACES
    mbarrier.wait(told_empty.index(at), ((r // PLACES) & 1) ^ 1)
    told.index(at).store(gl.full([1], t, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(told_full.index(at), count=1)


@gluon.jit
def _told(board, r, WARPS: gl.constexpr):
    """Which tile it is. Only writers, of one warp, say that they have read it; consumers have before they give back the keys of the tile."""
    told, told_full, told_empty = board
    PLACES: gl.constexpr = told.shape[0]
    at = r % PLACES
    mbarrier.wait(told_full.index(at), (r // PLACES) & 1)
    t = gl.max(told.index(at).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)
    if WARPS == 1:
        mbarrier.arrive(told_empty.index(at), count=1)
    return t


@gluon.jit
def _bounds(t, extents, tiles_ptr, sizes: gl.constexpr, flags: gl.constexpr):
    """Tile of keys, row, key head and visible tiles of queries of tile `t`. Rows run in groups, in which all first tiles come first."""
    B, T, S, offset = extents
    K: gl.constexpr = sizes[1]
    BLOCK_Q: gl.constexpr = sizes[3]
    BLOCK_K: gl.constexpr = sizes[4]
    GROUP: gl.constexpr = sizes[6]
    tiles = (S + BLOCK_K - 1) // BLOCK_K
    group = t // (tiles * GROUP)
    index = t % (tiles * GROUP)
    size = gl.minimum(B * K - group * GROUP, GROUP)  # the last group may have fewer rows
    n, bg = index // size, group * GROUP + index % size
    b, g = bg // K, bg % K
    lo, full_lo, full_hi, hi = query_tiles(tiles_ptr, b, n, offset, T, S, BLOCK_Q, BLOCK_K, flags[2], flags[3], flags[4] or flags[5], False)
    return n, b, g, lo, full_lo, full_hi, hi


@gluon.jit
def _place(e, hi, G: gl.constexpr):
    """Head of the group and tile of queries of step `e`."""
    return e % G, hi - 1 - e // G


@gluon.jit
def _hidden(s, first_key, first_query, b, extents, pointers, flags: gl.constexpr, HIDDEN: gl.constexpr):
    """Scores `[64, BLOCK_Q]` of the keys from `first_key` and the queries from `first_query` on, `HIDDEN` where hidden."""
    _, T, S, offset = extents
    q_segments_ptr, kv_segments_ptr, start_ptr, end_ptr = pointers
    LEFT: gl.constexpr = flags[2]
    RIGHT: gl.constexpr = flags[3]
    EVEN_K: gl.constexpr = flags[6]
    layout: gl.constexpr = s.type.layout
    keys = first_key + gl.arange(0, s.shape[0], gl.SliceLayout(1, layout))  # [64]
    queries = first_query + gl.arange(0, s.shape[1], gl.SliceLayout(0, layout))  # [BLOCK_Q]
    j = gl.expand_dims(keys, 1)
    i = gl.expand_dims(queries, 0)
    if flags[4]:
        start = gl.load(start_ptr + b * T + queries, mask=queries < T, other=0)
        end = gl.load(end_ptr + b * T + queries, mask=queries < T, other=0)
        s = gl.where((j >= gl.expand_dims(start, 0)) & (j < gl.expand_dims(end, 0)), s, HIDDEN)
    else:
        if RIGHT >= 0:
            s = gl.where(j <= i + (offset + RIGHT), s, HIDDEN)
        if LEFT >= 0:
            s = gl.where(j >= i + (offset - LEFT), s, HIDDEN)
        if not EVEN_K:
            s = gl.where(j < S, s, HIDDEN)
    if flags[5]:
        k_segment = gl.load(kv_segments_ptr + b * S + keys, mask=keys < S, other=-1)
        q_segment = gl.load(q_segments_ptr + b * T + queries, mask=queries < T, other=-1)
        q_segment = gl.where(q_segment < 0, -2, q_segment)  # padding, equal to no key's
        s = gl.where(gl.expand_dims(k_segment, 1) == gl.expand_dims(q_segment, 0), s, HIDDEN)
    return s


@gluon.jit
def _weights(qk, lses, at, first_key, m, is_partly_hidden, b, extents, pointers, HIDES: gl.constexpr, flags: gl.constexpr):
    """The weights `[64, BLOCK_Q]` of scores `qk` with the tile of queries `m`, whose log-sums are at `at`."""
    SCALE: gl.constexpr = flags[0]
    MULTIPLIER: gl.constexpr = flags[1]
    CAP: gl.constexpr = flags[7]
    FAST_TANH: gl.constexpr = flags[8]
    BLOCK_Q: gl.constexpr = qk.shape[1]
    if CAP > 0 and HIDES:  # as in `scores._scored`
        if is_partly_hidden:
            qk = _hidden(qk, first_key, m * BLOCK_Q, b, extents, pointers, flags, 0.0)
    qk = _capped(qk, SCALE, CAP, FAST_TANH, MULTIPLIER, False, 16)
    if HIDES:
        if is_partly_hidden:
            qk = _hidden(qk, first_key, m * BLOCK_Q, b, extents, pointers, flags, float("-inf"))
    lse = lses.index(at).reshape([BLOCK_Q]).load(gl.SliceLayout(0, qk.type.layout))  # [BLOCK_Q]
    return gl.exp2(qk * (1.0 if CAP > 0 else MULTIPLIER) - gl.expand_dims(lse, 0))


@gluon.jit
def _score_gradients(p, dp, lses, deltas, at, flags: gl.constexpr):
    """The gradients of the scores `[64, BLOCK_Q]` from the weights `p` and their gradients `dp`."""
    MULTIPLIER: gl.constexpr = flags[1]
    CAP: gl.constexpr = flags[7]
    BLOCK_Q: gl.constexpr = p.shape[1]
    of_queries: gl.constexpr = gl.SliceLayout(0, p.type.layout)
    delta = deltas.index(at).reshape([BLOCK_Q]).load(of_queries)  # [BLOCK_Q]
    ds = p * (dp - gl.expand_dims(delta, 0))
    if CAP > 0:  # d tanh = 1 - tanh^2; the tanh again from the weight, because registers are scarce
        lse = lses.index(at).reshape([BLOCK_Q]).load(of_queries)  # [BLOCK_Q]
        y = (_log2(p) + gl.expand_dims(lse, 0)) * (1.0 / MULTIPLIER)
        ds = gl.where(p > LEAST, ds * (1.0 - y * y), 0.0)
    return ds


@gluon.jit
def _hand_over(dq, sums, s, J: gl.constexpr, sizes: gl.constexpr, TRANSPOSED: gl.constexpr = False):
    """Gives box `J` of the `dq` of step `s`, counted over all of the program's tiles, to the step's writer."""
    dqs, _, dq_empty = sums
    BOXES: gl.constexpr = sizes[7]
    PLACES: gl.constexpr = sizes[8]
    number = s * BOXES + J
    WRITERS: gl.constexpr = sizes[12]
    before = number + (WRITERS * BOXES - PLACES)  # the box that was in its place, and the barriers' turn before theirs
    step = before // BOXES
    mbarrier.wait(dq_empty.index((step % WRITERS) * BOXES + before % BOXES), ((step // WRITERS) & 1) ^ 1)
    box = dqs.index(number % PLACES).reshape([64, sizes[10]])
    if TRANSPOSED:
        box = box.permute((1, 0))
    box.store(dq)


@gluon.jit
def _announce(sums, s, J: gl.constexpr, sizes: gl.constexpr):
    """Says so, when what was stored is visible to copies."""
    mbarrier.arrive(sums[1].index((s % sizes[12]) * sizes[7] + J), count=1)


@gluon.jit
def _writer(board, sums, dq_desc, turns_ptr, order_ptr, tiles_ptr, extents, W: gl.constexpr, sizes: gl.constexpr, flags: gl.constexpr):
    """Adds `dq` of every step that is this writer's turn, when all tiles of keys before this one have added theirs."""
    WRITERS: gl.constexpr = sizes[12]
    dqs, dq_full, dq_empty = sums
    _, T, S, offset = extents
    H: gl.constexpr = sizes[0]
    D: gl.constexpr = sizes[2]
    BLOCK_Q: gl.constexpr = sizes[3]
    BLOCK_K: gl.constexpr = sizes[4]
    BOXES: gl.constexpr = sizes[7]
    PLACES: gl.constexpr = sizes[8]
    LEFT: gl.constexpr = flags[2]
    TABLE: gl.constexpr = flags[4] or flags[5]
    PARTS: gl.constexpr = BOXES if BOXES < CONSUMERS else CONSUMERS  # boxes that are added together
    G: gl.constexpr = H // sizes[1]
    tiles = (T + BLOCK_Q - 1) // BLOCK_Q
    done = 0
    r = 0
    t = _told(board, r, 1)
    while t >= 0:
        n, b, g, lo, _, _, hi = _bounds(t, extents, tiles_ptr, sizes, flags)
        steps = (hi - lo) * G
        for e in range((W + (WRITERS - 1) * done) % WRITERS, steps, WRITERS):
            s = done + e
            head, m = _place(e, hi, G)
            h = g * G + head
            turn = n
            if TABLE:
                turn = gl.load(order_ptr + (b * ((S + BLOCK_K - 1) // BLOCK_K) + n) * tiles + m)
            elif LEFT >= 0:  # the tiles that are too far before the queries do not count
                turn = n - gl.maximum(m * BLOCK_Q + (offset - LEFT), 0) // BLOCK_K
            turn_ptr = turns_ptr + (b * H + h) * tiles + m
            _await_turn(turn_ptr, turn)
            for pair in gl.static_range(BOXES // PARTS):
                for part in gl.static_range(PARTS):
                    mbarrier.wait(dq_full.index(W * BOXES + pair * PARTS + part), (s // WRITERS) & 1)
                    row = m * BLOCK_Q
                    column = part * (D // PARTS) + pair * sizes[10]
                    place = (s * BOXES + pair * PARTS + part) % PLACES
                    if turn == 0:
                        tma.async_copy_shared_to_global(dq_desc, [b, h, row, column], dqs.index(place))
                    else:
                        _add(dq_desc, [b, h, row, column], dqs.index(place))
                tma.store_wait(0)
                for part in gl.static_range(PARTS):
                    mbarrier.arrive(dq_empty.index(W * BOXES + pair * PARTS + part), count=1)
            _end_turn(turn_ptr, turn)
        done += steps
        r += 1
        t = _told(board, r, 1)


@gluon.jit
def _loader(board, buffers, barriers, descs, claims_ptr, tiles_ptr, extents, sizes: gl.constexpr, flags: gl.constexpr):
    """Claims tiles of keys, loads each with its values once, and the queries and their cotangents as far ahead as there are stages."""
    ks, vs, qs, dos, lses, deltas = buffers
    kv_full, kv_empty, q_full, q_empty, do_full, do_empty = barriers
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc = descs
    B, _, S, _ = extents
    H: gl.constexpr = sizes[0]
    K: gl.constexpr = sizes[1]
    D: gl.constexpr = sizes[2]
    BLOCK_Q: gl.constexpr = sizes[3]
    BLOCK_K: gl.constexpr = sizes[4]
    Q_STAGES: gl.constexpr = sizes[5]
    DO_STAGES: gl.constexpr = sizes[9]
    KEY_PLACES: gl.constexpr = sizes[11]
    G: gl.constexpr = H // K
    WIDE: gl.constexpr = D > 128  # rows in two halves
    count = (S + BLOCK_K - 1) // BLOCK_K * B * K
    done = 0
    r = 0
    t = _claimed(claims_ptr)
    while t < count:
        _tell(board, r, t)
        n, b, g, lo, _, _, hi = _bounds(t, extents, tiles_ptr, sizes, flags)
        place = r % KEY_PLACES
        mbarrier.wait(kv_empty.index(place), ((r // KEY_PLACES) & 1) ^ 1)
        mbarrier.expect(kv_full.index(place), 2 * BLOCK_K * D * 2)
        for half in gl.static_range(2):
            row = n * BLOCK_K
            column = half * 128
            if not WIDE:
                row = n * BLOCK_K + half * 64
                column = 0
            tma.async_copy_global_to_shared(k_desc, [b, g, row, column], kv_full.index(place), ks.index(place * 2 + half))
            tma.async_copy_global_to_shared(v_desc, [b, g, row, column], kv_full.index(place), vs.index(place * 2 + half))
        steps = (hi - lo) * G
        for e in range(steps):
            head, m = _place(e, hi, G)
            h = g * G + head
            _load(q_desc, lse_desc, qs, lses, q_full, q_empty, b, h, b * H + h, m * BLOCK_Q, done + e, BLOCK_Q, D, Q_STAGES)
            _load(do_desc, delta_desc, dos, deltas, do_full, do_empty, b, h, b * H + h, m * BLOCK_Q, done + e, BLOCK_Q, D, DO_STAGES)
        done += steps
        r += 1
        t = _claimed(claims_ptr)
    _tell(board, r, -1)


@gluon.jit
def _load(desc, terms_desc, tiles, terms, full, empty, b, h, bh, row, s, BLOCK_Q: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
    """Queries with the logarithms of their sums, or cotangents with their deltas, of step `s`."""
    HALVES: gl.constexpr = 2 if D > 128 else 1
    at = s % STAGES
    mbarrier.wait(empty.index(at), ((s // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(at), BLOCK_Q * (D * 2 + 4))
    for half in gl.static_range(HALVES):
        tma.async_copy_global_to_shared(desc, [b, h, row, half * 128], full.index(at), tiles.index(at * HALVES + half))
    tma.async_copy_global_to_shared(terms_desc, [bh, row], full.index(at), terms.index(at))


@gluon.jit
def _return_keys(dk, dv, ks, vs, descs, kv_empty, at, W: gl.constexpr, COLUMNS: gl.constexpr):
    """The gradients take the place of keys and values, which the other consumer has read, too; then the next ones may come."""
    dk_desc, dv_desc = descs
    _meet()
    ks.index(W).reshape([64, COLUMNS]).store(dk)
    vs.index(W).reshape([64, COLUMNS]).store(dv)
    fence_async_shared()
    tma.async_copy_shared_to_global(dk_desc, at, ks.index(W))
    tma.async_copy_shared_to_global(dv_desc, at, vs.index(W))
    tma.store_wait(0)
    mbarrier.arrive(kv_empty.index(0), count=1)
