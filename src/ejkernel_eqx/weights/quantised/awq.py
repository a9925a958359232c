r"""AWQ (`quant_method` `awq`, `version` `gemm`): numbers of 4 bits with a scale and a zero point for each group of inputs.

$$W_{oi} = (q_{io} - z_{go})\, s_{go}, \qquad g = \lfloor i / \mathrm{group\_size} \rfloor$$

| array | |
|---|---|
| `qweight` | int32 `[in, out / 8]`: output $8 n + [0, 2, 4, 6, 1, 3, 5, 7]_k$ is in bits $4 k$ to $4 k + 3$ of number $n$ |
| `qzeros` | int32 `[in / group_size, out / 8]`, packed likewise |
| `scales` | `[in / group_size, out]` |

Source: `WQLinear_GEMM` of AutoAWQ.
"""

from typing import Any

import numpy as np

from ..._entries import Entries
from .form import check_entry, Form, Held, integers, Layout, numbers_of, SCALES

_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # where each of eight outputs is


class Awq(Form):
    marker, others = (".qweight",), (".qzeros", ".scales")
    known = (
        "bits group_size zero_point version backend do_fuse exllama_config fuse_max_seq_len modules_to_fuse"
    )

    def __init__(self, entries: Entries):
        super().__init__(entries)
        check_entry(entries, "bits", 4)
        check_entry(entries, "version", "gemm", default="gemm")
        check_entry(entries, "zero_point", True, default=True)
        self._group = entries.get("group_size") or 128

    def layout(self, held: Held) -> Layout:
        columns, words = held.matrix(".qweight", "I32")
        group = held.group(".qweight", columns, self._group)
        held.shape(".qzeros", ("I32",), (columns // group, words))
        held.shape(".scales", SCALES, (columns // group, 8 * words))
        if columns % 2:
            raise held.wrong(".qweight", "an even number of inputs", columns)
        form = integers(4, (1, group), held.dtype(".scales"), True)
        return Layout((8 * words, columns), form, (8 * words, columns // group), True)

    def arrays(self, held: Held, layout: Layout) -> tuple[Any, ...]:
        words, zeros = held.read(".qweight"), held.read(".qzeros").reshape(layout.sizes[1], -1)
        numbers, scales = _in_order(words), held.read(".scales").reshape(layout.sizes[::-1]).T
        codes = numbers[:, 0::2] | numbers[:, 1::2] << 4
        return codes, np.ascontiguousarray(scales), _in_order(zeros), None


def _in_order(words: np.ndarray) -> np.ndarray:
    """Unpacks words `[n, out / 8]` to numbers `[out, n]`."""
    numbers = numbers_of(words, 4).reshape(*words.shape, 8)[..., _PLACES]
    return np.ascontiguousarray(numbers.reshape(words.shape[0], -1).T)
