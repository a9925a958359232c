"""Positions of the tokens of a call of multi-head attention: in their rows, and for the rotation."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from .._broadcast import like
from .._shapes import AnyArray
from ..core.arguments import accumulator
from ..paged import RaggedBatch
from ..rotary import RotaryChoice, RotaryEmbedding
from ..rotary.positions import count_from
from ..sequences import cu_seqlens_to_segment_ids, positions_from_cu_seqlens
from .attention_inputs import CallInputs
from .kv_cache import KVCache
from .latent_cache import LatentCache
from .rolling_cache import RollingKVCache
from .tokens import ids_of, packed

Rope = RotaryEmbedding | RotaryChoice


class Rows(NamedTuple):
    """The rows of a call. `None` means the default."""

    real: AnyArray | None = None  # bool [..., T]
    offset: Array | None = None  # int32 [...]: the position of `x[..., 0, :]` in its row
    segment_ids: AnyArray | None = None
    kv_segment_ids: AnyArray | None = None
    cu_seqlens: AnyArray | None = None

    def in_chunks(self, size: int, shape: tuple[int, ...]) -> "Rows":
        """The rows `[..., T]` whose tokens see their own chunk alone: as segments, counted from the first real token."""
        at = count_from(0 if self.offset is None else self.offset, shape[:-1], shape[-1])
        ids = jnp.broadcast_to(at // size, shape)
        if self.segment_ids is not None:
            given = jnp.asarray(self.segment_ids)
            ids = jnp.where(given < 0, -1, given * (shape[-1] // size + 2) + ids)
        return self._replace(segment_ids=ids, kv_segment_ids=ids)


class Places(NamedTuple):
    """The positions for the rotation, as the arguments of `RotaryEmbedding`."""

    positions: AnyArray | None = None
    offset: Array | int = 0
    lengths: Array | None = None

    def turn(self, rope: Rope | None, x: Array) -> Array:
        if rope is None:
            return x
        return rope(x, self.positions, offset=self.offset, lengths=self.lengths)

    def tempered(self, temperature: tuple[float, int, int], q: Array) -> Array:
        """Queries `[..., T, H, D]`, times what depends on their positions."""
        strength, length, ahead = temperature
        at = self.positions
        at = count_from(self.offset, q.shape[:-3], q.shape[-3]) if at is None else at
        at = jnp.broadcast_to(at, q.shape[:-2])
        times = (jnp.maximum(at, 0) + ahead) // length  # padding on the left has negative positions
        factor = 1 + strength * jnp.log1p(times.astype(accumulator(q.dtype)))
        return (q * factor[..., None, None]).astype(q.dtype)

    def tables(self, rope: RotaryEmbedding, x: Array) -> tuple[Array, Array]:
        """Cosines and sines for `x [..., T, H, D]`, `[..., T, R / 2]`."""
        shape = x.shape[:-2]
        places = {"offset": self.offset, "lengths": self.lengths, "dtype": accumulator(x.dtype)}
        tables = rope.tables(shape, self.positions, **places)
        cos, sin = (jnp.broadcast_to(a, (*shape, a.shape[-1])) for a in tables)
        return cos, sin


def places_of(rope: Rope | None, positions: AnyArray | None, rows: Rows) -> Places:
    """The positions of a call without pages. Padding does not count towards the length that a rotation may depend on."""
    if rows.cu_seqlens is not None:
        return _places_in_packed(rope, positions, rows)
    lengths = None
    if rope is not None and rope.by_length and rows.real is not None and rows.real.shape[-1]:
        along = None if positions is None else _along_one_axis(rope, positions)
        lengths = _real_lengths(along, rows.real, rows.offset)
    return Places(positions, 0 if rows.offset is None else rows.offset, lengths)


def _places_in_packed(rope: Rope | None, positions: AnyArray | None, rows: Rows) -> Places:
    assert rows.cu_seqlens is not None and rows.real is not None
    tokens, count = rows.real.shape[0], rows.cu_seqlens.shape[0] - 1
    counted = positions_from_cu_seqlens(rows.cu_seqlens, tokens)
    lengths = None
    if rope is not None and rope.by_length and count:
        along = (
            counted if positions is None else jnp.broadcast_to(_along_one_axis(rope, positions), (tokens,))
        )
        ids = cu_seqlens_to_segment_ids(rows.cu_seqlens, tokens)
        number = jnp.where(ids < 0, count, ids)
        lengths = jax.ops.segment_max(jnp.broadcast_to(along, (tokens,)), number, count + 1)[number] + 1
    return Places(counted if positions is None else positions, lengths=lengths)


def _along_one_axis(rope: Rope, positions: AnyArray) -> AnyArray:
    """The largest position of each token."""
    if rope.num_axes is None or positions.ndim == 1:
        return positions
    return jnp.max(positions, axis=0)


def _real_lengths(positions: AnyArray | None, real: AnyArray, offset: Array | None) -> Array:
    """The last position of a real token plus one, per row, int32 `[..., 1]`."""
    if positions is None:
        tokens = jax.lax.broadcasted_iota(jnp.int32, real.shape, real.ndim - 1)
        positions = tokens if offset is None else tokens + offset[..., None]
    positions = like(jnp.asarray(positions), jnp.asarray(real))
    return jnp.max(jnp.where(real, positions, -1), axis=-1, keepdims=True) + 1


def places_over_pages(rope: Rope | None, batch: RaggedBatch, positions: AnyArray | None) -> Places:
    """The positions of a call with a batch: those of the batch, unless the rotation has several axes and `positions` are passed."""
    positions = batch.positions if positions is None else positions
    if rope is None or not rope.by_length:
        return Places(positions)
    return Places(positions, lengths=batch.lengths[jnp.maximum(batch.sequence_ids, 0)])


def locate(x: Array, cache: KVCache | LatentCache | RollingKVCache | None, given: CallInputs) -> Rows:
    """The rows of a call. Left padding reduces the offset, so that the first real token has the position of the row's length."""
    padding_mask = given.padding_mask
    if given.kv_input is not None:
        return _locate_cross(x, given.kv_input, padding_mask, given.kv_padding_mask)
    if given.cu_seqlens is not None:
        offsets, real = packed(given.cu_seqlens, x.shape[-2])
        return Rows(real, cu_seqlens=offsets)
    left = None if padding_mask is None else _first_real(padding_mask)
    if cache is not None:
        return Rows(padding_mask, cache.lengths if left is None else cache.lengths - left)
    offset = None if left is None else -left
    ids = ids_of(given.segment_ids, padding_mask)
    return Rows(padding_mask, offset, ids, ids)


