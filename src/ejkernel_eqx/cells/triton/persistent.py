"""What the two passes share whose weight stays on the chip: the weight itself, products with it, and the barrier between steps.

A launch has a program for every tile of rows and columns, and all of them run at the same time. In every step each multiplies the states of its
rows, which the programs of the same rows have written, by its own columns of the weight. Before it reads them, it waits until all of
these programs have arrived at the end of the step before.

**Why waiting ends.** A program waits only for programs of its own launch. A launch that waits has at most as many programs as the device has
multiprocessors (`TritonConfig.concurrent_programs`; otherwise each step is a launch, without waiting). So each program gets a place as soon
as other kernels have left theirs, and those wait for nothing that this launch does.
"""

import triton
import triton.language as tl

from .tile import within


# fmt: off
@triton.jit
def arrive(arrived_ptr):
    """Makes what this program has written visible to those that wait."""
    tl.debug_barrier()  # of all threads, on behalf of which one arrives
    tl.atomic_add(arrived_ptr, 1, sem="release", scope="gpu")


@triton.jit
def wait_for(arrived_ptr, count, SPIN: tl.constexpr):
    """Returns when programs have arrived `count` times."""
    if SPIN == "asm":
        seen = _acquire(arrived_ptr)
        while seen < count:
            seen = _acquire(arrived_ptr)
    elif SPIN == "atomic":
        seen = tl.atomic_add(arrived_ptr, 0, sem="acquire", scope="gpu")
        while seen < count:
            seen = tl.atomic_add(arrived_ptr, 0, sem="acquire", scope="gpu")


@triton.jit
def _acquire(arrived_ptr):
    return tl.inline_asm_elementwise(
        "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [arrived_ptr], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _split(BLOCK_K: tl.constexpr, SPLIT: tl.constexpr):
    """The numbers below `BLOCK_K` in equal parts, `[SPLIT, BK / SPLIT]`."""
    return tl.arange(0, SPLIT)[:, None] * (BLOCK_K // SPLIT) + tl.arange(0, BLOCK_K // SPLIT)[None, :]


@triton.jit
def resident(weight_ptr, feature, exists, K: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr):
    """These rows of a weight `[*, K]`: a tuple of blocks `[W, BK]`, or with `SPLIT` `[SPLIT, BK / SPLIT, W]`. Operands of products outside of
    the loop remain where products read them: in shared memory, or with `SPLIT` in registers."""
    blocks = ()
    for first in tl.static_range(0, K, BLOCK_K):  # pyright: ignore[reportGeneralTypeIssues]
        if SPLIT:
            k = first + _split(BLOCK_K, SPLIT)[:, :, None]  # [SPLIT, BK / SPLIT, 1]
            at, mask = feature[None, None, :] * K + k, exists[None, None, :] & (k < K)
        else:
            k = first + tl.arange(0, BLOCK_K)  # [BK]
            at, mask = feature[:, None] * K + k[None, :], within(exists, k, K)  # [W, BK]
        blocks = blocks + (tl.load(weight_ptr + at, mask=mask, other=0.0),)
    return blocks


@triton.jit
def _source(source_ptr, at, inside, block: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr):
    """A block `[BM, BK]`, or with `SPLIT` `[SPLIT, BM, BK / SPLIT]`, of what other programs have written: past this multiprocessor's own cache."""
    if SPLIT:
        k = block * BLOCK_K + _split(BLOCK_K, SPLIT)[:, None, :]  # [SPLIT, 1, BK / SPLIT]
        at, mask = at[None, :, None] + k, inside[None, :, None] & (k < K)
    else:
        k = block * BLOCK_K + tl.arange(0, BLOCK_K)  # [BK]
        at, mask = at[:, None] + k[None, :], within(inside, k, K)  # [BM, BK]
    return tl.load(source_ptr + at, mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit
def product(source_ptr, at, inside, blocks, K: tl.constexpr, BLOCK_M: tl.constexpr, W: tl.constexpr, BLOCK_K: tl.constexpr,
            PRECISION: tl.constexpr, AHEAD: tl.constexpr, SPLIT: tl.constexpr):
    """The rows of the source that begin `at` times the resident rows of the weight: `[BM, W]`. Blocks of the source are loaded `AHEAD` products
    early. With `SPLIT`, each warp sums over its own part of the features."""
    COUNT: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    # Hopper's products need 64 rows of the first operand, and read the second, of any width from 16 on, from shared memory.
    SWAP: tl.constexpr = not SPLIT and BLOCK_M < 64 and W >= 64  # pyright: ignore[reportAssignmentType]
    loaded = ()
    for block in tl.static_range(min(AHEAD, COUNT)):  # pyright: ignore[reportGeneralTypeIssues]
        loaded = loaded + (_source(source_ptr, at, inside, block, K, BLOCK_K, SPLIT),)
    if SPLIT:
        total = tl.zeros([SPLIT, BLOCK_M, W], tl.float32)
    else:
        total = tl.zeros([W, BLOCK_M] if SWAP else [BLOCK_M, W], tl.float32)
    for block in tl.static_range(COUNT):  # pyright: ignore[reportGeneralTypeIssues]
        if block + AHEAD < COUNT:
            loaded = loaded + (_source(source_ptr, at, inside, block + AHEAD, K, BLOCK_K, SPLIT),)
        if SPLIT:
            total = tl.dot(loaded[block], blocks[block], total, input_precision=PRECISION)
        elif SWAP:
            total = tl.dot(blocks[block], tl.trans(loaded[block]), total, input_precision=PRECISION)
        else:
            total = tl.dot(loaded[block], tl.trans(blocks[block]), total, input_precision=PRECISION)
    if SPLIT:
        return tl.sum(total, 0)
    elif SWAP:
        return tl.trans(total)
    else:
        return total


@triton.jit
def of_gates(total, GATES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """A tuple of the products `[BM, BN]` of every gate, from those of all `[BM, parts of BN]`: one part, or four."""
    if GATES == 1:
        return (total,)
    else:
        apart = tl.permute(tl.reshape(total, [BLOCK_M, 2, 2, BLOCK_N]), (0, 3, 1, 2))
        even, odd = tl.split(apart)
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        return (first, second, third, fourth)
