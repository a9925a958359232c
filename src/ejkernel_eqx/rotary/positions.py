"""Positions of tokens along one axis or several, offsets, and lengths of sequences."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..core.arguments import broadcasts, read_array


def check_positions(positions: Any, shape: tuple[int, ...], axes: int | None = None) -> Array:
    """Integers that broadcast to `shape`, `[..., T]`; with `mrope_section` `[axes, ..., T]`, or `[T]` for text."""
    form = "[..., T]" if axes is None else f"[{axes}, ..., T]"
    positions = read_array("positions", positions, "integers", form)
    inner = positions.shape
    if axes is not None and positions.ndim > 1:
        if positions.shape[0] != axes:
            raise ValueError(
                f"positions: expected {form}, a position along each axis of mrope_section, received shape {positions.shape}; for "
                f"text broadcast them to ({axes}, ...)."
            )
        inner = positions.shape[1:]
    if not inner or not broadcasts(inner, shape):
        wanted = shape if axes is None else (axes, *shape)
        raise ValueError(
            f"positions: expected {form} that broadcasts to {wanted}, received shape {positions.shape}; use offset= to set the position "
            "of the first token only."
        )
    return positions


def count_from(offset: Any, lead: tuple[int, ...], tokens: int) -> Array:
    """`offset + arange(T)`, for each row if offsets differ."""
    remedy = "use positions= for one position per token"
    first = lax.expand_dims(read_rows("offset", offset, lead, "row", remedy), (-1,))
    steps = jnp.arange(tokens, dtype=jnp.int32)
    return first + lax.expand_dims(steps, range(first.ndim - 1))


def read_rows(name: str, value: Any, lead: tuple[int, ...], of: str, remedy: str) -> Array:
    """An integer or integers that broadcast to `lead`, as int32."""
    is_number = isinstance(value, int | np.integer) and not isinstance(value, bool)
    found = jnp.asarray(value, jnp.int32) if is_number else read_array(name, value, "integers", "[...]")
    if not broadcasts(found.shape, lead):
        raise ValueError(
            f"{name}: expected an integer or integers of shape {lead}, one per {of}, received shape {found.shape}; {remedy}."
        )
    return found.astype(jnp.int32)


def longest_of(positions: Array, axes: int | None) -> Array:
    """The last position of each row plus one, `[..., 1]`."""
    last = jnp.max(positions, axis=-1, keepdims=True, initial=-1)
    return (jnp.max(last, axis=0) if axes is not None and positions.ndim > 1 else last) + 1


def by_pair(positions: Array, axis_of_pair: np.ndarray | None) -> Array:
    """The position of each pair of features, `[..., T, 1]` or `[..., T, R / 2]`."""
    if axis_of_pair is None or positions.ndim == 1:
        return positions[..., None]
    found = positions[0][..., None]
    for axis in range(1, positions.shape[0]):
        is_its = lax.expand_dims(jnp.asarray(axis_of_pair == axis), range(positions.ndim - 1))
        found = jnp.where(is_its, positions[axis][..., None], found)
    return found


def axes_of_pairs(section: tuple[int, ...], interleaved: bool) -> np.ndarray:
    """The axis of positions by which each pair of features is rotated: in blocks, or interleaved."""
    if not interleaved:
        return np.repeat(np.arange(len(section)), section)
    axes = np.zeros(sum(section), int)
    for axis, count in enumerate(section[1:], start=1):
        axes[axis : count * len(section) : len(section)] = axis
    return axes
