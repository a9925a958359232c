"""Fills a module with published arrays, by the names of its fields or by its own method `_published`."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._errors import CheckpointError
from ..quantised.dequantise import is_quantised
from .quantised.values import placed
from .view import Weights


def fill(module: Any, weights: Weights) -> Any:
    """Returns `module` with every float array taken from `weights`. Each keeps the dtype and the sharding of the array that it replaces.

    A module with a method `_published(self, weights)` fills itself by it. Otherwise fields are taken by name, and items of tuples, lists and
    dictionaries by index or key. Static fields, integers and functions stay.
    """
    # Arrays are placed last, so that a method `_published` need not handle shardings.
    return _placed(_filled(module, weights), module)


def _filled(module: Any, weights: Weights) -> Any:
    if hasattr(module, "_published"):
        return module._published(weights)
    if isinstance(module, eqx.Module):
        return fill_fields(module, weights)
    if isinstance(module, dict):
        return {key: _entry(value, str(key), weights) for key, value in module.items()}
    if isinstance(module, tuple | list):
        items = [_entry(value, str(i), weights) for i, value in enumerate(module)]
        # Named tuples take their items one by one, other sequences as one argument.
        return type(module)(*items) if hasattr(module, "_fields") else type(module)(items)
    return module


def fill_fields(
    module: Any, weights: Weights, renamed: dict[str, str] | None = None, skip: tuple[str, ...] = ()
) -> Any:
    """Fills every field by its name, or by that in `renamed`. Those in `skip` stay."""
    renamed = renamed or {}
    new: dict[str, Any] = {}
    for field in dataclasses.fields(module):
        if field.metadata.get("static", False) or field.name in skip:
            continue
        name, value = renamed.get(field.name, field.name), getattr(module, field.name)
        # Only this norm may be published as weight - 1; gated norms never are.
        if isinstance(module, eqx.nn.RMSNorm) and field.name == "weight" and value is not None:
            new[field.name] = weights.take_norm(name, value.shape, value.dtype)
        elif type(module) is eqx.nn.Linear and field.name == "weight" and value is not None:
            new[field.name] = weights.take_matrix(name, value.shape, value.dtype)
        else:
            new[field.name] = _entry(value, name, weights)
    return replaced(module, new)


def _entry(value: Any, name: str, weights: Weights) -> Any:
    if is_parameter(value):
        return weights.take(name, value.shape, value.dtype)
    return fill(value, weights.at(name))


def is_parameter(leaf: Any) -> bool:
    """Returns whether this is a float array, or the shape of one."""
    return isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct) and jnp.issubdtype(
        leaf.dtype, jnp.inexact
    )


def replaced(module: Any, new: dict[str, Any]) -> Any:
    """The module with other values of these fields, replaced in one step."""
    names = [name for name, value in new.items() if value is not getattr(module, name)]
    if not names:
        return module
    where = lambda m: [getattr(m, name) for name in names]
    # None counts as a leaf, so that an empty field can be replaced too.
    return eqx.tree_at(where, module, [new[name] for name in names], is_leaf=lambda leaf: leaf is None)


def _placed(filled: Any, module: Any) -> Any:
    """Places each array as the one that it replaces, if that was placed explicitly."""

    if jax.tree.structure(filled, is_leaf=is_quantised) != jax.tree.structure(module):
        raise CheckpointError(
            f"_published of {type(module).__name__}: expected the module with other arrays, received one that differs in its fields or static "
            "values; equinox.tree_at replaces arrays alone."
        )
    return jax.tree.map(placed_as, filled, module, is_leaf=is_quantised)


def sharding_of(like: Any) -> Any:
    """The sharding of an array that was placed explicitly, or of a shape that names one; otherwise `None`."""
    is_shape = isinstance(like, jax.ShapeDtypeStruct)
    return getattr(like, "sharding", None) if is_shape or getattr(like, "committed", False) else None


def placed_as(new: Any, like: Any) -> Any:
    """The array `new`, placed as `like` if that was placed explicitly."""
    sharding = sharding_of(like)
    if sharding is not None and is_quantised(new):
        return placed(new, sharding)
    return new if sharding is None or not isinstance(new, jax.Array) else jax.device_put(new, sharding)
