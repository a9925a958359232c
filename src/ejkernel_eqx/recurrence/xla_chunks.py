"""Tokens in chunks: the layout of the linear-time core in XLA.

An operand `[B, T, n, ...]` becomes `[B, HS, P, ...]`: `P = NC * C` positions in `NC` chunks, some possibly without a token. Inside chunks,
heads and chunks are one axis, `[B, HS * NC, C, ...]`, to keep the rank low: XLA's libraries on a CPU fail for more than six axes.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .._shapes import is_symbolic, least
from .._take import take_along
from ..sequences.packing import ended
from .spec import heads_of, RecurrenceArrays, RecurrenceSpec

BLOCK = 16
"""Block size up to which a single loop body serves all halves of blocks, for decays and for the systems of the delta rule."""


class Chunks:
    """The locations of a call's tokens: rows split into chunks or, with `offsets`, each packed sequence split into its own chunks."""

    def __init__(self, arrays: RecurrenceArrays, spec: RecurrenceSpec, size: int):
        self.batch, self.length = arrays.q.shape[:2]
        self.size, self.heads = size, heads_of(arrays, spec).state
        self.starts: Any = None  # [B, P], as in `RecurrenceArrays`
        offsets = arrays.offsets
        self.sequences = None if offsets is None else offsets.shape[-1] - 1
        if offsets is None:
            self.count = -(-self.length // size)
            if arrays.starts is not None and self.count != 0:
                # Places past the last token continue its segment, so no segment starts there.
                self.starts = jnp.pad(arrays.starts, ((0, 0), (0, self.places - self.length)), mode="edge")
        else:
            assert self.sequences is not None
            # A bound that holds for all offsets: every sequence adds at most one partial chunk.
            self.count = self.length // size + least(self.sequences, self.length)
            if self.count != 0 and self.sequences:
                self._pack(offsets, self.sequences)

    @property
    def places(self) -> int:
        return self.count * self.size

    @property
    def packed(self) -> bool:
        return self.sequences is not None

    def _pack(self, offsets: Array, sequences: int) -> None:
        """The token that each position holds, and the position of each token."""
        size = self.size
        lengths = jnp.diff(offsets, axis=-1)
        ends = jnp.cumsum(-(-lengths // size), axis=-1)  # number of chunks up to and including each sequence
        begins = ends - -(-lengths // size)
        pick = lambda x, index: take_along(x, index, -1)
        row = lambda count: jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), (self.batch, count))

        chunks = row(self.count)
        sequence = ended(ends, self.count)
        used = sequence < sequences
        # Unused chunks read the entries of the last sequence, and `used` hides what they find.
        sequence = jnp.minimum(sequence, sequences - 1)
        first = pick(offsets, sequence) + (chunks - pick(begins, sequence)) * size
        tokens = first[..., None] + jnp.arange(size, dtype=jnp.int32)[None, None]
        inside = used[..., None] & (tokens < pick(offsets, sequence + 1)[..., None])
        tokens = jnp.where(inside, tokens, self.length)  # past the end if there is none
        self.token_of_place = tokens.reshape(self.batch, self.places)
        self.sequence, self.fresh = sequence, used & (chunks == pick(begins, sequence))  # [B, NC]
        self.empty, self.last = lengths == 0, jnp.maximum(ends - 1, 0)  # [B, N]; the last chunk of each

        tokens = row(self.length)
        sequence = ended(offsets, self.length) - 1
        inside = (sequence >= 0) & (sequence < sequences)
        sequence = jnp.clip(sequence, 0, sequences - 1)
        places = pick(begins, sequence) * size + tokens - pick(offsets, sequence)
        # Past the end for tokens of no sequence, so that their outputs are zeros.
        self.place_of_token = jnp.where(inside, places, self.places)

    def take(self, x: Array) -> Array:
        """`[B, T, n, ...]` to `[B, HS, P, ...]`, zero where there is no token; operands with more heads than the state keep them."""
        if self.packed:
            x = _gather(x, self.token_of_place)
        else:
            x = jnp.pad(x, ((0, 0), (0, self.places - self.length), *((0, 0),) * (x.ndim - 2)))
        x = jnp.moveaxis(x, 1, 2)
        if x.shape[1] >= self.heads:
            return x
        # Places and channels become one axis, so that operands of both ranks are repeated alike.
        flat = (merge(x, 2) if x.ndim == 4 else x)[:, :, None]
        flat = jnp.broadcast_to(flat, (*x.shape[:2], self.heads // x.shape[1], flat.shape[-1]))
        repeated = merge(flat, 1)
        return repeated if x.ndim == 3 else split(repeated, 2, self.places)

    def give(self, x: Array) -> Array:
        """`[B, R, P, V]` to `[B, T, R, V]`."""
        x = jnp.moveaxis(x, 2, 1)
        return _gather(x, self.place_of_token) if self.packed else x[:, : self.length]

    def cut(self, x: Array) -> Array:
        """`[B, HS, P, ...]` to `[B, HS * NC, C, ...]`."""
        return merge(split(x, 2, self.count), 1)

    def join(self, x: Array) -> Array:
        """The inverse of `cut`."""
        return merge(split(x, 1, self.heads), 2)

    def states_of_chunks(self, initial: Array) -> Array:
        """`[B, N, HS, D, V]` of the sequences to `[NC, B, HS, D, V]`."""
        return jnp.moveaxis(_gather(initial, self.sequence), 1, 0)

    def final_states(self, after: Array, initial: Array | None) -> Array:
        """The states after the sequences `[B, N, ...]`, from those after the chunks `[NC, B, ...]`."""
        final = _gather(jnp.moveaxis(after, 0, 1), self.last)
        # An empty sequence has no chunk of its own, so its initial state passes through.
        return jnp.where(self.empty[..., None, None, None], 0 if initial is None else initial, final)

    @property
    def positions(self) -> Any:
        """`[P]`, for rows that are not packed."""
        # NumPy makes them a constant of the program; a symbolic size needs JAX.
        return (jnp if is_symbolic(self.places) else np).arange(self.places, dtype=np.int32)

    def over_heads(self, x: Array) -> Array:
        """`[B, P]` to `[B, HS, P]`."""
        return jnp.broadcast_to(x[:, None], (self.batch, self.heads, self.places))

    def visible(self) -> Any:
        """`[.., C, C]`: whether token `i` sees token `j` of its chunk."""
        causal = np.tri(self.size, dtype=bool)[None, None]
        if self.starts is None:
            return causal
        positions = self.cut(jnp.broadcast_to(self.positions, (1, self.heads, self.places)))[..., None, :]
        return causal & (positions >= self.cut(self.over_heads(self.starts))[..., None])

    def enters(self) -> Array:
        """`[B, HS, P]`: whether the incoming state of its chunk reaches a token."""
        return self.over_heads(self.starts < (self.positions // self.size * self.size)[None])

    def leaves(self) -> Array:
        """`[B, HS, P]`: whether a token reaches the outgoing state of its chunk."""
        last = self.starts.reshape(self.batch, self.count, self.size)[..., -1:]
        positions = self.positions.reshape(1, self.count, self.size)
        return self.over_heads((positions >= last).reshape(self.batch, self.places))

    def passes(self) -> Array:
        """`[B, HS * NC]`: whether the incoming state of a chunk reaches the outgoing one."""
        return self.cut(self.enters())[..., -1]

    def begins(self) -> Array:
        """`[B, HS, P]`: whether a segment starts at a token."""
        return self.over_heads(self.starts == self.positions[None])


def _gather(x: Array, index: Array) -> Array:
    """`x [B, T, ...]` at `index [B, ...]`, zero where that is past the end."""
    return jax.vmap(lambda x, index: x.at[index].get(mode="fill", fill_value=0, wrap_negative_indices=False))(
        x, index
    )


def front(x: Array, heads: int) -> Array:
    """`[B, HS * NC, ...]` to `[NC, B, HS, ...]`, to scan over."""
    return jnp.moveaxis(split(x, 1, heads), 2, 0)


def back(x: Array) -> Array:
    """The inverse of `front`."""
    return merge(jnp.moveaxis(x, 0, 2), 1)


def split(x: Array, axis: int, count: int) -> Array:
    """Splits one axis into two, the first of size `count`. One axis at a time, because an explicit mesh allows no other reshapes of split
    arrays."""
    size = x.shape[axis] // count if count != 0 else 0
    return x.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :])


def merge(x: Array, axis: int) -> Array:
    """Merges an axis with the next."""
    return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])


def ends(x: Array, step: int) -> tuple[Array, Array]:
    """The earlier and later halves of blocks of `2 * step` rows of `x [B, M, rows, X]`, each `[B, M * blocks, step, X]`."""
    blocks = merge(split(x, 2, x.shape[2] // (2 * step)), 1)
    early, late = lax.split(blocks, (step, step), 2)
    return early, late


def blocks_of(x: Array) -> Array:
    """`[B, M, C, X]` as `[B, M * blocks, BLOCK, X]`; shorter chunks unchanged."""
    return merge(split(x, 2, max(x.shape[2] // BLOCK, 1)), 1)


def squares(x: Array, size: int, below: bool = False) -> Array:
    """The squares of `size` rows along the diagonal of matrices `[B, M, C, C]`, `[B, M * squares, size, size]`; with `below`, the lower left
    quarters of squares of twice the size."""
    step, down = (2 * size, size) if below else (size, 0)
    at = range(0, x.shape[2], step)
    return merge(jnp.stack([x[..., i + down : i + down + size, i : i + size] for i in at], 2), 1)


def halves(x: Array) -> tuple[Array, Array]:
    """The earlier and the later block of each pair in `[B, blocks, r, c]`."""
    early, late = lax.split(merge(split(x, 1, x.shape[1] // 2), 2), (x.shape[2], x.shape[2]), 2)
    return early, late


def joined(blocks: Array, below: Array) -> Array:
    """Lower triangular blocks of twice the size, from square blocks along a diagonal `[B, blocks, s, s]` and those `below` each first one."""
    before, after = halves(blocks)
    above = jnp.concatenate([before, jnp.zeros_like(before)], -1)
    return jnp.concatenate([above, jnp.concatenate([below, after], -1)], 2)
