"""Arrays of random numbers, made without a program for each shape."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def normal(seed: int, shape: Sequence[int], dtype: Any = jnp.float32) -> jax.Array:
    """Standard normal numbers."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(tuple(shape)), dtype)
