r"""GPTQ (`quant_method` `gptq`): numbers of 4 or 8 bits with a scale and a zero point for each group of inputs.

$$W_{oi} = (q_{io} - z_{go})\, s_{go}, \qquad g = \mathrm{g\_idx}_i$$

| array | |
|---|---|
| `qweight` | int32 `[in * bits / 32, out]`: successive inputs from the low bits on |
| `qzeros` | int32 `[groups, out * bits / 32]`: successive outputs; $z - 1$ in `checkpoint_format` `gptq`, $z$ in `gptq_v2` |
| `scales` | `[groups, out]` |
| `g_idx` | int32 `[in]`: the group of each input; out of order with `desc_act` |

Source: `QuantLinear` of AutoGPTQ, GPTQModel.
"""

from typing import Any

import numpy as np

from ..._entries import Entries
from .form import check_entry, Form, Held, integers, Layout, numbers_of, SCALES


class Gptq(Form):
    marker, others = (".qweight",), (".qzeros", ".scales", ".g_idx")
    known = """bits group_size sym desc_act checkpoint_format format dynamic lm_head pack_dtype is_marlin_format damp_percent
        damp_auto_increment true_sequential static_groups mse act_group_aware dataset tokenizer model_seqlen batch_size
        block_name_to_quantize module_name_preceding_first_block modules_in_block_to_quantize pad_token_id
        use_cuda_fp16 use_exllama exllama_config disable_exllama max_input_length cache_block_outputs meta quantizer
        backend version model_file_base_name model_name_or_path"""

    def __init__(self, entries: Entries):
        super().__init__(entries)
        name = "checkpoint_format" if entries.get("checkpoint_format") else "format"
        self._offset = int(check_entry(entries, name, "gptq", "gptq_v2", default="gptq") == "gptq")
        check_entry(entries, "is_marlin_format", False, default=False)
        check_entry(entries, "pack_dtype", "int32", default="int32")
        if entries.get("group_size") is None:
            raise entries.wrong("group_size", "-1 or a number of inputs")
        self._bits, self._group = check_entry(entries, "bits", 4, 8), entries["group_size"]
        self._is_symmetric = entries.get("sym") is not False
        # Modules that rules exclude are stored as floats.
        rules = entries.get("dynamic") or {}
        if not isinstance(rules, dict) or any(not rule.startswith("-:") for rule in rules):
            raise entries.wrong("dynamic", "rules that exclude modules ('-:...')", "quantise all in one way")

    def layout(self, held: Held) -> Layout:
        each = 32 // self._bits
        words, rows = held.matrix(".qweight", "I32")
        columns = words * each
        group = held.group(".qweight", columns, self._group)
        if rows % each:
            raise held.wrong(".qweight", f"a multiple of {each} outputs", rows)
        held.shape(".qzeros", ("I32",), (columns // group, rows // each))
        held.shape(".scales", SCALES, (columns // group, rows))
        form = integers(self._bits, (1, group), held.dtype(".scales"), not self._is_symmetric)
        groups = held.groups(".g_idx", columns, group)
        return Layout((rows, columns), form, (rows, columns // group), not self._is_symmetric, groups)

    def arrays(self, held: Held, layout: Layout) -> tuple[Any, ...]:
        zeros = numbers_of(held.read(".qzeros").reshape(layout.sizes[1], -1), self._bits).T
        most, middle = 2**self._bits - 1, 2 ** (self._bits - 1)
        if self._offset and (zeros == most).any():
            twice = f"{most}, which loaders read in two ways"
            raise held.wrong(
                ".qzeros", f"zero points less one up to {most - 1}", twice, "Save it as gptq_v2."
            )
        zeros = np.ascontiguousarray(zeros) + np.uint8(self._offset)
        if self._is_symmetric and (zeros != middle).any():
            raise held.wrong(".qzeros", f"zero points {middle}, as sym is true", "others")
        codes, scales = held.read(".qweight").T, held.read(".scales").reshape(layout.sizes[::-1]).T
        codes = np.ascontiguousarray(codes).view(np.uint8)
        return codes, np.ascontiguousarray(scales), None if self._is_symmetric else zeros, None
