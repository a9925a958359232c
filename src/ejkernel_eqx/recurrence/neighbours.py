"""Over the real tokens of every sequence: which one is before each, which one is the last, and sums up to each."""

import dataclasses
import math

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from .._broadcast import like
from ..core.frame import Frame
from ..parallel import explicit_mesh, match_sharding
from ..parallel.mesh import resharded, spec_of
from ..rotary.embedding import turn_halves, turn_neighbours
from ..sequences.cumsum import shifted
from ..sequences.packing import ended, padded
from ..sequences.tokens import over

_BLOCK = 64
_TURN = 2 * math.pi


@dataclasses.dataclass(frozen=True, eq=False)
class Neighbours:
    """Values `[*, T, ...]` over tokens and what enters every sequence before them, `[*, ...]`, or `[N, ...]` with offsets. Places count what enters
    first, and then the tokens."""

    axis: int | None
    """That of the tokens; `None` for a step, whose values have none."""
    starts: Array | None = None
    """int32 `[*, T]`: where the sequence of a token starts; -1 if something enters it."""
    before: Array | None = None  # int32 [*, T]: places of the tokens before; past the end: none
    last: Array | None = None  # int32 [*, 1] or [N]: places of the last tokens
    packed: bool = False
    """Whether sequences have offsets."""

    def shift(self, x: Array, entering: Array) -> Array:
        """The value of the token before each, zero if there is none."""
        if self.axis is None:
            return entering.astype(x.dtype)
        both = self._both(x, entering)
        if self.before is None:
            return lax.slice_in_dim(both, 0, x.shape[self.axis], axis=self.axis)
        return self._at(both, self.before)

    def end(self, x: Array, entering: Array) -> Array:
        """The value of the last token of every sequence; what enters, if it has none."""
        if self.axis is None:
            return x
        both = self._both(x, entering)
        if self.last is None:
            return lax.index_in_dim(both, x.shape[self.axis], self.axis, keepdims=False)
        taken = self._at(both, self.last)
        return taken if self.packed else jnp.squeeze(taken, self.axis)

    def turns(self, angles: Array, entering: Array) -> Array:
        """Sums of angles up to each token, from what enters, less whole turns."""
        if self.axis is None:
            return whole(angles + entering)
        return turns(angles + self.shift(jnp.zeros_like(angles), entering), self.starts, self.axis)

    def _both(self, x: Array, entering: Array) -> Array:
        assert self.axis is not None
        entering = entering if self.packed else jnp.expand_dims(entering, self.axis)
        return jnp.concatenate([match_sharding(entering.astype(x.dtype), x), x], self.axis)

    def _at(self, both: Array, places: Array) -> Array:
        take = lambda rows, at: rows.at[at].get(mode="fill", fill_value=0, unique_indices=True)
        return over(self.axis or 0, take)(both, places)


def neighbours_of(frame: Frame, x: Array) -> Neighbours:
    """Those of a call, whose rows a mesh splits as those of `x`."""
    packing, axis, length = frame.packing, len(frame.lead), frame.packing.length
    if frame.length is None:
        return Neighbours(None)
    tokens = jnp.arange(length, dtype=jnp.int32)
    if packing.offsets is not None:
        first, ends = packing.offsets[:-1], packing.offsets[1:]
        count = ends.shape[0]
        if 0 in (count, length):
            return Neighbours(axis, None, count + tokens, jnp.arange(count, dtype=jnp.int32), True)
        sequence = jnp.minimum(ended(ends, length), count - 1)
        numbers, starts = jnp.arange(count, dtype=jnp.int32), first[sequence]
        before = jnp.where(tokens == starts, sequence, count + tokens - 1)
        # Padding reads nothing: no place is read twice.
        before = jnp.where((tokens >= starts) & (tokens < ends[sequence]), before, count + length + tokens)
        return Neighbours(axis, starts, before, jnp.where(ends > first, count + ends - 1, numbers), True)
    if length == 0 or packing.starts is None:
        return Neighbours(axis)
    real, starts = packing.real, packing.starts
    assert real is not None and starts is not None
    mesh = explicit_mesh(x)
    if mesh is not None:
        rows = PartitionSpec(*spec_of(x)[:axis])
        real, starts = (resharded(of_tokens, mesh, rows) for of_tokens in (real, starts))
    tokens = like(tokens, real)
    latest = lax.cummax(jnp.where(real, tokens, -1), axis)
    before = 1 + padded(latest[..., :-1], 1, 0, -1)
    before = jnp.where(real & (starts != tokens), before, 1 + length + tokens)
    return Neighbours(axis, starts, before, 1 + latest[..., -1:])


