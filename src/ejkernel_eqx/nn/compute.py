"""The dtype that a layer computes in."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .arguments import read_dtype


def read_compute_dtype(dtype: Any) -> str | None:
    found = read_dtype("compute_dtype", dtype)
    return None if found is None else found.name


def compute_dtype_of(chosen: str | None, projections: Any, *inputs: Any) -> Any:
    """The chosen dtype; without one, what the inputs and the weights of the `equinox.nn.Linear`s in `projections` promote to."""
    if chosen is not None:
        return jnp.dtype(chosen)
    is_linear = lambda node: isinstance(node, eqx.nn.Linear)
    found = jax.tree.leaves(projections, is_leaf=is_linear)
    weights = [w for node in found if is_linear(node) if _is_wide(w := node.weight)]
    return _promoted(weights, inputs)


def stored_dtype_of(chosen: str | None, projections: Any) -> Any:
    """What a layer keeps between calls: the chosen dtype; without one, what its projections' weights promote to."""
    if chosen is not None:
        return jnp.dtype(chosen)
    return _promoted([leaf for leaf in jax.tree.leaves(projections) if _is_wide(leaf)], ())


def _is_wide(leaf: Any) -> bool:
    """Whether an array is one of numbers to compute with, neither quantised nor a key."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize > 1


def _promoted(weights: Any, inputs: Any) -> Any:
    dtypes = [x.dtype for x in (*weights, *inputs)] or [jnp.float32]
    # The rule holds whatever JAX is told to do with operands of two dtypes.
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*dtypes)
