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
from ejkernel_eqx.nn import CacheState, KVCache, Mamba2Mixer, MultiHeadAttention, RotaryEmbedding
from tests.nn import recurrent_layers
from tests.nn.paged_layers import (
    attention,
    CHUNKS,
    inputs,
    LAYERS,
    new_caches,
    PAGE,
    PAGES,
    poisoned,
    serve,
    SLOTS,
)
from tests.nn.recurrent_layers import EMBED
from tests.recurrence.quick import quick
from tests.tolerances import assert_close

HEADS, R, ROPE, SCALE = 3, 8, 4, 0.3


class Latent(eqx.Module):
    """Latent attention in its absorbed form: one key for all heads, whose first part is the value too."""

    into: jax.Array  # [E, H * (R + Dr) + R + Dr]
    back: jax.Array  # [H * R, E]
    rope: RotaryEmbedding

    def __init__(self, key):
        width, keys = HEADS * (R + ROPE) + R + ROPE, jax.random.split(key)
        self.into = jax.random.normal(keys[0], (EMBED, width)) / EMBED**0.5
        self.back = jax.random.normal(keys[1], (HEADS * R, EMBED)) / EMBED**0.5
        self.rope = RotaryEmbedding(ROPE)

    def init_paged_cache(self, num_pages, page_size, *, batch_shape=(), dtype=None, scales=None):
        dtype = self.into.dtype if dtype is None else dtype
        return PagedLatentCache.init(
            num_pages, page_size, R, ROPE, batch_shape=batch_shape, dtype=dtype, scales=scales
        )

    def queries_and_keys(self, x, positions):
        q, c, r = jnp.split(x @ self.into, [HEADS * (R + ROPE), HEADS * (R + ROPE) + R], axis=-1)
        q = q.reshape(*x.shape[:-1], HEADS, R + ROPE)
        q = jnp.concatenate([q[..., :R], self.rope(q[..., R:], positions)], -1)
        return q, c, self.rope(r[..., None, :], positions)[..., 0, :]

    def finish(self, out):
        return out.reshape(*out.shape[:-2], HEADS * R) @ self.back

    def __call__(self, x, cache, *, batch):
        x = jnp.where(batch.is_real[:, None], x, 0)
        q, latent, rope = self.queries_and_keys(x, batch.positions)
        attend = ejx.RaggedPagedAttention(softmax_scale=SCALE, append=True)
        sizes = {"query_start_loc": batch.query_start_loc, "max_query_len": batch.max_query_len}
        out, cache = attend(q, cache.bind(batch), latent, rope, **sizes)
        return self.finish(out), cache.unbind()

    def alone(self, x):
        q, latent, rope = self.queries_and_keys(x, jnp.arange(x.shape[-2], dtype=jnp.int32))
        k = jnp.concatenate([latent, rope], -1)[..., None, :]
        out = ejx.FlashAttention(causal=True, softmax_scale=SCALE)(q, k, latent[..., None, :])
        return self.finish(out)


@functools.cache
def stacked():
    def make(key):
        keys = jax.random.split(key, 3)
        mamba = Mamba2Mixer(EMBED, head_dim=12, num_groups=2, state_size=6, key=keys[1])
        return (
            Latent(keys[0]),
            mamba,
            MultiHeadAttention(EMBED, num_heads=4, num_kv_heads=2, head_dim=8, key=keys[2]),
        )

    return eqx.filter_vmap(make)(jax.random.split(jax.random.key(3), LAYERS))


def scanned(body, carry):
    arrays, static = eqx.partition(stacked(), eqx.is_array)
    own = (arrays, jnp.arange(LAYERS))
    return jax.lax.scan(
        lambda carry, own: (body(eqx.combine(own[0], static), carry, own[1]), None), carry, own
    )[0]


def step(x, caches, batch):
    def body(mixers, carry, index):
        x, caches = carry
        layers, numbered = caches.of_layer(index, batch)
        new = []
        for mixer, cache in zip(mixers, layers, strict=True):
            y, cache = mixer(x, cache, batch=numbered)
            x, new = x + y, [*new, cache]
        return x, caches.with_layers(new)

    return scanned(body, (x, caches))


