"""Attention whose tokens a mesh axis splits: the operation, and the positions of one device's tokens and of rows in zigzag order."""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from .._broadcast import like
from .._shapes import AnyArray
from ..attention import FlashAttention, RingAttention
from ..attention.ring.arguments import Split
from ..parallel.mesh import inside_manual_mesh
from .attention_places import Places, places_of, Rope, Rows


def split_of(axis: Any, order: Any) -> Split | None:
    """How the tokens of a layer with these options are split; `None` without an axis."""
    if axis is not None:
        return Split(axis, order, None)
    if order != "contiguous":
        raise ValueError(
            f"token_order: expected 'contiguous' without sequence_axis, received {order!r}; name the mesh axis that splits the tokens."
        )
    return None


def attention_over(
    axis: str | None, order: Any, *options: Any, platform: Any, **others: Any
) -> FlashAttention | RingAttention:
    """The operation of a layer, over tokens that the axis splits if there is one."""
    if (split := split_of(axis, order)) is None:
        return FlashAttention(*options, platform=platform, **others)
    # cuDNN's kernels have no place in a ring: there the choice is by device.
    platform = None if platform == "cuda" else platform
    return RingAttention(split.axis, *options, order=order, platform=platform, **others)


def on_whole_rows(attention: FlashAttention | RingAttention) -> FlashAttention | RingAttention:
    """The operation for calls with a cache, whose few new tokens are not split."""
    return attention.on_whole_rows() if isinstance(attention, RingAttention) else attention


def places_over(
    split: Split | None,
    rope: Rope | None,
    positions: AnyArray | None,
    rows: Rows,
    x: Array,
) -> Places:
    """The positions of the tokens of `x` `[..., T, E]`, counted from the first real token of the whole row."""
    if split is None or rope is None or (positions is not None and not rope.by_length):
        return places_of(rope, positions, rows)
    times = split.times(x, x.shape[-2])
    if times is None:
        return places_of(rope, positions, rows)
    check_offsets(times, rows.cu_seqlens)
    over = split.axis if inside_manual_mesh() else None
    real = None if rows.real is None else jnp.asarray(rows.real)
    places: Array = times if positions is None else jnp.asarray(positions)
    if positions is None and real is not None:
        last = jnp.iinfo(jnp.int32).max
        first = jnp.where(real, like(times, real), last).min(-1, keepdims=True)
        places = like(times, real) - (first if over is None else lax.pmin(first, over))
    if not rope.by_length:
        return Places(places)
    at = places if rope.num_axes is None or places.ndim == 1 else jnp.max(places, axis=0)
    at = like(at, x[..., 0]) if real is None else jnp.where(real, like(at, real), -1)
    longest = at.max(-1, keepdims=True)
    return Places(places, lengths=(longest if over is None else lax.pmax(longest, over)) + 1)


def check_offsets(times: Array | None, cu_seqlens: AnyArray | None) -> None:
    """Raises `ValueError` for offsets beside tokens that are not all there, or not in temporal order, as `times` says."""
    if times is not None and cu_seqlens is not None:
        raise ValueError(
            "cu_seqlens: expected None in a call with one device's tokens, or with tokens in zigzag order, received offsets; use segment_ids and "
            "positions, which have the order of the tokens."
        )
