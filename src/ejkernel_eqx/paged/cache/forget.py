"""Sums of forget gates in pages: of each token the sum of the logarithms up to it, in two parts, `[H, 2]`.

The second part is what the first one lacks by rounding. So the difference of two near sums is as exact as one of the gates between
them, however long the text is; and a page that several texts share holds what all of them need."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from .batch import RaggedBatch, slots_of
from .write import at_slots


def sums_of(pages: Array, log_forget: Array, batch: RaggedBatch) -> Array:
    """`[T, H, 2]` of new tokens with gates `[T, H]`, which continue the sums that the pages `[P, p, H, 2]` have of the tokens before them."""
    ids, page_size = batch.sequence_ids, pages.shape[1]
    begin = batch.query_start_loc[jnp.maximum(ids, 0)]
    first = jnp.arange(ids.shape[0], dtype=jnp.int32) == begin
    new = jnp.where(ids[:, None] >= 0, log_forget, 0).astype(pages.dtype)
    inside = new, jnp.zeros_like(new)
    if not batch.is_decode:
        inside = jax.lax.associative_scan(_added, (*inside, first[:, None]))[:2]
    # The last token of the sequence that is written already.
    before = batch.positions - jnp.arange(ids.shape[0], dtype=jnp.int32) + begin - 1
    old = jnp.moveaxis(at_slots(pages, slots_of(ids, before, batch.page_table, page_size)), -1, 0)
    return jnp.stack(_sum(old, inside), -1)


def _sum(a: Any, b: Any) -> tuple[Array, Array]:
    """The sum of two numbers with rests. What rounding takes from it is a number itself, by Knuth's six operations."""
    total = a[0] + b[0]
    more = total - a[0]
    return total, (a[0] - (total - more)) + (b[0] - more) + (a[1] + b[1])


def _added(a: Any, b: Any) -> tuple[Array, Array, Array]:
    """Sums `b` behind `a`, which begin anew where a sequence does."""
    total, rest = _sum(a, b)
    return jnp.where(b[2], b[0], total), jnp.where(b[2], b[1], rest), a[2] | b[2]
