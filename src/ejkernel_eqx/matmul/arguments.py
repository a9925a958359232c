"""Checks what a user passes to a grouped matmul and resolves it to `GroupedArrays` and `GroupedSpec`."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._errors import UnsupportedError
from .._shapes import is_symbolic
from .._values import check_between, checked, known
from ..core.arguments import array, check_flags, fitting, is_finite
from ..quantised.dequantise import is_quantised
from .spec import (
    ACTIVATIONS,
    columns,
    GATED,
    GroupedArrays,
    GroupedSpec,
    HALVES,
    INTERLEAVED,
    MATRICES,
    PAIR,
    QUANTISED,
    STORED_DTYPES,
)

MANY_ROWS = 64
"""Rows of a group, on average, from which on quantised right sides become floats before the product."""


def check_options(
    activation: Any, gate_up: Any, alpha: Any, limit: Any, up_shift: Any, transpose_rhs: Any
) -> None:
    if gate_up not in (None, HALVES, INTERLEAVED):
        raise ValueError(
            f"gate_up: expected None, {HALVES!r} or {INTERLEAVED!r}, received {gate_up!r}; a second right side is the argument up of the call."
        )
    check_epilogue(activation, alpha, limit, up_shift)
    check_flags(transpose_rhs=transpose_rhs)


def check_epilogue(activation: Any, alpha: Any, limit: Any, up_shift: Any) -> None:
    """The options of an activation and of what it multiplies."""
    if activation not in ACTIVATIONS:
        names = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(f"activation: expected one of {names}, received {activation!r}.")
    if not is_finite(alpha):
        raise ValueError(f"alpha: expected a finite number, received {alpha!r}.")
    if alpha != 1.0 and activation != "silu":
        raise ValueError(
            f"alpha: expected 1 unless activation is 'silu', received {alpha!r}; it scales the argument of its sigmoid."
        )
    if limit is not None and not (is_finite(limit) and limit > 0):
        raise ValueError(f"limit: expected a positive number or None, received {limit!r}.")
    if not is_finite(up_shift):
        raise ValueError(f"up_shift: expected a finite number, received {up_shift!r}.")


class RightSide(NamedTuple):
    """A right side as the user gives it."""

    weight: Any
    bias: Any
    scale: Any


def resolve(
    lhs: Any,
    rhs: RightSide,
    up: RightSide,
    group_sizes: Any,
    row_indices: Any,
    spec: GroupedSpec,
    out_dtype: str | None,
) -> tuple[GroupedArrays, GroupedSpec]:
    """`spec` has the options of the module; those of the result are completed by what this call has."""
    lhs = array("lhs", lhs, "M K" if row_indices is None else "L K")
    lead, inner = lhs.shape[:-2], lhs.shape[-1]
    spec = _completed(spec, up, out_dtype or lhs.dtype.name)
    weight = _weight("rhs", rhs, lhs, spec)
    count, width = weight.shape[0], weight.shape[1 if spec.transpose_rhs else 2]
    if spec.gated in (HALVES, INTERLEAVED) and width % 2:
        raise ValueError(
            f"rhs: expected an even number of columns with gate_up={spec.gated!r}, received shape {weight.shape}; they are those of gate and up."
        )
    rows = None if row_indices is None else _rows(row_indices, lead)
    sizes = sizes_of_groups(group_sizes, (*lead, count), lhs.shape[-2] if rows is None else rows.shape[-1])
    num_rows = math.prod(lead) * (lhs.shape[-2] if rows is None else rows.shape[-1])
    # With many rows the time is that of products, which whole matrices of floats have the fastest kernels for.
    whole = inner == 0 or not (is_symbolic(num_rows) or num_rows < MANY_ROWS * count)
    numbers = lambda weight: weight.astype(lhs.dtype) if whole and is_quantised(weight) else weight
    found = _side("rhs", numbers(weight), rhs, (count, width))
    if spec.gated == PAIR:
        other = _weight("up", up, lhs, spec)
        if other.shape != weight.shape:
            raise ValueError(f"up: expected the shape of rhs, {weight.shape}, received {other.shape}.")
        if _stored_as(other) != _stored_as(weight):
            raise ValueError(
                f"up: expected a right side stored as rhs, {_stored_as(weight)}, received {_stored_as(other)}."
            )
        found |= _side("up", numbers(other), up, (count, width))
    if is_quantised(weight) and not whole:
        spec = dataclasses.replace(spec, form=weight.format, transpose_rhs=True)
    if rows is not None:
        found["rows"] = _checked_rows(rows, row_indices, lhs.shape[-2], sizes, group_sizes)
    arrays = GroupedArrays(lhs, sizes, **found)
    return (_with_a_zero(arrays, spec) if inner == 0 else arrays), spec


def _with_a_zero(arrays: GroupedArrays, spec: GroupedSpec) -> GroupedArrays:
    """Sums of one product, which is 0, instead of none: no kernel needs to know of those."""
    axes = {"lhs": -1} | dict.fromkeys(MATRICES, -1 if spec.transpose_rhs else -2)
    one = lambda x, axis: jnp.zeros((*x.shape[:axis], 1, *x.shape[axis:][1:]), x.dtype)
    given = {name: x for name in axes if (x := getattr(arrays, name)) is not None}
    return arrays._replace(**{name: one(x, axes[name]) for name, x in given.items()})


def _completed(spec: GroupedSpec, up: RightSide, out_dtype: str) -> GroupedSpec:
    gated = spec.gated
    if up.weight is not None:
        if gated is not None:
            raise ValueError(
                f"up: expected None, as rhs has the columns of gate and up (gate_up={gated!r}), received an array."
            )
        gated = PAIR
    elif up.bias is not None or up.scale is not None:
        name = "up_bias" if up.bias is not None else "up_scale"
        raise ValueError(
            f"{name}: expected None without a second right side, received an array; pass the right side as up."
        )
    if gated is None and (spec.limit is not None or spec.up_shift):
        name, value = ("limit", spec.limit) if spec.limit is not None else ("up_shift", spec.up_shift)
        raise ValueError(
            f"{name}: expected no value for a product without gate, received {value!r}; pass up, or gate_up if rhs has the columns of both."
        )
    assert gated in GATED
    return dataclasses.replace(spec, out_dtype=out_dtype, gated=gated)


def _stored_as(weight: Any) -> str:
    """How a right side is stored, in words."""
    if not is_quantised(weight):
        return "an array"
    return f"{weight.format}{' and a factor' * (weight.tensor_scale is not None)}"


def _weight(name: str, given: RightSide, lhs: Array, spec: GroupedSpec) -> Any:
    """A right side of three axes, in the dtype of the left side, stored in 8 bits or quantised."""
    weight, inner = given.weight, lhs.shape[-1]
    letters = "E N K" if spec.transpose_rhs else "E K N"
    dtype = str(getattr(weight, "dtype", ""))
    if is_quantised(weight):
        if given.scale is not None:
            raise ValueError(f"{name}_scale: expected None, as {weight!r} has scales, received an array.")
        if weight.transposed == spec.transpose_rhs:
            raise ValueError(
                f"{name}: expected a weight [out, in] of which `in` is K, received {weight!r}, with K as its `out`; quantise the transposed weight."
            )
    elif dtype not in STORED_DTYPES:
        weight = array(name, weight, letters)
        if weight.dtype != lhs.dtype:
            raise ValueError(
                f"{name}: expected the dtype of lhs, {lhs.dtype}, or {', '.join(STORED_DTYPES)} with scales, received {weight.dtype}; "
                "cast them to the same dtype."
            )
        if given.scale is not None:
            raise ValueError(
                f"{name}_scale: expected None for a right side in {weight.dtype}, received an array; scales belong to {', '.join(STORED_DTYPES)}."
            )
    elif given.scale is None:
        raise ValueError(f"{name}_scale: expected scales [E, N] for a right side in {dtype}, received None.")
    weight = jax.tree.map(jnp.asarray, weight)
    axis = 2 if spec.transpose_rhs else 1
    if weight.ndim != 3 or weight.shape[axis] != inner:
        raise ValueError(
            f"{name}: expected [{', '.join(letters.split())}] with K = {inner}, the last axis of lhs, received shape {weight.shape}; "
            f"with transpose_rhs={not spec.transpose_rhs} it is [{', '.join('EKN' if spec.transpose_rhs else 'ENK')}]."
        )
    return weight


def _side(name: str, weight: Any, given: RightSide, shape: tuple[int, int]) -> dict[str, Array]:
    """The arrays of a right side by the names of `GroupedArrays`."""
    prefix = "" if name == "rhs" else f"{name}_"
    side = {name: weight}
    if is_quantised(weight):
        factor = weight.tensor_scale
        factor = None if factor is None else jax.lax.bitcast_convert_type(factor, jnp.float32)
        parts = zip(QUANTISED, (weight.codes, weight.scales, weight.zeros, factor))
        side = {f"{prefix}{part}": x for part, x in parts if x is not None}
    elif weight.dtype.name in STORED_DTYPES:
        scale = fitting(f"{name}_scale", given.scale, shape, "E N").astype(jnp.float32)
        side = {
            f"{prefix}stored": _constant(name, weight),
            f"{prefix}scale": _constant(f"{name}_scale", scale),
        }
    if given.bias is not None:
        side[f"{prefix}bias"] = fitting(f"{prefix}bias", given.bias, shape, "E N")
    return side


def sizes_of_groups(given: Any, shape: tuple[int, ...], rows: Any) -> Array:
    sizes = jnp.asarray(given)
    if sizes.shape != shape or not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise ValueError(
            f"group_sizes: expected integers of shape {shape}, the leading axes of lhs and one size for each group of rhs, received "
            f"{sizes.dtype} of shape {sizes.shape}."
        )
    sizes = sizes.astype(jnp.int32)

    def say(found: str) -> str:
        return f"group_sizes: expected sizes from 0 on whose sum is at most {rows}, the number of rows, received {found}."

    return checked(sizes, given, lambda x: (x < 0).any(-1) | (x.sum(-1) > rows), say)


def _rows(given: Any, lead: tuple[int, ...]) -> Array:
    rows = jnp.asarray(given)
    if rows.ndim != len(lead) + 1 or rows.shape[:-1] != lead or not jnp.issubdtype(rows.dtype, jnp.integer):
        raise ValueError(
            f"row_indices: expected integers [{', '.join([*map(str, lead), 'M'])}], a row of lhs for each row of the result, received "
            f"{rows.dtype} of shape {rows.shape}."
        )
    return rows


def _checked_rows(rows: Array, given: Any, length: Any, sizes: Array, given_sizes: Any) -> Array:
    """Indices are checked and arbitrary ones past the last group replaced."""
    place = jnp.arange(rows.shape[-1], dtype=jnp.int32)
    real = jax.lax.expand_dims(place, range(rows.ndim - 1)) < sizes.sum(-1, keepdims=True, dtype=jnp.int32)
    # Indices past the last group may be anything, so they become row 0.
    rows = jnp.where(real, rows, 0)
    # Where some values are traced it is unknown which indices count.
    values, total = known(given), known(given_sizes)
    seen: Any = rows
    if values is not None and total is not None:
        seen = np.where(np.arange(values.shape[-1]) < total.sum(-1, keepdims=True), values, 0)
    rows = check_between("row_indices", rows, seen, 0, max(length - 1, 0), "they are rows of lhs")
    return rows.astype(jnp.int32)


def _constant(name: str, x: Array) -> Array:
    """`x`, which raises an error if it is differentiated."""
    return _refusing(name)(x) if jnp.issubdtype(x.dtype, jnp.floating) else x


@functools.cache
def _refusing(name: str) -> Callable[[Array], Array]:
    call = jax.custom_jvp(lambda x: x)

    @call.defjvp
    def refuse(primals: Any, tangents: Any) -> Any:
        raise UnsupportedError(
            "grouped_matmul",
            {name: "a right side in 8 bits and its scales are constants, without a derivative"},
            "Wrap it in jax.lax.stop_gradient, or differentiate with respect to other arguments.",
        )

    return call


def result_shape(arrays: GroupedArrays, spec: GroupedSpec) -> tuple[int, ...]:
    width = arrays.right.shape[1 if spec.transpose_rhs else 2]
    return (*arrays.lhs.shape[:-2], arrays.num_rows, columns(width, spec))
