"""Layers over pages under `vmap`, `scan`, `jit` with donation and differentiation, as people compose them."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx import PageTable, RaggedBatch
from tests.nn import paged_layers as small
from tests.nn import recurrent_layers
from tests.nn.recurrent_layers import EMBED
from tests.recurrence.quick import quick
from tests.tolerances import assert_close


def rounds(seed, slots):
    """The packed tokens and the batch of each round."""
    table, before = PageTable(small.PAGES, small.PAGE), [0] * small.SEQUENCES
    for work in small.schedule(seed):
        for n, count in work:
            table.allocate(n, count)
        batch = small.make_batch(table, work, slots, small.CHUNKS)
        yield small.pack(small.inputs(), work, before, batch.num_tokens), batch
        for n, count in work:
            before[n] += count


def assert_same_caches(ours, theirs):
    """Up to rounding, NaN for NaN."""
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8 pages", "pages, interpreted", "kimi"])
def test_layers_are_mapped(kind):
    """Caches in, caches out, one for each; and with one cache for all, each its own afterwards."""
    if "pages" in kind:
        platform = "triton-interpret" if "interpreted" in kind else None
        layer = small.attention("norm, sinks, window", platform=platform)
        given = layer.init_paged_cache(small.PAGES, small.PAGE, dtype=jnp.int8 if "int8" in kind else None)
    else:
        layer = recurrent_layers.build(kind)
        given = layer.init_state(small.SLOTS)
    call = lambda x, cache, batch: layer(x, cache, batch=batch)
    one, given = quick(call), small.poisoned(given)
    (x0, b0), (x1, b1) = next(rounds(0, (3, 0, 4))), next(rounds(1, (1, 2, 4)))
    results = small.side_by_side(one(x0, given, b0), one(x1, given, b1))
    x, batches = jnp.stack([x0, x1]), small.side_by_side(b0, b1)
    for axis, cache in ((None, given), (0, small.side_by_side(given, given))):
        y, caches = quick(jax.vmap(call, (0, axis, 0)))(x, cache, batches)
        assert_close(y, results[0])
        assert_same_caches(caches, results[1])


@pytest.mark.slow
def test_decoding_is_scanned():
    """Steps in one program, the caches donated: each token goes in as the one that came out, as long as each sequence wants to."""
    last, start, steps, model = jnp.array([6, 9, 4]), 2, 7, small.stacked()
    table = PageTable(small.PAGES, small.PAGE)
    for n in range(small.SEQUENCES):
        table.allocate(n, small.TOKENS)
    lens, pages = [start] * small.SEQUENCES, table.rows(range(small.SEQUENCES))
    prompt = RaggedBatch.build(lens, lens, pages, page_size=small.PAGE, state_indices=[4, 0, 2])
    first = jnp.asarray(small.inputs()[:, :start])
    y, caches = quick(small.in_place)(first.reshape(-1, EMBED), small.poisoned(small.new_caches()), prompt)

    def step(carry, _):
        x, caches, lengths = carry
        wants = (lengths < last).astype(jnp.int32)
        starts = jnp.cumulative_sum(wants, include_initial=True)
        sizes: Any = {"page_size": small.PAGE, "max_query_len": 1}
        tables = prompt.page_table, prompt.state_indices
        batch = RaggedBatch(starts, lengths + wants, *tables, **sizes, num_tokens=small.SEQUENCES)
        y, caches = small.in_place(x[jnp.argsort(-wants, stable=True)], caches, batch, model)
        y = y[jnp.maximum(batch.last_tokens, 0)]
        return (jnp.where(wants[:, None] > 0, y, x), caches, batch.lengths), None

    generate = quick(lambda *carry: jax.lax.scan(step, carry, None, steps)[0], donate_argnums=1)
    got, _, lengths = generate(y[prompt.last_tokens], caches, prompt.lengths)
    assert all(x.is_deleted() for x in jax.tree.leaves(caches))
    np.testing.assert_array_equal(lengths, last)

    # The same, each sequence by itself, with dense caches.
    def alone(x):
        dense = lambda x, own: small.scanned(lambda block, x, own: block(x, own), x, own)
        x, own = dense(x, tuple(mixer.init_cache(small.LAYERS, small.TOKENS) for mixer in model.mixers))
        body = lambda carry, _: (dense(*carry), carry[0][0])
        return jax.lax.scan(body, (x[-1:], own), None, steps + 1)[1]

    each = quick(jax.vmap(alone))(first)
    for n in range(small.SEQUENCES):
        assert_close(got[n], each[n, last[n] - start], name=f"sequence {n}")


def test_a_batch_is_carried():
    """`dataclasses.replace` gives the batch of the next step; the pages stay bound to nothing."""
    layer = small.attention()
    expected = quick(lambda x: layer(x, layer.init_cache((), small.TOKENS)))(jnp.asarray(small.inputs()[0]))[
        0
    ]
    batch = RaggedBatch.build([1], [1], [[5, 1, 0, 2]], page_size=small.PAGE)

    def step(carry, x):
        cache, batch = carry
        y, cache = layer(x[None], cache, batch=batch)
        return (cache, dataclasses.replace(batch, lengths=batch.lengths + 1)), y[0]

    carry = small.poisoned(layer.init_paged_cache(small.PAGES, small.PAGE)), batch
    (cache, batch), y = quick(lambda carry, x: jax.lax.scan(step, carry, x))(
        carry, jnp.asarray(small.inputs()[0])
    )
    assert_close(y, expected)
    assert batch.lengths.tolist() == [small.TOKENS + 1] and not cache.is_bound


@pytest.mark.slow
@pytest.mark.parametrize("new, platform", [(3, None), (1, "triton-interpret")])
def test_training_over_pages_is_refused(new, platform):
    """In the ways that training code is written; what has no gradient to give is no obstacle."""
    layer = small.attention(platform=platform)
    batch = RaggedBatch.build([new], [new], [[0]], page_size=small.PAGE)
    x, cache = jnp.asarray(small.inputs()[0, :new]), layer.init_paged_cache(2, small.PAGE)

    def loss(layer, x, cache):
        return jnp.sum(layer(x, cache, batch=batch)[0] ** 2)

    def refused(function, *args):
        with pytest.raises(ejx.UnsupportedError, match=r"no gradient[\s\S]*gather[\s\S]*stop_gradient"):
            function(*args)

    refused(eqx.filter_jit(eqx.filter_value_and_grad(loss)), layer, x, cache)
    refused(eqx.filter_grad(eqx.filter_checkpoint(loss)), layer, x, cache)
    refused(jax.grad(loss, 1), layer, x, cache)
    refused(eqx.filter_grad(lambda cache: loss(layer, x, cache)), cache)
    refused(jax.jit(jax.vmap(jax.grad(loss, 1), (None, 0, None))), layer, x[None], cache)
    refused(lambda: jax.jvp(lambda x: loss(layer, x, cache), (x,), (x,)))
    head = quick(jax.grad(lambda scale: scale * loss(layer, x, cache)))(1.0)
    assert_close(head, quick(loss)(layer, x, cache))
    # The pages' output as a constant, which is what the error proposes.
    over = lambda x: layer(jax.lax.stop_gradient(x), cache, batch=batch)[0]
    beside = quick(jax.grad(lambda x: jnp.sum(over(x) * x)))(x)
    assert_close(beside, quick(over)(x), kind="gradient")
