"""Packed sequences split into chunks that belong to one sequence each."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from ..sequences.packing import ended


class ChunkTable(NamedTuple):
    """The chunks of one row of packed sequences: the maximum number, sequence by sequence, with unused ones last."""

    first: Array  # [S]: the first chunk of each sequence
    count: Array  # [S]: the number of chunks of each sequence
    sequence: Array  # [C]: the sequence of each chunk
    begins: Array  # [C]: whether it is the first of its sequence
    rows: Array  # [C, L]: the row of each token; the length of the row if there is none


def chunk_table(offsets: Array, length: int, size: int) -> ChunkTable:
    """The chunks of `size` tokens of the sequences `offsets[s] .. offsets[s + 1]` of a row."""
    sequences = offsets.shape[0] - 1
    begin, end = offsets[:-1], offsets[1:]
    count = (end - begin + size - 1) // size
    ends = jnp.cumsum(count, dtype=jnp.int32)
    first = ends - count
    # Each sequence adds at most one partial chunk, which bounds their number for any offsets.
    chunk = jnp.arange(length // size + sequences, dtype=jnp.int32)
    sequence = ended(ends, length // size + sequences)
    is_used = sequence < sequences
    # Unused chunks name the last sequence, so that indices stay inside of the tables.
    sequence = jnp.minimum(sequence, sequences - 1)
    start = begin[sequence] + (chunk - first[sequence]) * size
    rows = start[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
    # The length is past the end of the row: reads give 0 there and writes are dropped.
    rows = jnp.where(is_used[:, None] & (rows < end[sequence, None]), rows, length)
    return ChunkTable(first, count, sequence, chunk == first[sequence], rows)
