"""The norm in plain XLA, which fuses it."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._broadcast import like
from ..core.arguments import accumulator
from ..core.platforms import Plain
from .spec import NormArrays, NormSpec


def apply(arrays: NormArrays, spec: NormSpec) -> dict[str, Array]:
    """The results, in the shape and dtype of `x`."""
    dtype = arrays.x.dtype
    wide = accumulator(dtype)
    # The norm is that of the rounded sum, which is also the one returned.
    total = arrays.x if arrays.branch is None else arrays.x + arrays.branch
    x, gate = total.astype(wide), None
    if arrays.z is not None:
        z = arrays.z.astype(wide)
        gate = jax.nn.silu(z) if spec.activation == "silu" else jax.nn.sigmoid(z)
    x = x if gate is None or spec.norm_before_gate else x * gate
    out = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + spec.eps)
    out = out if arrays.weight is None else out * like(arrays.weight.astype(wide), out)
    out = out * gate if gate is not None and spec.norm_before_gate else out
    return spec.results(out.astype(dtype), total)


platform = Plain(apply)
