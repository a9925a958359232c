"""Cumulative sums that restart at every chunk or sequence, as gated recurrences compute from their log-decays."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from .._broadcast import like
from .packing import read_axis, read_count, read_ids, read_offsets, Spans, spans_of_ids, spans_of_offsets


def chunk_local_cumsum(
    x: Any,
    chunk_size: int,
    *,
    axis: int,
    reverse: bool = False,
    cu_seqlens: Any | None = None,
    segment_ids: Any | None = None,
) -> Float[Array, "..."]:
    r"""Cumulative sums from the beginning of each chunk: $y_t = \sum_{s = b(t)}^{t} x_s$, where $b(t)$ is the first token of $t$'s chunk.

    With `reverse`, sums to its end: $y_t = \sum_{s=t}^{e(t)} x_s$, where $e(t)$ is the chunk's last token. Either way,
    chunks are counted from the beginning of each sequence and never extend into the next. The last chunk of a sequence
    may be short.

    **Arguments:**

    - `x`: floats; `axis` is the token axis, of length `T`.
    - `chunk_size`: tokens per chunk; static.
    - `cu_seqlens`: offsets of packed sequences, ints `[N + 1]`, the same for all rows; or
    - `segment_ids`: ints that broadcast to the axes of `x` up to `axis`, such as `[B, T]` or `[T]`; each run of equal ids is a
        sequence, negative ids are padding. Pass at most one of the two; without either, the row is one sequence.

    **Returns:** an array in the shape of `x`, computed in float32 (float64 for float64). Outputs at padding are 0 even if it holds NaN, and
    its gradient is 0.

    **Raises:** `ValueError` for invalid arguments.
    """
    x, axis = _check(x, axis)
    # A chunk ends with the row at the latest, and a row without tokens still needs a divisor.
    size = min(read_count("chunk_size", chunk_size, least=1), max(x.shape[axis], 1))
    spans = _spans(x, axis, cu_seqlens, segment_ids)
    index = like(jnp.arange(x.shape[axis], dtype=jnp.int32), spans.start)
    start = spans.start + (index - spans.start) // size * size
    spans = Spans(start, jnp.minimum(start + size, spans.end), spans.real)
    return _within(x, axis, spans, size, reverse)


def chunk_global_cumsum(
    x: Any,
    *,
    axis: int,
    reverse: bool = False,
    cu_seqlens: Any | None = None,
    segment_ids: Any | None = None,
) -> Float[Array, "..."]:
    r"""Cumulative sums from the beginning of each sequence: $y_t = \sum_{s = b(t)}^{t} x_s$, where $b(t)$ is its first token.

    With `reverse`, sums to its end. Nothing is summed across sequences, so neither large values nor NaNs of one affect another.

    **Arguments**, **returns**, **raises:** as for [`ejkernel_eqx.sequences.chunk_local_cumsum`][], without `chunk_size`.
    """
    x, axis = _check(x, axis)
    if cu_seqlens is None and segment_ids is None:
        return jax.lax.cumsum(x, axis=axis, reverse=reverse)
    return _within(x, axis, _spans(x, axis, cu_seqlens, segment_ids), x.shape[axis], reverse)


def running_count(marks: Array, axis: int) -> Array:
    """How many of the booleans up to each place are True, int32, for the indices of a gather or a scatter. XLA for GPUs would compute such a sum
    again for every element that is moved: a barrier keeps it apart."""
    return jax.lax.optimization_barrier(jnp.cumsum(marks, axis=axis, dtype=jnp.int32))


def _check(x: Any, axis: int) -> tuple[Array, int]:
    """`x` in the dtype of the sums, and the axis counted from the front."""
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x: expected floats, received dtype {x.dtype}; cast it first.")
    return x.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32), read_axis(axis, x)


def _spans(x: Array, axis: int, cu_seqlens: Any | None, segment_ids: Any | None) -> Spans:
    length = x.shape[axis]
    if cu_seqlens is not None and segment_ids is not None:
        raise ValueError("segment_ids: expected None with cu_seqlens, received both; pass one of the two.")
    if cu_seqlens is not None:
        offsets = read_offsets(cu_seqlens, length)
        if offsets.ndim != 1:
            raise ValueError(
                f"cu_seqlens: expected offsets [N + 1] for all rows, received shape {offsets.shape}; use jax.vmap for rows with different offsets."
            )
        return spans_of_offsets(offsets, length)
    if segment_ids is None:
        whole = jnp.zeros((length,), jnp.int32)
        return Spans(whole, whole + length, whole == 0)
    ids = read_ids(segment_ids)
    rows = x.shape[: axis + 1]
    if ids.shape[-1] != length or not _broadcasts(ids.shape, rows):
        raise ValueError(
            f"segment_ids: expected a shape that broadcasts to {rows}, the axes of x up to axis={axis}, received {ids.shape}; "
            "move the token axis after the axes that have their own ids."
        )
    return spans_of_ids(ids)


def _broadcasts(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    return len(shape) <= len(whole) and all(
        size in (1, full) for size, full in zip(shape[::-1], whole[::-1], strict=False)
    )


def _within(x: Array, axis: int, spans: Spans, longest: int, reverse: bool) -> Array:
    """Cumulative sums within `spans`, none longer than `longest`.

    Each round adds the partial sum that ends (begins) where this one begins (ends), which doubles their span. Unlike a difference
    of two global sums, this never adds and subtracts values of other spans.
    """
    length = x.shape[axis]
    index = like(jnp.arange(length, dtype=jnp.int32), spans.start)
    before = spans.end - 1 - index if reverse else index - spans.start
    before, real = (like(y.reshape(y.shape + (1,) * (x.ndim - axis - 1)), x) for y in (before, spans.real))
    # Padding is cleared before the first sum, so that NaN in it reaches no token.
    total = jnp.where(real, x, jnp.zeros_like(x))
    shift = 1
    while shift < min(longest, length):
        total = total + jnp.where(before >= shift, shifted(total, axis, shift, reverse), jnp.zeros_like(x))
        shift *= 2
    return total


def shifted(x: Array, axis: int, shift: int, reverse: bool) -> Array:
    """Token `t - shift` (`t + shift`) at position `t`, 0 if there is none."""
    kept = x.shape[axis] - shift
    zeros = jnp.zeros_like(jax.lax.slice_in_dim(x, 0, shift, axis=axis))
    first = shift if reverse else 0
    moved = jax.lax.slice_in_dim(x, first, first + kept, axis=axis)
    return jnp.concatenate([moved, zeros] if reverse else [zeros, moved], axis=axis)
