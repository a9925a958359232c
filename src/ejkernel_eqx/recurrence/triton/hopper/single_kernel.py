"""The forward pass of a linear member in one kernel on Hopper, as `single_pass`, with loads and products that run ahead.

A program has one warp that loads and one or two groups of four warps, the consumers, each with 64 value channels of the state in registers: of
one head, or of two that share queries and keys. What values and scores are weighted by is computed under their products. Memory moves by tensor
descriptors (TMA); every chunk is whole."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..tile import closed, CONSTANT, NONE, SCALAR

CHUNK = gl.constexpr(64)
WIDTH = gl.constexpr(64)
"""Value channels of a consumer."""


# fmt: off
@gluon.jit
def _decays(g, logs_ptr, beta_ptr, row, TOKENS, DECAY: gl.constexpr, BETA: gl.constexpr):
    """Of the chunk at `row`: log2 decays from its start to each of its tokens, from there to its end, and of the whole; and write strengths."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    i = gl.arange(0, CHUNK, gl.SliceLayout(1, layout))  # [C]
    if DECAY == SCALAR:
        high, rest = gl.load(logs_ptr + row + i), gl.load(logs_ptr + TOKENS + row + i)  # [C], [C]
        whole = gl.load(logs_ptr + row + (CHUNK - 1))  # []
    elif DECAY == CONSTANT:
        high, rest = (i + 1).to(gl.float32) * g, (CHUNK - 1 - i).to(gl.float32) * g  # [C], [C]
        whole = CHUNK * g  # []
    else:
        high = gl.zeros([CHUNK], gl.float32, i.type.layout)  # [C]
        rest, whole = high, 0.0 * g
    strength = rest
    if BETA:
        strength = gl.load(beta_ptr + row + i)  # [C]
    return high, rest, whole, strength


@gluon.jit
def _pairs(high, g, logs_ptr, beta_ptr, row, DECAY: gl.constexpr, BETA: gl.constexpr, SCALE: gl.constexpr):
    """The factors between tokens of the chunk at `row`, and the scale; zero where a token would see a later one. What `_decays` read before is
    in the first cache. Two columns of a thread are one load, which takes to know that they do not cross 8 bytes."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    i = gl.expand_dims(gl.arange(0, CHUNK, gl.SliceLayout(1, layout)), 1)  # [C, 1]
    j = gl.arange(0, CHUNK, gl.SliceLayout(0, layout))  # [C]
    across = gl.zeros([CHUNK], gl.float32, j.type.layout)  # [C]
    if DECAY == SCALAR:
        across = gl.load(gl.multiple_of(logs_ptr + row + j, 8))
    elif DECAY == CONSTANT:
        across = (j + 1).to(gl.float32) * g
    exponent = gl.expand_dims(high, 1) - gl.expand_dims(across, 0)  # [C, C]
    pairs = gl.exp2(gl.where(i >= gl.expand_dims(j, 0), exponent, float("-inf"))) * SCALE  # [C, C]
    if BETA:
        pairs = pairs * gl.expand_dims(gl.load(gl.multiple_of(beta_ptr + row + j, 8)), 0)
    return pairs


@gluon.jit
def _stored(out, staging, out_desc, seq, h, token, v0):
    staging.reshape([CHUNK, WIDTH]).store(out.to(staging.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [seq, h, token, v0], staging)


@gluon.jit
def _gentle_chunk(state, skip, high, middle, q, k, v, own, full, phase, out_desc, seq, h, token, v0, g, logs_ptr, beta_ptr, after, TOKENS,
                  SCALE: gl.constexpr, DECAY: gl.constexpr, SKIP: gl.constexpr):
    """A chunk whose decays can be taken apart: `state` includes `middle`, values are weighted by what is left of it at each token, and outputs by
    the rest. The state that is returned lacks what follows `middle`."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    read, weighted, staging = own
    read.store(state.to(read.dtype))
    fence_async_shared()
    mbarrier.wait(full, phase)
    qk = warpgroup_mma(q, k.permute((1, 0)), gl.zeros([CHUNK, CHUNK], gl.float32, layout), use_acc=False, is_async=True)
    out = warpgroup_mma(q, read, gl.zeros([CHUNK, WIDTH], gl.float32, layout), use_acc=False, is_async=True)
    ahead = _decays(g, logs_ptr, beta_ptr, after, TOKENS, DECAY, False)
    weight = gl.exp2(middle - high)  # [C]
    values = v.load(layout)  # [C, 64]
    weighted.store((values.to(gl.float32) * gl.expand_dims(weight, 1)).to(weighted.dtype))
    fence_async_shared()
    qk = warpgroup_mma_wait(1, deps=[qk])
    i = gl.expand_dims(gl.arange(0, CHUNK, gl.SliceLayout(1, layout)), 1)  # [C, 1]
    visible = i >= gl.expand_dims(gl.arange(0, CHUNK, gl.SliceLayout(0, layout)), 0)  # [C, C]
    scores = gl.convert_layout(gl.where(visible, qk, 0.0).to(weighted.dtype), operand)  # [C, C]
    out = warpgroup_mma(scores, weighted, out, is_async=True)
    state = warpgroup_mma(k.permute((1, 0)), weighted, state, is_async=True)
    out = warpgroup_mma_wait(1, deps=[out])
    out = out * gl.expand_dims(gl.exp2(high - middle) * SCALE, 1)
    if SKIP:
        out = out + values.to(gl.float32) * skip
    _stored(out, staging, out_desc, seq, h, token, v0)
    return warpgroup_mma_wait(0, deps=[state]), ahead


