"""Hopper's kernel of many rows by quantised weights: it makes numbers of codes in registers, as the left side of its products."""

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

from ..codes import block_of, E2M1, E4M3, E5M2, FLOAT16, FLOAT32, Form, INT8, scale_of, UINT4
from .tile import ahead, barriers_of, CONSUMERS, following, place, stages_of

HALF = gl.constexpr(64)
"""The rows of the weight that a consumer has: those of one instruction. Both consumers of a tile have the same ones if they share features: each
takes every other step, and the second hands its sums to the first."""
# Scales and zero points of the weight, and the factor of the matrix.
Scales = namedtuple("Scales", "scales_ptr zeros_ptr factor_ptr")
# Sizes, how the weight is stored, and the tile, as the kernel's parameters; then rows of the weight of a tile, how many tiles those are, and steps.
Coded = namedtuple("Coded", "K N form UNIT FACTOR SHARED BM BK STAGES SWIZZLE ROWS TILES STEPS")
# Stages of codes and of rows, and their barriers.
Ring = namedtuple("Ring", "codes rows full empty turns")


# fmt: off
@gluon.jit
def _elementwise(asm: gl.constexpr, x, y, z):
    """uint32 of a few instructions on uint32 or float32, of which `y` and `z` may be unused."""
    return gl.inline_asm_elementwise(asm, "=r,r,r,r", [x, y, z], dtype=gl.uint32, is_pure=True, pack=1)


@gluon.jit
def _pairs(codes, ELEMENT: gl.constexpr):
    """Two codes `[...]`, uint32, as two numbers in the bits of a uint32: bfloat16, or of float8 codes float16."""
    if ELEMENT == INT8:
        # With its sign apart, a code is 7 bits less 0 or 128. As bits of a mantissa they are 128 + the bits, less 128 or 256, whose exponents
        # differ by the bit of the sign.
        asm: gl.constexpr = """{
            .reg .b32 a, b;
            prmt.b32 a, $1, 0x43434343, 0x4140;
            and.b32 b, a, 0xFF80FF80;
            and.b32 a, a, 0xFF7FFF7F;
            sub.rn.bf16x2 $0, a, b;
            }"""
    elif ELEMENT == UINT4:
        # 128 + the code, less 136.
        asm: gl.constexpr = """{
            .reg .b32 a, b;
            mul.lo.u32 a, $1, 0x1001;
            lop3.b32 a, a, 0x000F000F, 0x43004300, 0xEA;
            mov.b32 b, 0x43084308;
            sub.rn.bf16x2 $0, a, b;
            }"""
    elif ELEMENT == E2M1:
        # In bfloat16's fields the exponent is too small by 126, also for subnormal numbers.
        asm: gl.constexpr = """{
            .reg .b32 a, b;
            mul.lo.u32 a, $1, 0x01001000;
            mul.lo.u32 b, $1, 0x00040040;
            and.b32 a, a, 0x80008000;
            lop3.b32 a, b, 0x01C001C0, a, 0xEA;
            mov.b32 b, 0x7E807E80;
            mul.rn.bf16x2 $0, a, b;
            }"""
    elif ELEMENT == E4M3:
        asm: gl.constexpr = "{ .reg .b16 a; cvt.u16.u32 a, $1; cvt.rn.f16x2.e4m3x2 $0, a; }"
    else:
        asm: gl.constexpr = "{ .reg .b16 a; cvt.u16.u32 a, $1; cvt.rn.f16x2.e5m2x2 $0, a; }"
    return _elementwise(asm, codes, codes, codes)


@gluon.jit
def _times(pairs, scale, HALVES: gl.constexpr, SCALED: gl.constexpr):
    """Pairs of numbers times float32 scales, rounded once to bfloat16. `HALVES`: whether they are float16."""
    unpack: gl.constexpr = """{
        .reg .b16 c, d;
        .reg .f32 a, b;
        mov.b32 {c, d}, $1;
        cvt.f32.f16 a, c;
        cvt.f32.f16 b, d;
        """ if HALVES else """{
        .reg .b32 c, d;
        .reg .f32 a, b;
        shl.b32 c, $1, 16;
        and.b32 d, $1, 0xFFFF0000;
        mov.b32 a, c;
        mov.b32 b, d;
        """
    times: gl.constexpr = "mul.f32 a, a, $2; mul.f32 b, b, $2;" if SCALED else ""
    asm: gl.constexpr = unpack + times + " cvt.rn.bf16x2.f32 $0, b, a; }"
    return _elementwise(asm, pairs, scale, scale)


