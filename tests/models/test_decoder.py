"""The decoder: stacks, caches, pages and gradients give what its layers give one after the other."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.models import Decoder, DecoderConfig, LayerConfig, MLPConfig, MoEConfig

ROPE = ejx.nn.RotaryEmbedding(8)
FULL = LayerConfig("attention", {"num_heads": 4, "num_kv_heads": 2, "rope": ROPE}, MLPConfig(40))
LOCAL = dataclasses.replace(FULL, options={**dict(FULL.options), "sliding_window": 3}, norms="around")
DELTA = LayerConfig(
    "gated_delta_net", {"num_k_heads": 2, "num_v_heads": 4, "head_dim": 8}, MLPConfig(40, "gelu"), "post"
)
LIGHTNING = LayerConfig(
    "lightning_attention", {"num_heads": 4}, MLPConfig(24), "residual", (2.0, 0.5), (1.5, 1.0)
)
SPARSE_SIZES = {
    "block_size": 2,
    "num_blocks": 2,
    "sliding_window": 2,
    "compression_size": 4,
    "compression_stride": 2,
}
NSA = dataclasses.replace(
    FULL, mixer="native_sparse_attention", options={**dict(FULL.options), **SPARSE_SIZES}
)
MAMBA = LayerConfig("mamba2", {"head_dim": 8, "state_size": 8})

EXPERTS = {"hidden_dim": 12, "num_experts": 5, "top_k": 2, "shared_dim": 8}
EXPERTS |= {"scoring": "sigmoid", "use_correction_bias": True}
SPARSE = dataclasses.replace(FULL, mlp=MoEConfig(EXPERTS), norms="around")

CONFIGS = {
    "experts": DecoderConfig(50, 32, (SPARSE, FULL, SPARSE)),
    "uniform": DecoderConfig(50, 32, (FULL,) * 3, embedding_scale=3.0, tie_embeddings=True),
    "hybrid": DecoderConfig(50, 32, (LOCAL, DELTA, LOCAL, DELTA, LOCAL), logits_soft_cap=4.0),
    "sparse attention": DecoderConfig(50, 32, (NSA, NSA, FULL, NSA)),
    "places": DecoderConfig(50, 32, (LIGHTNING, MAMBA, LIGHTNING, MAMBA)),
}
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 50, (2, 9)))


def model_of(name: str, **options) -> Decoder:
    return Decoder(CONFIGS[name], **options, key=jax.random.key(3))


untyped: Any = model_of
ANY_LAYER: Any = LayerConfig
ANY_MLP: Any = MLPConfig
ANY_DECODER: Any = Decoder


def by_hand(model: Decoder, tokens) -> jax.Array:
    """The layers taken out of their stacks and called in order."""
    x = model.embedding[tokens] * model.config.embedding_scale
    for index in range(model.num_layers):
        x, _ = model.layer(index)(x)
    x = jax.vmap(jax.vmap(model.norm))(x)
    logits = x @ (model.embedding if model.head is None else model.head.weight).T
    cap = model.config.logits_soft_cap
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def close(a, b, scale: float = 1.0) -> None:
    np.testing.assert_allclose(a, b, atol=2e-5 * scale * float(jnp.max(jnp.abs(b))))


def test_stacks_follow_the_pattern():
    assert CONFIGS["uniform"].stacks() == ((0, 1, 3),)
    assert CONFIGS["hybrid"].stacks() == ((0, 2, 2), (4, 1, 1))
    assert CONFIGS["places"].stacks() == ((0, 2, 2),)
    assert DecoderConfig(8, 8, (FULL, MAMBA, MAMBA)).stacks() == ((0, 3, 1),)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_a_call_is_its_layers_in_order(name):
    model = model_of(name)
    close(eqx.filter_jit(model)(TOKENS), eqx.filter_jit(by_hand)(model, TOKENS))


def test_layers_of_a_stack_differ():
    model = model_of("places")
    slopes = [np.asarray(model.layer(index).mixer.slopes()) for index in (0, 2)]
    expected = [ejx.lightning_slopes("minimax", 4, index, 4) for index in (0, 2)]
    np.testing.assert_allclose(slopes, expected, rtol=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("rolling", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_token_by_token_is_the_whole(name, rolling):
    model = model_of(name)
    call = eqx.filter_jit(model)
    cache = model.init_cache(2, 12, rolling=rolling)
    if rolling and name == "hybrid":
        assert cache.nbytes < model.init_cache(2, 12).nbytes
    logits, cache = call(TOKENS[:, :6], cache)
    parts = [logits]
    for index in range(6, 9):
        logits, cache = call(TOKENS[:, index : index + 1], cache)
        parts.append(logits)
    close(jnp.concatenate(parts, axis=1), call(TOKENS))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", CONFIGS)
def test_pages_and_slots_are_the_whole(name):
    model = model_of(name)
    cache = model.init_serving_cache(num_pages=8, page_size=4, num_slots=2)
    table, done, packed = ejx.PageTable(8, 4), [0, 0], [[], []]
    serve = eqx.filter_jit(lambda model, tokens, cache, batch: model(tokens, cache, batch=batch))
    buckets = ejx.Buckets((8,), (2,), (3,), (8,))
    for counts in ((5, 3), (1, 1), (3, 5)):
        for row, count in enumerate(counts):
            table.allocate(row, count)
        lengths = [before + count for before, count in zip(done, counts)]
        batch = ejx.RaggedBatch.build(
            counts, lengths, table.rows([0, 1]), page_size=4, buckets=buckets, state_indices=[1, 0]
        )
        new = np.zeros(batch.num_tokens, np.int32)
        parts = [np.asarray(TOKENS[row, n : n + count]) for row, (n, count) in enumerate(zip(done, counts))]
        new[: sum(counts)] = np.concatenate(parts)
        logits, cache = serve(model, jnp.asarray(new), cache, batch)
        packed[0].append(logits[: counts[0]])
        packed[1].append(logits[counts[0] : sum(counts)])
        done = lengths
    close(jnp.stack([jnp.concatenate(row) for row in packed]), eqx.filter_jit(model)(TOKENS))


@pytest.mark.slow
@pytest.mark.parametrize("shared", [4, 5])
def test_forks_of_sparse_attention(shared):
    """A prompt served once, forked at a page's end and in a page; both rows as a call on the whole of each gives them."""
    model, rows = model_of("sparse attention"), np.array(TOKENS)
    rows[1, :shared] = rows[0, :shared]
    cache = model.init_serving_cache(num_pages=8, page_size=4, num_slots=2)
    cache = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), cache)
    serve = eqx.filter_jit(lambda tokens, cache, batch: model(tokens, cache, batch=batch))
    table, length = ejx.PageTable(8, 4), rows.shape[1]
    found = np.full((*rows.shape, model.config.vocab_size), np.nan, np.float32)
    for work in ([(0, shared)], [(1, 2)], [(0, 1)], [(0, 1), (1, 1)], [(1, length), (0, length)]):
        if work == [(1, 2)]:
            table.fork(0, 1)
            found[1, :shared] = found[0, :shared]
        names = [n for n, _ in work]
        done = [table.length(n) if n in table.sequences else 0 for n in names]
        counts = [min(count, length - before) for (_, count), before in zip(work, done)]
        copies = [copy for n, count in zip(names, counts) for copy in table.allocate(n, count)]
        cache = cache.copy_pages([c.source for c in copies], [c.target for c in copies])
        batch = ejx.RaggedBatch.build(
            counts, list(map(table.length, names)), table.rows(names), page_size=4, state_indices=names,
            buckets=ejx.Buckets((8,), (2,), (3,), (8,)),
        )  # fmt: skip
        new, places = np.zeros(batch.num_tokens, np.int32), np.cumsum([0, *counts])
        for n, before, count, at in zip(names, done, counts, places):
            new[at : at + count] = rows[n, before : before + count]
        logits, cache = serve(jnp.asarray(new), cache, batch)
        for n, before, count, at in zip(names, done, counts, places):
            found[n, before : before + count] = logits[at : at + count]
    close(found, eqx.filter_jit(model)(jnp.asarray(rows)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hybrid", "places"])
def test_drafts_are_taken_back(name):
    """Four tokens in one step, of which one row keeps three and the other one; then as if only those had come."""
    model = model_of(name)
    call = eqx.filter_jit(lambda model, tokens, cache, batch: model(tokens, cache, batch=batch))
    cache = model.init_serving_cache(num_pages=8, page_size=4, num_slots=2, num_draft_tokens=4)
    table = ejx.PageTable(8, 4)
    rows = {0: [int(t) for t in TOKENS[0]], 1: [int(t) for t in TOKENS[1]]}

    def step(cache, counts, lengths, tokens):
        for row in (0, 1):
            table.truncate(row, lengths[row] - counts[row]) if lengths[row] > counts[row] else None
            table.allocate(row, counts[row])
        batch = ejx.RaggedBatch.build(counts, lengths, table.rows([0, 1]), page_size=4, state_indices=[0, 1])
        packed = np.zeros(batch.num_tokens, np.int32)
        packed[: sum(counts)] = np.concatenate(tokens)
        logits, cache = call(model, jnp.asarray(packed), cache, batch)
        return logits, cache, batch

    _, cache, _ = step(cache, [2, 3], [2, 3], [rows[0][:2], rows[1][:3]])
    drafts = [[*rows[0][2:5], 49], [rows[1][3], 48, 47, 46]]
    _, cache, batch = step(cache, [4, 4], [6, 7], drafts)
    cache = cache.accept(jnp.asarray([3, 1]), batch)
    logits, cache, _ = step(cache, [1, 1], [6, 5], [rows[0][5:6], rows[1][4:5]])
    whole = eqx.filter_jit(model)(TOKENS)
    close(logits[:2], jnp.stack([whole[0, 5], whole[1, 4]]))


@pytest.mark.slow
def test_padding_reaches_nothing():
    model = model_of("hybrid")
    mask = jnp.asarray([[False] * 4 + [True] * 5, [True] * 9])
    call = eqx.filter_jit(lambda model, tokens, mask: model(tokens, padding_mask=mask))
    logits = call(model, TOKENS, mask)
    close(logits[0, 4:], eqx.filter_jit(model)(TOKENS[:1, 4:])[0])


@pytest.mark.slow
def test_segments_do_not_see_each_other():
    model = model_of("hybrid")
    ids = jnp.asarray([[0] * 4 + [1] * 5, [0] * 9])
    logits = eqx.filter_jit(lambda model: model(TOKENS, segment_ids=ids))(model)
    whole = eqx.filter_jit(model)
    close(logits[0, 4:], whole(TOKENS[:1, 4:])[0])
    close(logits[1], whole(TOKENS)[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"scan_layers": True}, {"remat": "kernels"}, {"remat": "matmuls", "scan_layers": True}],
    ids=str,
)
@pytest.mark.parametrize("name", ["hybrid", "places", "experts"])
def test_gradients_are_those_of_layers_by_hand(name, options):
    expected = eqx.filter_jit(eqx.filter_grad(lambda model: jnp.sum(jnp.sin(by_hand(model, TOKENS)))))(
        model_of(name)
    )
    found = eqx.filter_jit(eqx.filter_grad(lambda model: jnp.sum(jnp.sin(model(TOKENS)))))(
        model_of(name, **options)
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        close(a, b, 10)


def by_layers(model, mask):
    """Logits, and the statistics of each layer with experts in its turn."""
    x, found = model.embedding[TOKENS], []
    for index in range(model.num_layers):
        x, statistics = model.layer(index).with_statistics(x, padding_mask=mask)
        found += [] if statistics is None else [statistics]
    return model.logits(jax.vmap(jax.vmap(model.norm))(x)), found


MASK = jnp.asarray([[False] * 2 + [True] * 7, [True] * 9])


@pytest.mark.slow
def test_statistics_of_routers():
    model = model_of("experts")
    call = lambda model: (model(TOKENS, padding_mask=MASK, return_statistics=True), by_layers(model, MASK))
    (logits, statistics), (expected, layers) = eqx.filter_jit(call)(model)
    close(logits, expected)
    assert statistics.tokens_per_expert.shape == (2, 5) and not np.any(statistics.num_tokens != 16)
    np.testing.assert_array_equal(statistics.tokens_per_expert, [s.tokens_per_expert for s in layers])
    close(statistics.probability_sums, jnp.stack([s.probability_sums for s in layers]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"scan_layers": True}, {"remat": "matmuls"}, {"remat": "kernels", "scan_layers": True}],
    ids=str,
)
def test_gradients_of_losses_of_routers(options):
    model = model_of("experts", **options)

    def loss(model, run):
        logits, statistics = run(model)
        balance = ejx.nn.load_balancing_loss(statistics) + ejx.nn.router_z_loss(statistics)
        return jnp.sum(jnp.sin(logits[MASK])) + balance

    whole = lambda model: model(TOKENS, padding_mask=MASK, return_statistics=True)
    gradient = lambda run: eqx.filter_jit(eqx.filter_grad(lambda model: loss(model, run)))(model)
    found, wanted = gradient(whole), gradient(lambda model: by_layers(model, MASK))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        close(a, b, 10) if np.any(b) else np.testing.assert_array_equal(a, b)


def test_mixed_precision():
    model = model_of("uniform", compute_dtype="bfloat16")
    assert model.embedding.dtype == jnp.float32
    features = eqx.filter_eval_shape(lambda model: model.features(TOKENS), model)
    assert features.dtype == jnp.bfloat16
    logits = eqx.filter_jit(model)(TOKENS)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(
        logits, eqx.filter_jit(model_of("uniform"))(TOKENS), atol=0.1 * float(jnp.max(jnp.abs(logits)))
    )


def test_tuning_and_explaining_find_every_kernel():
    paths = {choice.path for choice in ejx.explain(model_of("hybrid"), TOKENS).choices}
    assert (
        len([path for path in paths if path.endswith(".attention")]) == 2
    )  # of the pattern, and of what is left
    assert any(path.endswith(".recurrence") for path in paths)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LayerConfig("attentoin"), "mixer: expected one of attention, .*received 'attentoin'"),
        (lambda: ANY_LAYER("mamba2", norms="behind"), "norms: expected one of"),
        (lambda: ANY_LAYER("mamba2", mixer_scales=(1.0,)), "mixer_scales: expected two numbers"),
        (lambda: MLPConfig(0), "hidden_dim: expected a positive integer"),
        (lambda: MoEConfig({"num_experts": 2, "top_k": 1}), "options: expected an entry 'hidden_dim'"),
        (lambda: ANY_LAYER("mamba2", mlp=3), "mlp: expected an MLPConfig, a MoEConfig or None, received int"),
        (
            lambda: model_of("uniform")(TOKENS, return_statistics=True),
            "return_statistics: expected layers with mixtures of equally many experts, received a model with no",
        ),
        (
            lambda: untyped("experts")(TOKENS, (1,), return_statistics=True),
            "return_statistics: expected False with a cache",
        ),
        (lambda: ANY_MLP(8, "swish"), "activation: expected one of"),
        (lambda: DecoderConfig(8, 8, ()), "layers: expected a LayerConfig"),
        (
            lambda: ANY_DECODER({"model_type": "llama"}, key=jax.random.key(0)),
            "config: expected a DecoderConfig, received dict",
        ),
        (
            lambda: Decoder(CONFIGS["uniform"], remat="all", key=jax.random.key(0)),
            "remat: expected none, matmuls or kernels",
        ),
        (lambda: model_of("uniform").layer(3), "index: expected 0 to 2"),
        (lambda: model_of("uniform")(TOKENS.astype(float)), "tokens: expected integers"),
        (lambda: model_of("uniform")(TOKENS, mask=None, maks=TOKENS), "maks: expected padding_mask"),
        (lambda: untyped("uniform")(TOKENS, (1, 2)), "cache: expected a DecoderCache, received tuple"),
        (lambda: untyped("uniform")(TOKENS[0], None, batch=1), "cache: expected a ServingCache with batch"),
    ],
)
def test_what_does_not_fit_is_refused(make: Any, message):
    with pytest.raises(ValueError, match=message):
        make()
