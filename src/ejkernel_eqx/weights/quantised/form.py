"""What the readers of all quantised forms share."""

import abc
import fnmatch
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..._entries import Entries, shown
from ..._errors import CheckpointError
from ...quantised import QuantFormat, QuantizedWeight
from ..source import FileSource

SCALES = ("F32", "BF16", "F16")
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F8_E4M3": "float8_e4m3fn"}
DTYPES |= {"F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"}
"""Of floats, by their names in safetensors."""
_REMEDY = "Correct quantization_config in the config.json, or quantise the model again."
_MOST_REPEATS = 4
_OUT_OF_ORDER = "its inputs are in groups out of order (desc_act, actorder)"
_ZERO_POINTS = "it has zero points and 8 bits"
Block = tuple[int, int]
"""Rows and columns that share a scale; 0 says all."""


class Held:
    """The arrays of one quantised module, by the last parts of their names."""

    def __init__(self, source: FileSource, names: Mapping[str, Any], module: str):
        self.source, self.module, self._names = source, module, names

    def has(self, end: str) -> bool:
        return self.module + end in self._names

    def shape(self, end: str, kinds: tuple[str, ...], expected: Any = None) -> tuple[int, ...]:
        """The shape of an array, which must be there with one of these dtypes. It may lack axes of size 1 of the expected shape."""
        name = self.module + end
        if not self.has(end):
            raise CheckpointError(
                f"{name!r}: expected it beside the other arrays of {self.module!r}, received none. Download all files of the model."
            )
        kind, shape = self.source.kind(name), self.source.shape(name)
        if kind not in kinds:
            raise self.wrong(end, " or ".join(kinds), kind)
        sizes = lambda shape: [size for size in shape if size != 1]
        if 0 in shape or (expected is not None and sizes(shape) != sizes(expected)):
            raise self.wrong(end, f"shape {expected}" if expected else "no axis of 0", str(shape))
        return shape

    def matrix(self, end: str, *kinds: str) -> tuple[int, int]:
        shape = self.shape(end, kinds)
        if len(shape) != 2:
            raise self.wrong(end, "a matrix", f"shape {shape}")
        return shape[0], shape[1]

    def read(self, end: str) -> np.ndarray:
        """Integers unchanged, floats as unsigned integers with their bits."""
        return self.source.bits(self.module + end)

    def dtype(self, end: str) -> str:
        """The dtype of a float array."""
        return DTYPES[self.source.kind(self.module + end)]

    def group(self, end: str, columns: int, size: int) -> int:
        """The number of inputs that share a scale. In the configuration, -1 stands for all."""
        size = columns if size == -1 else size
        if columns % size:
            raise self.wrong(end, f"inputs in groups of {size} (group_size)", f"{columns} inputs")
        return size

    def groups(self, end: str, columns: int, size: int) -> np.ndarray | None:
        """The index of the group of each input; `None` if the groups are in order."""
        if not self.has(end):
            return None
        self.shape(end, ("I32", "I64"), (columns,))
        groups, in_order = self.read(end).reshape(-1), np.arange(columns) // (size or columns)
        if groups.min() < 0 or groups.max() > in_order[-1]:
            raise self.wrong(end, f"groups from 0 to {in_order[-1]}", f"{groups.min()} to {groups.max()}")
        return None if (groups == in_order).all() else groups

    def scales(
        self, end: str, kinds: tuple[str, ...], shape: tuple[int, int], block: Block
    ) -> tuple[int, int]:
        """The shape of the scales of a weight, after a check."""
        if block[0] == 1:
            self.group(end, shape[1], block[1] or -1)
        sizes = QuantFormat("int8", block).blocks(*shape)
        self.shape(end, kinds, sizes)
        return sizes

    def wrong(self, end: str, expected: str, received: Any, remedy: str = _REMEDY) -> CheckpointError:
        return CheckpointError(f"{self.module + end!r}: expected {expected}, received {received}. {remedy}")


class Layout(NamedTuple):
    """A weight whose arrays were checked to fit together.

    - `sizes`: the shape of its scales.
    - `groups`: the group of each input, if the groups are not in order.
    """

    shape: tuple[int, ...]
    format: QuantFormat
    sizes: tuple[int, ...]
    has_zeros: bool = False
    groups: np.ndarray | None = None

    @property
    def only_floats(self) -> str:
        """The reason why no `QuantizedWeight` can hold the weight, if there is one."""
        has_no_room = self.has_zeros and not self.format.zeros
        return _OUT_OF_ORDER if self.groups is not None else _ZERO_POINTS if has_no_room else ""


