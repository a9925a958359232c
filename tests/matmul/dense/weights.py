"""Quantised weights of any codes, and their numbers by NumPy."""

from typing import Any

import ml_dtypes
import numpy as np

import ejkernel_eqx as ejx

_NUMBERS = {
    "int8": np.int8,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float4_e2m1fn": ml_dtypes.float4_e2m1fn,
}
_SCALES: dict[str, Any] = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float8_e8m0fnu": ml_dtypes.float8_e8m0fnu,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
}
FORMS = {
    "int8": ejx.QuantFormat("int8"),
    "fp8": ejx.QuantFormat("float8_e4m3fn"),
    "fp8 blocks": ejx.QuantFormat("float8_e4m3fn", (128, 128)),
    "fp8 rows": ejx.QuantFormat("float8_e4m3fn", (1, 128), "bfloat16"),
    "e5m2": ejx.QuantFormat("float8_e5m2", (0, 0), "float16"),
    "int4": ejx.QuantFormat("uint4", (1, 128), "bfloat16"),
    "zeros": ejx.QuantFormat("uint4", (1, 32), "float16", True),
    "channel zeros": ejx.QuantFormat("uint4", (1, 0), "float32", True),
    "mxfp4": ejx.QuantFormat("float4_e2m1fn", (1, 32), "float8_e8m0fnu"),
    "nvfp4": ejx.QuantFormat("float4_e2m1fn", (1, 16), "float8_e4m3fn"),
}


def weight(name: str, rows: int, columns: int, seed: int = 0) -> tuple[ejx.QuantizedWeight, np.ndarray]:
    """A weight with every kind of code and scale, and its numbers in float64."""
    form, rng = FORMS[name], np.random.default_rng(seed)
    codes = rng.integers(0, 1 << form.bits, (rows, columns)).astype(np.uint8)
    if form.element.startswith("float8"):
        # Neither NaN nor infinities.
        codes = np.where((codes & 0x7F) >= (0x7F if "e4m3" in form.element else 0x7C), 0x31, codes).astype(
            np.uint8
        )
    blocks = form.blocks(rows, columns)
    scales = np.exp2(rng.integers(-6, -2, blocks)) * rng.choice([1.0, 1.25, 1.5], blocks)
    scales = scales.astype(_SCALES[form.scale])
    zeros = rng.integers(0, 16, blocks).astype(np.uint8) if form.zeros else None
    factor = np.float32(0.7) if name == "nvfp4" else None
    sizes = [size if block == 0 else block for block, size in zip(form.block, (rows, columns))]
    place = np.ix_(np.arange(rows) // sizes[0], np.arange(columns) // sizes[1])
    if form.element == "uint4":
        numbers = codes.astype(np.float64) - (8 if zeros is None else zeros.astype(np.float64)[place])
    else:
        numbers = codes.view(_NUMBERS[form.element]).astype(np.float64)
    numbers = numbers * scales.astype(np.float64)[place] * (1.0 if factor is None else float(factor))
    stored = codes[:, 0::2] | codes[:, 1::2] << 4 if form.bits == 4 else codes
    bits = scales.view(f"uint{8 * scales.dtype.itemsize}")
    factor = None if factor is None else np.asarray(factor).view(np.uint32)
    return ejx.QuantizedWeight(stored, bits, zeros, factor, form, "float32"), numbers
