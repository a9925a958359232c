"""Checks of the numbers that masks are made of."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from ..._values import check_between, FAR, known


def whole_number(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{name}: expected an int of at least {least}, received {value!r}.")
    return int(value)


def window_size(name: str, value: Any | None, least: int) -> int | Array | None:
    """An int if the value is known now, else an int32 array."""
    if value is None:
        return None
    if isinstance(value, bool) or not jnp.issubdtype(jnp.result_type(value), jnp.integer):
        raise ValueError(
            f"{name}: expected an int or an integer array{', or None' if least == 0 else ''}, received {value!r}; cast it first."
        )
    values = known(value)
    if values is not None and values.ndim == 0:
        if values < least:
            expected = "a key count >= 0 or None" if least == 0 else "a chunk of at least one position"
            raise ValueError(f"{name}: expected {expected}, received {values}.")
        return min(int(values), 2 * FAR)
    # Numbers that exceed 32 bits must not wrap around.
    clipped, info = jnp.asarray(value) if values is None else values, jnp.iinfo(jnp.result_type(value))
    if info.max > 2 * FAR:
        clipped = clipped.clip(max(-1, int(info.min)), 2 * FAR)
    array = check_between(
        name, jnp.asarray(clipped, jnp.int32), clipped, least, 2 * FAR, "it is a number of keys"
    )
    return jnp.maximum(array, least)


def counts(name: str, value: Any | None) -> Array | None:
    if value is None:
        return None
    return check_between(
        name, jnp.asarray(value, jnp.int32), value, 0, FAR, "it counts from the beginning of the row"
    )


def block_pair(block_size: Any) -> tuple[int, int]:
    """Queries and keys of a block, from an int for both or a pair."""
    sizes = (block_size,) * 2 if isinstance(block_size, int | np.integer) else tuple(block_size)
    if len(sizes) != 2:
        raise ValueError(f"block_size: expected an int or a pair (queries, keys), received {block_size!r}.")
    return whole_number("block_size", sizes[0], 1), whole_number("block_size", sizes[1], 1)
