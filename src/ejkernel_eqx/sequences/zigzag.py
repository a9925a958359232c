"""Zigzag order: splits the sequence of causal attention so that every device has the same work."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Shaped

from .packing import read_axis, read_count


def reorder_sequence(x: Any, num_shards: int, *, axis: int) -> Shaped[Array, "..."]:
    r"""Reorders a sequence to zigzag order: of $2n$ equal chunks, shard $i$ of $n$ gets chunks $i$ and $2n - 1 - i$.

    Under a causal mask later tokens see more keys. An early and a late chunk together see $2n + 1$ chunks' worth in every
    shard (Llama 3, 2024, section 3.3.2). Reorder positions and segment ids in the same way.

    **Arguments:**

    - `x`: any array whose length along `axis` is divisible by `2 * num_shards`.
    - `num_shards`: the number $n$ of equal parts that the result will be split into; static.

    **Returns:** the reordered array, in the shape and dtype of `x`.

    **Raises:** `ValueError` for a length that is not divisible.
    """
    x, axis, shape = _in_chunks(x, num_shards, axis)
    x = x.reshape((*shape[:axis], 2, num_shards, shape[axis] // (2 * num_shards), *shape[axis + 1 :]))
    # The late half is reversed, so that shard i gets chunk 2n - 1 - i.
    early, late = _part(x, 0, axis), jnp.flip(_part(x, 1, axis), axis)
    return jnp.stack([early, late], axis=axis + 1).reshape(shape)


def restore_sequence(x: Any, num_shards: int, *, axis: int) -> Shaped[Array, "..."]:
    """The inverse of [`ejkernel_eqx.sequences.reorder_sequence`][]: from zigzag order to temporal order.

    **Arguments**, **returns**, **raises:** as for `reorder_sequence`.
    """
    x, axis, shape = _in_chunks(x, num_shards, axis)
    x = x.reshape((*shape[:axis], num_shards, 2, shape[axis] // (2 * num_shards), *shape[axis + 1 :]))
    early, late = _part(x, 0, axis + 1), jnp.flip(_part(x, 1, axis + 1), axis)
    return jnp.stack([early, late], axis=axis).reshape(shape)


def _part(x: Array, index: int, axis: int) -> Array:
    return jax.lax.index_in_dim(x, index, axis, keepdims=False)


def _in_chunks(x: Any, num_shards: int, axis: int) -> tuple[Array, int, tuple[int, ...]]:
    x = jnp.asarray(x)
    read_count("num_shards", num_shards, least=1)
    length = x.shape[read_axis(axis, x)]
    if length % (2 * num_shards):
        raise ValueError(
            f"x: expected a length along axis {axis} divisible by 2 * num_shards = {2 * num_shards}, received {length}; "
            f"pad it to {-(-length // (2 * num_shards)) * 2 * num_shards}, with segment id -1 for the padding."
        )
    return x, read_axis(axis, x), x.shape
