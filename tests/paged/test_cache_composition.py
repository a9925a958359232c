"""Paged caches in transformations and files, on several devices, and together with the allocator and a batch."""

import io

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx import PagedKVCache, PageTable, RaggedBatch
from tests.paged import caches
from tests.paged.caches import append, arrays, cases, few, gather, make, scaled, tokens
from tests.recurrence.quick import quick


@pytest.mark.slow
@few
def test_layers(kind, dtype, scales):
    """Leading axes: all at once, by `vmap` and by `scan`, bitwise the same; with tables that are shared or their own."""
    cache = scaled(make(kind, dtype, scales, batch_shape=(2,)))
    assert cache.batch_shape == (2,) and cache.scales == scales
    x, y = tokens(cache, 4, lead=(2,))
    slots = jnp.asarray([2, 3, -1, 17])
    table, lengths = jnp.asarray([[0, 1], [-1, 5]]), jnp.asarray([4, 6])

    def layer(own, x, y):
        new = own.append(x, y, slots)
        return new, new.bind(table, lengths).gather()

    def whole(cache, x, y):
        new = cache.append(x, y, slots)
        return (
            new,
            new.bind(table, lengths).gather(),
            new.bind(jnp.stack([table] * 2), jnp.stack([lengths] * 2)).gather(),
        )

    def scanned(cache, x, y):
        return jax.lax.scan(lambda carry, given: (carry, layer(*given)), None, (cache, x, y))[1]

    new, dense, again = quick(whole)(cache, x, y)
    assert eqx.tree_equal(dense, again)
    assert eqx.tree_equal((new, dense), quick(jax.vmap(layer))(cache, x, y))
    assert eqx.tree_equal((new, dense), quick(scanned)(cache, x, y))
    own = append(cache, x, y, jnp.stack([slots, slots[::-1]]))
    one = jax.tree.map(lambda x: x[1], cache)
    assert eqx.tree_equal(jax.tree.map(lambda x: x[1], own), append(one, x[1], y[1], slots[::-1]))


@pytest.mark.few(3)
@pytest.mark.parametrize("lead", [(), (2,)])
@few
def test_donated_pages_are_written_in_place(kind, dtype, scales, lead):
    sizes = (2, 64, 32) if kind is PagedKVCache else (64, 32)
    cache = kind.init(64, 16, *sizes, dtype=dtype, scales=scales, batch_shape=lead)
    cache = cache.bind(jnp.zeros((1, 2), int), jnp.zeros(1, int))
    x, y = tokens(cache, 2, lead=lead)
    size = sum(x.nbytes for x in jax.tree.leaves(cache))
    step = jax.jit(lambda c, x, y: c.append(x, y, jnp.asarray([3, -1])), donate_argnums=0)
    copy = jax.jit(lambda c: c.copy_pages(jnp.asarray([3, -1]), jnp.asarray([1, -1])), donate_argnums=0)
    for lowered in (step.lower(cache, x, y), copy.lower(cache)):
        memory = lowered.compile().memory_analysis()
        assert memory is not None and memory.alias_size_in_bytes >= size
        if not {"bfloat16", "float8_e4m3fn", "float8_e5m2"} & {
            x.dtype.name for x in arrays(cache)[:2]
        }:  # which XLA on a CPU widens
            assert memory.temp_size_in_bytes < arrays(cache)[0].nbytes / 2
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(cache)]
    new = step(cache, x, y)
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(new)] == pointers


@pytest.mark.few(2)
@cases
def test_serialisation(kind, dtype, scales, tmp_path):
    cache = scaled(make(kind, dtype, scales)).bind(jnp.zeros((2, 3), int), jnp.ones(2, int))
    cache = append(cache, *tokens(cache, 3), np.asarray([0, 4, 5]))
    like = jax.tree.map(jnp.zeros_like, cache)
    ejx.save(tmp_path / "cache.eqx", cache)
    assert eqx.tree_equal(ejx.load(tmp_path / "cache.eqx", like), cache)
    if "float8" not in str(dtype):  # which Equinox writes and does not read
        file = io.BytesIO()
        eqx.tree_serialise_leaves(file, cache)
        file.seek(0)
        assert eqx.tree_equal(eqx.tree_deserialise_leaves(file, like), cache)


def test_shared_prefix_is_copied_on_write():
    """The allocator, the batch and the cache together: a fork goes on without disturbing its parent."""
    table, cache = PageTable(caches.PAGES, caches.SIZE), make(PagedKVCache)
    k, v = tokens(cache, 8)

    def extend(cache, name, first, count):
        copies = table.allocate(name, count)
        if copies:
            cache = caches.copy_pages(cache, np.asarray([copies[0].source]), np.asarray([copies[0].target]))
        length = table.length(name)
        batch = RaggedBatch.build([count], [length], [table.row(name)], page_size=caches.SIZE)
        np.testing.assert_array_equal(batch.slots, table.slots(name, length - count, length))
        new = slice(first, first + count)
        return append(cache, k[new], v[new], batch.slots), len(copies)

    cache, copies = extend(cache, "a", 0, 4)
    table.fork("a", "b")
    cache, copied = extend(cache, "b", 4, 2)
    cache, again = extend(cache, "a", 6, 2)
    assert (copies, copied, again) == (0, 1, 0)
    batch = RaggedBatch.build([1, 1], [6, 6], table.rows("ab"), page_size=caches.SIZE)
    bound = cache.bind(batch)
    assert bound.is_bound and not bound.unbind().is_bound and bound.page_table is batch.page_table
    for dense, given in zip(gather(bound), (k, v), strict=True):
        np.testing.assert_array_equal(dense[0], given[np.asarray([0, 1, 2, 3, 6, 7])])
        np.testing.assert_array_equal(dense[1], given[np.asarray([0, 1, 2, 3, 4, 5])])


@pytest.mark.parametrize("dtype, scales", [("float32", None), ("float8_e4m3fn", "token")])
def test_gather_is_differentiable(dtype, scales):
    """In the pages (here through a float32 copy) and their scales; finite with NaN in what is not seen."""
    cache = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), make(PagedKVCache, dtype, scales))
    cache = append(cache, *tokens(cache, 2), np.asarray([0, 1])).bind(np.asarray([[0, -1]]), np.asarray([2]))
    float_leaves, rest = eqx.partition(cache, lambda x: x.dtype == jnp.float32)
    gradient = quick(jax.grad(lambda part: sum(x.sum() for x in eqx.combine(part, rest).gather())))(
        float_leaves
    )
    for x in jax.tree.leaves(gradient):
        assert np.isfinite(x).all() and np.asarray(x[0, :2]).any() and not np.asarray(x[1:]).any()
        assert not np.asarray(x[0, 2:]).any()
