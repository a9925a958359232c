"""Hopper's kernel of the float8 product: a persistent kernel that goes from tile to tile."""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ...triton.hopper.products_kernel import group_of, number_of_tiles
from ...triton.hopper.tile import barriers_of, CONSUMERS, following, place, ragged, skipped, stages_of, store

HALF = gl.constexpr(64)
"""The rows of one instruction."""
# Scales of the rows and of the weight; sizes and constants of a call, as the kernel's parameters.
Scales = namedtuple("Scales", "rows_ptr weight_ptr x_ptr")
Form = namedtuple("Form", "K N R G COLUMNS GROUPED GROUP RAGGED BM BN STAGES SWIZZLE")
# Sizes of groups `[B, E]`, the rows `M` of each batch row and all of them, and the number of all tiles. Without groups, all rows are in one.
Groups = namedtuple("Groups", "sizes_ptr B M E rows total")
# Stages of both operands, and their barriers.
Ring = namedtuple("Ring", "left right full empty")


# fmt: off
@gluon.jit
def _scales_at(scales, m, low, block, group, M, form: gl.constexpr):
    """The scales of rows `m` and `low` in a group of features, and of the weight's block."""
    one = gl.full([HALF], 1.0, gl.float32, m.type.layout)
    first, second, weight = one, one, 1.0
    if form.GROUPED:
        at = scales.rows_ptr + group.to(gl.int64) * M
        first, second = gl.load(at + m), gl.load(at + low)  # [HALF]
    if form.COLUMNS > 0:
        weight = gl.load(scales.weight_ptr + block * form.G + group * form.GROUP // form.COLUMNS)
    return first, second, weight


@gluon.jit
def _promoted(acc, part, a, b, scale, SCALED: gl.constexpr):
    """`acc + scale * (a b)`, of tiles `[HALF, GROUP]` and `[GROUP, BN]`. The sum over a group is that of tensor cores, and less exact."""
    part = warpgroup_mma(a, b, part, use_acc=False, is_async=True)
    part = warpgroup_mma_wait(0, deps=[part])
    if SCALED:
        acc += part * scale[:, None]
    else:
        acc += part
    return acc, part


@gluon.jit
def _summed(ring, s, phase, scales, row, block, steps, M, W: gl.constexpr, form: gl.constexpr):
    """The sums of one consumer's rows of a tile, `[HALF, BN]` twice (the second unused where it has one half), and the next stage."""
    BN: gl.constexpr = form.BN
    STEPS: gl.constexpr = (form.K + form.GROUP - 1) // form.GROUP
    ROWS: gl.constexpr = form.BM // CONSUMERS
    TWO: gl.constexpr = ROWS > HALF
    SCALED: gl.constexpr = form.GROUPED or form.COLUMNS > 0
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32])
    acc = gl.zeros([HALF, BN], gl.float32, layout)
    low = gl.zeros([HALF, BN], gl.float32, layout)
    part = gl.zeros([HALF, BN], gl.float32, layout)
    # Rows past the last have its scales, and are not stored.
    m = gl.minimum(row + gl.arange(0, HALF, gl.SliceLayout(1, layout)), M - 1)  # [HALF]
    m_low = gl.minimum(m + HALF, M - 1)
    first, second, weight = _scales_at(scales, m, m_low, block, row * 0, M, form)
    for k in range(steps):
        scale, scale_low = first * weight, second * weight
        # Scales of the next step arrive while this one multiplies.
        later = gl.minimum(row * 0 + k + 1, STEPS - 1)
        first, second, weight = _scales_at(scales, m, m_low, block, later, M, form)
        mbarrier.wait(ring.full.index(s), phase)
        a = ring.left.index(s)
        b = ring.right.index(s).permute((1, 0))
        acc, part = _promoted(acc, part, a.slice(W * ROWS, HALF), b, scale, SCALED)
        if TWO:
            low, part = _promoted(low, part, a.slice(W * ROWS + HALF, HALF), b, scale_low, SCALED)
        mbarrier.arrive(ring.empty.index(s), count=1)
        s, phase = following(s, phase, form.STAGES)
    return acc, low, s, phase


