"""Treats rows as additional sequences, and pages as chunks from which a block of keys is gathered."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

Named = dict[str, Array]


def flatten_rows(
    attend: Callable[[Named], Named], given: Named, shared: frozenset[str], alone: frozenset[str]
) -> Named:
    """`attend`, which takes arrays without leading axes, on arrays with one. `shared` are those that rows may share, and `alone` those that they
    do: then the sequences of all rows are computed at once, else row by row, which leaves pages that are sharded over devices in place."""
    given, (rows, tokens) = dict(given), given["q"].shape[:2]
    if rows == 1:
        results = attend({name: x if name in alone else x[0] for name, x in given.items()})
        return {name: x[None] for name, x in results.items()}
    if len(alone) < len(shared):
        axes = {name: None if name in alone else 0 for name in given}
        return jax.vmap(attend, in_axes=(axes,))(given)
    given["q_start"] += jnp.arange(rows, dtype=jnp.int32)[:, None] * tokens
    merged = lambda x: x.reshape(rows * x.shape[1], *x.shape[2:])
    results = attend({name: x if name in alone else merged(x) for name, x in given.items()})
    return {name: x.reshape(rows, tokens, *x.shape[1:]) for name, x in results.items()}


def split_pages(page_size: int, block_k: int) -> tuple[int, int]:
    """The number of keys in a block, and in the chunks from which it is gathered: whole pages, or equal parts of one."""
    if block_k >= page_size:
        return block_k // page_size * page_size, page_size
    chunk = math.gcd(page_size, block_k)
    return (block_k, chunk) if chunk >= 8 or block_k < 8 else _even(page_size, block_k)


def _even(page_size: int, block_k: int) -> tuple[int, int]:
    """The largest part of a page that fits a block; a single token if no part is worthwhile."""
    part = max(size for size in range(1, block_k + 1) if page_size % size == 0)
    return (block_k // part * part, part) if part >= 8 else (block_k, 1)


def gather_chunks(pages: Named, table: Array, start: Array, block_k: int, chunk: int) -> tuple[Named, Array]:
    """For every array `[P, p, ...]`, the keys `start [n]` to `start + block_k`, `[n, block_k, ...]`, by a table `[n, M]`, and whether they
    exist, `[n, block_k]`."""
    count, page_size = next(iter(pages.values())).shape[:2]
    parts = page_size // chunk
    place = (start // chunk)[:, None] + jnp.arange(block_k // chunk, dtype=jnp.int32)[None]
    number = place // parts
    page = jnp.take_along_axis(table, jnp.clip(number, 0, max(table.shape[1] - 1, 0)), 1)
    there = (page >= 0) & (page < count) & (number < table.shape[1])
    page = jnp.where(there, page, 0)

    def load(x: Array) -> Array:
        if parts == 1:  # no other shape, as XLA may copy all pages for it
            loaded = x.at[page].get(mode="promise_in_bounds")
        else:
            cut = x.reshape(count, parts, chunk, *x.shape[2:])
            loaded = cut.at[page, place % parts].get(mode="promise_in_bounds")
        return loaded.reshape(table.shape[0], block_k, *x.shape[2:])

    return {name: load(x) for name, x in pages.items()}, jnp.repeat(there, chunk, axis=1)
