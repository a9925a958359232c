"""The matmul as in its equation: the oracle of every test, in float64 for float64 inputs."""

import jax.numpy as jnp
from jax import Array

from ..._broadcast import like
from ...core.arguments import accumulator
from ..reference import activation
from .spec import MatmulArrays, MatmulSpec, RESULTS


def multiply(arrays: MatmulArrays, spec: MatmulSpec) -> dict[str, Array]:
    """The results, in float32 (float64 for float64 inputs)."""
    wide = accumulator(arrays.x.dtype)
    x = arrays.x.astype(wide)
    if spec.eps is not None:
        x = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + spec.eps)
    if arrays.norm is not None:
        x = x * _of_rows(arrays.norm.astype(wide), x)
    products = [x @ jnp.swapaxes(right, -1, -2) for right in arrays.in_dtype(wide, spec)]
    products = [
        z if bias is None else z + _of_rows(bias.astype(wide), z) for z, bias in zip(products, arrays.biases)
    ]
    if spec.gated:
        gate, up = products
        if spec.limit is not None:
            gate, up = jnp.minimum(gate, spec.limit), jnp.clip(up, -spec.limit, spec.limit)
        products = [activation(gate, spec) * (up + spec.up_shift)]
    else:
        products = [activation(z, spec) for z in products]
    if arrays.residual is not None:
        products[0] = products[0] + arrays.residual.astype(wide)
    return dict(zip(RESULTS, products))


def _of_rows(x: Array, rows: Array) -> Array:
    """`[..., N]` as `[..., 1, N]`, which every row has."""
    return like(x[..., None, :], rows)
