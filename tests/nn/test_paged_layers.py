"""Layers over pages and slots: batches of prompts' chunks and decodes give each sequence what it gets alone, with a dense cache or
a state of its own. Everything that a batch does not own holds NaN."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx import Buckets, PageTable, RaggedBatch
from ejkernel_eqx.nn import CacheState
from tests.nn import paged_layers as small
from tests.nn import recurrent_layers
from tests.nn.recurrent_layers import EMBED
from tests.recurrence.quick import quick
from tests.tolerances import assert_close


@pytest.mark.few(1)
@pytest.mark.parametrize("name", small.ATTENTION)
def test_attention_equals_the_dense_cache(name):
    layer, x, (expected, dense) = small.attention(name), small.inputs(), small.attention_alone(name)
    table = PageTable(small.PAGES, small.PAGE)
    y, cache = small.serve(
        small.advance(layer), small.poisoned(layer.init_paged_cache(small.PAGES, small.PAGE)), x, table=table
    )
    assert_close(y, expected, name=name)
    assert not cache.is_bound
    k, v = cache.bind(table.rows(range(small.SEQUENCES)), np.full(small.SEQUENCES, small.TOKENS)).gather(
        small.TOKENS
    )
    assert_close(k, dense.k, name="keys")
    assert_close(v, dense.v, name="values")
    unused = sorted(set(range(small.PAGES)) - set(table.rows(range(small.SEQUENCES)).ravel().tolist()))
    assert np.isnan(np.asarray(cache.k)[unused]).all()


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["mamba", "gla", "lightning", "kimi", "qwen3-next"])
def test_a_recurrent_layer_equals_its_own_state(name):
    """From slots that hold NaN; then again from the slots as they were left, which other sequences take."""
    layer, x = recurrent_layers.build(name), small.inputs()
    expected, states = quick(lambda x, state: layer(x, state))(x, layer.init_state(small.SEQUENCES))
    step, pool = small.advance(layer), small.poisoned(layer.init_state(small.SLOTS))
    for seed, slots in ((0, (3, 0, 4)), (1, (4, 3, 1))):
        held = pool
        y, pool = small.serve(step, pool, x, seed, slots)
        assert_close(y, expected, name=name)
        others = np.setdiff1d(np.arange(small.SLOTS), slots)
        for ours, theirs, old in zip(*map(jax.tree.leaves, (pool, states, held)), strict=True):
            assert_close(ours[np.array(slots)], theirs, name=f"{name}, state")
            np.testing.assert_array_equal(ours[others], old[others])


@functools.cache
def compiled():
    """The model over donated caches, and the chunks' sizes for which it was traced."""
    traced = []

    def step(x, caches, batch):
        traced.append(batch.max_query_len)
        return small.in_place(x, caches, batch)

    return quick(step, donate_argnums=1), traced


@pytest.mark.slow
def test_a_hybrid_model_compiles_once_a_bucket():
    """Scanned over stacked layers; sequences come and go, into the slots and pages of others."""
    x, (expected, _), (step, traced) = small.inputs(), small.dense_model(), compiled()
    caches, table = small.poisoned(small.new_caches()), PageTable(small.PAGES, small.PAGE)
    for seed, slots in ((2, (3, 0, 4)), (3, (0, 1, 3))):
        given = caches
        y, caches = small.serve(step, caches, x, seed, slots, table)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))
        assert_close(y, expected, name=f"seed {seed}")
        for n in range(small.SEQUENCES):
            table.free(n)
    assert sorted(traced) == [1, 4]


@pytest.mark.slow
def test_caches_may_be_scanned_over():
    def sliced(x, caches, batch):
        x, layers = small.scanned(lambda block, x, own: block(x, own, batch=batch), x, caches.layers)
        return x, caches.with_layers(layers)

    y, caches = small.serve(
        quick(sliced), small.poisoned(small.new_caches()), small.inputs(), 2, buckets=small.CHUNKS
    )
    assert_close(y, small.dense_model()[0])
    assert isinstance(caches, CacheState) and caches.layers[0].batch_shape == (small.LAYERS,)


