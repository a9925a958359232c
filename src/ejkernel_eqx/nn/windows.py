"""Sliding windows given as arrays, so that layers with different windows can be scanned over."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from .._shapes import AnyArray
from .._values import FAR, known
from ..attention import Mask


def read_window(sliding_window: Any, causal: bool) -> Array | None:
    """A window given as an array, as int32; `None` for a static one."""
    if not isinstance(sliding_window, Array | np.ndarray):
        return None
    if not causal:
        raise ValueError(
            "sliding_window: expected a pair (left, right) when causal=False, received an array; an array counts the keys up to and "
            "including the query's own, so it needs causal=True."
        )
    if sliding_window.ndim or not jnp.issubdtype(sliding_window.dtype, jnp.integer):
        raise ValueError(
            f"sliding_window: expected one integer, received {sliding_window.dtype} of shape {sliding_window.shape}; build "
            "stacked layers with equinox.filter_vmap, one window each."
        )
    value = known(sliding_window)
    if value is not None and value == 0:
        raise ValueError(
            "sliding_window: expected at least 1 key (the query's own), or a negative number for no window, received 0; pass 1 or -1."
        )
    return jnp.asarray(sliding_window, jnp.int32)


def with_window(window: Array | None, mask: AnyArray | Mask | None) -> AnyArray | Mask | None:
    """The mask of a call combined with the window; a negative window hides nothing."""
    if window is None:
        return mask
    return _both(Mask.sliding_window(jnp.where(window < 0, FAR, window - 1), 0), mask)


def with_chunks(size: int, mask: AnyArray | Mask | None) -> Mask:
    """The mask of a call combined with chunks."""
    return _both(Mask.chunked(size), mask)


def _both(of_layer: Mask, mask: AnyArray | Mask | None) -> Mask:
    if mask is None:
        return of_layer
    return of_layer & (mask if isinstance(mask, Mask) else Mask.from_dense(mask))


def check_scalar(window: Array | None) -> None:
    if window is not None and window.ndim:
        raise ValueError(
            f"sliding_window: expected one integer in a layer that is called, received shape {window.shape}; use jax.vmap or jax.lax.scan over "
            "stacked layers."
        )
