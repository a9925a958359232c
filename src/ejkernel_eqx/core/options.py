"""Checks of a layer's sizes and numbers, and of the kind of its arrays.

Values are checked when they are known: outside `jit` and other transformations.
"""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from .._shapes import remedy_of_size

_KINDS = {"floats": jnp.floating, "integers": jnp.integer, "booleans": jnp.bool_}


def check_sizes(**sizes: Any) -> None:
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1:
            raise ValueError(
                f"{name}: expected a positive integer, received {size!r}; {remedy_of_size(size, 1)}."
            )


def read_sizes(**sizes: Any) -> tuple[int, ...]:
    """The sizes, checked, as integers of Python: static fields hold no numbers of NumPy."""
    check_sizes(**sizes)
    return tuple(map(int, sizes.values()))


def check_numbers(**numbers: Any) -> None:
    """Finite numbers, or `None` for a default."""
    for name, number in numbers.items():
        is_number = isinstance(number, int | float | np.number | Array) and not isinstance(number, bool)
        if number is not None and not (is_number and np.ndim(number) == 0 and math.isfinite(number)):
            raise ValueError(f"{name}: expected a finite number, received {number!r}; it is static.")


def read_array(name: str, value: Any, kind: str, form: str) -> Array:
    """An array of `kind`: `"floats"`, `"integers"` or `"booleans"`; `form` is the shape as in the docstring."""
    if not isinstance(value, Array | np.ndarray):
        raise ValueError(
            f"{name}: expected an array of {kind} {form}, received {type(value).__name__}; convert it with jnp.asarray."
        )
    if not jnp.issubdtype(value.dtype, _KINDS[kind]):
        remedy = "compare it, as in mask != 0" if kind == "booleans" else "cast it"
        raise ValueError(
            f"{name}: expected {kind} {form}, received {value.dtype} of shape {value.shape}; {remedy}."
        )
    return jnp.asarray(value)


def broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    return len(shape) <= len(to) and all(n in (1, m) for n, m in zip(shape[::-1], to[::-1]))
