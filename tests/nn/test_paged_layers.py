"""Layers over pages and slots: batches of prompts' chunks and decodes give each sequence what it gets alone, with a dense cache or
a state of its own. Everything that a batch does not own holds NaN."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx import Buckets, PagedKVCache, PageTable, RaggedBatch
from ejkernel_eqx.nn import CacheState, KVCache, Mamba2Mixer, MultiHeadAttention, RotaryEmbedding
from tests.nn import recurrent_layers
from tests.nn.recurrent_layers import EMBED
from tests.recurrence.quick import quick
from tests.tolerances import assert_close

SEQUENCES, TOKENS, PAGE, PAGES, SLOTS = 3, 10, 3, 14, 5
BUCKETS = Buckets((8,), (4,), (5,), (1, 4))
CHUNKS = Buckets((8,), (4,), (5,), (4,))  # decodes go as chunks
ATTENTION = {
    "gqa, rope": {},
    "mqa, gate, V != D": {"num_kv_heads": 1, "output_gate": True, "v_head_dim": 6},
    "norm, sinks, window": {"qk_norm": True, "sinks": True, "sliding_window": 4, "use_qkv_bias": True},
    "cap, pair": {"logits_soft_cap": 2.0, "sliding_window": (5, 0), "rope": None},
}


def attention(name="gqa, rope", **changes):
    options = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "rope": RotaryEmbedding(8)}
    layer = MultiHeadAttention(EMBED, **(options | ATTENTION[name] | changes), key=jax.random.key(0))
    if layer.sinks is None:
        return layer
    return eqx.tree_at(lambda m: m.sinks, layer, jnp.array([0.5, -1.0, 2.0, 0.0]))


def poisoned(caches):
    full = lambda x: jnp.full_like(x, jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else 77)
    return jax.tree.map(full, caches)


def advance(layer):
    """A step of the layer, whose output for padding must be finite as well."""
    call = quick(lambda x, cache, batch: layer(x, cache, batch=batch))

    def step(x, cache, batch):
        y, cache = call(x, cache, batch)
        assert jnp.isfinite(y).all()
        return y, cache

    return step


@functools.cache
def attention_alone(name):
    layer = attention(name)
    return quick(lambda x, cache: layer(x, cache))(inputs(), layer.init_cache(SEQUENCES, TOKENS))


def schedule(seed):
    """Rounds of `(sequence, new tokens)` until every sequence has all its tokens: chunks, decodes, both, in any order."""
    random, done = np.random.default_rng(seed), np.zeros(SEQUENCES, int)
    while (done < TOKENS).any():
        chosen = [int(n) for n in random.permutation(SEQUENCES) if done[n] < TOKENS and random.random() < 0.8]
        counts = [1 if random.random() < 0.6 else int(random.integers(2, 5)) for _ in chosen]
        if random.random() < 0.4:
            counts = [1] * len(chosen)
        work = [(n, min(count, TOKENS - int(done[n]))) for n, count in zip(chosen, counts)]
        while sum(count for _, count in work) > BUCKETS.tokens[-1]:
            work.pop()
        for n, count in work:
            done[n] += count
        yield work


def make_batch(table, work, slots, buckets=BUCKETS):
    """The batch of a round whose tokens the table already counts."""
    names = [n for n, _ in work]
    return RaggedBatch.build(
        [count for _, count in work],
        [table.length(n) for n in names],
        table.rows(names),
        page_size=PAGE,
        buckets=buckets,
        state_indices=[slots[n] for n in names],
    )


def pack(x, work, before, size):
    """The round's tokens side by side, NaN behind them."""
    real = [x[n, before[n] : before[n] + count] for n, count in work]
    packed = np.full((size, x.shape[-1]), np.nan, np.float32)
    if real:
        rows = np.concatenate(real)
        packed[: len(rows)] = rows
    return jnp.asarray(packed)


def serve(step, caches, x, seed=0, slots=(3, 0, 4), table=None, buckets=BUCKETS):
    """What every sequence gets `[n, T, E]`, through the rounds of a schedule; `step` is `(x, caches, batch) -> (y, caches)`."""
    table = PageTable(PAGES, PAGE) if table is None else table
    before, y, kinds = [0] * SEQUENCES, np.full(x.shape, np.nan, np.float32), set()
    for work in schedule(seed):
        for n, count in work:
            assert not table.allocate(n, count)
        batch = make_batch(table, work, slots, buckets)
        out, caches = step(pack(x, work, before, batch.num_tokens), caches, batch)
        kinds.add(batch.is_decode)
        for (n, count), start in zip(work, np.asarray(batch.query_start_loc)):
            y[n, before[n] : before[n] + count] = out[start : start + count]
            before[n] += count
    assert kinds == {size == 1 for size in buckets.query_len}
    return y, caches


