"""The float8 product as in its equation: the oracle of every test, in float64 for float64 inputs. And how rows are quantised."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ...core.arguments import accumulator
from .. import reference as grouped
from ..spec import GroupedArrays, GroupedSpec
from .spec import GROUP, LARGEST, ScaledArrays, ScaledSpec

LEAST = 2.0**-96
"""A group whose numbers are all smaller in magnitude has the scale of this one."""


def quantised(x: Array, x_scale: Array | None, rows: int = 1) -> tuple[Array, Array]:
    """Codes in float8_e4m3fn `[..., groups, GROUP]`, the last group padded with zeros, and their scales `[..., groups, 1]` in float32. With `rows`,
    so many rows share their scales, of `x [..., M, K]` with whole blocks of them."""
    *lead, features = x.shape
    x = jnp.pad(x.astype(jnp.float32), [(0, 0)] * len(lead) + [(0, -features % GROUP)])
    x = x.reshape(*lead, x.shape[-1] // GROUP, GROUP)
    if x_scale is None:
        top = jnp.maximum(jnp.abs(x).max(-1, keepdims=True), LEAST)
        if rows > 1:
            blocks = top.reshape(*lead[:-1], lead[-1] // rows, rows, *top.shape[-2:])
            top = jnp.broadcast_to(blocks.max(-3, keepdims=True), blocks.shape).reshape(top.shape)
        scale, inverse = top / LARGEST, LARGEST / top
    else:
        scale = x_scale.astype(jnp.float32).reshape(*x_scale.shape, *(1,) * (x.ndim - x_scale.ndim))
        inverse = 1 / scale
    codes = jnp.clip(x * inverse, -LARGEST, LARGEST).astype(jnp.float8_e4m3fn)
    # XLA would leave out a conversion to fewer bits and back.
    return lax.optimization_barrier(codes), scale


@jax.custom_jvp
def rounded(x: Array, x_scale: Array | None) -> Array:
    """The numbers that the codes of `x` stand for, in its dtype. Its derivative is that of the identity."""
    codes, scale = quantised(x, x_scale)
    wide = accumulator(x.dtype)
    numbers = (codes.astype(wide) * scale.astype(wide)).reshape(*x.shape[:-1], -1)
    return numbers[..., : x.shape[-1]].astype(x.dtype)


@rounded.defjvp
def _rounded_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    return rounded(*primals), tangents[0]


def rows_of(arrays: ScaledArrays, spec: ScaledSpec) -> Array:
    """The numbers of the rows `[*, M, K]`, in their dtype."""
    x = jnp.swapaxes(arrays.x, -1, -2) if spec.turned[0] else arrays.x
    return rounded(x, arrays.x_scale)


def weight_of(arrays: ScaledArrays, spec: ScaledSpec) -> Array:
    """The numbers of the weight `[*, N, R, K]` or `[*, E, N, R, K]`, in float32 or wider; of floats `[*, N, 1, K]`."""
    wide = accumulator(arrays.x.dtype)
    if arrays.floats is not None:
        floats = jnp.swapaxes(arrays.floats, -1, -2) if spec.turned[1] else arrays.floats
        *lead, height, width = floats.shape
        padded = jnp.pad(floats, [(0, 0)] * len(lead) + [(0, -height % GROUP), (0, 0)])
        codes, scales = quantised(padded, None, GROUP)
        numbers = (codes.astype(wide) * scales.astype(wide)).reshape(*padded.shape[:-1], -1)
        return numbers[..., :height, None, :width]
    assert arrays.codes is not None and arrays.scales is not None
    numbers = lax.bitcast_convert_type(arrays.codes, jnp.float8_e4m3fn).astype(wide)
    scales = jnp.repeat(arrays.scales.astype(wide), spec.columns or 1, -1)
    if spec.columns:
        scales = lax.slice_in_dim(scales, 0, numbers.shape[-1], axis=-1)
    return numbers * scales[..., None, :]


def multiply(arrays: ScaledArrays, spec: ScaledSpec) -> dict[str, Array]:
    """The result, in float32 (float64 for float64 inputs)."""
    x = rows_of(arrays._replace(x=arrays.x.astype(accumulator(arrays.x.dtype))), spec)
    weight = weight_of(arrays, spec)
    if arrays.sizes is None:
        return {"out": laid_out(jnp.einsum("...mk,...nrk->...mnr", x, weight), arrays)}
    sides = GroupedArrays(x, arrays.sizes, merged(weight))
    out = grouped.multiply(sides, GroupedSpec(spec.out_dtype, transpose_rhs=True))["out"]
    return {"out": out.reshape(*out.shape[:-1], *weight.shape[-3:-1])}


def laid_out(out: Array, arrays: ScaledArrays) -> Array:
    """The result of a weight `[N, R, K]`, whose rows are one axis where it has floats."""
    return out if arrays.floats is None else out.reshape(*out.shape[:-2], -1)


def merged(weight: Array) -> Array:
    """Weights `[..., N, R, K]` as `[..., N R, K]`."""
    return weight.reshape(*weight.shape[:-3], -1, weight.shape[-1])
