"""The norm of a sum in plain XLA, which fuses it."""

import jax.numpy as jnp
from jax import Array, lax

from ..._broadcast import like
from ...core.arguments import accumulator
from ...core.platforms import Plain
from .spec import COPIES, ResidualArrays, ResidualSpec


def apply(arrays: ResidualArrays, spec: ResidualSpec) -> dict[str, Array]:
    """`out`, for every reader, and `sum` `[*, M, F]` in the dtype of `x`."""
    dtype = arrays.x.dtype
    total = arrays.x if arrays.branch is None else arrays.x + arrays.branch
    wide = total.astype(accumulator(dtype))
    out = wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + spec.eps)
    out = out if arrays.weight is None else out * like(arrays.weight.astype(wide.dtype), out)
    return dict.fromkeys(COPIES[: spec.readers], out.astype(dtype)) | {"sum": total}


platform = Plain(apply)
