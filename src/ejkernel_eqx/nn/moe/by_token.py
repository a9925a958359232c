"""Tokens to the devices that have their experts, and one weighted sum back from each.

Of `D` devices each has `T` tokens, and a token has `top_k` experts. It travels once to each device that has any of them, with their numbers and
weights. The device adds up what its experts make of the token, and sends that sum back. At home the sums of all devices are added.

- If most tokens go to most devices, all tokens go to all (`all_gather`).
- Otherwise every pair of devices has room for some more tokens than an even choice of experts sends. Tokens beyond it go in further rounds, which are
    skipped if no device needs them.

Each move is the transpose of the other, so that both are gathers in both directions of a gradient: nothing is added by scatters.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array, lax

from ..._take import take_along
from ...core.arguments import accumulator
from ...core.plans import again_for_gradients
from ...parallel import match_varying
from ...sequences.cumsum import running_count
from .dispatch import order_of

_SPARE = 1.25
"""Times what an even choice of experts takes: the room for tokens of a pair of devices, and for rows of a device's experts."""
_MOST = 0.75
"""Above this part of the tokens all of them go to every device."""

Names = tuple[str, ...]


class Route(NamedTuple):
    """The tokens that one device sends to the others in one round."""

    source: Array
    """int32 `[D, room]`: the token at each place; `T` for none."""
    places: Array
    """int32 `[T, top_k]`: for the first of a token's experts on each device the place of the token there, `D * room` for the others."""


def room_of(tokens: int, top_k: int, devices: int) -> int:
    """The tokens that a device sends to each other in a round: `tokens` if all go everywhere."""
    part = _SPARE * (1 - (1 - 1 / devices) ** top_k)
    return tokens if part >= _MOST else max(1, math.ceil(part * tokens))


def most_rows(tokens: int, top_k: int) -> int:
    """The rows that go through a device's experts at once."""
    return math.ceil(_SPARE * tokens * top_k)


