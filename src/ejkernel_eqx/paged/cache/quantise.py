"""Quantisation to 8 bits, with a scale for each vector."""

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Shaped

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
"""The largest finite number of each dtype; int8 excludes -128, so that the range is symmetric."""
_NAMES = "int8, float8_e4m3fn or float8_e5m2"


def quantise(
    x: Any, dtype: DTypeLike, scale: Any | None = None
) -> tuple[Shaped[Array, "... D"], Float[Array, "..."]]:
    r"""Quantises `x` to 8-bit numbers and a scale: $x_d \approx s \cdot n_d$.

    $s = \max_d |x_d| / n_\text{max}$ for each vector along the last axis, and 1 if that is zero;
    $n_d = \text{round}(x_d / s)$, with ties to even. $n_\text{max}$ is 127 for int8, 448 for float8_e4m3fn and 57344 for
    float8_e5m2. So $|x_d - s n_d| \le s / 2$ for int8; float8_e4m3fn rounds to 4 significant bits,
    $|x_d - s n_d| \le \max(|x_d| 2^{-4}, s 2^{-10})$, and float8_e5m2 to 3, $|x_d - s n_d| \le \max(|x_d| 2^{-3}, s 2^{-17})$.
    Numbers never overflow: magnitudes beyond $n_\text{max}$ are clipped to $n_\text{max}$, also in float8_e5m2, which has infinities.

    **Arguments:**

    - `x`: floats `[..., D]`, such as keys `[T, K, D]`; the computation is in float32. A vector with a NaN or an infinity gets a scale that
        is not finite, so that all of it reads as NaN.
    - `dtype`: `int8`, `float8_e4m3fn` or `float8_e5m2`.
    - `scale`: positive floats that broadcast to `x.shape[:-1]`, such as `[K]`, to use instead of the computed scale.

    **Returns:** the stored numbers `[..., D]` in `dtype`, and the scale, float32 `x.shape[:-1]`.

    **Raises:** `ValueError` for an unsupported dtype, or a scale that does not broadcast.
    """
    dtype = jnp.dtype(dtype)
    if dtype.name not in LARGEST:
        raise ValueError(f"dtype: expected {_NAMES}, received {dtype.name}; other dtypes need no scale.")
    x = jnp.asarray(x)
    if x.ndim < 1 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"x: expected floats [..., D], received {x.dtype} of shape {x.shape}; cast it first."
        )
    x = x.astype(jnp.float32)
    largest = LARGEST[dtype.name]
    scale = _own(x, largest) if scale is None else _given(scale, x.shape[:-1])
    # A scale of zero would compute 0 / 0. The result does not matter, since everything then reads as zero.
    ratio = x / jnp.where(scale > 0, scale, 1.0)[..., None]
    if dtype == jnp.int8:
        # int8 has no NaN; the scale, not finite then, still makes the vector read as NaN.
        ratio = jnp.where(jnp.isnan(ratio), 0.0, jnp.round(ratio))
    return jnp.clip(ratio, -largest, largest).astype(dtype), scale


def dequantise(stored: Any, scale: Any, dtype: DTypeLike = jnp.float32) -> Float[Array, "... D"]:
    r"""The numbers that quantised ones stand for: $x_d = s \cdot n_d$.

    **Arguments:**

    - `stored`: 8-bit numbers `[..., D]`, as returned by [`ejkernel_eqx.paged.cache.quantise.quantise`][].
    - `scale`: floats that broadcast to `stored.shape[:-1]`.
    - `dtype`: the dtype of the result; the product is computed in float32.

    **Returns:** `[..., D]` in `dtype`.

    **Raises:** `ValueError` for a scale that does not broadcast.
    """
    stored = jnp.asarray(stored)
    if stored.dtype.name not in LARGEST or stored.ndim < 1:
        raise ValueError(
            f"stored: expected {_NAMES} [..., D], received {stored.dtype} of shape {stored.shape}; other dtypes are not "
            "quantised."
        )
    scale = _given(scale, stored.shape[:-1])
    return (stored.astype(jnp.float32) * scale[..., None]).astype(dtype)


def _own(x: Array, largest: float) -> Array:
    scale = jnp.max(jnp.abs(x), axis=-1, initial=0.0) / largest
    # 1 also if the quotient is subnormal, which devices may flush to zero; NaN is kept.
    return jnp.where(scale < jnp.finfo(jnp.float32).tiny, 1.0, scale)


def _given(scale: Any, shape: tuple[int, ...]) -> Array:
    scale = jnp.asarray(scale)
    fits = len(scale.shape) <= len(shape) and all(
        size in (1, full) for size, full in zip(scale.shape[::-1], shape[::-1], strict=False)
    )
    if not fits or not jnp.issubdtype(scale.dtype, jnp.floating):
        raise ValueError(
            f"scale: expected floats that broadcast to {shape}, one for each vector, received {scale.dtype} of shape {scale.shape}; "
            "use axes of size 1 where it is shared."
        )
    return jnp.broadcast_to(scale.astype(jnp.float32), shape)
