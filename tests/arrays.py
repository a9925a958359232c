"""Arrays of random numbers, made without a program for each shape."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def array(x: Any, dtype: Any = None) -> jax.Array:
    """`jnp.asarray` of numbers on the host."""
    return jax.device_put(np.asarray(x, dtype))


def normal(seed: int, shape: Sequence[int], dtype: Any = jnp.float32) -> jax.Array:
    """Standard normal numbers."""
    return array(np.random.default_rng(seed).standard_normal(tuple(shape)), dtype)
