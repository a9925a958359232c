"""Sums of forget gates in pages: of each token the sum of the logarithms up to it, in two parts, `[H, 2]`.

The second part is what the first one lacks by rounding. So the difference of two near sums is as exact as one of the gates between
them, however long the text is; and a page that several texts share holds what all of them need."""

import jax
import jax.numpy as jnp
from jax import Array

from .batch import RaggedBatch, slots_of
from .write import at_slots


def sums_of(pages: Array, log_forget: Array, batch: RaggedBatch) -> Array:
    """`[T, H, 2]` of new tokens with gates `[T, H]`, behind the sums that the pages `[P, p, H, 2]` have of the tokens before them."""
    ids, page_size = batch.sequence_ids, pages.shape[1]
    begin = batch.query_start_loc[jnp.maximum(ids, 0)]
    first = jnp.arange(ids.shape[0], dtype=jnp.int32) == begin
    inside = jnp.where(ids[:, None] >= 0, log_forget, 0).astype(pages.dtype)
    if not batch.is_decode:
        inside, _ = jax.lax.associative_scan(_added, (inside, first[:, None]))
    # The last token of the sequence that is written already.
    before = batch.positions - jnp.arange(ids.shape[0], dtype=jnp.int32) + begin - 1
    old, rest = jnp.moveaxis(at_slots(pages, slots_of(ids, before, batch.page_table, page_size)), -1, 0)
    total = old + (inside + rest)
    # What rounding took from a sum of two numbers: itself a number, by Knuth's six operations.
    more = total - old
    lost = (old - (total - more)) + ((inside + rest) - more)
    return jnp.stack([total, lost], -1)


def _added(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    """Sums `b` behind `a`, which begin anew where a sequence does."""
    return jnp.where(b[1], b[0], a[0] + b[0]), a[1] | b[1]
