"""The consumers of Hopper's backward kernel for head dims above 128, as those of `backward_kernel.py` but for what they share: a tile has 64
keys, and each consumer half of the channels of `dk`, `dv` and `dq`. One computes the scores and from them the weights, the other one the gradients
of the weights and from them those of the scores; they exchange both through shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .backward_parts import _hidden, _key_tile, _next_tile, _step, _store_dq, _store_key_gradients
from .work_queue import _sync_consumers, _zero

SIZE = gl.constexpr(64)
"""Queries and keys of a tile."""
HALF = gl.constexpr(128)
"""Channels of a consumer."""


# fmt: off
@gluon.jit
def _products(rows, columns, base):
    """The product of 64 keys and queries, or values and cotangents, `[64, 64]`, both in two halves from `base` on."""
    acc = gl.zeros([SIZE, SIZE], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16]))
    acc = warpgroup_mma(_half(rows, base), _half(columns, base).permute((1, 0)), acc, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=[warpgroup_mma(_half(rows, base + 1), _half(columns, base + 1).permute((1, 0)), acc, is_async=True)])


@gluon.jit
def _half(tiles, at):
    return tiles.index(at).reshape([SIZE, HALF])


@gluon.jit
def _consumer(queue, buffers, ps, dss, dq_buffers, barriers, out_descs, row_arrays, tiles, lengths, W: gl.constexpr, sizes: gl.constexpr, scoring: gl.constexpr,
              masking: gl.constexpr):
    """Sums channels `128 W` to `128 W + 127` of `dk` and `dv`, and computes those of every `dq`."""
    G: gl.constexpr = sizes.H // sizes.K
    ks, vs, qs, dos, lses, deltas, _k_ropes, _q_ropes = buffers
    kv_full, kv_empty, q_full, q_empty, do_full, do_empty = barriers
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    of_queries: gl.constexpr = gl.SliceLayout(0, scores_layout)
    dtype: gl.constexpr = ks.dtype
    done = 0  # steps of earlier tiles
    r = 0
    t = _next_tile(queue, r, 4)
    while t >= 0:
        n, b, g, lo, full_lo, full_hi, hi = _key_tile(t, tiles, lengths, sizes, masking)
        past = n * SIZE + SIZE > lengths.S  # some keys are past the end, where they are 0
        steps = (hi - lo) * G
        dk = gl.zeros([SIZE, HALF], gl.float32, layout)  # [64, 128]
        dv = gl.zeros([SIZE, HALF], gl.float32, layout)  # [64, 128]
        mbarrier.wait(kv_full.index(0), r & 1)
        for e in range(steps):
            s = done + e
            _, m = _step(e, hi, G)
            base = _zero(s)
            k = _half(ks, base + W)
            # The first consumer computes the weights, the second one from them the score gradients, each for both.
            if W == 0:
                mbarrier.wait(q_full.index(0), s & 1)
                qk = _products(ks, qs, base)  # [64, 64]
                if masking.GUARD:
                    if (m < full_lo) | (m >= full_hi) | past:
                        qk = _hidden(qk, n * SIZE, m * SIZE, b, lengths, row_arrays, masking, float("-inf"))
                lse = lses.index(0).reshape([SIZE]).load(of_queries)  # [64]
                weights = gl.exp2(qk * scoring.MULTIPLIER - gl.expand_dims(lse, 0)).to(dtype)  # [64, 64]
                # dv = p^T do, when the weights are stored, and dk = ds^T q, when the score gradients are.
                ps.index(s & 1).store(weights)
                fence_async_shared()
                _sync_consumers()
                mbarrier.wait(do_full.index(0), s & 1)
                dv = warpgroup_mma(gl.convert_layout(weights, weights_layout), _half(dos, base), dv, is_async=True)
                _sync_consumers()
                dk = warpgroup_mma(dss.index(s & 1), _half(qs, base), dk, is_async=True)
            else:
                mbarrier.wait(do_full.index(0), s & 1)
                dp = _products(vs, dos, base)  # [64, 64]
                delta = deltas.index(0).reshape([SIZE]).load(of_queries)  # [64]
                dp = dp - gl.expand_dims(delta, 0)
                # The same from the weights of the first consumer: ds = p (dp - delta).
                _sync_consumers()
                dv = warpgroup_mma(ps.index(s & 1), _half(dos, base + 1), dv, is_async=True)
                ds = (ps.index(s & 1).load(scores_layout).to(gl.float32) * dp).to(dtype)  # [64, 64]
                dss.index(s & 1).store(ds)
                fence_async_shared()
                _sync_consumers()
                mbarrier.wait(q_full.index(0), s & 1)
                dk = warpgroup_mma(gl.convert_layout(ds, weights_layout), _half(qs, base + 1), dk, is_async=True)
            # A half of `dq`'s channels, while the other products end.
            dq = warpgroup_mma(dss.index(s & 1).permute((1, 0)), k, gl.zeros([SIZE, HALF], gl.float32, layout), use_acc=False, is_async=True)
            # Stages are given back as soon as their products have ended.
            dv = warpgroup_mma_wait(2, deps=[dv])
            mbarrier.arrive(do_empty.index(0), count=1)
            dk = warpgroup_mma_wait(1, deps=[dk])
            mbarrier.arrive(q_empty.index(0), count=1)
            dq = warpgroup_mma_wait(0, deps=[dq])  # [64, 128]
            _store_dq(dq, dq_buffers, s, W, sizes)
        _store_key_gradients((dk * scoring.SCALE).to(dtype), dv.to(dtype), buffers, out_descs, kv_empty, [b, g, n * SIZE, W * HALF], W, HALF)
        done += steps
        r += 1
        t = _next_tile(queue, r, 4)
