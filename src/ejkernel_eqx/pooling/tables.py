"""Tables of the segments in which the tokens of a row are pooled, made on the device in time linear in tokens and segments (ids in any order are
sorted)."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from .._broadcast import like
from .._take import take_along
from ..sequences.cumsum import running_count
from ..sequences.packing import chunk_indices, ended
from ..sequences.tokens import over, scattered

Tables = dict[str, Array]


class Pieces(NamedTuple):
    """Segments cut into pieces, those of a segment one after the other; unused ones come last and are empty."""

    owner: Array  # [*, P]: the segment of each piece
    begin: Array  # [*, P]: its first place
    end: Array  # [*, P]: one past its last place
    first: Array  # [*, S]: the first piece of each segment
    number: Array  # [*, S]: its number of pieces


def of_rows(length: Any, chunk: int | None, segments: Any, real: Array) -> Tables:
    """The table of rows cut into segments of `chunk` tokens, of which those not `real [*, T]` are left out."""
    token = jnp.arange(length, dtype=jnp.int32)
    number = jnp.zeros_like(token) if chunk is None else token // chunk
    segment = jnp.where(real, jnp.broadcast_to(number, real.shape), -1)
    return {"segment": segment, "count": tally(segment, segments)}


def of_chunks(
    offsets: Array, order: Array | None, real: Array | None, length: Any, chunk: int, most: Any
) -> Tables:
    """The table of the chunks of the sequences between `offsets [*, N + 1]` of places, at most so many; unused ones are empty and last."""
    number, piece = chunk_indices(offsets, chunk, most)
    is_used, number = number >= 0, jnp.maximum(number, 0)
    begin = take_along(offsets, number, -1) + piece * chunk
    end = jnp.minimum(begin + chunk, take_along(offsets, number + 1, -1))
    # An unused chunk is the empty range at the end, which keeps ends in order.
    past = offsets[..., -1:]
    begin, end = (jnp.where(is_used, x, past) for x in (begin, end))
    return of_ranges(begin, end, order, real, length)


def of_ranges(begin: Array, end: Array, order: Array | None, real: Array | None, length: Any) -> Tables:
    """The table of segments that are these ranges of places."""
    place = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (*begin.shape[:-1], length))
    inside = (place >= begin[..., :1]) & (place < end[..., -1:]) if begin.shape[-1] else place < 0
    segment = jnp.where(inside, ended(end, length), -1)
    tables = {"begin": begin, "end": end}
    if order is not None:
        segment, tables["order"] = scattered(order, segment), order
    if real is None:
        return tables | {"segment": segment, "count": end - begin}
    segment = jnp.where(real, segment, -1)
    return tables | {"segment": segment, "count": tally(segment, begin.shape[-1])}


def pieces_of(begin: Array, end: Array, length: Any, size: int) -> Pieces:
    """The pieces of up to `size` places of the segments `[*, S]` of rows of `length` places: as many as there can be."""
    segments = begin.shape[-1]
    count = length // size + segments
    number = (end - begin + (size - 1)) // size
    ends = jnp.cumsum(number, -1, dtype=jnp.int32)
    owner = ended(ends, count)
    is_used, owner = owner < segments, jnp.minimum(owner, segments - 1)
    of_owner = lambda x: take_along(x, owner, -1)
    rank = like(jnp.arange(count, dtype=jnp.int32), owner) - of_owner(ends - number)
    start = of_owner(begin) + rank * size
    stop = jnp.minimum(start + size, of_owner(end))
    # An unused piece is the empty range at 0.
    start, stop = (jnp.where(is_used, x, 0) for x in (start, stop))
    return Pieces(owner, start, stop, ends - number, number)


def by_id(count: int, are_sorted: bool, ids: Array) -> tuple[Array, Array]:
    """The offsets `[*, count + 1]` of the tokens of each id below `count`, and the tokens in this order, `[*, T]`. Others come last."""
    is_member = (ids >= 0) & (ids < count)
    key = jnp.where(is_member, ids, count)
    sizes = tally(jnp.where(is_member, ids, -1), count)
    ends = jnp.cumsum(sizes, -1, dtype=jnp.int32)
    offsets = jnp.pad(ends, [(0, 0)] * (ends.ndim - 1) + [(1, 0)])
    if not are_sorted:
        return offsets, jnp.argsort(key, -1, stable=True).astype(jnp.int32)
    token = jnp.broadcast_to(jnp.arange(ids.shape[-1], dtype=jnp.int32), ids.shape)
    # Sorted ids need no sort: members keep their order, and the others move behind them.
    rank = running_count(is_member, is_member.ndim - 1)
    place = jnp.where(is_member, rank - 1, ends[..., -1:] + token - rank)
    return offsets, scattered(place, token)


def tally(segment: Array, count: Any) -> Array:
    """The number of tokens of each segment: `[*, count]` from `[*, T]`, where negative numbers are no segment."""
    add = lambda row: jnp.zeros((count,), jnp.int32).at[row].add(1, mode="drop")
    return over(segment.ndim - 1, add)(jnp.where(segment < 0, count, segment))


def last_of(segment: Array, count: Any) -> Array:
    """The last token of each segment, `[*, count]`, -1 for none."""

    def row(row: Array) -> Array:
        token = jnp.arange(row.shape[0], dtype=jnp.int32)
        return jnp.full((count,), -1, jnp.int32).at[row].max(token, mode="drop")

    return over(segment.ndim - 1, row)(jnp.where(segment < 0, count, segment))


def before(lengths: Array, length: Any) -> Array:
    """Returns whether each of `length` tokens comes before its row's end, `[*, length]`."""
    return like(jnp.arange(length, dtype=jnp.int32), lengths[..., None]) < lengths[..., None]
