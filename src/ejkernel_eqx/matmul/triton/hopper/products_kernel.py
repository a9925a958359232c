"""Hopper's kernel of the result, and of the gradient of the left side: a persistent kernel that goes from tile to tile of the groups' rows."""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ..forward_kernel import activated, HALVES, PAIR, rounded, scaled, SUM
from .tile import (
    ahead,
    barriers_of,
    columns_at_once,
    CONSUMERS,
    following,
    place,
    ragged,
    Ring,
    rows_of,
    skipped,
    stages_of,
    store,
    summed,
    Tile,
)

# Which products, by which right sides, and what follows from them; as the kernel's parameters.
Form = namedtuple(
    "Form", "K W N KIND TRANSPOSED MAPPED BIAS UP_BIAS ACTIVATION ALPHA LIMIT UP_SHIFT SAVE FAST"
)
# Sizes of groups `[B, E]`, the rows `M` of each batch row, and the number of all tiles.
Groups = namedtuple("Groups", "sizes_ptr B M E total")
# Descriptors of what a call reads and writes; one that it does not need is another.
Inputs = namedtuple("Inputs", "lhs right other up")
Outputs = namedtuple("Outputs", "out gate up_z")


# fmt: off
@gluon.jit
def _tiles(size, BM: gl.constexpr, COLUMNS: gl.constexpr):
    return (size + BM - 1) // BM * COLUMNS


@gluon.jit
def group_of(sizes_ptr, t, group, first, start, size, B, M, E, BM: gl.constexpr, COLUMNS: gl.constexpr):
    """The group that has tile `t`, its first tile, first row and rows, from those of an earlier tile. Every batch row has `E + 1` groups, of
    which the last has the rows past the others."""
    tiles = _tiles(size, BM, COLUMNS)
    # Groups come one after the other, so a search from the last one found takes few steps.
    while (t >= first + tiles) & (group < B * (E + 1) - 1):
        first += tiles
        start += size
        group += 1
        b = group // (E + 1)
        e = group % (E + 1)
        size = (b + 1) * M - start
        if e < E:
            size = gl.minimum(gl.maximum(gl.load(sizes_ptr + b * E + e), 0), size)
        tiles = _tiles(size, BM, COLUMNS)
    return group, first, start, size


