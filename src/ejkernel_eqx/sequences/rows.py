"""Converts packed, padded and reversed sequences to the form that kernels take: forward in time, with neutral padding."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from .._broadcast import like
from .._take import take_along
from ..parallel.mesh import gathered
from .packing import padded, read_ids, read_offsets
from .tokens import masked


@dataclasses.dataclass(frozen=True, eq=False)
class Packing:
    """The layout of a call's tokens in its rows, after a reversed call has been flipped."""

    lead: tuple[int, ...]
    length: int
    reverse: bool
    real: Array | None = None  # bool [*, T]; None: all are
    starts: Array | None = None  # as in `recurrence.spec.RecurrenceArrays`
    offsets: Array | None = None
    ids: Array | None = None  # int32 [*, T], the segment of each token

    @property
    def num_sequences(self) -> int | None:
        return None if self.offsets is None else self.offsets.shape[-1] - 1

    def take(self, x: Array) -> Array:
        """An operand over tokens in the kernels' order, zero at padding (even if that is NaN)."""
        return self.mask(self.flip(x))

    def mask(self, x: Array) -> Array:
        """Zeroes padding; for arrays computed from operands that `take` has converted."""
        if self.real is None:
            return x
        return masked(x, self.real)

    def give(self, out: Array) -> Array:
        """A result over tokens in the caller's order, zero at padding."""
        return self.flip(self.mask(out))

    def flip(self, x: Array) -> Array:
        """An array over tokens, from the caller's order to the kernels' or back."""
        return jnp.flip(x, len(self.lead)) if self.reverse else x

    def repeated(self, count: int) -> "Packing":
        """The layout of rows that have `count` tokens in the place of each."""
        each = lambda x: None if x is None else jnp.repeat(x, count, axis=-1)
        starts = None if self.starts is None else each(jnp.where(self.starts < 0, -1, count * self.starts))
        offsets = None if self.offsets is None else count * self.offsets
        length = count * self.length
        return Packing(self.lead, length, self.reverse, each(self.real), starts, offsets, each(self.ids))

    def states(self, states: Array) -> Array:
        """States of packed sequences, from the caller's order to the kernels' or back."""
        return jnp.flip(states, 0) if self.reverse and self.offsets is not None else states


def read_packing(
    cu_seqlens: Any, segment_ids: Any, lead: tuple[int, ...], length: int, reverse: bool
) -> Packing:
    """Checks `cu_seqlens` and `segment_ids`; `ValueError` if they are invalid."""
    if cu_seqlens is not None and segment_ids is not None:
        raise ValueError(
            "cu_seqlens, segment_ids: expected at most one of them, received both; they are two descriptions of the same packing."
        )
    if cu_seqlens is not None:
        if lead:
            raise ValueError(
                f"cu_seqlens: expected operands [T, heads, dim] without leading axes, received leading axes {lead}; pack all sequences into "
                "one row, use segment_ids, or use jax.vmap over rows."
            )
        offsets = read_offsets(cu_seqlens, length).astype(jnp.int32)
        if offsets.ndim != 1:
            raise ValueError(f"cu_seqlens: expected offsets [N + 1], received shape {offsets.shape}.")
        if reverse:
            # In a flipped row the last sequence comes first.
            offsets = length - jnp.flip(offsets)
        tokens = jnp.arange(length, dtype=jnp.int32)
        # Offsets need not cover the row: tokens outside are padding.
        real = (tokens >= offsets[0]) & (tokens < offsets[-1])
        return Packing(lead, length, reverse, real, None, offsets)
    if segment_ids is None:
        return Packing(lead, length, reverse)
    ids = read_ids(segment_ids)
    if ids.ndim == 0 or ids.shape[-1] != length:
        raise ValueError(f"segment_ids: expected {(*lead, length)} ids, received shape {ids.shape}.")
    try:
        ids = gathered(jnp.broadcast_to(ids, (*lead, length)), -1)
    except ValueError:
        raise ValueError(
            f"segment_ids: expected a shape that broadcasts to {(*lead, length)}, received {ids.shape}."
        ) from None
    ids = jnp.flip(ids, -1) if reverse else ids
    return Packing(lead, length, reverse, ids >= 0, _starts(ids), None, ids)


def _starts(ids: Array) -> Array:
    """The start of each token's segment, -1 in the first; padding belongs to the segment before it."""
    axis = ids.ndim - 1
    tokens = like(jnp.arange(ids.shape[-1], dtype=jnp.int32), ids)
    latest = lax.cummax(jnp.where(ids >= 0, tokens, -1), axis)
    # The last real token before each one, so that padding in between hides no change.
    before = padded(latest[..., :-1], 1, 0, -1)
    other = take_along(ids, jnp.maximum(before, 0), axis) != ids
    begins = (ids >= 0) & (before >= 0) & other
    return lax.cummax(jnp.where(begins, tokens, -1), axis)
