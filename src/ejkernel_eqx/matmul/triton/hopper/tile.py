"""Parts of Hopper's kernels: boxes that end with a group, the ring of stages between the loader and the consumers, and how a tile is stored.

A program has one warp that loads and two groups of four warps, the consumers, each with half of a tile's rows or, alternating, with every other
tile. Memory moves by tensor descriptors (TMA) alone: what a box has past the end of its tensor is loaded as 0 and not stored."""

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

CONSUMERS = gl.constexpr(2)
FAR = gl.constexpr(2**30)
"""More rows than any group has: the coordinate of boxes that end with a group (see `ragged`)."""
PLAIN, RIGHT, LEFT = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
"""Which operand of a product is stored transposed: neither, `[BN, BK]` on the right, or `[BK, BM]` on the left."""
# The ring of stages: tiles of the left side, of the right side and of the second one, and what `barriers_of`
# makes.
Ring = namedtuple("Ring", "left right other full empty turns")
# A tile as it is stored, `BM` rows by `BN` columns, the contracted axis, and how consumers share tiles.
Tile = namedtuple("Tile", "BM BN BK STAGES SWIZZLE ALTERNATING")


@gluon.jit
def ragged(ptr, width: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr):
    """A descriptor of rows whose boxes `[1, 1, BM, BN]` end at a row given with each access: the box at `[FAR, end, FAR - size + row, column]`
    begins at `row` of the `size` rows before `end`. In addresses of 64 bits the first two axes cancel what the third has too much,
    `FAR * (2**34 - width) + end * width + (FAR - size + row) * width`; and the third axis ends at `FAR`, so that row `size` is outside."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, BM, BN], ptr.dtype.element_ty)
    return tma.make_tensor_descriptor(
        ptr, [0x7FFF0000, 0x7FFF0000, FAR, width], [2**34 - width, width, width, 1], [1, 1, BM, BN], layout
    )


@gluon.jit
def place(number, size, BLOCK: gl.constexpr, COLUMNS: gl.constexpr, SWIZZLE: gl.constexpr):
    """Row and column of a tile of a group: `SWIZZLE` rows of tiles share columns, which the cache still has."""
    rows = (size + BLOCK - 1) // BLOCK
    # Tiles go down `SWIZZLE` rows of tiles before they go to the next column.
    width: gl.constexpr = SWIZZLE * COLUMNS
    top = number // width * SWIZZLE
    high = gl.minimum(rows - top, SWIZZLE)
    number = number % width
    return top + number % high, number // high


@gluon.jit
def stages_of(dtype: gl.constexpr, shape: gl.constexpr, STAGES: gl.constexpr):
    """Shared memory for tiles loaded ahead."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(shape, dtype)
    return gl.allocate_shared_memory(dtype, [STAGES] + shape, layout)