@gluon.jit
def _consumer(ring, staging, outputs, groups, bias_ptr, up_bias_ptr, W: gl.constexpr, form: gl.constexpr,
              tile: gl.constexpr):
    """Multiplies half the rows of every tile or all of every other one, and stores what follows from the products."""
    ALTERNATING: gl.constexpr = tile.ALTERNATING
    BM: gl.constexpr = tile.BM
    BN: gl.constexpr = tile.BN
    N: gl.constexpr = form.N
    LIMIT: gl.constexpr = form.LIMIT
    ROWS: gl.constexpr = rows_of(BM, ALTERNATING)
    PART: gl.constexpr = 0 if ALTERNATING else W
    COLUMNS: gl.constexpr = (N + BN - 1) // BN
    TWO: gl.constexpr = form.KIND == PAIR or form.KIND == HALVES
    STEPS: gl.constexpr = (form.K + tile.BK - 1) // tile.BK * (2 if form.KIND == SUM else 1)
    sizes_ptr, B, M, E = groups.sizes_ptr, groups.B, groups.M, groups.E
    group, first, start, size = -1, 0, 0, 0
    s, phase, turn = 0, 0, 0
    t = gl.program_id(0)
    # The second consumer passes over the stages of the first tile.
    if ALTERNATING and W == 1:
        group, first, start, size = group_of(sizes_ptr, t, group, first, start, size, B, M, E, BM, COLUMNS)
        s, phase = ahead(s, phase, gl.where(group % (E + 1) < E, STEPS, 0), tile.STAGES)
        t += gl.num_programs(0)
    while t < groups.total:
        # Which rows and columns; a second half may be of no rows, and rows past the last group are 0.
        group, first, start, size = group_of(sizes_ptr, t, group, first, start, size, B, M, E, BM, COLUMNS)
        row, column = place(t - first, size, BM, COLUMNS, tile.SWIZZLE)
        row = row * BM + PART * ROWS
        e = group % (E + 1)
        # Rows of no group take no steps: their sum stays 0.
        steps = gl.where(e < E, STEPS, 0)
        # A consumer without rows frees the stages, which the loader fills for both.
        if not ALTERNATING:
            busy = gl.where(row < size, steps, 0)
            s, phase = skipped(ring, s, phase, steps - busy, tile.STAGES)
            steps = busy
        # The products, [ROWS, BN] each.
        acc, other, s, phase = summed(ring, s, phase, steps, turn, form.TRANSPOSED, TWO, W, tile)
        turn ^= 1
        # The epilogue: scale and bias, the limits, the activation and the gate.
        index = e
        if form.MAPPED:
            index += group // (E + 1) * E
        n = column * BN + gl.arange(0, BN, gl.SliceLayout(0, acc.type.layout))  # [BN]
        n = gl.where(e < E, n, form.W)
        at = index.to(gl.int64) * form.W
        acc = scaled(acc, bias_ptr, bias_ptr, at, n, form.W, False, form.BIAS)
        if form.SAVE:
            gate = acc
        if TWO:
            if form.KIND == HALVES:
                other = scaled(other, bias_ptr, bias_ptr, at + N, n, form.W - N, False, form.BIAS)
            else:
                other = scaled(other, up_bias_ptr, up_bias_ptr, at, n, form.W, False, form.UP_BIAS)
            # The backward reads the products before the activation.
            if form.SAVE:
                gate = rounded(gate, outputs.gate.dtype, LIMIT)
                store(outputs.gate, staging, gate, start + size, size, row, column * BN)
                up_z = rounded(other, outputs.up_z.dtype, LIMIT)
                store(outputs.up_z, staging, up_z, start + size, size, row, column * BN)
            if LIMIT > 0:
                # Comparisons keep NaN.
                acc = gl.where(acc > LIMIT, LIMIT, acc)
                other = gl.where(other > LIMIT, LIMIT, gl.where(other < -LIMIT, -LIMIT, other))
            acc = activated(acc, form.ACTIVATION, form.ALPHA, form.FAST) * (other + form.UP_SHIFT)
        else:
            if form.SAVE:
                store(outputs.gate, staging, gate, start + size, size, row, column * BN)
            acc = activated(acc, form.ACTIVATION, form.ALPHA, form.FAST)
        store(outputs.out, staging, acc, start + size, size, row, column * BN)
        # The next tile of this program; alternating, the one after it, past the stages of the other consumer's.
        t += gl.num_programs(0)
        if ALTERNATING:
            group, first, start, size = group_of(sizes_ptr, t, group, first, start, size, B, M, E, BM, COLUMNS)
            s, phase = ahead(s, phase, gl.where(group % (E + 1) < E, STEPS, 0), tile.STAGES)
            t += gl.num_programs(0)
    # Shared memory is given back when its last copy has left.
    tma.store_wait(0)


