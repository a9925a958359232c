"""Rows that do not fit into a cache, in programs traced as for a GPU: one of them is closed, and nothing asks the host."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.nn import KVCache
from tests.arrays import normal
from tests.models.test_rows_as_pages import equations

ROWS, LENGTH = 3, 8
FULL = "KVCache is full: max_length=8 tokens would be exceeded by this append; build the cache with a larger max_length."
SIZES = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
SPARSE = {
    "block_size": 2,
    "num_blocks": 2,
    "compression_size": 2,
    "compression_stride": 2,
    "sliding_window": 2,
}
LATENT = {"num_heads": 2, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}


@contextlib.contextmanager
def traced_for_a_gpu() -> Iterator[None]:
    """XLA's programs that are made here are those for a GPU, and run wherever JAX is."""
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        yield


@functools.cache
def layer_of(kind: str) -> Any:
    options: Any = {"platform": "xla", "key": jax.random.key(0)}
    if kind == "latent":
        return ejx.nn.MultiHeadLatentAttention(16, v_head_dim=8, **LATENT, **options)
    if kind == "sparse":
        return ejx.nn.NativeSparseAttention(16, **SIZES, **SPARSE, **options)
    return ejx.nn.MultiHeadAttention(16, **SIZES, **options)


def filled(layer: Any, lengths: list[int]) -> Any:
    """A cache with rows of these lengths."""
    real = jnp.arange(LENGTH)[None] < jnp.asarray(lengths)[:, None]
    return layer(normal(1, (ROWS, LENGTH, 16)), layer.init_cache(ROWS, LENGTH), padding_mask=real)[1]


def stored(cache: Any, row: int) -> list[np.ndarray]:
    return [np.asarray(x[row]) for x in jax.tree.leaves(cache) if x.ndim > 1]


def asks_the_host(function: Any, *args: Any) -> bool:
    program, _, _ = eqx.filter_make_jaxpr(function)(*args)
    names = {eqn.primitive.name for eqn in equations(program.jaxpr)}
    return any("callback" in name or name == "cond" for name in names)


@pytest.mark.few(1)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", ["attention", "latent", "sparse"])
def test_a_full_row_is_closed_and_others_are_exact(kind, masked):
    layer, x = layer_of(kind), normal(2, (ROWS, 2, 16))
    cache, other = filled(layer, [3, LENGTH - 1, LENGTH - 2]), filled(layer, [3, LENGTH - 2, LENGTH - 2])
    mask = jnp.ones((ROWS, 2), bool) if masked else None
    step = lambda layer, x, cache, mask: layer(x, cache, padding_mask=mask)
    with traced_for_a_gpu():
        assert not asks_the_host(step, layer, x, cache, mask)
        with pytest.raises(ValueError) as known:
            layer(x, cache, padding_mask=mask)
        assert str(known.value) == FULL
        y, after = eqx.filter_jit(step)(layer, x, cache, mask)
        expected, _ = eqx.filter_jit(step)(layer, x, other, mask)
        # One token fits, but those before it are missing.
        z, later = eqx.filter_jit(step)(layer, x[:, :1], after, jnp.asarray([[False], [True], [False]]))
    assert np.all(np.isnan(y[1])) and np.array_equal(y[::2], expected[::2])
    assert np.all(np.isnan(z[1]))
    for new in (after, later):
        assert new.overflowed.tolist() == [False, True, False]
        assert new.lengths.tolist() == [5, LENGTH - 1, LENGTH]
        assert all(map(np.array_equal, stored(new, 1), stored(cache, 1)))
    assert not any(map(np.array_equal, stored(after, 0)[:2], stored(cache, 0)[:2]))


@pytest.mark.parametrize("batch", [(), (ROWS,)])
@pytest.mark.parametrize("masked", [False, True])
def test_appending_to_a_full_cache(batch, masked):
    k, v = normal(3, (*batch, 2, 1, 8)), normal(4, (*batch, 2, 1, 8))
    mask = jnp.asarray([False, True]) if masked else None
    with traced_for_a_gpu():
        append = jax.jit(lambda cache: cache.append(k, v, mask=mask))
        cache = KVCache.init(batch, 2 if masked else 5, 1, 8)
        full = append(append(cache))
        again = append(full)
        assert not asks_the_host(lambda cache: cache.append(k, v, mask=mask), cache)
        with ejx.check_values():
            assert asks_the_host(lambda cache: cache.append(k, v, mask=mask), cache)
    assert asks_the_host(lambda cache: cache.append(k, v, mask=mask), cache)
    assert not np.any(full.overflowed) and np.all(again.overflowed)
    assert np.array_equal(again.lengths, full.lengths) and np.all(full.lengths == (2 if masked else 4))
    assert np.array_equal(again.k, full.k) and np.array_equal(again.v, full.v) and np.any(full.k)


def test_a_row_without_new_tokens_is_not_full():
    k, v = normal(3, (ROWS, 2, 1, 8)), normal(4, (ROWS, 2, 1, 8))
    with traced_for_a_gpu():
        append = jax.jit(lambda cache, count: cache.append(k, v, new_lengths=count))
        cache = append(KVCache.init(ROWS, 3, 1, 8), jnp.asarray([2, 2, 1]))
        cache = append(cache, jnp.asarray([1, 0, 2]))
        cache = append(cache, jnp.asarray([0, 2, 0]))
    assert cache.overflowed.tolist() == [False, True, False] and cache.lengths.tolist() == [3, 2, 3]


def test_caches_of_three_fields_have_no_closed_rows():
    cache = KVCache.init((2, ROWS), 4, 1, 8)
    assert eqx.tree_equal(KVCache(cache.k, cache.v, cache.lengths), cache)
    axes: Any = KVCache(0, 0, 0)
    assert jax.tree.leaves(axes) == [0] * 4
