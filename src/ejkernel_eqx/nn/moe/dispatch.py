"""Tokens to their experts and back: rows in the order of the experts, and the weighted sum of what the experts return.

Both directions move every row once, by a permutation, so that their gradients add nothing up in an order that varies.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from ...core.copies import copied
from ...parallel import match_varying
from .statistics import counts_of


class Order(NamedTuple):
    """Entries in the order of their experts: those of one expert in the order they came, those of no expert last."""

    order: Array
    """int32 `[M]`, the entry at each row."""
    places: Array
    """int32 `[M]`, the row of each entry."""
    sizes: Array
    """int32 `[experts]`, the rows of each expert."""


def order_of(experts: Array, count: int) -> Order:
    """The order of entries by `experts [M]`, from 0 to `count - 1`, or `count` for none."""
    # As `jnp.argsort`, whose result is not typed as different on each device inside `shard_map` where its argument is.
    rows = match_varying(jnp.arange(experts.shape[0], dtype=jnp.int32), experts)
    _, order = lax.sort((experts, rows), num_keys=1, is_stable=True)
    places = match_varying(jnp.zeros_like(order), order).at[order].set(rows, unique_indices=True)
    return Order(order, places, counts_of(experts, count))


def permuted(x: Array, places: Array) -> Array:
    """The rows of `x [M, E]` at `places [M]`, all of them different."""
    return x.at[places].get(unique_indices=True, mode="promise_in_bounds")


def dispatched(x: Array, top_k: int, order: Order) -> Array:
    """Of the tokens `x [T, E]` one row for each of their `top_k` experts, `[T * top_k, E]`, in the order of the experts."""
    shape = (x.shape[0], top_k, x.shape[1])
    each = copied(lambda x: jnp.broadcast_to(x[:, None], shape), x)
    return permuted(each.reshape(-1, x.shape[1]), order.order)


def combined(rows: Array, weights: Array, order: Order) -> Array:
    """The rows of each token `[T * k, E]` times its `weights [T, k]` and added up, the best expert's first: `[T, E]` in the dtype of the weights.
    The rows of no expert are 0."""
    tokens, top_k = weights.shape
    mine = permuted(rows, order.places).reshape(tokens, top_k, rows.shape[1])
    total = mine[:, 0].astype(weights.dtype) * weights[:, :1]
    for k in range(1, top_k):
        total = total + mine[:, k].astype(weights.dtype) * weights[:, k, None]
    return total