@gluon.jit
def _by_units(pairs, x, operation: gl.constexpr):
    """An operation on pairs of bfloat16 numbers `[HALF, UNITS, pairs]`, and twice a float32 `[HALF, UNITS]` that bfloat16 has exactly."""
    x = _elementwise("prmt.b32 $0, $1, $1, 0x3232;", x, x, x)
    pairs, x = gl.broadcast(pairs, gl.expand_dims(x, 2))
    asm: gl.constexpr = operation + ".rn.bf16x2 $0, $1, $2;"
    return _elementwise(asm, pairs, x, x)


@gluon.jit
def _block_at(scales, n, unit, k, coded: gl.constexpr):
    """The bits of the scales of rows `n` `[HALF, 1]` and units of features `[1, UNITS]` from `k` on, and their zero points."""
    form: gl.constexpr = coded.form
    there = k + unit < coded.K
    at = block_of(n, gl.where(there, k + unit, 0), coded.K, form)
    bits = gl.load(scales.scales_ptr + at)
    zeros = bits
    if form.ZEROS:
        zeros = gl.load(scales.zeros_ptr + at)
    return bits, zeros


@gluon.jit
def _numbers(ring, s, bits, zeros, W: gl.constexpr, operand: gl.constexpr, coded: gl.constexpr):
    """A consumer's numbers of a stage, `[HALF, BK]` in bfloat16."""
    form: gl.constexpr = coded.form
    HALVES: gl.constexpr = form.ELEMENT == E4M3 or form.ELEMENT == E5M2
    codes = ring.codes.index(s).slice(0 if coded.SHARED else W * HALF, HALF).load(gl.DotOperandLayout(0, operand.parent, 1))
    w = _pairs(codes.to(gl.uint32), form.ELEMENT)  # [HALF, BK / 2]
    w = gl.reshape(w, [HALF, coded.BK // coded.UNIT, coded.UNIT // 2])
    if form.ZEROS:
        w = _by_units(w, zeros.to(gl.float32) - 8.0, "sub")
    if form.COLUMNS > 0:
        scale = scale_of(bits, form.SCALE)
        if HALVES or form.SCALE == FLOAT32 or form.SCALE == FLOAT16:
            w, scale = gl.broadcast(w, gl.expand_dims(scale, 2))
            w = _times(w, scale, HALVES, True)
        else:
            w = _by_units(w, scale, "mul")
    elif HALVES:
        w = _times(w, w, True, False)
    w = gl.reshape(w, [HALF, coded.BK // 2])
    low = (w & 0xFFFF).to(gl.uint16).to(gl.bfloat16, bitcast=True)
    high = (w >> 16).to(gl.uint16).to(gl.bfloat16, bitcast=True)
    return gl.convert_layout(gl.reshape(gl.join(low, high), [HALF, coded.BK]), operand)


@gluon.jit
def _descriptor(ptr, rows, width: gl.constexpr, shape: gl.constexpr):
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(shape, ptr.dtype.element_ty)
    return tma.make_tensor_descriptor(ptr, [rows, width], [width, 1], shape, layout)


@gluon.jit
def _after(s, phase, coded: gl.constexpr):
    """The next stage of a consumer."""
    if coded.SHARED:
        return ahead(s, phase, 2, coded.STAGES)
    return following(s, phase, coded.STAGES)


@gluon.jit
def _consumer(ring, staging, sums, out_ptr, scales, M, W: gl.constexpr, coded: gl.constexpr):
    """Multiplies half the rows of the weight of every tile, or half the features, by its rows, and stores the products."""
    BM: gl.constexpr = coded.BM
    BK: gl.constexpr = coded.BK
    UNITS: gl.constexpr = BK // coded.UNIT
    SHARED: gl.constexpr = coded.SHARED
    form: gl.constexpr = coded.form
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    # Each thread loads the scales of its own numbers.
    pairs = gl.zeros([HALF, BK // 2], gl.uint32, gl.DotOperandLayout(0, layout, 1))
    of_units: gl.constexpr = gl.SliceLayout(2, gl.reshape(pairs, [HALF, UNITS, coded.UNIT // 2]).type.layout)
    mine = gl.expand_dims(gl.arange(0, HALF, gl.SliceLayout(1, of_units)), 1)  # [HALF, 1]
    unit = gl.expand_dims(gl.arange(0, UNITS, gl.SliceLayout(0, of_units)) * coded.UNIT, 0)  # [1, UNITS]
    total = (M + BM - 1) // BM * coded.TILES
    STEP: gl.constexpr = 2 * BK if SHARED else BK
    STEPS: gl.constexpr = coded.STEPS // 2 if SHARED else coded.STEPS
    START: gl.constexpr = W * BK if SHARED else 0
    # Made here, while the first tile is on its way.
    out = _descriptor(out_ptr, M, coded.N, [BM, HALF])
    s, phase, turn = W if SHARED else 0, 0, 0
    t = gl.program_id(0)
    while t < total:
        row, column = place(t, M, BM, coded.TILES, coded.SWIZZLE)
        first = column * coded.ROWS + (0 if SHARED else W * HALF)
        n = gl.minimum(first + mine, coded.N - 1)
        acc = gl.zeros([HALF, BM], gl.float32, layout)
        bits, zeros, later, later_zeros = 0, 0, 0, 0
        # Numbers of a step are made while the products of the step before are computed, and its scales are loaded a step before that.
        if form.COLUMNS > 0 or form.ZEROS:
            bits, zeros = _block_at(scales, n, unit, START, coded)
            later, later_zeros = _block_at(scales, n, unit, START + STEP, coded)
        mbarrier.wait(ring.full.index(s), phase)
        w = _numbers(ring, s, bits, zeros, W, operand, coded)
        for k in range(STEPS):
            acc = warpgroup_mma(w, ring.rows.index(s).permute((1, 0)), acc, is_async=True)
            next_s, next_phase = _after(s, phase, coded)
            upcoming = w
            if k + 1 < STEPS:
                if form.COLUMNS > 0 or form.ZEROS:
                    bits, zeros = later, later_zeros
                    later, later_zeros = _block_at(scales, n, unit, START + (k + 2) * STEP, coded)
                mbarrier.wait(ring.full.index(next_s), next_phase)
                upcoming = _numbers(ring, next_s, bits, zeros, W, operand, coded)
            acc, w = warpgroup_mma_wait(0, deps=[acc, w])
            mbarrier.arrive(ring.empty.index(s), count=1)
            w = upcoming
            s, phase = next_s, next_phase
        if SHARED and W == 1:
            # The sums of the tile before have been taken.
            mbarrier.wait(ring.turns.index(1), turn ^ 1)
            sums.store(acc)
            mbarrier.arrive(ring.turns.index(0), count=1)
        else:
            if SHARED:
                mbarrier.wait(ring.turns.index(0), turn)
                acc += sums.load(layout)
                mbarrier.arrive(ring.turns.index(1), count=1)
            # Scales that all features share.
            if form.COLUMNS == 0:
                at = gl.minimum(first + gl.arange(0, HALF, gl.SliceLayout(1, layout)), coded.N - 1)  # [HALF]
                acc *= gl.expand_dims(scale_of(gl.load(scales.scales_ptr + block_of(at, 0, coded.K, form)), form.SCALE), 1)
            if coded.FACTOR:
                acc *= gl.load(scales.factor_ptr).to(gl.float32, bitcast=True)
            # The copy before has left the shared memory.
            tma.store_wait(0)
            staging.store(gl.permute(acc.to(gl.bfloat16), (1, 0)))
            fence_async_shared()
            tma.async_copy_shared_to_global(out, [row * BM, first], staging)
        turn ^= 1
        t += gl.num_programs(0)
    tma.store_wait(0)


@gluon.jit
def _loader(ring, x_ptr, codes_ptr, M, coded: gl.constexpr):
    """Loads the operands of every tile, as far ahead as there are stages."""
    BM: gl.constexpr = coded.BM
    BK: gl.constexpr = coded.BK
    four: gl.constexpr = coded.form.ELEMENT == UINT4 or coded.form.ELEMENT == E2M1
    total = (M + BM - 1) // BM * coded.TILES
    BYTES: gl.constexpr = 2 * BM * BK + coded.ROWS * (BK // 2 if four else BK)
    codes = _descriptor(codes_ptr, coded.N, coded.K // 2, [coded.ROWS, BK // 2])
    rows = _descriptor(x_ptr, M, coded.K, [BM, BK])
    # Every stage is free at first: its barrier passes for the parity before.
    s, phase = 0, 1
    t = gl.program_id(0)
    while t < total:
        row, column = place(t, M, BM, coded.TILES, coded.SWIZZLE)
        for k in range(coded.STEPS):
            mbarrier.wait(ring.empty.index(s), phase)
            full = ring.full.index(s)
            mbarrier.expect(full, BYTES)
            tma.async_copy_global_to_shared(codes, [column * coded.ROWS, k * (BK // 2)], full, ring.codes.index(s))
            tma.async_copy_global_to_shared(rows, [row * BM, k * BK], full, ring.rows.index(s))
            s, phase = following(s, phase, coded.STAGES)
        t += gl.num_programs(0)


@gluon.jit
def hopper_coded_kernel(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, factor_ptr, M,  # [M, K], [N, K] or [N, K / 2], [blocks of N, blocks of K], as scales, []
    out_ptr,  # [M, N]
    K: gl.constexpr, N: gl.constexpr, ELEMENT: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, SCALE: gl.constexpr,
    ZEROS: gl.constexpr, FACTOR: gl.constexpr, UNIT: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, NUM_STAGES: gl.constexpr,
    SWIZZLE: gl.constexpr, SHARED: gl.constexpr,
):
    # out = x w^T, where w are the numbers of the codes.
    form: gl.constexpr = Form(ELEMENT, ROWS, COLUMNS, SCALE, ZEROS)
    HEIGHT: gl.constexpr = HALF if SHARED else 2 * HALF
    TILES: gl.constexpr = (N + HEIGHT - 1) // HEIGHT
    STEPS: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    # What is loaded past the last feature is 0.
    EVEN: gl.constexpr = (STEPS + 1) // 2 * 2 if SHARED else STEPS
    coded: gl.constexpr = Coded(K, N, form, UNIT, FACTOR, SHARED, BLOCK_M, BLOCK_K, NUM_STAGES, SWIZZLE, HEIGHT, TILES, EVEN)
    four: gl.constexpr = ELEMENT == UINT4 or ELEMENT == E2M1
    # Two codes are an element.
    pair: gl.constexpr = gl.uint8 if four else gl.uint16
    codes_ptr = codes_ptr.to(gl.pointer_type(pair), bitcast=True)
    full, empty, turns = barriers_of(NUM_STAGES, 1 if SHARED else CONSUMERS)
    codes_s = stages_of(pair, [HEIGHT, BLOCK_K // 2], NUM_STAGES)
    rows_s = stages_of(gl.bfloat16, [BLOCK_M, BLOCK_K], NUM_STAGES)
    # Each consumer stores its part of a tile, or hands it over.
    staging = stages_of(gl.bfloat16, [BLOCK_M, HALF], 1 if SHARED else CONSUMERS)
    sums = stages_of(gl.float32, [HALF, BLOCK_M if SHARED else 32], 1)
    ring = Ring(codes_s, rows_s, full, empty, turns)
    scales = Scales(scales_ptr, zeros_ptr, factor_ptr)
    # Two consumers of four warps with 232 registers a thread, one producer warp with 40.
    gl.warp_specialize([
        (_consumer, (ring, staging.index(0), sums.index(0), out_ptr, scales, M, 0, coded)),
        (_consumer, (ring, staging.index(0 if SHARED else 1), sums.index(0), out_ptr, scales, M, 1, coded)),
        (_loader, (ring, x_ptr, codes_ptr, M, coded)),
    ], [4, 1], [232, 40])
