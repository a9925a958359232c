"""Hopper's backward kernel for head dims above 128, as `backward_kernel.py`'s but for what its consumers share: a tile has 64 keys, and each of them
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

from .backward_parts import (
    _announce,
    _bounds,
    _hand_over,
    _hidden,
    _loader,
    _meet,
    _place,
    _return_keys,
    _told,
    _writer,
    CONSUMERS,
    WRITERS,
)
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
    return warpgroup_mma_wait(0, deps=[warpgroup_mma(_half(rows, 1), _half(columns, 1).permute((1, 0)), acc, is_async=True)])


@gluon.jit
def _half(tiles, at):
    return tiles.index(at).reshape([SIZE, HALF])


@gluon.jit
def _consumer(board, buffers, ps, dss, sums, barriers, out_descs, pointers, tiles_ptr, extents, W: gl.constexpr, sizes: gl.constexpr,
              flags: gl.constexpr):
    """Sums channels `128 W` to `128 W + 127` of `dk` and `dv`, and computes those of every `dq`."""
    ks, vs, qs, dos, lses, deltas = buffers
    kv_full, kv_empty, q_full, q_empty, do_full, do_empty = barriers
    S = extents[2]
    G: gl.constexpr = sizes[0] // sizes[1]
    SCALE: gl.constexpr = flags[0]
    MULTIPLIER: gl.constexpr = flags[1]
    HIDES: gl.constexpr = flags[2] >= 0 or flags[3] >= 0 or flags[4] or flags[5] or not flags[6]
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    of_queries: gl.constexpr = gl.SliceLayout(0, scores_layout)
    dtype: gl.constexpr = ks.dtype
    k = _half(ks, W)
    done = 0  # steps of earlier tiles
    r = 0
    t = _told(board, r, 4)
    while t >= 0:
        n, b, g, lo, full_lo, full_hi, hi = _bounds(t, extents, tiles_ptr, sizes, flags)
        past = n * SIZE + SIZE > S  # some keys are past the end, where they are 0
        steps = (hi - lo) * G
        dk = gl.zeros([SIZE, HALF], gl.float32, layout)
        dv = gl.zeros([SIZE, HALF], gl.float32, layout)
        mbarrier.wait(kv_full.index(0), r & 1)
        for e in range(steps):
            s = done + e
            _, m = _place(e, hi, G)
            if W == 0:
                mbarrier.wait(q_full.index(0), s & 1)
                qk = _products(ks, qs)
                if HIDES:
                    if (m < full_lo) | (m >= full_hi) | past:
                        qk = _hidden(qk, n * SIZE, m * SIZE, b, extents, pointers, flags, float("-inf"))
                lse = lses.index(0).reshape([SIZE]).load(of_queries)  # [64]
                weights = gl.exp2(qk * MULTIPLIER - gl.expand_dims(lse, 0)).to(dtype)  # [64, 64]
                ps.index(s & 1).store(weights)
                fence_async_shared()
                _meet()
                mbarrier.wait(do_full.index(0), s & 1)
                dv = warpgroup_mma(gl.convert_layout(weights, weights_layout), _half(dos, 0), dv, is_async=True)
                _meet()
                dk = warpgroup_mma(dss.index(s & 1), _half(qs, 0), dk, is_async=True)
            else:
                mbarrier.wait(do_full.index(0), s & 1)
                dp = _products(vs, dos)
                delta = deltas.index(0).reshape([SIZE]).load(of_queries)  # [64]
                dp = dp - gl.expand_dims(delta, 0)
                _meet()
                dv = warpgroup_mma(ps.index(s & 1), _half(dos, 1), dv, is_async=True)
                ds = (ps.index(s & 1).load(scores_layout).to(gl.float32) * dp).to(dtype)  # [64, 64]
                dss.index(s & 1).store(ds)
                fence_async_shared()
                _meet()
                mbarrier.wait(q_full.index(0), s & 1)
                dk = warpgroup_mma(gl.convert_layout(ds, weights_layout), _half(qs, 1), dk, is_async=True)
            dq = warpgroup_mma(dss.index(s & 1).permute((1, 0)), k, gl.zeros([SIZE, HALF], gl.float32, layout), use_acc=False, is_async=True)
            dv = warpgroup_mma_wait(2, deps=[dv])
            mbarrier.arrive(do_empty.index(0), count=1)
            dk = warpgroup_mma_wait(1, deps=[dk])
            mbarrier.arrive(q_empty.index(0), count=1)
            dq = warpgroup_mma_wait(0, deps=[dq])
            _hand_over(dq, sums, s, W, sizes)
            fence_async_shared()
            _announce(sums, s, W, sizes)
        _return_keys((dk * SCALE).to(dtype), dv.to(dtype), ks, vs, out_descs, kv_empty, [b, g, n * SIZE, W * HALF], W, HALF)
        done += steps
        r += 1
        t = _told(board, r, 4)


@gluon.jit
def hopper_wide_backward_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr,
    q_segments_ptr, kv_segments_ptr, start_ptr, end_ptr,
    tiles_ptr, order_ptr, no_turns_ptr,
    B, T, S, terms, offset,
    turns_ptr, dq_ptr, dk_ptr, dv_ptr,
    H: gl.constexpr, K: gl.constexpr, D: gl.constexpr, V: gl.constexpr, BLOCK_D: gl.constexpr,
    BLOCK_Q: gl.constexpr, NUM_STAGES: gl.constexpr, SCALE: gl.constexpr, MULTIPLIER: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
    ROWS: gl.constexpr, SEGMENTS: gl.constexpr, EVEN_K: gl.constexpr, GROUP: gl.constexpr,
):
    # As `hopper_backward_kernel`, for tiles of 64 and 256 channels in one stage.
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    sizes: gl.constexpr = (H, K, BLOCK_D, SIZE, SIZE, NUM_STAGES, GROUP, CONSUMERS, CONSUMERS, NUM_STAGES, HALF, 1, WRITERS)
    flags: gl.constexpr = (SCALE, MULTIPLIER, LEFT, RIGHT, ROWS, SEGMENTS, EVEN_K)
    extents = (B, T, S, offset)
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
    dqs = _tiles_of(gl.float32, CONSUMERS, SIZE, HALF)
    terms_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    lse_desc = tma.make_tensor_descriptor(lse_ptr, [B * H, terms], [terms, 1], [1, SIZE], terms_layout)
    delta_desc = tma.make_tensor_descriptor(delta_ptr, [B * H, terms], [terms, 1], [1, SIZE], terms_layout)
    lses = gl.allocate_shared_memory(gl.float32, [1, 1, SIZE], terms_layout)
    deltas = gl.allocate_shared_memory(gl.float32, [1, 1, SIZE], terms_layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SIZE, SIZE], dtype)
    ps = gl.allocate_shared_memory(dtype, [2, SIZE, SIZE], ds_layout)
    dss = gl.allocate_shared_memory(dtype, [2, SIZE, SIZE], ds_layout)
    told = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    told_full, told_empty = _barriers_of(2, WRITERS)
    kv_full, kv_empty = _barriers_of(1, CONSUMERS)
    q_full, q_empty = _barriers_of(1, CONSUMERS)
    do_full, do_empty = _barriers_of(1, CONSUMERS)
    dq_full, dq_empty = _barriers_of(WRITERS * CONSUMERS, 1)
    board = (told, told_full, told_empty)
    buffers = (ks, vs, qs, dos, lses, deltas)
    sums = (dqs, dq_full, dq_empty)
    barriers = (kv_full, kv_empty, q_full, q_empty, do_full, do_empty)
    pointers = (q_segments_ptr, kv_segments_ptr, start_ptr, end_ptr)
    gl.warp_specialize([
        (_consumer, (board, buffers, ps, dss, sums, barriers, (dk_desc, dv_desc), pointers, tiles_ptr, extents, 0, sizes, flags)),
        (_consumer, (board, buffers, ps, dss, sums, barriers, (dk_desc, dv_desc), pointers, tiles_ptr, extents, 1, sizes, flags)),
        (_loader, (board, buffers, barriers, (q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc), turns_ptr, tiles_ptr, extents, sizes, flags)),
        (_writer, (board, sums, dq_desc, turns_ptr + 1, order_ptr, tiles_ptr, extents, 0, sizes, flags)),
        (_writer, (board, sums, dq_desc, turns_ptr + 1, order_ptr, tiles_ptr, extents, 1, sizes, flags)),
    ], [4, 1, 1, 1], [240, 24, 24, 24])