@pytest.mark.slow
def test_a_fork_goes_its_own_way():
    """A copied page and a copied slot: parent and child go on with tokens of their own."""
    x, (expected, _) = small.inputs(), small.dense_model()
    (step, _), table = compiled(), PageTable(small.PAGES, small.PAGE)
    caches = small.poisoned(small.new_caches())
    slots = {0: 2, "child": 1, "late": 4}

    def call(work, tokens):
        nonlocal caches
        copies = [copy for name, count in work for copy in table.allocate(name, count)]
        pairs = np.full((2, 2), -1)
        pairs[:, : len(copies)] = np.array(copies).reshape(-1, 2).T
        caches = caches.copy_pages(*pairs)
        batch = small.make_batch(table, work, slots)
        packed = np.full((batch.num_tokens, EMBED), np.nan, np.float32)
        packed[: len(tokens)] = tokens
        y, caches = step(jnp.asarray(packed), caches, batch)
        return np.asarray(y)

    call([(0, 4)], x[0, :4])
    table.fork(0, "child")
    caches = caches.copy_states([slots[0], -1, 0], [slots["child"], 0, -1])
    y = call([(0, 2), ("child", 1)], np.concatenate([x[0, 4:6], x[1, 4:5]]))
    assert_close(y[:2], expected[0, 4:6])
    mixed = np.concatenate([x[0, :4], x[1, 4:6]])
    y = np.stack([y[2], call([("child", 1)], x[1, 5:6])[0]])
    late = [call([("late", 3)], mixed[:3])[:3], call([("late", 3)], mixed[3:])[:3]]
    assert_close(y, np.concatenate(late)[4:], name="child")
    # What the child wrote, the parent does not see.
    assert_close(call([(0, 1)], x[0, 6:7])[0], expected[0, 6], name="parent")


def test_quantised_pages():
    name = "norm, sinks, window"
    layer, x, (expected, _) = small.attention(name), small.inputs(), small.attention_alone(name)
    cache = layer.init_paged_cache(small.PAGES, small.PAGE, dtype=jnp.int8)
    y, cache = small.serve(small.advance(layer), small.poisoned(cache), x, buckets=small.CHUNKS)
    assert cache.k.dtype == jnp.int8 and cache.scales == "token"
    error = np.linalg.norm(y - expected) / np.linalg.norm(expected)
    assert 0 < error < 2e-2


@pytest.mark.slow
def test_sequences_without_a_slot_or_without_tokens():
    """No new token, -1, a slot that is not there: nothing is read or written; in a decode and in a chunk alike."""
    layer = recurrent_layers.build("mamba2")
    x, step = jnp.asarray(small.inputs()[0, :6]), small.advance(layer)
    pool = small.poisoned(layer.init_state(2))
    table, buckets = np.full((4, 2), -1), Buckets((6,), (4,), (2,), (1, 2))
    expected, state = quick(lambda x, state: layer(x, state))(x[:2], layer.init_state(()))
    for n in (1, 2):
        options = {"page_size": 2, "buckets": buckets, "state_indices": [1, 0, -1, 7]}
        batch = RaggedBatch.build([0, n, n, n], [0, n, 4, 3], table, **options)
        y, new = step(x, pool, batch)
        assert_close(y[:n], expected[:n])
        for leaf, own in zip(jax.tree.leaves(new), jax.tree.leaves(state), strict=True):
            assert jnp.isnan(leaf[1]).all()
            if n == 2:
                assert_close(leaf[0], own)
    none = RaggedBatch.build([], [], [], page_size=small.PAGE, state_indices=[])
    each: Any = (layer, pool), (small.attention(), small.attention().init_paged_cache(2, small.PAGE))
    for mixer, cache in each:
        assert mixer(jnp.zeros((0, EMBED)), cache, batch=none)[0].shape == (0, EMBED)


def test_a_cache_comes_back_as_bound_as_it_was():
    layer = small.attention()
    batch = RaggedBatch.build([1], [1], [[1]], page_size=small.PAGE)
    cache, x = layer.init_paged_cache(2, small.PAGE), jnp.ones((1, EMBED))
    for given in (cache, cache.bind(batch)):
        _, new = eqx.filter_eval_shape(layer, x, given, batch=batch)
        assert new.is_bound == given.is_bound
        assert jax.tree.structure(new) == jax.tree.structure(given)


def test_mistakes():
    """`test_wrong_inputs` has others."""
    layer, mixer, x = small.attention(), recurrent_layers.build("mamba2"), jnp.ones((2, EMBED))
    batch = RaggedBatch.build([1, 1], [1, 1], [[0], [1]], page_size=small.PAGE, state_indices=[0, 1])
    pages, pool = layer.init_paged_cache(2, small.PAGE), mixer.init_state(2)
    dropping = small.attention(dropout_rate=0.5)
    y, _ = eqx.filter_eval_shape(dropping, x, pages, batch=batch, inference=True)
    assert y.shape == x.shape
    flat = CacheState.init([mixer, layer], num_pages=2, page_size=2, num_slots=1)
    with pytest.raises(ValueError, match="of_layer: expected caches with one leading axis"):
        flat.of_layer(0, batch)
    with pytest.raises(ValueError, match="layers: expected 2"):
        flat.with_layers([pool])
    assert flat.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(flat))
