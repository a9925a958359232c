"""Hopper's backward kernel: for every tile of keys, five products for each tile of queries that sees it. The consumers here are those of
head dims from 65 to 128; `narrow_backward_kernel.py` and `wide_backward_kernel.py` have the others.

A program has two groups of four warps, the consumers, each with 64 of a tile's 128 keys, of which it sums `dk` and `dv` in registers. They exchange
their score gradients through shared memory, and each multiplies all 128 by half of the keys' channels: its part of `dq`. Two
warps add those parts in device memory, one the even steps and one the odd ones; and one warp loads."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..tile import CHUNK, GATES
from .backward_parts import (
    _key_gates,
    _key_tile,
    _loader,
    _next_tile,
    _operands,
    _score_gradients,
    _step,
    _store_dq,
    _store_key_gradients,
    _weights,
    _writer,
    Barriers,
    CONSUMERS,
    DqBuffers,
    Gates,
    RowArrays,
    Sizes,
    Tiles,
)
from .forward_kernel import _tiles_of
from .latent_backward_kernel import _consumer as _latent_consumer
from .narrow_backward_kernel import _consumer as _narrow_consumer
from .narrow_backward_kernel import _query_gradients, DsBuffers, Outputs
from .scores import _own_sum, _row_sum, Lengths, Masking, Scoring
from .wide_backward_kernel import _consumer as _wide_consumer
from .wide_backward_kernel import HALF
from .work_queue import _barriers_of, _queue_of, _sync_consumers, _zero

KEYS_EACH = gl.constexpr(64)


# fmt: off
@gluon.jit
def _scores(rows, columns, BLOCK_Q: gl.constexpr, D: gl.constexpr):
    """The product of 64 keys (or values) by the queries (or cotangents) of a stage, `[64, BLOCK_Q]`; not awaited."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    zero = gl.zeros([KEYS_EACH, BLOCK_Q], gl.float32, layout)
    return warpgroup_mma(rows, columns.reshape([BLOCK_Q, D]).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _part(dss, s, keys, dq, base, PART: gl.constexpr, W: gl.constexpr, USE: gl.constexpr, D: gl.constexpr):
    """Adds to a consumer's part `[64, 64]` of `dq` what one consumer's 64 keys give; not awaited."""
    k = keys.index(base + PART).reshape([KEYS_EACH, D])
    ds = dss.index((s & 1) * CONSUMERS + PART)
    return warpgroup_mma(ds.permute((1, 0)), k.slice(W * 64, 64, dim=1), dq, use_acc=USE, is_async=True)


@gluon.jit
def _consumer(queue, buffers, dss, dq_buffers, barriers, out_descs, row_arrays, gates, tiles, lengths, W: gl.constexpr, sizes: gl.constexpr, scoring: gl.constexpr,
              masking: gl.constexpr):
    """Sums `dk` and `dv` of keys `64 W` to `64 W + 63` of every tile, and computes its part of every `dq`."""
    BLOCK_Q: gl.constexpr = sizes.BLOCK_Q
    D: gl.constexpr = sizes.D
    NUM_STAGES: gl.constexpr = sizes.NUM_STAGES
    G: gl.constexpr = sizes.H // sizes.K
    ks, vs, qs, dos, lses, deltas, _k_ropes, _q_ropes = buffers
    kv_full, kv_empty, q_full, q_empty, do_full, do_empty = barriers
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    part_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    dtype: gl.constexpr = ks.dtype
    done = 0  # steps of earlier tiles
    r = 0
    t = _next_tile(queue, r, 4)
    while t >= 0:
        n, b, g, lo, full_lo, full_hi, hi = _key_tile(t, tiles, lengths, sizes, masking)
        first_key = n * sizes.BLOCK_K + W * KEYS_EACH
        past = first_key + KEYS_EACH > lengths.S  # some keys are past the end, where they are 0
        steps = (hi - lo) * G
        dk = gl.zeros([KEYS_EACH, D], gl.float32, layout)  # [64, D]
        dv = gl.zeros([KEYS_EACH, D], gl.float32, layout)  # [64, D]
        if not scoring.GATES:
            taken, by_tile = 0.0, 0.0
        else:  # and one head for each head of keys
            by_key = _own_sum(gl.zeros([KEYS_EACH, BLOCK_Q], gl.float32, scores_layout))  # [64, 4]
            by_gates, coarse_ptr = _key_gates(gates, b * sizes.H + g, first_key, lengths, scores_layout)
        mbarrier.wait(kv_full.index(0), r & 1)
        # Scores are a step ahead, under the storing of `dq`.
        if steps > 0:
            mbarrier.wait(q_full.index(done % NUM_STAGES), (done // NUM_STAGES) & 1)
        qk = warpgroup_mma_wait(0, deps=[_scores(ks.index(W).reshape([KEYS_EACH, D]), qs.index(done % NUM_STAGES), BLOCK_Q, D)])
        for e in range(steps):
            s = done + e
            at = s % NUM_STAGES
            _, m = _step(e, hi, G)
            if scoring.GATES:
                taken = by_gates - gl.load(coarse_ptr + m * BLOCK_Q // CHUNK)  # [64]
            base = _zero(s)
            k = ks.index(base + W).reshape([KEYS_EACH, D])
            v = vs.index(base + W).reshape([KEYS_EACH, D])
            mbarrier.wait(do_full.index(at), (s // NUM_STAGES) & 1)
            dp = _scores(v, dos.index(at), BLOCK_Q, D)
            # dv = p^T do: the weights, under the product by the cotangents.
            p = _weights(qk, lses, at, first_key, m, (m < full_lo) | (m >= full_hi) | past, b, lengths, row_arrays, scoring, masking, taken)
            weights = gl.convert_layout(p.to(dtype), weights_layout)
            dv = warpgroup_mma(weights, dos.index(at).reshape([BLOCK_Q, D]), dv, is_async=True)
            # dk = ds^T q: the score gradients, under the product by the weights.
            dp = warpgroup_mma_wait(1, deps=[dp])  # [64, BLOCK_Q]
            ds = _score_gradients(p, dp, lses, deltas, at, scoring)  # [64, BLOCK_Q]
            if scoring.GATES:
                sums = _own_sum(ds)  # [64, 4]
                by_key += sums
                by_tile = gl.sum(gl.sum(sums.reshape([4, KEYS_EACH // 4, 4]), 1), 1)  # [4], of the warps
            ds = ds.to(dtype)
            dss.index((s & 1) * CONSUMERS + W).store(ds)
            fence_async_shared()
            dk = warpgroup_mma(gl.convert_layout(ds, weights_layout), qs.index(at).reshape([BLOCK_Q, D]), dk, is_async=True)
            # dq = ds k: a part of its channels, when both consumers' score gradients are there.
            _sync_consumers()
            dq = _part(dss, s, ks, gl.zeros([64, 64], gl.float32, part_layout), base, 0, W, False, D)
            dq = _part(dss, s, ks, dq, base, 1, W, True, D)  # [64, 64]
            dk, dv = warpgroup_mma_wait(2, deps=[dk, dv])
            mbarrier.arrive(q_empty.index(at), count=1)
            mbarrier.arrive(do_empty.index(at), count=1)
            # After the last step the scores of any queries, unused.
            following = (s + 1) % NUM_STAGES
            if e + 1 < steps:
                mbarrier.wait(q_full.index(following), ((s + 1) // NUM_STAGES) & 1)
            upcoming = _scores(k, qs.index(following), BLOCK_Q, D)
            dq = warpgroup_mma_wait(1, deps=[dq])
            _store_dq(dq, dq_buffers, s, W, sizes, False, by_tile, scoring.GATES)
            qk = warpgroup_mma_wait(0, deps=[upcoming])
        if scoring.GATES:
            keys = first_key + gl.arange(0, KEYS_EACH, gl.SliceLayout(1, scores_layout))  # [64]
            at_key = gl.to_tensor(b * sizes.H + g).to(gl.int64) * lengths.S
            gl.store(gates.by_key + at_key + keys, _row_sum(by_key, keys.type.layout), mask=keys < lengths.S)
        _store_key_gradients((dk * scoring.SCALE).to(dtype), dv.to(dtype), buffers, out_descs, kv_empty, [b, g, first_key, 0], W, D)
        done += steps
        r += 1
        t = _next_tile(queue, r, 4)


@gluon.jit
def hopper_backward_kernel(
    q_ptr, k_ptr, k_rope_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr,  # [B, T, H, D + R], [B, S, K, D], [B, S, R], [B, S, K, V], as out; [B, H, terms] twice
    q_segments_ptr, kv_segments_ptr, start_ptr, end_ptr,  # [B, T] and, of keys, [B, S]
    tiles_ptr, order_ptr, zeros_ptr, slopes_ptr,  # [B, tiles of keys, 4], [B, tiles of keys, tiles of queries], as semaphores, gates as in `HeadArrays`
    B, T, S, terms, offset,
    semaphores_ptr, dq_ptr, dk_ptr, dmore_ptr, dv_ptr,  # zeros [1 + B H tiles of queries]; float32 as q, as k, float32 [B, K, S, R], as v
    by_key_ptr, by_tile_ptr,  # as in `Gates`
    H: gl.constexpr, K: gl.constexpr, D: gl.constexpr, V: gl.constexpr, R: gl.constexpr, BLOCK_D: gl.constexpr,
    BLOCK_Q: gl.constexpr, NUM_STAGES: gl.constexpr, SCALE: gl.constexpr, CAP: gl.constexpr, FAST_TANH: gl.constexpr, MULTIPLIER: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, ROWS: gl.constexpr, SEGMENTS: gl.constexpr, EVEN_K: gl.constexpr, GROUP: gl.constexpr,
    SHARED: gl.constexpr, ALIBI: gl.constexpr,
):
    # `dk = scale ds^T q`, `dv = p^T do`, and `dq = ds k` without the scale. `lse`: in units of log2, plus infinity past the end and for rows that see
    # nothing; `delta`: 0 past the end. `semaphores`: how many tiles of keys are claimed, then how many have been added to a tile of `dq`; the first one
    # is stored, and nothing is where none sees the queries. `dmore`: the gradient of keys' second part if all heads share it, of each head its own. `order`: of those tiles of keys that see a tile of queries, how many are before this one.
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    # Which kernel it is: narrow heads have a group for `dq`, wide ones share channels, not keys, between the consumers.
    NARROW: gl.constexpr = BLOCK_D <= 64
    WIDE: gl.constexpr = BLOCK_D > 128
    LATENT: gl.constexpr = R > 0
    BLOCK_K: gl.constexpr = KEYS_EACH if WIDE else CONSUMERS * KEYS_EACH
    COLUMNS: gl.constexpr = HALF if WIDE else BLOCK_D
    # With room for two tiles of keys, the next one is loaded while this one is at work.
    KEY_SLOTS: gl.constexpr = 2 if NARROW else 1
    DQ_BOXES: gl.constexpr = 1 if NARROW else CONSUMERS
    DQ_COLUMNS: gl.constexpr = HALF if WIDE else 64
    # Each of three writers has as long as three steps for an addition, its wait for the semaphore included.
    WRITERS: gl.constexpr = 3 if NARROW else 2
    DQ_SLOTS: gl.constexpr = CONSUMERS if WIDE or LATENT else WRITERS * DQ_BOXES
    GUARD: gl.constexpr = LEFT >= 0 or RIGHT >= 0 or ROWS or SEGMENTS or not EVEN_K
    sizes: gl.constexpr = Sizes(H, K, BLOCK_D, R, SHARED, D + R, BLOCK_Q, BLOCK_K, NUM_STAGES, GROUP, DQ_BOXES, DQ_COLUMNS, DQ_SLOTS, KEY_SLOTS, WRITERS)
    scoring: gl.constexpr = Scoring(SCALE, CAP, FAST_TANH, MULTIPLIER, False, 0, ALIBI == GATES)
    masking: gl.constexpr = Masking(LEFT, RIGHT, ROWS, SEGMENTS, ROWS or SEGMENTS, EVEN_K, GUARD)
    lengths = Lengths(B, T, S, offset)
    pointers = (q_ptr, k_ptr, k_rope_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, dq_ptr)
    row_arrays = RowArrays(q_segments_ptr, kv_segments_ptr, start_ptr, end_ptr)
    gates = Gates(slopes_ptr, by_key_ptr, by_tile_ptr)
    tiles = Tiles(tiles_ptr, order_ptr, semaphores_ptr, semaphores_ptr + 1)
    descs, out_descs, dq_descs, buffers, dqs = _operands(pointers, lengths, terms, D, V, sizes, KEYS_EACH, COLUMNS)
    # Besides, in shared memory: weights of wide heads and score gradients, both of two steps, `dk` and `dv` of narrow ones, the work queue,
    # and barriers.
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS_EACH, BLOCK_Q], dtype)
    if WIDE:
        ps = gl.allocate_shared_memory(dtype, [2, KEYS_EACH, BLOCK_Q], ds_layout)
    dss = gl.allocate_shared_memory(dtype, [2 if WIDE or LATENT else 2 * CONSUMERS, KEYS_EACH, BLOCK_Q], ds_layout)
    if NARROW:
        outputs = Outputs(_tiles_of(dtype, CONSUMERS, KEYS_EACH, BLOCK_D), _tiles_of(dtype, CONSUMERS, KEYS_EACH, BLOCK_D), out_descs)
    queue = _queue_of(KEY_SLOTS + 1, 1, WRITERS)
    if NARROW:
        # Queries and cotangents of a step have one barrier. Score gradients are filled by both consumers, and read by one group.
        kv_full, kv_empty = _barriers_of(KEY_SLOTS, CONSUMERS + 1)
        q_full, q_empty = _barriers_of(NUM_STAGES, CONSUMERS, 2)
        do_full, do_empty = q_full, q_empty
        ds_empty, ds_full = _barriers_of(2, CONSUMERS)
        ds_buffers = DsBuffers(dss, ds_full, ds_empty)
    else:
        kv_full, kv_empty = _barriers_of(KEY_SLOTS, CONSUMERS)
        q_full, q_empty = _barriers_of(NUM_STAGES, CONSUMERS)
        do_full, do_empty = _barriers_of(NUM_STAGES, CONSUMERS)
    dq_full, dq_empty = _barriers_of(WRITERS * DQ_BOXES, 1)
    sums = dqs[0]
    if scoring.GATES:
        sums = gl.allocate_shared_memory(gl.float32, [DQ_SLOTS, 4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    dq_buffers = DqBuffers(dqs[0], dqs[1], dq_full, dq_empty, sums)
    barriers = Barriers(kv_full, kv_empty, q_full, q_empty, do_full, do_empty)
    if NARROW:
        # The first consumer has what the others leave of 512 registers, 192.
        gl.warp_specialize([
            (_narrow_consumer, (queue, buffers, ds_buffers, outputs, barriers, row_arrays, tiles, lengths, 0, sizes, scoring, masking)),
            (_narrow_consumer, (queue, buffers, ds_buffers, outputs, barriers, row_arrays, tiles, lengths, 1, sizes, scoring, masking)),
            (_query_gradients, (queue, buffers.k, ds_buffers, dq_buffers, barriers, tiles, lengths, sizes, masking)),
            (_loader, (queue, buffers, barriers, descs, tiles, lengths, sizes, masking)),
            (_writer, (queue, dq_buffers, dq_descs, gates, tiles, lengths, 0, sizes, masking, scoring.GATES)),
            (_writer, (queue, dq_buffers, dq_descs, gates, tiles, lengths, 1, sizes, masking, scoring.GATES)),
            (_writer, (queue, dq_buffers, dq_descs, gates, tiles, lengths, 2, sizes, masking, scoring.GATES)),
        ], [4, 4, 1, 1, 1, 1], [200, 96, 24, 24, 24, 24])
    elif LATENT:
        # Where the gradient of the keys' second part is stored: of each head alone, or behind the first part.
        dk_rope = dmore_ptr
        if not SHARED:
            dk_rope = dk_ptr + D
        gl.warp_specialize([
            (_latent_consumer, (queue, buffers, dss, dq_buffers, barriers, out_descs, dk_rope, row_arrays, tiles, lengths, 0, sizes, scoring, masking)),
            (_latent_consumer, (queue, buffers, dss, dq_buffers, barriers, out_descs, dk_rope, row_arrays, tiles, lengths, 1, sizes, scoring, masking)),
            (_loader, (queue, buffers, barriers, descs, tiles, lengths, sizes, masking)),
            (_writer, (queue, dq_buffers, dq_descs, gates, tiles, lengths, 0, sizes, masking, scoring.GATES)),
            (_writer, (queue, dq_buffers, dq_descs, gates, tiles, lengths, 1, sizes, masking, scoring.GATES)),
        ], [4, 1, 1, 1], [240, 24, 24, 24])
    elif WIDE:
        gl.warp_specialize([
            (_wide_consumer, (queue, buffers, ps, dss, dq_buffers, barriers, out_descs, row_arrays, tiles, lengths, 0, sizes, scoring, masking)),
            (_wide_consumer, (queue, buffers, ps, dss, dq_buffers, barriers, out_descs, row_arrays, tiles, lengths, 1, sizes, scoring, masking)),
            (_loader, (queue, buffers, barriers, descs, tiles, lengths, sizes, masking)),
            (_writer, (queue, dq_buffers, dq_descs, gates, tiles, lengths, 0, sizes, masking, scoring.GATES)),
            (_writer, (queue, dq_buffers, dq_descs, gates, tiles, lengths, 1, sizes, masking, scoring.GATES)),
        ], [4, 1, 1, 1], [240, 24, 24, 24])
    else:
        gl.warp_specialize([
            (_consumer, (queue, buffers, dss, dq_buffers, barriers, out_descs, row_arrays, gates, tiles, lengths, 0, sizes, scoring, masking)),
            (_consumer, (queue, buffers, dss, dq_buffers, barriers, out_descs, row_arrays, gates, tiles, lengths, 1, sizes, scoring, masking)),
            (_loader, (queue, buffers, barriers, descs, tiles, lengths, sizes, masking)),
            (_writer, (queue, dq_buffers, dq_descs, gates, tiles, lengths, 0, sizes, masking, scoring.GATES)),
            (_writer, (queue, dq_buffers, dq_descs, gates, tiles, lengths, 1, sizes, masking, scoring.GATES)),
        ], [4, 1, 1, 1], [240, 24, 24, 24])
