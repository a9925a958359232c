"""Conversions between the two descriptions of packed sequences, offsets `cu_seqlens [..., N + 1]` and `segment_ids [..., T]`.

Sizes are static, so everything runs under `jit`. Values are checked when they are known (outside of transformations), and inside
transformations on request ([`ejkernel_eqx.check_values`][]); otherwise the docstrings define the results.
"""

import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int

from .._broadcast import like
from .._shapes import remedy_of_size
from .._take import take_along
from .._values import check_int32, check_offsets, known, shown


class Spans(NamedTuple):
    """For every token, its sequence's first token, one past its last, and whether the token is not padding. Each `[..., T]`."""

    start: Array
    end: Array
    real: Array


class ChunkIndices(NamedTuple):
    """Chunk `m` is chunk `chunk[m]` of sequence `sequence[m]`; both are -1 for unused entries. Each int32 `[..., max_chunks]`."""

    sequence: Int[Array, "... chunks"]
    chunk: Int[Array, "... chunks"]


def cu_seqlens_to_segment_ids(cu_seqlens: Any, total: int) -> Int[Array, "... total"]:
    r"""The index of every token's sequence: $\text{id}_t = n$ where $c_n \le t < c_{n+1}$, and -1 before $c_0$ and from $c_N$ on.

    **Arguments:**

    - `cu_seqlens`: offsets $c$, non-decreasing ints `[..., N + 1]`. An empty sequence has an index but no tokens.
    - `total`: number of tokens, including padding; static.

    **Returns:** int32 `[..., total]`.

    **Raises:** `ValueError` for an invalid shape or dtype, and for offsets that decrease or are outside `0 .. total` when their values are
    known (outside `jit`).
    """
    offsets = read_offsets(cu_seqlens, read_count("total", total))
    number, real = _numbers(offsets, total)
    return jnp.where(real, number, -1)


def segment_ids_to_cu_seqlens(segment_ids: Any, max_segments: int) -> Int[Array, "... offsets"]:
    """The beginning of each run of equal, non-negative ids, and the end of the last one.

    Ids need not be consecutive or sorted: every run is a sequence, even if its id occurred before. Negative ids are padding,
    which offsets can exclude only before the first sequence and after the last one.

    **Arguments:**

    - `segment_ids`: ints `[..., T]`.
    - `max_segments`: maximum number of sequences; static.

    **Returns:** int32 `[..., max_segments + 1]`; unused entries repeat the last offset.

    **Raises:** `ValueError` for an invalid shape or dtype, and for more than `max_segments` runs or padding between two of them when
    the values are known (outside `jit`). Inside `jit`, runs past `max_segments` become padding, and padding between sequences becomes
    a sequence of its own, so that tokens never join another sequence.
    """
    ids = read_ids(segment_ids)
    read_count("max_segments", max_segments)
    _check_runs(ids, max_segments)
    offsets = jnp.vectorize(lambda row: _offsets_of(row, max_segments), signature="(t)->(n)")
    return offsets(ids)


def segment_positions(segment_ids: Any) -> Int[Array, "... T"]:
    """Each token's position within its run of equal ids, from 0; 0 for padding (negative ids).

    **Arguments:** `segment_ids`: ints `[..., T]`.

    **Returns:** int32 `[..., T]`.

    **Raises:** `ValueError` for an invalid shape or dtype.
    """
    return _positions(spans_of_ids(read_ids(segment_ids)))


def positions_from_cu_seqlens(cu_seqlens: Any, total: int) -> Int[Array, "... total"]:
    r"""Each token's position within its sequence: $t - c_n$ where $c_n \le t < c_{n+1}$; 0 for padding.

    **Arguments:** as for [`ejkernel_eqx.sequences.cu_seqlens_to_segment_ids`][].

    **Returns:** int32 `[..., total]`.

    **Raises:** as for [`ejkernel_eqx.sequences.cu_seqlens_to_segment_ids`][].
    """
    return _positions(spans_of_offsets(read_offsets(cu_seqlens, read_count("total", total)), total))


def sequence_lengths(cu_seqlens: Any) -> Int[Array, "... sequences"]:
    """The number of tokens of each sequence: the differences of its offsets.

    **Arguments:** `cu_seqlens`: ints `[..., N + 1]`. For segment ids: `sequence_lengths(segment_ids_to_cu_seqlens(ids, N))`.

    **Returns:** int32 `[..., N]`.

    **Raises:** `ValueError` for an invalid shape or dtype, and for offsets that decrease when their values are known (outside `jit`).
    """
    offsets = read_offsets(cu_seqlens)
    return offsets[..., 1:] - offsets[..., :-1]