@gluon.jit
def _loader(ring, inputs, groups, form: gl.constexpr, tile: gl.constexpr):
    """Loads the operands of every tile, as far ahead as there are stages."""
    KIND: gl.constexpr = form.KIND
    N: gl.constexpr = form.N
    BM: gl.constexpr = tile.BM
    BN: gl.constexpr = tile.BN
    BK: gl.constexpr = tile.BK
    COLUMNS: gl.constexpr = (N + BN - 1) // BN
    SUMMANDS: gl.constexpr = 2 if KIND == SUM else 1
    TWO: gl.constexpr = KIND == PAIR or KIND == HALVES
    BYTES: gl.constexpr = (BM + (2 if TWO else 1) * BN) * BK * 2
    sizes_ptr, B, M, E = groups.sizes_ptr, groups.B, groups.M, groups.E
    group, first, start, size = -1, 0, 0, 0
    # Every stage is free at first: its barrier passes for the parity before.
    s, phase = 0, 1
    t = gl.program_id(0)
    while t < groups.total:
        group, first, start, size = group_of(sizes_ptr, t, group, first, start, size, B, M, E, BM, COLUMNS)
        row, column = place(t - first, size, BM, COLUMNS, tile.SWIZZLE)
        e = group % (E + 1)
        index = e
        if form.MAPPED:
            index += group // (E + 1) * E
        if e < E:
            for summand in gl.static_range(SUMMANDS):
                left = inputs.lhs if summand == 0 else inputs.other
                right = inputs.right if summand == 0 else inputs.up
                for k in range((form.K + BK - 1) // BK):
                    # Both consumers have read what was in this stage.
                    mbarrier.wait(ring.empty.index(s), phase)
                    full, n = ring.full.index(s), column * BN
                    mbarrier.expect(full, BYTES)
                    # Rows of the next group are loaded, not stored.
                    m = start + row * BM
                    tma.async_copy_global_to_shared(left, [m, k * BK], full, ring.left.index(s))
                    _load(right, index, k * BK, n, full, ring.right.index(s), form.TRANSPOSED)
                    if KIND == HALVES:
                        _load(right, index, k * BK, N + n, full, ring.other.index(s), form.TRANSPOSED)
                    elif KIND == PAIR:
                        _load(inputs.up, index, k * BK, n, full, ring.other.index(s), form.TRANSPOSED)
                    s, phase = following(s, phase, tile.STAGES)
        t += gl.num_programs(0)


@gluon.jit
def _load(desc, index, k, n, barrier, to, TRANSPOSED: gl.constexpr):
    if TRANSPOSED:
        tma.async_copy_global_to_shared(desc, [index, n, k], barrier, to)
    else:
        tma.async_copy_global_to_shared(desc, [index, k, n], barrier, to)


@gluon.jit
def _right(ptr, matrices, K: gl.constexpr, WIDTH: gl.constexpr, TRANSPOSED: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr):
    """A descriptor of right sides `[matrices, K, WIDTH]` or, transposed, `[matrices, WIDTH, K]`."""
    down: gl.constexpr = WIDTH if TRANSPOSED else K
    across: gl.constexpr = K if TRANSPOSED else WIDTH
    shape: gl.constexpr = [1, BN, BK] if TRANSPOSED else [1, BK, BN]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(shape, ptr.dtype.element_ty)
    return tma.make_tensor_descriptor(ptr, [matrices, down, across], [down * across, across, 1], shape, layout)


@gluon.jit
def _rows(ptr, rows, K: gl.constexpr, BM: gl.constexpr, BK: gl.constexpr):
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, BK], ptr.dtype.element_ty)
    return tma.make_tensor_descriptor(ptr, [rows, K], [K, 1], [BM, BK], layout)


@gluon.jit
def number_of_tiles(sizes_ptr, B, M, E, BM: gl.constexpr, COLUMNS: gl.constexpr, BLOCK_E: gl.constexpr):
    e = gl.arange(0, BLOCK_E, gl.BlockedLayout([1], [32], [4], [0]))  # [BLOCK_E]
    total = 0
    for b in range(B):
        sizes = gl.maximum(gl.load(sizes_ptr + b * E + e, mask=e < E, other=0), 0)  # [BLOCK_E]
        sizes = gl.where(e == E, gl.maximum(M - gl.sum(sizes, 0), 0), sizes)
        total += gl.sum(_tiles(sizes, BM, COLUMNS), 0)
    return total