def inputs():
    return np.asarray(recurrent_layers.inputs(SEQUENCES, TOKENS))


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_equals_the_dense_cache(name):
    layer, x, (expected, dense) = attention(name), inputs(), attention_alone(name)
    table = PageTable(PAGES, PAGE)
    y, cache = serve(advance(layer), poisoned(layer.init_paged_cache(PAGES, PAGE)), x, table=table)
    assert_close(y, expected, name=name)
    assert not cache.is_bound
    k, v = cache.bind(table.rows(range(SEQUENCES)), np.full(SEQUENCES, TOKENS)).gather(TOKENS)
    assert_close(k, dense.k, name="keys")
    assert_close(v, dense.v, name="values")
    unused = sorted(set(range(PAGES)) - set(table.rows(range(SEQUENCES)).ravel().tolist()))
    assert np.isnan(np.asarray(cache.k)[unused]).all()


MIXERS = ["mamba", "mamba2", "kimi", "qwen3-next"]


@pytest.mark.parametrize(
    "name", [*MIXERS, *(pytest.param(name, marks=pytest.mark.slow) for name in ("gla", "lightning"))]
)
def test_a_recurrent_layer_equals_its_own_state(name):
    """From slots that hold NaN; then again from the slots as they were left, which other sequences take."""
    layer, x = recurrent_layers.build(name), inputs()
    expected, states = quick(lambda x, state: layer(x, state))(x, layer.init_state(SEQUENCES))
    step, pool = advance(layer), poisoned(layer.init_state(SLOTS))
    for seed, slots in ((0, (3, 0, 4)), (1, (4, 3, 1))):
        held = pool
        y, pool = serve(step, pool, x, seed, slots)
        assert_close(y, expected, name=name)
        others = np.setdiff1d(np.arange(SLOTS), slots)
        for ours, theirs, old in zip(*map(jax.tree.leaves, (pool, states, held)), strict=True):
            assert_close(ours[np.array(slots)], theirs, name=f"{name}, state")
            np.testing.assert_array_equal(ours[others], old[others])


class Block(eqx.Module):
    """A model of one attention and one recurrent layer; stacked, of two of each."""

    mixers: tuple[MultiHeadAttention, Mamba2Mixer]

    def __init__(self, key):
        keys = jax.random.split(key)
        rope = RotaryEmbedding(8)
        self.mixers = (
            MultiHeadAttention(EMBED, num_heads=4, num_kv_heads=2, head_dim=8, rope=rope, key=keys[0]),
            Mamba2Mixer(EMBED, head_dim=12, num_groups=2, state_size=6, key=keys[1]),
        )

    def __call__(self, x, caches, **options):
        new = []
        for mixer, cache in zip(self.mixers, caches, strict=True):
            y, cache = mixer(x, cache, **options)
            x = x + y
            new.append(cache)
        return x, tuple(new)


LAYERS = 2


@functools.cache
def stacked():
    return eqx.filter_vmap(Block)(jax.random.split(jax.random.key(0), LAYERS))


def scanned(function, carry, *others):
    """`function(block, carry, *others)` over the stack."""
    arrays, static = eqx.partition(stacked(), eqx.is_array)
    body = lambda carry, own: function(eqx.combine(own[0], static), carry, *own[1:])
    return jax.lax.scan(body, carry, (arrays, *others))


@functools.cache
def dense_model():
    mixers = stacked().mixers
    caches = (
        mixers[0].init_cache((LAYERS, SEQUENCES), TOKENS),
        mixers[1].init_state((LAYERS, SEQUENCES)),
    )
    return quick(lambda x: scanned(lambda block, x, own: block(x, own), x, caches))(inputs())


def in_place(x, caches, batch):
    """With the caches in the carry."""

    def body(block, carry, index):
        x, caches = carry
        layers, numbered = caches.of_layer(index, batch)
        x, layers = block(x, layers, batch=numbered)
        return (x, caches.with_layers(layers)), None

    return scanned(body, (x, caches), jnp.arange(LAYERS))[0]


