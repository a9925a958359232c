"""The consumers of Hopper's backward kernel for keys in two parts, of 128 and 64 channels, as those of `backward_kernel.py` but for what registers
hold: the sums of `dk` in both parts and `dv` take 160 of 240. So a tile's scores become 16-bit weights before their gradients are multiplied, of which
shared memory has one place."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .backward_parts import (
    _await_box,
    _hidden,
    _key_tile,
    _next_tile,
    _step,
    _store_key_gradients,
    HALF_ROPE,
)
from .work_queue import _arrive_named, _await_named, _sync_consumers, _zero

SIZE = gl.constexpr(64)
"""Queries of a tile, and keys of a consumer."""


# fmt: off
@gluon.jit
def _rope(tiles, at):
    return tiles.index(at).reshape([SIZE, HALF_ROPE])


@gluon.jit
def _less(terms, FACTOR: gl.constexpr):
    """What a product `[64, 64]` by a tile of queries begins with: minus a term of each."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    term = terms.reshape([SIZE]).load(gl.SliceLayout(0, layout))  # [64]
    return gl.zeros([SIZE, SIZE], gl.float32, layout) - gl.expand_dims(term * FACTOR, 0)


@gluon.jit
def _consumer(queue, buffers, dss, dq_buffers, barriers, out_descs, dk_rope_ptr, row_arrays, tiles, lengths, W: gl.constexpr, sizes: gl.constexpr,
              scoring: gl.constexpr, masking: gl.constexpr):
    """Sums `dk` and `dv` of keys `64 W` to `64 W + 63` of every tile, and computes its half of both parts of every `dq`."""
    D: gl.constexpr = sizes.D
    NUM_STAGES: gl.constexpr = sizes.NUM_STAGES
    G: gl.constexpr = sizes.H // sizes.K
    ks, vs, qs, dos, lses, deltas, k_ropes, q_ropes = buffers
    kv_full, kv_empty, q_full, q_empty, do_full, do_empty = barriers
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    rope_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF_ROPE, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    # Channels between keys in the gradient of their second part.
    ROW: gl.constexpr = sizes.R if sizes.SHARED else sizes.K * sizes.HEAD
    dtype: gl.constexpr = ks.dtype
    # The other consumer may store its first score gradients.
    _arrive_named(2 - W)
    done = 0  # steps of earlier tiles
    r = 0
    t = _next_tile(queue, r, 4)
    while t >= 0:
        n, b, g, lo, full_lo, full_hi, hi = _key_tile(t, tiles, lengths, sizes, masking)
        first_key = n * sizes.BLOCK_K + W * SIZE
        past = first_key + SIZE > lengths.S  # some keys are past the end, where they are 0
        steps = (hi - lo) * G
        dk = gl.zeros([SIZE, D], gl.float32, layout)  # [64, D]
        dk_rope_0 = gl.zeros([SIZE, HALF_ROPE], gl.float32, rope_layout)  # [64, 32]
        dk_rope_1 = gl.zeros([SIZE, HALF_ROPE], gl.float32, rope_layout)  # [64, 32]
        dv = gl.zeros([SIZE, D], gl.float32, layout)  # [64, D]
        mbarrier.wait(kv_full.index(0), r & 1)
        for e in range(steps):
            s = done + e
            at = s % NUM_STAGES
            _, m = _step(e, hi, G)
            base = _zero(s)
            k = ks.index(base + W).reshape([SIZE, D])
            v = vs.index(base + W).reshape([SIZE, D])
            q = qs.index(at).reshape([SIZE, D])
            do = dos.index(at).reshape([SIZE, D])
            mbarrier.wait(q_full.index(at), (s // NUM_STAGES) & 1)
            qk = _less(lses.index(at), 1.0 / scoring.MULTIPLIER)
            qk = warpgroup_mma(k, q.permute((1, 0)), qk, is_async=True)
            qk = warpgroup_mma(_rope(k_ropes, base + W * 2), _rope(q_ropes, at * 2).permute((1, 0)), qk, is_async=True)
            qk = warpgroup_mma(_rope(k_ropes, base + W * 2 + 1), _rope(q_ropes, at * 2 + 1).permute((1, 0)), qk, is_async=True)
            qk = warpgroup_mma_wait(0, deps=[qk])  # [64, 64]
            if masking.GUARD:
                if (m < full_lo) | (m >= full_hi) | past:
                    qk = _hidden(qk, first_key, m * SIZE, b, lengths, row_arrays, masking, float("-inf"))
            p = gl.exp2(qk * scoring.MULTIPLIER).to(dtype)  # [64, 64]
            # dv = p^T do, under the score gradients, when the other consumer has multiplied those of the step before.
            _await_named(1 + W)
            dss.index(base + W).store(p)
            fence_async_shared()
            mbarrier.wait(do_full.index(at), (s // NUM_STAGES) & 1)
            dp = _less(deltas.index(at), 1.0)
            dp = warpgroup_mma(v, do.permute((1, 0)), dp, is_async=True)
            dv = warpgroup_mma(dss.index(base + W), do, dv, is_async=True)
            dp = warpgroup_mma_wait(1, deps=[dp])  # [64, 64]
            p = dss.index(base + W).load(scores_layout)
            ds = (p.to(gl.float32) * dp).to(dtype)  # [64, 64]
            dv = warpgroup_mma_wait(0, deps=[dv])
            dss.index(base + W).store(ds)
            fence_async_shared()
            # dk = ds^T q, and dq = ds k when both consumers' score gradients are there.
            weights = gl.convert_layout(ds, weights_layout)
            dk = warpgroup_mma(weights, q, dk, is_async=True)
            dk_rope_0 = warpgroup_mma(weights, _rope(q_ropes, at * 2), dk_rope_0, is_async=True)
            dk_rope_1 = warpgroup_mma(weights, _rope(q_ropes, at * 2 + 1), dk_rope_1, is_async=True)
            _sync_consumers()
            first, second = dss.index(base).permute((1, 0)), dss.index(base + 1).permute((1, 0))
            dq = gl.zeros([SIZE, 64], gl.float32, scores_layout)
            dq = warpgroup_mma(first, ks.index(base).reshape([SIZE, D]).slice(W * 64, 64, dim=1), dq, use_acc=False, is_async=True)
            dq = warpgroup_mma(second, ks.index(base + 1).reshape([SIZE, D]).slice(W * 64, 64, dim=1), dq, is_async=True)
            dk, dk_rope_0, dk_rope_1 = warpgroup_mma_wait(2, deps=[dk, dk_rope_0, dk_rope_1])
            mbarrier.arrive(q_empty.index(at), count=1)
            mbarrier.arrive(do_empty.index(at), count=1)
            dq = warpgroup_mma_wait(0, deps=[dq])  # [64, 64]
            dq_rope = gl.zeros([SIZE, HALF_ROPE], gl.float32, rope_layout)
            dq_rope = warpgroup_mma(first, _rope(k_ropes, base + W), dq_rope, use_acc=False, is_async=True)
            dq_rope = warpgroup_mma(second, _rope(k_ropes, base + 2 + W), dq_rope, is_async=True)
            full = _await_box(dq_buffers, s, W, sizes)
            dq_buffers.boxes.index(W).reshape([SIZE, 64]).store(dq)
            dq_rope = warpgroup_mma_wait(0, deps=[dq_rope])  # [64, 32]
            _arrive_named(2 - W)
            dq_buffers.ropes.index(W).reshape([SIZE, HALF_ROPE]).store(dq_rope)
            fence_async_shared()
            mbarrier.arrive(full, count=1)
        keys = first_key + gl.arange(0, SIZE, gl.SliceLayout(1, rope_layout))  # [64]
        channels = gl.arange(0, HALF_ROPE, gl.SliceLayout(0, rope_layout))  # [32]
        row = gl.to_tensor(b).to(gl.int64)
        head_ptr = dk_rope_ptr + ((row * sizes.K + g) * lengths.S * sizes.R if sizes.SHARED else (row * lengths.S * sizes.K + g) * sizes.HEAD)
        for part in gl.static_range(2):
            place = gl.expand_dims(keys.to(gl.int64) * ROW, 1) + gl.expand_dims(channels + part * HALF_ROPE, 0)
            here = gl.expand_dims(keys < lengths.S, 1) & gl.expand_dims(channels + part * HALF_ROPE < sizes.R, 0)
            gl.store(head_ptr + place, ((dk_rope_0 if part == 0 else dk_rope_1) * scoring.SCALE).to(dk_rope_ptr.dtype.element_ty), mask=here)
        _store_key_gradients((dk * scoring.SCALE).to(dtype), dv.to(dtype), buffers, out_descs, kv_empty, [b, g, first_key, 0], W, D)
        done += steps
        r += 1
        t = _next_tile(queue, r, 4)
