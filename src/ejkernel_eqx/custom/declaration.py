"""The array declarations of a user's kernel: the letters of their axes, which arrays are batched, and their dtypes."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from ..dispatch import Problem
from ..dispatch.problem import Flag

BATCH = "..."
Arrays = dict[str, Array]
Fields = tuple[tuple[str, Flag], ...]


@dataclasses.dataclass(frozen=True)
class Declared:
    """One array: the letters after its batch axes, whether it has batch axes, and its dtype or kind of dtype (`None`: unspecified)."""

    name: str
    letters: tuple[str, ...]
    batched: bool
    dtype: Any = None

    @property
    def text(self) -> str:
        return f"[{', '.join(((BATCH,) if self.batched else ()) + self.letters)}]"

    def shape(self, dims: Mapping[str, int], batch: tuple[int, ...]) -> tuple[int, ...]:
        return (batch if self.batched else ()) + tuple(dims[letter] for letter in self.letters)


@dataclasses.dataclass(frozen=True)
class Declaration:
    """The arrays of an operation, and the axes whose sizes are rounded in a problem's key."""

    operation: str
    inputs: tuple[Declared, ...]
    outputs: tuple[Declared, ...]
    lengths: frozenset[str]

    @functools.cached_property
    def by_name(self) -> dict[str, Declared]:
        return {declared.name: declared for declared in (*self.inputs, *self.outputs)}

    @property
    def shared(self) -> tuple[str, ...]:
        """The inputs without batch axes."""
        return tuple(declared.name for declared in self.inputs if not declared.batched)

    def batch_shape(self, arrays: Mapping[str, Any]) -> tuple[int, ...]:
        declared = next(declared for declared in self.inputs if declared.batched)
        shape = arrays[declared.name].shape
        return tuple(shape[: len(shape) - len(declared.letters)])

    def dims(self, arrays: Mapping[str, Any]) -> dict[str, int]:
        """The size of every letter, and the number of rows as `B`."""
        sizes = {"B": math.prod(self.batch_shape(arrays))}
        for declared in self.inputs:
            shape = arrays[declared.name].shape
            sizes |= zip(declared.letters, shape[len(shape) - len(declared.letters) :], strict=True)
        return sizes

    def problem(self, arrays: Mapping[str, Any], fields: Fields) -> Problem:
        """The host metadata of a call, from the shapes seen here: the local ones inside a partitioned body."""
        dtypes = {declared.name: arrays[declared.name].dtype for declared in self.inputs}
        lengths = {"B", *self.lengths}
        return Problem.make(
            self.operation, dims=self.dims(arrays), dtypes=dtypes, flags=dict(fields), lengths=lengths
        )

    def output_dtype(self, declared: Declared, dtypes: Mapping[str, Any]) -> Any:
        """The dtype of an output: the declared one, else that of the first float input."""
        if declared.dtype is not None:
            return jnp.dtype(declared.dtype)
        return next(jnp.dtype(dtypes[i.name]) for i in self.inputs if is_float(dtypes[i.name]))


