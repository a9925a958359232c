"""Shared by recurrences that are written token by token."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

_BLOCK = 64


def scan_tokens(token: Callable[..., Any], state: Array, xs: Any, length: int) -> tuple[Array, Array]:
    """`lax.scan` over a tree of arrays, whose gradient keeps one state per block of tokens."""
    blocks = length // _BLOCK
    head = jax.tree.map(lambda x: x[: blocks * _BLOCK].reshape((blocks, _BLOCK, *x.shape[1:])), xs)
    tail = jax.tree.map(lambda x: x[blocks * _BLOCK :], xs)
    state, out = lax.scan(jax.checkpoint(lambda state, block: lax.scan(token, state, block)), state, head)
    # The tail is shorter than a block, so keeping all of its states costs little.
    state, rest = lax.scan(token, state, tail)
    return state, jnp.concatenate([out.reshape((blocks * _BLOCK, *out.shape[2:])), rest])


def begins(starts: Array | None, length: int) -> Array:
    """Returns whether a segment starts at each token of a row; `starts` as in `recurrence.spec.RecurrenceArrays`."""
    if starts is None:
        return jnp.zeros(length, bool)
    return starts == jnp.arange(length, dtype=jnp.int32)


def masked(x: Array, real: Array) -> Array:
    """Zero where a token is not `real`."""
    return jnp.where(real.reshape(real.shape + (1,) * (x.ndim - real.ndim)), x, jnp.zeros((), x.dtype))


def over(lead: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` mapped over `lead` leading axes."""
    for _ in range(lead):
        function = jax.vmap(function)
    return function


@jax.jit
def scattered(index: Array, values: Array) -> Array:
    """`values` moved to `index`, a permutation of each row. Compiled, as JAX does not run a row of an explicit mesh outside of `jit` otherwise."""
    row = lambda index, values: jnp.zeros_like(values).at[index].set(values, unique_indices=True)
    return over(index.ndim - 1, row)(index, values)


def put(pool: Array, rows: Array, where: Array) -> Array:
    """The pool of states with `rows` written to these slots; slots past the end are dropped."""
    return pool.at[where].set(rows, mode="drop")


def from_slots(pool: Array, slots: Array | None, lead: int) -> Array:
    """The states of the rows of a step after `lead` leading axes, from their slots of a pool; zeros for rows without one (-1)."""
    if slots is None:
        return pool
    take = lambda pool, at: pool.at[at].get(mode="fill", fill_value=0)
    # A negative index would count from the end; one past the end reads zeros.
    return over(lead, take)(pool, jnp.where(slots < 0, pool.shape[lead], slots))


def to_slots(out: Array, states: Array, pool: Array, slots: Array | None, lead: int) -> tuple[Array, Array]:
    """The outputs of the rows of a step and the pool with their new states; rows without a slot have an output of zero."""
    if slots is None:
        return out, states
    used = (slots >= 0) & (slots < pool.shape[lead])
    return masked(out, used), over(lead, put)(pool, states, jnp.where(used, slots, pool.shape[lead]))