def chunk_indices(cu_seqlens: Any, chunk_size: int, max_chunks: int) -> ChunkIndices:
    r"""The sequence that each chunk belongs to, and its index there; chunks restart with every sequence.

    Sequence $n$ has $\lceil (c_{n+1} - c_n) / \text{chunk\_size} \rceil$ chunks, the last of which may be short. So chunk $m$
    begins at token `cu_seqlens[sequence[m]] + chunk[m] * chunk_size`.

    **Arguments:**

    - `cu_seqlens`: offsets, ints `[..., N + 1]`.
    - `chunk_size`: tokens per chunk; static.
    - `max_chunks`: maximum number of chunks; static. `total // chunk_size + N` always suffices.

    **Returns:** `ChunkIndices(sequence, chunk)`, int32 `[..., max_chunks]` each, -1 for unused entries.

    **Raises:** `ValueError` for an invalid shape or dtype, and for more than `max_chunks` chunks when the values are known (outside
    `jit`). Inside `jit`, surplus chunks are dropped.
    """
    offsets = read_offsets(cu_seqlens)
    size = min(read_count("chunk_size", chunk_size, least=1), 2**31 - 1)
    read_count("max_chunks", max_chunks)
    lengths = offsets[..., 1:] - offsets[..., :-1]
    counts = lengths // size + (lengths % size > 0).astype(jnp.int32)
    ends = jnp.cumsum(counts, axis=-1, dtype=jnp.int32)
    values = known(ends)
    if values is not None and (most := int(np.max(values[..., -1:], initial=0))) > max_chunks:
        raise ValueError(
            f"max_chunks: expected at least the number of chunks, {most}, received {max_chunks}; "
            "total // chunk_size + number of sequences always suffices."
        )
    begins = jnp.concatenate([jnp.zeros_like(offsets[..., :1]), ends], axis=-1)
    sequence, there = _numbers(begins, max_chunks)
    first = take_along(begins, sequence, axis=-1)
    chunk = like(jnp.arange(max_chunks, dtype=jnp.int32), first) - first
    return ChunkIndices(jnp.where(there, sequence, -1), jnp.where(there, chunk, -1))


def read_offsets(cu_seqlens: Any, total: int | None = None) -> Array:
    """`cu_seqlens` as int32, checked as far as its values are known."""
    offsets = jnp.asarray(cu_seqlens)
    if offsets.ndim < 1 or offsets.shape[-1] < 1 or not jnp.issubdtype(offsets.dtype, jnp.integer):
        raise ValueError(
            f"cu_seqlens: expected int offsets [..., N + 1] such as [0, 3, 5], received {offsets.dtype} {offsets.shape}; "
            "offsets are the cumulative sum of the lengths after a leading 0."
        )
    return check_offsets("cu_seqlens", offsets.astype(jnp.int32), cu_seqlens, total, limit=f"total={total}")


def read_ids(segment_ids: Any) -> Array:
    ids = jnp.asarray(segment_ids)
    if ids.ndim < 1 or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(
            f"segment_ids: expected ints [..., T], negative for padding, received {ids.dtype} {ids.shape}; cast or stack them."
        )
    return check_int32("segment_ids", ids.astype(jnp.int32), segment_ids)


def spans_of_offsets(offsets: Array, total: int) -> Spans:
    index = like(jnp.arange(total, dtype=jnp.int32), offsets)
    number, real = _numbers(offsets, total)
    following = jnp.minimum(number + 1, offsets.shape[-1] - 1)
    start, end = (take_along(offsets, n, axis=-1) for n in (number, following))
    # Each padding token is a span of its own.
    return Spans(jnp.where(real, start, index), jnp.where(real, end, index + 1), real)


def _numbers(offsets: Array, total: int) -> tuple[Array, Array]:
    """The number of sequences that have ended at each position, at most `N`, and whether the position is in one."""
    index = like(jnp.arange(total, dtype=jnp.int32), offsets)
    return ended(offsets[..., 1:], total), (index >= offsets[..., :1]) & (index < offsets[..., -1:])


_FEW_PAIRS = 2**16


