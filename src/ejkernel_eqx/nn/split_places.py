"""Positions of tokens that a mesh axis splits: of those of one device, and of whole rows in zigzag order."""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from .._broadcast import like
from .._shapes import AnyArray
from ..attention import FlashAttention, RingAttention
from ..parallel.shapes import inside_manual_mesh
from .attention_places import Places, places_of, Rope, Rows


def ring_of(
    attention: FlashAttention, axis: str | None, order: Any, *, platform: Any, config: Any
) -> RingAttention | None:
    """The same attention over tokens that the axis splits, `None` without one. cuDNN's kernels have no place in it: there the choice is by device."""
    if axis is None:
        if order != "contiguous":
            raise ValueError(
                f"token_order: expected 'contiguous' without sequence_axis, received {order!r}; name the mesh axis that splits the tokens."
            )
        return None
    options = attention.options
    return RingAttention(
        axis,
        attention.causal,
        attention.window,
        options.logits_soft_cap,
        options.softmax_scale,
        options.dropout_rate,
        order=order,
        deterministic=options.deterministic,
        platform=None if platform == "cuda" else platform,
        config=config,
    )


def places_over(
    ring: RingAttention | None, rope: Rope | None, positions: AnyArray | None, rows: Rows, x: Array
) -> Places:
    """The positions of the tokens of `x` `[..., T, E]`, counted from the first real token of the whole row."""
    if ring is None or rope is None or (positions is not None and not rope.by_length):
        return places_of(rope, positions, rows)
    times = ring.split.times(x, x.shape[-2])
    if times is None:
        return places_of(rope, positions, rows)
    if rows.cu_seqlens is not None:
        raise ValueError(
            "cu_seqlens: expected None in a call with one device's tokens, or with tokens in zigzag order, received offsets; use segment_ids and "
            "positions, which have the order of the tokens."
        )
    over = ring.split.axis if inside_manual_mesh() else None
    real = None if rows.real is None else jnp.asarray(rows.real)
    if positions is None:
        positions = times
        if real is not None:
            last = jnp.iinfo(jnp.int32).max
            first = jnp.where(real, like(times, real), last).min(-1, keepdims=True)
            positions = like(times, real) - (first if over is None else lax.pmin(first, over))
    if not rope.by_length:
        return Places(positions)
    at = positions if rope.num_axes is None or positions.ndim == 1 else jnp.max(positions, axis=0)
    at = (
        like(jnp.asarray(at), x[..., 0]) if real is None else jnp.where(real, like(jnp.asarray(at), real), -1)
    )
    longest = at.max(-1, keepdims=True)
    return Places(positions, lengths=(longest if over is None else lax.pmax(longest, over)) + 1)
