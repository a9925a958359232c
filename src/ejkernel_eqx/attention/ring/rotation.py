"""Keys and values go round the devices of a mesh axis, and each adds what its own queries see of them.

Every hop is issued before the kernel of its step and does not depend on it, so the two overlap. Steps are a loop, so that no device has
more than two devices' keys at once, and so that a kernel is compiled once for all but the first and the last.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ...core.arguments import accumulator
from ...parallel import match_varying
from ..cotangents import clean_cotangent, row_terms, sinks_gradient
from ..masks.lower import window_ends
from ..spec import AttentionArrays, AttentionGrads, AttentionSpec, RowRanges
from .schedule import Piece, Run, runs, Sizes
from .spec import RingSpec

Keys = dict[str, Array]
"""What goes round: keys, values and their segment ids."""


class Ring:
    """One call on one device, inside `shard_map` over its axis."""

    def __init__(self, arrays: AttentionArrays, spec: RingSpec, backward: bool = False):
        self.arrays, self.spec = arrays, spec
        self.devices = lax.axis_size(spec.axis)
        self.index = lax.axis_index(spec.axis)
        self.wide = accumulator(arrays.q.dtype)
        self.sizes = Sizes(self.devices, arrays.q.shape[1], arrays.k.shape[1], spec.order)
        positional = spec.dropout_rate > 0 or spec.slopes  # scores depend on positions besides the mask
        self.runs = runs(self.sizes, spec.reach, arrays.rows is None, positional, backward)
        self.rows = self._own_rows()

    def _own_rows(self) -> RowRanges | None:
        """The ranges of this device's queries, counted over all keys; `None` if no step needs them."""
        pieces = (piece for run in self.runs for branch in run.branches for piece in branch)
        if all(piece.window is not None for piece in pieces):
            return None
        starts, size = self._starts(self.index, self.sizes.queries)
        rows = self.arrays.rows
        if rows is not None:
            take = lambda x: jnp.concatenate(
                [lax.dynamic_slice_in_dim(x, start, size, 1) for start in starts], axis=1
            )
            return RowRanges(*map(take, rows))
        left, right, offset = self.spec.reach
        local = jnp.arange(size, dtype=jnp.int32)
        position = jnp.concatenate([start + offset + local for start in starts])
        ends = window_ends(position, left, right, self.sizes.keys * self.devices)
        return RowRanges(*(x[None] for x in (*ends, position)))

    def _starts(self, device: Array, length: int) -> tuple[list[Array], int]:
        """The first position of each chunk of a device, and how long they are."""
        table = np.asarray([self.sizes.starts(n, length) for n in range(self.devices)], np.int32)
        row = jnp.asarray(table)[device]
        return [row[n] for n in range(self.sizes.chunks)], length // self.sizes.chunks

    def moved(self, tree: Any, shift: int) -> Any:
        """Returns what the device `shift` places before has."""
        if shift % self.devices == 0:
            return tree
        pairs = [(n, (n + shift) % self.devices) for n in range(self.devices)]
        return {name: lax.ppermute(x, self.spec.axis, pairs) for name, x in tree.items()}

    def first_keys(self) -> Keys:
        """Those of the first step, usually the device's own."""
        arrays = {"k": self.arrays.k, "v": self.arrays.v, "segments": self.arrays.kv_segments}
        present = {name: x for name, x in arrays.items() if x is not None}
        keys = match_varying(present, (self.arrays, self.index))
        return self.moved(keys, self.runs[0].came) if self.runs else keys

    def zeros(self, shape: tuple[int, ...], value: float = 0.0) -> Array:
        """The start of a sum, with the type of what is added to it."""
        return match_varying(jnp.full(shape, value, self.wide), (self.arrays, self.index))

    def each_step(self, carry: Any, step: Callable[[Any, "Step"], Any]) -> Any:
        """`carry` after all steps, in loops of those that are alike."""
        for n, run in enumerate(self.runs):
            body = functools.partial(self._one, step, run, n == 0 and run.shifts == (0,))
            shifts, table = np.asarray(run.shifts, np.int32), np.asarray(run.table, np.int32)
            once = len(shifts) == 1
            carry, _ = body(carry, (shifts[0], table[0])) if once else lax.scan(body, carry, (shifts, table))
        return carry

    def _one(self, step: Any, run: Run, own: bool, carry: Any, x: tuple[Any, Any]) -> tuple[Any, None]:
        shift, table = x
        # A hop waits for the step before: without loops a compiler could make all of them at once.
        carry = lax.optimization_barrier(carry)
        theirs = (self.index - shift) % self.devices
        return step(carry, Step(self, run, jnp.asarray(table)[self.index], theirs, own)), None

    def part(self, piece: Piece, keys: Keys, theirs: Array, own: bool) -> tuple["Part", Array | None]:
        """The call of a piece and, if only its arrays tell, whether it sees anything."""
        arrays, spec, window = self.arrays, self.spec, piece.window
        first, size = piece.keys
        starts, chunk = self._starts(theirs, self.sizes.keys)
        begin = starts[first // chunk]
        column = theirs * self.sizes.keys + first  # where arrays over all keys have these
        rows, some = None, None
        if window is None:
            assert self.rows is not None
            rows = local_rows(self.rows, begin, size)
            some = (rows.start < rows.end).any()
            window = (None, None, 0)
        segments = keys.get("segments")
        ours = arrays.q_segments
        if ours is not None and segments is not None:
            ours, segments = _rows(ours, piece.queries, 1), _rows(segments, piece.keys, 1)
            near = _overlap(ours, segments)
            some = near if some is None else some & near
        cut = functools.partial(self._over_scores, piece=piece, column=column)
        seeds = arrays.seeds
        if seeds is not None:
            ahead = jnp.broadcast_to(begin.astype(jnp.uint32), (*seeds.shape[:-1], 1))
            seeds = jnp.concatenate([seeds, ahead], axis=-1)
        call = arrays._replace(
            q=_rows(arrays.q, piece.queries, 1),
            k=_rows(keys["k"], piece.keys, 1),
            v=_rows(keys["v"], piece.keys, 1),
            bias=cut(arrays.bias),
            mask=cut(arrays.mask),
            sinks=None,
            q_segments=ours,
            kv_segments=segments,
            rows=rows,
            seeds=seeds,
        )
        call = match_varying(call, (arrays, self.index))
        same = own and piece.queries == (0, self.sizes.queries) and piece.keys == (0, self.sizes.keys)
        return Part(piece, call, spec.piece(*window, same), column), None if own else some

    def _over_scores(self, x: Array | None, piece: Piece, column: Array) -> Array | None:
        """The part of an array over the scores, whose queries are this device's and whose keys are everyone's."""
        if x is None:
            return None
        x = x if x.shape[2] == 1 else _rows(x, piece.queries, 2)
        return x if x.shape[3] == 1 else lax.dynamic_slice_in_dim(x, column, piece.keys[1], 3)


class Part(NamedTuple):
    """A kernel's call, and where arrays over all keys have its first."""

    piece: Piece
    arrays: AttentionArrays
    spec: AttentionSpec
    column: Array


class Step(NamedTuple):
    """One step of this device, with the keys of device `theirs`; `own` if these are certainly its own."""

    ring: Ring
    run: Run
    branch: Array
    theirs: Array
    own: bool

    def over(self, keys: Keys, total: Any, compute: Callable[[Any, Part], Any]) -> Any:
        """`total` after `compute` of every piece that this device has."""

        def branch(pieces: tuple[Piece, ...], total: Any) -> Any:
            for piece in pieces:
                part, some = self.ring.part(piece, keys, self.theirs, self.own)
                if some is None:
                    total = compute(total, part)
                else:
                    total = lax.cond(
                        some, lambda total, part=part: compute(total, part), lambda total: total, total
                    )
            return total

        branches = [functools.partial(branch, pieces) for pieces in self.run.branches]
        return branches[0](total) if len(branches) == 1 else lax.switch(self.branch, branches, total)


def forward(platform: Any, arrays: AttentionArrays, spec: RingSpec, config: Any) -> tuple[Array, Array]:
    """`out [B, T, H, V]` and `lse [B, H, T]` of this device's queries."""
    ring = Ring(arrays, spec)
    (batch, length, heads, _), values = arrays.q.shape, arrays.v.shape[-1]
    out, lse = ring.zeros((batch, length, heads, values)), ring.zeros((batch, heads, length), -jnp.inf)
    if arrays.sinks is not None:  # A sink is a key that is seen first and whose value is 0.
        lse = jnp.maximum(lse, arrays.sinks.astype(lse.dtype)[..., None])

    def compute(total: tuple[Array, Array], part: Part) -> tuple[Array, Array]:
        out, lse = platform.forward(part.arrays, part.spec, config)
        return _merged(total, (out, lse), part.piece.queries)

    def step(carry: Any, step: Step) -> Any:
        keys, total = carry
        later = ring.moved(keys, step.run.following)
        return later, step.over(keys, total, compute)

    _, (out, lse) = ring.each_step((ring.first_keys(), (out, lse)), step)
    return out.astype(arrays.q.dtype), lse


def _share(lse: Array, total: Array) -> Array:
    """The weight of a part in the whole, `[B, T, H, 1]`."""
    share = jnp.where(lse == -jnp.inf, 0, jnp.exp(lse - jnp.where(total == -jnp.inf, 0, total)))
    return share.swapaxes(1, 2)[..., None]


def _merged(
    total: tuple[Array, Array], part: tuple[Array, Array], queries: tuple[int, int]
) -> tuple[Array, Array]:
    """The output with another part of the keys."""
    out, lse = _rows(total[0], queries, 1), _rows(total[1], queries, 2)
    more, own = part[0].astype(out.dtype), part[1].astype(lse.dtype)
    both = jnp.logaddexp(lse, own)
    out = out * _share(lse, both) + more * _share(own, both)
    return _put(total[0], out, queries, 1), _put(total[1], both, queries, 2)


def backward(
    platform: Any, arrays: AttentionArrays, spec: RingSpec, config: Any, *results: Array
) -> AttentionGrads:
    """The gradients of this device's queries, keys and values, and its parts of those of other arrays, from `out`, `lse` and their cotangents.
    Those of keys travel with them, in float32, one step behind."""
    ring, (out, lse, dout, dlse) = Ring(arrays, spec, backward=True), results
    delta, empty = row_terms(arrays, out, lse, dout, dlse)
    dsinks = sinks_gradient(arrays, lse, delta)
    # Sinks are part of the log-sum-exp, and else concern no step; a query that sees nothing in any has no gradient.
    dout, lse = clean_cotangent(dout, empty), jnp.where(empty, -jnp.inf, lse)
    dlse = jnp.where(empty, 0, dlse)
    learned = {"q": arrays.q, "bias": arrays.bias, "alibi_slopes": arrays.alibi_slopes}
    ours = {name: ring.zeros(x.shape) for name, x in learned.items() if x is not None}

    def compute(total: tuple[Keys, Keys], part: Part) -> tuple[Keys, Keys]:
        (ours, theirs), piece = total, part.piece
        take = lambda x, axis: _rows(x, piece.queries, axis)
        grads = platform.backward(
            part.arrays, part.spec, config, take(out, 1), take(lse, 2), take(dout, 1), take(dlse, 2)
        )
        ours = ours | {"q": _add(ours["q"], grads.q, piece.queries, 1)}
        if grads.alibi_slopes is not None:
            ours["alibi_slopes"] = ours["alibi_slopes"] + grads.alibi_slopes.astype(ring.wide)
        if grads.bias is not None:
            ours["bias"] = _add_bias(ours["bias"], grads.bias, part)
        return ours, {name: _add(theirs[name], getattr(grads, name), piece.keys, 1) for name in theirs}

    nothing = lambda: {"k": ring.zeros(arrays.k.shape), "v": ring.zeros(arrays.v.shape)}

    def step(carry: Any, step: Step) -> Any:
        keys, ours, travelled = carry
        later = ring.moved(keys, step.run.following)
        arrived = travelled if step.own else ring.moved(travelled, step.run.came)
        ours, theirs = step.over(keys, (ours, nothing()), compute)
        return later, ours, {name: arrived[name] + x for name, x in theirs.items()}

    _, ours, travelled = ring.each_step((ring.first_keys(), ours, nothing()), step)
    travelled = ring.moved(travelled, -ring.runs[-1].shifts[-1]) if ring.runs else travelled
    return AttentionGrads(
        ours["q"].astype(arrays.q.dtype),
        travelled["k"].astype(arrays.k.dtype),
        travelled["v"].astype(arrays.v.dtype),
        None if arrays.bias is None else ours["bias"].astype(arrays.bias.dtype),
        ours.get("alibi_slopes"),
        dsinks,
    )


def local_rows(rows: RowRanges, begin: Array, size: int) -> RowRanges:
    """Ranges over all keys as ranges over the `size` keys from position `begin`."""
    start, end = (jnp.clip(x - begin, 0, size) for x in (rows.start, rows.end))
    some = start < end
    return RowRanges(jnp.where(some, start, 0), jnp.where(some, end, 0), rows.position - begin)


def _overlap(ours: Array, theirs: Array) -> Array:
    """Returns whether any row of queries can have a key with its segment id, by the smallest and the largest."""
    most = jnp.iinfo(jnp.int32).max
    low = lambda x: jnp.where(x >= 0, x, most).min(1)
    return ((low(ours) <= theirs.max(1)) & (low(theirs) <= ours.max(1))).any()


def _rows(x: Array, part: tuple[int, int], axis: int) -> Array:
    start, size = part
    return x if (start, size) == (0, x.shape[axis]) else lax.slice_in_dim(x, start, start + size, axis=axis)


def _put(x: Array, part: Array, where: tuple[int, int], axis: int) -> Array:
    if where == (0, x.shape[axis]):
        return part
    return lax.dynamic_update_slice_in_dim(x, part, where[0], axis)


def _add(x: Array, part: Array, where: tuple[int, int], axis: int) -> Array:
    return _put(x, _rows(x, where, axis) + part.astype(x.dtype), where, axis)


def _add_bias(total: Array, part: Array, of: Part) -> Array:
    """The gradient of a bias with that of its rows and columns of one piece."""
    rows = (0, 1) if total.shape[2] == 1 else of.piece.queries
    block, part = _rows(total, rows, 2), part.astype(total.dtype)
    if total.shape[3] == 1:
        return _put(total, block + part, rows, 2)
    mine = lax.dynamic_slice_in_dim(block, of.column, part.shape[3], 3) + part
    return _put(total, lax.dynamic_update_slice_in_dim(block, mine, of.column, 3), rows, 2)
