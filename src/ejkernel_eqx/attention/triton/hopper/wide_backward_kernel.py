"""Hopper's backward kernel for head dims above 128, as `backward_kernel.py`'s but for what its consumers share: a program has 64 keys, and each of them
half of the channels of `dk`, `dv` and `dq`. One computes the scores and from them the weights, the other one the gradients of the weights and from
them those of the scores; they exchange both through shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..tile import program, query_tiles
from .backward_kernel import _add, _await_turn, _end_turn, _hidden, _meet, _place
from .forward_kernel import _barriers_of, _described, _tiles_of

SIZE = gl.constexpr(64)
"""Queries and keys of a tile."""
HALF = gl.constexpr(128)
"""Channels of a consumer."""


# fmt: off
@gluon.jit
def _products(rows, columns):
    """Of 64 keys and queries, or values and cotangents, `[64, 64]`, both in two halves."""
    acc = gl.zeros([SIZE, SIZE], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16]))
    acc = warpgroup_mma(_half(rows, 0), _half(columns, 0).permute((1, 0)), acc, use_acc=False, is_async=True)
    acc = warpgroup_mma(_half(rows, 1), _half(columns, 1).permute((1, 0)), acc, is_async=True)
    return warpgroup_mma_wait(0, deps=[acc])


@gluon.jit
def _half(tiles, PART: gl.constexpr):
    return tiles.index(PART).reshape([SIZE, HALF])


@gluon.jit
def _consumer(buffers, barriers, out_descs, pointers, bounds, W: gl.constexpr, sizes: gl.constexpr, flags: gl.constexpr):
    """Sums channels `128 W` to `128 W + 127` of `dk` and `dv`, and computes those of every `dq`."""
    ks, vs, qs, dos, lses, deltas, ps, dss, dqs = buffers
    kv_full, q_full, do_full, q_empty, do_empty, dq_full, dq_empty = barriers
    dk_desc, dv_desc = out_descs
    q_segments_ptr, kv_segments_ptr, start_ptr, end_ptr = pointers
    n, b, g, lo, full_lo, full_hi, hi, T, S, offset = bounds
    G: gl.constexpr = sizes[0] // sizes[1]
    SCALE: gl.constexpr = flags[0]
    MULTIPLIER: gl.constexpr = flags[1]
    LEFT: gl.constexpr = flags[2]
    RIGHT: gl.constexpr = flags[3]
    ROWS: gl.constexpr = flags[4]
    SEGMENTS: gl.constexpr = flags[5]
    EVEN_K: gl.constexpr = flags[6]
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    of_queries: gl.constexpr = gl.SliceLayout(0, scores_layout)
    dtype: gl.constexpr = ks.dtype
    dk = gl.zeros([SIZE, HALF], gl.float32, layout)
    dv = gl.zeros([SIZE, HALF], gl.float32, layout)
    span = hi - lo
    past = n * SIZE + SIZE > S  # some keys are past the end, where they are 0
    mbarrier.wait(kv_full.index(0), 0)
    for e in range(span * G):
        _, m = _place(e, span, hi, G)
        if W == 0:
            mbarrier.wait(q_full.index(0), e & 1)
            qk = _products(ks, qs)
            if ROWS or SEGMENTS or LEFT >= 0 or RIGHT >= 0 or not EVEN_K:
                if (m < full_lo) | (m >= full_hi) | past:
                    qk = _hidden(qk, n * SIZE, m * SIZE, b, T, S, offset, q_segments_ptr, kv_segments_ptr, start_ptr, end_ptr, LEFT, RIGHT, ROWS,
                                 SEGMENTS, EVEN_K)
            lse = lses.index(0).reshape([SIZE]).load(of_queries)  # [64]
            weights = gl.exp2(qk * MULTIPLIER - gl.expand_dims(lse, 0)).to(dtype)  # [64, 64]
            ps.index(e & 1).store(weights)
            fence_async_shared()
            _meet()
            mbarrier.wait(do_full.index(0), e & 1)
            dv = warpgroup_mma(gl.convert_layout(weights, weights_layout), _half(dos, 0), dv, is_async=True)
            _meet()
            dk = warpgroup_mma(dss.index(e & 1), _half(qs, 0), dk, is_async=True)
        else:
            mbarrier.wait(do_full.index(0), e & 1)
            dp = _products(vs, dos)
            delta = deltas.index(0).reshape([SIZE]).load(of_queries)  # [64]
            dp = dp - gl.expand_dims(delta, 0)
            _meet()
            dv = warpgroup_mma(ps.index(e & 1), _half(dos, 1), dv, is_async=True)
            ds = (ps.index(e & 1).load(scores_layout).to(gl.float32) * dp).to(dtype)  # [64, 64]
            dss.index(e & 1).store(ds)
            fence_async_shared()
            _meet()
            mbarrier.wait(q_full.index(0), e & 1)
            dk = warpgroup_mma(gl.convert_layout(ds, weights_layout), _half(qs, 1), dk, is_async=True)
        dq = warpgroup_mma(dss.index(e & 1).permute((1, 0)), _half(ks, W), gl.zeros([SIZE, HALF], gl.float32, layout), use_acc=False, is_async=True)
        dk, dv = warpgroup_mma_wait(1, deps=[dk, dv])
        mbarrier.arrive(q_empty.index(0), count=1)
        mbarrier.arrive(do_empty.index(0), count=1)
        dq = warpgroup_mma_wait(0, deps=[dq])
        mbarrier.wait(dq_empty.index(W), (e & 1) ^ 1)
        _half(dqs, W).store(dq)
        fence_async_shared()
        mbarrier.arrive(dq_full.index(W), count=1)
    # The gradients take the place of keys and values, which the other consumer has read, too.
    _meet()
    _half(ks, W).store((dk * SCALE).to(dtype))
    _half(vs, W).store(dv.to(dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dk_desc, [b, g, n * SIZE, W * HALF], ks.index(W))
    tma.async_copy_shared_to_global(dv_desc, [b, g, n * SIZE, W * HALF], vs.index(W))
    tma.store_wait(0)


@gluon.jit
def _writer(dqs, dq_full, dq_empty, dq_desc, turns_ptr, order_ptr, bounds, W: gl.constexpr, sizes: gl.constexpr, flags: gl.constexpr):
    """Adds a consumer's half of every `dq`, when all tiles of keys before this one have added theirs."""
    n, b, g, lo, _, _, hi, T, S, offset = bounds
    H: gl.constexpr = sizes[0]
    LEFT: gl.constexpr = flags[2]
    TABLE: gl.constexpr = flags[4] or flags[5]
    G: gl.constexpr = H // sizes[1]
    span = hi - lo
    tiles = (T + SIZE - 1) // SIZE
    for e in range(span * G):
        head, m = _place(e, span, hi, G)
        h = g * G + head
        turn = n
        if TABLE:
            turn = gl.load(order_ptr + (b * ((S + SIZE - 1) // SIZE) + n) * tiles + m)
        elif LEFT >= 0:  # the tiles that are too far before the queries do not count
            turn = n - gl.maximum(m * SIZE + (offset - LEFT), 0) // SIZE
        turn_ptr = turns_ptr + ((b * H + h) * tiles + m) * 2 + W
        _await_turn(turn_ptr, turn)
        mbarrier.wait(dq_full.index(W), e & 1)
        if turn == 0:
            tma.async_copy_shared_to_global(dq_desc, [b, h, m * SIZE, W * HALF], dqs.index(W))
        else:
            _add(dq_desc, [b, h, m * SIZE, W * HALF], dqs.index(W))
        tma.store_wait(0)
        mbarrier.arrive(dq_empty.index(W), count=1)
        _end_turn(turn_ptr, turn)


@gluon.jit
def _loader(buffers, barriers, descs, bounds, sizes: gl.constexpr):
    """Loads the keys and values once, and the queries and their cotangents as soon as the ones before have been read."""
    ks, vs, qs, dos, lses, deltas, _, _, _ = buffers
    kv_full, q_full, do_full, q_empty, do_empty, _, _ = barriers
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc = descs
    n, b, g, lo, _, _, hi, _, _, _ = bounds
    H: gl.constexpr = sizes[0]
    G: gl.constexpr = H // sizes[1]
    mbarrier.expect(kv_full.index(0), 4 * SIZE * HALF * 2)
    for part in gl.static_range(2):
        tma.async_copy_global_to_shared(k_desc, [b, g, n * SIZE, part * HALF], kv_full.index(0), ks.index(part))
        tma.async_copy_global_to_shared(v_desc, [b, g, n * SIZE, part * HALF], kv_full.index(0), vs.index(part))
    span = hi - lo
    for e in range(span * G):
        head, m = _place(e, span, hi, G)
        h = g * G + head
        mbarrier.wait(q_empty.index(0), (e & 1) ^ 1)
        mbarrier.expect(q_full.index(0), SIZE * (2 * HALF * 2 + 4))
        for part in gl.static_range(2):
            tma.async_copy_global_to_shared(q_desc, [b, h, m * SIZE, part * HALF], q_full.index(0), qs.index(part))
        tma.async_copy_global_to_shared(lse_desc, [b * H + h, m * SIZE], q_full.index(0), lses.index(0))
        mbarrier.wait(do_empty.index(0), (e & 1) ^ 1)
        mbarrier.expect(do_full.index(0), SIZE * (2 * HALF * 2 + 4))
        for part in gl.static_range(2):
            tma.async_copy_global_to_shared(do_desc, [b, h, m * SIZE, part * HALF], do_full.index(0), dos.index(part))
        tma.async_copy_global_to_shared(delta_desc, [b * H + h, m * SIZE], do_full.index(0), deltas.index(0))


@gluon.jit
def hopper_wide_backward_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr,
    q_segments_ptr, kv_segments_ptr, start_ptr, end_ptr,
    tiles_ptr, order_ptr, no_turns_ptr,
    B, T, S, terms, offset,
    turns_ptr, dq_ptr, dk_ptr, dv_ptr,  # turns [B, H, tiles of queries, 2]
    H: gl.constexpr, K: gl.constexpr, D: gl.constexpr, V: gl.constexpr, BLOCK_D: gl.constexpr,
    BLOCK_Q: gl.constexpr, NUM_STAGES: gl.constexpr, SCALE: gl.constexpr, MULTIPLIER: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
    ROWS: gl.constexpr, SEGMENTS: gl.constexpr, EVEN_K: gl.constexpr, GROUP: gl.constexpr,
):
    # As `hopper_backward_kernel`, for tiles of 64 and 256 channels in one stage; each half of `dq` has turns of its own.
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    sizes: gl.constexpr = (H, K)
    flags: gl.constexpr = (SCALE, MULTIPLIER, LEFT, RIGHT, ROWS, SEGMENTS, EVEN_K)
    n, bg, _ = program(S, SIZE, GROUP)
    b = bg // K
    g = bg % K
    lo, full_lo, full_hi, hi = query_tiles(tiles_ptr, b, n, offset, T, S, SIZE, SIZE, LEFT, RIGHT, ROWS or SEGMENTS, False)
    bounds = (n, b, g, lo, full_lo, full_hi, hi, T, S, offset)
    q_desc = _described(q_ptr, B, T, H, D, SIZE, HALF)
    do_desc = _described(do_ptr, B, T, H, V, SIZE, HALF)
    k_desc = _described(k_ptr, B, S, K, D, SIZE, HALF)
    v_desc = _described(v_ptr, B, S, K, V, SIZE, HALF)
    dk_desc = _described(dk_ptr, B, S, K, D, SIZE, HALF)
    dv_desc = _described(dv_ptr, B, S, K, V, SIZE, HALF)
    dq_desc = _described(dq_ptr, B, T, H, D, SIZE, HALF)
    ks = _tiles_of(dtype, 2, SIZE, HALF)
    vs = _tiles_of(dtype, 2, SIZE, HALF)
    qs = _tiles_of(dtype, 2, SIZE, HALF)
    dos = _tiles_of(dtype, 2, SIZE, HALF)
    dqs = _tiles_of(gl.float32, 2, SIZE, HALF)
    terms_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    lse_desc = tma.make_tensor_descriptor(lse_ptr, [B * H, terms], [terms, 1], [1, SIZE], terms_layout)
    delta_desc = tma.make_tensor_descriptor(delta_ptr, [B * H, terms], [terms, 1], [1, SIZE], terms_layout)
    lses = gl.allocate_shared_memory(gl.float32, [1, 1, SIZE], terms_layout)
    deltas = gl.allocate_shared_memory(gl.float32, [1, 1, SIZE], terms_layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SIZE, SIZE], dtype)
    ps = gl.allocate_shared_memory(dtype, [2, SIZE, SIZE], ds_layout)
    dss = gl.allocate_shared_memory(dtype, [2, SIZE, SIZE], ds_layout)
    kv_full, _ = _barriers_of(1, 1)
    q_full, q_empty = _barriers_of(1, 2)
    do_full, do_empty = _barriers_of(1, 2)
    dq_full, dq_empty = _barriers_of(2, 1)
    buffers = (ks, vs, qs, dos, lses, deltas, ps, dss, dqs)
    barriers = (kv_full, q_full, do_full, q_empty, do_empty, dq_full, dq_empty)
    pointers = (q_segments_ptr, kv_segments_ptr, start_ptr, end_ptr)
    gl.warp_specialize([
        (_consumer, (buffers, barriers, (dk_desc, dv_desc), pointers, bounds, 0, sizes, flags)),
        (_consumer, (buffers, barriers, (dk_desc, dv_desc), pointers, bounds, 1, sizes, flags)),
        (_loader, (buffers, barriers, (q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc), bounds, sizes)),
        (_writer, (dqs, dq_full, dq_empty, dq_desc, turns_ptr, order_ptr, bounds, 0, sizes, flags)),
        (_writer, (dqs, dq_full, dq_empty, dq_desc, turns_ptr, order_ptr, bounds, 1, sizes, flags)),
    ], [4, 1, 1, 1], [240, 24, 24, 24])
