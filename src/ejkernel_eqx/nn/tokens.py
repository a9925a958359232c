"""Helpers for tokens that all layers share: checks of a batch, masking of padding, splitting of heads."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from .._broadcast import like
from .._shapes import AnyArray
from ..paged import RaggedBatch
from ..sequences.packing import read_ids, read_offsets
from .arguments import read_array
from .projection import mesh_axes, mesh_of, project, reshard


def clear(x: Array, real: AnyArray | None) -> Array:
    """`x` with zeros at padding positions, where NaN would otherwise reach the gradients of weights as 0 * NaN."""
    return x if real is None else jnp.where(like(jnp.asarray(real)[..., None], x), x, jnp.zeros_like(x))


def ids_of(segment_ids: AnyArray | None, padding_mask: AnyArray | None) -> Array | None:
    """Segment ids, int32, which are -1 at padding; `None` if there is neither."""
    ids = None if segment_ids is None else read_ids(segment_ids)  # unsigned ones have no -1
    if padding_mask is None:
        return ids
    return jnp.where(padding_mask, jnp.int32(0) if ids is None else ids, jnp.int32(-1))


def packed(cu_seqlens: Any, length: Any) -> tuple[Array, Array]:
    """The offsets of packed sequences, int32, and for each of `length` tokens whether it is in one; the others are padding."""
    offsets, token = read_offsets(cu_seqlens, length), jnp.arange(length, dtype=jnp.int32)
    return offsets, (token >= offsets[0]) & (token < offsets[-1])


def split_heads(x: Array, heads: int) -> Array:
    """`[..., H * D]` to `[..., H, D]`. Devices that split the features of a head on an explicit mesh gather them."""
    if (mesh := mesh_of(x)) is not None:
        *lead, last = jax.typeof(x).sharding.spec
        axes = mesh_axes(last)
        while heads % math.prod(mesh.shape[axis] for axis in axes):
            axes = axes[:-1]
        x = reshard(x, mesh, (*lead, axes or None))
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)


def merge_heads(x: Array) -> Array:
    """The inverse of `split_heads`."""
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def normed(name: str, norm: Any, x: Array, over_all: bool) -> Array:
    """`x [..., H, D]` normalised per head or over all heads together; `None` for no norm."""
    if norm is None:
        return x
    heads, features = x.shape[-2:]
    if not over_all:
        return project(name, norm, x, features)
    return split_heads(project(name, norm, merge_heads(x), heads * features), heads)


def check_ragged(x: Any, batch: Any, features: int, others: Mapping[str, Any]) -> Array:
    """The packed tokens of a `RaggedBatch`; `others` are arguments that cannot be combined with one."""
    if not isinstance(batch, RaggedBatch):
        raise ValueError(
            f"batch: expected a RaggedBatch, received {type(batch).__name__}; build it with RaggedBatch.build."
        )
    for name, value in others.items():
        if value is not None:
            raise ValueError(
                f"{name}: expected None with a batch, received {type(value).__name__}; the batch already assigns tokens to sequences."
            )
    x = read_array("x", x, "floats", "[T, E]")
    if x.shape != (batch.num_tokens, features):
        raise ValueError(
            f"x: expected [T, E] = [{batch.num_tokens}, {features}], the packed tokens of the batch, received shape {x.shape}; pad the "
            "tokens to batch.num_tokens."
        )
    return x