@gluon.jit
def barriers_of(STAGES: gl.constexpr, PARTS: gl.constexpr):
    """A barrier for every stage that is loaded, one for every stage that the `PARTS` consumers of a tile have read, and one for every consumer
    that waits for its turn."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=PARTS)
    turns = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(turns.index(i), count=1)
    return full, empty, turns


@gluon.jit
def following(s, phase, STAGES: gl.constexpr):
    """The stage after `s`, and the parity of its barriers."""
    s += 1
    phase = gl.where(s == STAGES, phase ^ 1, phase)
    return gl.where(s == STAGES, 0, s), phase


@gluon.jit
def ahead(s, phase, steps, STAGES: gl.constexpr):
    """The stage `steps` after `s`, which the other consumer reads, and the parity of its barriers."""
    last = s + steps
    return last % STAGES, phase ^ (last // STAGES & 1)


@gluon.jit
def operands(ring, s, KIND: gl.constexpr, PART: gl.constexpr, ROWS: gl.constexpr, tile: gl.constexpr):
    """Part `PART` of the left tile in a stage, and the right tiles: `[ROWS, BK]` and `[BK, BN]` twice."""
    BM: gl.constexpr = tile.BM
    BN: gl.constexpr = tile.BN
    BK: gl.constexpr = tile.BK
    a, b, c = ring.left.index(s), ring.right.index(s), ring.other.index(s)
    # A transposed operand is a view: the tensor cores read shared memory both ways.
    if KIND == LEFT:
        a = a.reshape([BK, BM]).slice(PART * ROWS, ROWS, dim=1).permute((1, 0))
    else:
        a = a.slice(PART * ROWS, ROWS)
    if KIND == RIGHT:
        b = b.reshape([BN, BK]).permute((1, 0))
        c = c.reshape([BN, BK]).permute((1, 0))
    else:
        b = b.reshape([BK, BN])
        c = c.reshape([BK, BN])
    return a, b, c


@gluon.jit
def skipped(ring, s, phase, steps, STAGES: gl.constexpr):
    """Frees `steps` stages unread."""
    for _ in range(steps):
        mbarrier.wait(ring.full.index(s), phase)
        mbarrier.arrive(ring.empty.index(s), count=1)
        s, phase = following(s, phase, STAGES)
    return s, phase


@gluon.jit
def summed(
    ring, s, phase, steps, turn, KIND: gl.constexpr, TWO: gl.constexpr, W: gl.constexpr, tile: gl.constexpr
):
    """Sums over `steps` stages of products by the right tile and, if `TWO`, by the second one, `[rows, BN]` each. Returns the next stage, too.

    If consumers alternate, one begins when the other has read its last stage: a barrier tells only whether a stage has been loaded an odd or an
    even number of times, so nobody may wait for a stage further ahead. `turn` is the parity of the number of tiles that it had before.

    Call it once per tile: a sum that a loop over tiles or a branch carries is spilled."""
    ALTERNATING: gl.constexpr = tile.ALTERNATING
    STAGES: gl.constexpr = tile.STAGES
    BN: gl.constexpr = tile.BN
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    ROWS: gl.constexpr = rows_of(tile.BM, ALTERNATING)
    PART: gl.constexpr = 0 if ALTERNATING else W
    acc = gl.zeros([ROWS, BN], gl.float32, layout)
    other = gl.zeros([ROWS, BN], gl.float32, layout)
    # One consumer multiplies while the other stores.
    if ALTERNATING:
        mbarrier.wait(ring.turns.index(W), turn ^ (1 - W))
    # The product of a stage is in flight while the next one is waited for.
    for k in range(steps):
        mbarrier.wait(ring.full.index(s), phase)
        a, b, c = operands(ring, s, KIND, PART, ROWS, tile)
        acc = warpgroup_mma(a, b, acc, is_async=True)
        if TWO:
            other = warpgroup_mma(a, c, other, is_async=True)
            acc, other = warpgroup_mma_wait(2, deps=[acc, other])
        else:
            acc = warpgroup_mma_wait(1, deps=[acc])
        # The products of the stage before have ended: it is free. Its number is computed, because a variable set to `s` before the loop and at
        # its end would not be carried: Triton 3.7 takes two names of one value for one when it looks for what a loop carries.
        mbarrier.arrive(ring.empty.index(gl.where(s == 0, STAGES, s) - 1), count=1, pred=k > 0)
        s, phase = following(s, phase, STAGES)
    if ALTERNATING:
        mbarrier.arrive(ring.turns.index(1 - W), count=1)
    # The last stage is free when its products have ended.
    if TWO:
        acc, other = warpgroup_mma_wait(0, deps=[acc, other])
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(ring.empty.index(gl.where(s == 0, STAGES, s) - 1), count=1, pred=steps > 0)
    return acc, other, s, phase


@gluon.jit
def rows_of(BM: gl.constexpr, ALTERNATING: gl.constexpr):
    """The rows of a tile that one consumer has."""
    return BM if ALTERNATING else BM // CONSUMERS


@gluon.jit
def columns_at_once(rows: gl.constexpr, columns: gl.constexpr):
    """The number of columns of a tile that are stored at once: 16 KiB."""
    return columns if rows * columns <= 8192 else 8192 // rows


@gluon.jit
def store(desc, staging, x, end, size, row, column):
    """Stores `x [rows, columns]` at `row` of the `size` rows before `end`, those rows that exist."""
    wide: gl.constexpr = x.shape[1]
    most: gl.constexpr = staging.shape[3]
    if wide == most:
        _store(desc, staging, x, end, size, row, column)
    else:
        y, z = gl.split(gl.permute(gl.reshape(x, (x.shape[0], 2, wide // 2)), (0, 2, 1)))
        _store(desc, staging, y, end, size, row, column)
        _store(desc, staging, z, end, size, row, column + wide // 2)


@gluon.jit
def _store(desc, staging, x, end, size, row, column):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, x.shape[1], 16])
    # The copy before has left the shared memory.
    tma.store_wait(0)
    staging.reshape([x.shape[0], x.shape[1]]).store(gl.convert_layout(x.to(desc.dtype), layout))
    # Copies see what threads have written only behind this fence.
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, [FAR, end, FAR - size + row, column], staging)
