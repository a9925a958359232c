"""The norm as in its equation: the oracle of every test, in float64 for float64 inputs."""

import jax
import jax.numpy as jnp
from jax import Array

from .._broadcast import like
from ..core.arguments import accumulator
from .spec import NormArrays, NormSpec


def normalise(arrays: NormArrays, spec: NormSpec) -> dict[str, Array]:
    """The results, in the shape of `x`, in float32 (float64 for float64 inputs)."""
    wide = accumulator(arrays.x.dtype)
    x, gate = arrays.x.astype(wide), None
    if arrays.branch is not None:
        x = x + arrays.branch.astype(wide)
    total = x
    if arrays.z is not None:
        gate = {"silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid}[spec.activation](arrays.z.astype(wide))
    if gate is not None and not spec.norm_before_gate:
        x = x * gate
    out = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + spec.eps)
    if arrays.weight is not None:
        out = out * like(arrays.weight.astype(wide), out)
    return spec.results(out * gate if gate is not None and spec.norm_before_gate else out, total)
