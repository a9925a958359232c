"""Problems of the float8 product, and its results from the definition, in float64 on the quantised operands."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import ejkernel_eqx as ejx

E4M3 = ml_dtypes.float8_e4m3fn
F32 = np.float32


def quantised_weight(
    n: int, k: int, block: tuple[int, int] = (128, 128), scale: str = "float32", seed: int = 0
) -> ejx.QuantizedWeight:
    rng, form = np.random.default_rng(seed), ejx.QuantFormat("float8_e4m3fn", block, scale)
    codes = np.clip(100 * rng.standard_normal((n, k)), -448, 448).astype(E4M3)
    scales = (rng.uniform(0.5, 1.5, form.blocks(n, k)) / (100 * k**0.5)).astype(jnp.dtype(scale))
    bits = scales.view(f"uint{8 * scales.itemsize}")
    return ejx.QuantizedWeight(codes.view(np.uint8), bits, None, None, form)


def rows(*shape: int, dtype: str = "float32", seed: int = 1) -> jax.Array:
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal(shape) * 2.0 ** rng.integers(-8, 8, (*shape[:-1], 1)), dtype)


def as_numbers(x: Any, x_scale: float | None) -> np.ndarray:
    """The numbers that quantised rows stand for, from the definition."""
    x = np.asarray(x, F32)
    out = np.zeros(x.shape)
    for start in range(0, x.shape[-1], 128):
        part = x[..., start : start + 128]
        top = np.maximum(np.abs(part).max(-1, keepdims=True), F32(2.0**-96))
        scale, inverse = (
            (top / F32(448), F32(448) / top) if x_scale is None else (F32(x_scale), 1 / F32(x_scale))
        )
        codes = np.clip(part * inverse, F32(-448), F32(448)).astype(E4M3)
        out[..., start : start + 128] = codes.astype(np.float64) * np.asarray(scale, np.float64)
    return out


def weight_numbers(w: ejx.QuantizedWeight) -> np.ndarray:
    codes = np.asarray(w.codes).view(E4M3).astype(np.float64)
    scales = np.asarray(w.scales).view(jnp.dtype(w.format.scale)).astype(np.float64)
    n, k = codes.shape
    at = lambda size, block: np.arange(size) // block if block else np.zeros(size, int)
    return codes * scales[at(n, w.format.block[0])[:, None], at(k, w.format.block[1])[None, :]]


def stacked(n: int, k: int, block: tuple[int, int], count: int) -> tuple[Any, list[ejx.QuantizedWeight]]:
    """A weight for each of several groups: all of them in one, and each alone."""
    each = [quantised_weight(n, k, block, seed=seed) for seed in range(count)]
    return jax.tree.map(lambda *parts: np.stack(parts), *each), each


def by_group(x: np.ndarray, each: list[np.ndarray], sizes: Any) -> np.ndarray:
    """Rows by the matrix of their group, and zeros behind the last."""
    out = np.zeros((*x.shape[:-1], each[0].shape[-1]))
    for b in np.ndindex(*x.shape[:-2]):
        start = 0
        for size, matrix in zip(np.asarray(sizes)[b], each):
            out[b][start : start + size] = x[b][start : start + size] @ matrix
            start += size
    return out


def exact(x: Any, w: ejx.QuantizedWeight, x_scale: float | None = None) -> np.ndarray:
    return as_numbers(x, x_scale) @ weight_numbers(w).T


CASES = {
    "DeepSeek": ((2, 21, 384), 256, (128, 128), "float32", "bfloat16", None, None),
    "odd sizes": ((37, 300), 173, (128, 128), "float32", "float32", None, None),
    "by row": ((7, 257), 65, (1, 128), "bfloat16", "float32", None, None),
    "channels": ((40, 160), 96, (1, 0), "float32", "bfloat16", None, "float32"),
    "one scale": ((33, 100), 31, (0, 0), "float32", "float16", None, None),
    "all by one": ((2, 3, 256), 64, (0, 0), "float32", "float32", 0.02, "bfloat16"),
    "wide blocks": ((130, 520), 64, (32, 256), "float8_e8m0fnu", "float32", None, None),
    "published scale": ((9, 384), 128, (128, 128), "float32", "float32", 0.004, None),
    "one row": ((48,), 9, (1, 0), "float16", "float32", None, None),
}  # fmt: skip
GROUPS = {
    "blocks": ((37, 300), 173, (128, 128), [5, 0, 20], None),
    "batches, channels": ((2, 70, 256), 64, (1, 0), [[5, 0, 65], [1, 33, 21]], None),
    "by one scale": ((40, 160), 96, (0, 0), [33, 0, 7], 0.02),
    "no group": ((9, 128), 128, (128, 128), [0, 0], None),
}
