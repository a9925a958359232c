"""Layers over pages and slots at small sizes, and rounds of decodes and chunks that serve a few sequences with them."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_eqx import Buckets, nn, PageTable, RaggedBatch
from ejkernel_eqx.nn import CacheState, MultiHeadAttention, RotaryEmbedding
from tests.nn import recurrent_layers
from tests.nn.recurrent_layers import EMBED
from tests.recurrence.quick import quick

SEQUENCES, TOKENS, PAGE, PAGES, SLOTS = 3, 10, 3, 14, 5
BUCKETS = Buckets((8,), (4,), (5,), (1, 4))
CHUNKS = Buckets((8,), (4,), (5,), (4,))  # decodes go as chunks
ATTENTION = {
    "gqa, rope": {},
    "mqa, gate, V != D": {"num_kv_heads": 1, "output_gate": True, "v_head_dim": 6},
    "norm, sinks, window": {"qk_norm": True, "sinks": True, "sliding_window": 4, "use_qkv_bias": True},
    "forget gates": {"forget_gate": True, "rope": None, "sliding_window": 6},
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


def unwritten(layer, tokens):
    """An empty cache of rows, with NaN where nothing is written yet."""
    cache = layer.init_cache(SEQUENCES, tokens)
    return eqx.tree_at(lambda c: c.lengths, poisoned(cache), cache.lengths)


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
    counts, lengths = [count for _, count in work], [table.length(n) for n in names]
    options: Any = {"page_size": PAGE, "buckets": buckets, "state_indices": [slots[n] for n in names]}
    return RaggedBatch.build(counts, lengths, table.rows(names), **options)


def pack(x, work, before, size):
    """The round's tokens side by side, NaN behind them."""
    real = [x[n, before[n] : before[n] + count] for n, count in work]
    packed = np.full((size, x.shape[-1]), np.nan, x.dtype)
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


def inputs(rows=SEQUENCES):
    return np.asarray(recurrent_layers.inputs(rows, TOKENS))


class Block(eqx.Module):
    """A model of one attention and one recurrent layer, if `latent` after one of latent attention; stacked, of two of each."""

    mixers: tuple[Any, ...]

    def __init__(self, key, window=None, latent=False):
        keys = jax.random.split(key, 3)
        heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "rope": RotaryEmbedding(8)}
        self.mixers = (
            MultiHeadAttention(EMBED, **heads, sliding_window=window, key=keys[0]),
            nn.Mamba2Mixer(EMBED, head_dim=12, num_groups=2, state_size=6, key=keys[1]),
        )
        if latent:
            sizes: Any = {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4}
            latent_layer = nn.MultiHeadLatentAttention(EMBED, num_heads=3, **sizes, key=keys[2])
            self.mixers = (latent_layer, *reversed(self.mixers))

    def __call__(self, x, caches, **options):
        new = []
        for mixer, cache in zip(self.mixers, caches, strict=True):
            y, cache = mixer(x, cache, **options)
            x = x + y
            new.append(cache)
        return x, tuple(new)


LAYERS = 2


def stacked(window=None, latent=False):
    return _stacked(window, latent)


@functools.cache
def _stacked(window, latent):
    keys = jax.random.split(jax.random.key(0), LAYERS)
    return eqx.filter_vmap(lambda key: Block(key, window, latent))(keys)


def scanned(function, carry, *others, model=None):
    """`function(block, carry, *others)` over the stack."""
    arrays, static = eqx.partition(stacked() if model is None else model, eqx.is_array)
    body = lambda carry, own: function(eqx.combine(own[0], static), carry, *own[1:])
    return jax.lax.scan(body, carry, (arrays, *others))


@functools.cache
def dense_model(rows=SEQUENCES, window=None, latent=False):
    """What each row of `inputs(rows)` gives alone, and the caches after it."""
    model = stacked(window, latent)
    caches = tuple(mixer.init_cache((LAYERS, rows), TOKENS) for mixer in model.mixers)
    call = lambda x: scanned(lambda block, x, own: block(x, own), x, caches, model=model)
    return quick(call)(inputs(rows))


def in_place(x, caches, batch, model=None):
    """The model with the caches in the carry."""

    def body(block, carry, index):
        x, caches = carry
        layers, numbered = caches.of_layer(index, batch)
        x, layers = block(x, layers, batch=numbered)
        return (x, caches.with_layers(layers)), None

    return scanned(body, (x, caches), jnp.arange(LAYERS), model=model)[0]


def new_caches(latent=False, **options):
    sizes: dict[str, Any] = {"num_pages": PAGES, "page_size": PAGE, "num_slots": SLOTS, "batch_shape": LAYERS}
    return CacheState.init(stacked(latent=latent).mixers, **sizes | options)


def side_by_side(*trees):
    return jax.tree.map(lambda *x: jnp.stack(x), *trees)
