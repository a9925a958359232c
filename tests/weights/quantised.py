"""Published quantised weights as their descriptions define them, in NumPy: the arrays of a weight, and the numbers that they stand for.

Each function quantises a float32 matrix `[out, in]` by rounding to nearest and returns the arrays by the ends of their names, and the weight
`[out, in]` that they mean, computed from the numbers and not from the arrays.
"""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

Arrays = dict[str, np.ndarray]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def write(path: pathlib.Path, arrays: Arrays) -> None:
    """A safetensors file. The writer for NumPy has no float8."""
    kinds = {
        "bfloat16": "BF16",
        "float8_e4m3fn": "F8_E4M3",
        "float8_e5m2": "F8_E5M2",
        "float8_e8m0fnu": "F8_E8M0",
    }
    kinds |= {"uint8": "U8", "int8": "I8", "int32": "I32", "int64": "I64", "float16": "F16", "float32": "F32"}
    header, at = {}, 0
    for name, x in arrays.items():
        header[name] = {"dtype": kinds[x.dtype.name], "shape": x.shape, "data_offsets": [at, at + x.nbytes]}
        at += x.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(np.ascontiguousarray(x).tobytes() for x in arrays.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def words(numbers: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Numbers of few bits along an axis, in int32 from the low bits on. The last word is filled with zeros."""
    numbers = np.moveaxis(numbers.astype(np.uint64), axis, -1)
    each = 32 // bits
    numbers = np.pad(numbers, [(0, 0)] * (numbers.ndim - 1) + [(0, -numbers.shape[-1] % each)])
    numbers = numbers.reshape(*numbers.shape[:-1], -1, each)
    packed: Any = np.sum(
        [numbers[..., k] << np.uint64(bits * k) for k in range(each)], axis=0, dtype=np.uint64
    )
    return np.ascontiguousarray(np.moveaxis(packed.astype(np.uint32).view(np.int32), -1, axis))


def halves(numbers: np.ndarray) -> np.ndarray:
    return (numbers[..., 0::2] + 16 * numbers[..., 1::2]).astype(np.uint8)


def spread(scales: np.ndarray, block: tuple[int, int], shape: tuple[int, int]) -> np.ndarray:
    """Each weight's number of those that blocks share."""
    rows, columns = (np.arange(size) // (part or size) for size, part in zip(shape, block))
    return scales[rows][:, columns]


def largest(x: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    rows, columns = (part or size for size, part in zip(x.shape, block))
    x = np.pad(np.abs(x), [(0, -x.shape[0] % rows), (0, -x.shape[1] % columns)])
    return x.reshape(x.shape[0] // rows, rows, -1, columns).max((1, 3)).astype(np.float32)


def e2m1(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The codes of the nearest floats of 4 bits, and these."""
    code = np.abs(np.abs(x)[..., None] - E2M1).argmin(-1)
    return (code + 8 * (x < 0)).astype(np.uint8), np.where(x < 0, -1, 1).astype(np.float32) * E2M1[code]


def float8(
    x: np.ndarray, block: tuple[int, int], scale_dtype: Any = np.float32
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    scales = (largest(x, block) / 448).astype(scale_dtype)
    each = spread(scales.astype(np.float32), block, x.shape)
    codes = np.clip(x / each, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return codes, scales, codes.astype(np.float32) * each


def fp8(
    x: np.ndarray,
    block: tuple[int, int] = (128, 128),
    end: str = ".weight_scale_inv",
    scale_dtype: Any = np.float32,
):
    codes, scales, weight = float8(x, block, scale_dtype)
    return {".weight": codes, end: scales[0, 0] if block == (0, 0) else scales}, weight


def integers(
    x: np.ndarray,
    group: int,
    bits: int,
    symmetric: bool = False,
    scale_dtype: Any = np.float16,
    groups: Any = None,
):
    """Numbers from 0 to 2 ** bits - 1, and scales and zero points `[out, groups]`; `groups`: that of each input."""
    groups = np.arange(x.shape[1]) // group if groups is None else groups
    parts = [x[:, groups == g] for g in range(groups.max() + 1)]
    high = np.stack([part.max(1) for part in parts], 1)
    low = np.stack([part.min(1) for part in parts], 1)
    if symmetric:
        high = np.maximum(np.abs(high), np.abs(low))
        low = -high
    most = 2**bits - 1
    scales = ((high - low) / most).astype(scale_dtype)
    wide = scales.astype(np.float32)
    zeros = np.full(scales.shape, 2 ** (bits - 1)) if symmetric else np.clip(np.rint(-low / wide), 1, most)
    numbers = np.clip(np.rint(x / wide[:, groups]) + zeros[:, groups], 0, most)
    weight = (numbers - zeros[:, groups]).astype(np.float32) * wide[:, groups]
    return numbers, zeros, scales, weight


def awq(x: np.ndarray, group: int = 16) -> tuple[Arrays, np.ndarray]:
    numbers, zeros, scales, weight = integers(x, group, 4)

    def packed(numbers: np.ndarray) -> np.ndarray:
        """`[out, n]` to `[n, out / 8]`: bits 4 k hold the output at the k-th of these places."""
        eights = numbers.T.reshape(numbers.shape[1], -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]
        return words(eights.reshape(numbers.shape[1], -1), 4, 1)

    return {".qweight": packed(numbers), ".qzeros": packed(zeros), ".scales": scales.T}, weight


def gptq(
    x: np.ndarray,
    group: int = 16,
    bits: int = 4,
    symmetric: bool = False,
    version: int = 1,
    shuffle: bool = False,
):
    groups = np.arange(x.shape[1]) // group
    groups = np.random.default_rng(0).permutation(groups) if shuffle else groups
    numbers, zeros, scales, weight = integers(x, group, bits, symmetric, groups=groups)
    arrays = {".qweight": words(numbers.T, bits, 0), ".scales": scales.T, ".g_idx": groups.astype(np.int32)}
    return arrays | {".qzeros": words(zeros.T - (version == 1), bits, 1)}, weight


def packed(
    x: np.ndarray,
    group: int = 16,
    bits: int = 4,
    symmetric: bool = True,
    shuffle: bool = False,
    scale_dtype: Any = ml_dtypes.bfloat16,
):
    """compressed-tensors `pack-quantized`: signed numbers, packed plus half of their range."""
    size = group or x.shape[1]
    groups = np.arange(x.shape[1]) // size
    groups = np.random.default_rng(0).permutation(groups) if shuffle else groups
    numbers, zeros, scales, weight = integers(x, size, bits, symmetric, scale_dtype, groups)
    arrays = {".weight_packed": words(numbers, bits, 1), ".weight_scale": scales}
    arrays |= {".weight_shape": np.array(x.shape, np.int64)}
    arrays |= {} if symmetric else {".weight_zero_point": words(zeros, bits, 0)}
    return arrays | ({".weight_g_idx": groups.astype(np.int32)} if shuffle else {}), weight


def int8(x: np.ndarray, symmetric: bool = True) -> tuple[Arrays, np.ndarray]:
    numbers, zeros, scales, weight = integers(x, x.shape[1], 8, symmetric, np.float32)
    arrays = {".weight": (numbers - 128).astype(np.int8), ".weight_scale": scales}
    return arrays | ({} if symmetric else {".weight_zero_point": (zeros - 128).astype(np.int8)}), weight


def compressed_float8(
    x: np.ndarray, block: tuple[int, int] = (1, 0), scale_dtype: Any = ml_dtypes.bfloat16
) -> tuple[Arrays, np.ndarray]:
    codes, scales, weight = float8(x, block, scale_dtype)
    return {".weight": codes, ".weight_scale": scales.reshape(1) if block == (0, 0) else scales}, weight


def nvfp4(x: np.ndarray) -> tuple[Arrays, np.ndarray]:
    whole = np.float32(6 * 448 / np.abs(x).max())
    scales = (largest(x, (1, 16)) / 6 * whole).astype(ml_dtypes.float8_e4m3fn)
    each = spread(scales.astype(np.float32) / whole, (1, 16), x.shape)
    codes, numbers = e2m1(x / np.where(each == 0, 1, each))
    arrays = {".weight_packed": halves(codes), ".weight_scale": scales}
    return arrays | {".weight_global_scale": np.array([whole])}, numbers * each


def mxfp4(x: np.ndarray) -> tuple[Arrays, np.ndarray]:
    """Of experts `[N, in, out]`, as they are published in floats."""
    rows = x.swapaxes(1, 2)
    blocks = rows.reshape(*rows.shape[:2], -1, 32)
    exponents = np.floor(np.log2(np.abs(blocks).max(-1))) - 2
    codes, numbers = e2m1(blocks / np.exp2(exponents)[..., None])
    weight = (numbers * np.exp2(exponents)[..., None]).reshape(rows.shape).swapaxes(1, 2)
    return {"_blocks": halves(codes), "_scales": (exponents + 127).astype(np.uint8)}, weight.astype(
        np.float32
    )


def one_by_one(weights: Arrays, kind: str) -> Arrays:
    """Experts as they are published, each with names of its own."""
    names = ("w1", "w3", "w2") if kind == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    result = {}
    for name, x in weights.items():
        prefix, _, last = name.rpartition(".")
        if not prefix.endswith("experts") or x.ndim != 3:
            result[name] = x
        elif last == "down_proj":
            result |= {f"{prefix}.{i}.{names[2]}.weight": one for i, one in enumerate(x)}
        else:
            for i, one in enumerate(x):
                result |= dict(zip((f"{prefix}.{i}.{part}.weight" for part in names), np.split(one, 2)))
    return result


def quantised(
    weights: Arrays, is_quantised: Callable[[str], bool], form: Callable[[np.ndarray], Any]
) -> tuple[Arrays, Arrays]:
    """The arrays of a quantised model, and those of the float model that it stands for."""
    arrays, floats = {}, dict(weights)
    for name, x in weights.items():
        if is_quantised(name):
            parts, floats[name] = form(x)
            arrays |= {name.removesuffix(".weight") + end: part for end, part in parts.items()}
        else:
            arrays[name] = x
    return arrays, floats
