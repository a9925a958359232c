"""The groups of warps of Hopper's backward kernel for head dims up to 64, as those of `backward_kernel.py` but for who computes `dq`: a third
group of four warps, from what both consumers leave of the scores' gradients. So these never wait for one another, and one multiplies while the
other computes weights.

Shared memory is what such narrow products are short of: 64 rows by 64 columns read as much of it as they have time for. So keys and values, which a
tile keeps, are operands in registers for the consumers, and `dq` is computed transposed, which is stored without conflicts."""

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

from ..tile import query_tiles
from .backward_parts import (
    _key_tile,
    _next_tile,
    _score_gradients,
    _step,
    _store_dq,
    _weights,
    CONSUMERS,
)

SIZE = gl.constexpr(64)
"""Queries of a tile, and keys of a consumer."""
SCORE_SLOTS = gl.constexpr(2)
"""Steps whose score gradients may wait for the group that computes `dq`."""
# Score gradients of consumers, [SCORE_SLOTS * CONSUMERS, 64, 64], on their way to the group that computes `dq`.
DsBuffers = namedtuple("DsBuffers", "tiles full empty")
# Tiles of `dk` and `dv`, one for each consumer, and their descriptors.
Outputs = namedtuple("Outputs", "dk dv descs")


# fmt: off
@gluon.jit
def _scores(rows, columns, D: gl.constexpr):
    """The product of 64 keys (or values) in registers by the queries (or cotangents) of a stage, `[64, 64]`; not awaited."""
    zero = gl.zeros([SIZE, SIZE], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16]))
    return warpgroup_mma(rows, columns.reshape([SIZE, D]).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _store_ds(ds, s, buffers, W: gl.constexpr):
    """Leaves a consumer's score gradients `[64, 64]` of step `s` to the group that computes `dq`."""
    slot = s % SCORE_SLOTS
    mbarrier.wait(buffers.empty.index(slot), ((s // SCORE_SLOTS) & 1) ^ 1)
    buffers.tiles.index(slot * CONSUMERS + W).store(ds)
    fence_async_shared()
    mbarrier.arrive(buffers.full.index(slot), count=1)


@gluon.jit
def _skip_step(s, ds_buffers, full, empty, W: gl.constexpr, NUM_STAGES: gl.constexpr):
    """A step whose queries see keys of the other consumer alone."""
    mbarrier.wait(full.index(s % NUM_STAGES), (s // NUM_STAGES) & 1)
    mbarrier.arrive(empty.index(s % NUM_STAGES), count=1)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    _store_ds(gl.zeros([SIZE, SIZE], ds_buffers.tiles.dtype, layout), s, ds_buffers, W)


@gluon.jit
def _consumer(queue, buffers, ds_buffers, outputs, barriers, row_arrays, tiles, lengths, W: gl.constexpr, sizes: gl.constexpr, scoring: gl.constexpr,
              masking: gl.constexpr):
    """Sums `dk` and `dv` of keys `64 W` to `64 W + 63` of every tile."""
    D: gl.constexpr = sizes.D
    NUM_STAGES: gl.constexpr = sizes.NUM_STAGES
    G: gl.constexpr = sizes.H // sizes.K
    ks, vs, qs, dos, lses, deltas, _k_ropes, _q_ropes = buffers
    kv_full, kv_empty, full, empty = barriers.kv_full, barriers.kv_empty, barriers.q_full, barriers.q_empty
    dk_desc, dv_desc = outputs.descs
    _, T, S, offset = lengths
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    keys_layout: gl.constexpr = gl.DotOperandLayout(0, scores_layout, 2)
    dtype: gl.constexpr = ks.dtype
    done = 0  # steps of earlier tiles
    r = 0
    t = _next_tile(queue, r, 4)
    while t >= 0:
        n, b, g, lo, full_lo, full_hi, hi = _key_tile(t, tiles, lengths, sizes, masking)
        first_key = n * sizes.BLOCK_K + W * SIZE
        past = first_key + SIZE > S  # some keys are past the end, where they are 0
        steps = (hi - lo) * G
        first, last = 0, steps
        if not masking.TABLE:  # the queries that see these keys, of those that see any of the tile
            begin, full_lo, full_hi, end = query_tiles(tiles.bounds, b, n * CONSUMERS + W, offset, T, S, SIZE, SIZE, masking.LEFT, masking.RIGHT, False, False)
            first, last = (hi - end) * G, (hi - begin) * G
        for e in range(0, first):
            _skip_step(done + e, ds_buffers, full, empty, W, NUM_STAGES)
        dk = gl.zeros([SIZE, D], gl.float32, layout)  # [64, D]
        dv = gl.zeros([SIZE, D], gl.float32, layout)  # [64, D]
        # Keys and values stay in registers for all steps.
        slot = r % sizes.KEY_SLOTS
        mbarrier.wait(kv_full.index(slot), (r // sizes.KEY_SLOTS) & 1)
        k = ks.index(slot * CONSUMERS + W).reshape([SIZE, D]).load(keys_layout)  # [64, D]
        v = vs.index(slot * CONSUMERS + W).reshape([SIZE, D]).load(keys_layout)  # [64, D]
        for e in range(first, last):
            s = done + e
            at = s % NUM_STAGES
            _, m = _step(e, hi, G)
            mbarrier.wait(full.index(at), (s // NUM_STAGES) & 1)
            qk = _scores(k, qs.index(at), D)
            dp = _scores(v, dos.index(at), D)
            # dv = p^T do: the weights, under the product by the cotangents.
            qk = warpgroup_mma_wait(1, deps=[qk])  # [64, 64]
            p = _weights(qk, lses, at, first_key, m, (m < full_lo) | (m >= full_hi) | past, b, lengths, row_arrays, scoring, masking)
            weights = gl.convert_layout(p.to(dtype), weights_layout)
            dv = warpgroup_mma(weights, dos.index(at).reshape([SIZE, D]), dv, is_async=True)
            # dk = ds^T q: the score gradients, under the product by the weights; `dq` is left to the third group.
            dp = warpgroup_mma_wait(1, deps=[dp])  # [64, 64]
            ds = _score_gradients(p, dp, lses, deltas, at, scoring).to(dtype)  # [64, 64]
            dk = warpgroup_mma(gl.convert_layout(ds, weights_layout), qs.index(at).reshape([SIZE, D]), dk, is_async=True)
            _store_ds(ds, s, ds_buffers, W)
            dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
            mbarrier.arrive(empty.index(at), count=1)
        for e in range(last, steps):
            _skip_step(done + e, ds_buffers, full, empty, W, NUM_STAGES)
        mbarrier.arrive(kv_empty.index(slot), count=1)
        # The gradients are stored while the next tile runs.
        tma.store_wait(0)  # of the last tile's
        outputs.dv.index(W).reshape([SIZE, D]).store(dv.to(dtype))
        outputs.dk.index(W).reshape([SIZE, D]).store((dk * scoring.SCALE).to(dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(dv_desc, [b, g, first_key, 0], outputs.dv.index(W))
        tma.async_copy_shared_to_global(dk_desc, [b, g, first_key, 0], outputs.dk.index(W))
        done += steps
        r += 1
        t = _next_tile(queue, r, 4)
    tma.store_wait(0)


@gluon.jit
def _query_gradients(queue, ks, ds_buffers, dq_buffers, barriers, tiles, lengths, sizes: gl.constexpr, masking: gl.constexpr):
    """Computes every `dq`, transposed."""
    D: gl.constexpr = sizes.D
    G: gl.constexpr = sizes.H // sizes.K
    kv_full, kv_empty = barriers.kv_full, barriers.kv_empty
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    done = 0  # steps of earlier tiles
    r = 0
    t = _next_tile(queue, r, 4)
    while t >= 0:
        _, _, _, lo, _, _, hi = _key_tile(t, tiles, lengths, sizes, masking)
        steps = (hi - lo) * G
        slot = r % sizes.KEY_SLOTS
        mbarrier.wait(kv_full.index(slot), (r // sizes.KEY_SLOTS) & 1)
        first = ks.index(slot * CONSUMERS).reshape([SIZE, D]).permute((1, 0))  # [D, 64]
        second = ks.index(slot * CONSUMERS + 1).reshape([SIZE, D]).permute((1, 0))  # [D, 64]
        for e in range(steps):
            s = done + e
            at = s % SCORE_SLOTS
            mbarrier.wait(ds_buffers.full.index(at), (s // SCORE_SLOTS) & 1)
            # The keys of both consumers.
            dq = gl.zeros([D, SIZE], gl.float32, layout)  # [D, 64]
            dq = warpgroup_mma(first, ds_buffers.tiles.index(at * CONSUMERS), dq, use_acc=False, is_async=True)
            dq = warpgroup_mma(second, ds_buffers.tiles.index(at * CONSUMERS + 1), dq, is_async=True)
            dq = warpgroup_mma_wait(0, deps=[dq])
            mbarrier.arrive(ds_buffers.empty.index(at), count=1)
            _store_dq(dq, dq_buffers, s, 0, sizes, TRANSPOSED=True)
        mbarrier.arrive(kv_empty.index(slot), count=1)
        done += steps
        r += 1
        t = _next_tile(queue, r, 4)
