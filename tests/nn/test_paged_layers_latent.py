"""`CacheState` with latent pages among the others, and what it refuses."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx import PagedLatentCache, RaggedBatch
from ejkernel_eqx.nn import CacheState, KVCache
from tests.nn import paged_layers as small
from tests.nn import recurrent_layers
from tests.recurrence.quick import quick
from tests.tolerances import assert_close


def step(x, caches, batch):
    return small.in_place(x, caches, batch, small.stacked(latent=True))


@pytest.mark.slow
def test_three_kinds_of_layers_in_place():
    """Pages of keys, latent pages and slots, by the numbers of one batch, donated to each step."""
    before = small.poisoned(small.new_caches(latent=True))
    y, caches = small.serve(quick(step, donate_argnums=1), before, small.inputs(), 2, buckets=small.CHUNKS)
    assert_close(y, small.dense_model(latent=True)[0])
    assert all(x.is_deleted() for x in jax.tree.leaves(before))
    assert isinstance(caches.layers[0], PagedLatentCache)
    assert caches.layers[0].batch_shape == (small.LAYERS,) and not caches.layers[0].is_bound


@pytest.mark.slow
@pytest.mark.parametrize("scales", ["token", "head"])
def test_quantised_latents(scales):
    """Scales stay where they belong: those of tokens with their pages, the one of a cache with its layer."""
    caches = small.new_caches(latent=True, dtype=jnp.int8, scales=scales)
    expected = small.dense_model(latent=True)[0]
    scales_of = lambda layers: (layers[0].latent_scale, layers[0].rope_scale, layers[2].k_scale)
    if scales == "head":
        latents, state, pages = caches.layers
        own = jnp.array([0.03, 0.05])
        of_heads = jnp.stack([own, own * 1.1], 1)
        latents, pages = latents.with_scales(own, own), pages.with_scales(of_heads, of_heads)
        caches = CacheState((latents, state, pages), 1)
    y, new = small.serve(quick(step), caches, small.inputs(), 2, buckets=small.CHUNKS)
    assert 0 < np.linalg.norm(y - expected) / np.linalg.norm(expected) < 2e-2
    assert scales == "token" or eqx.tree_equal(scales_of(new.layers), scales_of(caches.layers))
    assert scales == "head" or new.layers[0].latent_scale.shape == (small.LAYERS, small.PAGES, small.PAGE)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("scales", ["token", "head"])
def test_pages_are_copied_and_states_are(scales):
    """In every layer of a stack, and nothing else is touched."""
    random = np.random.default_rng(0)
    draw = lambda x: jnp.asarray(random.integers(-9, 9, x.shape), x.dtype)
    caches = jax.tree.map(draw, small.new_caches(latent=True, dtype=jnp.int8, scales=scales))
    pages, states = ([3, -1, 5, 7], [0, 2, 3, small.PAGES]), ([4, 1, -1], [1, 0, 2])
    new = quick(lambda c: c.copy_pages(*pages).copy_states(*states))(caches)
    order, slots = np.arange(small.PAGES), np.arange(small.SLOTS)
    order[[0, 3]], slots[[1, 0]] = [3, 5], [4, 1]
    for index, (old, got) in enumerate(zip(caches.layers, new.layers, strict=True)):
        places = slots if index == 1 else order
        for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(got), strict=True):
            np.testing.assert_array_equal(b, a[:, places] if a.ndim > 2 else a)


def test_a_state_refuses_what_does_not_belong(unchecked):
    layer, mixer = small.attention(), recurrent_layers.build("mamba2")
    batch = RaggedBatch.build([1], [1], [[1]], page_size=small.PAGE, state_indices=[0])
    sizes: dict[str, Any] = {"num_pages": 4, "page_size": small.PAGE, "num_slots": 2}
    lead: dict[str, Any] = {"batch_shape": 3}
    flat, stack = (CacheState.init([layer, mixer], **sizes, **more) for more in ({}, lead))
    pages, pool = flat.layers
    latents = PagedLatentCache.init(4, small.PAGE, 8, 4)
    narrow = layer.init_paged_cache(4, small.PAGE, dtype=jnp.bfloat16)
    other = CacheState((pool, latents))
    bound = r"layers\[0\]: expected a PagedKVCache that is bound to no tables.*unbind"
    result = r"layers\[0\]: expected the result"
    of_pages = CacheState(tuple(layer.init_paged_cache(n, small.PAGE, **lead) for n in (4, 5)), 1)
    of_slots = CacheState(tuple(mixer.init_state((3, n)) for n in (2, 4)), 1)
    cases: list[Any] = [
        (bound, flat.with_layers, [pages.bind(batch), pool]),
        (bound, CacheState, (pages.bind(batch), pool)),
        (r"layers\[1\]: expected a PagedLatentCache that is bound", other.with_layers, [pool, latents.bind(batch)]),
        (result + " of a call with the PagedKVCache", flat.with_layers, [pool, pages]),
        (r"layers\[1\].*received NoneType", flat.with_layers, [pages, None]),
        (r"layers\[0\].*float32\[4, 3, 2, 8\].*bfloat16", flat.with_layers, [narrow, pool]),
        (result, flat.with_layers, [layer.init_paged_cache(5, small.PAGE), pool]),
        (r"layers\[1\]: expected the result", stack.with_layers, [stack.layers[0], pool]),
        (r"layers\[0\].*received KVCache", flat.with_layers, [KVCache.init((), 4, 2, 8), pool]),
        ("index: expected 0 to 2, received -1", stack.of_layer, -1, batch),
        ("index: expected 0 to 2, received 3", stack.of_layer, np.int32(3), batch),
        ("index: expected one integer, received float32", stack.of_layer, 1.0, batch),
        ("index: expected one integer", stack.of_layer, jnp.arange(3), batch),
        (r"layers: expected equal numbers of pages, received \[4, 5\]", of_pages.of_layer, 0, batch),
        (r"layers: expected equal numbers of slots, received \[2, 4\]", of_slots.of_layer, 0, batch),
        ("buckets: expected Buckets or None, received tuple", _build, (8, 4, 5, 4)),
        ("buckets: expected Buckets or None, received dict", _build, {"tokens": (8,)}),
    ]  # fmt: skip
    for match, function, *args in cases:
        with pytest.raises(ValueError, match=match):
            function(*args)


def _build(buckets):
    return RaggedBatch.build([1], [1], [[0]], page_size=2, buckets=buckets)


@pytest.mark.parametrize("given", [4, "4", None, (), (2, 1), (0,), ((4,),)])
def test_buckets_are_tuples_of_sizes(given, unchecked):
    with pytest.raises(ValueError, match="sequences: expected"):
        ejx.Buckets((8,), given, (5,), (4,))


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_state_is_a_tree_like_any_other(unchecked):
    """Its structure may hold shapes, axes and nothing at all; layers that were merged come back apart."""
    caches = small.new_caches()
    shapes = jax.eval_shape(small.new_caches)
    assert jax.tree.structure(shapes) == jax.tree.structure(caches) and shapes.nbytes == caches.nbytes
    arrays, rest = eqx.partition(caches, eqx.is_array)
    assert_same(eqx.combine(arrays, rest), caches)
    axes = jax.tree.map(lambda _: 0, caches)
    doubled = quick(functools.partial(jax.tree.map, lambda x: jnp.stack([x, x + 1])))(caches)
    batch = RaggedBatch.build([1], [1], [[1]], page_size=small.PAGE, state_indices=[0])

    def there_and_back(caches, index):
        return caches.with_layers(caches.of_layer(index, batch)[0])

    back = quick(jax.vmap(there_and_back, (axes, 0)))(doubled, jnp.arange(2))
    assert_same(back, doubled)
    whole = CacheState(0, caches.batch_ndim)  # pyright: ignore[reportArgumentType]
    copied = quick(jax.vmap(lambda c: c.copy_pages(jnp.array([0]), jnp.array([1])), (whole,), whole))(doubled)
    one = quick(lambda c: c.copy_pages(jnp.array([0]), jnp.array([1])))(jax.tree.map(lambda x: x[0], doubled))
    assert_same(jax.tree.map(lambda x: x[0], copied), one)
