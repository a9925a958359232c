"""Prefetching: what a program loads into the cache for its next chunk while it processes this one."""

import triton
import triton.language as tl

SECTOR = tl.constexpr(32)  # bytes that a cache loads at once


@triton.jit
def touch(ptr, rows, width, ROWS: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, BI: tl.constexpr):
    """Prefetches into the cache without taking registers: loads one number of every sector of the first `rows` of `ROWS` rows of `width` (at
    most `WIDTH`) numbers, `STRIDE` apart. Returns sums `[BI]` for `keep_touched` only."""
    # A number of each sector suffices.
    EVERY: tl.constexpr = SECTOR * 8 // ptr.dtype.element_ty.primitive_bitwidth  # numbers of a sector
    OF_ROW: tl.constexpr = (WIDTH + EVERY - 1) // EVERY  # sectors of a row
    sums = tl.zeros([BI], tl.float32)  # [BI]
    # Each lane takes a sector.
    for first in tl.static_range(0, ROWS * OF_ROW, BI):
        sector = first + tl.arange(0, BI)  # [BI]
        row = sector // OF_ROW
        column = sector % OF_ROW * EVERY
        known = (row < tl.minimum(rows, ROWS)) & (column < width)
        sums += tl.load(ptr + row * STRIDE + column, mask=known, other=0.0).to(tl.float32)  # [BI]
    return sums


@triton.jit
def touch_rows(ptr, rows, lanes, sizes):
    """`touch` for the channels of a program over the first `rows` tokens of a chunk."""
    L: tl.constexpr = 1 << sizes.LEVELS
    return touch(ptr, rows, lanes.width, L, sizes.BI, sizes.I, sizes.BI)


@triton.jit
def touch_projection(ptr, tokens, sizes):
    """`touch` for `B` or `C` of a chunk, whose length matters only if it is 0."""
    WIDTH: tl.constexpr = sizes.N << sizes.LEVELS
    return touch(ptr, tokens, WIDTH, 1, WIDTH, 0, sizes.BI)


@triton.jit
def keep_touched(ptr, sums, zero, BI: tl.constexpr):
    """Keeps the compiler from removing the loads of `touch`; it cannot know that nothing is stored here."""
    lane = tl.arange(0, BI)  # [BI]
    tl.store(ptr + lane, sums, mask=lane < zero)
