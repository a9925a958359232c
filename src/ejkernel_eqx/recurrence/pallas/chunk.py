"""The mathematics of one chunk of one state head, on values in vector memory: a pure function, whose gradient JAX derives inside the backward kernel.

Letters: `C` tokens of a chunk, `G` query heads of a state head, `D` and `V` channels of keys and values. All values are float32; products round their
operands to the dtype of the call.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax


class Chunk(NamedTuple):
    """The operands of a chunk; absent ones are `None`."""

    q: Array  # [G C, D], head by head
    k: Array  # [C, D]
    v: Array  # [C, V]
    state: Array  # [D, V]
    g: Array | None = None  # log-decays: scalar [1, C], key [C, D]
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
        z = _product(x.astype(self.operand), y.astype(self.operand), x_axis, y_axis)
        if not self.reversible or self.operand == "float32":
            return z
        # The gradient takes the way of the rounded result, so that it is rounded itself and multiplied as fast.
        near = z.astype(self.operand).astype(jnp.float32)
        return near + lax.stop_gradient(z - near)


def _product(x: Array, y: Array, x_axis: int = 1, y_axis: int = 0) -> Array:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(
        x, y, (((x_axis,), (y_axis,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


class _Places:
    """Which tokens a token sees. `starts [1, C]`, if there are segments: where the segment of each token begins, in tokens of the chunk, -1 if
    before it."""

    def __init__(self, size: int, starts: Array | None):
        self.size = size
        self.i = lax.broadcasted_iota(jnp.int32, (size, size), 0)
        self.j = lax.broadcasted_iota(jnp.int32, (size, size), 1)
        self.visible = self.j <= self.i
        self.starts = None
        if starts is not None:
            self.starts = self.column(starts)
            self.last = jnp.max(starts, 1, keepdims=True)  # [1, 1], of the segment that is open at the end
            self.visible = self.visible & (self.j.astype(jnp.float32) >= self.starts)

    def column(self, row: Array) -> Array:
        """`[1, C]` as `[C, 1]`."""
        return jnp.sum(jnp.where(self.i == self.j, row, 0.0), 1, keepdims=True)

    def sums(self, chosen: Array, row: Array) -> Array:
        """`[C, 1]`: for each token the sum over those that are chosen of a row `[1, C]`."""
        return jnp.sum(jnp.where(chosen, row, 0.0), 1, keepdims=True)

    def enters(self, factor: Array | None) -> Array | None:
        """The factor of what a token reads of the state that comes in: 0 if that is of another segment."""
        return (
            factor
            if self.starts is None
            else jnp.where(self.starts < 0, 1.0 if factor is None else factor, 0.0)
        )

    def leaves(self, factor: Array | None) -> Array | None:
        """The factor of what a token adds to the state that goes out."""
        if self.starts is None:
            return factor
        place = lax.broadcasted_iota(jnp.int32, (self.size, 1), 0).astype(jnp.float32)
        return jnp.where(place >= self.last, 1.0 if factor is None else factor, 0.0)

    def passes(self, factor: Array | None) -> Array | None:
        """The factor of the state from chunk to chunk."""
        return (
            factor
            if self.starts is None
            else jnp.where(self.last < 0, 1.0 if factor is None else factor, 0.0)
        )


def through_chunk(form: Form, x: Chunk, starts: Array | None) -> tuple[Array, Array]:
    """The outputs `[G C, V]` and the state after the chunk `[D, V]`."""
    place = _Places(x.k.shape[0], starts)
    q = x.q * form.scale
    head = tail = total = None  # decays up to a token, from it to the end of the chunk, and of all tokens
    if x.g is not None and x.g.shape[0] == 1:
        head, tail = (jnp.exp(place.sums(chosen, x.g)) for chosen in (place.j <= place.i, place.j > place.i))
        total = jnp.exp(jnp.sum(x.g, 1, keepdims=True))
    elif x.g is not None:
        head, tail = (jnp.exp(_chosen(chosen, x.g)) for chosen in (place.j <= place.i, place.j > place.i))
        total = jnp.exp(_product(x.g, jnp.ones((place.size, 1), jnp.float32), 0, 0))
    head, tail, total = place.enters(head), place.leaves(tail), place.passes(total)
    beta = None if x.beta is None else place.column(x.beta)
    queries = x.q.shape[0] // place.size
    keys = [_times(x.k, beta)] if form.delta else []
    rows = jnp.concatenate([q, *keys]) if keys else q
    scores = _scores(form, place, rows, x.k, x.g)
    read = form.dot(_times(q, _repeated(head, queries)), x.state)
    written = _times(x.v, beta)
    if form.delta:
        written = written - form.dot(_times(keys[0], head), x.state)
        written = _solved(form, place, scores[-place.size :], written)
        scores = scores[: -place.size]
    out = read + form.dot(scores, written)
    state = form.dot(_times(x.k, tail), written, 0, 0)
    return out, state + _times(x.state, total)


def _scores(form: Form, place: _Places, x: Array, k: Array, g: Array | None) -> Array:
    """`[N C, C]`: `x_i . k_j` decayed from `j` to `i`, 0 where `i` does not see `j`, for `x [N C, D]`."""
    count = x.shape[0] // place.size
    if g is None or g.shape[0] == 1:
        scores = form.dot(x, k, 1, 1)
        if g is not None:
            # Each difference of sums as a sum of its own: nothing cancels, however strong the decays around it are.
            after = jnp.where(place.j <= place.i, g, 0.0)  # [i, t]
            logs = _product(after, (place.i > place.j).astype(jnp.float32))  # [i, j]: over j < t <= i
            scores = scores * _repeated(jnp.exp(jnp.where(place.visible, logs, 0.0)), count)
        return jnp.where(_repeated(place.visible, count), scores, 0.0)
    own = jnp.sum(x * _repeated(k, count), 1, keepdims=True)
    scores = jnp.where(_repeated(place.i == place.j, count), own, 0.0)
    half = 1
    while half < place.size:
        # Of every block of two halves, tokens of the later one see those of the earlier one through the decays to the middle and from it.
        middle = place.i // (2 * half) * (2 * half) + half
        late = place.i >= middle
        between = late & (middle <= place.j) & (place.j <= place.i)
        between = between | (~late & (place.i < place.j) & (place.j < middle))
        factors = jnp.exp(_chosen(between, g))  # [C, D]
        pairs = place.visible & late & (place.j < middle) & (place.j >= middle - half)
        level = form.dot(x * _repeated(factors, count), k * factors, 1, 1)
        scores = scores + jnp.where(_repeated(pairs, count), level, 0.0)
        half *= 2
    return scores


def _solved(form: Form, place: _Places, lower: Array, known: Array) -> Array:
    """`(I + L)^-1 known [C, V]`, with `L` what is strictly below the diagonal of `lower [C, C]`."""
    lower = jnp.where(place.j < place.i, lower, 0.0)
    fixed, inverse = lax.stop_gradient(lower), (place.i == place.j).astype(jnp.float32)
    half = 1
    while half < place.size:
        # The inverses of two halves, and what is between them, make the inverse of a block.
        middle = place.i // (2 * half) * (2 * half) + half
        between = jnp.where((place.i >= middle) & (place.j < middle) & (place.j >= middle - half), fixed, 0.0)
        inverse = inverse - _product(_product(inverse, between), inverse)
        half *= 2
    first = lax.stop_gradient(_product(inverse, known))
    # A step of refinement changes the last digits only, and has the derivative of the solution, with the inverse as a constant.
    return first + _product(inverse, known - first - _product(lower, first))


def _chosen(chosen: Array, g: Array) -> Array:
    """`[C, D]`: for each token the sum over those that are chosen of log-decays `[C, D]`."""
    return _product(chosen.astype(jnp.float32), g)


def _times(x: Array, factor: Array | None) -> Array:
    return x if factor is None else x * factor


def _repeated(x: Any, count: int) -> Any:
    """`x [C, ...]` for `count` heads, one after the other."""
    return x if x is None or count == 1 else jnp.concatenate([x] * count)
