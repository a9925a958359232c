"""Where the tokens of a call of multi-head attention sit: in their rows, and on the axes of the rotation."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ..paged import RaggedBatch
from .kv_cache import KVCache
from .rotary import RotaryEmbedding


class Rows(NamedTuple):
    """Where the tokens of a call sit. Each `None`: nothing beyond the default."""

    offset: Array | None = None  # int32 [...]: the place of `x[..., 0, :]` in its row's history
    segment_ids: Array | None = None
    kv_segment_ids: Array | None = None


class Places(NamedTuple):
    """What the rotation goes by, as the arguments of `RotaryEmbedding`."""

    positions: Array | None = None
    offset: Array | int = 0
    lengths: Array | None = None

    def turn(self, rope: RotaryEmbedding | None, x: Array) -> Array:
        if rope is None:
            return x
        return rope(x, self.positions, offset=self.offset, lengths=self.lengths)


def places_of(
    rope: RotaryEmbedding | None, positions: Array | None, padding_mask: Array | None, offset: Array | None
) -> Places:
    """Those of a call without pages. Where the rotation depends on how long a row is, padding does not count."""
    lengths = None
    if rope is not None and rope.by_length and padding_mask is not None and padding_mask.shape[-1]:
        lengths = _real_lengths(rope, positions, padding_mask, offset)
    return Places(positions, 0 if offset is None else offset, lengths)


def _real_lengths(
    rope: RotaryEmbedding, positions: Array | None, padding_mask: Array, offset: Array | None
) -> Array:
    """One more than the last position of a real token of each row, int32 `[..., 1]`."""
    if positions is None:
        tokens = jax.lax.broadcasted_iota(jnp.int32, padding_mask.shape, padding_mask.ndim - 1)
        positions = tokens if offset is None else tokens + offset[..., None]
    elif rope.num_axes is not None and positions.ndim > 1:
        positions = jnp.max(positions, axis=0)
    return jnp.max(jnp.where(padding_mask, positions, -1), axis=-1, keepdims=True) + 1


def places_over_pages(rope: RotaryEmbedding | None, batch: RaggedBatch) -> Places:
    if rope is None or not rope.by_length:
        return Places(batch.positions)
    return Places(batch.positions, lengths=batch.lengths[jnp.maximum(batch.sequence_ids, 0)])


def locate(cache: KVCache | None, padding_mask: Array | None, segment_ids: Array | None) -> Rows:
    """The places of a call's tokens. Left padding moves the first token before the row's start: its offset
    shrinks."""
    left = None if padding_mask is None else _first_real(padding_mask)
    if cache is not None:
        return Rows(offset=cache.lengths if left is None else cache.lengths - left)
    offset = None if left is None else -left
    if padding_mask is not None:
        segment_ids = jnp.where(padding_mask, jnp.int32(0) if segment_ids is None else segment_ids, -1)
    return Rows(offset, segment_ids, segment_ids)


def _first_real(padding_mask: Array) -> Array:
    """The place of each row's first real token, int32 `[...]`; 0 without one."""
    if padding_mask.shape[-1] == 0:
        return jnp.zeros(padding_mask.shape[:-1], jnp.int32)
    return jnp.argmax(padding_mask, axis=-1).astype(jnp.int32)


def locate_cross(
    x: Array, kv_input: Array, padding_mask: Array | None, kv_padding_mask: Array | None
) -> Rows:
    if padding_mask is None and kv_padding_mask is None:
        return Rows()
    ids = [
        jnp.zeros(a.shape[:-1], jnp.int32) if real is None else jnp.where(real, jnp.int32(0), -1)
        for a, real in ((x, padding_mask), (kv_input, kv_padding_mask))
    ]
    return Rows(None, *ids)
