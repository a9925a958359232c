"""Tiles of the scan in memory. A program has `BI` channels, each owned by one thread, and processes its tokens in chunks of `L`.

`zero` is a run-time 0: with an address that is not known to be aligned, each thread gets one channel of a row, not several adjacent ones."""

from collections import namedtuple

import triton
import triton.language as tl

from .rows import split_rows

Sizes = namedtuple("Sizes", "I N BI LEVELS STATE_LEVELS EVEN SEGMENTS")
"""Channels, states of a channel, channels of a program; log2 of the tokens of a chunk and of the padded states; whether all tiles are inside, and
whether sequences have segments. All are constants."""


@triton.jit
def load_tile(ptr, count, lanes, OTHER: tl.constexpr, sizes):
    """Tokens `0 .. count` of `[T, I]` as a float32 tile `[L, BI]`, `OTHER` past them; `EVEN`: the whole tile is inside."""
    at = ptr + lanes.l[:, None] * sizes.I + lanes.i[None, :]  # [L, BI]
    if sizes.EVEN:
        return tl.load(at).to(tl.float32)  # [L, BI]
    else:
        return tl.load(at, mask=(lanes.l[:, None] < count) & lanes.inside[None, :], other=OTHER).to(
            tl.float32
        )  # [L, BI]


@triton.jit
def store_tile(ptr, tile, count, lanes, sizes):
    """The counterpart of `load_tile`, in the dtype of the memory."""
    at = ptr + lanes.l[:, None] * sizes.I + lanes.i[None, :]  # [L, BI]
    if sizes.EVEN:
        tl.store(at, tile.to(ptr.dtype.element_ty))
    else:
        tl.store(at, tile.to(ptr.dtype.element_ty), mask=(lanes.l[:, None] < count) & lanes.inside[None, :])


@triton.jit
def no_states(inside, sizes):
    """A mask of the states that channels have, and zeros for them: tiles `[NS, BI]`."""
    # States are padded to a power of two.
    known = (tl.arange(0, 1 << sizes.STATE_LEVELS) < sizes.N)[:, None] & inside[None, :]  # [NS, BI]
    return known, tl.zeros([1 << sizes.STATE_LEVELS, sizes.BI], tl.float32)


@triton.jit
def states_at(ptr, i, sizes):
    """Pointers to all states of channels `i` in `[N, I]`, a tile `[2**STATE_LEVELS, BI]`."""
    # A row of each state, its channels side by side.
    n = tl.arange(0, 1 << sizes.STATE_LEVELS)  # [NS], NS = 2**STATE_LEVELS
    return (ptr + i)[None, :] + n[:, None] * sizes.I  # [NS, BI]


@triton.jit
def load_rates(ptr, i, known, sizes):
    """The rates of all states of channels `i`, as rows. Reloaded for every chunk to save registers."""
    rates = tl.load(states_at(ptr, i, sizes), mask=known, other=0.0)  # [NS, BI]
    return split_rows(rates, sizes.BI, sizes.STATE_LEVELS)  # NS rows [BI]


@triton.jit
def load_projection(ptr, n, l, sizes, UNROLL: tl.constexpr):
    """`B` or `C` of one state over the tokens of a chunk `[N, L]`; 0 for a state past the last."""
    L: tl.constexpr = 1 << sizes.LEVELS
    # No mask where turns of states are whole.
    if sizes.N % UNROLL:
        return tl.load(ptr + n * L + l, mask=(l < L) & (n < sizes.N), other=0.0)  # [L]
    else:
        return tl.load(ptr + n * L + l)  # [L]
