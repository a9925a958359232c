"""Hopper's backward kernel for head dims up to 64, as `backward_kernel.py`'s but for who computes `dq`: a third group of four warps, from what both
consumers leave of the scores' gradients. So these never wait for one another, and one multiplies while the other computes weights.

Shared memory is what such narrow products are short of: 64 rows by 64 columns read as much of it as they have time for. So keys and values, which a
tile keeps, are operands in registers for the consumers, and `dq` is computed transposed, which is stored without conflicts."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..tile import query_tiles
from .backward_parts import (
    _announce,
    _bounds,
    _hand_over,
    _loader,
    _place,
    _score_gradients,
    _told,
    _weights,
    _writer,
    CONSUMERS,
)
from .forward_kernel import _barriers_of, _described, _tiles_of

SIZE = gl.constexpr(64)
"""Queries of a tile, and keys of a consumer."""
KEY_PLACES = gl.constexpr(2)
"""Tiles of keys in shared memory: the next one is loaded while this one is at work."""
SCORE_PLACES = gl.constexpr(2)
"""Steps whose score gradients may wait for the group that computes `dq`."""
WRITERS = gl.constexpr(3)
"""Warps that add `dq`: each has as long as three steps for an addition, its turn and device memory."""


# fmt: off
@gluon.jit
def _scores(rows, columns, D: gl.constexpr):
    """The product of 64 keys (or values) in registers by the queries (or cotangents) of a stage, `[64, 64]`; not awaited."""
    zero = gl.zeros([SIZE, SIZE], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16]))
    return warpgroup_mma(rows, columns.reshape([SIZE, D]).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _give(ds, s, dss, ds_full, ds_empty, W: gl.constexpr):
    """Leaves a consumer's score gradients `[64, 64]` of step `s` to the group that computes `dq`."""
    place = s % SCORE_PLACES
    mbarrier.wait(ds_empty.index(place), ((s // SCORE_PLACES) & 1) ^ 1)
    dss.index(place * CONSUMERS + W).store(ds)
    fence_async_shared()
    mbarrier.arrive(ds_full.index(place), count=1)


@gluon.jit
def _nothing(s, dss, barriers, W: gl.constexpr, NUM_STAGES: gl.constexpr):
    """A step whose queries see keys of the other consumer alone."""
    _, _, full, empty, ds_full, ds_empty = barriers
    mbarrier.wait(full.index(s % NUM_STAGES), (s // NUM_STAGES) & 1)
    mbarrier.arrive(empty.index(s % NUM_STAGES), count=1)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    _give(gl.zeros([SIZE, SIZE], dss.dtype, layout), s, dss, ds_full, ds_empty, W)


@gluon.jit
def _consumer(board, buffers, dss, results, barriers, out_descs, pointers, tiles_ptr, extents, W: gl.constexpr, sizes: gl.constexpr, flags: gl.constexpr):
    """Sums `dk` and `dv` of keys `64 W` to `64 W + 63` of every tile."""
    ks, vs, qs, dos, lses, deltas = buffers
    dks, dvs = results
    kv_full, kv_empty, full, empty, ds_full, ds_empty = barriers
    dk_desc, dv_desc = out_descs
    _, T, S, offset = extents
    D: gl.constexpr = sizes[2]
    BLOCK_K: gl.constexpr = sizes[4]
    NUM_STAGES: gl.constexpr = sizes[5]
    G: gl.constexpr = sizes[0] // sizes[1]
    SCALE: gl.constexpr = flags[0]
    TABLE: gl.constexpr = flags[4] or flags[5]
    HIDES: gl.constexpr = flags[2] >= 0 or flags[3] >= 0 or TABLE or not flags[6]
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    keys_layout: gl.constexpr = gl.DotOperandLayout(0, scores_layout, 2)
    dtype: gl.constexpr = ks.dtype
    done = 0  # steps of earlier tiles
    r = 0
    t = _told(board, r, 4)
    while t >= 0:
        n, b, g, lo, full_lo, full_hi, hi = _bounds(t, extents, tiles_ptr, sizes, flags)
        first_key = n * BLOCK_K + W * SIZE
        past = first_key + SIZE > S  # some keys are past the end, where they are 0
        steps = (hi - lo) * G
        first, last = 0, steps
        if not TABLE:  # the queries that see these keys, of those that see any of the tile
            own_lo, full_lo, full_hi, own_hi = query_tiles(tiles_ptr, b, n * CONSUMERS + W, offset, T, S, SIZE, SIZE, flags[2], flags[3], False, False)
            first, last = (hi - own_hi) * G, (hi - own_lo) * G
        for e in range(0, first):
            _nothing(done + e, dss, barriers, W, NUM_STAGES)
        dk = gl.zeros([SIZE, D], gl.float32, layout)
        dv = gl.zeros([SIZE, D], gl.float32, layout)
        held = r % KEY_PLACES
        mbarrier.wait(kv_full.index(held), (r // KEY_PLACES) & 1)
        k = ks.index(held * CONSUMERS + W).reshape([SIZE, D]).load(keys_layout)
        v = vs.index(held * CONSUMERS + W).reshape([SIZE, D]).load(keys_layout)
        for e in range(first, last):
            s = done + e
            at = s % NUM_STAGES
            _, m = _place(e, hi, G)
            mbarrier.wait(full.index(at), (s // NUM_STAGES) & 1)
            qk = _scores(k, qs.index(at), D)
            dp = _scores(v, dos.index(at), D)
            qk = warpgroup_mma_wait(1, deps=[qk])
            p = _weights(qk, lses, at, first_key, m, (m < full_lo) | (m >= full_hi) | past, b, extents, pointers, HIDES, flags)
            weights = gl.convert_layout(p.to(dtype), weights_layout)
            dv = warpgroup_mma(weights, dos.index(at).reshape([SIZE, D]), dv, is_async=True)
            dp = warpgroup_mma_wait(1, deps=[dp])
            ds = _score_gradients(p, dp, lses, deltas, at, flags).to(dtype)
            dk = warpgroup_mma(gl.convert_layout(ds, weights_layout), qs.index(at).reshape([SIZE, D]), dk, is_async=True)
            _give(ds, s, dss, ds_full, ds_empty, W)
            dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
            mbarrier.arrive(empty.index(at), count=1)
        for e in range(last, steps):
            _nothing(done + e, dss, barriers, W, NUM_STAGES)
        mbarrier.arrive(kv_empty.index(held), count=1)
        tma.store_wait(0)  # of the last tile's
        dvs.index(W).reshape([SIZE, D]).store(dv.to(dtype))
        dks.index(W).reshape([SIZE, D]).store((dk * SCALE).to(dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(dv_desc, [b, g, first_key, 0], dvs.index(W))
        tma.async_copy_shared_to_global(dk_desc, [b, g, first_key, 0], dks.index(W))
        done += steps
        r += 1
        t = _told(board, r, 4)
    tma.store_wait(0)


@gluon.jit
def _query_gradients(board, ks, dss, sums, barriers, tiles_ptr, extents, sizes: gl.constexpr, flags: gl.constexpr):
    """Computes every `dq`, transposed."""
    kv_full, kv_empty, ds_full, ds_empty = barriers
    D: gl.constexpr = sizes[2]
    G: gl.constexpr = sizes[0] // sizes[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    done = 0
    r = 0
    t = _told(board, r, 4)
    while t >= 0:
        _, _, _, lo, _, _, hi = _bounds(t, extents, tiles_ptr, sizes, flags)
        steps = (hi - lo) * G
        held = r % KEY_PLACES
        mbarrier.wait(kv_full.index(held), (r // KEY_PLACES) & 1)
        first = ks.index(held * CONSUMERS).reshape([SIZE, D]).permute((1, 0))  # [D, 64]
        second = ks.index(held * CONSUMERS + 1).reshape([SIZE, D]).permute((1, 0))  # [D, 64]
        for e in range(steps):
            s = done + e
            place = s % SCORE_PLACES
            mbarrier.wait(ds_full.index(place), (s // SCORE_PLACES) & 1)
            dq = gl.zeros([D, SIZE], gl.float32, layout)
            dq = warpgroup_mma(first, dss.index(place * CONSUMERS), dq, use_acc=False, is_async=True)
            dq = warpgroup_mma(second, dss.index(place * CONSUMERS + 1), dq, is_async=True)
            dq = warpgroup_mma_wait(0, deps=[dq])
            mbarrier.arrive(ds_empty.index(place), count=1)
            _hand_over(dq, sums, s, 0, sizes, TRANSPOSED=True)
            fence_async_shared()
            _announce(sums, s, 0, sizes)
        mbarrier.arrive(kv_empty.index(held), count=1)
        done += steps
        r += 1
        t = _told(board, r, 4)


@gluon.jit
def hopper_narrow_backward_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr,
    q_segments_ptr, kv_segments_ptr, start_ptr, end_ptr,
    tiles_ptr, order_ptr, no_turns_ptr,
    B, T, S, terms, offset,
    turns_ptr, dq_ptr, dk_ptr, dv_ptr,
    H: gl.constexpr, K: gl.constexpr, D: gl.constexpr, V: gl.constexpr, BLOCK_D: gl.constexpr,
    BLOCK_Q: gl.constexpr, NUM_STAGES: gl.constexpr, SCALE: gl.constexpr, CAP: gl.constexpr, FAST_TANH: gl.constexpr, MULTIPLIER: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, ROWS: gl.constexpr, SEGMENTS: gl.constexpr, EVEN_K: gl.constexpr, GROUP: gl.constexpr,
):
    # As `hopper_backward_kernel`, for tiles of 64 queries.
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    BLOCK_K: gl.constexpr = CONSUMERS * SIZE
    sizes: gl.constexpr = (H, K, BLOCK_D, SIZE, BLOCK_K, NUM_STAGES, GROUP, 1, WRITERS, NUM_STAGES, SIZE, KEY_PLACES, WRITERS)
    flags: gl.constexpr = (SCALE, MULTIPLIER, LEFT, RIGHT, ROWS, SEGMENTS, EVEN_K, CAP, FAST_TANH)
    extents = (B, T, S, offset)
    q_desc = _described(q_ptr, B, T, H, D, SIZE, BLOCK_D)
    do_desc = _described(do_ptr, B, T, H, V, SIZE, BLOCK_D)
    k_desc = _described(k_ptr, B, S, K, D, SIZE, BLOCK_D)
    v_desc = _described(v_ptr, B, S, K, V, SIZE, BLOCK_D)
    dk_desc = _described(dk_ptr, B, S, K, D, SIZE, BLOCK_D)
    dv_desc = _described(dv_ptr, B, S, K, V, SIZE, BLOCK_D)
    dq_desc = _described(dq_ptr, B, T, H, D, SIZE, BLOCK_D)
    ks = _tiles_of(dtype, KEY_PLACES * CONSUMERS, SIZE, BLOCK_D)
    vs = _tiles_of(dtype, KEY_PLACES * CONSUMERS, SIZE, BLOCK_D)
    qs = _tiles_of(dtype, NUM_STAGES, SIZE, BLOCK_D)
    dos = _tiles_of(dtype, NUM_STAGES, SIZE, BLOCK_D)
    terms_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    lse_desc = tma.make_tensor_descriptor(lse_ptr, [B * H, terms], [terms, 1], [1, SIZE], terms_layout)
    delta_desc = tma.make_tensor_descriptor(delta_ptr, [B * H, terms], [terms, 1], [1, SIZE], terms_layout)
    lses = gl.allocate_shared_memory(gl.float32, [NUM_STAGES, 1, SIZE], terms_layout)
    deltas = gl.allocate_shared_memory(gl.float32, [NUM_STAGES, 1, SIZE], terms_layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SIZE, SIZE], dtype)
    dss = gl.allocate_shared_memory(dtype, [SCORE_PLACES * CONSUMERS, SIZE, SIZE], ds_layout)
    dqs = _tiles_of(gl.float32, WRITERS, SIZE, BLOCK_D)
    dks = _tiles_of(dtype, CONSUMERS, SIZE, BLOCK_D)
    dvs = _tiles_of(dtype, CONSUMERS, SIZE, BLOCK_D)
    told = gl.allocate_shared_memory(gl.int32, [KEY_PLACES + 1, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    told_full, told_empty = _barriers_of(KEY_PLACES + 1, WRITERS)
    kv_full, kv_empty = _barriers_of(KEY_PLACES, CONSUMERS + 1)
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(i), count=2)  # queries and cotangents
        mbarrier.init(empty.index(i), count=CONSUMERS)
    ds_empty, ds_full = _barriers_of(SCORE_PLACES, CONSUMERS)
    dq_full, dq_empty = _barriers_of(WRITERS, 1)
    board = (told, told_full, told_empty)
    buffers = (ks, vs, qs, dos, lses, deltas)
    sums = (dqs, dq_full, dq_empty)
    loads = (kv_full, kv_empty, full, empty, full, empty)
    barriers = (kv_full, kv_empty, full, empty, ds_full, ds_empty)
    exchange = (kv_full, kv_empty, ds_full, ds_empty)
    pointers = (q_segments_ptr, kv_segments_ptr, start_ptr, end_ptr)
    descs = (q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc)
    outs = (dk_desc, dv_desc)
    # The first consumer has what the others leave of 512 registers, 192.
    gl.warp_specialize([
        (_consumer, (board, buffers, dss, (dks, dvs), barriers, outs, pointers, tiles_ptr, extents, 0, sizes, flags)),
        (_consumer, (board, buffers, dss, (dks, dvs), barriers, outs, pointers, tiles_ptr, extents, 1, sizes, flags)),
        (_query_gradients, (board, ks, dss, sums, exchange, tiles_ptr, extents, sizes, flags)),
        (_loader, (board, buffers, loads, descs, turns_ptr, tiles_ptr, extents, sizes, flags)),
        (_writer, (board, sums, dq_desc, turns_ptr + 1, order_ptr, tiles_ptr, extents, 0, sizes, flags)),
        (_writer, (board, sums, dq_desc, turns_ptr + 1, order_ptr, tiles_ptr, extents, 1, sizes, flags)),
        (_writer, (board, sums, dq_desc, turns_ptr + 1, order_ptr, tiles_ptr, extents, 2, sizes, flags)),
    ], [4, 4, 1, 1, 1, 1], [200, 96, 24, 24, 24, 24])