def turns(x: Array, starts: Array | None, axis: int) -> Array:
    """Angles `x [*, T, H, J]` summed from the start of each token's sequence, less whole turns. Sums of blocks of tokens are products with zeros and
    ones, so that nothing is added and taken away again, and stay small however long a sequence is."""
    length = x.shape[axis]
    starts = jnp.full(length, -1, jnp.int32) if starts is None else starts
    if not isinstance(length, int):
        # A symbol, of which the number of blocks is not known.
        fresh = starts == like(jnp.arange(length, dtype=jnp.int32), starts)
        keeps = jnp.broadcast_to(~like(fresh, x[..., 0, 0])[..., None, None], x.shape)
        first = jnp.zeros((*x.shape[:axis], *x.shape[axis + 1 :]), x.dtype)
        add = lambda angle, now: (total := whole(angle * now[0] + now[1]), total)
        xs = jnp.moveaxis(keeps.astype(x.dtype), axis, 0), jnp.moveaxis(x, axis, 0)
        return jnp.moveaxis(lax.scan(add, first, xs)[1], 0, axis)
    size = min(_BLOCK, length)
    if size == 0:
        return x
    blocks = -(-length // size)

    def split(x: Array, axis: int) -> Array:
        x = jnp.pad(x, [(0, blocks * size - n if i == axis else 0) for i, n in enumerate(x.shape)])
        return x.reshape(*x.shape[:axis], blocks, size, *x.shape[axis + 1 :])

    starts, place = split(starts, starts.ndim - 1), jnp.arange(size, dtype=jnp.int32)
    # Relative to the block of a token.
    inside = starts - like(size * jnp.arange(blocks, dtype=jnp.int32)[:, None], starts)
    later, first = place[:, None] >= place[None], inside[..., None]
    seen = (like(later, first) & (like(place, first) >= first)).astype(x.dtype)
    sums = jnp.einsum("...ij,...jhc->...ihc", seen, split(x, axis), precision=lax.Precision.HIGHEST)
    if blocks > 1:
        earlier = turns(whole(sums[..., -1, :, :]), starts[..., -1] // size, axis)
        earlier = jnp.expand_dims(shifted(earlier, axis, 1, False), axis + 1)
        sums += jnp.where(like((inside < 0)[..., None, None], sums), earlier, 0)
    sums = sums.reshape(*x.shape[:axis], blocks * size, *x.shape[axis + 1 :])
    return whole(lax.slice_in_dim(sums, 0, length, axis=axis))


def whole(angle: Array) -> Array:
    """The angle less whole turns, between minus and plus half a turn."""
    return angle - _TURN * jnp.round(angle / _TURN)


def turned(x: Array, angles: Array, interleaved: bool) -> Array:
    """`x [..., N]` with its first pairs of channels rotated by `angles [..., J]`. A pair is two neighbours, or one channel of each half."""
    rest = [(0, 0)] * (angles.ndim - 1) + [(0, x.shape[-1] // 2 - angles.shape[-1])]
    cos, sin = jnp.pad(jnp.cos(angles), rest, constant_values=1), jnp.pad(jnp.sin(angles), rest)
    turn = turn_neighbours if interleaved else turn_halves
    return turn(x.astype(angles.dtype), cos, sin).astype(x.dtype)