@functools.cache
def expected():
    def body(mixers, x, index):
        x = x + mixers[0].alone(x)
        x = x + mixers[1](x)
        return x + mixers[2](x)

    return quick(lambda x: scanned(body, x))(inputs())


def make(**options):
    sizes: dict[str, Any] = {"num_pages": PAGES, "page_size": PAGE, "num_slots": SLOTS, "batch_shape": LAYERS}
    return CacheState.init(stacked(), **sizes, **options)


@pytest.mark.slow
def test_three_kinds_of_layers_in_place():
    """Pages of keys, latent pages and slots, by the numbers of one batch, donated to each step."""
    given = poisoned(make())
    y, caches = serve(quick(step, donate_argnums=1), given, inputs(), 2, buckets=CHUNKS)
    assert_close(y, expected())
    assert all(x.is_deleted() for x in jax.tree.leaves(given))
    assert isinstance(caches.layers[0], PagedLatentCache)
    assert caches.layers[0].batch_shape == (LAYERS,) and not caches.layers[0].is_bound


@pytest.mark.slow
@pytest.mark.parametrize("scales", ["token", "head"])
def test_quantised_latents(scales):
    """Scales stay where they belong: those of tokens with their pages, the one of a cache with its layer."""
    caches = make(dtype=jnp.int8, scales=scales)
    latents, state, pages = caches.layers
    before = None
    if scales == "head":
        own = jnp.array([0.03, 0.05])
        latents = latents.with_scales(own, own)
        of_heads = jnp.stack([own, own * 1.1], 1)
        pages = pages.with_scales(of_heads, of_heads)
        caches = CacheState((latents, state, pages), 1)
        before = latents.latent_scale, latents.rope_scale, pages.k_scale
    y, caches = serve(quick(step), caches, inputs(), 2, buckets=CHUNKS)
    error = np.linalg.norm(y - expected()) / np.linalg.norm(expected())
    assert 0 < error < 2e-2
    latents, _, pages = caches.layers
    if before is not None:
        assert eqx.tree_equal((latents.latent_scale, latents.rope_scale, pages.k_scale), before)
    else:
        assert latents.latent_scale.shape == (LAYERS, PAGES, PAGE)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("scales", [None, "token", "head"])
def test_pages_are_copied_and_states_are(scales):
    """In every layer of a stack, and nothing else is touched."""
    caches = make(dtype=None if scales is None else jnp.int8, scales=scales)
    random = np.random.default_rng(0)
    draw = lambda x: jnp.asarray(random.integers(-9, 9, x.shape), x.dtype)
    caches = jax.tree.map(draw, caches)
    new = quick(lambda c: c.copy_pages([3, -1, 5, 7], [0, 2, 3, PAGES]).copy_states([4, 1, -1], [1, 0, 2]))(
        caches
    )
    order, slots = np.arange(PAGES), np.arange(SLOTS)
    order[[0, 3]], slots[[1, 0]] = [3, 5], [4, 1]
    for index, (old, got) in enumerate(zip(caches.layers, new.layers, strict=True)):
        places = slots if index == 1 else order
        for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(got), strict=True):
            np.testing.assert_array_equal(b, a[:, places] if a.ndim > 2 else a)