def _first_real(padding_mask: AnyArray) -> Array:
    """The index of the first real token of each row, int32 `[...]`; 0 if there is none."""
    if padding_mask.shape[-1] == 0:
        return jnp.zeros(padding_mask.shape[:-1], jnp.int32)
    return jnp.argmax(padding_mask, axis=-1).astype(jnp.int32)


def _locate_cross(
    x: Array, kv_input: Array, padding_mask: AnyArray | None, kv_padding_mask: AnyArray | None
) -> Rows:
    if padding_mask is None and kv_padding_mask is None:
        return Rows()
    ids = [
        jnp.zeros(a.shape[:-1], jnp.int32) if real is None else jnp.where(real, jnp.int32(0), -1)
        for a, real in ((x, padding_mask), (kv_input, kv_padding_mask))
    ]
    return Rows(padding_mask, None, *ids)


def keys_of(
    cache: KVCache | RollingKVCache | None, k: Array, v: Array, rows: Rows, log_forget: Array | None
) -> tuple[KVCache | RollingKVCache | None, Array, Array, dict[str, Any]]:
    """The updated cache, the keys and values of a call, and what each query may see of them, as arguments of `FlashAttention`."""
    if cache is None:
        ids = {"segment_ids": rows.segment_ids, "kv_segment_ids": rows.kv_segment_ids}
        return None, k, v, {**ids, "cu_seqlens": rows.cu_seqlens, **_gates(log_forget)}
    if isinstance(cache, RollingKVCache):
        cache, seen = cache.append(k, v, mask=rows.real, log_forget=log_forget)
        ids = jnp.where(seen.real, jnp.int32(0), -1)
        own = ids[..., cache.window :]
        return (
            cache,
            seen.k,
            seen.v,
            {"segment_ids": own, "kv_segment_ids": ids, **_gates(seen.log_forget)},
        )
    cache = cache.append(k, v, mask=rows.real, log_forget=log_forget)
    visible = {"kv_lengths": cache.lengths, "q_offset": rows.offset, **_gates(cache.log_forget)}
    return cache, cache.k, cache.v, visible


def _gates(log_forget: Array | None) -> dict[str, Array]:
    """An argument that only attention with forget gates has: over split tokens there are none."""
    return {} if log_forget is None else {"log_forget": log_forget}
