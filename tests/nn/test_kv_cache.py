import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx.nn import KVCache
from tests.arrays import normal


def _new(tokens, batch=(3,), heads=2, dim=4, seed=0):
    k_key, v_key = jax.random.split(jax.random.key(seed))
    shape = (*batch, tokens, heads, dim)
    return jax.random.normal(k_key, shape), jax.random.normal(v_key, shape)


def test_rows_at_their_own_positions():
    cache = KVCache.init((3,), 10, 2, 4)
    k1, v1 = _new(4)
    k2, v2 = _new(3, seed=1)
    cache = eqx.filter_jit(lambda c: c.append(k1, v1, new_lengths=jnp.array([4, 0, 2])))(cache)
    cache = eqx.filter_jit(lambda c: c.append(k2, v2))(cache)
    assert cache.lengths.tolist() == [7, 3, 5]
    for row, first in enumerate([4, 0, 2]):
        held = np.concatenate([k1[row, :first], k2[row]])
        assert np.array_equal(cache.k[row, : len(held)], held)
        held = np.concatenate([v1[row, :first], v2[row]])
        assert np.array_equal(cache.v[row, : len(held)], held)
        assert not np.asarray(cache.k[row, len(held) :]).any()


def test_mask_says_what_is_real():
    k, v = _new(4)
    k = k.at[0, 0].set(jnp.nan).at[2].set(jnp.nan)
    mask = jnp.array([[False, True, True, True], [True, False, True, False], [False] * 4])
    cache = KVCache.init((3,), 3, 2, 4).append(k, v, mask=mask)
    assert cache.lengths.tolist() == [3, 2, 0]
    assert np.array_equal(cache.k[0], k[0, 1:])
    assert np.array_equal(cache.v[1, :2], v[1, ::2])
    assert not np.asarray(cache.k[1, 2:]).any() and not np.asarray(cache.k[2]).any()


def test_padding_may_hang_over_the_end():
    k, v = _new(4)
    cache = KVCache.init((3,), 6, 2, 4).append(k, v)
    cache = cache.append(k, v, new_lengths=jnp.array([2, 0, 1]))
    assert cache.lengths.tolist() == [6, 4, 5]
    assert np.array_equal(cache.k[0], np.concatenate([k[0], k[0, :2]]))
    assert np.array_equal(cache.k[2, :5], np.concatenate([k[2], k[2, :1]]))
    assert not np.asarray(cache.k[1, 4:]).any()


@pytest.mark.slow
def test_unbatched_vmapped_and_nested_are_one():
    k, v = _new(2, (2, 3))
    nested = KVCache.init((2, 3), 5, 2, 4).append(k, v).append(k, v)
    empty = KVCache.init((2, 3), 5, 2, 4)
    mapped = jax.vmap(jax.vmap(lambda c, k, v: c.append(k, v).append(k, v)))(empty, k, v)
    single = KVCache.init((), 5, 2, 4).append(k[1, 2], v[1, 2]).append(k[1, 2], v[1, 2])
    assert eqx.tree_equal(nested, mapped)
    assert eqx.tree_equal(single, jax.tree.map(lambda x: x[1, 2], nested))


def test_unbatched_append_is_one_dynamic_update_slice():
    k, v = _new(1, ())
    text = jax.jit(lambda c: c.append(k, v)).lower(KVCache.init((), 5, 2, 4)).as_text()
    assert text.count("stablehlo.dynamic_update_slice") == 2 and "scatter" not in text


def test_donated_append_writes_in_place(optimised):
    k, v = _new(1)
    cache = KVCache.init((3,), 64, 2, 4)
    append = jax.jit(lambda c, k, v: c.append(k, v), donate_argnums=0)
    memory = optimised(append.lower(cache, k, v)).memory_analysis()
    assert memory is not None and memory.alias_size_in_bytes >= cache.k.nbytes + cache.v.nbytes
    assert append(cache, k, v).lengths.tolist() == [1, 1, 1]


def test_dtype_is_the_caches():
    k, v = _new(2)
    cache = KVCache.init((3,), 5, 2, 4, dtype=jnp.bfloat16).append(k, v)
    assert cache.k.dtype == jnp.bfloat16 and np.array_equal(cache.k[:, :2], k.astype(jnp.bfloat16))


@pytest.mark.parametrize("batch", [(), (3,)])
def test_a_full_cache_raises(batch):
    k, v = _new(2, batch)
    append = eqx.filter_jit(lambda c: c.append(k, v))
    cache = append(append(KVCache.init(batch, 5, 2, 4)))
    full = "KVCache is full: max_length=5 tokens would be exceeded by this append; build the cache with a larger max_length."
    with pytest.raises(ValueError) as known:
        cache.append(k, v)
    assert str(known.value) == full
    for compiled in (
        append,
        jax.jit(lambda c: c.append(k, v)),
    ):  # the sentence ends the error, whoever compiles
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError)) as traced:
            jax.block_until_ready(compiled(cache))
        assert str(traced.value).rstrip().endswith(f"ValueError: {full}")
    # One row is enough, and it is what is real that counts.
    if batch:
        cache.append(k, v, new_lengths=jnp.array([1, 1, 0]))
        with pytest.raises(ValueError, match="KVCache is full"):
            cache.append(k, v, new_lengths=jnp.array([0, 2, 0]))


def test_a_full_cache_in_a_batch_of_caches_raises():
    """One that is not full is appended to; a condition for each example would ask the host for all."""
    k, v = _new(2, (2,))
    call = jax.jit(jax.vmap(lambda cache, k, v: cache.append(k, v)))
    cache = call(jax.tree.map(lambda x: jnp.stack([x, x]), KVCache.init((), 3, 2, 4)), k, v)
    assert cache.lengths.tolist() == [2, 2]
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="KVCache is full: max_length=3"):
        jax.block_until_ready(call(cache, k, v))


def test_a_cache_inside_shard_map_is_checked():
    k, v = _new(2)
    rows = jax.sharding.PartitionSpec("data")
    append = lambda cache, k, v: cache.append(k, v)
    with jax.set_mesh(jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,))):
        call = jax.jit(jax.shard_map(append, in_specs=(rows, rows, rows), out_specs=rows))
        cache = call(KVCache.init((3,), 3, 2, 4), k, v)
        assert cache.lengths.tolist() == [2, 2, 2]
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="KVCache is full: max_length=3"):
            jax.block_until_ready(call(cache, k, v))


def test_gradient_passes_through():
    k, v = _new(3)
    weight = normal(5, (3, 5, 2, 4))

    def loss(k):
        cache = KVCache.init((3,), 5, 2, 4).append(k, v, new_lengths=jnp.array([3, 1, 0]))
        return jnp.sum(cache.k * weight)

    grad = np.asarray(jax.grad(loss)(k))
    expected = np.array(weight[:, :3])
    expected[1, 1:] = expected[2] = 0
    assert np.array_equal(grad, expected)


def test_two_ways_to_say_what_is_real():
    both = {"new_lengths": jnp.ones(3, jnp.int32), "mask": jnp.ones((3, 2), bool)}
    with pytest.raises(ValueError, match="new_lengths, mask: expected at most one"):
        KVCache.init((3,), 5, 2, 4).append(*_new(2), **both)
