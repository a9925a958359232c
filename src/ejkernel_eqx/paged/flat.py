"""Treats rows as additional sequences, and pages as chunks from which a block of keys is gathered."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from .._take import take_along
from ..core import Named
from .spec import axes_of, PagedArrays, PagedSpec, SHARED, STORED

_LARGEST_PART = 256
F = TypeVar("F", bound="FlatCall")


@dataclasses.dataclass(frozen=True)
class FlatCall:
    """One call of a kernel whose leading axis has been merged into tokens, sequences and, if they are mapped, pages.

    `arrays` are those of `PagedArrays` without leading axes, except the small ones (`sinks`, `slopes`, `qq_bias`, scales per head), which
    have an axis of rows: sequence `n` reads row `n // row_sequences`.
    """

    arrays: PagedArrays
    spec: PagedSpec
    config: Any
    row_sequences: int

    @classmethod
    def of(cls: type[F], arrays: PagedArrays, spec: PagedSpec, config: Any, in_parts: bool) -> F:
        """The call of arrays with one leading axis."""
        merged, row_sequences = merged_rows(arrays, spec, in_parts=in_parts)
        return cls(merged, spec, config, row_sequences)

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
    def values(self) -> int:
        return self.arrays.value_channels


def flatten_rows(
    attend: Callable[[Named], Named], given: Named, shared: frozenset[str], alone: frozenset[str]
) -> Named:
    """`attend`, which takes arrays without leading axes, on arrays with one. `shared` are those that rows may share, and `alone` those that they
    do: then the sequences of all rows are computed at once, else row by row, which leaves pages that are sharded over devices in place."""
    given, (rows, tokens) = dict(given), given["q"].shape[:2]
    # A single row needs no merging; its arrays only lose their leading axis.
    if rows == 1:
        results = attend({name: x if name in alone else x[0] for name, x in given.items()})
        return {name: x[None] for name, x in results.items()}
    # Pages that differ from row to row are not merged, so those sharded over devices stay in place.
    if len(alone) < len(shared):
        axes = {name: None if name in alone else 0 for name in given}
        return jax.vmap(attend, in_axes=(axes,))(given)
    # The tokens of a row follow those of the rows before it once `[B, T]` becomes `[B * T]`.
    given["q_start"] += jnp.arange(rows, dtype=jnp.int32)[:, None] * tokens
    merged = lambda x: x.reshape(rows * x.shape[1], *x.shape[2:])
    results = attend({name: x if name in alone else merged(x) for name, x in given.items()})
    return {name: x.reshape(rows, tokens, *x.shape[1:]) for name, x in results.items()}


def merged_rows(arrays: PagedArrays, spec: PagedSpec, *, in_parts: bool) -> tuple[PagedArrays, int]:
    """The arrays with their leading axis merged into tokens, sequences and, if they are mapped, pages.

    The small ones (`sinks`, `slopes`, `qq_bias`, scales per head) have an axis of rows instead: sequence `n` reads row `n // m`, and `m` is
    returned with them. `in_parts`: sequences of a single page get several smaller ones."""
    batch, tokens = arrays.q.shape[:2]
    per_row = arrays.q_len.shape[1]
    given = arrays.given
    table = given["page_table"]

    axes = axes_of(arrays, spec)
    is_mapped = lambda name: given[name].ndim > len(axes[name])
    pages = {name: given[name] for name in STORED if name in given and axes[name][0] == "P"}
    if any(map(is_mapped, pages)):
        count = given["k"].shape[-4]
        first = (jnp.arange(batch, dtype=jnp.int32) * count)[:, None, None]
        # A number outside a row's own pages would name a page of another row, so it becomes -1.
        table = jnp.where((table >= 0) & (table < count), table + first, -1)
        for name, x in pages.items():
            # One table numbers the pages of all arrays, so those that rows share are repeated here.
            every = x if is_mapped(name) else jnp.broadcast_to(x, (batch, *x.shape))
            given[name] = every.reshape((-1, *every.shape[2:]))
    given["page_table"] = table.reshape((-1, table.shape[-1]))
    # Keys in one page per sequence are dense, and each length would be another page size.
    if table.shape[-1] == 1 and in_parts:
        given |= _in_parts({name: given[name] for name in ("page_table", *pages)})

    small = [name for name in given if name in SHARED and name not in pages]
    mapped = any(map(is_mapped, small))
    for name in small:
        x = given[name]
        # If no small array is mapped, the axis has size 1 and every sequence reads row 0.
        given[name] = x if is_mapped(name) else jnp.broadcast_to(x, (batch if mapped else 1, *x.shape))

    for name in given.keys() & {"q", "own_gates"}:
        given[name] = given[name].reshape((-1, *given[name].shape[2:]))
    first = (jnp.arange(batch, dtype=jnp.int32) * tokens)[:, None]
    given["q_start"] = (given["q_start"] + first if batch > 1 else given["q_start"]).reshape(-1)
    for name in ("q_len", "kv_len", "kv_start"):
        if name in given:
            given[name] = given[name].reshape(-1)
    return PagedArrays.of(given), per_row if mapped else max(batch * per_row, 1)


def _in_parts(given: Named) -> Named:
    """Splits dense keys, one page per sequence, into smaller pages, and returns their table and pages. Kernels are compiled for a page size, so
    most numbers of keys share one kernel. The table is a constant, so the device computes nothing for it."""
    count, size = given["k"].shape[:2]
    part = part_of(size)
    if part == size:
        return given
    table, parts = given.pop("page_table"), size // part
    cut = {name: x.reshape((count * parts, part, *x.shape[2:])) for name, x in given.items()}
    numbers = table * parts + jnp.arange(parts, dtype=jnp.int32)[None]
    return cut | {"page_table": jnp.where((table >= 0) & (table < count), numbers, -1)}


def part_of(page_size: int) -> int:
    """The size of the smaller pages that one large one is split into."""
    part = math.gcd(page_size, _LARGEST_PART)
    return part if part >= 16 else page_size


def split_pages(page_size: int, block_k: int) -> tuple[int, int]:
    """The number of keys in a block, and in the chunks from which it is gathered: whole pages, or equal parts of one."""
    # Rounded down to whole pages, so that no block ends inside one.
    if block_k >= page_size:
        return block_k // page_size * page_size, page_size
    chunk = math.gcd(page_size, block_k)
    # Chunks of 8 keys or more are worthwhile; else a smaller block may allow larger chunks.
    if chunk >= 8 or block_k < 8:
        return block_k, chunk
    # The largest part of a page that fits a block; a single token if no part is worthwhile.
    part = max(size for size in range(1, block_k + 1) if page_size % size == 0)
    return (block_k // part * part, part) if part >= 8 else (block_k, 1)


def gather_chunks(pages: Named, table: Array, start: Array, block_k: int, chunk: int) -> tuple[Named, Array]:
    """Keys `start [n]` to `start + block_k` of every array `[P, p, ...]`, `[n, block_k, ...]`, by a table `[n, M]`, and which of them exist,
    `[n, block_k]`."""
    count, page_size = next(iter(pages.values())).shape[:2]
    parts = page_size // chunk
    place = (start // chunk)[:, None] + jnp.arange(block_k // chunk, dtype=jnp.int32)[None]
    number = place // parts
    page = take_along(table, jnp.clip(number, 0, max(table.shape[1] - 1, 0)), 1)
    there = (page >= 0) & (page < count) & (number < table.shape[1])
    # The reads promise indices in bounds, so page 0 stands in where there is none.
    page = jnp.where(there, page, 0)

    def load(x: Array) -> Array:
        if parts == 1:  # no other shape, as XLA may copy all pages for it
            loaded = x.at[page].get(mode="promise_in_bounds", wrap_negative_indices=False)
        else:
            cut = x.reshape(count, parts, chunk, *x.shape[2:])
            loaded = cut.at[page, place % parts].get(mode="promise_in_bounds", wrap_negative_indices=False)
        return loaded.reshape(table.shape[0], block_k, *x.shape[2:])

    return {name: load(x) for name, x in pages.items()}, jnp.repeat(there, chunk, axis=1)
