"""The configurations of this family's Pallas kernels, and a call as they see it: without leading axes, with pages as matrices."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from ...launch.fields import check_fields, Count
from ...launch.pallas import Execute
from ...launch.sizes import cdiv
from ..flat import merged_rows
from ..spec import PagedArrays, PagedSpec, PAGES

LANES = 128
_MOST_PAGES = 32


@dataclasses.dataclass(frozen=True)
class PallasConfig:
    """`decode_queries`: the most queries of a sequence that the kernel for few of them takes, in blocks of at least `decode_keys` keys, as far
    as whole pages allow; the other kernel takes the others in tiles of `block_q` queries and blocks of at least `block_k` keys. `cores`: the
    cores of the device that share the sequences."""

    decode_queries: Count
    decode_keys: Count
    block_q: Count
    block_k: Count
    cores: Count = 1

    __post_init__ = check_fields


@dataclasses.dataclass(frozen=True)
class Call:
    """One call whose leading axis has been merged into tokens, sequences and pages.

    `arrays` are those of `PagedArrays` without leading axes, except the small ones (`sinks`, `slopes`, `qq_bias`, scales per head), which
    have an axis of rows: sequence `n` reads row `n // row_sequences`.
    """

    arrays: PagedArrays
    spec: PagedSpec
    config: PallasConfig
    execute: Execute
    row_sequences: int

    @property
    def sequences(self) -> int:
        return self.arrays.q_len.shape[0]

    @property
    def heads(self) -> int:
        return self.arrays.q.shape[-2]

    @property
    def kv_heads(self) -> int:
        return self.arrays.k.shape[-2]

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def page(self) -> int:
        """Keys of a page."""
        return self.arrays.k.shape[1]

    @property
    def rows(self) -> int:
        """Rows of a page as a matrix: all heads of a key, one after the other."""
        return self.page * self.kv_heads

    @property
    def values(self) -> int:
        return (self.arrays.k if self.arrays.v is None else self.arrays.v).shape[-1]

    @property
    def pages(self) -> dict[str, Array]:
        """The pages as matrices `[P, p * K, D]`: the same bytes, as all heads of a key follow one another."""
        given = {name: x for name in PAGES if (x := getattr(self.arrays, name)) is not None}
        return {name: x.reshape(x.shape[0], self.rows, x.shape[-1]) for name, x in given.items()}

    @property
    def operand(self) -> Any:
        """The dtype of the products: that of the queries for quantised pages, otherwise the wider one."""
        q, given = self.arrays.q.dtype, self.arrays.given
        plain = (given[name].dtype for name in PAGES if name in given and f"{name}_scale" not in given)
        return q if all(dtype == q for dtype in plain) else jnp.dtype(jnp.float32)


def folded(arrays: PagedArrays, spec: PagedSpec, config: PallasConfig, execute: Execute) -> Call:
    """The call with its leading axis merged into tokens, sequences and, if they are mapped, pages."""
    merged, row_sequences = merged_rows(arrays, spec)
    return Call(merged, spec, config, execute, row_sequences)


class Ranges(NamedTuple):
    """int32 in scalar memory: what every sequence of a launch reads, `[N]` each except where it is said."""

    count: Array  # [1]: the number of sequences that have queries here
    order: Array  # these sequences first, each part in order
    token: Array  # the first query's place among the packed ones
    queries: Array  # the number of queries
    position: Array  # the position of the first query
    first: Array  # the first key that any of them sees
    page: Array  # the first page of these keys
    pages: Array  # the number of pages from there to the last key, at least 1
    holes: Array  # 1 if one of these pages is missing
    table: Array  # [N * M], -1 for a missing page


def ranges_of(call: Call, least: int, most: int | None, align: int = 1) -> Ranges:
    """The ranges of the sequences with `least` to `most` queries. First pages are multiples of `align`."""
    arrays, left = call.arrays, call.spec.left
    table, count = arrays.page_table, arrays.k.shape[0]
    width = table.shape[-1]
    queries = jnp.minimum(arrays.q_len, call.spec.max_query_len)
    mine = (queries >= least) & (queries <= (call.spec.max_query_len if most is None else most))
    position = arrays.kv_len - arrays.q_len
    first = jnp.zeros_like(position) if arrays.kv_start is None else jnp.maximum(arrays.kv_start, 0)
    first = first if left is None else jnp.maximum(first, position - left)
    end = jnp.clip(position + queries, 0, width * call.page)
    page = jnp.clip(first // call.page, 0, width - 1) // align * align
    pages = jnp.maximum((end + call.page - 1) // call.page - page, 1)
    table = jnp.where((table >= 0) & (table < count), table, -1)
    index = jnp.arange(width, dtype=jnp.int32)[None]
    used = (index >= page[:, None]) & (index < (page + pages)[:, None])
    return Ranges(
        count=jnp.sum(mine, dtype=jnp.int32)[None],
        order=jnp.argsort(~mine, stable=True).astype(jnp.int32),
        token=arrays.q_start,
        queries=queries,
        position=position,
        first=first,
        page=page,
        pages=pages,
        holes=jnp.any(used & (table < 0), axis=1).astype(jnp.int32),
        table=table.reshape(-1),
    )


def block_pages(page: int, kv_heads: int, keys: int) -> int:
    """The number of pages in a block of about `keys` keys: its columns fill whole registers, and its pages have one bit each of an int32."""
    unit = LANES // math.gcd(LANES, page * kv_heads)
    return max(unit, min(cdiv(cdiv(keys, page), unit) * unit, _MOST_PAGES // unit * unit))


def row_tile(rows: int, dtype: Any) -> int:
    """Rows padded to whole tiles of memory."""
    tile = 32 // jnp.dtype(dtype).itemsize
    return cdiv(rows, tile) * tile


def columns_of(call: Call, pages: int) -> np.ndarray:
    """int32 `[3, columns]`: the head, the key within the block and the page within it of every row of a block's matrix."""
    rows = np.arange(pages * call.rows, dtype=np.int32)
    return np.stack([rows % call.kv_heads, rows // call.kv_heads, rows // call.rows])