def sliced(x, caches, batch):
    """With a layer's caches scanned over."""
    x, layers = scanned(lambda block, x, own: block(x, own, batch=batch), x, caches.layers)
    return x, caches.with_layers(layers)


def new_caches(**options):
    sizes: dict[str, Any] = {"num_pages": PAGES, "page_size": PAGE, "num_slots": SLOTS, "batch_shape": LAYERS}
    return CacheState.init(stacked().mixers, **sizes, **options)


@functools.cache
def compiled():
    """The model over donated caches, and the chunks' sizes for which it was traced."""
    traced = []

    def step(x, caches, batch):
        traced.append(batch.max_query_len)
        return in_place(x, caches, batch)

    return quick(step, donate_argnums=1), traced


def test_a_hybrid_model_compiles_once_a_bucket():
    """Scanned over stacked layers; sequences come and go, into the slots and pages of others."""
    x, (expected, _), (step, traced) = inputs(), dense_model(), compiled()
    caches, table = poisoned(new_caches()), PageTable(PAGES, PAGE)
    for seed, slots in ((2, (3, 0, 4)), (3, (0, 1, 3))):
        given = caches
        y, caches = serve(step, caches, x, seed, slots, table)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))
        assert_close(y, expected, name=f"seed {seed}")
        for n in range(SEQUENCES):
            table.free(n)
    assert sorted(traced) == [1, 4]


def test_caches_may_be_scanned_over():
    y, caches = serve(quick(sliced), poisoned(new_caches()), inputs(), 2, buckets=CHUNKS)
    assert_close(y, dense_model()[0])
    assert isinstance(caches, CacheState) and caches.layers[0].batch_shape == (LAYERS,)


def test_a_fork_goes_its_own_way():
    """A copied page and a copied slot: parent and child go on with tokens of their own."""
    x, (expected, _) = inputs(), dense_model()
    (step, _), caches, table = compiled(), poisoned(new_caches()), PageTable(PAGES, PAGE)
    slots = {0: 2, "child": 1, "late": 4}

    def call(work, tokens):
        nonlocal caches
        copies = [copy for name, count in work for copy in table.allocate(name, count)]
        pairs = np.full((2, 2), -1)
        pairs[:, : len(copies)] = np.array(copies).reshape(-1, 2).T
        caches = caches.copy_pages(*pairs)
        batch = make_batch(table, work, slots)
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
    layer, x, (expected, _) = attention(name), inputs(), attention_alone(name)
    cache = layer.init_paged_cache(PAGES, PAGE, dtype=jnp.int8)
    y, cache = serve(advance(layer), poisoned(cache), x, buckets=CHUNKS)
    assert cache.k.dtype == jnp.int8 and cache.scales == "token"
    error = np.linalg.norm(y - expected) / np.linalg.norm(expected)
    assert 0 < error < 2e-2


def test_scales_a_head_stay_with_their_layer():
    caches = new_caches(dtype=jnp.int8, scales="head")
    pages = caches.layers[0].with_scales(jnp.array([[0.1, 0.2], [0.3, 0.4]]), jnp.ones((2, 2)))
    caches = CacheState((pages, caches.layers[1]), 1)
    batch = RaggedBatch.build([1], [1], [[2]], page_size=PAGE, state_indices=[1])
    (first, states), numbered = caches.of_layer(1, batch)
    assert first.k.shape[0] == LAYERS * PAGES and states.recurrent.shape[0] == LAYERS * SLOTS
    np.testing.assert_array_equal(first.k_scale, pages.k_scale[1])
    assert numbered.page_table.tolist() == [[PAGES + 2]]
    assert numbered.state_indices is not None and numbered.state_indices.tolist() == [SLOTS + 1]
    back = caches.with_layers([first, states])
    assert all(
        a.shape == b.shape for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(caches), strict=True)
    )
    np.testing.assert_array_equal(back.layers[0].k_scale, pages.k_scale)


def test_sequences_without_a_slot_or_without_tokens():
    """No new token, -1, a slot that is not there: nothing is read or written; in a decode and in a chunk alike."""
    layer = recurrent_layers.build("mamba2")
    x, pool, step = jnp.asarray(inputs()[0, :6]), poisoned(layer.init_state(2)), advance(layer)
    table, buckets = np.zeros((4, 2), int), Buckets((6,), (4,), (2,), (1, 2))
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
    none = RaggedBatch.build([], [], [], page_size=PAGE, state_indices=[])
    other, nothing = attention(), jnp.zeros((0, EMBED))
    assert layer(nothing, pool, batch=none)[0].shape == (0, EMBED)
    assert other(nothing, other.init_paged_cache(2, PAGE), batch=none)[0].shape == (0, EMBED)


