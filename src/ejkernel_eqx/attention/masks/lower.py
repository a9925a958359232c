"""The exact lowering of a `Mask`: what kernels take, and only of the rest an array of all pairs.

Each condition of a mask takes the first of these forms that fits. Functions that are known while tracing become one
pattern (`pattern`). Windows, chunks, prefixes, lengths and packed sequences become a static window or a range of keys
for each query (`row_ranges`). Segment ids become one pair of arrays. Blocks stay a map of blocks. Whatever is left
becomes an array of all pairs (`dense`).
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ..._broadcast import like
from ..._shapes import is_symbolic
from ..._values import FAR
from ..spec import RowRanges
from .block_map import BlockMap, check_map
from .dense import both, by_pair, either, of_positions, same_segment, with_types
from .functions import Chunk, Combined, intersection, is_static, PairFunction, Window
from .pattern import Pattern
from .row_ranges import placed, row_ranges, window_ends


class Lowered(NamedTuple):
    """A mask in terms of `AttentionSpec` and `AttentionArrays`; arrays keep their own leading axes."""

    left: int | None
    right: int | None
    offset: int
    rows: RowRanges | None
    segments: tuple[Array, Array] | None
    dense: Array | None
    pattern: Pattern | None = None
    blocks: Array | None = None
    """A map `[..., H or 1, query blocks, key blocks]`."""
    block_size: tuple[int, int] | None = None

    def as_array(self, num_queries: int, num_keys: int) -> Array:
        """Booleans `[..., H or 1, T, S]`."""
        keys = jnp.arange(num_keys)
        if self.rows is None:
            position = jnp.arange(num_queries) + self.offset
            start, end = window_ends(position, self.left, self.right, num_keys)
        else:
            start, end = self.rows.start, self.rows.end
        keys = like(keys, start[..., None])
        seen = ((keys >= start[..., None]) & (keys < end[..., None]))[..., None, :, :]
        if self.segments is not None:
            seen = both(seen, same_segment(*self.segments))
        if self.pattern is not None:
            heads = jnp.arange(self.pattern.heads, dtype=jnp.int32) if self.pattern.heads else None
            index = jnp.arange(num_queries, dtype=jnp.int32)
            seen = both(seen, self.pattern.seen(heads, index, jnp.arange(num_keys, dtype=jnp.int32)))
        if self.blocks is not None:
            assert self.block_size is not None
            seen = both(seen, by_pair(self.blocks, self.block_size, num_queries, num_keys))
        return both(seen, self.dense)


def lower(mask: Any, num_queries: int, num_keys: int, q_offset: Any | None, num_heads: int | None) -> Lowered:
    extra = (mask.functions, mask.tables, mask.maps, mask.unions, mask.complements)
    if not any(extra):
        return _lower_ranges(mask, num_queries, num_keys, q_offset)
    place = _Place(num_queries, num_keys, num_keys - num_queries if q_offset is None else q_offset, num_heads)
    functions, rest = _functions(mask, place)
    offset = place.fixed(mask)
    if functions and offset is not None:
        rest, window = _without_window(rest)
        functions = (*window, *functions)
    lowered = _lower_ranges(rest, num_queries, num_keys, q_offset)
    dense, pattern = lowered.dense, None
    if functions and offset is not None:
        pattern = Pattern.make(intersection(functions), offset, num_heads)
    else:
        rest = dataclasses.replace(rest, functions=functions + rest.functions)
    if rest.functions:
        positions = placed(rest, num_queries, num_keys, place.offset)[2]
        seen = of_positions(intersection(rest.functions), positions, num_keys, num_heads)
        dense = both(seen, dense)
    array_of = lambda part: part.as_array(num_queries, num_keys, q_offset=q_offset, num_heads=num_heads)
    for union in rest.unions:
        dense = both(functools.reduce(either, map(array_of, union)), dense)
    for part in rest.complements:
        dense = both(~array_of(part), dense)
    blocks, size = None, None
    for one in rest.maps:
        check_map(one.block_map.shape, one.size, place.queries, place.keys, place.heads)
        if size in (None, one.size):
            blocks, size = one.block_map if blocks is None else both(one.block_map, blocks), one.size
        else:
            dense = both(by_pair(one.block_map, one.size, num_queries, num_keys), dense)
    if blocks is not None and blocks.ndim == 2:
        blocks = blocks[None]
    return lowered._replace(dense=dense, pattern=pattern, blocks=blocks, block_size=size)


class _Place(NamedTuple):
    """Sizes and offset that a mask is lowered for."""

    queries: int
    keys: int
    offset: Any
    heads: int | None

    def fixed(self, mask: Any) -> int | None:
        """The position of the first query if it is known while tracing, and those of the others follow."""
        # Packed queries may have other positions than their own index.
        apart = mask.cu_seqlens is not None and mask.cu_seqlens[0] is not mask.cu_seqlens[1]
        symbolic = is_symbolic(self.queries) or is_symbolic(self.keys)
        return self.offset if isinstance(self.offset, int) and not (symbolic or apart) else None


def _functions(mask: Any, place: _Place) -> tuple[tuple[PairFunction, ...], Any]:
    """The functions that hold for a mask besides its other conditions, and a mask of those."""
    functions, tables = [f for f in mask.functions if is_static(f)], []
    for table in mask.tables:
        check_map(table.table.shape, table.size, place.queries, place.keys, place.heads)
        fixed = place.fixed(mask)
        if fixed is None:
            tables.append(BlockMap(jnp.asarray(table.table), table.size))
        else:
            functions.append(dataclasses.replace(table, offset=fixed))
    rest: dict[str, tuple[Any, ...]] = {"tables": (), "maps": (*mask.maps, *tables)}
    rest["functions"] = tuple(f for f in mask.functions if not is_static(f))
    for field, how in (("unions", "|"), ("complements", "~")):
        rest[field] = ()
        for entry in getattr(mask, field):
            parts = [_as_function(part, place) for part in (entry if how == "|" else (entry,))]
            known = tuple(part for part in parts if part is not None)
            if len(known) == len(parts):
                functions.append(Combined(how, known))
            else:
                rest[field] += (entry,)
    return tuple(functions), dataclasses.replace(mask, **rest)


def _as_function(mask: Any, place: _Place) -> PairFunction | None:
    """The whole mask as a function, if it is known while tracing."""
    functions, rest = _functions(mask, place)
    rest, window = _without_window(rest)
    if rest.functions or jax.tree.leaves(rest) or place.fixed(mask) is None:
        return None
    functions = (*window, *functions)
    return intersection(functions) if functions else Window(None, None)


def _without_window(mask: Any) -> tuple[Any, tuple[PairFunction, ...]]:
    """A mask without its static window and chunks, and those as functions. In packed sequences, chunks count from each one's start."""
    if mask.cu_seqlens is not None:
        return mask, ()
    left, right = _static_window(mask)
    functions: list[PairFunction] = [Chunk(size) for size in mask.chunk_sizes]
    if left is not None or right is not None:
        functions.insert(0, Window(left, right))
    return dataclasses.replace(mask, is_causal=False, window=(None, None), chunk_sizes=()), tuple(functions)


