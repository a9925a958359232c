"""The decoder: stacks, caches, pages and gradients give what its layers give one after the other."""

import dataclasses
import functools
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.models import Decoder, DecoderConfig, LayerConfig, MLPConfig, MoEConfig
from tests.arrays import array, normal

ROPE = ejx.nn.RotaryEmbedding(8)
FULL = LayerConfig("attention", {"num_heads": 4, "num_kv_heads": 2, "rope": ROPE}, MLPConfig(40))
LOCAL = dataclasses.replace(FULL, options={**dict(FULL.options), "sliding_window": 3}, norms="around")
DELTA = LayerConfig(
    "gated_delta_net", {"num_k_heads": 2, "num_v_heads": 4, "head_dim": 8}, MLPConfig(40, "gelu"), "post"
)
LIGHTNING = LayerConfig(
    "lightning_attention", {"num_heads": 4}, MLPConfig(24), "residual", (2.0, 0.5), (1.5, 1.0)
)
SPARSE_SIZES = {"block_size": 2, "num_blocks": 2, "compression_size": 4, "compression_stride": 2}
NSA = LayerConfig(
    "native_sparse_attention", dict(FULL.options) | SPARSE_SIZES | {"sliding_window": 2}, FULL.mlp
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


@functools.cache
def model_of(name: str, **options) -> Decoder:
    return Decoder(CONFIGS[name], **options, key=jax.random.key(3))


ANY_BRANCH: Any = ejx.models.BranchConfig
ANY_LAYER: Any = LayerConfig
ANY_MLP: Any = MLPConfig
ANY_DECODER: Any = Decoder
CALL: Any = lambda name, *given, **rows: model_of(name)(TOKENS, *given, **rows)


def close(a, b, scale: float = 1.0) -> None:
    np.testing.assert_allclose(a, b, atol=2e-5 * scale * float(np.max(np.abs(np.asarray(b)))))


def test_flags_may_be_arrays():
    """They are where a model is an argument of `jax.jit`, and behind `jax.device_put`."""
    model, expected = model_of("uniform"), CALL("uniform")
    close(jax.jit(lambda model, tokens: model(tokens))(model, TOKENS), expected)
    cached = lambda model, tokens: model(tokens, model.init_cache(2, 16))[0]
    close(jax.jit(cached)(model, TOKENS), expected)
    close(jax.device_put(model)(TOKENS), expected)


def test_stacks_follow_the_pattern():
    assert CONFIGS["uniform"].stacks() == ((0, 1, 3),)
    assert CONFIGS["hybrid"].stacks() == ((0, 2, 2), (4, 1, 1))
    assert CONFIGS["places"].stacks() == ((0, 2, 2),)
    assert DecoderConfig(8, 8, (FULL, MAMBA, MAMBA)).stacks() == ((0, 3, 1),)


def test_layers_of_a_stack_differ():
    model = Decoder(DecoderConfig(50, 32, (LIGHTNING,) * 2), key=jax.random.key(3))
    slopes = [np.asarray(model.layer(index).mixer.slopes()) for index in (0, 1)]
    expected = [ejx.lightning_slopes("minimax", 4, index, 2) for index in (0, 1)]
    np.testing.assert_allclose(slopes, expected, rtol=1e-6)


def test_scales_of_residual_and_branch():
    """Each is of the normed features, which are the residual too."""
    layer: Any = Decoder(DecoderConfig(50, 32, (LIGHTNING,)), key=jax.random.key(3)).layer(0)
    x = normal(1, (1, 4, 32))
    normed = lambda norm, x: jax.vmap(jax.vmap(norm))(x)
    x_normed = normed(layer.mixer_norm, x)
    y = 2.0 * x_normed + 0.5 * layer.mixer(x_normed)
    y_normed = normed(layer.mlp_norm, y)
    close(layer(x)[0], 1.5 * y_normed + 1.0 * layer.mlp(y_normed))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "rolling"),
    [("uniform", False), ("hybrid", True), ("sparse attention", False), ("places", False)],
)
def test_token_by_token_is_the_whole(name, rolling):
    model = model_of(name)
    call = eqx.filter_jit(model)
    cache = model.init_cache(2, 12, rolling=rolling)
    assert not rolling or cache.nbytes < model.init_cache(2, 12).nbytes
    logits, cache = call(TOKENS[:, :6], cache)
    parts = [logits]
    for index in range(6, 9):
        logits, cache = call(TOKENS[:, index : index + 1], cache)
        parts.append(logits)
    close(jnp.concatenate(parts, axis=1), call(TOKENS))