def ended(ends: Array, total: int) -> Array:
    """The number of non-negative `ends` `[..., N]` at or before each of `total` positions.

    Ends are marked and summed, which is linear in positions and ends on any device. Few positions, as when decoding, are compared with each
    end: that is one pass, a launch on a GPU, but XLA stores the comparisons on a CPU. A search would loop, which some versions of JAX cannot map
    over an explicit mesh."""
    sizes = (total, ends.shape[-1])
    if all(isinstance(size, int) for size in sizes) and math.prod(sizes) <= _FEW_PAIRS:
        each = ends[..., None, :]  # [..., 1, N]
        index = like(jnp.arange(total, dtype=ends.dtype)[:, None], each)  # [..., T, 1]
        return jnp.sum(each <= index, axis=-1, dtype=jnp.int32)
    marks = lambda row: jnp.zeros((total,), jnp.int32).at[row].add(1, mode="drop")
    return jnp.vectorize(lambda row: jnp.cumsum(marks(row), dtype=jnp.int32), signature="(n)->(t)")(ends)


def spans_of_ids(ids: Array) -> Spans:
    if ids.shape[-1] == 0:
        return Spans(ids, ids, ids >= 0)
    index = jnp.broadcast_to(jnp.arange(ids.shape[-1], dtype=jnp.int32), ids.shape)
    new, axis = _begins(ids), ids.ndim - 1
    start = jax.lax.cummax(jnp.where(new, index, 0), axis=axis)
    last = padded(new[..., 1:], 0, 1, True)
    end = jax.lax.cummin(jnp.where(last, index + 1, ids.shape[-1]), axis=axis, reverse=True)
    return Spans(start, end, ids >= 0)


def _positions(spans: Spans) -> Array:
    index = like(jnp.arange(spans.start.shape[-1], dtype=jnp.int32), spans.start)
    return jnp.where(spans.real, index - spans.start, 0)


def padded(x: Array, before: int, after: int, value: int | bool) -> Array:
    """`x [..., T]` with entries of this value before and after those of the last axis. It is split over a mesh as `x` is, in JAX 0.12 outside of
    `jax.set_mesh`, too, where `jax.numpy.full_like` fails."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(before, after)], constant_values=value)


def _begins(ids: Array) -> Array:
    """Returns whether a token's id differs from the one before it."""
    changes = ids[..., 1:] != ids[..., :-1]
    return padded(changes, 1, 0, True)


def _offsets_of(ids: Array, max_segments: int) -> Array:
    """The offsets of one row `[T]`."""
    index = jnp.arange(ids.shape[0], dtype=jnp.int32)
    first = jnp.min(jnp.where(ids >= 0, index, ids.shape[0]), initial=ids.shape[0])
    end = jnp.max(jnp.where(ids >= 0, index + 1, 0), initial=0)
    new = _begins(ids) & (index >= first) & (index < end)
    number = jnp.cumsum(new, dtype=jnp.int32) - 1
    # Starts past `max_segments` are dropped; the first of them is where the last kept sequence ends.
    slot = jnp.where(new, number, max_segments + 1)
    return jnp.full((max_segments + 1,), end, jnp.int32).at[slot].set(index, mode="drop")


def _check_runs(ids: Array, max_segments: int) -> None:
    values = known(ids)
    for row in () if values is None or not values.size else values.reshape(-1, ids.shape[-1]):
        real = np.flatnonzero(row >= 0)
        inner = row[real[0] : real[-1] + 1] if real.size else row[:0]
        if np.any(inner < 0):
            raise ValueError(
                f"segment_ids: expected padding only before the first and after the last sequence, received {shown(row)}; "
                "offsets cannot exclude tokens in between: move the padding to the end, or give it its own id."
            )
        runs = int(np.count_nonzero(np.diff(inner))) + bool(inner.size)
        if runs > max_segments:
            raise ValueError(
                f"max_segments: expected at least the number of runs of equal ids, {runs}, received {max_segments}; "
                "raise it to the maximum number of sequences per row."
            )


def read_axis(axis: Any, x: Array) -> int:
    """The axis, counted from the front."""
    axis = operator.index(axis)
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis: expected an axis of x, which has {x.ndim} axes, received {axis}.")
    return axis % x.ndim


def read_count(name: str, value: Any, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(
            f"{name}: expected a static int >= {least}, received {value!r}; {remedy_of_size(value, least)}."
        )
    return int(value)
