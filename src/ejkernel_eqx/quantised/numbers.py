"""The numbers of codes and scales, in XLA."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from .format import QuantFormat


def numbers(weight: Any) -> Array:
    """The numbers of a quantised weight in float32, `[..., out, in]`, whatever it stands for; on an explicit mesh laid out as the codes."""
    weight = jax.tree.map(jnp.asarray, weight)
    sharding = jax.typeof(weight.codes).sharding
    if not sharding.mesh.explicit_axes:
        return _numbers(weight)
    by_compiler: Any = jax.sharding.auto_axes(_numbers, out_sharding=sharding)
    return by_compiler(weight)


# One program where a weight is converted outside of one.
@functools.partial(jax.jit, inline=True)
def _numbers(weight: Any) -> Array:
    form: QuantFormat = weight.format
    x = _of_codes(weight.codes, form.element)
    rows, columns = x.shape[-2:]
    spread = lambda a: _spread(_spread(a, form.block[0], rows, -2), form.block[1], columns, -1)
    if weight.zeros is not None:
        x = x - spread(weight.zeros.astype(jnp.float32))
    elif form.element == "uint4":
        x = x - 8
    x = x * spread(floats(weight.scales, form.scale))
    if weight.tensor_scale is not None:
        x = x * floats(weight.tensor_scale, "float32")[..., None, None]
    return x


def floats(bits: Array, dtype: str) -> Array:
    """float32 of the bits of floats."""
    if dtype == "float8_e8m0fnu":
        # 2^(bits - 127), by the exponent of a float32, as XLA's exp2 is not exact. The smallest is subnormal.
        wide = bits.astype(jnp.uint32)
        power = lax.bitcast_convert_type(jnp.where(wide == 0, 1 << 22, wide << 23), jnp.float32)
        return jnp.where(bits == 255, jnp.nan, power)
    return lax.bitcast_convert_type(bits, jnp.dtype(dtype)).astype(jnp.float32)


def bits_of(x: Array, dtype: str) -> Array:
    """The bits of numbers rounded to a float dtype, as unsigned integers."""
    x = x.astype(jnp.dtype(dtype))
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def _of_codes(codes: Array, element: str) -> Array:
    if element == "int8":
        return lax.bitcast_convert_type(codes, jnp.int8).astype(jnp.float32)
    if element.startswith("float8"):
        return floats(codes, element)
    # Element by element: XLA's concatenation takes three times as long on a GPU.
    shift = 4 * lax.broadcasted_iota(codes.dtype, (*codes.shape, 2), codes.ndim)  # [..., in / 2, 2]
    pairs = (codes[..., None] >> shift) & 15
    codes = pairs.reshape(*codes.shape[:-1], -1)
    return codes.astype(jnp.float32) if element == "uint4" else _of_e2m1(codes)


def _of_e2m1(codes: Array) -> Array:
    """0, 0.5, 1, 1.5, 2, 3, 4 and 6, and the same with the sign of the fourth bit."""
    exponent, mantissa = (codes >> 1) & 3, codes & 1
    halves = jnp.where(exponent == 0, mantissa, (2 + mantissa) << jnp.maximum(exponent, 1) - 1)
    return 0.5 * jnp.where(codes & 8, -1.0, 1.0) * halves.astype(jnp.float32)


def _spread(x: Array, block: int, size: int, axis: int) -> Array:
    """Numbers of blocks along an axis as numbers of its elements; of a single block, as something that broadcasts."""
    if block <= 1:
        return x
    return lax.slice_in_dim(jnp.repeat(x, block, axis=axis), 0, size, axis=axis)