class Served:
    """Texts in pages and slots that were never written, and the logits of every token served."""

    def __init__(self, model: str | Decoder, rows: Any = TOKENS, **options):
        self.model = model_of(model) if isinstance(model, str) else model
        self.rows, self.table = np.array(rows), ejx.PageTable(8, 4)
        cache = self.model.init_serving_cache(num_pages=8, page_size=4, num_slots=2, **options)
        self.cache: Any = jax.tree.map(
            lambda x: (
                array(np.full(x.shape, np.nan), x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
            ),
            cache,
        )
        self.call = eqx.filter_jit(lambda model, tokens, cache, batch: model(tokens, cache, batch=batch))
        self.found = np.full((*self.rows.shape, self.model.config.vocab_size), np.nan, np.float32)

    def step(self, *work: tuple[int, int]) -> ejx.RaggedBatch:
        """So many tokens of each text."""
        names = [n for n, _ in work]
        done = [self.table.length(n) if n in self.table.sequences else 0 for n in names]
        counts = [min(count, 9 - before) for (_, count), before in zip(work, done)]
        copies = [copy for n, count in zip(names, counts) for copy in self.table.allocate(n, count)]
        cache = self.cache.copy_pages([c.source for c in copies], [c.target for c in copies])
        lengths, buckets = [self.table.length(n) for n in names], ejx.Buckets((8,), (2,), (3,), (8,))
        slots = [1 - n for n in names]
        batch = ejx.RaggedBatch.build(
            counts, lengths, self.table.rows(names), page_size=4, state_indices=slots, buckets=buckets
        )
        new, places = np.zeros(batch.num_tokens, np.int32), np.cumsum([0, *counts])
        for n, before, count, at in zip(names, done, counts, places):
            new[at : at + count] = self.rows[n, before : before + count]
        logits, self.cache = self.call(self.model, jnp.asarray(new), cache, batch)
        for n, before, count, at in zip(names, done, counts, places):
            self.found[n, before : before + count] = logits[at : at + count]
        return batch

    def agrees(self, expected: Any = None) -> None:
        close(self.found, eqx.filter_jit(self.model)(array(self.rows)) if expected is None else expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["experts", "hybrid", "places"])
def test_pages_and_slots_are_the_whole(name):
    served = Served(name)
    for counts in ((5, 3), (1, 1), (3, 5)):
        served.step(*enumerate(counts))
    served.agrees()


@pytest.mark.slow
@pytest.mark.parametrize("shared", [4, 5])
def test_forks_of_sparse_attention(shared):
    """A prompt served once, forked at a page's end and in a page; both rows as a call on the whole of each gives them."""
    rows = np.array(TOKENS)
    rows[1, :shared] = rows[0, :shared]
    served = Served("sparse attention", rows)
    served.step((0, shared))
    served.table.fork(0, 1)
    served.found[1, :shared] = served.found[0, :shared]
    for work in ([(1, 2)], [(0, 1)], [(0, 1), (1, 1)], [(1, 9), (0, 9)]):
        served.step(*work)
    served.agrees()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hybrid", "places"])
def test_drafts_are_taken_back(name):
    """Four tokens in one step, of which one row keeps three and the other one; then as if only those had come."""
    served = Served(name, num_draft_tokens=4)
    served.step((0, 2), (1, 3))
    served.rows[0, 5], served.rows[1, 4:7] = 49, (48, 47, 46)
    batch = served.step((0, 4), (1, 4))
    served.cache = served.cache.accept(jnp.asarray([3, 1]), batch)
    served.rows = np.array(TOKENS)
    for row, length in enumerate((5, 4)):
        served.table.truncate(row, length)
    served.step((0, 4), (1, 4))
    served.step((1, 1))
    served.agrees()


@pytest.mark.slow
def test_padding_and_other_segments_reach_nothing():
    model = model_of("hybrid")
    call = eqx.filter_jit(lambda **rows: model(TOKENS, **rows))
    second = jnp.asarray([[False] * 4 + [True] * 5, [True] * 9])
    whole, part = call(), eqx.filter_jit(model)(TOKENS[:1, 4:])[0]
    for rows in ({"padding_mask": second}, {"segment_ids": second.astype(int)}):
        logits = call(**rows)
        close(logits[0, 4:], part)
        close(logits[1], whole[1])


def by_hand(model, mask):
    """The layers taken out of their stacks and called in order: the logits, and the statistics of each layer with experts."""
    x, found = model.embedding[TOKENS] * model.config.embedding_scale, []
    for index in range(model.num_layers):
        x, statistics = model.layer(index).with_statistics(x, padding_mask=mask)
        found += [] if statistics is None else [statistics]
    x = jax.vmap(jax.vmap(model.norm))(x)
    logits = x @ (model.embedding if model.head is None else model.head.weight).T
    cap = model.config.logits_soft_cap
    return logits if cap is None else cap * jnp.tanh(logits / cap), found


MASK = jnp.asarray([[False] * 2 + [True] * 7, [True] * 9])
BY_HAND = [
    ("uniform", {"remat": "matmuls"}),
    ("hybrid", {"scan_layers": True}),
    ("places", {"remat": "kernels"}),
    ("experts", {"remat": "kernels", "scan_layers": True}),
    ("sparse attention", {}),
]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(*case, marks=pytest.mark.slow if n else (), id=str(case))
        for n, case in enumerate(BY_HAND)
    ],
)
def test_a_call_and_its_gradients_are_those_of_layers_by_hand(name, options):
    """With the losses of routers, where there are any."""
    model = model_of(name, **options)
    routed = name == "experts"

    def loss(model, run):
        logits, statistics = run(model)
        balance = ejx.nn.load_balancing_loss(statistics) + ejx.nn.router_z_loss(statistics) if routed else 0.0
        return jnp.sum(jnp.sin(logits[MASK])) + balance, (logits[MASK], statistics)

    def whole(model):
        found = model(TOKENS, padding_mask=MASK, return_statistics=routed)
        return found if routed else (found, [])

    gradient = lambda run: eqx.filter_jit(
        eqx.filter_value_and_grad(lambda model: loss(model, run), has_aux=True)
    )(model)
    (found, wanted) = gradient(whole), gradient(lambda model: by_hand(model, MASK))
    close(found[0][1][0], wanted[0][1][0])
    for a, b in zip(jax.tree.leaves(found[1]), jax.tree.leaves(wanted[1]), strict=True):
        close(a, b, 10) if np.any(b) else np.testing.assert_array_equal(a, b)
    if routed:
        statistics, layers = found[0][1][1], wanted[0][1][1]
        assert statistics.tokens_per_expert.shape == (2, 5) and not np.any(statistics.num_tokens != 16)
        np.testing.assert_array_equal(statistics.tokens_per_expert, [s.tokens_per_expert for s in layers])
        close(statistics.probability_sums, jnp.stack([s.probability_sums for s in layers]))


