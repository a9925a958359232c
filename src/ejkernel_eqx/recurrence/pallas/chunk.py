"""The mathematics of one chunk of one state head, on values in vector memory: a pure function, whose gradient JAX derives inside the backward kernel.

Letters: `C` tokens of a chunk, `G` query heads of a state head, `D` and `V` channels of keys and values. All values are float32; products round their
operands to the dtype of the call.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax


class Chunk(NamedTuple):
    """The operands of a chunk; absent ones are `None`."""

    q: Array  # [G C, D], head by head
    k: Array  # [C, D]
    v: Array  # [C, V]
    state: Array  # [D, V]
    g: Array  # log-decays: scalar [1, C], key [C, D]
    beta: Array | None = None  # [1, C]


@dataclasses.dataclass(frozen=True)
class Form:
    """The static half of a call.

    - `operand`: the dtype that operands of products are rounded to.
    - `reversible`: whether gradients are taken: then those of products are rounded too.
    """

    scale: float
    delta: bool
    operand: str
    reversible: bool = False

    def dot(self, x: Array, y: Array, x_axis: int = 1, y_axis: int = 0) -> Array:
        """The product over one axis of each, in float32."""
        z = self.plain(x, y, x_axis, y_axis)
        if not self.reversible or self.operand == "float32":
            return z
        # The gradient takes the way of the rounded result, so that it is rounded itself and multiplied as fast.
        near = z.astype(self.operand).astype(jnp.float32)
        return near + lax.stop_gradient(z - near)

    def plain(self, x: Array, y: Array, x_axis: int = 1, y_axis: int = 0) -> Array:
        """`dot` for values that have no gradient."""
        return _product(x.astype(self.operand), y.astype(self.operand), x_axis, y_axis)

    def chosen_of(self, chosen: Array, x: Array) -> Array:
        """Zeros and ones times `x`, of which 16 bits count at least."""
        return self._exactly(lambda product, x: product(chosen.astype(jnp.float32), x), x)

    def of_chosen(self, x: Array, chosen: Array) -> Array:
        """`x`, of which 16 bits count at least, times zeros and ones."""
        return self._exactly(lambda product, x: product(x, chosen.astype(jnp.float32)), x)

    def _exactly(self, multiply: Callable[[Callable[..., Array], Array], Array], x: Array) -> Array:
        if self.operand == "float32":
            return multiply(self.dot, x)
        # What rounding takes from `x` is multiplied too and added back.
        rest = lax.stop_gradient(x - x.astype(self.operand).astype(jnp.float32))
        return multiply(self.dot, x) + multiply(self.plain, rest)


def _product(x: Array, y: Array, x_axis: int = 1, y_axis: int = 0) -> Array:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(
        x, y, (((x_axis,), (y_axis,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


class _Places:
    """The tokens that each token sees. `starts [1, C]`, if there are segments: where the segment of each token begins, in tokens of the chunk, -1 if
    before it."""

    def __init__(self, size: int, starts: Array | None):
        self.size = size
        self.i = lax.broadcasted_iota(jnp.int32, (size, size), 0)
        self.j = lax.broadcasted_iota(jnp.int32, (size, size), 1)
        self.apart = self.i ^ self.j
        self.halves = tuple(1 << n for n in range(size.bit_length() - 1))
        self.visible = self.j <= self.i
        self.starts = None
        if starts is not None:
            self.starts = self.column(starts)
            self.last = jnp.max(starts, 1, keepdims=True)  # [1, 1], of the segment that is open at the end
            self.visible = self.visible & (self.j.astype(jnp.float32) >= self.starts)

    def apart_less(self, half: int) -> Array:
        """`[C, C]`: whether two tokens are in one half of a block of `2 half` tokens."""
        return self.apart < half

    def is_late(self, half: int) -> Array:
        """`[C, C]`: whether the first is in the later half of its block."""
        return self.i & half != 0

    def across(self, half: int) -> Array:
        """`[C, C]`: whether the first is in the later half of the block whose earlier half has the second."""
        return (self.apart >= half) & (self.apart < 2 * half) & (self.j < self.i)

    def column(self, row: Array) -> Array:
        """`[1, C]` as `[C, 1]`."""
        return self.sums(self.i == self.j, row)

    def sums(self, chosen: Array, row: Array) -> Array:
        """`[C, 1]`: for each token the sum over those that are chosen of a row `[1, C]`."""
        return jnp.sum(jnp.where(chosen, row, 0.0), 1, keepdims=True)

    def enters(self, factor: Array) -> Array:
        """The factor of what a token reads of the state that comes in: 0 if that is of another segment."""
        return factor if self.starts is None else jnp.where(self.starts < 0, factor, 0.0)

    def leaves(self, factor: Array) -> Array:
        """The factor of what a token adds to the state that goes out."""
        if self.starts is None:
            return factor
        place = lax.broadcasted_iota(jnp.int32, (self.size, 1), 0).astype(jnp.float32)
        return jnp.where(place >= self.last, factor, 0.0)

    def passes(self, factor: Array) -> Array:
        """The factor of the state from chunk to chunk."""
        return factor if self.starts is None else jnp.where(self.last < 0, factor, 0.0)


def through_chunk(form: Form, x: Chunk, starts: Array | None) -> tuple[Array, Array]:
    """The outputs `[G C, V]` and the state after the chunk `[D, V]`."""
    place = _Places(x.k.shape[0], starts)
    decays = _decays(form, place, x.g)
    head, tail, total = place.enters(decays.head), place.leaves(decays.tail), place.passes(decays.total)
    q = x.q * form.scale
    beta = None if x.beta is None else place.column(x.beta)
    queries = x.q.shape[0] // place.size
    keys = [_times(x.k, beta)] if form.delta else []
    scores = _scores(form, place, jnp.concatenate([q, *keys]) if keys else q, x.k, decays)
    read = form.dot(q * _repeated(head, queries), x.state)
    written = _times(x.v, beta)
    if form.delta:
        written = written - form.dot(keys[0] * head, x.state)
        written = _solved(form, place, scores[-place.size :], written)
        scores = scores[: -place.size]
    out = read + form.dot(scores, written)
    state = form.dot(x.k * tail, written, 0, 0)
    return out, state + x.state * total


class _Decays(NamedTuple):
    """Factors of a chunk's decays.

    - `head`, `tail`: from the start of the chunk up to a token, and from it to the end, `[C, 1]` or by key `[C, D]`. `total`: of all tokens,
      `[1, 1]` or `[D, 1]`.
    - `pairs [C, C]`: of a scalar decay, from `j` to `i`.
    - `levels`: of a decay by key, `[C, D]` for each size of halves: between a token and the middle of its block.
    """

    head: Array
    tail: Array
    total: Array
    pairs: Array | None = None
    levels: tuple[Array, ...] = ()


def _decays(form: Form, place: _Places, g: Array) -> _Decays:
    """Every sum of log-decays is one of its own, not a difference: nothing cancels, however strong the decays around it are."""
    before, after = place.j <= place.i, place.j > place.i
    if g.shape[0] == 1:
        logs = form.of_chosen(jnp.where(before, g, 0.0), place.j < place.i)  # [i, j]: over j < t <= i
        head, tail = (jnp.exp(place.sums(chosen, g)) for chosen in (before, after))
        total = jnp.exp(jnp.sum(g, 1, keepdims=True))
        return _Decays(head, tail, total, jnp.exp(jnp.where(place.visible, logs, 0.0)))
    between = [place.apart_less(half) & ~(place.is_late(half) ^ before) for half in place.halves]
    every = jnp.concatenate([x.astype(jnp.float32) for x in (before, after, *between)])
    factors = jnp.exp(form.chosen_of(every, g))
    head, tail, *levels = (factors[n : n + place.size] for n in range(0, factors.shape[0], place.size))
    return _Decays(head, tail, _column(head[-1:]), None, tuple(levels))


def _scores(form: Form, place: _Places, x: Array, k: Array, decays: _Decays) -> Array:
    """`[N C, C]`: `x_i . k_j` decayed from `j` to `i`, 0 where `i` does not see `j`, for `x [N C, D]`."""
    count = x.shape[0] // place.size
    if not decays.levels:
        scores = form.dot(x, k, 1, 1) * _repeated(decays.pairs, count)
        return jnp.where(_repeated(place.visible, count), scores, 0.0)
    diagonal = jnp.sum(x * _repeated(k, count), 1, keepdims=True)
    scores = jnp.where(_repeated(place.i == place.j, count), diagonal, 0.0)
    for half, factors in zip(place.halves, decays.levels, strict=True):
        # Of every block of two halves, tokens of the later one see those of the earlier one through the decays to the middle and from it.
        level = form.dot(x * _repeated(factors, count), k * factors, 1, 1)
        scores = scores + jnp.where(_repeated(place.visible & place.across(half), count), level, 0.0)
    return scores


def _solved(form: Form, place: _Places, lower: Array, known: Array) -> Array:
    """`(I + L)^-1 known [C, V]`, with `L` what is strictly below the diagonal of `lower [C, C]`."""
    lower = jnp.where(place.j < place.i, lower, 0.0)
    fixed, one = lax.stop_gradient(lower), (place.i == place.j).astype(jnp.float32)
    inverse = one
    for half in place.halves:
        # The inverses of two halves, and what is between them, make the inverse of a block.
        between = jnp.where(place.across(half), fixed, 0.0)
        inverse = inverse - (between if half == 1 else form.plain(form.plain(inverse, between), inverse))
    if form.operand != "float32":  # a step of Newton's: rounding grew with every half
        inverse = inverse + form.plain(inverse, one - inverse - _product(fixed, inverse))
    first = lax.stop_gradient(form.plain(inverse, known))
    # A step of refinement has the derivative of the solution, with the inverse as a constant. For similar keys the solution is much smaller than
    # what it is computed from, so what is left is computed in float32.
    return first + form.dot(inverse, known - first - _product(lower, first))


def _column(row: Array) -> Array:
    """`[1, N]` as `[N, 1]`."""
    size = row.shape[1]
    i, j = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    return jnp.sum(jnp.where(i == j, row, 0.0), 1, keepdims=True)


def _times(x: Array, factor: Array | None) -> Array:
    return x if factor is None else x * factor


def _repeated(x: Any, count: int) -> Any:
    """`x [C, ...]` for `count` heads, one after the other."""
    return x if count == 1 else jnp.concatenate([x] * count)
