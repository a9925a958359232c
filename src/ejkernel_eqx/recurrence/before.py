"""Outputs that read the state before their token, by kernels whose outputs read the state after it.

What token `t` reads of the state before it is what token `t - 1` reads after its own with the queries of `t`. The first token of a sequence reads the
state that enters.
"""

import jax.numpy as jnp
from jax import Array

from .heads import repeat_heads
from .spec import heads_of, RecurrenceArrays, RecurrenceSpec


def moved(arrays: RecurrenceArrays) -> RecurrenceArrays:
    """The call with every token's queries at the token before; nothing is read across sequences."""
    q = jnp.where(_begins(arrays)[..., None, None], 0, arrays.q)
    return arrays._replace(q=jnp.pad(q[:, 1:], ((0, 0), (0, 1), (0, 0), (0, 0))), skip=None)


def moved_back(arrays: RecurrenceArrays, spec: RecurrenceSpec, out: Array) -> Array:
    """The outputs of the call, from those of `moved`."""
    out = jnp.pad(out[:, :-1], ((0, 0), (1, 0), (0, 0), (0, 0)))
    out = jnp.where(_begins(arrays)[..., None, None], 0, out)
    state, offsets = arrays.initial_state, arrays.offsets
    if state is None:
        return out
    heads = heads_of(arrays, spec).out

    def read(q: Array, state: Array) -> Array:
        wide = jnp.promote_types(q.dtype, state.dtype)
        q, state = repeat_heads(q.astype(wide), -2, heads), repeat_heads(state.astype(wide), -3, heads)
        return (spec.scale * jnp.einsum("bnrd,bnrdv->bnrv", q, state, precision="highest")).astype(out.dtype)

    if offsets is None:
        return jnp.concatenate([read(arrays.q[:, :1], state[:, None]), out[:, 1:]], 1)
    # Of empty sequences, no token is the first.
    row, places = jnp.arange(out.shape[0])[:, None], offsets[:, :-1]
    places = jnp.where(jnp.diff(offsets) > 0, places, out.shape[1])
    q = arrays.q.at[row, places].get(mode="fill", fill_value=0)  # [B, N, Hq, D]
    return out.at[row, places].set(read(q, state), mode="drop")


def _begins(arrays: RecurrenceArrays) -> Array:
    """`[B, T]`: whether a sequence or segment begins at a token, or the last one has ended there."""
    batch, length = arrays.q.shape[:2]
    tokens = jnp.arange(length, dtype=jnp.int32)[None]
    if arrays.offsets is not None:
        row = jnp.arange(batch)[:, None]
        return jnp.zeros((batch, length), bool).at[row, arrays.offsets].set(True, mode="drop")
    begins = jnp.broadcast_to(tokens == 0, (batch, length))
    return begins if arrays.starts is None else begins | (arrays.starts == tokens)
