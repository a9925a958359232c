"""The rows of a call as the kernels see them: where each begins in the tokens of all, and how long it is."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from ..spec import CellArrays, PADDING, STARTS


class Rows(NamedTuple):
    bounds: Array  # int32 [R, 2]: the first token, and the number of tokens up to the last real one
    longest: Any
    """The largest number; an int if it is known."""
    inside: Array | None = None  # bool [tokens]: in some row; None: all are
    starts: Array | None = None  # bool [tokens]: starts from zeros
    real: Array | None = None  # bool [tokens]: no padding; None: all that are inside

    @property
    def count(self) -> int:
        return self.bounds.shape[0]

    def clear(self, x: Array, padding: bool = False) -> Array:
        """`x` `[tokens, ...]` with zeros where no row is, because kernels write nothing there; and with `padding` also there."""
        seen = self.real if padding and self.real is not None else self.inside
        return x if seen is None else jnp.where(seen[:, None], x, jnp.zeros((), x.dtype))

    def before(self, out: Array, initial: Array | None) -> Array:
        """The state before every token, from those after the tokens `[tokens, H]` and the initial ones `[R, H]`; zeros outside of rows."""
        features = out.shape[-1]
        first = jnp.zeros((self.count, features), out.dtype) if initial is None else initial.astype(out.dtype)
        # Rows of equal length are shifted by one token: [R T, H] to [R, T, H] and back.
        if self.inside is None:
            by_row = out.reshape(self.count, -1, features)
            return jnp.concatenate([first[:, None], by_row[:, :-1]], 1).reshape(out.shape)
        # The first entry only fills the place: a first state or a zero replaces it.
        before = jnp.concatenate([out[:1], out[:-1]])
        begin, length = self.bounds[:, 0], self.bounds[:, 1]
        begin = jnp.where(length > 0, begin, out.shape[0])  # past the end: dropped
        before = before.at[begin].set(first, mode="drop")
        if self.starts is not None:
            before = jnp.where(self.starts[:, None], jnp.zeros((), out.dtype), before)
        return self.clear(before)


def rows_of(arrays: CellArrays) -> Rows:
    batch, length = arrays.x.shape[:2]
    base = length * jnp.arange(batch, dtype=jnp.int32)
    time = jnp.arange(length, dtype=jnp.int32)[None]
    if arrays.offsets is not None:
        begin, end = arrays.offsets[:, :-1], arrays.offsets[:, 1:]
        bounds = jnp.stack([begin + base[:, None], end - begin], -1).reshape(-1, 2)
        inside = (time >= arrays.offsets[:, :1]) & (time < arrays.offsets[:, -1:])
        return Rows(bounds, jnp.max(bounds[:, 1]), inside.reshape(-1))
    if arrays.marks is None:
        return Rows(jnp.stack([base, jnp.full_like(base, length)], -1), length)
    real = arrays.marks != PADDING
    # A row runs from its first real token to its last: padding at its ends costs no steps.
    begin = jnp.min(jnp.where(real, time, length), 1)
    end = jnp.max(jnp.where(real, time + 1, 0), 1)
    size = jnp.maximum(end - begin, 0)
    bounds = jnp.stack([base + jnp.where(size > 0, begin, 0), size], -1)
    inside = (time >= begin[:, None]) & (time < end[:, None])
    starts = arrays.marks == STARTS
    return Rows(bounds, jnp.max(size), inside.reshape(-1), starts.reshape(-1), real.reshape(-1))