def _static_window(mask: Any) -> tuple[int | None, int | None]:
    """The sides of the window with causality in it, bounded so that sums with positions fit 32 bits; no sequence is as long."""
    left, right = [None if side is None else min(side, 2 * FAR) for side in mask.window]
    return left, 0 if mask.is_causal and (right is None or right > 0) else right


def _lower_ranges(mask: Any, num_queries: int, num_keys: int, q_offset: Any | None) -> Lowered:
    left, right = _static_window(mask)
    if q_offset is None:
        q_offset = num_keys - num_queries
    pairs = mask.segments
    segments, dense = (pairs[0] if pairs else None), mask.dense
    for pair in pairs[1:]:
        dense = both(same_segment(*pair), dense)
    by_window = isinstance(q_offset, int) and not (mask.chunk_sizes or mask.windows or mask.chunks)
    ranges = (mask.prefix_lengths, mask.q_lengths, mask.kv_lengths, mask.cu_seqlens)
    _check_types(mask, num_queries, num_keys)
    if by_window and all([r is None for r in ranges]) and not mask.type_runs:
        if mask.types:
            dense = with_types(
                mask.types, dense, jnp.arange(num_queries, dtype=jnp.int32) + q_offset, num_keys
            )
        return Lowered(left, right, int(q_offset), None, segments, dense)
    rows = row_ranges(mask, left, right, num_queries, num_keys, q_offset)
    dense = with_types(mask.types, dense, rows.position, num_keys)
    return Lowered(None, None, 0, rows, segments, dense)


def _check_types(mask: Any, num_queries: int, num_keys: int) -> None:
    for q_ids, kv_ids in (*mask.types, *mask.type_runs):
        if q_ids.shape[-1] != num_queries or kv_ids.shape[-1] != num_keys:
            raise ValueError(
                f"mask: expected token types for {num_queries} queries and {num_keys} keys, received {q_ids.shape} and "
                f"{kv_ids.shape}; pass both to Mask.token_types."
            )
