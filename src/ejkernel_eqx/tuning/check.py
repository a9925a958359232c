"""Checks on the device whether the results of a candidate are correct and repeatable."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .._tolerances import errors, Tolerance


@functools.partial(jax.jit, static_argnames="dtype")
def _leaf_errors(actual: Array, reference: Array, dtype: Any) -> tuple[Array, Array]:
    """Computes `_tolerances.errors` on the device: in float64 if either side is, else in float32."""
    actual, reference = actual.astype(dtype), reference.astype(dtype)
    infinite = jnp.isinf(reference)
    odd = jnp.any(jnp.isnan(actual) | jnp.isnan(reference))
    odd |= jnp.any(infinite != jnp.isinf(actual)) | jnp.any(infinite & (actual != reference))
    error = jnp.where(infinite, 0, jnp.abs(actual - reference))
    size = jnp.where(infinite, 0, jnp.abs(reference))
    # Divided before squaring, so that the squares stay within the range of the dtype.
    peak = jnp.max(size)
    most = jnp.max(error)
    exact = most == 0
    unit = jnp.where(peak > 0, peak, 1)
    share = jnp.where(exact, 1, most)
    ratio = jnp.sqrt(jnp.sum((error / share) ** 2)) / jnp.sqrt(jnp.sum((size / unit) ** 2))
    largest = most / unit
    # If the reference is zero everywhere, the result must be too.
    wrong = odd | ((peak == 0) & ~exact)

    def final(value: Array) -> Array:
        return jnp.where(wrong, jnp.inf, jnp.where(exact, 0, value))

    return final(ratio * (share / unit)), final(largest)


def result_errors(actual: Any, reference: Any) -> Tolerance:
    """The two errors of one result, an array or a pytree of arrays, whose worst leaf counts. NaN means infinite errors.

    `ValueError` if the results have different structures or shapes.
    """
    leaves, structure = jax.tree.flatten(actual)
    expected, expected_structure = jax.tree.flatten(reference)
    if structure != expected_structure:
        raise ValueError(f"has the structure {structure}, but the reference has {expected_structure}")
    worst = Tolerance(0.0, 0.0)
    for leaf, wanted in zip(leaves, expected, strict=True):
        if np.shape(leaf) != np.shape(wanted):
            raise ValueError(f"has shape {np.shape(leaf)}, but the reference has {np.shape(wanted)}")
        if np.size(leaf):
            for pair in _real_pairs(jnp.asarray(leaf), jnp.asarray(wanted)):
                rms, peak = _array_errors(*pair)
                worst = Tolerance(max(worst.rms, float(rms)), max(worst.peak, float(peak)))
    return worst


def _real_pairs(*both: Array) -> list[tuple[Array, Array]]:
    """Complex arrays as their real and imaginary parts; others unchanged."""
    if any(jnp.issubdtype(x.dtype, jnp.complexfloating) for x in both):
        (a, b), (c, d) = ((x.real, x.imag) for x in both)
        return [(a, c), (b, d)]
    return [(both[0], both[1])]


def _array_errors(actual: Array, reference: Array) -> tuple[Any, Any]:
    dtypes = (actual.dtype, reference.dtype)
    if all(jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize > 2 for dtype in dtypes):
        return errors(actual, reference)  # neighbouring integers beyond 2^24 are equal in float32
    dtype = np.float64 if np.float64 in dtypes else np.float32
    return _leaf_errors(actual, reference, np.dtype(dtype))


def all_errors(
    results: Mapping[str, Any], reference: Mapping[str, Any], tolerances: Mapping[str, Tolerance]
) -> tuple[dict[str, float], str | None]:
    """The relative RMS error of each result, and why the results must not be used (`None` if they may)."""
    entries: dict[str, float] = {}
    reasons: list[str] = []
    for name, result in results.items():
        try:
            measured, allowed = result_errors(result, reference[name]), tolerances[name]
        except ValueError as error:
            reasons.append(f"{name} {error}")
            continue
        entries[name] = measured.rms
        # Written so that NaN fails.
        if not (measured.rms <= allowed.rms and measured.peak <= allowed.peak):
            reasons.append(
                f"{name} is wrong: relative RMS error {measured.rms:.2g} (allowed {allowed.rms:.2g}), "
                f"largest error {measured.peak:.2g} (allowed {allowed.peak:.2g})"
            )
    return entries, "; ".join(reasons) or None


def has_nan(result: Any) -> bool:
    """Tells whether there is a NaN anywhere in a pytree of arrays."""
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(result)]
    inexact = (leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact))
    return any(bool(jnp.any(jnp.isnan(leaf))) for leaf in inexact)


def same_bits(first: Any, second: Any) -> bool:
    """Tells whether two pytrees are bitwise equal: zeros of different sign differ, identical NaNs do not."""
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(bool(_equal_bits(jnp.asarray(one), jnp.asarray(other))) for one, other in pairs)


@jax.jit
def _equal_bits(first: Array, second: Array) -> Array:
    return jnp.all(_bits(first) == _bits(second))


def _bits(x: Array) -> Array:
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.stack([_bits(x.real), _bits(x.imag)])
    if jnp.issubdtype(x.dtype, jnp.floating):
        return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    return x
