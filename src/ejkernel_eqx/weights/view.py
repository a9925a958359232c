"""A view of the published arrays under a prefix. It records which were read."""

import difflib
import fnmatch
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import CheckpointError
from ..core.arguments import accumulator
from .quantised.source import opened
from .source import Source, StateDict

_SHOWN = 6  # names in a message
_MOST_ZEROS = 2**22  # in the place of a missing array


class Ledger:
    """The state that the views of one source share."""

    def __init__(self, source: Source, prefix: str):
        self.source, self.prefix = source, prefix
        self.names = dict.fromkeys(source.names())  # in order
        self.used: set[str] = set()
        self.missing: list[str] = []
        self.recorded: dict[str, jax.ShapeDtypeStruct] = {}
        self.offset: set[str] = set()
        self.made: list[tuple[Any, str]] = []


class Weights:
    """Published arrays by name, as a layer reads them. Names are relative to `prefix`.

    If the published names of a module differ from those of its fields, the module has a method `_published(self, weights)`. It gets a `Weights`,
    takes arrays from it, and returns the filled module.

    - `prefix`: the beginning of all names, empty or with a dot at the end.
    - `unit_offset_norms`: whether RMS norms are published as `weight - 1` (Gemma, Qwen3-Next).
    """

    prefix: str
    unit_offset_norms: bool

    def __init__(self, ledger: Ledger, prefix: str, unit_offset_norms: bool):
        self._ledger, self.prefix, self.unit_offset_norms = ledger, prefix, unit_offset_norms

    @classmethod
    def open(
        cls,
        state_dict: StateDict,
        prefix: str = "",
        *,
        unit_offset_norms: bool = False,
        dequantise: bool | Sequence[str] = False,
    ) -> "Weights":
        """Opens published arrays. The arguments are those of [`ejkernel_eqx.load_published`][]."""
        prefix = f"{prefix.removesuffix('.')}." if prefix else ""
        return cls(Ledger(opened(state_dict, dequantise), prefix), prefix, unit_offset_norms)

    def at(self, name: str) -> "Weights":
        """A view of the arrays whose names begin with `name` and a dot."""
        return type(self)(self._ledger, f"{self.prefix}{name}.", self.unit_offset_norms)

    def beside(self, name: str) -> "Weights":
        """A view of the arrays of a module beside this one."""
        above = self.prefix.removesuffix(".").rpartition(".")[0]
        return type(self)(self._ledger, f"{above}.{name}." if above else f"{name}.", self.unit_offset_norms)

    def has(self, name: str) -> bool:
        return self.prefix + name in self._ledger.names

    def names(self) -> list[str]:
        """All names under the prefix, relative to it."""
        start = len(self.prefix)
        return [name[start:] for name in self._ledger.names if name.startswith(self.prefix)]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._ledger.source.shape(self.prefix + name)

    def take(self, name: str, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        """Takes a float array of exactly this shape, and casts it to `dtype`. If it is missing, the result is zeros, and `check` names it later.

        **Raises:** `CheckpointError` for an array of another shape, or one that does not hold floats.
        """
        full = self.prefix + name
        if full not in self._ledger.names:
            self._note_missing(full, math.prod(shape))
            return jnp.zeros(shape, dtype)
        self._check_shape(full, shape)
        value = self._ledger.source.read(full)
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise CheckpointError(
                f"{full!r}: expected floats, received {value.dtype}; quantised weights have to be converted to floats first. {self._read_from()}"
            )
        self._ledger.used.add(full)
        if isinstance(value, jax.Array):
            return value.astype(dtype)
        # The host casts, so that the device never holds the array twice. It also copies, since the caller may change its own array later.
        return jax.device_put(np.array(value, dtype))

    def take_matrix(self, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        """Takes one or several matrices, for a layer that computes with a `QuantizedWeight` as well. If the checkpoint is quantised, it returns
        one."""
        source, full = self._ledger.source, self.prefix + name
        if full not in source.kept:
            return self.take(name, shape, dtype)
        self._check_shape(full, shape)
        self._ledger.used.add(full)
        return jax.tree.map(jnp.asarray, source.read_kept(full, dtype))

    def _check_shape(self, full: str, shape: tuple[int, ...]) -> None:
        found = self._ledger.source.shape(full)
        if found != tuple(shape):
            raise CheckpointError(self._shape_differs(full, tuple(shape), found))

    def take_norm(self, name: str, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        """Takes the weight of an RMS norm. If norms are published as `weight - 1`, one is added, in float32 or wider."""
        if not self.unit_offset_norms:
            return self.take(name, shape, dtype)
        return (1 + self.take(name, shape, accumulator(dtype))).astype(dtype)

    def skip(self, *patterns: str) -> None:
        """Marks names under the prefix as not needed, such as buffers. Names are patterns of `fnmatch`."""
        for name in self.names():
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
                self._ledger.used.add(self.prefix + name)

    def check(self) -> None:
        """Raises `CheckpointError` if an array was missing or was not taken, in any view of the source."""
        prefix, used = self._ledger.prefix, self._ledger.used
        unused = [name for name in self._ledger.names if name.startswith(prefix) and name not in used]
        if self._ledger.missing or unused:
            raise CheckpointError(self._differs(self._ledger.missing, unused))

    def _note_missing(self, full: str, size: int) -> None:
        missing, prefix = self._ledger.missing, self._ledger.prefix
        missing.append(full)
        # With a wrong prefix everything is missing. Raising early avoids a model of zeros, or one large array.
        is_wrong_prefix = not any(name.startswith(prefix) for name in self._ledger.names)
        if len(missing) > _SHOWN or size > _MOST_ZEROS or is_wrong_prefix:
            raise CheckpointError(self._differs(missing, []))

    def _differs(self, missing: list[str], unused: list[str]) -> str:
        parts = []
        if missing:
            parts.append(f"it has no {_listed(missing, self._near)}")
        if unused:
            parts.append(f"nothing takes its {_listed(unused)}")
        return (
            f"The checkpoint ({self._ledger.source.label}) does not fit what is loaded under the prefix {self._ledger.prefix!r}: "
            f"{'; and '.join(parts)}. Build the layer with the options of the published one (from_config does), correct prefix=, or name what "
            "is not wanted in ignore=."
        )

    def _near(self, missing: str) -> str:
        """The most similar name among those that were not taken."""
        left = [name for name in self._ledger.names if name not in self._ledger.used]
        near = difflib.get_close_matches(missing, left, n=1, cutoff=0.7)
        return f" (similar: {near[0]!r})" if near else ""

    def _shape_differs(self, full: str, expected: tuple[int, ...], found: tuple[int, ...]) -> str:
        remedy = "Build the layer with the sizes of the published one (from_config does)."
        if len(found) == 2 and found[::-1] == expected:
            remedy = (
                "It is the transpose: this layer takes [out, in], as PyTorch's Linear; transpose it, array.T."
            )
        return f"{full!r}: expected shape {expected}, received {found}. {remedy} {self._read_from()}"

    def _read_from(self) -> str:
        return f"It was read from {self._ledger.source.label}."


def _listed(names: list[str], note: Any = lambda name: "") -> str:
    shown = [f"{name!r}{note(name)}" for name in names[:_SHOWN]]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
