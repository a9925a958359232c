"""Defines where blocks and compressed keys are: tables for packed sequences, made on the device, and the tokens that a compressed key stands for."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from .._broadcast import like
from ..core.arguments import accumulator
from ..core.copies import copied
from ..parallel.mesh import gathered
from ..sequences.packing import ended, Spans, spans_of_ids, spans_of_offsets


class Tables(NamedTuple):
    """The integer arrays of `NativeArrays` of a packed call, and the first token of each compressed key, `[*, C]`, past the last one for none."""

    position: Array
    first: Array
    seen: Array
    base: Array
    begin: Array
    compressed_begin: Array


def of_offsets(offsets: Array, length: int, block: int, span: int, stride: int) -> Tables:
    """`offsets [N + 1]`; tokens outside of them are padding."""
    # Tokens past the last sequence read its entries, and `spans.real` hides what they find.
    sequence = jnp.minimum(ended(offsets[1:], length), max(offsets.shape[0] - 2, 0))
    spans = spans_of_offsets(offsets, length)
    return _of_sequences(offsets[:-1], offsets[1:], sequence, spans, block, span, stride)


def of_ids(ids: Array, most: int, block: int, span: int, stride: int) -> Tables:
    """`ids [*, T]`: a run of equal ids is a sequence, negative ones are padding, and so are sequences after the first `most` of a row."""
    if ids.ndim > 1:
        return jax.vmap(lambda row: of_ids(row, most, block, span, stride))(gathered(ids, -1))
    length, spans = ids.shape[0], spans_of_ids(ids)
    # The count rises at the first token of each sequence, so all its tokens have one number.
    number = jnp.cumsum(spans.real & (spans.start == jnp.arange(length, dtype=jnp.int32)), dtype=jnp.int32)
    real = spans.real & (number <= most)
    # Tokens of no sequence point past the end, where their writes are dropped.
    at = jnp.where(real, number - 1, most)
    starts = jnp.full(most, length, jnp.int32).at[at].set(spans.start, mode="drop")
    ends = jnp.full(most, length, jnp.int32).at[at].set(spans.end, mode="drop")
    sequence = jnp.clip(number - 1, 0, max(most - 1, 0))
    return _of_sequences(starts, ends, sequence, spans._replace(real=real), block, span, stride)


def _of_sequences(
    starts: Array, ends: Array, sequence: Array, spans: Spans, block: int, span: int, stride: int
) -> Tables:
    """The first token and the end of each sequence, `[N]`, and the sequence of each token, `[T]`."""
    (count,), (length,), sizes = starts.shape, sequence.shape, ends - starts
    base, begin = _placed(starts, -(-sizes // block), length // block + count, block, length)
    # A compressed key needs a whole span, so a shorter sequence has none.
    compressed = jnp.maximum((sizes - span) // stride + 1, 0)
    most = num_compressed(length, span, stride, True)
    seen, compressed_begin = _placed(starts, compressed, most, stride, length)
    take = lambda x: jnp.where(spans.real, x[sequence], 0) if count else jnp.zeros(length, jnp.int32)
    position = jnp.where(spans.real, jnp.arange(length, dtype=jnp.int32), -1)
    first = jnp.where(spans.real, spans.start, 0)
    return Tables(position, first, take(seen), take(base), begin, compressed_begin)


def _placed(starts: Array, counts: Array, most: int, step: int, length: int) -> tuple[Array, Array]:
    """The first number of each sequence if those of all are counted one after the other, `[N]`; the first token of each, `[most]`."""
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    before = ends - counts
    number = jnp.arange(most, dtype=jnp.int32)
    sequence = ended(ends, most)
    is_used = sequence < counts.shape[0]
    sequence = jnp.minimum(sequence, max(counts.shape[0] - 1, 0))
    # Without sequences there is no entry to read.
    if not counts.shape[0]:
        return before, jnp.full(most, length, jnp.int32)
    begin = starts[sequence] + (number - before[sequence]) * step
    return before, jnp.where(is_used, begin, length).astype(jnp.int32)


def num_compressed(length: int, span: int, stride: int, packed: bool) -> int:
    """The size of the axis of compressed keys, at least 1."""
    # In a packed row the number is data, so the axis has room for the most that there can be.
    return max(1, length // stride if packed else (length - span) // stride + 1)


def means(x: Array, span: int, stride: int, begin: Array | None) -> Array:
    """Compressed keys or values `[..., C, K, D]`: the means of their tokens, in the dtype of `x [..., S, K, D]`."""
    return jnp.mean(tokens_of(x, span, stride, begin), -3, dtype=accumulator(x.dtype)).astype(x.dtype)


def tokens_of(x: Array, span: int, stride: int, begin: Array | None = None) -> Array:
    """The tokens of each compressed key, `[..., C, span, K, D]` from `[..., S, K, D]`; zeros for one that does not exist."""
    if begin is not None and begin.ndim > 1:
        return jax.vmap(lambda x, begin: tokens_of(x, span, stride, begin))(x, begin)
    length, lead = x.shape[-3], x.shape[:-3]
    count = num_compressed(length, span, stride, begin is not None)
    if length == 0:
        return jnp.zeros((*lead, count, span, *x.shape[-2:]), x.dtype)
    # Spans side by side are a reshape, which reads nothing twice.
    if begin is None and span == stride and length >= span:
        return x[..., : count * span, :, :].reshape(*lead, count, span, *x.shape[-2:])
    if begin is None:
        begin = jnp.arange(count, dtype=jnp.int32) * stride
    at = begin[:, None] + jnp.arange(span, dtype=jnp.int32)[None]  # [C, span]
    is_used = (at[:, -1:] < length) & (begin[:, None] < length)
    at = jnp.where(is_used, at, 0)
    # A part for each stride of a span: none has a token twice, so the order in which a GPU adds up gradients does not matter.
    take = lambda x, at: jnp.concatenate(
        [jnp.take(x, part, axis=-3) for part in jnp.split(at, span // stride, 1)], -3
    )
    found = copied(take, x, at)
    return jnp.where(like(is_used[..., None, None], found), found, 0)
