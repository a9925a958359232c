"""The forward pass of a linear member in one kernel on Hopper, as `single_pass`, with loads and products that run ahead.

A program has one warp that loads and one or two groups of four warps, the consumers, each with 64 value channels of the state in registers: of
one head, or of two that share queries and keys. What values and scores are weighted by is computed under their products. Memory moves by tensor
descriptors (TMA); every chunk is whole."""

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

from ..decays import closed, CONSTANT, NONE, SCALAR

CHUNK = gl.constexpr(64)
WIDTH = gl.constexpr(64)
"""Value channels of a consumer."""
LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
"""Registers of four warps for sums of products with 64 columns, those of a chunk or of a consumer."""


Sizes = namedtuple("Sizes", "HS HQ HK HV HG HB D V SPLITS NUM_STAGES CONSUMERS")
"""Heads, channels and shape of a launch; all are constants."""
Kind = namedtuple("Kind", "SCALE DECAY BETA SKIP INITIAL PRODUCTS GENTLE")
"""The options of a call; all are constants."""
Tiles = namedtuple("Tiles", "q k v p")
"""Queries, keys, values and products: in shared memory, of all stages or of one chunk, or their descriptors."""
Buffers = namedtuple("Buffers", "read weighted staging")
"""Shared memory of consumers: the state as an operand `[D, 64]`, weighted values `[C, 64]`, and outputs on their way to memory `[C, 64]`."""
Barriers = namedtuple("Barriers", "full empty")
"""One of each for every stage: its tiles have arrived; its tiles are no longer needed."""
Place = namedtuple("Place", "seq split h v0 token count")
"""A program's sequence and split, first head and value channel, first token within the sequence, and number of chunks."""
Memory = namedtuple(
    "Memory", "initial_ptr edges_ptr final_ptr skip_ptr g_ptr logs_ptr spans_ptr beta_ptr T TOKENS"
)
"""Arrays that consumers read and write without descriptors, and their sizes."""
Gates = namedtuple("Gates", "g logs_ptr beta_ptr TOKENS")
"""A consumer's constant decay `[]`, and its head's decays and write strengths in memory."""
Decays = namedtuple("Decays", "high rest whole strength")
"""Log2 decays of a chunk: from its start to each token `[C]`, from there to its end `[C]`, and of the whole `[]`; and write strengths `[C]`."""
Output = namedtuple("Output", "desc seq h token v0")
"""The destination of a chunk's outputs."""


# fmt: off
@gluon.jit
def _decays(gates, row, DECAY: gl.constexpr, BETA: gl.constexpr):
    """The `Decays` of the chunk at `row`."""
    i = gl.arange(0, CHUNK, gl.SliceLayout(1, LAYOUT))  # [C]
    if DECAY == SCALAR:
        high, rest = gl.load(gates.logs_ptr + row + i), gl.load(gates.logs_ptr + gates.TOKENS + row + i)  # [C], [C]
        whole = gl.load(gates.logs_ptr + row + (CHUNK - 1))  # []
    elif DECAY == CONSTANT:
        high, rest = (i + 1).to(gl.float32) * gates.g, (CHUNK - 1 - i).to(gl.float32) * gates.g  # [C], [C]
        whole = CHUNK * gates.g  # []
    else:
        high = gl.zeros([CHUNK], gl.float32, i.type.layout)  # [C]
        rest, whole = high, 0.0 * gates.g
    strength = rest
    if BETA:
        strength = gl.load(gates.beta_ptr + row + i)  # [C]
    return Decays(high, rest, whole, strength)


@gluon.jit
def _pairs(high, gates, row, DECAY: gl.constexpr, BETA: gl.constexpr, SCALE: gl.constexpr):
    """The factors between tokens of the chunk at `row`, and the scale; zero where a token would see a later one. `_decays` has brought the
    numbers into the first cache. The hint that two columns of a thread do not cross 8 bytes makes them one load."""
    i = gl.expand_dims(gl.arange(0, CHUNK, gl.SliceLayout(1, LAYOUT)), 1)  # [C, 1]
    j = gl.arange(0, CHUNK, gl.SliceLayout(0, LAYOUT))  # [C]
    across = gl.zeros([CHUNK], gl.float32, j.type.layout)  # [C]
    if DECAY == SCALAR:
        across = gl.load(gl.multiple_of(gates.logs_ptr + row + j, 8))
    elif DECAY == CONSTANT:
        across = (j + 1).to(gl.float32) * gates.g
    exponent = gl.expand_dims(high, 1) - gl.expand_dims(across, 0)  # [C, C]
    pairs = gl.exp2(gl.where(i >= gl.expand_dims(j, 0), exponent, float("-inf"))) * SCALE  # [C, C]
    if BETA:
        pairs = pairs * gl.expand_dims(gl.load(gl.multiple_of(gates.beta_ptr + row + j, 8)), 0)
    return pairs


