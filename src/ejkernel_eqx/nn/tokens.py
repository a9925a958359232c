"""What all layers do with their tokens: check their shape, keep padding out."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from ..paged import RaggedBatch


def clear(x: Array, real: Array | None) -> Array:
    """Zeros for the padding, so that nothing in it can reach a weight's gradient as 0 * NaN."""
    return x if real is None else jnp.where(real[..., None], x, jnp.zeros_like(x))


def check_features(name: str, x: Array, form: str, letter: str, features: int) -> None:
    if x.ndim < 2 or x.shape[-1] != features:
        raise ValueError(
            f"{name}: expected {form} with {letter} = {features}, received shape {x.shape}; "
            "time is the last axis but one, and a single token has T = 1."
        )


def check_tokens(name: str, value: Array | None, of: str, x: Array) -> None:
    if value is not None and value.shape != x.shape[:-1]:
        raise ValueError(
            f"{name}: expected shape {x.shape[:-1]}, an entry for each token of {of}, "
            f"received {value.shape}; broadcast it first."
        )


def check_ragged(x: Array, batch: Any, features: int, others: dict[str, Any]) -> None:
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
    if x.shape != (batch.num_tokens, features):
        raise ValueError(
            f"x: expected [T, E] = [{batch.num_tokens}, {features}], the packed tokens of the batch, received shape {x.shape}; pad the "
            "tokens to batch.num_tokens."
        )
