r"""Forms of compressed-tensors (`quant_method` `compressed-tensors`), as LLM Compressor writes them.

| `format` | weight | arrays |
|---|---|---|
| `pack-quantized` | $(q - z)\, s$ | `weight_packed` int32 `[out, in * bits / 32]`, `weight_shape`, `weight_zero_point`, `weight_g_idx` |
| `int-quantized` | $(q - z)\, s$ | `weight` int8 `[out, in]`, `weight_zero_point` int8 |
| `float-quantized` | $q\, s$ | `weight` float8 `[out, in]` |
| `nvfp4-pack-quantized` | $q\, s / t$ | `weight_packed` uint8 `[out, in / 2]`, E2M1; `weight_global_scale` $t$; float8 scales |

The scales `weight_scale` have the shape `[1]`, `[out, 1]`, `[out, in / group_size]` or `[out / rows, in / columns]`, by the `strategy`. Packed
integers are $q + 2^{bits - 1}$, with successive inputs from the low bits on. Zero points are packed likewise, int32 `[out * bits / 32, groups]`, with
successive outputs. Only the factor $1 / t$ is rounded, to float32. Source: the compressors and `QuantizationArgs` of vllm-project/compressed-tensors.
"""

import dataclasses
import re
from typing import Any, NamedTuple

import numpy as np

from ..._entries import Entries
from . import form as parts
from .form import check_entry, check_known, DTYPES, Form, Held, Layout, SCALES

_GROUP = "targets weights input_activations output_activations format"
_WEIGHTS = """num_bits type symmetric strategy group_size block_structure dynamic actorder observer observer_kwargs
    scale_dtype zp_dtype"""


class _Kind(NamedTuple):
    """A format: the type and bits of its numbers, the name and dtype of their array, and the dtypes of the scales."""

    type: str
    bits: tuple[int, ...]
    end: str
    dtype: str
    scales: tuple[str, ...] = SCALES


_FORMATS = {
    "pack-quantized": _Kind("int", (4, 8), ".weight_packed", "I32"),
    "int-quantized": _Kind("int", (4, 8), ".weight", "I8"),
    "float-quantized": _Kind("float", (8,), ".weight", "F8_E4M3"),
    "nvfp4-pack-quantized": _Kind("float", (4,), ".weight_packed", "U8", ("F8_E4M3",)),
}


class _Group(NamedTuple):
    """How a group of modules is quantised. `bits` is the size of a number in its array."""

    kind: _Kind
    bits: int
    is_symmetric: bool
    block: parts.Block