def test_mixed_precision():
    model = model_of("uniform", compute_dtype="bfloat16")
    assert model.embedding.dtype == jnp.float32
    features = eqx.filter_eval_shape(lambda model: model.features(TOKENS), model)
    assert features.dtype == jnp.bfloat16
    logits = eqx.filter_jit(model)(TOKENS)
    assert logits.dtype == jnp.float32
    close(logits, eqx.filter_jit(model_of("uniform"))(TOKENS), 5000)


@pytest.mark.parametrize(
    "options", [{}, {"tie_embeddings": True}, {"tie_embeddings": True, "embedding_scale": 768**0.5}], ids=str
)
def test_a_new_model_knows_nothing(options):
    """Its loss is that of equally likely tokens."""
    layer = LayerConfig("attention", {"num_heads": 4}, MLPConfig(64))
    model = Decoder(DecoderConfig(2048, 768, (layer,), **options), key=jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 33), 0, 2048)
    loss = model.loss(model.features(tokens[:, :-1]), tokens[:, 1:])
    np.testing.assert_allclose(loss, np.log(2048), rtol=0.1)


def test_new_positions_are_of_the_size_of_tokens():
    config = DecoderConfig(500, 32, (FULL,), tie_embeddings=True, max_positions=500)
    body = dataclasses.replace(
        config,
        layers=(dataclasses.replace(FULL, options={"num_heads": 4, "causal": False}),),
        max_positions=None,
    )
    model = Decoder(config, key=jax.random.key(0))
    encoder = ejx.models.Encoder(
        ejx.models.EncoderConfig(body, 500, num_token_types=500), key=jax.random.key(0)
    )
    tables: Any = (
        model.embedding,
        model.positions,
        encoder.body.embedding,
        encoder.positions,
        encoder.token_types,
    )
    np.testing.assert_allclose([jnp.std(table) for table in tables], 0.02, rtol=0.05)