class Form(abc.ABC):
    """A published form of quantised weights. A module is quantised if one of its arrays has a name that ends with one of `marker`."""

    marker: tuple[str, ...]
    others: tuple[str, ...]
    """The ends of the names of the other arrays of a module."""
    known: str
    """The entries of a configuration that are read, or do not change the weights."""
    weight = ".weight"
    """The end of the name of the weight in floats."""

    def __init__(self, entries: Entries):
        check_known(entries, f"quant_method modules_to_not_convert {self.known}")
        self.not_converted = tuple(entries.get("modules_to_not_convert") or ())

    @abc.abstractmethod
    def layout(self, held: Held) -> Layout:
        """Checks that dtypes and shapes fit together, else raises `CheckpointError`. Weights are not read."""

    @abc.abstractmethod
    def arrays(self, held: Held, layout: Layout) -> tuple[Any, ...]:
        """The codes, scales, zero points and tensor scale of a `QuantizedWeight`. Codes of integers and zero points are uint8, from 0 on. The
        default zero point is the middle of their range."""

    def is_not_converted(self, module: str) -> bool:
        """Returns whether a module is excluded. Patterns match whole names, or a part of a name between dots. `*` matches anything."""
        return any(fnmatch.fnmatchcase(f".{module}.", f"*.{name}.*") for name in self.not_converted)

    def read(self, held: Held, dtype: Any) -> QuantizedWeight | np.ndarray:
        """The weight as a `QuantizedWeight` with NumPy arrays; as floats if no `QuantizedWeight` can hold it."""
        layout = self.layout(held)
        codes, scales, zeros, factor = self.arrays(held, layout)
        scales, form = scales.reshape(layout.sizes), layout.format
        if layout.only_floats:
            columns = layout.shape[1]
            in_order = np.arange(columns) // (form.block[1] or columns)
            groups = in_order if layout.groups is None else layout.groups
            zeros = np.full(layout.sizes, 2 ** (form.bits - 1)) if zeros is None else zeros
            numbers = numbers_of(codes, form.bits).astype(np.float32) - zeros.astype(np.float32)[:, groups]
            return numbers * scales.view(np.dtype(form.scale)).astype(np.float32)[:, groups]
        codes = codes ^ 128 if form.element == "int8" else codes  # less 128, as int8
        arrays = {"codes": codes, "scales": scales, "zeros": zeros, "tensor_scale": factor}
        return QuantizedWeight(**arrays, format=form, dtype=dtype, transposed=self.weight == "")


def integers(bits: int, block: Block, scale: str, has_zeros: bool) -> QuantFormat:
    """A format of integers, with zero points if there are such formats."""
    return QuantFormat("uint4" if bits == 4 else "int8", block, scale, has_zeros and bits == 4)


def check_known(entries: Entries, names: str) -> None:
    """Refuses entries of the configuration that may change the numbers and that no reader here knows."""
    unknown = sorted(set(entries.known()) - set(names.split()))
    if unknown:
        remedy = "remove it from the config.json if it does not change the weights"
        raise entries.wrong(unknown[0], "no entry of this name, as it is not known", remedy)


def check_entry(entries: Entries, name: str, *allowed: Any, default: Any = None) -> Any:
    value = entries.get(name)
    value = default if value is None else value
    if value not in allowed:
        remedy = "quantise the model in a form that is read here, or convert it to bfloat16"
        raise entries.wrong(name, " or ".join(map(shown, allowed)), remedy)
    return value


def pattern_of(text: str) -> re.Pattern[str]:
    """Compiles a regular expression from a file. One that could take long to match is refused."""
    try:
        if len(re.findall(r"[*+{]", text)) <= _MOST_REPEATS and not re.search(r"\)[*+?{]", text):
            return re.compile(text)
    except (re.error, RecursionError, OverflowError):
        pass
    raise CheckpointError(
        f"config: quantization_config: expected a regular expression of at most {_MOST_REPEATS} repetitions and none of a group, received "
        f"{shown(text)}; correct the config.json."
    )


def numbers_of(words: np.ndarray, bits: int) -> np.ndarray:
    """Unpacks numbers of 4 or 8 bits from integers, along the last axis, from the low bits on."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    pairs = np.stack([octets & 15, octets >> 4], axis=-1)
    return pairs.reshape(*octets.shape[:-1], -1) if bits == 4 else octets