def routes_of(targets: Array, devices: int, room: int) -> tuple[Callable[[Any], Route], Array]:
    """The `Route` of a round by its number, and the most tokens that go to one device; of the device of each expert, `targets [T, top_k]`, `devices`
    for none."""
    tokens, top_k = targets.shape
    every = jnp.arange(devices, dtype=jnp.int32)
    goes = jnp.any(targets[:, :, None] == every[None, None], axis=1)
    place = running_count(goes, 0) - 1  # [T, D], of the tokens that go to a device
    same = targets[:, :, None] == targets[:, None, :]
    earlier = jnp.tril(jnp.ones((top_k, top_k), bool), -1)
    is_first = ~jnp.any(same & earlier[None], axis=2) & (targets < devices)
    mine = take_along(place, jnp.minimum(targets, devices - 1), axis=1)
    token = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32)[:, None], place.shape)
    at = jnp.where(goes, place, tokens + token)  # beyond the end for none
    by_place = match_varying(jnp.full((devices, tokens), tokens, jnp.int32), at)
    by_place = by_place.at[every[None], at].set(token, mode="drop", unique_indices=True)
    rounds = -(-tokens // room)
    by_place = jnp.pad(by_place, ((0, 0), (0, rounds * room - tokens)), constant_values=tokens)

    def route(number: Any) -> Route:
        source = lax.dynamic_slice_in_dim(by_place, number * room, room, axis=1)
        local = mine - number * room
        is_here = is_first & (local >= 0) & (local < room)
        return Route(source, jnp.where(is_here, targets * room + local, devices * room))

    return route, jnp.max(jnp.sum(goes, axis=0, dtype=jnp.int32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def spread(axes: Names, x: Array, route: Route | None) -> Array:
    """Returns what this device gets of everyone's `x [T, ...]`: `[D, room, ...]`, 0 where it gets nothing; all tokens without a route."""
    if route is None:
        return lax.all_gather(x, axes)
    return _moved(x.at[route.source].get(mode="fill", fill_value=0), axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def collected(axes: Names, x: Array, route: Route | None) -> Array:
    """Returns the sums `[T, ...]` of what became of this device's tokens on all devices, given what became of those that it got, `x [D, room, ...]`;
    in float32 for 16 bits."""
    back = _moved(x, axes)
    if route is None:
        return jnp.sum(back, axis=0, dtype=accumulator(x.dtype))
    return _sums_at(back.reshape(-1, *x.shape[2:]), route.places)


def _moved(x: Array, axes: Names) -> Array:
    return lax.all_to_all(x, axes, 0, 0, tiled=True)


def _sums_at(x: Array, places: Array, weights: Array | None = None) -> Array:
    """For each row of `places [T, top_k]` the sum of the rows of `x` there, 0 beyond the end, times its `weights`, one after the other: in the dtype
    of the weights, without them in float32 for 16 bits."""
    dtype = accumulator(x.dtype) if weights is None else weights.dtype
    total: Any = 0
    for k in range(places.shape[1]):
        row = x.at[places[:, k]].get(mode="fill", fill_value=0).astype(dtype)
        total = total + (row if weights is None else row * weights[:, k, None])
    return total


def _spread_backward(axes: Names, saved: Any, cotangent: Array) -> Any:
    total: Any = collected(axes, cotangent, saved)
    return total.astype(cotangent.dtype), None


def _collected_backward(axes: Names, saved: Any, cotangent: Array) -> Any:
    route, like = saved
    return spread(axes, cotangent.astype(like.dtype), route), None


spread.defvjp(lambda axes, x, route: (spread(axes, x, route), route), _spread_backward)
collected.defvjp(
    lambda axes, x, route: (collected(axes, x, route), (route, jnp.empty(0, x.dtype))), _collected_backward
)


class Chunk(NamedTuple):
    """Some of the rows of a device's experts, one for each expert of each token that it has, in the order of the experts."""

    entries: Array
    """int32 `[rows]`: the token of each row times `top_k`, plus which of its experts it is."""
    places: Array
    """int32 `[tokens, top_k]`: the row of each; `rows` for none in this chunk."""
    sizes: Array
    """int32 `[experts]`."""


@jax.custom_vjp
def rows_of(x: Array, chunk: Chunk) -> Array:
    """Of tokens `[R, E]` one row for each expert of each, `[rows, E]`."""
    return x.at[chunk.entries // chunk.places.shape[1]].get(mode="fill", fill_value=0)


def _rows_of_backward(saved: Any, cotangent: Array) -> Any:
    return _sums_at(cotangent, saved.places).astype(cotangent.dtype), None


rows_of.defvjp(lambda x, chunk: (rows_of(x, chunk), chunk), _rows_of_backward)


@jax.custom_vjp
def weighted_sums(rows: Array, weights: Array, chunk: Chunk) -> Array:
    """The rows of each token times its `weights [R, top_k]` and added up, the best expert's first: `[R, E]` in the dtype of the weights."""
    return _sums_at(rows, chunk.places, weights)


def _weighted_sums_backward(saved: Any, cotangent: Array) -> Any:
    rows, weights, chunk = saved
    row_weights = weights.reshape(-1).at[chunk.entries].get(mode="fill", fill_value=0)
    given = rows_of(cotangent, chunk)
    of_rows = (given * row_weights[:, None]).astype(rows.dtype)
    products = jnp.sum(given * rows.astype(given.dtype), axis=1)
    of_weights = products.at[chunk.places].get(mode="fill", fill_value=0)
    return of_rows, of_weights.astype(weights.dtype), None


weighted_sums.defvjp(
    lambda rows, weights, chunk: (weighted_sums(rows, weights, chunk), (rows, weights, chunk)),
    _weighted_sums_backward,
)


def through_experts(
    experts: Any, x: Array, numbers: Array, weights: Array, rows: int, largest: Callable[[Array], Array]
) -> Array:
    """The weighted sums `[R, E]` of what the experts of this device make of tokens `x [R, E]`, whose experts have these `numbers [R, top_k]` (as many
    as there are for none). `rows` of theirs go through the experts at once; what is beyond follows, if any device has it: `largest` is the largest
    of a number on all devices."""
    count, (tokens, top_k) = experts.up_proj.shape[0], numbers.shape
    order = order_of(numbers.reshape(-1), count)
    ends = jnp.cumsum(order.sizes)
    places = jnp.where(numbers < count, order.places.reshape(numbers.shape), tokens * top_k)
    rows = min(rows, tokens * top_k)
    chunks = -(-tokens * top_k // rows)
    entries = jnp.pad(order.order, (0, chunks * rows - tokens * top_k), constant_values=tokens * top_k)

    def chunk_of(number: Any) -> Chunk:
        first = number * rows
        local = places - first
        local = jnp.where((local >= 0) & (local < rows), local, rows)
        until = jnp.clip(ends - first, 0, rows)
        sizes = jnp.diff(until, prepend=0)
        taken = lax.dynamic_slice_in_dim(entries, first, rows)
        # Rows of no expert are those of no token.
        taken = jnp.where(jnp.arange(rows, dtype=jnp.int32) < until[-1], taken, tokens * top_k)
        return Chunk(taken, local, sizes)

    def once(number: Any, experts: Any, x: Array, weights: Array) -> Array:
        chunk = chunk_of(number)
        out = experts(rows_of(x, chunk), chunk.sizes)
        return weighted_sums(out, match_varying(weights, out), chunk)

    total = once(0, experts, x, weights)
    if chunks == 1:
        return total
    most = largest(ends[-1])
    is_needed = lambda number: most > number * rows
    return further_rounds(total, chunks, is_needed, once, experts, x, weights)


def further_rounds(
    total: Array,
    rounds: int,
    is_needed: Callable[[Any], Array],
    once: Callable[..., Array],
    experts: Any,
    *given: Array,
) -> Array:
    """`total` and what `once(number, experts, *given)` returns for the numbers from 1 on that are needed, the same ones on all devices. Nothing
    of these rounds is kept for the gradient: hardly ever is one of them needed."""
    if rounds == 1:
        return total
    arrays, static = eqx.partition(experts, eqx.is_array)

    def further(total: Array, number: Array) -> tuple[Array, None]:
        more = lambda total: total + once(number, eqx.combine(arrays, static), *given)
        return lax.cond(is_needed(number), more, lambda total: total, total), None

    body = again_for_gradients(further, experts)
    return lax.scan(body, total, jnp.arange(1, rounds, dtype=jnp.int32))[0]
