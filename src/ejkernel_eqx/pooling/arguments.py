"""Checks what a user passes to a pooling and resolves it to `PoolArrays`."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .._jitted import compiled_once
from .._values import check_between, checked, known
from ..core.arguments import array, check_flags, is_finite
from ..sequences.packing import read_count
from ..sequences.rows import read_packing
from . import tables
from .spec import num_segments, PoolArrays, PoolSpec, REDUCTIONS

_MOST = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of an operation, checked."""

    reduction: str
    chunk_size: int | None
    normalize: bool
    eps: float
    num_segments: int | None
    max_chunks: int | None
    indices_are_sorted: bool

    def __post_init__(self):
        if self.reduction not in REDUCTIONS:
            words = ", ".join(map(repr, REDUCTIONS[:-1]))
            raise ValueError(
                f"reduction: expected {words} or {REDUCTIONS[-1]!r}, received {self.reduction!r}."
            )
        check_flags(normalize=self.normalize, indices_are_sorted=self.indices_are_sorted)
        for name, least in (("chunk_size", 1), ("num_segments", 0), ("max_chunks", 0)):
            value = getattr(self, name)
            if value is not None and read_count(name, value, least) > _MOST:
                raise ValueError(f"{name}: expected at most {_MOST}, received {value}.")
        if self.max_chunks is not None and self.chunk_size is None:
            raise ValueError(
                f"max_chunks: expected None without chunk_size, received {self.max_chunks}; it bounds the chunks of packed sequences."
            )
        if not (is_finite(self.eps) and self.eps > 0):
            raise ValueError(f"eps: expected a finite number > 0, received {self.eps!r}.")


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A resolved call."""

    arrays: PoolArrays
    spec: PoolSpec
    is_row: bool
    """Whether a row has one result, without an axis of segments."""

    @property
    def shape(self) -> tuple[Any, ...]:
        """That of the results."""
        *lead, _, channels = self.arrays.x.shape
        return (*lead, num_segments(self.arrays, self.spec), channels)

    def finish(self, out: Array) -> Array:
        return jnp.squeeze(out, -2) if self.is_row else out


def resolve(options: Options, x: Any, mask: Any, lengths: Any, cu_seqlens: Any, segment_ids: Any) -> Call:
    x = array("x", x, "T C")
    lead, length = x.shape[:-2], x.shape[-2]
    if lengths is not None and (cu_seqlens is not None or segment_ids is not None):
        raise ValueError(
            "lengths: expected None with cu_seqlens or segment_ids, received both; they already define which tokens are padding."
        )
    packing = read_packing(cu_seqlens, segment_ids, lead, length, reverse=False)
    _check_packed(options, cu_seqlens is not None, segment_ids is not None)
    real = _real(mask, lengths, lead, length)
    chunk = None if options.chunk_size is None else int(options.chunk_size)
    spec = PoolSpec(options.reduction, chunk, real is not None, bool(options.normalize), float(options.eps))
    offsets, order = packing.offsets, None
    if segment_ids is not None:
        ids, count = _ids(options, segment_ids, (*lead, length))
        offsets, order = compiled_once(tables.by_id, count, bool(options.indices_are_sorted))(ids)
    # Against a number of chunks known offsets are checked, which a compiled function does not know; and without tables it would do nothing.
    is_plain = options.max_chunks is not None or (real is None and offsets is None)
    build: Any = functools.partial if is_plain else compiled_once
    arrays = build(arrays_of, spec, options.max_chunks)(x, real, offsets, order)
    return Call(arrays, spec, offsets is None and chunk is None)


def arrays_of(
    spec: PoolSpec,
    max_chunks: int | None,
    x: Array,
    real: Array | None,
    offsets: Array | None,
    order: Array | None,
) -> PoolArrays:
    """The arrays of a call with the `real` tokens (`None`: all), packed between `offsets` of places if there
    are any."""
    length, table = x.shape[-2], {}
    if offsets is not None and spec.chunk is not None:
        # Each sequence adds at most one short chunk, so this bound holds for any offsets.
        most = length // spec.chunk + offsets.shape[-1] - 1 if max_chunks is None else max_chunks
        table = tables.of_chunks(offsets, order, real, length, spec.chunk, most)
    elif offsets is not None:
        table = tables.of_ranges(offsets[..., :-1], offsets[..., 1:], order, real, length)
    elif real is not None:
        table = tables.of_rows(length, spec.chunk, num_segments(PoolArrays(x), spec), real)
    arrays = PoolArrays(x, **table)
    if spec.reduction != "last" or arrays.segment is None:
        return arrays
    return arrays._replace(last=tables.last_of(arrays.segment, num_segments(arrays, spec)))


def _check_packed(options: Options, has_offsets: bool, has_ids: bool) -> None:
    if options.num_segments is not None and not has_ids:
        raise ValueError(
            f"segment_ids: expected ids for num_segments={options.num_segments}, received None; "
            "without ids, leave num_segments out."
        )
    if options.max_chunks is not None and not (has_offsets or has_ids):
        raise ValueError(
            f"cu_seqlens, segment_ids: expected one of them with max_chunks={options.max_chunks}, received neither; rows of one sequence "
            "have ceil(T / chunk_size) chunks."
        )


def _real(mask: Any, lengths: Any, lead: tuple[int, ...], length: int) -> Array | None:
    """The tokens that are pooled, bool `[*, T]`; `None` for all."""
    real = None
    if mask is not None:
        real = jnp.asarray(mask)
        if real.dtype != jnp.bool_:
            raise ValueError(
                f"mask: expected booleans, true for tokens to pool, received dtype {real.dtype}; pass mask != 0."
            )
        real = _over("mask", real, (*lead, length))
    if lengths is not None:
        sizes = jnp.asarray(lengths)
        if not jnp.issubdtype(sizes.dtype, jnp.integer):
            raise ValueError(
                f"lengths: expected ints, one per row {lead} or a scalar, received dtype {sizes.dtype}."
            )
        remedy = "they count the tokens of each row from its first"
        sizes = check_between("lengths", sizes.astype(jnp.int32), lengths, 0, length, remedy)
        inside = tables.before(_over("lengths", sizes, lead), length)
        real = inside if real is None else real & inside
    return real


def _over(name: str, x: Array, shape: tuple[int, ...]) -> Array:
    try:
        return jnp.broadcast_to(x, shape)
    except ValueError:
        raise ValueError(
            f"{name}: expected a shape that broadcasts to {shape}, received {x.shape}."
        ) from None


def _ids(options: Options, segment_ids: Any, shape: tuple[int, ...]) -> tuple[Array, int]:
    """The ids as int32 `[*, T]`, and how many segments there are."""
    ids = jnp.broadcast_to(jnp.asarray(segment_ids).astype(jnp.int32), shape)
    count = options.num_segments
    if count is None:
        values = known(segment_ids)
        if values is None:
            raise ValueError(
                "num_segments: expected the number of segments, a size of the result, because the ids are traced; received None; "
                "pass MeanPooling(num_segments=...)."
            )
        # All ids may be padding, which leaves no segment.
        count = max(0, int(values.max()) + 1) if values.size else 0
    count = int(count)
    say = lambda value: (
        f"segment_ids: expected ids below num_segments={count}, received {value}; raise num_segments, or use -1 for padding."
    )
    ids = checked(ids, segment_ids, lambda x: x >= count, say, lambda values: str(values.max()))
    return (_sorted(ids, segment_ids) if options.indices_are_sorted else ids), count


def _sorted(ids: Array, given: Any) -> Array:
    def falls(x: Any) -> Any:
        if x.shape[-1] == 0:
            return x < 0
        before = np.maximum.accumulate(x, -1) if isinstance(x, np.ndarray) else lax.cummax(x, x.ndim - 1)
        # Padding may stand anywhere: its negative ids are no decrease.
        return (x >= 0) & (x < before)

    say = lambda value: (
        f"segment_ids: expected ids that never decrease, with indices_are_sorted=True, received {value}; sort the tokens, or leave it out."
    )
    return checked(ids, given, falls, say)
