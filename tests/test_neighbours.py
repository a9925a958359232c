"""What one sequence gives, and its gradients, do not depend on those beside it: in batches of equal sizes they are equal bit for bit, whatever
the others hold."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from tests.attention.dense import normal
from tests.nn import experts
from tests.operations import arrays_of, D, H, OPERATIONS
from tests.recurrence.quick import quick

B, ROW = 3, 1


def _assert_equal(found: Any, wanted: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.isfinite(one).all() and np.asarray(one).any()


platforms = pytest.mark.parametrize("platform", ["xla", "triton-interpret"])


@pytest.mark.few(5)
@platforms
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name, platform):
    if platform != "xla":
        pytest.importorskip("triton")
    build, entries, shared = OPERATIONS[name]
    op, shared = build(platform=platform), arrays_of(shared, 20, 1.0)

    @quick
    def results(own):
        out, pull = jax.vjp(lambda *own: op(*own, *shared), *own)
        return out, pull(
            jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size, dtype=x.dtype).reshape(x.shape)), out)
        )

    own = arrays_of(entries, 0, 1.0, B)
    beside = [arrays_of(entries, 40, 4.0, B), [jnp.full_like(x, jnp.nan) for x in own]]
    row = lambda found: jax.tree.map(lambda x: x[ROW], found)
    wanted = row(results(own))
    for others in beside:
        _assert_equal(row(results([x.at[ROW].set(y[ROW]) for x, y in zip(others, own)])), wanted)


PAGE, TABLE = 4, 8
# New tokens and all tokens of each sequence; the last one of each batch is the one that is compared.
BATCHES = {
    "decoding": [[(1, 9), (1, 30), (1, 21)], [(1, 5), (1, 1), (1, 21)], [(1, 32), (0, 0), (1, 21)]],
    "a chunk": [[(1, 9), (2, 30), (5, 21)], [(0, 0), (1, 3), (5, 21)], [(3, 3), (0, 0), (5, 21)]],
}


@pytest.mark.few(2)
@platforms
@pytest.mark.parametrize("kind", BATCHES)
def test_pages(kind, platform):
    """Also where the others have other lengths, and so other pages and places among the tokens."""
    if platform != "xla":
        pytest.importorskip("triton")
    op = ejx.RaggedPagedAttention(platform=platform)
    attend = quick(lambda q, cache, starts: op(q, cache, query_start_loc=starts, max_query_len=5))
    q, k, v = normal(0, 5, H, D), normal(1, 32, 1, D), normal(2, 32, 1, D)
    results = []
    for seed, batch in enumerate(BATCHES[kind]):
        pages = np.random.default_rng(seed).permutation(len(batch) * TABLE).reshape(len(batch), TABLE)
        cache = ejx.PagedKVCache.init(len(batch) * TABLE, PAGE, 1, D)
        nan = jnp.full((cache.num_pages * PAGE, 1, D), jnp.nan) if seed else normal(3, 96, 1, D)
        cache = cache.append(nan, nan, np.arange(cache.num_pages * PAGE))
        news, lengths = (np.array(x) for x in zip(*batch))
        place = np.arange(lengths[-1])
        cache = cache.append(k[: len(place)], v[: len(place)], pages[-1][place // PAGE] * PAGE + place % PAGE)
        starts = np.concatenate([[0], np.cumsum(news)])
        rows = jnp.full((8, H, D), 9.0).at[starts[-2] : starts[-1]].set(q[: news[-1]])
        out = attend(rows, cache.bind(pages, lengths), starts)
        results.append(out[starts[-2] : starts[-1]])
    _assert_equal(results[1:], [results[0]] * 2)


@pytest.mark.few(1)
@platforms
@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss"])
def test_experts(name, platform):
    """The rows of a token lie elsewhere among those of its experts, and its experts have other numbers of rows."""
    if platform != "xla":
        pytest.importorskip("triton")
    layer, x = experts.build(name, platform=platform), experts.inputs(2, 7)
    run = eqx.filter_jit(lambda layer, x: layer(x))
    wanted = run(layer, x)[1]
    for others in (-x[0], jnp.broadcast_to(x[1, :1], x[0].shape), 30 * x[0]):
        _assert_equal(run(layer, x.at[0].set(others))[1], wanted)
