"""Sizes that may be symbolic, known only when a function exported by `jax.export` for any size is called."""

from typing import Any

import jax.numpy as jnp
from jax import export


def is_symbolic(size: Any) -> bool:
    """Whether a size is symbolic."""
    return export.is_symbolic_dim(size)


def least(count: Any, length: Any) -> Any:
    """The smaller of two sizes; if either is symbolic, `count`, which may then be the larger one."""
    return count if is_symbolic(count) or is_symbolic(length) else min(count, length)


def as_value(size: Any) -> Any:
    """A size that may be symbolic, for arithmetic with int32."""
    return jnp.asarray(size, jnp.int32) if is_symbolic(size) else size
