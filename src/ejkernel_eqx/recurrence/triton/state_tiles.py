"""The location of a program's states: its tile of a state, the sequence over which it is computed, and the split of that sequence.

Splits have programs of their own, which begin with an edge: the state before the split, or in the backward pass the gradient of the state after it.
"""
# pyright: reportGeneralTypeIssues=false

from collections import namedtuple

import triton
import triton.language as tl

from .places import Chunk
from .tile import load_state, store_tile

StateTile = namedtuple("StateTile", "seq split h d0 v0 first length chunk offset")
"""A program's sequence and split of it, its state head, and the first key and value channel of its tile; the first row of the sequence (64 bits), its
number of rows, and the index of its first chunk (64 bits); and the offset of the head's state in `[sequences, HS, D, V]`."""


States = namedtuple("States", "HS D V BLOCK_K BLOCK_V SPLITS")
"""The sizes of states and of their tiles, and the number of splits of a sequence; all are constants."""


# fmt: off
@triton.jit
def sequence_of(seq, bounds_ptr, T, CHUNK: tl.constexpr, TABLE: tl.constexpr):
    """The first row of a sequence (64 bits), its number of rows and the index of its first chunk (64 bits)."""
    if TABLE:
        entry = bounds_ptr + seq.to(tl.int64) * 3  # a row of [sequences, 3]: first row, end row, first chunk
        start = tl.load(entry)
        count = tl.load(entry + 1) - start
        chunk = tl.load(entry + 2).to(tl.int64)
        first = start.to(tl.int64)
    else:
        count = T + 0 * seq
        chunk = seq.to(tl.int64) * tl.cdiv(T, CHUNK)
        first = seq.to(tl.int64) * T
    return first, count, chunk


@triton.jit
def state_tile(bounds_ptr, T, states, CHUNK: tl.constexpr, TABLE: tl.constexpr):
    """The `StateTile` of a program, for programs over sequences, splits, state heads, tiles of key channels and of value channels (fastest)."""
    # The program's number, taken apart from its fastest part on.
    tiles_v: tl.constexpr = (states.V + states.BLOCK_V - 1) // states.BLOCK_V
    tiles_k: tl.constexpr = (states.D + states.BLOCK_K - 1) // states.BLOCK_K
    index = tl.program_id(0)
    v0, index = index % tiles_v * states.BLOCK_V, index // tiles_v
    d0, index = index % tiles_k * states.BLOCK_K, index // tiles_k
    h, index = index % states.HS, index // states.HS
    split, seq = index % states.SPLITS, index // states.SPLITS
    first, length, chunk = sequence_of(seq, bounds_ptr, T, CHUNK, TABLE)
    return StateTile(seq, split, h, d0, v0, first, length, chunk, (seq.to(tl.int64) * states.HS + h) * (states.D * states.V))


@triton.jit
def nth_chunk(at, n, CHUNK: tl.constexpr):
    """The `Chunk` with number `n` of the sequence of a `StateTile`."""
    return Chunk(at.first + n * CHUNK, tl.minimum(at.length - n * CHUNK, CHUNK), at.seq)


@triton.jit
def entering_state(edges_ptr, initial_ptr, at, states, INITIAL: tl.constexpr):
    """The state before a split, or the gradient of the state after it: of `edges [sequences, SPLITS, HS, D, V]` if there are several splits,
    else of `initial [sequences, HS, D, V]`, else zero."""
    state = tl.zeros([states.BLOCK_K, states.BLOCK_V], tl.float32)  # [BK, BV]
    # Each split continues from its edge; a sequence without splits from the state that enters it.
    if states.SPLITS > 1:
        edge = (at.seq.to(tl.int64) * states.SPLITS + at.split) * states.HS + at.h
        state = load_state(edges_ptr + edge * (states.D * states.V), at.d0, at.v0, states.D, states.V, states.BLOCK_K, states.BLOCK_V)  # [BK, BV]
    elif INITIAL:
        state = load_state(initial_ptr + at.offset, at.d0, at.v0, states.D, states.V, states.BLOCK_K, states.BLOCK_V).to(tl.float32)  # [BK, BV]
    return state


@triton.jit
def store_leaving(ptr, state, at, states, LAST: tl.constexpr):
    """Stores the state after a sequence, or the gradient of the state before it: the program of the split `LAST` has it."""
    # A test while running only if there are several splits.
    if states.SPLITS == 1:
        store_tile(ptr + at.offset + at.d0 * states.V, state, states.V, states.D - at.d0, at.v0, states.V, states.BLOCK_K, states.BLOCK_V)
    elif at.split == LAST:
        store_tile(ptr + at.offset + at.d0 * states.V, state, states.V, states.D - at.d0, at.v0, states.V, states.BLOCK_K, states.BLOCK_V)


@triton.jit
def chunks_of_split(split, length, CHUNK: tl.constexpr, SPLITS: tl.constexpr):
    """The first chunk of a split of a sequence and the one after its last. The last splits of a short sequence are shorter or empty."""
    chunks = tl.cdiv(length, CHUNK)
    if SPLITS == 1:
        return 0 * chunks, chunks
    # Whole chunks, as many in each split but the last ones.
    each = tl.cdiv(chunks, SPLITS)
    return tl.minimum(split * each, chunks), tl.minimum((split + 1) * each, chunks)
