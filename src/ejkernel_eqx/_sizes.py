"""Sizes that may be symbols, known only when a function that `jax.export` has made for any size is called."""

from typing import Any

import jax.numpy as jnp
from jax import export


def is_symbolic(size: Any) -> bool:
    """Whether a size is a symbol."""
    return export.is_symbolic_dim(size)


def least(count: Any, length: Any) -> Any:
    """The smaller of two sizes; where one is a symbol `count`, which is then not less."""
    return count if is_symbolic(count) or is_symbolic(length) else min(count, length)


def as_value(size: Any) -> Any:
    """A number that may be a symbol, for arithmetic with int32."""
    return jnp.asarray(size, jnp.int32) if is_symbolic(size) else size
