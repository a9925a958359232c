"""What random draws and a second pair of eyes have found: each once more, on the platforms that it concerns."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from tests.attention.dense import normal
from tests.recurrence.quick import quick
from tests.tolerances import assert_close

PLATFORMS: list[ejx.PlatformLike] = ["xla", "triton-interpret"]


def cache_of(length: int, page_size: int = 5, heads: int = 1, dim: int = 16) -> ejx.PagedKVCache:
    """One sequence, in as many pages as it needs and no more."""
    pages = -(-length // page_size)
    cache = ejx.PagedKVCache.init(pages, page_size, heads, dim)
    k, v = normal(0, length, heads, dim), normal(1, length, heads, dim)
    return cache.append(k, v, jnp.arange(length)).bind(jnp.arange(pages)[None], jnp.array([length]))


def test_no_tile_of_keys_reaches_past_the_table():
    """A window smaller than a tile, at the end of a table that has no page to spare."""
    pytest.importorskip("triton")
    q, cache = normal(2, 12, 2, 16), cache_of(15)
    results = [
        quick(ejx.PrefillPagedAttention(3, platform=name))(q, cache, query_start_loc=jnp.array([0, 12]))
        for name in PLATFORMS
    ]
    assert_close(results[1], results[0])


def test_a_window_larger_than_any_sequence_hides_nothing():
    q, cache = normal(2, 1, 2, 16), cache_of(7)
    for window in (2**31, (2**40, 0)):
        out = quick(ejx.PagedAttention(window, platform="xla"))(q, cache)
        assert_close(out, quick(ejx.PagedAttention(platform="xla"))(q, cache))


def test_offsets_may_be_a_list(unchecked):
    q, k, v = normal(2, 2, 2, 16), normal(3, 2, 1, 16), normal(4, 2, 1, 16)
    op = ejx.RaggedPagedAttention(append=True, platform="xla")
    out, cache = op(q, cache_of(7), k, v, query_start_loc=[0, 2])  # pyright: ignore[reportArgumentType]
    wanted, _ = op(q, cache_of(7), k, v, query_start_loc=jnp.array([0, 2]))
    np.testing.assert_array_equal(out, wanted)
    np.testing.assert_array_equal(cache.gather()[0][0, 5:7], k)


@pytest.mark.few(1)
@pytest.mark.parametrize("append", [False, True])
@pytest.mark.parametrize("platform", PLATFORMS)
def test_offsets_may_end_in_zeros(platform, append):
    """As behind the last sequence of a padded batch; a chunk long enough for the prefill kernel, and tokens of no sequence."""
    if platform != "xla":
        pytest.importorskip("triton")
    q, lengths = normal(2, 44, 2, 16), jnp.array([21, 18, 0, 0])
    table, pages = jnp.arange(20).reshape(4, 5), normal(3, 2, 20, 5, 1, 16)
    cache = ejx.PagedKVCache(*pages).bind(table, lengths)
    new = [normal(4, 44, 1, 16), normal(5, 44, 1, 16)] if append else []
    op = ejx.RaggedPagedAttention(append=append, platform=platform)
    wanted, found = (
        quick(lambda *given, offsets=offsets: op(*given, query_start_loc=offsets, return_lse=True))(
            q, cache, *new
        )
        for offsets in (jnp.array([0, 20, 38, 38, 38]), jnp.array([0, 20, 38, 0, 0]))
    )
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(a, b)
    out = found[0][0] if append else found[0]
    assert np.isfinite(out).all() and not np.asarray(out)[38:].any()


@pytest.mark.few(1)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_offsets_of_a_row_end_with_its_tokens(platform):
    """Past them another row's would be overwritten."""
    if platform != "xla":
        pytest.importorskip("triton")
    q, cache = normal(2, 2, 20, 2, 16), cache_of(40)
    op = ejx.RaggedPagedAttention(platform=platform)
    call = jax.vmap(lambda q, offsets: op(q, cache, query_start_loc=offsets))
    found = quick(call)(q, jnp.array([[0, 30], [3, 20]]))
    np.testing.assert_array_equal(found, quick(call)(q, jnp.array([[0, 20], [3, 20]])))


@pytest.mark.parametrize("platform", PLATFORMS)
def test_nan_that_is_seen_shows_in_both_results(platform):
    if platform != "xla":
        pytest.importorskip("triton")
    cache = cache_of(7)
    poisoned = cache.append(jnp.full((1, 1, 16), jnp.nan), jnp.ones((1, 1, 16)), jnp.array([3]))
    call = functools.partial(ejx.PagedAttention(platform=platform), return_lse=True)
    out, lse = quick(call)(normal(2, 1, 2, 16), poisoned)
    assert np.isnan(out).all() and np.isnan(lse).all()


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_value_that_is_infinite_shows_where_it_is_seen(platform):
    """Its scale is infinite as well, and all of its vector NaN; scores are as they were, and so are other heads."""
    if platform != "xla":
        pytest.importorskip("triton")
    cache = ejx.PagedKVCache.init(2, 5, 2, 32, dtype="int8")
    k, v, q = normal(0, 7, 2, 32), normal(1, 7, 2, 32), normal(2, 1, 4, 32).astype(jnp.bfloat16)
    op = quick(functools.partial(ejx.PagedAttention(platform=platform), return_lse=True))
    tables = jnp.array([[1, 0]]), jnp.array([7])
    slots = jnp.array([5, 6, 7, 8, 9, 0, 1])
    out, lse = op(q, cache.append(k, v, slots).bind(*tables))
    found, found_lse = op(q, cache.append(k, v.at[3, 1, 4].set(jnp.inf), slots).bind(*tables))
    assert_close(found_lse, lse, "float32")  # weights are relative to another number
    np.testing.assert_array_equal(found_lse[:, :2], lse[:, :2])
    np.testing.assert_array_equal(found[:, :2], out[:, :2])
    assert (
        np.isfinite(np.asarray(out, np.float32)).all()
        and np.isnan(np.asarray(found[:, 2:], np.float32)).all()
    )
