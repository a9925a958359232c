"""Hopper's backward kernel: one program for a tile of keys, five products for each tile of queries that sees it.

A program has two groups of four warps, the consumers, each with 64 of the tile's 128 keys, of which it sums `dk` and `dv` in registers. They exchange
their score gradients through shared memory, and each multiplies all 128 by half of the keys' channels (or of the queries): its part of `dq`. Two
warps add those parts in device memory, one the even tiles of queries and one the odd ones; and one warp loads.

The sum `dq` has one order: a tile of keys adds to a tile of queries after all tiles before it. A program waits only for tiles of keys before its own,
which are those of programs that were started before it. All of them take the last queries first, of which causal masks let every key be seen: a program
that is started with the one before it is behind by one addition, never by a tile."""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..tile import program, query_tiles, tanh
from .forward_kernel import _barriers_of, _described, _tiles_of

KEYS_EACH = gl.constexpr(64)
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
def _hidden(s, first_key, first_query, b, T, S, offset, q_segments_ptr, kv_segments_ptr, start_ptr, end_ptr, LEFT: gl.constexpr,
            RIGHT: gl.constexpr, ROWS: gl.constexpr, SEGMENTS: gl.constexpr, EVEN_K: gl.constexpr):
    """Scores `[64, BLOCK_Q]` of the keys from `first_key` and the queries from `first_query` on, minus infinity where hidden."""
    layout: gl.constexpr = s.type.layout
    keys = first_key + gl.arange(0, s.shape[0], gl.SliceLayout(1, layout))  # [64]
    queries = first_query + gl.arange(0, s.shape[1], gl.SliceLayout(0, layout))  # [BLOCK_Q]
    j = gl.expand_dims(keys, 1)
    i = gl.expand_dims(queries, 0)
    if ROWS:
        start = gl.load(start_ptr + b * T + queries, mask=queries < T, other=0)
        end = gl.load(end_ptr + b * T + queries, mask=queries < T, other=0)
        s = gl.where((j >= gl.expand_dims(start, 0)) & (j < gl.expand_dims(end, 0)), s, float("-inf"))
    else:
        if RIGHT >= 0:
            s = gl.where(j <= i + (offset + RIGHT), s, float("-inf"))
        if LEFT >= 0:
            s = gl.where(j >= i + (offset - LEFT), s, float("-inf"))
        if not EVEN_K:
            s = gl.where(j < S, s, float("-inf"))
    if SEGMENTS:
        k_segment = gl.load(kv_segments_ptr + b * S + keys, mask=keys < S, other=-1)
        q_segment = gl.load(q_segments_ptr + b * T + queries, mask=queries < T, other=-1)
        q_segment = gl.where(q_segment < 0, -2, q_segment)  # padding, equal to no key's
        s = gl.where(gl.expand_dims(k_segment, 1) == gl.expand_dims(q_segment, 0), s, float("-inf"))
    return s