def test_learned_positions_need_a_cache_that_counts_tokens():
    model = Decoder(DecoderConfig(50, 32, (DELTA,), max_positions=16), key=jax.random.key(0))
    assert bool(jnp.isfinite(model(TOKENS)).all())
    with pytest.raises(ValueError, match="cache: expected a layer of attention over all tokens"):
        model(TOKENS, model.init_cache(2, 16))


def test_tuning_and_explaining_find_every_kernel():
    paths = {choice.path for choice in ejx.explain(model_of("hybrid"), TOKENS).choices}
    # Of the pattern, and of what is left.
    assert len([path for path in paths if path.endswith(".attention")]) == 2
    assert any(path.endswith(".recurrence") for path in paths)


@pytest.mark.usefixtures("unchecked")
def test_sizes_of_numpy():
    """As they come from a file or from a shape."""

    def made(size: Any) -> Decoder:
        heads = {
            name: size(value) for name, value in {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}.items()
        }
        layer = LayerConfig("native_sparse_attention", heads, MLPConfig(size(24)))
        config = DecoderConfig(size(50), size(32), (layer,), max_positions=size(16))
        return ejx.models.add_lora(Decoder(config, key=jax.random.key(0)), size(2), key=jax.random.key(1))

    with warnings.catch_warnings(action="error"):  # of Equinox, for arrays in static fields
        assert eqx.tree_equal(made(np.int64), made(int))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LayerConfig("attentoin"), "mixer: expected one of attention, .*received 'attentoin'"),
        (lambda: ANY_LAYER("mamba2", norms="behind"), "norms: expected one of"),
        (lambda: ANY_LAYER("mamba2", mixer_scales=(1.0,)), "mixer_scales: expected two numbers"),
        (lambda: ANY_LAYER("attention", beside="mamba2"), "beside: expected a BranchConfig or None"),
        (lambda: ejx.models.BranchConfig("mamba4"), "mixer: expected one of .*mamba2"),
        (lambda: ANY_BRANCH("mamba2", (), (1.0, 1.0, 1.0)), "scales: expected two numbers"),
        (lambda: MLPConfig(0), "hidden_dim: expected a positive integer"),
        (lambda: MoEConfig({"num_experts": 2, "top_k": 1}), "options: expected an entry 'hidden_dim'"),
        (lambda: ANY_LAYER("mamba2", mlp=3), "mlp: expected an MLPConfig, a MoEConfig or None, received int"),
        (lambda: CALL("uniform", return_statistics=True), "return_statistics: expected layers with mixtures"),
        (lambda: CALL("experts", (1,), return_statistics=True), "return_statistics: expected False with a"),
        (lambda: ANY_MLP(8, "swish"), "activation: expected one of"),
        (lambda: DecoderConfig(8, 8, ()), "layers: expected a LayerConfig"),
        (lambda: ANY_DECODER({}, key=jax.random.key(0)), "config: expected a DecoderConfig, received dict"),
        (lambda: model_of("uniform", remat="all"), "remat: expected none, matmuls or kernels"),
        (lambda: model_of("uniform").layer(3), "index: expected 0 to 2"),
        (lambda: model_of("uniform")(TOKENS.astype(float)), "tokens: expected integers"),
        (lambda: CALL("uniform", maks=TOKENS), "maks: expected padding_mask"),
        (lambda: CALL("uniform", (1, 2)), "cache: expected a DecoderCache, received tuple"),
        (lambda: CALL("uniform", None, batch=1), "cache: expected a ServingCache with batch"),
    ],
)
def test_what_does_not_fit_is_refused(make: Any, message):
    with pytest.raises(ValueError, match=message):
        make()