def test_a_state_refuses_what_does_not_belong(unchecked):
    layer, mixer = attention(), recurrent_layers.build("mamba2")
    batch = RaggedBatch.build([1], [1], [[1]], page_size=PAGE, state_indices=[0])
    sizes: dict[str, Any] = {"num_pages": 4, "page_size": PAGE, "num_slots": 2}
    flat, stack = (
        CacheState.init([layer, mixer], **sizes),
        CacheState.init([layer, mixer], **sizes, batch_shape=3),
    )
    pages, pool = flat.layers

    def refused(match, function, *args):
        with pytest.raises(ValueError, match=match):
            function(*args)

    bound = r"layers\[0\]: expected a PagedKVCache that is bound to no tables.*unbind"
    refused(bound, flat.with_layers, [pages.bind(batch), pool])
    refused(bound, CacheState, (pages.bind(batch), pool))
    latents = PagedLatentCache.init(4, PAGE, 8, 4)
    other = CacheState((pool, latents))
    refused(
        r"layers\[1\]: expected a PagedLatentCache that is bound",
        other.with_layers,
        [pool, latents.bind(batch)],
    )
    refused(
        r"layers\[0\]: expected the result of a call with the PagedKVCache", flat.with_layers, [pool, pages]
    )
    refused(r"layers\[1\].*received NoneType", flat.with_layers, [pages, None])
    narrow = layer.init_paged_cache(4, PAGE, dtype=jnp.bfloat16)
    refused(r"layers\[0\].*float32\[4, 3, 2, 8\].*bfloat16", flat.with_layers, [narrow, pool])
    refused(r"layers\[0\]: expected the result", flat.with_layers, [layer.init_paged_cache(5, PAGE), pool])
    refused(r"layers\[1\]: expected the result", stack.with_layers, [stack.layers[0], pool])
    refused(r"layers\[0\].*received KVCache", flat.with_layers, [KVCache.init((), 4, 2, 8), pool])
    refused("index: expected 0 to 2, received -1", stack.of_layer, -1, batch)
    refused("index: expected 0 to 2, received 3", stack.of_layer, np.int32(3), batch)
    refused("index: expected one integer, received float32", stack.of_layer, 1.0, batch)
    refused("index: expected one integer", stack.of_layer, jnp.arange(3), batch)
    lead: dict[str, Any] = {"batch_shape": 3}
    uneven = CacheState((layer.init_paged_cache(4, PAGE, **lead), layer.init_paged_cache(5, PAGE, **lead)), 1)
    refused(r"layers: expected equal numbers of pages, received \[4, 5\]", uneven.of_layer, 0, batch)
    uneven = CacheState((mixer.init_state((3, 2)), mixer.init_state((3, 4))), 1)
    refused(r"layers: expected equal numbers of slots, received \[2, 4\]", uneven.of_layer, 0, batch)
    refused("buckets: expected Buckets or None, received tuple", _build, (8, 4, 5, 4))
    refused("buckets: expected Buckets or None, received dict", _build, {"tokens": (8,)})


def _build(buckets):
    return RaggedBatch.build([1], [1], [[0]], page_size=2, buckets=buckets)


@pytest.mark.parametrize("given", [4, "4", None, (), (2, 1), (0,), ((4,),)])
def test_buckets_are_tuples_of_sizes(given, unchecked):
    with pytest.raises(ValueError, match="sequences: expected"):
        ejx.Buckets((8,), given, (5,), (4,))


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_state_is_a_tree_like_any_other(unchecked):
    """Its structure may hold shapes, axes and nothing at all; layers that were merged come back apart."""
    caches = new_caches()
    shapes = jax.eval_shape(new_caches)
    assert jax.tree.structure(shapes) == jax.tree.structure(caches) and shapes.nbytes == caches.nbytes
    arrays, rest = eqx.partition(caches, eqx.is_array)
    assert_same(eqx.combine(arrays, rest), caches)
    axes = jax.tree.map(lambda _: 0, caches)
    doubled = quick(functools.partial(jax.tree.map, lambda x: jnp.stack([x, x + 1])))(caches)
    batch = RaggedBatch.build([1], [1], [[1]], page_size=PAGE, state_indices=[0])

    def there_and_back(caches, index):
        return caches.with_layers(caches.of_layer(index, batch)[0])

    back = quick(jax.vmap(there_and_back, (axes, 0)))(doubled, jnp.arange(2))
    assert_same(back, doubled)
    whole = CacheState(0, caches.batch_ndim)  # pyright: ignore[reportArgumentType]
    copied = quick(jax.vmap(lambda c: c.copy_pages(jnp.array([0]), jnp.array([1])), (whole,), whole))(doubled)
    one = quick(lambda c: c.copy_pages(jnp.array([0]), jnp.array([1])))(jax.tree.map(lambda x: x[0], doubled))
    assert_same(jax.tree.map(lambda x: x[0], copied), one)
