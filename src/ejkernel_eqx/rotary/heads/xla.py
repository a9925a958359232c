"""The rotation in plain XLA. JAX differentiates it."""

import jax.numpy as jnp
from jax import Array, lax

from ..._broadcast import like
from ...core.arguments import accumulator
from ...core.platforms import Plain
from ..embedding import turned
from .spec import HeadsArrays, HeadsSpec, RESULTS


def apply(arrays: HeadsArrays, spec: HeadsSpec) -> dict[str, Array]:
    """The results, in the dtype of `q`."""
    outs = (_turned(arrays.q, arrays.q_norm, arrays, spec), _turned(arrays.k, arrays.k_norm, arrays, spec))
    return dict(zip(RESULTS, outs))


def _turned(x: Array, weight: Array | None, arrays: HeadsArrays, spec: HeadsSpec) -> Array:
    dtype, wide = x.dtype, accumulator(x.dtype)
    if spec.eps is not None:
        h = x.astype(wide)
        h = h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + spec.eps)
        x = (h if weight is None else h * like(weight.astype(wide), h)).astype(dtype)
    return turned(x, arrays.cos.astype(wide), arrays.sin.astype(wide), spec.interleaved)


platform = Plain(apply)
