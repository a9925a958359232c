"""Paged caches of keys and values and of latents, against a pool in NumPy."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx import PagedKVCache, PageTable
from tests.paged import caches
from tests.paged.caches import append, arrays, cases, copy_pages, few, gather, make, scaled, tokens


def poisoned(cache):
    """NaN in every page, or, where there is none, the largest number, and NaN for its scale if tokens have their own."""

    def spoil(path, x):
        if x.dtype == jnp.int8:
            return jnp.full_like(x, 127)
        return x if cache.scales == "head" and "scale" in str(path[-1]) else jnp.full_like(x, jnp.nan)

    return jax.tree_util.tree_map_with_path(spoil, cache)


def raw(cache):
    """All bytes of the pages and their scales, one row for each slot where they have one."""
    return [
        np.asarray(x).reshape(caches.ROOM, -1)
        for x in arrays(cache)
        if x is not None and x.size >= caches.ROOM
    ]


def as_bytes(x):
    """All NaN of a dtype as one: XLA may write another one back."""
    nan = np.isnan(x.astype(np.float32))
    return (np.where(nan, x.dtype.type("nan"), x) if nan.any() else x).view(np.uint8) if x.ndim else x


def error(cache, x, which):
    """Half a step of what is stored for `x`."""
    dtype = arrays(cache)[which].dtype.name
    x = np.abs(np.asarray(x, np.float32))
    if dtype not in caches.LARGEST:  # what is drawn is exact in bfloat16
        return np.zeros_like(x)
    scale = arrays(cache)[2 + which]
    if cache.scales == "head":
        step = np.asarray(scale)[..., None]
    else:
        step = x.max(-1, keepdims=True) / caches.LARGEST[dtype]
    return 1.01 * np.maximum(x * caches.RELATIVE[dtype], step * caches.ABSOLUTE[dtype])


@pytest.mark.few(3)
@cases
def test_append_and_gather(kind, dtype, scales):
    """Within half a step; every other slot keeps its bytes, the last one too; no NaN of an unused slot comes out."""
    cache = poisoned(scaled(make(kind, dtype, scales)))
    assert cache.scales == scales and not cache.is_bound
    slots = np.asarray([4, -1, 0, 9, caches.ROOM, 5, -caches.ROOM, 10, 2**31 - 1, -(2**31)])
    x, y = tokens(cache, len(slots))
    new = append(cache, x, y, slots)
    written = [t for t, slot in enumerate(slots) if 0 <= slot < caches.ROOM]
    untouched = np.setdiff1d(np.arange(caches.ROOM), slots[written])
    assert caches.ROOM - 1 in untouched
    for before, after in zip(raw(cache), raw(new), strict=True):
        np.testing.assert_array_equal(as_bytes(after[untouched]), as_bytes(before[untouched]))
    # Token by token: one page a sequence, so that the place in the page says how long it is.
    for t in written:
        page, place = divmod(int(slots[t]), caches.SIZE)
        found = gather(new.bind(jnp.full((1, 1), page), jnp.asarray([place + 1])))
        for which, (dense, given) in enumerate(zip(found, (x, y), strict=True)):
            assert np.all(
                np.abs(np.asarray(dense[0, place], np.float32) - np.asarray(given[t]))
                <= error(new, given[t], which)
            )


@pytest.mark.few(1)
@few
def test_gather_of_sequences(kind, dtype, scales):
    """Zero where there is no token or no page, also where NaN is stored; any length; leading axes of tables."""
    cache = poisoned(scaled(make(kind, dtype, scales)))
    table = PageTable(caches.PAGES, caches.SIZE)
    given = {}
    for seed, (name, length) in enumerate((("a", 5), ("b", 0), ("c", 4))):
        assert table.allocate(name, length) == []
        given[name] = tokens(cache, length, seed)
        cache = append(cache, *given[name], table.slots(name, 0, length))
    table.free_behind("c", 3)
    rows = table.rows("abc")
    assert rows.shape == (3, 2)
    lengths = np.asarray([5, 0, 4])
    outside = np.where(rows < 0, caches.PAGES, rows)  # a number that is too large is no page either
    bound = cache.bind(np.stack([rows, outside])[:, None], np.broadcast_to(lengths, (2, 1, 3)))
    for which, dense in enumerate(gather(bound)):
        assert dense.shape == (2, 1, 3, 6, *arrays(cache)[which].shape[2:])
        assert dense.dtype == jnp.float32 and np.isfinite(dense).all()
        expected = np.zeros(dense.shape[2:], np.float32)
        for n, name in enumerate("abc"):
            expected[n, : lengths[n]] = given[name][which]
        expected[2, :3] = 0
        allowed = np.where(expected == 0, 0, error(cache, expected, which))
        assert np.all(np.abs(np.asarray(dense) - expected) <= allowed)
    flat = cache.bind(rows, lengths)
    whole = gather(flat)
    for size in (0, 4, 8):
        for short, full in zip(gather(flat, size, jnp.bfloat16), whole, strict=True):
            assert short.dtype == jnp.bfloat16 and short.shape[1] == size
            np.testing.assert_array_equal(short[:, :6], full[:, :size].astype(jnp.bfloat16))
            assert not np.asarray(short[:, 6:], np.float32).any()
    # A new order of the pages changes nothing.
    order = np.random.default_rng(0).permutation(caches.PAGES)
    paged = [x if x is None or x.size < caches.ROOM else x[np.argsort(order)] for x in arrays(cache)]
    moved = kind(paged[0], paged[1], None, None, *paged[2:]).bind(
        np.where(rows < 0, -1, order[rows]), lengths
    )
    for one, other in zip(gather(moved), whole, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.few(1)
@few
def test_copy_pages(kind, dtype, scales):
    cache = scaled(make(kind, dtype, scales, batch_shape=(2,)))
    x, y = tokens(cache, caches.ROOM, lead=(2,))
    cache = append(cache, x, y, np.arange(caches.ROOM))
    copied = copy_pages(
        cache, jnp.asarray([1, -1, 2, 3, caches.PAGES, 4]), jnp.asarray([2, 5, 1, -1, 0, caches.PAGES])
    )
    order = [0, 2, 1, 3, 4, 5]  # both were read before either was written
    for before, after in zip(arrays(cache), arrays(copied), strict=True):
        if before is not None:
            expected = before[:, np.asarray(order)] if before.size >= caches.ROOM else before
            np.testing.assert_array_equal(np.asarray(after), np.asarray(expected))
    assert eqx.tree_equal(cache.copy_pages([], []), cache)
    assert eqx.tree_equal(append(cache, *tokens(cache, 0, lead=(2,)), np.zeros(0, int)), cache)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", caches.KINDS)
@pytest.mark.parametrize("dtype, scales", [(dtype, "head") for dtype in caches.LARGEST])
def test_scales_a_head_clip(kind, dtype, scales):
    """Nothing overflows and nothing becomes NaN, whatever is written."""
    cache = scaled(make(kind, dtype, scales))
    x, y = (jnp.full_like(x, 1e30).at[..., 0].set(-jnp.inf) for x in tokens(cache, 1))
    dense = gather(append(cache, x, y, np.asarray([0])).bind(np.asarray([[0]]), np.asarray([1])))
    for found, scale in zip(dense, (1 / 32, 1 / 16), strict=True):
        largest = scale * caches.LARGEST[dtype]
        np.testing.assert_array_equal(found[0, 0, ..., 0], np.full(found.shape[2:-1], -largest))
        np.testing.assert_array_equal(found[0, 0, ..., 1:], np.full(found[0, 0, ..., 1:].shape, largest))


def test_keys_and_values_of_two_dtypes():
    """Only what is in 8 bits has scales; dense tokens are of one dtype."""
    values = make(PagedKVCache, ("bfloat16", "int8"))
    keys = make(PagedKVCache, ("float8_e5m2", "float32"), "head").with_scales(jnp.ones(2) / 4, None)
    assert values.k_scale is None and values.scales == "token" and keys.v_scale is None
    np.testing.assert_array_equal(keys.k_scale, np.full(2, 0.25))
    both = ("float32", "float32", "bfloat16")
    for cache, dtype in zip((values, keys, make(PagedKVCache, ("bfloat16", "bfloat16"))), both, strict=True):
        assert {x.dtype.name for x in cache.bind(jnp.array([[1]]), jnp.array([3])).gather()} == {dtype}


def test_float64(enable_x64):
    cache = make(PagedKVCache, "float64")
    k, v = (x.astype(jnp.float64) / 3 for x in tokens(cache, 1))
    far = cache.append(k, v, np.asarray([2**32 + 1]))  # does not wrap around
    assert eqx.tree_equal(far, cache)
    dense = cache.append(k, v, np.asarray([1])).bind(np.asarray([[0]]), np.asarray([2])).gather()
    np.testing.assert_array_equal(dense[0][0, 1], k[0])
    assert dense[0].dtype == jnp.float64
