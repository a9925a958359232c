"""The arrays of a kind of call, declared by the letters of their axes, and the sizes and shapes that follow."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

Sizes = Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Letters:
    """Maps arrays and results to the letters of their axes after the leading ones, such as `"T Hq D"`.

    `N+1` is an axis one longer than `N`. The axes `heads` are independent, so a mesh may split them.
    """

    axes: tuple[tuple[str, str], ...]
    heads: frozenset[str] = frozenset()

    @classmethod
    def of(cls, axes: Mapping[str, str], heads: str = "") -> "Letters":
        return cls(tuple(axes.items()), frozenset(heads.split()))

    @functools.cached_property
    def by_name(self) -> dict[str, tuple[str, ...]]:
        return {name: tuple(letters.split()) for name, letters in self.axes}

    def sizes(self, arrays: Any) -> dict[str, int]:
        """The size of every letter in a NamedTuple of arrays, from the first array that has it; `B` is the product of the first array's
        leading axes."""
        first, *_ = arrays._fields
        shape = getattr(arrays, first).shape
        found = {"B": math.prod(shape[: len(shape) - len(self.by_name[first])])}
        for name, letters in self.by_name.items():
            x = getattr(arrays, name, None)
            if x is None:
                continue
            for letter, size in zip(letters, x.shape[x.ndim - len(letters) :], strict=True):
                base, _, more = letter.partition("+")
                found.setdefault(base, size - int(more or 0))
        return found

    def named(self, sizes: Sizes) -> dict[str, tuple[str, ...]]:
        """The axes in the format of `parallel.opaque`, where `H<n>` are n heads."""
        name = lambda letter: f"H{sizes[letter]}" if letter in self.heads else letter.replace("+", "")
        return {
            array: tuple(map(name, letters))
            for array, letters in self.by_name.items()
            if not self.heads.intersection(letters) - sizes.keys()
        }

    def axes_of(self, arrays: Any, spec: Any = None) -> dict[str, tuple[str, ...]]:
        """The axes of a call with these arrays."""
        return self.named(self.sizes(arrays))

    def shapes(
        self, sizes: Sizes, dtypes: Mapping[str, Any], shared: frozenset[str] = frozenset(), lead: str = "B"
    ) -> dict[str, Any]:
        """The shapes of the arrays in `dtypes`, with the leading axes `lead` except for the `shared` ones."""

        def size(letter: str) -> int:
            base, _, more = letter.partition("+")
            return sizes[base] + int(more or 0)

        return {
            name: jax.ShapeDtypeStruct(
                tuple(map(size, (*(() if name in shared else lead.split()), *self.by_name[name]))),
                jnp.dtype(dtype),
            )
            for name, dtype in dtypes.items()
        }


def wide_dtype(dtype: str) -> str:
    """The dtype of parameters and states for operands of a dtype."""
    return "float64" if dtype == "float64" else "float32"
