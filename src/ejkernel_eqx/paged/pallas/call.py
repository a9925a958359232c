"""The configurations of this family's Pallas kernels, and a call as they see it: without leading axes, with pages as matrices."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from ...launch.fields import Checked, Count
from ...launch.sizes import cdiv
from ..flat import FlatCall
from ..spec import PAGES

LANES = 128
_MOST_PAGES = 32


@dataclasses.dataclass(frozen=True)
class PallasConfig(Checked):
    """`decode_queries`: the most queries of a sequence that the kernel for few of them takes, in blocks of at least `decode_keys` keys, as far
    as whole pages allow; the other kernel takes the others in tiles of `block_q` queries and blocks of at least `block_k` keys. `cores`: the
    cores of the device that share the sequences."""

    decode_queries: Count
    decode_keys: Count
    block_q: Count
    block_k: Count
    cores: Count = 1


class Call(FlatCall):
    """One call, with pages as matrices."""

    @property
    def page(self) -> int:
        """Keys of a page."""
        return self.arrays.k.shape[1]

    @property
    def rows(self) -> int:
        """Rows of a page as a matrix: all heads of a key, one after the other."""
        return self.page * self.kv_heads

    @property
    def pages(self) -> dict[str, Array]:
        """The pages as matrices `[P, p * K, D]`: the same bytes, as all heads of a key follow one another."""
        given = {name: x for name in PAGES if (x := getattr(self.arrays, name)) is not None}
        return {name: x.reshape(x.shape[0], self.rows, x.shape[-1]) for name, x in given.items()}

    def by_token(self, name: str) -> bool:
        """Reports whether one kind of pages has a scale for each token and head."""
        return self.spec.scales == "token" and getattr(self.arrays, f"{name}_scale") is not None


class Ranges(NamedTuple):
    """int32 in scalar memory: the items of a launch, each some queries of one sequence, `[I]` except where it is said."""

    count: Array  # [1]: the number of items
    order: Array  # the items first, then what has no queries
    row: Array  # the sequence
    token: Array  # the first query's place among the packed ones
    queries: Array  # the number of queries
    position: Array  # the position of the first query
    first: Array  # the first key that any of them sees
    page: Array  # the first page of these keys
    pages: Array  # the number of pages from there to the last key, at least 1
    holes: Array  # 1 if one of these pages is missing
    table: Array  # [N * M], -1 for a missing page


def few_queries(call: Call, most: int, align: int) -> Ranges:
    """An item for every sequence with up to `most` queries. First pages are multiples of `align`."""
    row = jnp.arange(call.sequences, dtype=jnp.int32)
    queries = jnp.minimum(call.arrays.q_len, call.spec.max_query_len)
    # Longer sequences belong to the other kernel and have no queries here.
    queries = jnp.where(queries <= most, queries, 0)
    # Stable, so that items keep the order of their sequences; those without queries come last.
    order = jnp.argsort(queries <= 0, stable=True).astype(jnp.int32)
    return _ranges(call, order, row, jnp.zeros_like(row), queries, align)


def tiles_of_queries(call: Call, more: int, size: int, align: int) -> Ranges:
    """Items of up to `size` queries of the sequences with more than `more`."""
    length = jnp.minimum(call.arrays.q_len, call.spec.max_query_len)
    length = jnp.where(length > more, length, 0)
    tiles = (length + size - 1) // size
    ends = jnp.cumsum(tiles, dtype=jnp.int32)
    tokens = call.arrays.q.shape[0]
    # A bound for all lengths: each sequence has at most one tile that is not full.
    item = jnp.arange(tokens // size + min(call.sequences, tokens // (more + 1)), dtype=jnp.int32)
    row = jnp.minimum(jnp.sum(ends[None] <= item[:, None], axis=1, dtype=jnp.int32), call.sequences - 1)
    start = (item - ends[row] + tiles[row]) * size
    return _ranges(call, item, row, start, jnp.clip(length[row] - start, 0, size), align)


def _ranges(call: Call, order: Array, row: Array, start: Array, queries: Array, align: int) -> Ranges:
    """The items of queries `start` to `start + queries - 1` of a sequence each."""
    arrays, left = call.arrays, call.spec.left
    width = arrays.page_table.shape[-1]
    position = (arrays.kv_len - arrays.q_len)[row] + start
    first = jnp.zeros_like(position) if arrays.kv_start is None else jnp.maximum(arrays.kv_start[row], 0)
    first = first if left is None else jnp.maximum(first, position - left)
    # Lengths are data and may exceed the table, past which there is no page.
    end = jnp.clip(position + queries, 0, width * call.page)
    page = jnp.clip(first // call.page, 0, width - 1) // align * align
    pages = jnp.maximum((end + call.page - 1) // call.page - page, 1)
    table = arrays.page_table
    # One mark for all missing pages, so that the kernel compares with 0 only.
    table = jnp.where((table >= 0) & (table < arrays.k.shape[0]), table, -1)
    index = jnp.arange(width, dtype=jnp.int32)[None]
    used = (index >= page[:, None]) & (index < (page + pages)[:, None])
    holes = jnp.any(used & (table[row] < 0), axis=1).astype(jnp.int32)
    count, token = jnp.sum(queries > 0, dtype=jnp.int32)[None], arrays.q_start[row] + start
    table = table.reshape(-1)
    return Ranges(count, order, row, token, queries, position, first, page, pages, holes, table)


def page_unit(columns: int) -> int:
    """The pages whose columns, so many each, fill whole registers."""
    return LANES // math.gcd(LANES, columns)


def block_pages(page: int, columns: int, keys: int) -> int:
    """The number of pages in a block of about `keys` keys: their columns fill whole registers if they can, and pages have one bit each of an
    int32."""
    unit = min(page_unit(columns), _MOST_PAGES)
    return max(unit, min(cdiv(cdiv(keys, page), unit) * unit, _MOST_PAGES // unit * unit))


def row_tile(rows: int, dtype: Any) -> int:
    """Rows padded to whole tiles of memory."""
    tile = 32 // jnp.dtype(dtype).itemsize
    return cdiv(rows, tile) * tile
