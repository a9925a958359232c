"""Windows that are values: one layer of a scan may see everything and the next one only what is near."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from .._values import FAR, known
from ..attention import Mask


def read_window(sliding_window: Any, causal: bool) -> Array | None:
    """A window given as an array, int32; `None` for what is static."""
    if not isinstance(sliding_window, Array | np.ndarray):
        return None
    if not causal:
        raise ValueError(
            "sliding_window: expected a pair (left, right) when causal=False, received an array; an array counts the keys up to the query's "
            "own and needs causal=True."
        )
    if sliding_window.ndim or not jnp.issubdtype(sliding_window.dtype, jnp.integer):
        raise ValueError(
            f"sliding_window: expected one integer, received {sliding_window.dtype} of shape {sliding_window.shape}; for stacked layers build "
            "them under equinox.filter_vmap, which gives each its own."
        )
    value = known(sliding_window)
    if value is not None and value == 0:
        raise ValueError(
            "sliding_window: expected at least 1 key (the query's own), or a negative number for none, received 0."
        )
    return jnp.asarray(sliding_window, jnp.int32)


def with_window(window: Array | None, mask: Array | Mask | None) -> Array | Mask | None:
    """What a call masks besides, with the window; a negative one hides nothing."""
    if window is None:
        return mask
    near = Mask.sliding_window(jnp.where(window < 0, FAR, window - 1), 0)
    if mask is None:
        return near
    return near & (mask if isinstance(mask, Mask) else Mask.from_dense(mask))


def check_scalar(window: Array | None) -> None:
    if window is not None and window.ndim:
        raise ValueError(
            f"sliding_window: expected one integer in a layer that is called, received shape {window.shape}; jax.vmap or jax.lax.scan over "
            "stacked layers."
        )
