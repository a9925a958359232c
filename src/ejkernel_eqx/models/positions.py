"""Learned embeddings of positions."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from .._broadcast import like
from .vocabulary import embed


def embed_positions(table: Array, tokens: Array, cache: Any, rows: dict[str, Any]) -> Array:
    """The embeddings `[..., T, E]` of the positions of tokens `[..., T]`, from the table `[positions, E]`. Positions count from the first real token
    of each row, cached tokens included. Those after the end of the table give NaN."""
    if "batch" in rows:
        at = rows["batch"].positions
    else:
        count, size = tokens.shape[-1], table.shape[0]
        if count > size:
            raise ValueError(
                f"tokens: expected at most {size} in a row, as many as the model has positions, received {count}; leave out the first ones."
            )
        at = jnp.arange(count, dtype=jnp.int32)
        if (real := rows.get("padding_mask")) is not None and count:
            at = like(at, real) - jnp.argmax(real, axis=-1, keepdims=True).astype(jnp.int32)
        if cache is not None:
            lengths = cache.bounded[0].lengths[0][..., None]
            at = like(at, lengths) + lengths
    at = like(at, tokens)
    x = embed(table, jnp.maximum(at, 0))
    return jnp.where(at[..., None] < table.shape[0], x, jnp.asarray(jnp.nan, x.dtype))
