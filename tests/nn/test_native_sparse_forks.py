"""`nn.NativeSparseAttention` over pages that sequences share: a fork and its parent go on differently, and each gives what it gives alone."""

import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.nn import CacheState
from tests.attention.dense import INTERPRET
from tests.nn.checks import needs_triton
from tests.nn.paged_layers import inputs, pack, poisoned, TOKENS
from tests.nn.test_native_sparse_attention import build
from tests.recurrence.quick import quick
from tests.tolerances import assert_close

# Tokens of the parent when it is forked, and of the child: pages are of 4 tokens or 2.
FORKS = {"at a page's end": (4, 4), "in a page": (6, 6), "before the parent's end": (7, 5)}
# After it: the child first, then the parent, then both.
ROUNDS = ([(1, 3)], [(0, 1)], [(0, 1), (1, 1)], [(1, 1), (0, 1)])
# Blocks of two strides, of which one may be in the page before, and of three that are pages each.
SIZES = {"two pages": (4, 4, 2), "three pages": (2, 6, 2)}
BUCKETS = ejx.Buckets((8,), (2,), (5,), (8,))


def served(layer, page, fork):
    """What parent and child get for the tokens of the first and the second row of `inputs()`, `[2, T, E]`; both have the parent's first tokens."""
    whole, part = FORKS[fork]
    x = np.array(inputs(2))
    x[1, :part] = x[0, :part]
    table, done, y = ejx.PageTable(16, page), [0, 0], np.full(x.shape, np.nan, np.float32)
    caches = poisoned(CacheState.init([layer], num_pages=16, page_size=page, num_slots=1))
    call = quick(lambda x, cache, batch: layer(x, cache, batch=batch))

    def step(work, caches):
        work = [(n, min(count, TOKENS - done[n])) for n, count in work]
        copies = [copy for n, count in work for copy in table.allocate(n, count)]
        caches = caches.copy_pages([c.source for c in copies], [c.target for c in copies])
        names, counts = [n for n, _ in work], [count for _, count in work]
        batch = ejx.RaggedBatch.build(
            counts, [table.length(n) for n in names], table.rows(names), page_size=page, buckets=BUCKETS
        )
        out, cache = call(pack(x, work, done, batch.num_tokens), caches.layers[0], batch)
        for (n, count), start in zip(work, np.asarray(batch.query_start_loc)):
            y[n, done[n] : done[n] + count] = out[start : start + count]
            done[n] += count
        return caches.with_layers([cache]), len(copies)

    caches, _ = step([(0, whole)], caches)
    table.fork(0, 1, part)
    done[1], y[1, :part] = part, y[0, :part]
    copied = 0
    for work in (*ROUNDS, *ROUNDS, [(0, TOKENS), (1, TOKENS)]):
        caches, count = step(work, caches)
        copied += count
    assert copied == (part % page > 0)
    return x, y


# Every fork; each size with every platform; blocks whose keys are averaged and those of a network.
@pytest.mark.parametrize(
    ("fork", "sizes", "name", "platform"),
    [
        ("in a page", "two pages", "mean", INTERPRET),
        pytest.param("at a page's end", "two pages", "mlp", "xla", marks=pytest.mark.slow),
        pytest.param("before the parent's end", "three pages", "mlp", INTERPRET, marks=pytest.mark.slow),
    ],
)
def test_forks(fork, sizes, name, platform):
    """Unused slots, and whatever is not written, are NaN."""
    needs_triton(platform)
    page, size, stride = SIZES[sizes]
    layer = build(name, compression_size=size, compression_stride=stride, platform=platform)
    x, y = served(layer, page, fork)
    assert_close(y, quick(lambda x: layer(x))(jnp.asarray(x)), "float32")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "name", "platform"), [("two pages", "mlp", INTERPRET), ("three pages", "mean", "xla")]
)
def test_drafts_are_taken_back(sizes, name, platform):
    """Also those that completed a block, whose compressed key is in the pages already."""
    needs_triton(platform)
    page, size, stride = SIZES[sizes]
    layer = build(name, compression_size=size, compression_stride=stride, platform=platform)
    x, table, done = inputs(1)[0], ejx.PageTable(16, page), 0
    expected = np.asarray(quick(lambda x: layer(x))(jnp.asarray(x)))
    call = quick(lambda x, cache, batch: layer(x, cache, batch=batch))
    cache = poisoned(layer.init_pool(num_pages=16, page_size=page, num_slots=1))
    for right, wrong in ((3, 3), (0, 5), (2, 4), (1, 6), (2, 0), (0, 7), (2, 2)):
        table.allocate(0, right + wrong)
        sizes_of = {"page_size": page, "buckets": ejx.Buckets((8,), (1,), (9,), (8,))}
        batch = ejx.RaggedBatch.build([right + wrong], [table.length(0)], table.rows([0]), **sizes_of)
        new = np.full((8, x.shape[-1]), np.nan, np.float32)
        new[: right + wrong] = [*x[done : done + right], *(-100 * x[:wrong])]
        y, cache = call(jnp.asarray(new), cache, batch)
        assert_close(y[:right], expected[done : done + right], name=f"from {done}")
        done += right
        table.truncate(0, done)
