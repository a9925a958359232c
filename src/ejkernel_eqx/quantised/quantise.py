"""Rounding floats to quantised weights: the nearest code, with the scale that the largest number of a block asks for."""

import functools

import jax
import jax.numpy as jnp
from jax import Array, core, lax

from .._signatures import check_one_of
from .format import LARGEST, QuantFormat
from .numbers import bits_of, floats, numbers
from .weight import QuantizedWeight

KINDS = {
    "int8": QuantFormat("int8"),
    "fp8": QuantFormat("float8_e4m3fn"),
    "fp8-block": QuantFormat("float8_e4m3fn", (128, 128)),
    "int4": QuantFormat("uint4", (1, 128), "bfloat16"),
    "mxfp4": QuantFormat("float4_e2m1fn", (1, 32), "float8_e8m0fnu"),
    "nvfp4": QuantFormat("float4_e2m1fn", (1, 16), "float8_e4m3fn"),
}
"""The formats by their short names."""
GROUPS = (128, 64, 32)
"""Sizes of groups of `int4`, the default first."""


def format_for(kind: str, columns: int, group_size: int | None) -> QuantFormat:
    """The format of weights with so many inputs, by its short name."""
    check_one_of("kind", kind, KINDS)
    form = KINDS[kind]
    if group_size is not None and kind != "int4":
        raise ValueError(
            f"group_size: expected None with {kind!r}, received {group_size!r}; only int4 has groups of a chosen size."
        )
    if group_size is not None and group_size not in GROUPS:
        raise ValueError(
            f"group_size: expected one of {', '.join(map(str, GROUPS))}, received {group_size!r}."
        )
    if kind == "int4":
        sizes = GROUPS if group_size is None else (group_size,)
        fits = [size for size in sizes if columns % size == 0]
        if not fits:
            raise ValueError(
                f"group_size: expected a divisor of the {columns} inputs of the weight, received {' and '.join(map(str, sizes))}; choose another "
                "format, or leave this weight out by where=."
            )
        return QuantFormat(form.element, (1, fits[0]), form.scale)
    group = form.block[1] if form.bits == 4 else 1
    if columns % group:
        raise ValueError(
            f"kind: expected weights whose inputs are a multiple of {group} with {kind!r}, received {columns}; choose another format, or leave "
            "this weight out by where=."
        )
    return form


def quantised_array(weight: Array, form: QuantFormat) -> QuantizedWeight:
    """The quantised weight nearest to `[..., out, in]`. Zeros stay zeros."""
    with jax.ensure_compile_time_eval():  # inside `jit`, too, a weight from outside is known
        finite = isinstance(weight, core.Tracer) or bool(jnp.isfinite(weight).all())
    if not finite:
        raise ValueError(
            "weight: expected finite numbers, received NaN or infinities; repair the weights first."
        )
    return _nearest(weight, form)


@functools.partial(jax.jit, static_argnums=1)
def _nearest(weight: Array, form: QuantFormat) -> QuantizedWeight:
    wide = weight.astype(jnp.float64 if weight.dtype == jnp.float64 else jnp.float32)
    *lead, rows, columns = weight.shape
    sizes = [size if block == 0 else block for block, size in zip(form.block, (rows, columns))]
    padding = [(0, 0)] * len(lead) + [(0, -size % block) for size, block in zip((rows, columns), sizes)]
    blocks = jnp.pad(wide, padding)
    counts = [size // block for size, block in zip(blocks.shape[-2:], sizes)]
    blocks = blocks.reshape(*lead, counts[0], sizes[0], counts[1], sizes[1])
    top = jnp.abs(blocks).max((-3, -1))  # [..., blocks of rows, blocks of columns]
    factor = None
    if form.scale == "float8_e4m3fn":
        # Scales use their range. A factor of the whole matrix brings them there.
        factor = top.max((-2, -1)) / (LARGEST["float8_e4m3fn"] * LARGEST[form.element])
        factor = jnp.where(factor > 0, factor, 1).astype(jnp.float32)
        top = lax.optimization_barrier(top / factor[..., None, None].astype(wide.dtype))
    if form.scale == "float8_e8m0fnu":
        # The exponent of the largest number less that of the largest element, as in the OCP's description: the largest may be cut off.
        # XLA's log2 is not exact at powers of two.
        exponent = jnp.frexp(jnp.where(top > 0, top, 1))[1] - 3
        bits = (jnp.clip(exponent, -126, 127) + 127).astype(jnp.uint8)
    else:
        scale = top / LARGEST[form.element]
        bits = bits_of(jnp.where(scale > 0, scale, 1), form.scale)
    # Every quotient is rounded. XLA would make one of two that follow each other.
    bits = lax.optimization_barrier(bits)
    divisor = floats(bits, form.scale)
    if form.scale == "float8_e4m3fn":
        # The smallest may have been rounded to 0.
        divisor = jnp.where(divisor > 0, divisor, 1)
    if factor is not None:
        divisor = divisor * factor[..., None, None]
    ratio = blocks / divisor[..., :, None, :, None].astype(wide.dtype)
    codes = _codes(ratio, form.element).reshape(*lead, counts[0] * sizes[0], counts[1] * sizes[1])
    codes = codes[..., :rows, :columns]
    if form.bits == 4:
        codes = codes[..., 0::2] | (codes[..., 1::2] << 4)
    factor = None if factor is None else bits_of(factor, "float32")
    return QuantizedWeight(codes, bits, None, factor, form, weight.dtype)


@jax.jit
def error_of(weight: Array, quantised: QuantizedWeight) -> Array:
    """The root mean square of the error over that of the weight."""
    exact = weight.astype(jnp.float32)
    # Squares of large numbers would be infinite.
    top = jnp.maximum(jnp.abs(exact).max(), jnp.finfo(jnp.float32).tiny)
    rms = lambda x: jnp.sqrt(jnp.mean((x / top) ** 2))
    return rms(numbers(quantised) - exact) / jnp.maximum(rms(exact), jnp.finfo(jnp.float32).tiny)


def _codes(x: Array, element: str) -> Array:
    """The codes of the nearest numbers of an element, those with ties the even ones, as uint8."""
    most = LARGEST[element]
    if element == "int8":
        return lax.bitcast_convert_type(jnp.round(jnp.clip(x, -most, most)).astype(jnp.int8), jnp.uint8)
    if element == "uint4":
        return (jnp.round(jnp.clip(x, -8, most)) + 8).astype(jnp.uint8)
    if element == "float4_e2m1fn":
        size = jnp.abs(x)
        # Halfway between two numbers the code is even.
        code = sum((size > at).astype(jnp.uint8) for at in (0.25, 1.25, 2.5, 5.0))
        code += sum((size >= at).astype(jnp.uint8) for at in (0.75, 1.75, 3.5))
        return code | jnp.where(jnp.signbit(x), 8, 0).astype(jnp.uint8)
    return bits_of(jnp.clip(x, -most, most), element)
