"""Locations of the chunks of packed sequences: tables computed on the device, of statically known size."""

import jax.numpy as jnp
from jax import Array

from ..._take import take_along


def tables_of(offsets: Array, length: int, chunk: int) -> tuple[Array, Array]:
    """Tables of offsets `[B, N + 1]` into rows of `length` tokens: `chunks [B * (length // chunk + N), 3]`, first row, end row and sequence,
    with both rows 0 for unused entries; `bounds [B * N, 3]`, first row, end row and first chunk of each sequence. Rows and
    sequences are counted over the whole batch."""
    batch, count = offsets.shape[0], offsets.shape[1] - 1
    most = length // chunk + count
    row = jnp.arange(batch, dtype=jnp.int32)[:, None]
    begin, end = offsets[:, :-1], offsets[:, 1:]
    upto = jnp.cumsum((end - begin + (chunk - 1)) // chunk, axis=1, dtype=jnp.int32)
    before = jnp.concatenate([jnp.zeros((batch, 1), jnp.int32), upto[:, :-1]], axis=1)
    bounds = jnp.stack([begin + row * length, end + row * length, before + row * most], axis=-1)

    index = jnp.arange(most, dtype=jnp.int32)[None]
    seq = jnp.sum(upto[:, None, :] <= index[..., None], axis=-1, dtype=jnp.int32)  # [B, most]
    used = seq < count
    seq = jnp.minimum(seq, count - 1)
    take = lambda x: take_along(x, seq, axis=1)
    first = take(begin) + (index - take(before)) * chunk
    last = jnp.minimum(first + chunk, take(end))
    first, last = (jnp.where(used, x + row * length, 0) for x in (first, last))
    chunks = jnp.stack([first, last, seq + row * count], axis=-1)
    return chunks.reshape(-1, 3), bounds.reshape(-1, 3)