@gluon.jit
def hopper_products_kernel(
    lhs_ptr, right_ptr, sizes_ptr, other_lhs_ptr, up_ptr,  # [B, M, K], [E, K, W] or, mapped, [B, E, K, W], [B, E], as both
    bias_ptr, up_bias_ptr, B, M, E,  # [E, W] or, mapped, [B, E, W]
    out_ptr, gate_ptr, up_z_ptr,  # [B, M, N]
    K: gl.constexpr, W: gl.constexpr, N: gl.constexpr, KIND: gl.constexpr, TRANSPOSED: gl.constexpr, MAPPED: gl.constexpr,
    BIAS: gl.constexpr, UP_BIAS: gl.constexpr, ACTIVATION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, UP_SHIFT: gl.constexpr,
    SAVE: gl.constexpr, FAST: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, NUM_STAGES: gl.constexpr,
    SWIZZLE: gl.constexpr, ALTERNATING: gl.constexpr, BLOCK_E: gl.constexpr,
):
    # out = act(z) or act(gate) (up + UP_SHIFT), where z, gate and up are lhs right[g] + bias; or the sum of two products: as `grouped_kernel`.
    dtype: gl.constexpr = lhs_ptr.dtype.element_ty
    COLUMNS: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    PARTS: gl.constexpr = 1 if ALTERNATING else CONSUMERS
    ROWS: gl.constexpr = rows_of(BLOCK_M, ALTERNATING)
    STORED: gl.constexpr = columns_at_once(ROWS, BLOCK_N)
    # Sizes of groups are data, so the number of tiles is counted here.
    total = number_of_tiles(sizes_ptr, B, M, E, BLOCK_M, COLUMNS, BLOCK_E)
    # Descriptors; those that the call does not need are others.
    matrices = B * E if MAPPED else E
    lhs_desc = _rows(lhs_ptr, B * M, K, BLOCK_M, BLOCK_K)
    right_desc = _right(right_ptr, matrices, K, W, TRANSPOSED, BLOCK_N, BLOCK_K)
    out_desc = ragged(out_ptr, N, ROWS, STORED)
    other_desc, up_desc, gate_desc, up_z_desc = lhs_desc, right_desc, out_desc, out_desc
    if KIND == SUM:
        other_desc = _rows(other_lhs_ptr, B * M, K, BLOCK_M, BLOCK_K)
    if KIND == SUM or KIND == PAIR:
        up_desc = _right(up_ptr, matrices, K, W, TRANSPOSED, BLOCK_N, BLOCK_K)
    if SAVE:
        gate_desc = ragged(gate_ptr, N, ROWS, STORED)
        if KIND == PAIR or KIND == HALVES:
            up_z_desc = ragged(up_z_ptr, N, ROWS, STORED)
    # Shared memory: stages and their barriers, and for each consumer what it stores.
    right_shape: gl.constexpr = [1, BLOCK_N, BLOCK_K] if TRANSPOSED else [1, BLOCK_K, BLOCK_N]
    a_s = stages_of(dtype, [BLOCK_M, BLOCK_K], NUM_STAGES)
    b_s = stages_of(dtype, right_shape, NUM_STAGES)
    c_s = b_s
    if KIND == PAIR or KIND == HALVES:
        c_s = stages_of(dtype, right_shape, NUM_STAGES)
    full, empty, turns = barriers_of(NUM_STAGES, PARTS)
    staging = stages_of(out_ptr.dtype.element_ty, [1, 1, ROWS, STORED], CONSUMERS)
    ring = Ring(a_s, b_s, c_s, full, empty, turns)
    inputs = Inputs(lhs_desc, right_desc, other_desc, up_desc)
    outputs = Outputs(out_desc, gate_desc, up_z_desc)
    groups = Groups(sizes_ptr, B, M, E, total)
    form: gl.constexpr = Form(K, W, N, KIND, TRANSPOSED, MAPPED, BIAS, UP_BIAS, ACTIVATION, ALPHA, LIMIT,
                              UP_SHIFT, SAVE, FAST)
    tile: gl.constexpr = Tile(BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES, SWIZZLE, ALTERNATING)
    # Two consumers of four warps with 232 registers a thread, one producer warp with 40.
    gl.warp_specialize([
        (_consumer, (ring, staging.index(0), outputs, groups, bias_ptr, up_bias_ptr, 0, form, tile)),
        (_consumer, (ring, staging.index(1), outputs, groups, bias_ptr, up_bias_ptr, 1, form, tile)),
        (_loader, (ring, inputs, groups, form, tile)),
    ], [4, 1], [232, 40])
