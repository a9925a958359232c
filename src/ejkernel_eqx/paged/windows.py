"""Sliding windows that are known only at run time."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from .._kernel import Plan
from .._values import known
from .core import finish, is_empty
from .spec import PagedArrays, PagedSpec
from .tokens import alone


def finish_within(plan: Plan, arrays: PagedArrays, spec: PagedSpec, window: Any) -> Any:
    """The results of the resolved call with a window of so many keys, including the query's own; all keys for `None` or a negative number.

    Kernels take the first key of each sequence, which suffices with one query per sequence. Otherwise every query becomes a sequence of
    its own, unless no sequence is longer than the window.
    """
    if window is None:
        return finish(plan, arrays, spec)
    window = _read(window, arrays, spec)
    value = known(window)
    # A window whose value is known is an ordinary static one.
    if value is not None:
        left = None if value < 0 else min(int(value), 2**30) - 1
        return finish(plan, arrays, dataclasses.replace(spec, left=left))
    if is_empty(arrays):
        return finish(plan, arrays, spec)
    # With one query per sequence, the first key of its window is that of the sequence.
    if spec.max_query_len == 1:
        return finish(plan, _from(arrays, window), spec)
    each, one = _from(alone(arrays), window), dataclasses.replace(spec, max_query_len=1)
    # A window that hides no key of any sequence leaves the call as it is.
    whole = (window < 0) | (window >= arrays.kv_len.max())
    return lax.cond(whole, lambda: finish(plan, arrays, spec), lambda: finish(plan, each, one))


def _read(window: Any, arrays: PagedArrays, spec: PagedSpec) -> Array:
    given = jnp.asarray(window)
    if given.ndim or not jnp.issubdtype(given.dtype, jnp.integer):
        raise ValueError(
            f"window: expected one integer, received {given.dtype} of shape {given.shape}; use jax.vmap for several."
        )
    if spec.left is not None:
        raise ValueError(
            "window: expected None for an operation that was built with sliding_window, received a value; build it without sliding_window."
        )
    if arrays.q.ndim != 3 or arrays.qq_bias is not None:
        what = "leading axes" if arrays.q.ndim != 3 else "qq_bias"
        raise ValueError(
            f"window: expected None in a call with {what}, received an integer; build the operation with sliding_window instead."
        )
    if known(given) == 0:
        raise ValueError(
            "window: expected at least 1 key (the query's own), or a negative number, received 0."
        )
    return given.astype(jnp.int32)


def _from(arrays: PagedArrays, window: Array) -> PagedArrays:
    """The call with one query per sequence, each sequence starting at the first key of its window."""
    first = jnp.where(window < 0, 0, arrays.kv_len - jnp.maximum(window, 1))
    return arrays._replace(kv_start=jnp.maximum(first, 0))
