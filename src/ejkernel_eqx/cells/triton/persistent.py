"""Shared by the two passes whose weight stays on the chip: the weight itself, products with it, and the barrier between steps.

A launch has a program for every tile of rows and columns, and all of them run at the same time. In every step each multiplies the states of its
rows, which the programs of the same rows have written, by its own columns of the weight. Before it reads them, it waits until all of
these programs have arrived at the end of the step before. In the backward several programs may share columns, each with its part of the features
that products sum over; these exchange their sums.

**Why waiting ends.** A program waits only for programs of its own launch. A launch that waits has at most as many programs as the device has
multiprocessors (`TritonConfig.concurrent_programs`; otherwise each step is a launch, without waiting). So each program gets a place as soon
as other kernels have left theirs, and those wait for nothing that this launch does.
"""

import triton
import triton.language as tl


# fmt: off
@triton.jit
def arrive(arrived_ptr):
    """Makes what this program has written visible to those that wait."""
    tl.debug_barrier()  # of all threads, on behalf of which one arrives
    tl.atomic_add(arrived_ptr, 1, sem="release", scope="gpu")


@triton.jit
def wait_for(arrived_ptr, count):
    """Returns when programs have arrived `count` times."""
    # Each look acquires what was released before it.
    seen = _acquire(arrived_ptr)
    while seen < count:
        seen = _acquire(arrived_ptr)


@triton.jit
def _acquire(arrived_ptr):
    return tl.inline_asm_elementwise(
        "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [arrived_ptr], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _block(rows, part, block: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr):
    """The features of a block of this part `[BK]`, and whether rows have them `[rows, BK]`."""
    COUNT: tl.constexpr = (K + PARTS * BLOCK_K - 1) // (PARTS * BLOCK_K)
    k = (part * COUNT + block) * BLOCK_K + tl.arange(0, BLOCK_K)  # [BK]
    mask = rows[:, None] & tl.full([1, BLOCK_K], 1, tl.int1)
    if PARTS * COUNT * BLOCK_K != K:
        mask = mask & (k < K)[None, :]
    return k, mask


@triton.jit
def resident(weight_ptr, feature, exists, part, K: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr):
    """These rows of a weight `[*, K]`, one of equal parts of their features, as a tuple of blocks `[W, BK]`. Operands of products outside of the
    loop remain where products read them, in shared memory."""
    blocks = ()
    # Unrolled: every block has registers or shared memory of its own.
    for block in tl.static_range((K + PARTS * BLOCK_K - 1) // (PARTS * BLOCK_K)):  # pyright: ignore[reportGeneralTypeIssues]
        k, mask = _block(exists, part, block, K, BLOCK_K, PARTS)  # [BK], [W, BK]  # pyright: ignore[reportGeneralTypeIssues]
        blocks = blocks + (tl.load(weight_ptr + feature[:, None] * K + k[None, :], mask=mask, other=0.0),)
    return blocks


@triton.jit
def _source(source_ptr, at, inside, part, block: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr):
    """A block `[BM, BK]` of what other programs have written: past this multiprocessor's own cache."""
    k, mask = _block(inside, part, block, K, BLOCK_K, PARTS)  # [BK], [BM, BK]  # pyright: ignore[reportGeneralTypeIssues]
    return tl.load(source_ptr + at[:, None] + k[None, :], mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit
def product(source_ptr, at, inside, blocks, part, K: tl.constexpr, BLOCK_M: tl.constexpr, W: tl.constexpr, BLOCK_K: tl.constexpr,
            PARTS: tl.constexpr, PRECISION: tl.constexpr, AHEAD: tl.constexpr):
    """The rows of the source that begin `at` times the resident rows of the weight, summed over this part of the features: `[BM, W]`. Blocks of
    the source are loaded `AHEAD` products early."""
    COUNT: tl.constexpr = (K + PARTS * BLOCK_K - 1) // (PARTS * BLOCK_K)
    # Hopper's products need 64 rows of the first operand, and read the second, of any width from 16 on, from shared memory.
    SWAP: tl.constexpr = BLOCK_M < 64 and W >= 64  # pyright: ignore[reportAssignmentType]
    # The first blocks, as early as the tile says.
    loaded = ()
    for block in tl.static_range(min(AHEAD, COUNT)):  # pyright: ignore[reportGeneralTypeIssues]
        loaded = loaded + (_source(source_ptr, at, inside, part, block, K, BLOCK_K, PARTS),)
    total = tl.zeros([W, BLOCK_M] if SWAP else [BLOCK_M, W], tl.float32)
    for block in tl.static_range(COUNT):  # pyright: ignore[reportGeneralTypeIssues]
        if block + AHEAD < COUNT:
            loaded = loaded + (_source(source_ptr, at, inside, part, block + AHEAD, K, BLOCK_K, PARTS),)
        if SWAP:
            total = tl.dot(blocks[block], tl.trans(loaded[block]), total, input_precision=PRECISION)
        else:
            total = tl.dot(loaded[block], tl.trans(blocks[block]), total, input_precision=PRECISION)
    if SWAP:
        total = tl.trans(total)
    return total


@triton.jit
def of_gates(total, GATES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """A tuple of the products `[BM, BN]` of every gate, from those of all `[BM, parts of BN]`: one part, or four."""
    # Triton splits a tile in halves only: gates are padded to four.
    if GATES == 1:
        return (total,)
    else:
        apart = tl.permute(tl.reshape(total, [BLOCK_M, 2, 2, BLOCK_N]), (0, 3, 1, 2))
        even, odd = tl.split(apart)
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        return (first, second, third, fourth)
