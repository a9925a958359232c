"""The float8 product in plain XLA, whose operands are the numbers of the codes in the dtype of the rows. JAX differentiates it."""

import jax.numpy as jnp
from jax import Array, lax

from ...core.platforms import Plain
from .reference import rounded, weight_of
from .spec import ScaledArrays, ScaledSpec


def apply(arrays: ScaledArrays, spec: ScaledSpec) -> dict[str, Array]:
    """The result."""
    x = rounded(arrays.x, arrays.x_scale)
    weight = weight_of(arrays, spec).astype(x.dtype)
    mapped = tuple(range(weight.ndim - 3))
    axes = (((x.ndim - 1,), (weight.ndim - 1,)), (mapped, mapped))
    # In the dtype of the result, so that the gradient multiplies in it, too; sums are in float32.
    return {"out": lax.dot_general(x, weight, axes, preferred_element_type=jnp.dtype(spec.out_dtype))}


platform = Plain(apply)
