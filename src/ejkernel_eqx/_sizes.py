"""Sizes that may be symbolic, known only when a function exported by `jax.export` for any size is called."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, export
from jax.core import Tracer


def is_symbolic(size: Any) -> bool:
    """Whether a size is symbolic."""
    return export.is_symbolic_dim(size)


def remedy_of_size(value: Any, least: int) -> str:
    """What to pass in place of a value that is no integer of at least `least`, at the end of a message."""
    if isinstance(value, Tracer):
        return "shapes depend on it, so pass it as a static argument of jit"
    is_number = isinstance(value, int | float | np.integer | np.floating | Array) and not isinstance(
        value, bool
    )
    if not is_number or np.ndim(value) or not float(value).is_integer():
        return "pass an integer of Python"
    return f"pass {least} or more" if value < least else f"pass the integer {int(value)}"


def least(count: Any, length: Any) -> Any:
    """The smaller of two sizes; if either is symbolic, `count`, which may then be the larger one."""
    return count if is_symbolic(count) or is_symbolic(length) else min(count, length)


def as_value(size: Any) -> Any:
    """A size that may be symbolic, for arithmetic with int32."""
    return jnp.asarray(size, jnp.int32) if is_symbolic(size) else size