def test_a_cache_comes_back_as_bound_as_it_was():
    layer = attention()
    batch = RaggedBatch.build([1], [1], [[1]], page_size=PAGE)
    cache, x = layer.init_paged_cache(2, PAGE), jnp.ones((1, EMBED))
    for given in (cache, cache.bind(batch)):
        _, new = eqx.filter_eval_shape(layer, x, given, batch=batch)
        assert new.is_bound == given.is_bound
        assert jax.tree.structure(new) == jax.tree.structure(given)


def test_mistakes():
    layer, mixer = attention(), recurrent_layers.build("mamba2")
    x, real = jnp.ones((2, EMBED)), jnp.ones(2, bool)
    batch = RaggedBatch.build([1, 1], [1, 1], [[0], [1]], page_size=PAGE, state_indices=[0, 1])
    pages, pool = layer.init_paged_cache(2, PAGE), mixer.init_state(2)
    ids = jnp.zeros(2, jnp.int32)

    def refused(match, function, *args, **kwargs):
        with pytest.raises(ValueError, match=match):
            function(*args, **kwargs)

    refused("batch: expected a RaggedBatch with a PagedKVCache", layer, x, pages)
    refused("cache: expected a PagedKVCache with batch, received NoneType", layer, x, batch=batch)
    refused("received KVCache", layer, x, KVCache.init((), 4, 2, 8), batch=batch)
    refused(r"x: expected \[T, E\] = \[2, 24\]", layer, x[:1], pages, batch=batch)
    refused(r"x: expected \[T, E\] = \[2, 24\]", layer, x[None], pages, batch=batch)
    others = {"kv_input": x, "bias": x, "mask": real[None], "positions": ids, "kv_padding_mask": real}
    for name, value in {**others, "padding_mask": real, "segment_ids": ids}.items():
        refused(f"^{name}: expected None with batch", layer, x, pages, batch=batch, **{name: value})
    refused("cache: expected pages of one layer", layer, x, PagedKVCache.init(2, PAGE, 1, 8), batch=batch)
    stack = layer.init_paged_cache(2, PAGE, batch_shape=3)
    refused(r"batch_shape \(3,\)", layer, x, stack, batch=batch)
    refused("page_size=4", layer, x, layer.init_paged_cache(2, 4), batch=batch)
    across = attention(causal=False, rope=None)
    refused("causal=False", across, x, across.init_paged_cache(2, PAGE), batch=batch)
    dropping = attention(dropout_rate=0.5)
    refused("inference: expected True", dropping, x, pages, batch=batch)
    y, _ = eqx.filter_eval_shape(dropping, x, pages, batch=batch, inference=True)
    assert y.shape == x.shape

    for name, value in {"padding_mask": real, "segment_ids": ids, "cu_seqlens": ids}.items():
        refused(f"^{name}: expected None with batch", mixer, x, pool, batch=batch, **{name: value})
    refused("state: expected a RecurrentState with batch", mixer, x, batch=batch)
    refused("state: expected a pool with slots", mixer, x, mixer.init_state(0), batch=batch)
    refused("state: expected arrays of shapes", mixer, x, mixer.init_state((2, 2)), batch=batch)
    refused(r"x: expected \[T, E\]", mixer, x[None], pool, batch=batch)
    stateless = RaggedBatch.build([1, 1], [1, 1], [[0], [1]], page_size=PAGE)
    refused("batch: expected state_indices", mixer, x, pool, batch=stateless)

    sizes: dict[str, Any] = {"num_pages": 2, "page_size": 2}
    refused(r"mixers\[0\]: expected an attention layer", CacheState.init, [x], **sizes, num_slots=1)
    refused("num_slots", CacheState.init, [mixer], **sizes, num_slots=0)
    flat = CacheState.init([mixer, layer], **sizes, num_slots=1)
    refused("of_layer: expected caches of one stack", flat.of_layer, 0, batch)
    refused("layers: expected 2", flat.with_layers, [pool])
    assert flat.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(flat))
