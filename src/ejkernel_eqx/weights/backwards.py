"""Makes published arrays from a module, by running the code that reads them backwards.

Reading only moves numbers: it splits, joins, transposes and reorders arrays. So it is a linear function, and its transpose is its inverse. JAX
computes the transpose. So only the readers know names and forms. If a form has several variants, some names in it identify the variant.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..quantised.dequantise import is_quantised
from .fill import is_parameter
from .source import Source
from .view import Ledger, Weights

Read = Callable[..., Any]
"""From a module and views of published arrays to the module filled."""


class Recorder(Weights):
    """A view that records which arrays a reader asks for. They need not be there."""

    @classmethod
    def over(cls, source: Source) -> "Recorder":
        return cls(Ledger(source, ""), "", False)

    @property
    def recorded(self) -> dict[str, jax.ShapeDtypeStruct]:
        return self._ledger.recorded

    @property
    def made(self) -> list[tuple[jax.Array, str]]:
        """The arrays that were made for names, since the record was cleared."""
        return self._ledger.made

    @property
    def offset(self) -> set[str]:
        """The names of the norms that are published as `weight - 1`."""
        return self._ledger.offset

    def take(self, name: str, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        self.recorded[self.prefix + name] = jax.ShapeDtypeStruct(shape, dtype)
        made = jnp.zeros(shape, dtype)
        self.made.append((made, self.prefix + name))
        return made

    def take_matrix(self, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        return self.take(name, shape, dtype)

    def take_norm(self, name: str, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        if self.unit_offset_norms:
            self.offset.add(self.prefix + name)
        return self.take(name, shape, dtype)


def shapes_of(module: Any) -> Any:
    """The module with shapes instead of float arrays and quantised weights."""
    one = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if is_parameter(x) or is_quantised(x) else x
    return jax.tree.map(one, module, is_leaf=is_quantised)


def names_of(module: Any, read: Read, views: tuple[Recorder, ...]) -> dict[str, str]:
    """The published names of the arrays that `read` takes unchanged, by their paths in the module."""
    names: dict[str, str] = {}

    def trace() -> None:
        made = views[0].made
        made.clear()
        for path, leaf in jax.tree_util.tree_leaves_with_path(read(shapes_of(module), *views)):
            name = next((name for array, name in made if array is leaf), None)
            if name is not None:
                names[jax.tree_util.keystr(path)] = name

    jax.eval_shape(trace)
    return names


def arrays_of(module: Any, read: Read, views: tuple[Recorder, ...]) -> dict[str, np.ndarray]:
    """Returns the published arrays by name, on the host: those from which `read` would fill the module.

    **Raises:** `ValueError` if `read` would not give back the same module.
    """
    like = shapes_of(module)
    values = [np.asarray(leaf) for leaf in jax.tree.leaves(module) if is_parameter(leaf)]
    view = views[0]
    filled = lambda views: [x for x in jax.tree.leaves(read(like, *views)) if is_parameter(x)]
    before = set(view.recorded)
    jax.eval_shape(lambda: filled(views))
    view.made.clear()
    shapes = {name: shape for name, shape in view.recorded.items() if name not in before}

    def again(arrays: Any) -> list[Any]:
        root = Weights.open(arrays)
        return filled([root.at(one.prefix.removesuffix(".")) if one.prefix else root for one in views])

    arrays = jax.linear_transpose(again, shapes)(values)[0]
    same = lambda x, y: np.array_equal(np.asarray(x), y, equal_nan=True)
    if not all(map(same, again(arrays), values)):
        raise ValueError(
            f"model: expected arrays that are read back as they were, received others under {view.prefix!r}: this form can only be read. Save the "
            "model with ejx.save."
        )
    return {name: np.asarray(x - 1 if name in view.offset else x) for name, x in arrays.items()}