class Compressed(Form):
    marker = (".weight_scale",)
    others = tuple(
        f".weight{end}" for end in ("", *"_packed _shape _zero_point _g_idx _global_scale".split())
    )
    known = """config_groups format ignore quantization_status kv_cache_scheme sparsity_config transform_config
        global_compression_ratio version"""

    def __init__(self, entries: Entries):
        super().__init__(entries)
        check_entry(entries, "quantization_status", "compressed", default="compressed")
        for name in ("sparsity_config", "transform_config"):
            if (entries.get(name) or {"format": "dense"}).get("format") != "dense":
                raise entries.wrong(name, "null", "convert the model to bfloat16, as this is not read")
        inner, default = entries.inner("config_groups"), entries.get("format")
        rules = [rule for name in inner for rule in _rules(inner.inner(name), default)]
        # Rules that name modules come before rules that name classes.
        self._rules = sorted(rules, key=lambda rule: rule[0].pattern == "")
        self._ignored = [_matcher(text) for text in entries.get("ignore") or ()]

    def is_not_converted(self, module: str) -> bool:
        return any(pattern.match(module) for pattern in self._ignored)

    def layout(self, held: Held) -> Layout:
        kind, bits, is_symmetric, block = self._of(held)
        shape = _shape(held, kind, bits)
        rows, columns = sizes = held.scales(".weight_scale", kind.scales, shape, block)
        if kind.dtype == "U8":
            held.shape(".weight_global_scale", ("F32",), (1,))
        if not is_symmetric:
            words = -(-rows * bits // 32) if kind.dtype == "I32" else rows
            held.shape(".weight_zero_point", (kind.dtype,), (words, columns))
        form = parts.integers(bits, block, held.dtype(".weight_scale"), not is_symmetric)
        if kind.type == "float":
            form = dataclasses.replace(form, element=DTYPES.get(kind.dtype, "float4_e2m1fn"))
        return Layout(shape, form, sizes, not is_symmetric, held.groups(".weight_g_idx", shape[1], block[1]))

    def arrays(self, held: Held, layout: Layout) -> tuple[Any, ...]:
        kind, bits, is_symmetric, _ = self._of(held)
        codes, scales = held.read(kind.end), held.read(".weight_scale")
        rows, columns = layout.sizes
        zeros = None if is_symmetric else held.read(".weight_zero_point").reshape(-1, columns)
        if kind.dtype == "U8":
            factor = 1 / held.read(".weight_global_scale").view(np.float32).reshape(())
            return codes, scales, None, np.asarray(factor).view(np.uint32)
        if kind.dtype == "I32":
            codes = codes.view(np.uint8)[:, : layout.shape[1] * bits // 8]
            zeros = (
                zeros if zeros is None else np.ascontiguousarray(parts.numbers_of(zeros.T, bits)[:, :rows].T)
            )
        elif kind.dtype == "I8":
            codes, zeros = (x if x is None else x.view(np.uint8) ^ 128 for x in (codes, zeros))
        return codes, scales, zeros, None

    def _of(self, held: Held) -> _Group:
        group = next((group for pattern, group in self._rules if pattern.match(held.module)), None)
        if group is None:
            raise held.wrong(".weight_scale", "a target of config_groups that names this module", "none")
        return group


def _matcher(text: str) -> re.Pattern[str]:
    """A test for names. A pattern is a whole name, or a regular expression after `re:`, which must match the beginning of a name."""
    return parts.pattern_of(text[3:]) if text.startswith("re:") else re.compile(f"{re.escape(text)}$")


def _rules(entries: Entries, default: Any) -> list[tuple[re.Pattern[str], _Group]]:
    """The patterns of modules that are quantised in the same way. A class of modules is an empty pattern."""
    check_known(entries, _GROUP)
    weights = entries.inner("weights")
    check_known(weights, _WEIGHTS)
    kind = _FORMATS[check_entry(entries, "format", *_FORMATS, default=default)]
    check_entry(weights, "type", kind.type, default="int")
    check_entry(weights, "dynamic", False, default=False)
    bits = check_entry(weights, "num_bits", *kind.bits, default=8)
    size, is_symmetric = weights.get("group_size"), weights.get("symmetric") is not False
    block, kinds = weights.get("block_structure"), ("tensor", "channel", "group", "tensor_group", "block")
    strategy = check_entry(weights, "strategy", *kinds)
    if ("group" in strategy) != ((size or -1) > 0) or (strategy == "block") != (block is not None):
        raise weights.wrong("strategy", "a group_size for groups and a block_structure for blocks")
    if not is_symmetric and (kind.type == "float" or strategy == "block"):
        raise weights.wrong("symmetric", "true for floats and blocks")
    rows, columns = {"tensor": (0, 0), "channel": (1, 0), "block": block}.get(strategy, (1, size))
    group = _Group(kind, 8 if kind.dtype == "I8" else bits, is_symmetric, (rows, columns))
    is_name = lambda text: "." in text or text.startswith("re:")
    return [(_matcher(text if is_name(text) else "re:"), group) for text in entries.get("targets") or ()]


def _shape(held: Held, kind: _Kind, bits: int) -> tuple[int, int]:
    rows, columns = held.matrix(kind.end, kind.dtype)
    if kind.dtype != "I32":
        return rows, columns * (2 if kind.dtype == "U8" else 1)
    held.shape(".weight_shape", ("I32", "I64"), (2,))
    shape = [int(size) for size in held.read(".weight_shape")]
    if shape[0] != rows or -(-shape[1] * bits // 32) != columns or shape[1] % 2:
        raise held.wrong(".weight_shape", f"{rows} outputs and the inputs of {columns} words", shape)
    return shape[0], shape[1]