def is_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def floats(arrays: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the arrays that have a gradient."""
    return tuple(name for name, x in arrays.items() if is_float(x.dtype))


def parse(group: str, axes: Mapping[str, Any]) -> tuple[Declared, ...]:
    """Parses `{"x": "... D", "labels": ("...", jnp.integer)}` into declarations; `ValueError` if invalid."""
    return tuple(_parse_one(f"{group}[{name!r}]", name, value) for name, value in axes.items())


def _parse_one(where: str, name: str, value: Any) -> Declared:
    text, dtype = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    if not isinstance(text, str) or not name.isidentifier():
        raise ValueError(
            f'{where}: expected a name and its axes, as "... T D" or ("... T D", jnp.float32), received {value!r}.'
        )
    tokens = text.split()
    batched = tokens[:1] == [BATCH]
    letters = tuple(tokens[1:] if batched else tokens)
    wrong = [letter for letter in letters if not letter.isidentifier() or letter == "B"]
    if wrong or len(set(letters)) < len(letters):
        raise ValueError(
            f'{where}: expected distinct letters after at most one leading "...", none of them B (the number of rows), '
            f"received {text!r}."
        )
    return Declared(name, letters, batched, dtype)


def check_arrays(declaration: Declaration, given: Mapping[str, Any]) -> Arrays:
    """The arrays of a call in the declared order; `ValueError` naming any argument that does not fit."""
    operation, names = declaration.operation, [declared.name for declared in declaration.inputs]
    if set(given) != set(names):
        raise ValueError(
            f"{operation}: expected the inputs {names}, received {sorted(given)}; pass each by name."
        )
    arrays = {name: _array(operation, name, given[name]) for name in names}
    dims: dict[str, tuple[str, int]] = {}
    batch: tuple[str, tuple[int, ...]] | None = None
    for declared in declaration.inputs:
        x = arrays[declared.name]
        _check_dtype(operation, declared, x)
        lead = x.ndim - len(declared.letters)
        if lead < 0 or (lead > 0 and not declared.batched):
            raise _misfit(declaration, declared, x)
        for letter, size in zip(declared.letters, x.shape[lead:], strict=True):
            owner, known = dims.setdefault(letter, (declared.name, size))
            if known != size:
                raise _misfit(declaration, declared, x, f" with {letter} = {known} as in {owner}")
        if declared.batched:
            batch = batch or (declared.name, x.shape[:lead])
            if x.shape[:lead] != batch[1]:
                raise _misfit(declaration, declared, x, f" with batch axes {batch[1]} as in {batch[0]}")
    return arrays


def _array(operation: str, name: str, value: Any) -> Array:
    if not isinstance(value, Array | np.ndarray):
        raise ValueError(
            f"{operation}: {name}: expected an array, received {type(value).__name__}; use jax.numpy.asarray."
        )
    return jnp.asarray(value)


def _check_dtype(operation: str, declared: Declared, x: Array) -> None:
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise ValueError(
            f"{operation}: {declared.name}: complex arrays are not supported, received {x.dtype}; pass real and imaginary parts."
        )
    if declared.dtype is not None and not jnp.issubdtype(x.dtype, declared.dtype):
        wanted = getattr(declared.dtype, "__name__", declared.dtype)
        raise ValueError(
            f"{operation}: {declared.name}: expected dtype {wanted}, received {x.dtype}; cast it with .astype."
        )


def _misfit(declaration: Declaration, declared: Declared, x: Array, wanted: str = "") -> ValueError:
    every = ", ".join(f"{other.name} {other.text}" for other in declaration.inputs)
    return ValueError(
        f"{declaration.operation}: {declared.name}: expected {declared.text}{wanted}, received shape {x.shape}. "
        f"The inputs are {every}."
    )


def named_outputs(declaration: Declaration, method: str, value: Any) -> dict[str, Any]:
    """The outputs returned by a method (a mapping, a tuple in order, or a single output), by name."""
    names = [declared.name for declared in declaration.outputs]
    if isinstance(value, Mapping):
        results = dict(value)
    else:
        values = value if isinstance(value, tuple | list) else (value,)
        results = dict(zip(names, values)) if len(values) == len(names) else {}
    if set(results) != set(names):
        received = sorted(results) if isinstance(value, Mapping) else f"a {type(value).__name__}"
        raise ValueError(
            f"{declaration.operation}: {method}: expected the outputs {names} as a mapping or a tuple in that order, received {received}."
        )
    return {name: results[name] for name in names}


def check_outputs(declaration: Declaration, method: str, value: Any, arrays: Arrays) -> Arrays:
    """The outputs of a platform by name, checked against their declared shapes and dtypes."""
    outputs = named_outputs(declaration, method, value)
    dims, batch = declaration.dims(arrays), declaration.batch_shape(arrays)
    dtypes = {name: x.dtype for name, x in arrays.items()}
    for declared in declaration.outputs:
        shape, dtype = declared.shape(dims, batch), declaration.output_dtype(declared, dtypes)
        _check_returned(declaration, method, declared.name, outputs[declared.name], [shape], dtype)
    return outputs


def check_gradients(declaration: Declaration, method: str, value: Any, arrays: Arrays) -> Arrays:
    """The gradients of all float inputs by name, in the inputs' dtypes. Those of shared inputs are complete, or one per batch row."""
    names = floats(arrays)
    if not isinstance(value, Mapping) or set(value) != set(names):
        received = sorted(value) if isinstance(value, Mapping) else f"a {type(value).__name__}"
        raise ValueError(
            f"{declaration.operation}: {method}: expected a mapping with the gradients of {list(names)}, received {received}."
        )
    rows = declaration.batch_shape(arrays)
    for name in names:
        shapes = [arrays[name].shape]
        if name in declaration.shared:
            shapes.append((*rows, *arrays[name].shape))
        _check_returned(declaration, method, name, value[name], shapes, None)
    return {name: value[name] for name in names}


def _check_returned(
    declaration: Declaration, method: str, name: str, x: Any, shapes: list[tuple[int, ...]], dtype: Any
) -> None:
    if getattr(x, "shape", None) in shapes and (dtype is None or x.dtype == dtype):
        return
    expected = " or ".join(map(str, shapes)) + (f" and dtype {dtype}" if dtype is not None else "")
    received = f"{x.shape} and {x.dtype}" if hasattr(x, "shape") else repr(x)
    raise ValueError(
        f"{declaration.operation}: {method} returned {name!r}: expected shape {expected}, received {received}."
    )