@gluon.jit
def _consumer(ring, staging, out, scales, groups, W: gl.constexpr, form: gl.constexpr):
    """Multiplies half the rows of every tile, and stores them."""
    BN: gl.constexpr = form.BN
    ROWS: gl.constexpr = form.BM // CONSUMERS
    TILES: gl.constexpr = (form.N + BN - 1) // BN
    BLOCKS: gl.constexpr = form.N // form.R
    STEPS: gl.constexpr = (form.K + form.GROUP - 1) // form.GROUP
    sizes_ptr, B, M, E = groups.sizes_ptr, groups.B, groups.M, groups.E
    s, phase = 0, 0
    t = gl.program_id(0)
    while t < groups.total:
        if form.RAGGED:
            # From the first group on again: a place that the loop carried would be spilled.
            none = t * 0
            group, first, start, size = group_of(sizes_ptr, t, none - 1, none, none, none, B, M, E, form.BM, TILES)
            row, column = place(t - first, size, form.BM, TILES, form.SWIZZLE)
            row = row * form.BM + W * ROWS
            e = group % (E + 1)
            # Rows of no weight take no steps: their sum stays 0. A consumer without rows frees the stages, which the loader fills for both.
            steps = gl.where((e < E) & (row < size), STEPS, 0)
            s, phase = skipped(ring, s, phase, gl.where(e < E, STEPS, 0) - steps, form.STAGES)
            begin, end, all = start, size, start + size
            base = gl.minimum(e, E - 1) * BLOCKS
        else:
            row, column = place(t, groups.rows, form.BM, TILES, form.SWIZZLE)
            row = row * form.BM + W * ROWS
            steps: gl.constexpr = STEPS
            begin, end, all, base = row * 0, groups.rows, groups.rows, row * 0
        n = column * BN
        acc, low, s, phase = _summed(ring, s, phase, scales, begin + row, base + n // form.R, steps, groups.rows, W, form)
        # Scales that all groups share.
        if form.COLUMNS == 0:
            at = gl.minimum(n + gl.arange(0, BN, gl.SliceLayout(0, acc.type.layout)), form.N - 1)  # [BN]
            scale = gl.load(scales.weight_ptr + base + at // form.R)[None, :]  # [1, BN]
            acc, low = acc * scale, low * scale
        if not form.GROUPED:
            scale = gl.load(scales.x_ptr)
            acc, low = acc * scale, low * scale
        store(out, staging, acc, all, end, row, n)
        if ROWS > HALF:
            store(out, staging, low, all, end, row + HALF, n)
        t += gl.num_programs(0)
    # Shared memory is given back when its last copy has left.
    tma.store_wait(0)


@gluon.jit
def _loader(ring, left, right, groups, form: gl.constexpr):
    """Loads the operands of every tile, as far ahead as there are stages."""
    BM: gl.constexpr = form.BM
    BN: gl.constexpr = form.BN
    GROUP: gl.constexpr = form.GROUP
    TILES: gl.constexpr = (form.N + BN - 1) // BN
    # Every stage is free at first: its barrier passes for the parity before.
    s, phase = 0, 1
    STEPS: gl.constexpr = (form.K + GROUP - 1) // GROUP
    sizes_ptr, B, M, E = groups.sizes_ptr, groups.B, groups.M, groups.E
    group, first, start, size = -1, 0, 0, 0
    t = gl.program_id(0)
    while t < groups.total:
        if form.RAGGED:
            group, first, start, size = group_of(sizes_ptr, t, group, first, start, size, B, M, E, BM, TILES)
            row, column = place(t - first, size, BM, TILES, form.SWIZZLE)
            e = group % (E + 1)
            steps = gl.where(e < E, STEPS, 0)
            # Rows of the next group and of the next weight are loaded, not stored.
            m, n = start + row * BM, e * form.N + column * BN
        else:
            row, column = place(t, groups.rows, BM, TILES, form.SWIZZLE)
            steps: gl.constexpr = STEPS
            m, n = row * BM, column * BN
        for k in range(steps):
            # Both consumers have read what was in this stage.
            mbarrier.wait(ring.empty.index(s), phase)
            full = ring.full.index(s)
            mbarrier.expect(full, (BM + BN) * GROUP)
            tma.async_copy_global_to_shared(left, [m, k * GROUP], full, ring.left.index(s))
            tma.async_copy_global_to_shared(right, [n, k * GROUP], full, ring.right.index(s))
            s, phase = following(s, phase, form.STAGES)
        t += gl.num_programs(0)


@gluon.jit
def _descriptor(ptr, rows, width: gl.constexpr, shape: gl.constexpr):
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(shape, ptr.dtype.element_ty)
    return tma.make_tensor_descriptor(ptr, [rows, width], [width, 1], shape, layout)


@gluon.jit
def hopper_scaled_kernel(
    rounded_ptr, rounded_scales_ptr, codes_ptr, scales_ptr, x_scale_ptr, sizes_ptr,  # [M, K], [groups, M], [*, N, K], [*, N / R, G], [], [B, E]
    M, B, E,
    out_ptr,  # [M, N]
    K: gl.constexpr, N: gl.constexpr, R: gl.constexpr, G: gl.constexpr, COLUMNS: gl.constexpr, GROUPED: gl.constexpr,
    GROUP: gl.constexpr, RAGGED: gl.constexpr, BLOCK_E: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    SWIZZLE: gl.constexpr, NUM_STAGES: gl.constexpr,
):
    # out = the sum over groups of scales times (rounded codes^T): as `scaled_kernel`, with one scale of the weight per group and tile.
    form: gl.constexpr = Form(K, N, R, G, COLUMNS, GROUPED, GROUP, RAGGED, BLOCK_M, BLOCK_N, NUM_STAGES, SWIZZLE)
    TILES: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    matrices = 1
    if RAGGED:
        # Sizes of groups are data, so the number of tiles is counted here.
        matrices = E
        total = number_of_tiles(sizes_ptr, B, M // B, E, BLOCK_M, TILES, BLOCK_E)
    else:
        total = (M + BLOCK_M - 1) // BLOCK_M * TILES
    left = _descriptor(rounded_ptr, M, K, [BLOCK_M, GROUP])
    right = _descriptor(codes_ptr.to(gl.pointer_type(gl.float8e4nv), bitcast=True), matrices * N, K, [BLOCK_N, GROUP])
    out = ragged(out_ptr, N, HALF, BLOCK_N)
    # Shared memory: stages and their barriers, and for each consumer what it stores.
    full, empty, _ = barriers_of(NUM_STAGES, CONSUMERS)
    a_s = stages_of(gl.float8e4nv, [BLOCK_M, GROUP], NUM_STAGES)
    b_s = stages_of(gl.float8e4nv, [BLOCK_N, GROUP], NUM_STAGES)
    staging = stages_of(out_ptr.dtype.element_ty, [1, 1, HALF, BLOCK_N], CONSUMERS)
    ring = Ring(a_s, b_s, full, empty)
    groups = Groups(sizes_ptr, B, M // B, E, M, total)
    scales = Scales(rounded_scales_ptr, scales_ptr, x_scale_ptr)
    # Two consumers of four warps with 232 registers a thread, one producer warp with 40.
    gl.warp_specialize([
        (_consumer, (ring, staging.index(0), out, scales, groups, 0, form)),
        (_consumer, (ring, staging.index(1), out, scales, groups, 1, form)),
        (_loader, (ring, left, right, groups, form)),
    ], [4, 1], [232, 40])
