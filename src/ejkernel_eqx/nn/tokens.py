"""What all layers do with their tokens: check those of a batch, keep padding out, split heads."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array

from .._broadcast import like
from ..paged import RaggedBatch
from .arguments import read_array
from .projection import project


def clear(x: Array, real: Array | None) -> Array:
    """Zeros for the padding, so that nothing in it can reach a weight's gradient as 0 * NaN."""
    return x if real is None else jnp.where(like(real[..., None], x), x, jnp.zeros_like(x))


def split_heads(x: Array, heads: int) -> Array:
    """`[..., H * D]` to `[..., H, D]`."""
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)


def merge_heads(x: Array) -> Array:
    """Undoes `split_heads`."""
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def normed(name: str, norm: Any, x: Array, over_all: bool) -> Array:
    """`x [..., H, D]` through a norm, of each head or of the features of all heads together; `None` is none."""
    if norm is None:
        return x
    heads, features = x.shape[-2:]
    if not over_all:
        return project(name, norm, x, features)
    return split_heads(project(name, norm, merge_heads(x), heads * features), heads)


def check_ragged(x: Any, batch: Any, features: int, others: Mapping[str, Any]) -> Array:
    """The packed tokens of a `RaggedBatch`; `others` are the arguments that mean nothing beside one."""
    if not isinstance(batch, RaggedBatch):
        raise ValueError(
            f"batch: expected a RaggedBatch, received {type(batch).__name__}; see RaggedBatch.build."
        )
    for name, value in others.items():
        if value is not None:
            raise ValueError(
                f"{name}: expected None with batch, received {type(value).__name__}; the batch says where every token belongs."
            )
    x = read_array("x", x, "floats", "[T, E]")
    if x.shape != (batch.num_tokens, features):
        raise ValueError(
            f"x: expected [T, E] = [{batch.num_tokens}, {features}], the packed tokens of the batch, received shape {x.shape}; pad the "
            "tokens to batch.num_tokens."
        )
    return x
