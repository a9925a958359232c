"""The norm of a sum as in its equation: the oracle of every test, in float64 for float64 inputs."""

import jax.numpy as jnp
from jax import Array

from ..._broadcast import like
from ...core.arguments import accumulator
from .spec import COPIES, ResidualArrays, ResidualSpec


def normalise(arrays: ResidualArrays, spec: ResidualSpec) -> dict[str, Array]:
    """`out`, for every reader, and `sum` `[*, M, F]` in float32 (float64 for float64 inputs)."""
    wide = accumulator(arrays.x.dtype)
    total = arrays.x.astype(wide)
    if arrays.branch is not None:
        total = total + arrays.branch.astype(wide)
    out = total / jnp.sqrt(jnp.mean(total**2, -1, keepdims=True) + spec.eps)
    if arrays.weight is not None:
        out = out * like(arrays.weight.astype(wide), out)
    return dict.fromkeys(COPIES[: spec.readers], out) | {"sum": total}
