"""Hopper's kernel of the float8 product: programs that stay, and go from tile to tile."""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared as fence
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ...triton.hopper.tile import barriers_of, CONSUMERS, following, place, stages_of

HALF = gl.constexpr(64)
"""The rows of one instruction."""
# Scales of the rows and of the weight; sizes and constants of a call, as the kernel's parameters.
Scales = namedtuple("Scales", "rows_ptr weight_ptr x_ptr")
Form = namedtuple("Form", "K N R G COLUMNS GROUPED GROUP BM BN STAGES SWIZZLE")
# Stages of both operands, and their barriers.
Ring = namedtuple("Ring", "left right full empty")


# fmt: off
@gluon.jit
def _scales_at(scales, m, low, n, group, M, form: gl.constexpr):
    """The scales of rows `m` and `low` in a group, and of the weight's block at `n`."""
    one = gl.full([HALF], 1.0, gl.float32, m.type.layout)
    first, second, weight = one, one, 1.0
    if form.GROUPED:
        at = scales.rows_ptr + group.to(gl.int64) * M
        first, second = gl.load(at + m), gl.load(at + low)  # [HALF]
    if form.COLUMNS > 0:
        weight = gl.load(scales.weight_ptr + n // form.R * form.G + group * form.GROUP // form.COLUMNS)
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
def _summed(ring, s, phase, scales, row, n, M, W: gl.constexpr, form: gl.constexpr):
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
    first, second, weight = _scales_at(scales, m, m_low, n, row * 0, M, form)
    for k in range(STEPS):
        scale, scale_low = first * weight, second * weight
        # Scales of the next step arrive while this one multiplies.
        later = gl.minimum(row * 0 + k + 1, STEPS - 1)
        first, second, weight = _scales_at(scales, m, m_low, n, later, M, form)
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
def _store(desc, staging, x, row, column):
    # The copy before has left the shared memory.
    tma.store_wait(0)
    staging.store(x.to(desc.dtype))
    # Copies see what threads have written only behind this fence.
    fence()
    tma.async_copy_shared_to_global(desc, [row, column], staging)


@gluon.jit
def _consumer(ring, staging, out, scales, M, total, W: gl.constexpr, form: gl.constexpr):
    """Multiplies half the rows of every tile, and stores them."""
    BN: gl.constexpr = form.BN
    ROWS: gl.constexpr = form.BM // CONSUMERS
    TILES: gl.constexpr = (form.N + BN - 1) // BN
    s, phase = 0, 0
    t = gl.program_id(0)
    while t < total:
        row, column = place(t, M, form.BM, TILES, form.SWIZZLE)
        row = row * form.BM + W * ROWS
        n = column * BN
        acc, low, s, phase = _summed(ring, s, phase, scales, row, n, M, W, form)
        # Scales that all groups share.
        if form.COLUMNS == 0:
            at = gl.minimum(n + gl.arange(0, BN, gl.SliceLayout(0, acc.type.layout)), form.N - 1)  # [BN]
            scale = gl.load(scales.weight_ptr + at // form.R)[None, :]  # [1, BN]
            acc, low = acc * scale, low * scale
        if not form.GROUPED:
            scale = gl.load(scales.x_ptr)
            acc, low = acc * scale, low * scale
        _store(out, staging, acc, row, n)
        if ROWS > HALF:
            _store(out, staging, low, row + HALF, n)
        t += gl.num_programs(0)
    # Shared memory is given back when its last copy has left.
    tma.store_wait(0)


@gluon.jit
def _loader(ring, left, right, M, total, form: gl.constexpr):
    """Loads the operands of every tile, as far ahead as there are stages."""
    BM: gl.constexpr = form.BM
    BN: gl.constexpr = form.BN
    GROUP: gl.constexpr = form.GROUP
    TILES: gl.constexpr = (form.N + BN - 1) // BN
    # Every stage is free at first: its barrier passes for the parity before.
    s, phase = 0, 1
    t = gl.program_id(0)
    while t < total:
        row, column = place(t, M, BM, TILES, form.SWIZZLE)
        for k in range((form.K + GROUP - 1) // GROUP):
            # Both consumers have read what was in this stage.
            mbarrier.wait(ring.empty.index(s), phase)
            full = ring.full.index(s)
            mbarrier.expect(full, (BM + BN) * GROUP)
            tma.async_copy_global_to_shared(left, [row * BM, k * GROUP], full, ring.left.index(s))
            tma.async_copy_global_to_shared(right, [column * BN, k * GROUP], full, ring.right.index(s))
            s, phase = following(s, phase, form.STAGES)
        t += gl.num_programs(0)


@gluon.jit
def _descriptor(ptr, rows, width: gl.constexpr, shape: gl.constexpr):
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(shape, ptr.dtype.element_ty)
    return tma.make_tensor_descriptor(ptr, [rows, width], [width, 1], shape, layout)


@gluon.jit
def hopper_scaled_kernel(
    rounded_ptr, rounded_scales_ptr, codes_ptr, scales_ptr, x_scale_ptr, M,  # [M, K], [groups, M], [N, K], [N / R, G], []
    out_ptr,  # [M, N]
    K: gl.constexpr, N: gl.constexpr, R: gl.constexpr, G: gl.constexpr, COLUMNS: gl.constexpr, GROUPED: gl.constexpr,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, SWIZZLE: gl.constexpr, NUM_STAGES: gl.constexpr,
):
    # out = the sum over groups of scales times (rounded codes^T): as `scaled_kernel`, with one scale of the weight per group and tile.
    form: gl.constexpr = Form(K, N, R, G, COLUMNS, GROUPED, GROUP, BLOCK_M, BLOCK_N, NUM_STAGES, SWIZZLE)
    total = (M + BLOCK_M - 1) // BLOCK_M * ((N + BLOCK_N - 1) // BLOCK_N)
    left = _descriptor(rounded_ptr, M, K, [BLOCK_M, GROUP])
    right = _descriptor(codes_ptr.to(gl.pointer_type(gl.float8e4nv), bitcast=True), N, K, [BLOCK_N, GROUP])
    out = _descriptor(out_ptr, M, N, [HALF, BLOCK_N])
    # Shared memory: stages and their barriers, and for each consumer what it stores.
    full, empty, _ = barriers_of(NUM_STAGES, CONSUMERS)
    a_s = stages_of(gl.float8e4nv, [BLOCK_M, GROUP], NUM_STAGES)
    b_s = stages_of(gl.float8e4nv, [BLOCK_N, GROUP], NUM_STAGES)
    staging = stages_of(out_ptr.dtype.element_ty, [HALF, BLOCK_N], CONSUMERS)
    ring = Ring(a_s, b_s, full, empty)
    scales = Scales(rounded_scales_ptr, scales_ptr, x_scale_ptr)
    # Two consumers of four warps with 232 registers a thread, one producer warp with 40.
    gl.warp_specialize([
        (_consumer, (ring, staging.index(0), out, scales, M, total, 0, form)),
        (_consumer, (ring, staging.index(1), out, scales, M, total, 1, form)),
        (_loader, (ring, left, right, M, total, form)),
    ], [4, 1], [232, 40])
