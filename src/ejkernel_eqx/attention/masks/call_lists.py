"""The lists of tiles that a call's kernels run: constants of a pattern, or built on the device from what arrays hide as well."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..._take import take_along
from ..reference import visible
from ..spec import AttentionArrays, AttentionSpec
from .tile_lists import grids_of, lists_of
from .tile_shape import FULL, NONE, PARTIAL, Shape
from .tile_table import overlap


class TileLists(NamedTuple):
    """`PatternLists` on the device."""

    row: Array  # int32 [B, H]: the row of lists of every head
    tiles: Array
    entries: Array
    patterns: Array
    bits: Array | None
    blind: bool


def tile_lists(arrays: AttentionArrays, spec: AttentionSpec, shape: Shape) -> TileLists:
    """The lists of a call. If arrays hide something, each list has room for all tiles."""
    data = arrays.rows is not None or arrays.q_segments is not None or arrays.blocks is not None
    if spec.pattern is not None and not data:
        heads, *parts, blind = lists_of(spec.pattern, shape)
        row = heads[None] if arrays.heads is None else jnp.asarray(heads)[arrays.heads]
        return TileLists(_every_head(row, arrays), *jax.tree.map(jnp.asarray, parts), blind=blind)
    kinds, patterns, bits = kinds_of(arrays, spec, shape)
    rows = jnp.arange(kinds.shape[0] * kinds.shape[1], dtype=jnp.int32).reshape(kinds.shape[:2])
    merge = lambda x: x.reshape(-1, *x.shape[2:])
    kinds, patterns = merge(kinds), merge(jnp.broadcast_to(patterns, kinds.shape))
    if shape.by_key:
        kinds, patterns = kinds.mT, patterns.mT
    many, count, others = kinds.shape
    # Sorted by kind and then number, as one number: whole tiles, then partly visible ones.
    number = jnp.arange(others, dtype=jnp.int32)[None, None]
    order = jnp.sort((FULL - kinds).astype(jnp.int32) * others + number, axis=-1) % max(others, 1)
    whole, some = ((kinds >= kind).sum(-1, dtype=jnp.int32) for kind in (FULL, PARTIAL))
    first = jnp.arange(many * count, dtype=jnp.int32).reshape(many, count) * others
    tile = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), first.shape)
    ahead = lambda x: jnp.pad(x.reshape(-1).astype(jnp.int32), (0, 1))
    entries = ahead(order)
    at = first + whole
    none = jnp.zeros_like(first)
    records = tile, first, at, first + some, none, entries[first], entries[at], none
    return TileLists(
        _every_head(rows, arrays),
        jnp.stack(records, axis=-1)[:, ::-1],  # the last first, as causal masks have the most keys there
        entries,
        ahead(take_along(patterns, order, axis=-1)),
        bits,
        True,
    )


def _every_head(row: Array | np.ndarray, arrays: AttentionArrays) -> Array:
    every = (arrays.q.shape[0], arrays.q.shape[2])
    # A constant stays one, which takes no launch.
    library = np if isinstance(row, np.ndarray) else jnp
    return jnp.asarray(library.broadcast_to(row, every))


def kinds_of(arrays: AttentionArrays, spec: AttentionSpec, shape: Shape) -> tuple[Array, Array, Array | None]:
    """Kinds and the numbers of bits of all tiles, `[B or 1, H or 1, query tiles, key tiles]`, and the bits."""
    touched, whole = overlap(arrays, spec, shape.block_q, shape.block_k)
    kinds = jnp.where(whole, FULL, jnp.where(touched, PARTIAL, NONE)).astype(jnp.int8)[:, None]
    if arrays.blocks is not None:
        assert spec.block_size is not None
        kinds = jnp.minimum(kinds, _of_map(arrays.blocks, spec.block_size, shape))
    if spec.pattern is None:
        return kinds, jnp.zeros((1, 1, 1, 1), jnp.int32), None
    heads, pattern_kinds, numbers, bits = grids_of(spec.pattern, shape)
    pattern_kinds, numbers = jnp.asarray(pattern_kinds)[None], jnp.asarray(numbers)[None]
    if arrays.heads is not None:
        row = jnp.asarray(heads)[arrays.heads[0]]
        pattern_kinds, numbers = pattern_kinds[:, row], numbers[:, row]
    return jnp.minimum(kinds, pattern_kinds), numbers, jnp.asarray(bits)


def _of_map(blocks: Array, size: tuple[int, int], shape: Shape) -> Array:
    """Kinds of tiles from a map of blocks `[.., M, N]`: from sums over all blocks that begin at the first."""
    sums = jnp.pad(blocks.astype(jnp.int32).cumsum(-2).cumsum(-1), ((0, 0), (0, 0), (1, 0), (1, 0)))
    lengths, tiles = (shape.queries, shape.keys), (shape.block_q, shape.block_k)
    (top, bottom), (left, right) = (
        _covered(length, tile, block) for length, tile, block in zip(lengths, tiles, size, strict=True)
    )
    at = lambda rows, columns: sums[:, :, rows][..., columns]
    count = at(bottom, right) - at(top, right) - at(bottom, left) + at(top, left)
    area = jnp.asarray((bottom - top)[None, None, :, None] * (right - left), jnp.int32)
    return jnp.where(count == area, FULL, jnp.where(count > 0, PARTIAL, NONE)).astype(jnp.int8)


def _covered(length: int, tile: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """First and one-past-last block that each tile touches."""
    first = np.arange(0, length, tile)
    return first // block, (np.minimum(first + tile, length) - 1) // block + 1


def without_lists(arrays: AttentionArrays, spec: AttentionSpec) -> tuple[AttentionArrays, AttentionSpec]:
    """Turns pattern and map of blocks of a call into a mask of all scores."""
    alone = arrays._replace(rows=None, q_segments=None, kv_segments=None)
    mask = visible(alone, dataclasses.replace(spec, left=None, right=None))
    spec = dataclasses.replace(spec, pattern=None, block_size=None, mask_run=1)
    return arrays._replace(mask=mask, blocks=None, heads=None), spec
