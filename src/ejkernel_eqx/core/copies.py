"""Copies of entries of an array, some of them more than once, whose gradients are summed in float32."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import Array

from .arguments import wide


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def copied(copy: Callable[..., Array], x: Array, *index: Array) -> Array:
    """`copy(x, *index)`, which is linear in `x` and has its dtype. JAX would sum the gradients of an entry's copies in that dtype: in 16 bits a sum
    of ones ends at 256."""
    return copy(x, *index)


@copied.defjvp
def _(copy: Callable[..., Array], primals: Any, tangents: Any) -> tuple[Array, Array]:
    x, *index = primals
    return copied(copy, x, *index), copy(wide(tangents[0]), *index).astype(x.dtype)
