"""Checks what a user passes to a norm and resolves it to `NormArrays`."""

import math
from typing import Any

import jax.numpy as jnp

from ..core.arguments import array, fitting
from .spec import ACTIVATIONS, NormArrays


def check_options(activation: str, group_size: int | None, eps: float) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: expected 'silu' or 'sigmoid', received {activation!r}.")
    if group_size is not None and (isinstance(group_size, bool) or group_size < 1):
        raise ValueError(
            f"group_size: expected a positive number of features or None, received {group_size!r}."
        )
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"eps: expected a finite number >= 0, received {eps!r}.")


def resolve(x: Any, z: Any, weight: Any, group_size: int | None) -> NormArrays:
    x = array("x", x, "features")
    features = x.shape[-1]
    size = features if group_size is None else group_size
    if features == 0 or features % size:
        raise ValueError(
            f"x: expected [..., features] with features divisible by group_size={group_size}, received shape {x.shape}."
        )
    groups = features // size
    if z is not None:
        z = fitting("z", z, x.shape, "features")
    if weight is not None:
        weight = array("weight", weight, "features")
        if weight.shape not in ((features,), (size,)):
            raise ValueError(
                f"weight: expected shape ({features},){f' or ({size},)' if groups > 1 else ''}, received {weight.shape}."
            )
        # Kernels read a weight for every feature, also where groups share them.
        weight = jnp.broadcast_to(weight.reshape(-1, size), (groups, size))
    # [*, C] to [*, G, size]; a single vector gets a leading axis for the kernels.
    rows = (*x.shape[:-1], groups, size) if x.ndim > 1 else (1, groups, size)
    split: Any = lambda x: None if x is None else x.reshape(rows)
    return NormArrays(split(x), split(z), weight)


def resolve_sum(x: Any, branch: Any, weight: Any) -> NormArrays:
    x = array("x", x, "features")
    if x.shape[-1] == 0:
        raise ValueError(f"x: expected at least one feature, received shape {x.shape}.")
    if branch is not None:
        branch = fitting("branch", branch, x.shape, "features")
        if branch.dtype != x.dtype:
            raise ValueError(f"branch: expected {x.dtype}, as x, received {branch.dtype}; cast it first.")
    if weight is not None:
        weight = fitting("weight", weight, x.shape[-1:], "features")
    rows: Any = lambda a: a if a is None or a.ndim > 1 else a.reshape(1, -1)
    return NormArrays(rows(x), None, weight, rows(branch))
