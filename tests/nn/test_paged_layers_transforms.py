"""Layers over pages under `vmap`, `scan`, `jit` with donation and differentiation, as people compose them."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx import PageTable, RaggedBatch
from tests.nn import recurrent_layers
from tests.nn.paged_layers import (
    attention,
    Block,
    CHUNKS,
    dense_model,
    in_place,
    inputs,
    LAYERS,
    make_batch,
    new_caches,
    pack,
    PAGE,
    PAGES,
    poisoned,
    scanned,
    schedule,
    SEQUENCES,
    SLOTS,
    stacked,
    TOKENS,
)
from tests.recurrence.quick import quick
from tests.tolerances import assert_close

SLOW = pytest.mark.slow
side_by_side = lambda *trees: jax.tree.map(lambda *x: jnp.stack(x), *trees)


def rounds(seed, slots):
    """The packed tokens and the batch of each round."""
    table, before = PageTable(PAGES, PAGE), [0] * SEQUENCES
    for work in schedule(seed):
        for n, count in work:
            table.allocate(n, count)
        batch = make_batch(table, work, slots, CHUNKS)
        yield pack(inputs(), work, before, batch.num_tokens), batch
        for n, count in work:
            before[n] += count


def assert_same_caches(ours, theirs):
    """Up to rounding, NaN for NaN."""
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_independent_caches_are_mapped():
    """A whole model on two caches, each with batches of its own."""
    x, batches = (side_by_side(*each) for each in zip(*map(_first_rounds, ((0, (3, 0, 4)), (1, (1, 2, 4))))))
    one, both = quick(in_place), quick(jax.vmap(in_place))
    given = poisoned(new_caches())
    alone, mapped = [given, given], side_by_side(given, given)
    for step in range(x.shape[1]):
        at = lambda tree, *index: jax.tree.map(lambda a: a[index], tree)
        results = [one(x[i, step], alone[i], at(batches, i, step)) for i in range(2)]
        y, mapped = both(x[:, step], mapped, at(batches, slice(None), step))
        alone = [caches for _, caches in results]
        real = jnp.stack([at(batches, i, step).is_real for i in range(2)])[..., None]
        assert real.any()
        assert_close(jnp.where(real, y, 0), jnp.where(real, jnp.stack([y for y, _ in results]), 0))
    assert_same_caches(mapped, side_by_side(*alone))


def _first_rounds(options):
    x, batches = zip(*list(rounds(*options))[:3])
    return jnp.stack(x), side_by_side(*batches)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["pages", "int8 pages", "pages, interpreted", "mamba", pytest.param("kimi", marks=SLOW)]
)
def test_layers_are_mapped(kind):
    """Caches in, caches out, one for each; and with one cache for all, each its own afterwards."""
    if "pages" in kind:
        layer = attention(
            "norm, sinks, window", platform="triton-interpret" if "interpreted" in kind else None
        )
        given = layer.init_paged_cache(PAGES, PAGE, dtype=jnp.int8 if "int8" in kind else None)
    else:
        layer = recurrent_layers.build(kind)
        given = layer.init_state(SLOTS)
    call = lambda x, cache, batch: layer(x, cache, batch=batch)
    one, given = quick(call), poisoned(given)
    (x0, b0), (x1, b1) = next(rounds(0, (3, 0, 4))), next(rounds(1, (1, 2, 4)))
    results = side_by_side(one(x0, given, b0), one(x1, given, b1))
    x, batches = jnp.stack([x0, x1]), side_by_side(b0, b1)
    for axis, cache in ((None, given), (0, side_by_side(given, given))):
        y, caches = quick(jax.vmap(call, (0, axis, 0)))(x, cache, batches)
        assert_close(y, results[0])
        assert_same_caches(caches, results[1])


@pytest.mark.slow
def test_models_are_mapped():
    """Over models with one cache and one batch, and over batches within: what each gives alone."""
    make = lambda key: eqx.filter_vmap(Block)(jax.random.split(key, LAYERS))
    models = eqx.filter_vmap(make)(jax.random.split(jax.random.key(7), 2))
    arrays, static = eqx.partition(models, eqx.is_array)
    call = lambda own, x, batch: in_place(x, new_caches(), batch, model=eqx.combine(own, static))
    pages = [[[3, 1], [2]], [[4], [0, 5]]]
    sizes = [[3, 1], [1, 3]]
    batches = [
        RaggedBatch.build(
            lens,
            lens,
            table,
            page_size=PAGE,
            state_indices=[2, 0],
            buckets=ejx.Buckets((4,), (2,), (2,), (3,)),
        )
        for lens, table in zip(sizes, pages, strict=True)
    ]
    x = jnp.asarray(inputs()[0, :4])
    each = [jax.tree.map(lambda a: a[n], arrays) for n in range(2)]  # noqa: B023
    one = quick(call)
    alone = [[one(model, x, batch) for batch in batches] for model in each]
    y, caches = quick(jax.vmap(call, (0, None, None)))(arrays, x, batches[0])
    assert_close(y, jnp.stack([results[0][0] for results in alone]))
    assert_same_caches(caches, side_by_side(*(results[0][1] for results in alone)))
    nested = jax.vmap(jax.vmap(call, (None, None, 0)), (0, None, None))
    y, caches = quick(nested)(arrays, x, side_by_side(*batches))
    assert_close(y, jnp.stack([jnp.stack([y for y, _ in results]) for results in alone]))
    assert_same_caches(caches, side_by_side(*(side_by_side(*(c for _, c in results)) for results in alone)))


@pytest.mark.slow
def test_decoding_is_scanned():
    """Steps in one program, the caches donated: each token goes in as the one that came out, as long as each sequence wants to."""
    last, start, steps = jnp.array([6, 9, 4]), 2, 7
    table = PageTable(PAGES, PAGE)
    for n in range(SEQUENCES):
        table.allocate(n, TOKENS)
    prompt = RaggedBatch.build(
        [start] * SEQUENCES,
        [start] * SEQUENCES,
        table.rows(range(SEQUENCES)),
        page_size=PAGE,
        state_indices=[4, 0, 2],
    )
    model = stacked()
    y, caches = quick(in_place)(
        jnp.asarray(inputs()[:, :start]).reshape(-1, 24), poisoned(new_caches()), prompt
    )

    def generate(x, caches, prompt):
        def step(carry, _):
            x, caches, lengths = carry
            wants = (lengths < last).astype(jnp.int32)
            batch = RaggedBatch(
                jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(wants)]),
                lengths + wants,
                prompt.page_table,
                prompt.state_indices,
                page_size=PAGE,
                max_query_len=1,
                num_tokens=SEQUENCES,
            )
            packed = x[jnp.argsort(-wants, stable=True)]
            y, caches = in_place(packed, caches, batch, model)
            y = y[jnp.maximum(batch.last_tokens, 0)]
            return (jnp.where(wants[:, None] > 0, y, x), caches, batch.lengths), y

        return jax.lax.scan(step, (x, caches, prompt.lengths), None, steps)[0]

    given = caches
    got, caches, lengths = quick(generate, donate_argnums=1)(y[prompt.last_tokens], caches, prompt)
    assert all(x.is_deleted() for x in jax.tree.leaves(given))
    np.testing.assert_array_equal(lengths, last)
    # The same, each sequence by itself, with dense caches.
    dense = quick(lambda x, own: scanned(lambda block, x, own: block(x, own), x, own))
    for n in range(SEQUENCES):
        mixers = stacked().mixers
        own = mixers[0].init_cache(LAYERS, TOKENS), mixers[1].init_state(LAYERS)
        x, own = dense(jnp.asarray(inputs()[n, :start]), own)
        for _ in range(start, int(last[n])):
            x, own = dense(x[-1:], own)
        assert_close(got[n], x[-1], name=f"sequence {n}")


def test_a_batch_is_carried():
    """`dataclasses.replace` gives the batch of the next step; the pages stay bound to nothing."""
    layer = attention()
    expected = quick(lambda x: layer(x, layer.init_cache((), TOKENS)))(jnp.asarray(inputs()[0]))[0]
    batch = RaggedBatch.build([1], [1], [[5, 1, 0, 2]], page_size=PAGE)

    def step(carry, x):
        cache, batch = carry
        y, cache = layer(x[None], cache, batch=batch)
        return (cache, dataclasses.replace(batch, lengths=batch.lengths + 1)), y[0]

    carry = poisoned(layer.init_paged_cache(PAGES, PAGE)), batch
    (cache, batch), y = quick(lambda carry, x: jax.lax.scan(step, carry, x))(carry, jnp.asarray(inputs()[0]))
    assert_close(y, expected)
    assert batch.lengths.tolist() == [TOKENS + 1] and not cache.is_bound


@pytest.mark.parametrize("new, platform", [pytest.param(3, None, marks=SLOW), (1, "triton-interpret")])
def test_training_over_pages_is_refused(new, platform):
    """In the ways that training code is written; what has no gradient to give is no obstacle."""
    layer = attention(platform=platform)
    batch = RaggedBatch.build([new], [new], [[0]], page_size=PAGE)
    x, cache = jnp.asarray(inputs()[0, :new]), layer.init_paged_cache(2, PAGE)

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


@pytest.mark.slow
def test_the_rest_of_a_model_trains_beside_pages():
    """The pages' output as a constant, which is what the error proposes."""
    expected, _ = dense_model()
    batch = RaggedBatch.build([TOKENS], [TOKENS], [[4, 1, 3, 0]], page_size=PAGE, state_indices=[1])
    caches = new_caches()

    def loss(parameters):
        arrays, static = eqx.partition(parameters["model"], eqx.is_array)
        model = eqx.combine(jax.lax.stop_gradient(arrays), static)
        y, _ = in_place(jax.lax.stop_gradient(parameters["x"]), caches, batch, model)
        return jnp.sum(y * parameters["head"][None])

    given = {"model": stacked(), "x": jnp.asarray(inputs()[0]), "head": jnp.ones(expected.shape[-1])}
    gradient = eqx.filter_jit(eqx.filter_grad(loss))(given)
    assert_close(gradient.pop("head"), expected[0].sum(0), kind="gradient")
    assert not any(x.any() for x in jax.tree.leaves(gradient))