@gluon.jit
def _chunk(state, pairs, skip, high, rest, whole, strength, q, k, v, p, own, full, phase, out_desc, seq, h, token, v0, g, logs_ptr, beta_ptr, row,
           after, TOKENS, FIXED: gl.constexpr, SCALE: gl.constexpr, DECAY: gl.constexpr, BETA: gl.constexpr, SKIP: gl.constexpr,
           PRODUCTS: gl.constexpr):
    """A chunk with any decays: the state after it, and what `_decays` finds of the next, which is the same for all if `FIXED`."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    read, weighted, staging = own
    if PRODUCTS:
        weighted = weighted.reshape([CHUNK, WIDTH])
    # A = Q K^T, if it is not given, and O = scale (Q e^G) S, under which scores and values are weighted.
    read.store(state.to(read.dtype))
    fence_async_shared()
    mbarrier.wait(full, phase)
    if not PRODUCTS:
        qk = warpgroup_mma(q, k.permute((1, 0)), gl.zeros([CHUNK, CHUNK], gl.float32, layout), use_acc=False, is_async=True)
    out = warpgroup_mma(q, read, gl.zeros([CHUNK, WIDTH], gl.float32, layout), use_acc=False, is_async=True)
    ahead = (high, rest, whole, strength)
    if not FIXED:
        pairs = _pairs(high, g, logs_ptr, beta_ptr, row, DECAY, BETA, SCALE)  # [C, C]
        ahead = _decays(g, logs_ptr, beta_ptr, after, TOKENS, DECAY, BETA)
    weight = gl.exp2(rest)  # [C]
    if BETA:
        weight = weight * strength
    if DECAY != NONE or BETA:
        weighted.store((v.load(layout).to(gl.float32) * gl.expand_dims(weight, 1)).to(weighted.dtype))
        fence_async_shared()
    if PRODUCTS:
        qk = p.load(layout).to(gl.float32)
    else:
        qk = warpgroup_mma_wait(1, deps=[qk])
    scores = gl.convert_layout((qk * pairs).to(weighted.dtype), operand)  # [C, C]
    # O += A V, and S <- e^{G_C} S + (K e^{G_C - G} b)^T V.
    out = warpgroup_mma_wait(0, deps=[out])
    out = out * gl.expand_dims(gl.exp2(high) * SCALE, 1)
    out = warpgroup_mma(scores, v, out, is_async=True)
    state = state * gl.exp2(whole)
    if DECAY != NONE or BETA:
        state = warpgroup_mma(k.permute((1, 0)), weighted, state, is_async=True)
    else:
        state = warpgroup_mma(k.permute((1, 0)), v, state, is_async=True)
    out = warpgroup_mma_wait(1, deps=[out])
    if SKIP:
        out = out + v.load(layout).to(gl.float32) * skip
    if PRODUCTS:
        state = warpgroup_mma_wait(0, deps=[state])
    _stored(out, staging, out_desc, seq, h, token, v0)
    if not PRODUCTS:
        state = warpgroup_mma_wait(0, deps=[state])
    return state, ahead


@gluon.jit
def _consumer(buffers, own, barriers, out_desc, initial_ptr, edges_ptr, final_ptr, g_ptr, logs_ptr, spans_ptr, beta_ptr, skip_ptr, where, TOKENS, T,
              W: gl.constexpr, HS: gl.constexpr, HG: gl.constexpr, HB: gl.constexpr, D: gl.constexpr, V: gl.constexpr, NUM_STAGES: gl.constexpr,
              CONSUMERS: gl.constexpr, SCALE: gl.constexpr, DECAY: gl.constexpr, BETA: gl.constexpr, SKIP: gl.constexpr,
              INITIAL: gl.constexpr, SPLITS: gl.constexpr, PRODUCTS: gl.constexpr, GENTLE: gl.constexpr):
    """The outputs and the final state of 64 value channels."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    qs, ks, vs, ps = buffers
    full, empty = barriers
    seq, split, h, v0, token, count = where
    if V > WIDTH:
        v0 += W * WIDTH
    else:
        h += W
    g = 0.0
    if DECAY == CONSTANT:
        g = closed(gl.load(g_ptr + gl.to_tensor(seq).to(gl.int64) * HG + h // (HS // HG)).to(gl.float32))  # []
    if DECAY == SCALAR:
        logs_ptr += gl.to_tensor(h // (HS // HG)).to(gl.int64) * (2 * TOKENS)
        spans_ptr += gl.to_tensor(h // (HS // HG)).to(gl.int64) * (TOKENS // CHUNK)
    if BETA:
        beta_ptr += gl.to_tensor(h // (HS // HB)).to(gl.int64) * TOKENS
    own = (own[0].index(W), own[1].index(W), own[2].index(W))
    # The state before the split.
    d = gl.arange(0, D, gl.SliceLayout(1, layout))  # [D]
    c = v0 + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))  # [64]
    inside = gl.expand_dims(d, 1) * V + gl.expand_dims(c, 0)  # [D, 64]
    own_state = (gl.to_tensor(seq).to(gl.int64) * HS + h) * (D * V)
    state = gl.zeros([D, WIDTH], gl.float32, layout)  # [D, 64]
    if SPLITS > 1:
        at = (gl.to_tensor(seq).to(gl.int64) * SPLITS + split) * HS + h
        state = gl.load(edges_ptr + at * (D * V) + inside)
    elif INITIAL:
        state = gl.load(initial_ptr + own_state + inside).to(gl.float32)
    skip = gl.zeros([1, WIDTH], gl.float32, layout)  # [1, 64]
    if SKIP:
        skip = gl.expand_dims(gl.load(skip_ptr + (gl.to_tensor(seq).to(gl.int64) * HS + h) * V + c).to(gl.float32), 0)
    row = gl.to_tensor(seq).to(gl.int64) * T + token
    fixed: gl.constexpr = DECAY != SCALAR and not BETA
    high, rest, whole, strength = _decays(g, logs_ptr, beta_ptr, row, TOKENS, DECAY, BETA)
    if fixed:
        pairs = _pairs(high, g, logs_ptr, beta_ptr, row, DECAY, BETA, SCALE)  # [C, C]
    if GENTLE > 0:
        nothing = 0.0 * gl.to_tensor(count).to(gl.float32)  # []
        pending = nothing  # the log2 decay that the state still lacks
        span = gl.load(spans_ptr + row // CHUNK)  # []
    for n in range(0, count):
        s = n % NUM_STAGES
        q, k = qs.index(s).reshape([CHUNK, D]), ks.index(s).reshape([CHUNK, D])
        v = vs.index(s * CONSUMERS + W).reshape([CHUNK, WIDTH])
        p = v
        if PRODUCTS:
            p = ps.index(s).reshape([CHUNK, CHUNK])
        phase = (n // NUM_STAGES) & 1
        tma.store_wait(0)  # before a barrier that all pass who write to the place again
        if PRODUCTS:
            gl.barrier()  # such a one: values are weighted there, too
        at, after = row + n * CHUNK, row + gl.minimum(n + 1, count - 1) * CHUNK
        if fixed:
            state, _ahead = _chunk(state, pairs, skip, high, rest, whole, strength, q, k, v, p, own, full.index(s), phase, out_desc, seq, h,
                                   token + n * CHUNK, v0, g, logs_ptr, beta_ptr, at, after, TOKENS, fixed, SCALE, DECAY, BETA, SKIP, PRODUCTS)
        elif GENTLE > 0:
            next = gl.load(spans_ptr + after // CHUNK)  # []
            if span <= GENTLE:
                state = state * gl.exp2(pending + 0.5 * whole)
                pending = 0.5 * whole
                state, ahead = _gentle_chunk(state, skip, high, 0.5 * whole, q, k, v, own, full.index(s), phase, out_desc, seq, h,
                                             token + n * CHUNK, v0, g, logs_ptr, beta_ptr, after, TOKENS, SCALE, DECAY, SKIP)
            else:
                state = state * gl.exp2(pending)
                pending = nothing
                state, ahead = _chunk(state, 0, skip, high, rest, whole, strength, q, k, v, p, own, full.index(s), phase, out_desc, seq, h,
                                      token + n * CHUNK, v0, g, logs_ptr, beta_ptr, at, after, TOKENS, fixed, SCALE, DECAY, BETA, SKIP, PRODUCTS)
            span = next
            high, rest, whole, strength = ahead
        else:
            state, ahead = _chunk(state, 0, skip, high, rest, whole, strength, q, k, v, p, own, full.index(s), phase, out_desc, seq, h,
                                  token + n * CHUNK, v0, g, logs_ptr, beta_ptr, at, after, TOKENS, fixed, SCALE, DECAY, BETA, SKIP, PRODUCTS)
            high, rest, whole, strength = ahead
        mbarrier.arrive(empty.index(s), count=1)
    if GENTLE > 0:
        state = state * gl.exp2(pending)
    if split == SPLITS - 1:
        gl.store(final_ptr + own_state + inside, state.to(final_ptr.dtype.element_ty))
    tma.store_wait(0)


@gluon.jit
def _loader(buffers, barriers, q_desc, k_desc, v_desc, p_desc, where, HS: gl.constexpr, HQ: gl.constexpr, HK: gl.constexpr, HV: gl.constexpr,
            D: gl.constexpr, V: gl.constexpr, NUM_STAGES: gl.constexpr, CONSUMERS: gl.constexpr, PRODUCTS: gl.constexpr):
    qs, ks, vs, ps = buffers
    full, empty = barriers
    seq, _split, h, v0, token, count = where
    for n in range(0, count):
        s = n % NUM_STAGES
        row = token + n * CHUNK
        mbarrier.wait(empty.index(s), ((n // NUM_STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(s), CHUNK * (2 * D + CONSUMERS * WIDTH + (CHUNK if PRODUCTS else 0)) * 2)
        if PRODUCTS:
            tma.async_copy_global_to_shared(p_desc, [seq, h // (HS // HQ), row, 0], full.index(s), ps.index(s))
        tma.async_copy_global_to_shared(q_desc, [seq, h // (HS // HQ), row, 0], full.index(s), qs.index(s))
        tma.async_copy_global_to_shared(k_desc, [seq, h // (HS // HK), row, 0], full.index(s), ks.index(s))
        for w in gl.static_range(CONSUMERS):
            if V > WIDTH:
                at = [seq, h // (HS // HV), row, v0 + w * WIDTH]
            else:
                at = [seq, (h + w) // (HS // HV), row, 0]
            tma.async_copy_global_to_shared(v_desc, at, full.index(s), vs.index(s * CONSUMERS + w))


@gluon.jit
def _described(ptr, B, length, HEADS: gl.constexpr, CHANNELS: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """A descriptor of `[B, length, HEADS, CHANNELS]` with boxes of a chunk of one head."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, ROWS, COLUMNS], ptr.dtype.element_ty)
    row: gl.constexpr = HEADS * CHANNELS
    return tma.make_tensor_descriptor(
        ptr, [B, HEADS, length, CHANNELS], [gl.to_tensor(length).to(gl.int64) * row, CHANNELS, row, 1], [1, 1, ROWS, COLUMNS], layout)


@gluon.jit
def _tiles_of(dtype: gl.constexpr, COUNT: gl.constexpr, COLUMNS: gl.constexpr):
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, CHUNK, COLUMNS], dtype)
    return gl.allocate_shared_memory(dtype, [COUNT, 1, 1, CHUNK, COLUMNS], layout)


@gluon.jit
def hopper_single_kernel(
    q_ptr, k_ptr, v_ptr, products_ptr, g_ptr, logs_ptr, spans_ptr, beta_ptr, skip_ptr, initial_ptr, edges_ptr, T, TOKENS,
    out_ptr, final_ptr,
    HS: gl.constexpr, HQ: gl.constexpr, HK: gl.constexpr, HV: gl.constexpr, HG: gl.constexpr, HB: gl.constexpr, D: gl.constexpr,
    V: gl.constexpr, BLOCK_V: gl.constexpr, SCALE: gl.constexpr, DECAY: gl.constexpr, BETA: gl.constexpr, SKIP: gl.constexpr,
    INITIAL: gl.constexpr, SPLITS: gl.constexpr, PRODUCTS: gl.constexpr, GENTLE: gl.constexpr, NUM_STAGES: gl.constexpr,
):
    """As `single_kernel`, for whole chunks of unpacked bfloat16 sequences and splits of whole chunks. `beta [HB, B, T]`, in float32.
    `PRODUCTS`: those of queries and keys, each token's with its chunk's, zero where it would see a later one, are given. Decays per token without
    write strengths are taken apart in chunks where they are at most `GENTLE` from their half, if that is not 0."""
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    CONSUMERS: gl.constexpr = BLOCK_V // WIDTH
    EACH: gl.constexpr = CONSUMERS if V == WIDTH else 1  # heads
    tiles: gl.constexpr = V * EACH // BLOCK_V
    index = gl.program_id(0)
    v0, index = index % tiles * BLOCK_V, index // tiles
    h, index = index % (HS // EACH) * EACH, index // (HS // EACH)
    split, seq = index % SPLITS, index // SPLITS
    count = T // (CHUNK * SPLITS)
    token = split * (count * CHUNK)
    where = (seq, split, h, v0, token, count)
    B = TOKENS // T
    q_desc = _described(q_ptr, B, T, HQ, D, CHUNK, D)
    k_desc = _described(k_ptr, B, T, HK, D, CHUNK, D)
    v_desc = _described(v_ptr, B, T, HV, V, CHUNK, WIDTH)
    out_desc = _described(out_ptr, B, T, HS, V, CHUNK, WIDTH)
    qs, ks, vs = _tiles_of(dtype, NUM_STAGES, D), _tiles_of(dtype, NUM_STAGES, D), _tiles_of(dtype, NUM_STAGES * CONSUMERS, WIDTH)
    p_desc, ps = q_desc, qs  # not used
    if PRODUCTS:
        p_desc, ps = _described(products_ptr, B, T, HQ, CHUNK, CHUNK, CHUNK), _tiles_of(dtype, NUM_STAGES, CHUNK)
    buffers = (qs, ks, vs, ps)
    read = gl.allocate_shared_memory(dtype, [CONSUMERS, D, WIDTH], gl.NVMMASharedLayout.get_default_for([D, WIDTH], dtype))
    staging = _tiles_of(dtype, CONSUMERS, WIDTH)
    weighted = staging  # with products there is no room for both
    if not PRODUCTS:
        weighted = gl.allocate_shared_memory(dtype, [CONSUMERS, CHUNK, WIDTH], gl.NVMMASharedLayout.get_default_for([CHUNK, WIDTH], dtype))
    own = (read, weighted, staging)
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    barriers = (full, empty)
    if CONSUMERS == 1:
        gl.warp_specialize([
            (_consumer, (buffers, own, barriers, out_desc, initial_ptr, edges_ptr, final_ptr, g_ptr, logs_ptr, spans_ptr, beta_ptr, skip_ptr,
                         where, TOKENS, T, 0, HS, HG, HB, D, V, NUM_STAGES, CONSUMERS, SCALE, DECAY, BETA, SKIP, INITIAL, SPLITS, PRODUCTS, GENTLE)),
            (_loader, (buffers, barriers, q_desc, k_desc, v_desc, p_desc, where, HS, HQ, HK, HV, D, V, NUM_STAGES, CONSUMERS, PRODUCTS)),
        ], [1], [24])
    else:
        gl.warp_specialize([
            (_consumer, (buffers, own, barriers, out_desc, initial_ptr, edges_ptr, final_ptr, g_ptr, logs_ptr, spans_ptr, beta_ptr, skip_ptr,
                         where, TOKENS, T, 0, HS, HG, HB, D, V, NUM_STAGES, CONSUMERS, SCALE, DECAY, BETA, SKIP, INITIAL, SPLITS, PRODUCTS, GENTLE)),
            (_consumer, (buffers, own, barriers, out_desc, initial_ptr, edges_ptr, final_ptr, g_ptr, logs_ptr, spans_ptr, beta_ptr, skip_ptr,
                         where, TOKENS, T, 1, HS, HG, HB, D, V, NUM_STAGES, CONSUMERS, SCALE, DECAY, BETA, SKIP, INITIAL, SPLITS, PRODUCTS, GENTLE)),
            (_loader, (buffers, barriers, q_desc, k_desc, v_desc, p_desc, where, HS, HQ, HK, HV, D, V, NUM_STAGES, CONSUMERS, PRODUCTS)),
        ], [4, 1], [240, 24])
