"""A checkpoint with quantised weights, seen as one of floats: each weight has its name and its shape, and is repacked when it is read."""

import fnmatch
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..._entries import Entries, shown
from ...quantised import dequantise, QuantizedWeight
from ..source import FileSource, Source
from .awq import Awq
from .compressed import Compressed
from .form import Form, Held
from .fp8 import Fp8
from .gptq import Gptq
from .mxfp4 import Mxfp4
from .values import DEQUANTISE

_FORMS = {"fp8": Fp8, "mxfp4": Mxfp4, "awq": Awq, "gptq": Gptq, "compressed-tensors": Compressed}
_ACTIVATIONS = (
    ".input_scale .input_zero_point .input_global_scale .activation_scale .output_scale .output_zero_point .k_scale "
    ".v_scale .kv_scale"
).split()
"""The ends of names of arrays by which activations and caches would be rounded. Here they are not."""


class QuantisedSource(Source):
    """The weights of a quantised checkpoint by the names that they have in floats."""

    def __init__(self, source: Source, form: Form, to_floats: bool | Sequence[str]):
        """`to_floats`: whether all weights become floats, or patterns of the names of those that do.

        What the files say of each weight is checked here, from their headers and the groups of inputs, before any weight is read.
        """
        assert isinstance(source, FileSource)
        self.label, self._source, self._form = source.label, source, form
        names = dict.fromkeys(source.names())
        modules = [name.removesuffix(end) for end in form.marker for name in names if name.endswith(end)]
        self._modules = {module + form.weight: Held(source, names, module) for module in modules}
        parts = {module + end for module in modules for end in (*form.marker, *form.others)}
        hidden = {name for name in names if name in parts or name.endswith(tuple(_ACTIVATIONS))}
        self._names = [*(name for name in names if name not in hidden), *self._modules]
        self._shapes: dict[str, tuple[int, ...]] = {}
        self.kept: set[str] = set()
        for name, held in self._modules.items():
            patterns = ("*",) if to_floats is True else to_floats or ()
            self._check(name, held, any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns))
        for name in self._names:
            if name not in self._modules and source.kind(name).startswith(("F8", "F4")):
                raise Held(source, names, name).wrong("", "scales beside it", "none", "Download all files.")

    def _check(self, name: str, held: Held, is_float: bool) -> None:
        if self._form.is_not_converted(held.module):
            expected = "floats, since quantization_config says that this module is not quantised"
            raise held.wrong(self._form.weight, expected, "a quantised weight", "Correct the config.json.")
        layout = self._form.layout(held)
        if layout.only_floats and not is_float:
            expected, received = "a weight that can be kept quantised", f"one of which {layout.only_floats}"
            raise held.wrong(self._form.weight, expected, received, DEQUANTISE)
        self._shapes[name] = layout.shape
        if not is_float:
            self.kept.add(name)

    def names(self) -> Iterable[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name] if name in self._modules else self._source.shape(name)

    def read(self, name: str) -> Any:
        """Floats."""
        if name not in self._modules:
            return self._source.read(name)
        value = self._form.read(self._modules[name], np.dtype(np.float32))
        return dequantise(value) if isinstance(value, QuantizedWeight) else value

    def read_kept(self, name: str, dtype: Any) -> Any:
        """The `QuantizedWeight` of a name in `kept`, of arrays of NumPy, which stands for numbers of `dtype`."""
        return self._form.read(self._modules[name], dtype)


def form_of(entries: Entries) -> Form:
    """The form that a `quantization_config` describes."""
    method = entries.get("quant_method")
    if method not in _FORMS:
        remedy = "convert the weights to bfloat16, or quantise them in one of these forms"
        raise entries.wrong("quant_method", " or ".join(map(shown, _FORMS)), remedy)
    return _FORMS[method](entries)
