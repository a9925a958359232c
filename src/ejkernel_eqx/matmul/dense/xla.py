"""The matmul in plain XLA. JAX differentiates it."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import Array, lax

from ..._broadcast import like
from ...core.arguments import accumulator
from ...core.platforms import Plain
from ..epilogue import activated, finished
from .spec import MatmulArrays, MatmulSpec, RESULTS


def apply(
    arrays: MatmulArrays, spec: MatmulSpec, multiply: Callable[[Array], Sequence[Array]] | None = None
) -> dict[str, Array]:
    """The results, in the dtype of `x`. `multiply`: what gives the products of rows and all right sides, by default XLA."""
    dtype, x = arrays.x.dtype, arrays.x
    wide = accumulator(dtype)
    if spec.eps is not None:
        h = x.astype(wide)
        h = h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + spec.eps)
        x = h if arrays.norm is None else h * _of_rows(arrays.norm.astype(wide), h)
        x = x.astype(dtype)
    made = [_times(x, right) for right in arrays.in_dtype(dtype, spec)] if multiply is None else multiply(x)
    products = [_biased(z, bias) for z, bias in zip(made, arrays.biases)]
    if spec.gated:
        gate, up = (z.astype(wide) for z in products)
        products = [finished(gate, up, spec).astype(dtype)]
    elif spec.activation is not None:
        products = [activated(z.astype(wide), spec).astype(dtype) for z in products]
    if arrays.residual is not None:
        products[0] = products[0] + arrays.residual
    return dict(zip(RESULTS, products))


def _times(x: Array, right: Array) -> Array:
    mapped = tuple(range(right.ndim - 2))
    return lax.dot_general(x, right, (((x.ndim - 1,), (right.ndim - 1,)), (mapped, mapped)))


def _biased(z: Array, bias: Array | None) -> Array:
    if bias is None:
        return z
    wide = accumulator(z.dtype)
    return (z.astype(wide) + _of_rows(bias.astype(wide), z)).astype(z.dtype)


def _of_rows(x: Array, rows: Array) -> Array:
    """A vector per mapped example as something that broadcasts over its rows."""
    return like(x if x.ndim == 1 else jnp.expand_dims(x, range(x.ndim - 1, rows.ndim - 1)), rows)


platform = Plain(apply)
