"""`append=True` on platforms that write themselves: the pages are those that `cache.append` gives, whatever is mapped."""

import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from tests.attention.dense import normal
from tests.recurrence.quick import quick
from tests.tolerances import assert_close

pytest.importorskip("triton")

H, K, D, p, P = 4, 2, 16, 4, 6
QUERIES, LENGTHS = (2, 1), (6, 3)
TABLE = np.array([[4, 1], [2, -1]], np.int32)


def pages(kind: str) -> Any:
    if kind == "latent":
        return ejx.PagedLatentCache.init(P, p, 16, 8)
    if kind == "pallas":  # what its kernel that writes takes
        return ejx.PagedKVCache.init(P, 8, K, 128)
    return ejx.PagedKVCache.init(P, p, K, D, dtype=jnp.int8 if kind == "int8" else jnp.float32)


def new(kind: str, tokens: int, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    shapes = ((16,), (8,)) if kind == "latent" else ((K, 128 if kind == "pallas" else D),) * 2
    k, v = (normal(seed + i, tokens, *shape) for i, shape in enumerate(shapes))
    return k, v


def attend(platform: ejx.PlatformLike, cache: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    op = ejx.RaggedPagedAttention(softmax_scale=0.2, append=True, platform=platform)
    offsets = jnp.array([0, *np.cumsum(QUERIES)])
    return op(q, cache.bind(TABLE, jnp.array(LENGTHS)), k, v, query_start_loc=offsets, max_query_len=2)


def filled(kind: str) -> Any:
    """With what the two sequences had before, and NaN (of what has it) where nothing is."""
    cache, first = pages(kind), np.array([4, 2]) * (8 if kind == "pallas" else p)
    poison = lambda x: jnp.full_like(x, jnp.nan) if x.dtype != jnp.int8 else x
    slots = jnp.array([*(first[0] + np.arange(4)), *(first[1] + np.arange(2))])
    return jax.tree.map(poison, cache).append(*new(kind, 6, seed=5), slots)


def assert_same_pages(got: Any, want: Any) -> None:
    for field in dataclasses.fields(want):
        a, b = getattr(got, field.name), getattr(want, field.name)
        if a is not None and a.dtype == jnp.int8:
            assert np.abs(np.asarray(a, np.int32) - np.asarray(b, np.int32)).max() <= 1
        elif a is not None:
            np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["plain", "int8", "latent", "pallas"])
def test_the_platform_that_reads_also_writes(kind):
    q = normal(3, 4, H, {"latent": 24, "pallas": 128}.get(kind, D))
    k, v = (x.at[3:].set(jnp.nan) for x in new(kind, 4))  # the last token is of no sequence
    names = ("xla", "pallas-interpret" if kind == "pallas" else "triton-interpret")
    (want, cache), (got, written) = (
        quick(functools.partial(attend, platform))(filled(kind), q, k, v) for platform in names
    )
    assert_close(got[:3], want[:3])
    assert (got[3] == 0).all()
    assert_same_pages(written, cache)


@pytest.mark.few(1)
@pytest.mark.parametrize("shared", [True, False])
def test_mapped(shared):
    """Each of the mapped calls has pages of its own afterwards, also where it began with those of all."""
    caches = [filled("plain"), filled("plain").append(*new("plain", 1, seed=9), jnp.array([9]))]
    cache = caches[0] if shared else jax.tree.map(lambda *x: jnp.stack(x), *caches)
    q, (k, v) = normal(3, 2, 3, H, D), (normal(seed, 2, 3, K, D) for seed in (7, 8))
    call = functools.partial(attend, "triton-interpret")
    got, written = quick(jax.vmap(call, in_axes=(None if shared else 0, 0, 0, 0)))(cache, q, k, v)
    for row in range(2):
        own = caches[0] if shared else caches[row]
        want, expected = quick(functools.partial(attend, "xla"))(own, q[row], k[row], v[row])
        assert_close(got[row], want)
        assert_same_pages(jax.tree.map(operator.itemgetter(row), written), expected)


def test_a_write_has_no_gradient():
    q, (k, v) = normal(3, 3, H, D), new("plain", 3)
    loss = lambda k: attend("triton-interpret", filled("plain"), q, k, v)[1].k.sum()
    with pytest.raises(ejx.UnsupportedError, match="inference"):
        jax.grad(loss)(k)
