"""What one sequence gives, and its gradients, do not depend on those beside it: in batches of equal sizes they are equal bit for bit, whatever
the others hold."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx import nn
from ejkernel_eqx.models import Decoder, DecoderConfig, LayerConfig, MoEConfig
from tests.attention.dense import normal
from tests.nn import experts
from tests.recurrence.quick import quick

B, T, H, D, ROW = 3, 9, 2, 8, 1
_decay, _strength = (lambda x: -jnp.exp(x)), jax.nn.sigmoid
_QKV = ((T, H, D), (T, H, D), (T, H, D))


def _scan(**options: Any) -> Any:
    op = ejx.StateSpaceV1(**options)
    return lambda x, dt, B, C, A, **packing: op(x, dt, A, B, C, **packing)


# What builds an operation; the arguments that each sequence has for itself, as shapes or with what is made of normal numbers; those of all.
OPERATIONS: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "attention": (functools.partial(ejx.FlashAttention, causal=True, sliding_window=5), [*_QKV], []),
    "one query": (functools.partial(ejx.FlashAttention, causal=True), [(1, H, D), *_QKV[1:]], []),
    "sparse": (functools.partial(ejx.NativeSparseAttention, block_size=2, num_blocks=2, sliding_window=3), [*_QKV, (T, H, 3)], []),
    "delta": (ejx.GatedDeltaRule, [*_QKV, ((T, H), _decay), ((T, H), _strength)], []),
    "delta by channel": (ejx.KernelDeltaAttention, [*_QKV, ((T, H, D), _decay), ((T, H), _strength)], []),
    "linear": (ejx.GatedLinearAttention, [*_QKV, ((T, H, D), _decay)], []),
    "normalised": (functools.partial(ejx.LinearAttention, normalize=True), [(s, jnp.abs) for s in _QKV], []),
    "scan": (_scan, [(T, 6), ((T, 6), jnp.exp), (T, 4), (T, 4)], [((6, 4), _decay)]),
    "convolution": (ejx.CausalConv1d, [(T, 6)], [(6, 4)]),
    "cells": (functools.partial(ejx.Recurrent, cell="gru"), [(T, 18)], [(18, 6)]),
    "pooling": (functools.partial(ejx.MeanPooling, chunk_size=4), [(T, 6)], []),
    "norm": (ejx.GatedRMSNorm, [(T, 6), (T, 6)], []),
}  # fmt: skip


def arrays_of(entries: list[Any], seed: int, scale: float, *lead: int) -> list[jax.Array]:
    entries = [entry if callable(entry[-1]) else (entry, lambda x: x) for entry in entries]
    return [make(scale * normal(seed + i, *lead, *shape)) for i, (shape, make) in enumerate(entries)]


def _assert_equal(found: Any, wanted: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.isfinite(one).all() and np.asarray(one).any()


platforms = pytest.mark.parametrize("platform", ["xla", "triton-interpret"])


@pytest.mark.few(5)
@platforms
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name, platform):
    if platform != "xla":
        pytest.importorskip("triton")
    build, entries, shared = OPERATIONS[name]
    op, shared = build(platform=platform), arrays_of(shared, 20, 1.0)

    @quick
    def results(own):
        out, pull = jax.vjp(lambda *own: op(*own, *shared), *own)
        return out, pull(
            jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size, dtype=x.dtype).reshape(x.shape)), out)
        )

    own = arrays_of(entries, 0, 1.0, B)
    beside = [arrays_of(entries, 40, 4.0, B), [jnp.full_like(x, jnp.nan) for x in own]]
    row = lambda found: jax.tree.map(lambda x: x[ROW], found)
    wanted = row(results(own))
    for others in beside:
        _assert_equal(row(results([x.at[ROW].set(y[ROW]) for x, y in zip(others, own)])), wanted)


PAGE, TABLE = 4, 8
# New tokens and all tokens of each sequence; the last one of each batch is the one that is compared.
BATCHES = {
    "decoding": [[(1, 9), (1, 30), (1, 21)], [(1, 5), (1, 1), (1, 21)], [(1, 32), (0, 0), (1, 21)]],
    "a chunk": [[(1, 9), (2, 30), (5, 21)], [(0, 0), (1, 3), (5, 21)], [(3, 3), (0, 0), (5, 21)]],
}


@pytest.mark.few(2)
@platforms
@pytest.mark.parametrize("kind", BATCHES)
def test_pages(kind, platform):
    """Also where the others have other lengths, and so other pages and places among the tokens."""
    if platform != "xla":
        pytest.importorskip("triton")
    op = ejx.RaggedPagedAttention(platform=platform)
    attend = quick(lambda q, cache, starts: op(q, cache, query_start_loc=starts, max_query_len=5))
    q, k, v = normal(0, 5, H, D), normal(1, 32, 1, D), normal(2, 32, 1, D)
    results = []
    for seed, batch in enumerate(BATCHES[kind]):
        pages = np.random.default_rng(seed).permutation(len(batch) * TABLE).reshape(len(batch), TABLE)
        cache = ejx.PagedKVCache.init(len(batch) * TABLE, PAGE, 1, D)
        nan = jnp.full((cache.num_pages * PAGE, 1, D), jnp.nan) if seed else normal(3, 96, 1, D)
        cache = cache.append(nan, nan, np.arange(cache.num_pages * PAGE))
        news, lengths = (np.array(x) for x in zip(*batch))
        place = np.arange(lengths[-1])
        cache = cache.append(k[: len(place)], v[: len(place)], pages[-1][place // PAGE] * PAGE + place % PAGE)
        starts = np.concatenate([[0], np.cumsum(news)])
        rows = jnp.full((8, H, D), 9.0).at[starts[-2] : starts[-1]].set(q[: news[-1]])
        out = attend(rows, cache.bind(pages, lengths), starts)
        results.append(out[starts[-2] : starts[-1]])
    _assert_equal(results[1:], [results[0]] * 2)


@pytest.mark.few(1)
@platforms
@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss"])
def test_experts(name, platform):
    """The rows of a token lie elsewhere among those of its experts, and its experts have other numbers of rows."""
    if platform != "xla":
        pytest.importorskip("triton")
    layer, x = experts.build(name, platform=platform), experts.inputs(2, 7)
    run = eqx.filter_jit(lambda layer, x: layer(x))
    wanted = run(layer, x)[1]
    for others in (-x[0], jnp.broadcast_to(x[1, :1], x[0].shape), 30 * x[0]):
        _assert_equal(run(layer, x.at[0].set(others))[1], wanted)


@functools.cache
def _model() -> Decoder:
    mixture = MoEConfig({"hidden_dim": 24, "num_experts": 3, "top_k": 2})
    attention = LayerConfig("attention", {"num_heads": 2, "rope": nn.RotaryEmbedding(8)}, mixture)
    config = DecoderConfig(20, 16, (attention, LayerConfig("mamba2", {"head_dim": 8, "state_size": 8})))
    return Decoder(config, key=jax.random.key(0))


@pytest.mark.slow
def test_a_model():
    """A prompt padded on the left, then steps, beside other texts of other lengths."""
    model = _model()
    call = eqx.filter_jit(lambda model, tokens, cache, mask: model(tokens, cache, padding_mask=mask))
    tokens = np.random.default_rng(0).integers(0, 20, (3, 3, 9))
    tokens[:, 1] = tokens[0, 1]
    results = []
    for lengths, texts in zip(([5, 4, 5], [1, 4, 2], [5, 4, 3]), tokens):
        mask, found = np.arange(5) >= 5 - np.array(lengths)[:, None], []
        logits, cache = call(model, texts[:, :5], model.init_cache(3, 12), mask)
        for step in range(5, 9):
            found.append(logits[1, -1])
            logits, cache = call(model, texts[:, step : step + 1], cache, np.ones((3, 1), bool))
        results.append(found)
    _assert_equal(results[1:], [results[0]] * 2)


@pytest.mark.slow
def test_a_model_that_serves():
    """Within one bucket: chunks and steps of a sequence beside others, in other pages and slots, first or last in the batch."""
    model = _model()
    call = eqx.filter_jit(lambda model, tokens, cache, batch: model(tokens, cache, batch=batch))
    text = np.random.default_rng(0).integers(0, 20, 12)
    buckets, results = ejx.Buckets((13,), (3,), (4,), (6,)), []
    for seed, others in enumerate(([5, 1], [2, 6], [])):
        rng = np.random.default_rng(seed)
        cache = model.init_serving_cache(num_pages=12, page_size=4, num_slots=4)
        pages, slots = rng.permutation(12).reshape(3, 4), rng.permutation(4)[:3]
        mine, done, found = seed % (len(others) + 1), np.zeros(3, int), []
        for count in (5, 1, 3, 1, 1):
            counts = np.insert(
                np.array(others, int) if not done.any() else np.ones(len(others), int), mine, count
            )
            texts = [
                text[done[mine] : done[mine] + n] if row == mine else rng.integers(0, 20, n)
                for row, n in enumerate(counts)
            ]
            rows = slice(0, len(counts))
            done[rows] += counts
            batch = ejx.RaggedBatch.build(
                counts, done[rows], pages[rows], page_size=4, state_indices=slots[rows], buckets=buckets
            )
            start = int(counts[:mine].sum())
            packed = np.pad(np.concatenate(texts), (0, 13 - counts.sum()))
            logits, cache = call(model, jnp.asarray(packed, jnp.int32), cache, batch)
            found.append(logits[start : start + count])
        results.append(found)
    _assert_equal(results[1:], [results[0]] * 2)