@gluon.jit
def _stored(out, staging, to):
    """Starts the copy of outputs to memory."""
    staging.reshape([CHUNK, WIDTH]).store(out.to(staging.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(to.desc, [to.seq, to.h, to.token, to.v0], staging)


@gluon.jit
def _gentle_chunk(state, skip, high, middle, tiles, own, full, phase, to, gates, after, kind):
    """A chunk whose decays can be taken apart: `state` includes `middle`, values are weighted by what is left of it at each token, and outputs by
    the rest. The state that is returned lacks what follows `middle`."""
    operand: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    read, weighted, staging = own
    # Q K^T and Q S run while values are weighted.
    read.store(state.to(read.dtype))
    fence_async_shared()
    mbarrier.wait(full, phase)
    qk = warpgroup_mma(tiles.q, tiles.k.permute((1, 0)), gl.zeros([CHUNK, CHUNK], gl.float32, LAYOUT), use_acc=False, is_async=True)
    out = warpgroup_mma(tiles.q, read, gl.zeros([CHUNK, WIDTH], gl.float32, LAYOUT), use_acc=False, is_async=True)
    ahead = _decays(gates, after, kind.DECAY, False)
    weight = gl.exp2(middle - high)  # [C]
    values = tiles.v.load(LAYOUT)  # [C, 64]
    weighted.store((values.to(gl.float32) * gl.expand_dims(weight, 1)).to(weighted.dtype))
    fence_async_shared()
    # Scores need only the mask, as their decays are in values and outputs.
    qk = warpgroup_mma_wait(1, deps=[qk])
    i = gl.expand_dims(gl.arange(0, CHUNK, gl.SliceLayout(1, LAYOUT)), 1)  # [C, 1]
    visible = i >= gl.expand_dims(gl.arange(0, CHUNK, gl.SliceLayout(0, LAYOUT)), 0)  # [C, C]
    scores = gl.convert_layout(gl.where(visible, qk, 0.0).to(weighted.dtype), operand)  # [C, C]
    out = warpgroup_mma(scores, weighted, out, is_async=True)
    state = warpgroup_mma(tiles.k.permute((1, 0)), weighted, state, is_async=True)
    # Outputs leave while the state is still computed.
    out = warpgroup_mma_wait(1, deps=[out])
    out = out * gl.expand_dims(gl.exp2(high - middle) * kind.SCALE, 1)
    if kind.SKIP:
        out = out + values.to(gl.float32) * skip
    _stored(out, staging, to)
    return warpgroup_mma_wait(0, deps=[state]), ahead


@gluon.jit
def _chunk(state, pairs, skip, decays, tiles, own, full, phase, to, gates, row, after, FIXED: gl.constexpr, kind):
    """A chunk with any decays: the state after it, and the `Decays` of the next, which are the same for all if `FIXED`."""
    operand: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    q, k, v, p = tiles
    read, weighted, staging = own
    if kind.PRODUCTS:
        weighted = weighted.reshape([CHUNK, WIDTH])
    # A = Q K^T, if it is not given, and O = scale (Q e^G) S, under which scores and values are weighted.
    read.store(state.to(read.dtype))
    fence_async_shared()
    mbarrier.wait(full, phase)
    if not kind.PRODUCTS:
        qk = warpgroup_mma(q, k.permute((1, 0)), gl.zeros([CHUNK, CHUNK], gl.float32, LAYOUT), use_acc=False, is_async=True)
    out = warpgroup_mma(q, read, gl.zeros([CHUNK, WIDTH], gl.float32, LAYOUT), use_acc=False, is_async=True)
    ahead = decays
    if not FIXED:
        pairs = _pairs(decays.high, gates, row, kind.DECAY, kind.BETA, kind.SCALE)  # [C, C]
        ahead = _decays(gates, after, kind.DECAY, kind.BETA)
    weight = gl.exp2(decays.rest)  # [C]
    if kind.BETA:
        weight = weight * decays.strength
    if kind.DECAY != NONE or kind.BETA:
        weighted.store((v.load(LAYOUT).to(gl.float32) * gl.expand_dims(weight, 1)).to(weighted.dtype))
        fence_async_shared()
    if kind.PRODUCTS:
        qk = p.load(LAYOUT).to(gl.float32)
    else:
        qk = warpgroup_mma_wait(1, deps=[qk])
    scores = gl.convert_layout((qk * pairs).to(weighted.dtype), operand)  # [C, C]
    # O += A V, and S <- e^{G_C} S + (K e^{G_C - G} b)^T V.
    out = warpgroup_mma_wait(0, deps=[out])
    out = out * gl.expand_dims(gl.exp2(decays.high) * kind.SCALE, 1)
    out = warpgroup_mma(scores, v, out, is_async=True)
    state = state * gl.exp2(decays.whole)
    if kind.DECAY != NONE or kind.BETA:
        state = warpgroup_mma(k.permute((1, 0)), weighted, state, is_async=True)
    else:
        state = warpgroup_mma(k.permute((1, 0)), v, state, is_async=True)
    out = warpgroup_mma_wait(1, deps=[out])
    if kind.SKIP:
        out = out + v.load(LAYOUT).to(gl.float32) * skip
    # With products, outputs are staged where weighted values are read.
    if kind.PRODUCTS:
        state = warpgroup_mma_wait(0, deps=[state])
    _stored(out, staging, to)
    if not kind.PRODUCTS:
        state = warpgroup_mma_wait(0, deps=[state])
    return state, ahead


@gluon.jit
def _consumer(tiles, buffers, barriers, out_desc, memory, place, W: gl.constexpr, sizes, kind):
    """The outputs and the final state of 64 value channels."""
    HS: gl.constexpr = sizes.HS
    D: gl.constexpr = sizes.D
    V: gl.constexpr = sizes.V
    qs, ks, vs, ps = tiles
    full, empty = barriers
    seq, split, h, v0, token, count = place
    # The second consumer has the next channels of the head, or the next head.
    if V > WIDTH:
        v0 += W * WIDTH
    else:
        h += W
    g = 0.0
    logs_ptr, spans_ptr, beta_ptr = memory.logs_ptr, memory.spans_ptr, memory.beta_ptr
    if kind.DECAY == CONSTANT:
        g = closed(gl.load(memory.g_ptr + gl.to_tensor(seq).to(gl.int64) * sizes.HG + h // (HS // sizes.HG)).to(gl.float32))  # []
    if kind.DECAY == SCALAR:
        logs_ptr += gl.to_tensor(h // (HS // sizes.HG)).to(gl.int64) * (2 * memory.TOKENS)
        spans_ptr += gl.to_tensor(h // (HS // sizes.HG)).to(gl.int64) * (memory.TOKENS // CHUNK)
    if kind.BETA:
        beta_ptr += gl.to_tensor(h // (HS // sizes.HB)).to(gl.int64) * memory.TOKENS
    gates = Gates(g, logs_ptr, beta_ptr, memory.TOKENS)
    own = Buffers(buffers.read.index(W), buffers.weighted.index(W), buffers.staging.index(W))
    # The state before the split.
    d = gl.arange(0, D, gl.SliceLayout(1, LAYOUT))  # [D]
    c = v0 + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))  # [64]
    inside = gl.expand_dims(d, 1) * V + gl.expand_dims(c, 0)  # [D, 64]
    own_state = (gl.to_tensor(seq).to(gl.int64) * HS + h) * (D * V)
    state = gl.zeros([D, WIDTH], gl.float32, LAYOUT)  # [D, 64]
    if sizes.SPLITS > 1:
        at = (gl.to_tensor(seq).to(gl.int64) * sizes.SPLITS + split) * HS + h
        state = gl.load(memory.edges_ptr + at * (D * V) + inside)
    elif kind.INITIAL:
        state = gl.load(memory.initial_ptr + own_state + inside).to(gl.float32)
    skip = gl.zeros([1, WIDTH], gl.float32, LAYOUT)  # [1, 64]
    if kind.SKIP:
        skip = gl.expand_dims(gl.load(memory.skip_ptr + (gl.to_tensor(seq).to(gl.int64) * HS + h) * V + c).to(gl.float32), 0)
    # The decays of the first chunk, or of all where they are the same.
    row = gl.to_tensor(seq).to(gl.int64) * memory.T + token
    fixed: gl.constexpr = kind.DECAY != SCALAR and not kind.BETA
    decays = _decays(gates, row, kind.DECAY, kind.BETA)
    if fixed:
        pairs = _pairs(decays.high, gates, row, kind.DECAY, kind.BETA, kind.SCALE)  # [C, C]
    if kind.GENTLE > 0:
        nothing = 0.0 * gl.to_tensor(count).to(gl.float32)  # []
        pending = nothing  # the log2 decay that the state still lacks
        span = gl.load(spans_ptr + row // CHUNK)  # []
    for n in range(0, count):
        s = n % sizes.NUM_STAGES
        q, k = qs.index(s).reshape([CHUNK, D]), ks.index(s).reshape([CHUNK, D])
        v = vs.index(s * sizes.CONSUMERS + W).reshape([CHUNK, WIDTH])
        p = v
        if kind.PRODUCTS:
            p = ps.index(s).reshape([CHUNK, CHUNK])
        chunk, phase = Tiles(q, k, v, p), (n // sizes.NUM_STAGES) & 1
        tma.store_wait(0)  # before a barrier that all pass who write to the place again
        if kind.PRODUCTS:
            gl.barrier()  # such a one: values are weighted there, too
        at, after = row + n * CHUNK, row + gl.minimum(n + 1, count - 1) * CHUNK
        to = Output(out_desc, seq, h, token + n * CHUNK, v0)
        if fixed:
            state, _ahead = _chunk(state, pairs, skip, decays, chunk, own, full.index(s), phase, to, gates, at, after, fixed, kind)
        elif kind.GENTLE > 0:
            # Where decays are at most `GENTLE` from their half, they are taken apart.
            next = gl.load(spans_ptr + after // CHUNK)  # []
            if span <= kind.GENTLE:
                middle = 0.5 * decays.whole  # []
                state = state * gl.exp2(pending + middle)
                pending = middle
                state, decays = _gentle_chunk(state, skip, decays.high, middle, chunk, own, full.index(s), phase, to, gates, after, kind)
            else:
                state = state * gl.exp2(pending)
                pending = nothing
                state, decays = _chunk(state, 0, skip, decays, chunk, own, full.index(s), phase, to, gates, at, after, fixed, kind)
            span = next
        else:
            state, decays = _chunk(state, 0, skip, decays, chunk, own, full.index(s), phase, to, gates, at, after, fixed, kind)
        mbarrier.arrive(empty.index(s), count=1)
    if kind.GENTLE > 0:
        state = state * gl.exp2(pending)
    if split == sizes.SPLITS - 1:
        gl.store(memory.final_ptr + own_state + inside, state.to(memory.final_ptr.dtype.element_ty))
    tma.store_wait(0)


@gluon.jit
def _loader(tiles, barriers, sources, place, sizes, PRODUCTS: gl.constexpr):
    """Loads the tiles of every chunk, as soon as all consumers have left those of its stage."""
    full, empty = barriers
    seq, _split, h, v0, token, count = place
    HS: gl.constexpr = sizes.HS
    CONSUMERS: gl.constexpr = sizes.CONSUMERS
    for n in range(0, count):
        s = n % sizes.NUM_STAGES
        row = token + n * CHUNK
        mbarrier.wait(empty.index(s), ((n // sizes.NUM_STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(s), CHUNK * (2 * sizes.D + CONSUMERS * WIDTH + (CHUNK if PRODUCTS else 0)) * 2)
        if PRODUCTS:
            tma.async_copy_global_to_shared(sources.p, [seq, h // (HS // sizes.HQ), row, 0], full.index(s), tiles.p.index(s))
        tma.async_copy_global_to_shared(sources.q, [seq, h // (HS // sizes.HQ), row, 0], full.index(s), tiles.q.index(s))
        tma.async_copy_global_to_shared(sources.k, [seq, h // (HS // sizes.HK), row, 0], full.index(s), tiles.k.index(s))
        # Each consumer has its own values: other channels of the head, or another head.
        for w in gl.static_range(CONSUMERS):
            if sizes.V > WIDTH:
                at = [seq, h // (HS // sizes.HV), row, v0 + w * WIDTH]
            else:
                at = [seq, (h + w) // (HS // sizes.HV), row, 0]
            tma.async_copy_global_to_shared(sources.v, at, full.index(s), tiles.v.index(s * CONSUMERS + w))


@gluon.jit
def _described(ptr, B, length, HEADS: gl.constexpr, CHANNELS: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """A descriptor of `[B, length, HEADS, CHANNELS]` with boxes of a chunk of one head."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, ROWS, COLUMNS], ptr.dtype.element_ty)
    row: gl.constexpr = HEADS * CHANNELS
    return tma.make_tensor_descriptor(
        ptr, [B, HEADS, length, CHANNELS], [gl.to_tensor(length).to(gl.int64) * row, CHANNELS, row, 1], [1, 1, ROWS, COLUMNS], layout)


@gluon.jit
def _tiles_of(dtype: gl.constexpr, COUNT: gl.constexpr, COLUMNS: gl.constexpr):
    """Shared memory for tiles of a chunk."""
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
    """Computes what `single_kernel` does, for whole chunks of unpacked bfloat16 sequences and splits of whole chunks. `beta [HB, B, T]`, in float32.
    `PRODUCTS`: those of queries and keys, each token's with its chunk's, zero where it would see a later one, are given. Decays per token without
    write strengths are taken apart in chunks where they are at most `GENTLE` from their half, if that is not 0."""
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    CONSUMERS: gl.constexpr = BLOCK_V // WIDTH
    EACH: gl.constexpr = CONSUMERS if V == WIDTH else 1  # heads
    sizes: gl.constexpr = Sizes(HS, HQ, HK, HV, HG, HB, D, V, SPLITS, NUM_STAGES, CONSUMERS)
    kind: gl.constexpr = Kind(SCALE, DECAY, BETA, SKIP, INITIAL, PRODUCTS, GENTLE)
    # A program: a sequence, a split of it, a head or two, a tile of value channels (fastest).
    tiles: gl.constexpr = V * EACH // BLOCK_V
    index = gl.program_id(0)
    v0, index = index % tiles * BLOCK_V, index // tiles
    h, index = index % (HS // EACH) * EACH, index // (HS // EACH)
    split, seq = index % SPLITS, index // SPLITS
    count = T // (CHUNK * SPLITS)
    place = Place(seq, split, h, v0, split * (count * CHUNK), count)
    B = TOKENS // T
    # Descriptors of whole arrays: a copy is a chunk of one head.
    q_desc = _described(q_ptr, B, T, HQ, D, CHUNK, D)
    k_desc = _described(k_ptr, B, T, HK, D, CHUNK, D)
    v_desc = _described(v_ptr, B, T, HV, V, CHUNK, WIDTH)
    out_desc = _described(out_ptr, B, T, HS, V, CHUNK, WIDTH)
    qs, ks, vs = _tiles_of(dtype, NUM_STAGES, D), _tiles_of(dtype, NUM_STAGES, D), _tiles_of(dtype, NUM_STAGES * CONSUMERS, WIDTH)
    p_desc, ps = q_desc, qs  # not used
    if PRODUCTS:
        p_desc, ps = _described(products_ptr, B, T, HQ, CHUNK, CHUNK, CHUNK), _tiles_of(dtype, NUM_STAGES, CHUNK)
    # Shared memory of each consumer alone.
    read = gl.allocate_shared_memory(dtype, [CONSUMERS, D, WIDTH], gl.NVMMASharedLayout.get_default_for([D, WIDTH], dtype))
    staging = _tiles_of(dtype, CONSUMERS, WIDTH)
    weighted = staging  # with products there is no room for both
    if not PRODUCTS:
        weighted = gl.allocate_shared_memory(dtype, [CONSUMERS, CHUNK, WIDTH], gl.NVMMASharedLayout.get_default_for([CHUNK, WIDTH], dtype))
    # Barriers of every stage: the loader arrives at one of them, all consumers at the other.
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    # Consumers and the loader meet at the barriers only.
    stages, sources, barriers = Tiles(qs, ks, vs, ps), Tiles(q_desc, k_desc, v_desc, p_desc), Barriers(full, empty)
    buffers = Buffers(read, weighted, staging)
    memory = Memory(initial_ptr, edges_ptr, final_ptr, skip_ptr, g_ptr, logs_ptr, spans_ptr, beta_ptr, T, TOKENS)
    if CONSUMERS == 1:
        gl.warp_specialize([
            (_consumer, (stages, buffers, barriers, out_desc, memory, place, 0, sizes, kind)),
            (_loader, (stages, barriers, sources, place, sizes, PRODUCTS)),
        ], [1], [24])
    else:
        gl.warp_specialize([
            (_consumer, (stages, buffers, barriers, out_desc, memory, place, 0, sizes, kind)),
            (_consumer, (stages, buffers, barriers, out_desc, memory, place, 1, sizes, kind)),
            (_loader, (stages, barriers, sources, place, sizes, PRODUCTS)),
        ], [4, 1], [240, 24])
