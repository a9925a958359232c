"""The rotation as in its equation: the oracle of every test, in float64 for float64 inputs."""

import jax.numpy as jnp
from jax import Array

from ..._broadcast import like
from ...core.arguments import accumulator
from .spec import HeadsArrays, HeadsSpec, RESULTS


def rotate(arrays: HeadsArrays, spec: HeadsSpec) -> dict[str, Array]:
    """The results, in float32 (float64 for float64 inputs)."""
    wide = accumulator(arrays.q.dtype)
    cos, sin = (x.astype(wide)[..., None, :] for x in (arrays.cos, arrays.sin))
    pairs = cos.shape[-1]

    def turned(x: Array, weight: Array | None) -> Array:
        x = x.astype(wide)
        if spec.eps is not None:
            x = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + spec.eps)
            x = x if weight is None else x * like(weight.astype(wide), x)
        first, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
        a, b = (first[..., 0::2], first[..., 1::2]) if spec.interleaved else jnp.split(first, 2, -1)
        a, b = a * cos - b * sin, b * cos + a * sin
        both = jnp.stack([a, b], -1).reshape(first.shape) if spec.interleaved else jnp.concatenate([a, b], -1)
        return jnp.concatenate([both, rest], -1)

    return dict(zip(RESULTS, (turned(arrays.q, arrays.q_norm), turned(arrays.k, arrays.k_norm))))
