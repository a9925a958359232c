r"""The experts of GPT-OSS in MXFP4 (`quant_method` `mxfp4`): floats of 4 bits (E2M1). Each 32 inputs share a power of two.

$$W_{o,\,32 g + j} = \mathrm{e2m1}(\mathrm{blocks}_{ogj}) \cdot 2^{\,\mathrm{scales}_{og} - 127}$$

| array | |
|---|---|
| `gate_up_proj_blocks`, `down_proj_blocks` | uint8 `[N, out, in / 32, 16]`, two numbers a byte, the even input in the low half |
| `gate_up_proj_scales`, `down_proj_scales` | uint8 `[N, out, in / 32]`, exponents |

In `gate_up_proj` the outputs of gate and up alternate. As floats, the same weights have the shape `[N, in, out]`. Source: OCP
Microscaling Formats 1.0 and the weights of `openai/gpt-oss-20b`.
"""

from typing import Any

from ...quantised import QuantFormat
from .form import Form, Held, Layout


class Mxfp4(Form):
    marker, others, weight = ("_blocks",), ("_scales",), ""
    known = "dequantize"

    def layout(self, held: Held) -> Layout:
        shape = held.shape("_blocks", ("U8",))
        if len(shape) != 4 or shape[-1] != 16:
            raise held.wrong("_blocks", "shape (experts, outputs, inputs / 32, 16)", shape)
        held.shape("_scales", ("U8",), shape[:3])
        form = QuantFormat("float4_e2m1fn", (1, 32), "float8_e8m0fnu")
        return Layout((shape[0], 32 * shape[2], shape[1]), form, shape[:3])

    def arrays(self, held: Held, layout: Layout) -> tuple[Any, ...]:
        return held.read("_blocks").reshape(*layout.sizes[:2], -1), held.read("_scales"), None, None
