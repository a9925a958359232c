"""One token per row: a few numbers per channel, which XLA fuses into one pass."""

import jax.numpy as jnp
from jax import Array

from ..core.arguments import accumulator
from .spec import ConvSpec
from .xla import valid


def advance(
    x: Array, weight: Array, bias: Array | None, state: Array, indices: Array | None, spec: ConvSpec
) -> tuple[Array, Array]:
    """`out [..., C]` and the new states, from the rows' own `state [..., K, C]` or from a pool of them."""
    wide = accumulator(x.dtype)
    # Rows without a slot (-1) read slot 0; their results are dropped below.
    rows = state if indices is None else state[jnp.maximum(indices, 0)]
    window = jnp.concatenate([rows.astype(x.dtype), x[..., None, :]], -2)
    out = valid(window, weight.astype(wide), None if bias is None else bias.astype(wide), spec)
    # The new state is the window without its oldest input.
    out, new = out[..., 0, :].astype(x.dtype), window[..., 1:, :].astype(state.dtype)
    if indices is None:
        return out, new
    used = indices >= 0
    where = jnp.where(used, indices, state.shape[0])  # past the end: dropped
    return jnp.where(used[:, None], out, jnp.zeros((), out.dtype)), state.at[where].set(new, mode="drop")
