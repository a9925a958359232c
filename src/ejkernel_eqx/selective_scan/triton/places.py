"""The location of a program: its split of a sequence, and its channels."""

from collections import namedtuple

import triton
import triton.language as tl

Grid = namedtuple("Grid", "BLOCKS GROUP GROUP_BLOCKS BI L BIAS_STRIDE BIAS TABLE")
"""The division of channels and tokens among programs, and the layout of the biases of time steps; all are constants."""
Split = namedtuple("Split", "block sequence split row length chunk first last size")
"""A program's block of channels, its sequence and its split of it; the sequence's first row, length and first chunk; the split's first chunk and the
one after its last; and the number of chunks of a split."""
Lanes = namedtuple("Lanes", "group i inside channel width l batch bias")
"""The group of a block of channels, the channels `[BI]`, which of them exist `[BI]`, the first one, and how many from it on are in the group; the
tokens of a chunk `[L]`; the batch row of the sequence, and its biases `[BI]`."""


@triton.jit
def place(pid, bounds_ptr, T, SPLITS, SPLIT_COUNT, L: tl.constexpr, BLOCKS: tl.constexpr, TABLE: tl.constexpr):  # fmt: skip
    """The `Split` of a program. The last of `SPLITS` splits may be omitted from the grid."""
    block = pid % BLOCKS
    split = pid // BLOCKS % SPLIT_COUNT
    sequence = pid // BLOCKS // SPLIT_COUNT
    # The location of the sequence: three numbers of a table, or uniform lengths.
    if TABLE:
        row = tl.load(bounds_ptr + sequence * 3)
        length = tl.load(bounds_ptr + sequence * 3 + 1) - row
        chunk = tl.load(bounds_ptr + sequence * 3 + 2)
    else:
        row = sequence * T
        length = sequence * 0 + T  # a tensor, even if the length is a constant
        chunk = sequence * ((T + L - 1) // L)
    # Splits consist of whole chunks, `size` each, except for the last ones, which may be shorter or empty.
    chunks = (length + L - 1) // L
    size = (chunks + SPLITS - 1) // SPLITS
    first = split * size
    last = tl.minimum(first + size, chunks)
    return Split(block, sequence, split, row.to(tl.int64), length, chunk.to(tl.int64), first, last, size)


@triton.jit
def channels_of(at, bias_ptr, SEQUENCES, grid):
    """The `Lanes` of a program with this `Split`."""
    group = at.block // grid.GROUP_BLOCKS
    inner = at.block % grid.GROUP_BLOCKS * grid.BI
    each = inner + tl.arange(0, grid.BI)  # [BI]
    if grid.GROUP % grid.BI == 0:
        inside = tl.full([grid.BI], True, tl.int1)  # [BI]
    else:
        inside = each < grid.GROUP  # [BI]
    i = group * grid.GROUP + each  # [BI]
    channel = group * grid.GROUP + inner
    width = grid.GROUP - inner
    l = tl.arange(0, grid.L)  # [L]
    # Rows of the batch may have biases of their own.
    batch = (at.sequence // SEQUENCES).to(tl.int64)
    bias = of_channels(bias_ptr + batch * grid.BIAS_STRIDE, i, inside, grid.BIAS)  # [BI]
    return Lanes(group, i, inside, channel, width, l, batch, bias)


@triton.jit
def of_channels(ptr, i, inside, GIVEN: tl.constexpr):
    """One number per channel; 0 if the call has none."""
    if GIVEN:
        return tl.load(ptr + i, mask=inside, other=0.0)  # [BI]
    else:
        return tl.zeros(i.shape, tl.float32)  # [BI]
