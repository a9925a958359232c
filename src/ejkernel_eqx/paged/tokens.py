"""Every query as a sequence of its own."""

import jax.numpy as jnp

from .cache.batch import positions_of
from .spec import PagedArrays


def alone(arrays: PagedArrays, max_query_len: int | None = None, causal: bool = True) -> PagedArrays:
    """The call with each token `[T]` as a sequence with one query, on the pages of its original sequence, and unless `causal` with all of its keys;
    without keys for tokens of no sequence, and for queries of one beyond `max_query_len`. No leading axes."""
    tokens, ends = jnp.arange(arrays.q.shape[0], dtype=jnp.int32), arrays.q_start + arrays.q_len
    count = ends.shape[0]
    if count == 0:
        nothing = jnp.zeros_like(tokens)
        table = jnp.full((tokens.size, arrays.page_table.shape[-1]), -1, jnp.int32)
        return arrays._replace(page_table=table, q_start=tokens, q_len=nothing, kv_len=nothing)
    number = jnp.minimum(jnp.sum(ends[None] <= tokens[:, None], axis=1, dtype=jnp.int32), count - 1)
    begin = arrays.q_start[number]
    end = ends[number] if max_query_len is None else jnp.minimum(ends[number], begin + max_query_len)
    real = (tokens >= begin) & (tokens < end)
    ids = jnp.where(real, number, -1)
    lengths = positions_of(ids, ends, arrays.kv_len) + 1 if causal else arrays.kv_len[number]
    table, lengths = arrays.page_table[number], jnp.where(real, lengths, 0)
    return arrays._replace(page_table=table, q_start=tokens, q_len=real.astype(jnp.int32), kv_len=lengths)
