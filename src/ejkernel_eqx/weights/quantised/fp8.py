r"""Float8 weights with a scale for each block, row or whole matrix (`quant_method` `fp8`), as DeepSeek-V3 and Qwen3-FP8.

$$W_{oi} = \mathrm{weight}_{oi} \cdot \mathrm{scale}_{\lfloor o / 128 \rfloor \lfloor i / 128 \rfloor}$$

| array | |
|---|---|
| `weight` | float8 `[out, in]` |
| `weight_scale_inv` (DeepSeek), `weight_scale` | `[out / 128, in / 128]`, rounded up; without `weight_block_size` one for the matrix, or `[out, 1]` |

Scales of activations are not read, since activations stay floats here. Source: `inference/kernel.py` and README_WEIGHTS of DeepSeek-V3.
"""

from typing import Any

from ..._entries import Entries
from ...quantised import QuantFormat
from .form import check_entry, DTYPES, Form, Held, Layout, SCALES

_FORMATS = {"e4m3": "F8_E4M3", "float8_e4m3fn": "F8_E4M3", "e5m2": "F8_E5M2", "float8_e5m2": "F8_E5M2"}
_SCALES = (*SCALES, "F8_E8M0")


class Fp8(Form):
    marker, others = (".weight_scale_inv", ".weight_scale"), (".weight",)
    known = "activation_scheme weight_block_size ignored_layers fmt scale_fmt dequantize kv_cache_scheme"

    def __init__(self, entries: Entries):
        super().__init__(entries)
        self._kind = _FORMATS[check_entry(entries, "fmt", *_FORMATS, default="e4m3")]
        block = entries.get("weight_block_size")
        self._block = None if block is None else (block[0], block[1])
        self.not_converted += tuple(entries.get("ignored_layers") or ())

    def layout(self, held: Held) -> Layout:
        shape, end = held.matrix(".weight", self._kind), self._scales(held)
        block = self._block or ((0, 0) if set(held.shape(end, _SCALES)) <= {1} else (1, 0))
        sizes = held.scales(end, _SCALES, shape, block)
        return Layout(shape, QuantFormat(DTYPES[self._kind], block, held.dtype(end)), sizes)

    def arrays(self, held: Held, layout: Layout) -> tuple[Any, ...]:
        return held.read(".weight"), held.read(self._scales(held)), None, None

    def _scales(self, held: Held) -> str:
        return next(end for end in self.marker if held.has(end))