@gluon.jit
def _scores(rows, columns, BLOCK_Q: gl.constexpr, D: gl.constexpr):
    """The product of 64 keys (or values) by the queries (or cotangents) of a stage, `[64, BLOCK_Q]`; not awaited."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    zero = gl.zeros([KEYS_EACH, BLOCK_Q], gl.float32, layout)
    return warpgroup_mma(rows, columns.reshape([BLOCK_Q, D]).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _part(dss, e, keys, dq, PART: gl.constexpr, W: gl.constexpr, USE: gl.constexpr, D: gl.constexpr, BLOCK_Q: gl.constexpr):
    """Adds to a consumer's part `[64, 64]` of `dq` what one consumer's 64 keys give; not awaited."""
    k = keys.index(PART).reshape([KEYS_EACH, D])
    ds = dss.index((e & 1) * CONSUMERS + PART)
    if BLOCK_Q == 64:  # half of the channels
        dq = warpgroup_mma(ds.permute((1, 0)), k.slice(W * 64, 64, dim=1), dq, use_acc=USE, is_async=True)
    else:  # half of the queries
        dq = warpgroup_mma(ds.slice(W * 64, 64, dim=1).permute((1, 0)), k, dq, use_acc=USE, is_async=True)
    return dq


@gluon.jit
def _place(e, span, hi, G: gl.constexpr):
    """Head of the group and tile of queries of step `e`."""
    if G == 1:
        return 0, hi - 1 - e
    return e // span, hi - 1 - e % span


@gluon.jit
def _consumer(buffers, barriers, out_descs, pointers, bounds, W: gl.constexpr, sizes: gl.constexpr, flags: gl.constexpr):
    """Sums `dk` and `dv` of keys `64 W` to `64 W + 63` of the tile, and computes its part of every `dq`."""
    ks, vs, qs, dos, lses, deltas, dss, dqs = buffers
    kv_full, q_full, do_full, empty, dq_full, dq_empty = barriers
    dk_desc, dv_desc = out_descs
    q_segments_ptr, kv_segments_ptr, start_ptr, end_ptr = pointers
    n, b, g, lo, full_lo, full_hi, hi, T, S, offset = bounds
    H: gl.constexpr = sizes[0]
    K: gl.constexpr = sizes[1]
    D: gl.constexpr = sizes[2]
    BLOCK_Q: gl.constexpr = sizes[3]
    NUM_STAGES: gl.constexpr = sizes[4]
    SCALE: gl.constexpr = flags[0]
    MULTIPLIER: gl.constexpr = flags[1]
    LEFT: gl.constexpr = flags[2]
    RIGHT: gl.constexpr = flags[3]
    ROWS: gl.constexpr = flags[4]
    SEGMENTS: gl.constexpr = flags[5]
    EVEN_K: gl.constexpr = flags[6]
    CAP: gl.constexpr = flags[7]
    FAST_TANH: gl.constexpr = flags[8]
    G: gl.constexpr = H // K
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    part_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    of_queries: gl.constexpr = gl.SliceLayout(0, scores_layout)
    k = ks.index(W).reshape([KEYS_EACH, D])
    v = vs.index(W).reshape([KEYS_EACH, D])
    dtype: gl.constexpr = k.dtype
    first_key = n * (CONSUMERS * KEYS_EACH) + W * KEYS_EACH
    dk = gl.zeros([KEYS_EACH, D], gl.float32, layout)
    dv = gl.zeros([KEYS_EACH, D], gl.float32, layout)
    span = hi - lo
    steps = span * G
    past = first_key + KEYS_EACH > S  # some keys are past the end, where they are 0
    mbarrier.wait(kv_full.index(0), 0)
    for e in range(steps):
        at = e % NUM_STAGES
        _, m = _place(e, span, hi, G)
        mbarrier.wait(q_full.index(at), (e // NUM_STAGES) & 1)
        s = _scores(k, qs.index(at), BLOCK_Q, D)
        mbarrier.wait(do_full.index(at), (e // NUM_STAGES) & 1)
        dp = _scores(v, dos.index(at), BLOCK_Q, D)
        qk = warpgroup_mma_wait(1, deps=[s])
        if CAP > 0:
            qk = tanh(qk * (SCALE / CAP), FAST_TANH)
        if ROWS or SEGMENTS or LEFT >= 0 or RIGHT >= 0 or not EVEN_K:
            if (m < full_lo) | (m >= full_hi) | past:
                qk = _hidden(qk, first_key, m * BLOCK_Q, b, T, S, offset, q_segments_ptr, kv_segments_ptr, start_ptr, end_ptr, LEFT, RIGHT, ROWS,
                             SEGMENTS, EVEN_K)
        lse = lses.index(at).reshape([BLOCK_Q]).load(of_queries)  # [BLOCK_Q]
        p = gl.exp2(qk * MULTIPLIER - gl.expand_dims(lse, 0))  # [64, BLOCK_Q]
        weights = gl.convert_layout(p.to(dtype), weights_layout)
        dv = warpgroup_mma(weights, dos.index(at).reshape([BLOCK_Q, D]), dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=[dp])
        delta = deltas.index(at).reshape([BLOCK_Q]).load(of_queries)  # [BLOCK_Q]
        ds = p * (dp - gl.expand_dims(delta, 0))  # [64, BLOCK_Q]
        if CAP > 0:  # d tanh = 1 - tanh^2; the tanh again from the weight, because registers are scarce
            lse = lses.index(at).reshape([BLOCK_Q]).load(of_queries)  # [BLOCK_Q]
            t = (gl.log2(p) + gl.expand_dims(lse, 0)) * (1.0 / MULTIPLIER)
            ds = gl.where(p > 0.0, ds * (1.0 - t * t), 0.0)
        ds = ds.to(dtype)
        dss.index((e & 1) * CONSUMERS + W).store(ds)
        fence_async_shared()
        dk = warpgroup_mma(gl.convert_layout(ds, weights_layout), qs.index(at).reshape([BLOCK_Q, D]), dk, is_async=True)
        _meet()
        dq = _part(dss, e, ks, gl.zeros([64, 64], gl.float32, part_layout), 0, W, False, D, BLOCK_Q)
        dq = _part(dss, e, ks, dq, 1, W, True, D, BLOCK_Q)
        dq, dk, dv = warpgroup_mma_wait(0, deps=[dq, dk, dv])
        mbarrier.arrive(empty.index(at), count=1)
        mbarrier.wait(dq_empty.index(e % WRITERS), ((e // WRITERS) & 1) ^ 1)
        dqs.index((e % WRITERS) * CONSUMERS + W).reshape([64, 64]).store(dq)
        fence_async_shared()
        mbarrier.arrive(dq_full.index(e % WRITERS), count=1)
    # The gradients take the place of keys and values, which the other consumer has read, too.
    _meet()
    ks.index(W).reshape([KEYS_EACH, D]).store((dk * SCALE).to(dtype))
    vs.index(W).reshape([KEYS_EACH, D]).store(dv.to(dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dk_desc, [b, g, first_key, 0], ks.index(W))
    tma.async_copy_shared_to_global(dv_desc, [b, g, first_key, 0], vs.index(W))
    tma.store_wait(0)


@gluon.jit
def _writer(dqs, dq_full, dq_empty, dq_desc, turns_ptr, order_ptr, bounds, W: gl.constexpr, sizes: gl.constexpr, flags: gl.constexpr):
    """Adds `dq` of every other step, when all tiles of keys before this one have added theirs."""
    n, b, g, lo, _, _, hi, T, S, offset = bounds
    H: gl.constexpr = sizes[0]
    K: gl.constexpr = sizes[1]
    BLOCK_Q: gl.constexpr = sizes[3]
    LEFT: gl.constexpr = flags[2]
    TABLE: gl.constexpr = flags[4] or flags[5]
    G: gl.constexpr = H // K
    BLOCK_K: gl.constexpr = CONSUMERS * KEYS_EACH
    span = hi - lo
    tiles = (T + BLOCK_Q - 1) // BLOCK_Q
    for u in range((span * G + WRITERS - 1 - W) // WRITERS):
        head, m = _place(u * WRITERS + W, span, hi, G)
        h = g * G + head
        turn = n
        if TABLE:
            turn = gl.load(order_ptr + (b * ((S + BLOCK_K - 1) // BLOCK_K) + n) * tiles + m)
        elif LEFT >= 0:  # the tiles that are too far before the queries do not count
            turn = n - gl.maximum(m * BLOCK_Q + (offset - LEFT), 0) // BLOCK_K
        turn_ptr = turns_ptr + (b * H + h) * tiles + m
        _await_turn(turn_ptr, turn)
        mbarrier.wait(dq_full.index(W), u & 1)
        for part in gl.static_range(CONSUMERS):
            row = m * BLOCK_Q
            column = 0
            if BLOCK_Q == 64:
                column = part * 64
            else:
                row = m * BLOCK_Q + part * 64
            if turn == 0:
                tma.async_copy_shared_to_global(dq_desc, [b, h, row, column], dqs.index(W * CONSUMERS + part))
            else:
                _add(dq_desc, [b, h, row, column], dqs.index(W * CONSUMERS + part))
        tma.store_wait(0)
        mbarrier.arrive(dq_empty.index(W), count=1)
        _end_turn(turn_ptr, turn)


@gluon.jit
def _loader(buffers, barriers, descs, bounds, sizes: gl.constexpr):
    """Loads the keys and values once, and the queries and their cotangents as far ahead as there are stages."""
    ks, vs, qs, dos, lses, deltas, _, _ = buffers
    kv_full, q_full, do_full, empty, _, _ = barriers
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc = descs
    n, b, g, lo, _, _, hi, _, _, _ = bounds
    H: gl.constexpr = sizes[0]
    K: gl.constexpr = sizes[1]
    D: gl.constexpr = sizes[2]
    BLOCK_Q: gl.constexpr = sizes[3]
    NUM_STAGES: gl.constexpr = sizes[4]
    G: gl.constexpr = H // K
    mbarrier.expect(kv_full.index(0), 2 * CONSUMERS * KEYS_EACH * D * 2)
    for w in gl.static_range(CONSUMERS):
        row = (n * CONSUMERS + w) * KEYS_EACH
        tma.async_copy_global_to_shared(k_desc, [b, g, row, 0], kv_full.index(0), ks.index(w))
        tma.async_copy_global_to_shared(v_desc, [b, g, row, 0], kv_full.index(0), vs.index(w))
    span = hi - lo
    for e in range(span * G):
        at = e % NUM_STAGES
        head, m = _place(e, span, hi, G)
        mbarrier.wait(empty.index(at), ((e // NUM_STAGES) & 1) ^ 1)
        mbarrier.expect(q_full.index(at), BLOCK_Q * (D * 2 + 4))
        tma.async_copy_global_to_shared(q_desc, [b, g * G + head, m * BLOCK_Q, 0], q_full.index(at), qs.index(at))
        tma.async_copy_global_to_shared(lse_desc, [b * H + g * G + head, m * BLOCK_Q], q_full.index(at), lses.index(at))
        mbarrier.expect(do_full.index(at), BLOCK_Q * (D * 2 + 4))
        tma.async_copy_global_to_shared(do_desc, [b, g * G + head, m * BLOCK_Q, 0], do_full.index(at), dos.index(at))
        tma.async_copy_global_to_shared(delta_desc, [b * H + g * G + head, m * BLOCK_Q], do_full.index(at), deltas.index(at))


@gluon.jit
def hopper_backward_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr,  # [B, T, H, D], [B, S, K, D], [B, S, K, V], as out; [B, H, terms] twice
    q_segments_ptr, kv_segments_ptr, start_ptr, end_ptr,  # [B, T] and, of keys, [B, S]
    tiles_ptr, order_ptr, no_turns_ptr,  # [B, tiles of keys, 4], [B, tiles of keys, tiles of queries], as turns
    B, T, S, terms, offset,
    turns_ptr, dq_ptr, dk_ptr, dv_ptr,  # zeros [B, H, tiles of queries]; float32 as q, as k, as v
    H: gl.constexpr, K: gl.constexpr, D: gl.constexpr, V: gl.constexpr, BLOCK_D: gl.constexpr,
    BLOCK_Q: gl.constexpr, NUM_STAGES: gl.constexpr, SCALE: gl.constexpr, CAP: gl.constexpr, FAST_TANH: gl.constexpr, MULTIPLIER: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, ROWS: gl.constexpr, SEGMENTS: gl.constexpr, EVEN_K: gl.constexpr, GROUP: gl.constexpr,
):
    # `dk = scale ds^T q`, `dv = p^T do`, and `dq = ds k` without the scale. `lse`: in units of log2, plus infinity past the end and for rows that see
    # nothing; `delta`: 0 past the end. `turns`: how many tiles of keys have been added to a tile of `dq`; the first one is stored, and nothing
    # is where none sees the queries. `order`: of those tiles of keys that see a tile of queries, how many are before this one.
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    sizes: gl.constexpr = (H, K, BLOCK_D, BLOCK_Q, NUM_STAGES)
    flags: gl.constexpr = (SCALE, MULTIPLIER, LEFT, RIGHT, ROWS, SEGMENTS, EVEN_K, CAP, FAST_TANH)
    BLOCK_K: gl.constexpr = CONSUMERS * KEYS_EACH
    n, bg, _ = program(S, BLOCK_K, GROUP)
    b = bg // K
    g = bg % K
    lo, full_lo, full_hi, hi = query_tiles(tiles_ptr, b, n, offset, T, S, BLOCK_Q, BLOCK_K, LEFT, RIGHT, ROWS or SEGMENTS, False)
    bounds = (n, b, g, lo, full_lo, full_hi, hi, T, S, offset)
    q_desc = _described(q_ptr, B, T, H, D, BLOCK_Q, BLOCK_D)
    do_desc = _described(do_ptr, B, T, H, V, BLOCK_Q, BLOCK_D)
    k_desc = _described(k_ptr, B, S, K, D, KEYS_EACH, BLOCK_D)
    v_desc = _described(v_ptr, B, S, K, V, KEYS_EACH, BLOCK_D)
    dk_desc = _described(dk_ptr, B, S, K, D, KEYS_EACH, BLOCK_D)
    dv_desc = _described(dv_ptr, B, S, K, V, KEYS_EACH, BLOCK_D)
    dq_desc = _described(dq_ptr, B, T, H, D, 64, 64)
    ks = _tiles_of(dtype, CONSUMERS, KEYS_EACH, BLOCK_D)
    vs = _tiles_of(dtype, CONSUMERS, KEYS_EACH, BLOCK_D)
    qs = _tiles_of(dtype, NUM_STAGES, BLOCK_Q, BLOCK_D)
    dos = _tiles_of(dtype, NUM_STAGES, BLOCK_Q, BLOCK_D)
    terms_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    lse_desc = tma.make_tensor_descriptor(lse_ptr, [B * H, terms], [terms, 1], [1, BLOCK_Q], terms_layout)
    delta_desc = tma.make_tensor_descriptor(delta_ptr, [B * H, terms], [terms, 1], [1, BLOCK_Q], terms_layout)
    lses = gl.allocate_shared_memory(gl.float32, [NUM_STAGES, 1, BLOCK_Q], terms_layout)
    deltas = gl.allocate_shared_memory(gl.float32, [NUM_STAGES, 1, BLOCK_Q], terms_layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS_EACH, BLOCK_Q], dtype)
    dss = gl.allocate_shared_memory(dtype, [2 * CONSUMERS, KEYS_EACH, BLOCK_Q], ds_layout)
    dqs = _tiles_of(gl.float32, WRITERS * CONSUMERS, 64, 64)
    kv_full, _ = _barriers_of(1, 1)
    q_full, empty = _barriers_of(NUM_STAGES, CONSUMERS)
    do_full, _ = _barriers_of(NUM_STAGES, CONSUMERS)
    dq_empty, dq_full = _barriers_of(WRITERS, CONSUMERS)
    buffers = (ks, vs, qs, dos, lses, deltas, dss, dqs)
    barriers = (kv_full, q_full, do_full, empty, dq_full, dq_empty)
    pointers = (q_segments_ptr, kv_segments_ptr, start_ptr, end_ptr)
    gl.warp_specialize([
        (_consumer, (buffers, barriers, (dk_desc, dv_desc), pointers, bounds, 0, sizes, flags)),
        (_consumer, (buffers, barriers, (dk_desc, dv_desc), pointers, bounds, 1, sizes, flags)),
        (_loader, (buffers, barriers, (q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc), bounds, sizes)),
        (_writer, (dqs, dq_full, dq_empty, dq_desc, turns_ptr, order_ptr, bounds, 0, sizes, flags)),
        (_writer, (dqs, dq_full, dq_empty, dq_desc, turns_ptr, order_ptr, bounds, 1, sizes, flags)),
    ], [4, 1, 1, 1], [240, 24, 24, 24])
