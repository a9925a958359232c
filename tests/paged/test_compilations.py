"""A round of serving compiles nothing that a round before has compiled: tables, batches, caches and copies between two calls of the model."""

import functools

import jax.numpy as jnp
import numpy as np

from ejkernel_eqx import Buckets, PagedKVCache, PageTable, RaggedBatch, RaggedPagedAttention
from tests.compilations import compilations
from tests.recurrence.quick import quick

P, SIZE, H, K, D = 12, 2, 4, 2, 8
BUCKETS = Buckets((4,), (3,), (6,), (1, 2))


@functools.partial(quick, donate_argnums=1)
def step(q, cache, k, v, batch):
    attention = RaggedPagedAttention(softmax_scale=0.3, append=True, platform="xla")
    sizes = {"query_start_loc": batch.query_start_loc, "max_query_len": batch.max_query_len}
    out, cache = attention(q, cache.bind(batch), k, v, **sizes)
    return out[batch.last_tokens], cache.unbind()


def test_a_round_of_serving():
    def serve(seed):
        table, random = PageTable(P, SIZE, window=9), np.random.default_rng(seed)
        cache = PagedKVCache.init(P, SIZE, K, D, dtype=jnp.int8)
        normal = lambda *shape: jnp.asarray(random.normal(size=shape), jnp.float32)
        for counts in ((2, 1), (1, 1), (1, 1, 1)):
            if len(counts) == 3:
                table.fork(0, 2)
            copies = [copy for name, count in enumerate(counts) for copy in table.allocate(name, count)]
            pairs = np.full((2, 2), -1)
            pairs[:, : len(copies)] = np.array(copies).reshape(-1, 2).T
            cache = cache.copy_pages(*pairs)
            names = range(len(counts))
            lengths = [table.length(name) for name in names]
            batch = RaggedBatch.build(counts, lengths, table.rows(names), page_size=SIZE, buckets=BUCKETS)
            T = batch.num_tokens
            k, v = normal(T, K, D), normal(T, K, D)
            out, cache = step(normal(T, H, D), cache, k, v, batch)
            assert np.isfinite(np.asarray(out)[: len(counts)]).all()
            for name in names:
                table.free_behind(name)
        # Outside of a compiled step as well: writing and reading.
        cache = cache.append(k, v, np.arange(len(k)))
        return cache.bind(table.rows(names), lengths).gather(6, dtype=jnp.float32)

    with compilations() as first:
        serve(0)
    with compilations() as later:
        serve(1)
    assert first and not later, f"{len(later)} programs were compiled again"
