"""A quantised checkpoint with the interface of one with floats. Each weight has its usual name and shape, and is repacked when it is read."""

import fnmatch
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..._entries import entries_of, shown
from ...quantised import dequantise, QuantizedWeight
from ..configs import Config, text_entries
from ..source import FileSource, of_file, open_source, read_json, Source, StateDict
from .awq import Awq
from .compressed import Compressed
from .form import Form, Held
from .fp8 import Fp8
from .gptq import Gptq
from .mxfp4 import Mxfp4
from .values import DEQUANTISE

_FORMS = {"fp8": Fp8, "mxfp4": Mxfp4, "awq": Awq, "gptq": Gptq, "compressed-tensors": Compressed}
_MOST_BYTES = 2**24  # of a config.json
_ACTIVATIONS = (
    ".input_scale .input_zero_point .input_global_scale .activation_scale .output_scale .output_zero_point .k_scale "
    ".v_scale .kv_scale"
).split()
"""The ends of names of arrays by which activations and caches would be rounded. Here they are not."""


class QuantisedSource(Source):
    """The weights of a quantised checkpoint, by the names that they would have as floats."""

    def __init__(self, source: FileSource, form: Form, to_floats: bool | Sequence[str]):
        """`to_floats`: whether all weights become floats; or patterns for the names of those that do.

        The headers of the files and the groups of inputs are checked here, before any weight is read.
        """
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
        if name not in self._modules:
            return self._source.read(name)
        value = self._form.read(self._modules[name], np.dtype(np.float32))
        return dequantise(value) if isinstance(value, QuantizedWeight) else value

    def read_kept(self, name: str, dtype: Any) -> Any:
        return self._form.read(self._modules[name], dtype)


def opened(state_dict: StateDict, dequantise: bool | Sequence[str]) -> Source:
    """Opens published arrays by the names that they have as floats. Files are quantised as the `config.json` beside them says."""
    is_patterns = isinstance(dequantise, list | tuple) and all(isinstance(one, str) for one in dequantise)
    if not isinstance(dequantise, bool) and not is_patterns:
        raise ValueError(
            f"dequantise: expected True, False or a sequence of patterns, received {dequantise!r}; ['*.o_proj.weight'] is one."
        )
    source = open_source(state_dict)
    if not isinstance(source, FileSource) or not (path := source.folder / "config.json").is_file():
        return source
    form = of_file(path, _published_form, read_json(path, _MOST_BYTES))
    return source if form is None else QuantisedSource(source, form, dequantise)


def _published_form(config: Config) -> Form | None:
    """The form that the `quantization_config` describes; `None` without one."""
    both = (entries_of(config), text_entries(config))
    entries = next((entries for entries in both if entries.get("quantization_config")), None)
    if entries is None:
        return None
    entries = entries.inner("quantization_config")
    method = entries.get("quant_method")
    if method not in _FORMS:
        remedy = "convert the weights to bfloat16, or quantise them in one of these forms"
        raise entries.wrong("quant_method", " or ".join(map(shown, _FORMS)), remedy)
    return _FORMS[method](entries)
