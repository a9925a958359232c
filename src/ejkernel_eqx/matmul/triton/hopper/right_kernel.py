"""Hopper's kernel of the gradients of right sides: a persistent kernel that goes from tile to tile of the groups' matrices."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .tile import (
    ahead,
    barriers_of,
    columns_at_once,
    CONSUMERS,
    FAR,
    following,
    LEFT,
    place,
    ragged,
    Ring,
    rows_of,
    stages_of,
    store,
    summed,
    Tile,
)


# fmt: off
@gluon.jit
def _steps(steps_ptr, t, total, EACH: gl.constexpr):
    """The number of stages that tile `t` takes; any number past the last tile."""
    return gl.load(steps_ptr + gl.minimum(t, total - 1) // EACH * 2 + 1)


@gluon.jit
def _consumer(ring, staging, out_desc, steps_ptr, total, W: gl.constexpr, K: gl.constexpr, N: gl.constexpr,
              tile: gl.constexpr):
    """Sums up half the rows of every tile or all of every other one."""
    ALTERNATING: gl.constexpr = tile.ALTERNATING
    STAGES: gl.constexpr = tile.STAGES
    BM: gl.constexpr = tile.BM
    BN: gl.constexpr = tile.BN
    ROWS: gl.constexpr = rows_of(BM, ALTERNATING)
    PART: gl.constexpr = 0 if ALTERNATING else W
    COLUMNS: gl.constexpr = (N + BN - 1) // BN
    EACH: gl.constexpr = (K + BM - 1) // BM * COLUMNS
    s, phase, turn = 0, 0, 0
    t = gl.program_id(0)
    # The second consumer passes over the stages of the first tile.
    if ALTERNATING and W == 1:
        s, phase = ahead(s, phase, _steps(steps_ptr, t, total, EACH), STAGES)
        t += gl.num_programs(0)
    while t < total:
        # The largest groups come first, so that the last tiles are short.
        group = gl.load(steps_ptr + t // EACH * 2)
        steps = _steps(steps_ptr, t, total, EACH)
        row, column = place(t % EACH, K, BM, COLUMNS, tile.SWIZZLE)
        acc, _, s, phase = summed(ring, s, phase, steps, turn, LEFT, False, W, tile)  # [ROWS, BN]
        turn ^= 1
        store(out_desc, staging, acc, group * K + K, K, row * BM + PART * ROWS, column * BN)
        # The next tile of this program; alternating, the one after it.
        t += gl.num_programs(0)
        if ALTERNATING:
            s, phase = ahead(s, phase, _steps(steps_ptr, t, total, EACH), STAGES)
            t += gl.num_programs(0)
    tma.store_wait(0)


@gluon.jit
def _loader(ring, lhs_desc, dz_desc, spans_ptr, total, SPANS, K: gl.constexpr, N: gl.constexpr,
            tile: gl.constexpr):
    """Loads the rows of every tile's group, as far ahead as there are stages."""
    BM: gl.constexpr = tile.BM
    BN: gl.constexpr = tile.BN
    BK: gl.constexpr = tile.BK
    COLUMNS: gl.constexpr = (N + BN - 1) // BN
    EACH: gl.constexpr = (K + BM - 1) // BM * COLUMNS
    # Every stage is free at first: its barrier passes for the parity before.
    s, phase = 0, 1
    t = gl.program_id(0)
    while t < total:
        row, column = place(t % EACH, K, BM, COLUMNS, tile.SWIZZLE)
        for span in range(SPANS):
            at = (t // EACH * SPANS + span) * 2
            start = gl.load(spans_ptr + at)
            size = gl.load(spans_ptr + at + 1)
            for k in range((size + BK - 1) // BK):
                # Both consumers have read what was in this stage.
                mbarrier.wait(ring.empty.index(s), phase)
                full = ring.full.index(s)
                mbarrier.expect(full, (BM + BN) * BK * 2)
                # Rows past the group's last are 0, whatever is there.
                end, first = start + size, FAR - size + k * BK
                left, right = ring.left.index(s), ring.right.index(s)
                tma.async_copy_global_to_shared(lhs_desc, [FAR, end, first, row * BM], full, left)
                tma.async_copy_global_to_shared(dz_desc, [FAR, end, first, column * BN], full, right)
                s, phase = following(s, phase, tile.STAGES)
        t += gl.num_programs(0)


@gluon.jit
def hopper_right_kernel(
    lhs_ptr, dz_ptr, steps_ptr, spans_ptr, GROUPS, SPANS,  # [rows, K], [rows, N], [GROUPS, 2], [GROUPS, SPANS, 2]
    dright_ptr,  # [GROUPS, K, N]
    K: gl.constexpr, N: gl.constexpr, DOWN: gl.constexpr, ACROSS: gl.constexpr, BLOCK_M: gl.constexpr, NUM_STAGES: gl.constexpr,
    SWIZZLE: gl.constexpr, ALTERNATING: gl.constexpr,
):
    # dright[g] = lhs^T dz over the spans of rows of a group. `steps` has a group and how many times `BLOCK_M` rows it takes, the largest groups
    # first; `spans` have the first row and the number of rows of each, in the same order. A tile has `DOWN` rows and `ACROSS` columns of a matrix.
    dtype: gl.constexpr = lhs_ptr.dtype.element_ty
    PARTS: gl.constexpr = 1 if ALTERNATING else CONSUMERS
    ROWS: gl.constexpr = rows_of(DOWN, ALTERNATING)
    STORED: gl.constexpr = columns_at_once(ROWS, ACROSS)
    total = GROUPS * ((K + DOWN - 1) // DOWN) * ((N + ACROSS - 1) // ACROSS)
    lhs_desc = ragged(lhs_ptr, K, BLOCK_M, DOWN)
    dz_desc = ragged(dz_ptr, N, BLOCK_M, ACROSS)
    out_desc = ragged(dright_ptr, N, ROWS, STORED)
    a_s = stages_of(dtype, [1, 1, BLOCK_M, DOWN], NUM_STAGES)
    b_s = stages_of(dtype, [1, 1, BLOCK_M, ACROSS], NUM_STAGES)
    full, empty, turns = barriers_of(NUM_STAGES, PARTS)
    staging = stages_of(dright_ptr.dtype.element_ty, [1, 1, ROWS, STORED], CONSUMERS)
    ring = Ring(a_s, b_s, b_s, full, empty, turns)
    tile: gl.constexpr = Tile(DOWN, ACROSS, BLOCK_M, NUM_STAGES, SWIZZLE, ALTERNATING)
    # Two consumers of four warps with 232 registers a thread, one producer warp with 40.
    gl.warp_specialize([
        (_consumer, (ring, staging.index(0), out_desc, steps_ptr, total, 0, K, N, tile)),
        (_consumer, (ring, staging.index(1), out_desc, steps_ptr, total, 1, K, N, tile)),
        (_loader, (ring, lhs_desc, dz_desc, spans_ptr, total, SPANS, K, N, tile)),
    ], [4, 1], [232, 40])
