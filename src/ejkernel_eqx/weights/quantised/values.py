"""Functions for arrays and quantised weights alike: rows, stacks, placement."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ..._errors import CheckpointError
from ...quantised.dequantise import is_quantised

DEQUANTISE = "Pass dequantise=True, or the names of these weights as patterns, to have floats."


def rows_of(x: Any, rows: slice) -> Any:
    """Rows of one or several matrices `[..., out, in]`, or entries of a vector `[out]`."""
    if not is_quantised(x):
        return x[(..., rows, slice(None))] if x.ndim > 1 else x[rows]
    block, start, count = x.format.block[0], rows.start or 0, x.shape[-2]
    stop = count if rows.stop is None else rows.stop
    if block > 1 and (rows.step or start % block or (stop % block and stop != count)):
        raise CheckpointError(
            f"A quantised weight of shape {x.shape} holds several projections in one: expected each to have whole blocks of {block} rows, received "
            f"rows {start} to {stop} as one of them. {DEQUANTISE}"
        )
    scales = rows if block < 2 else slice(start // block, -(-stop // block))
    of_scales = lambda a: a if a is None or block == 0 else a[..., scales, :]
    parts = {"codes": x.codes[..., rows, :], "scales": of_scales(x.scales), "zeros": of_scales(x.zeros)}
    return dataclasses.replace(x, **parts)


def rows_together(parts: Sequence[Any], groups: int, name: str) -> Any:
    """Joins matrices `[rows, in]`. The rows of each form `groups` groups. For each group, the result has the rows of all matrices, one after the
    other."""
    first = parts[0]
    if not any(map(is_quantised, parts)):
        rows = [part.reshape(groups, -1, part.shape[-1]) for part in parts]
        return jnp.concatenate(rows, axis=1).reshape(-1, first.shape[-1])
    for part in parts:
        check_alike(first, part, name)
        block, each = part.format.block[0], part.shape[0] // groups
        if not block or each % block or part.tensor_scale is not None:
            raise CheckpointError(
                f"{name!r} and others are one projection here, in the order of its heads: expected the {each} rows of a head to have scales of "
                f"their own, received {part.format}. {DEQUANTISE}"
            )
    size = [part.shape[0] // groups for part in parts]
    pieces = [
        rows_of(part, slice(group * n, (group + 1) * n))
        for group in range(groups)
        for part, n in zip(parts, size)
    ]
    return jax.tree.map(lambda *each: jnp.concatenate(each, axis=-2), *pieces)


def turned(x: Any) -> Any:
    """Transposes `[..., in, out]` to `[..., out, in]`. The codes of quantised matrices already have this order."""
    return x.T if is_quantised(x) else x.swapaxes(-1, -2)


def stacked_weights(name: str, each: Sequence[Any]) -> Any:
    """Stacks arrays or quantised weights along a new first axis."""
    for one in each[1:]:
        check_alike(each[0], one, name)
    return jax.tree.map(lambda *parts: jnp.stack(parts), *each)


def check_alike(first: Any, other: Any, name: str) -> None:
    """Raises `CheckpointError` unless the trees have quantised weights of the same formats in the same places."""
    format_of = lambda x: str(x.format) if is_quantised(x) else "floats"
    leaves = [jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_quantised) for tree in (first, other)]
    for (path, one), (_, two) in zip(*leaves):
        if format_of(one) != format_of(two):
            raise CheckpointError(
                f"{name + jax.tree_util.keystr(path)!r}: expected weights of one format in all that are stacked, received {format_of(one)} and "
                f"{format_of(two)}. {DEQUANTISE}"
            )


def empty_stack(count: int, x: Any, sharding: Any) -> Any:
    """A stack of zeros for `count` arrays or quantised weights like `x`."""
    where = lambda shape: _of_part(sharding, shape) if is_quantised(x) else sharding
    empty = lambda shape, dtype: jnp.zeros(shape, dtype, device=where(shape))
    return jax.tree.map(lambda part: empty((count, *part.shape), part.dtype), x)


def placed(x: Any, sharding: Any) -> Any:
    """Places a quantised weight with the sharding of an array of its shape."""
    return jax.tree.map(lambda part: jax.device_put(part, _of_part(sharding, part.shape)), x)


def _of_part(sharding: Any, shape: tuple[int, ...]) -> Any:
    """The sharding of codes or scales. If the devices do not divide an axis of the scales, it is not split."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    axes = lambda axis: axis if isinstance(axis, tuple) else () if axis is None else (axis,)
    parts = lambda axis: math.prod(sharding.mesh.shape[name] for name in axes(axis))
    spec = [None if size % parts(axis) else axis for axis, size in zip(sharding.spec, shape)]
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))
