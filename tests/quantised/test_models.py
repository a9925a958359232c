"""Layers and models whose weights are quantised: the numbers of the same model with floats."""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel_eqx as ejx
from ejkernel_eqx.models import Decoder, DecoderConfig, generate, LayerConfig, MLPConfig, MoEConfig
from ejkernel_eqx.nn.projection import project
from tests.attention.dense import INTERPRET, normal
from tests.meshes import context, HEADS, mesh_of, ROWS
from tests.tolerances import assert_close

ROPE = ejx.nn.RotaryEmbedding(8)
FULL = LayerConfig(
    "attention", {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "rope": ROPE}, MLPConfig(64)
)
EXPERTS = dataclasses.replace(FULL, mlp=MoEConfig({"hidden_dim": 32, "num_experts": 4, "top_k": 2}))
MAMBA = LayerConfig("mamba2", {"head_dim": 8, "state_size": 8})
DELTA = LayerConfig("gated_delta_net", {"num_k_heads": 2, "num_v_heads": 4, "head_dim": 8})
LATENT = LayerConfig(
    "latent_attention",
    {"num_heads": 2, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    MLPConfig(32),
)
STACKS = {
    "attention": (FULL, FULL),
    "experts": (EXPERTS,),
    "recurrences": (MAMBA, DELTA),
    "latents": (LATENT,),
}
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 40, (2, 7)))


@functools.cache
def models(name: str, kind: str, **options):
    """A quantised model, and the model of its numbers."""
    model = Decoder(DecoderConfig(40, 32, STACKS[name]), **options, key=jax.random.key(1))
    model = ejx.quantise(model, kind)
    return model, ejx.dequantise(model)


@pytest.mark.parametrize(
    "name, kind",
    [("attention", "int4"), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in [
        ("experts", "mxfp4"), ("recurrences", "int8"), ("latents", "fp8"), ("attention", "nvfp4"), ("experts", "fp8-block"),
    ])],
)  # fmt: skip
def test_a_model_is_that_of_its_numbers(name, kind):
    """Logits, gradients to what is left in floats, and tokens by a cache."""
    model, floats = models(name, kind)
    quantised = [x for x in jax.tree.leaves(model, is_leaf=lambda x: isinstance(x, ejx.QuantizedWeight))]
    assert sum(isinstance(x, ejx.QuantizedWeight) for x in quantised) >= 2 * len(STACKS[name])
    run = eqx.filter_jit(lambda model, tokens: model(tokens))
    assert_close(run(model, TOKENS), run(floats, TOKENS))
    given: Any = dict(max_new_tokens=5, stop_tokens=())
    np.testing.assert_array_equal(
        generate(model, TOKENS, **given).tokens, generate(floats, TOKENS, **given).tokens
    )

    @eqx.filter_jit
    def gradient(model):
        loss = lambda embedding: (eqx.tree_at(lambda m: m.embedding, model, embedding)(TOKENS) ** 2).mean()
        return jax.grad(loss)(model.embedding)

    assert_close(gradient(model), gradient(floats), kind="gradient")


def test_the_default_leaves_out_what_is_sensitive():
    model, _ = models("attention", "int4")
    assert not isinstance(model.embedding, ejx.QuantizedWeight)
    assert not isinstance(model.head.weight, ejx.QuantizedWeight)
    asked: list[str] = []
    biased = MoEConfig({"hidden_dim": 32, "num_experts": 4, "top_k": 2, "use_bias": True})
    layer = LayerConfig("attention", dict(FULL.options) | {"use_qkv_bias": True}, biased)
    with_biases = Decoder(DecoderConfig(40, 32, (layer,)), key=jax.random.key(1))
    ejx.quantise(with_biases, "int8", where=lambda path: not asked.append(path))
    assert {path.rpartition(".")[2] for path in asked} == {
        "embedding",
        "weight",
        "gate_proj",
        "up_proj",
        "down_proj",
    }
    assert not any("norm" in path for path in asked)
    both = ejx.quantise(
        Decoder(DecoderConfig(40, 32, (FULL,), tie_embeddings=True), key=jax.random.key(1)),
        "int8",
        where=lambda path: path == ".embedding",
    )
    assert isinstance(both.embedding, ejx.QuantizedWeight)
    floats = ejx.dequantise(both)
    assert_close(both(TOKENS), floats(TOKENS))
    x = floats.features(TOKENS)
    assert_close(both.loss(x, TOKENS), floats.loss(x, TOKENS))


@pytest.mark.slow
def test_steps_of_few_tokens_on_kernels():
    """Serving's step on interpreted Triton, whose kernel of few rows reads codes."""
    model, floats = models("attention", "int4", platform=INTERPRET)
    cache, tokens = model.init_cache(2, 64), TOKENS[:, :3]
    step = eqx.filter_jit(lambda model, tokens, cache: model(tokens, cache))
    assert all(x.dtype in (jnp.float32, jnp.int32, jnp.bool_) for x in jax.tree.leaves(cache))
    first, cache = step(model, tokens, cache)
    second, _ = step(model, TOKENS[:, 3:4], cache)
    wanted = floats(TOKENS[:, :4])
    assert_close(first, wanted[:, :3])
    assert_close(second, wanted[:, 3:])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["explicit", "explicit without context", "automatic"])
@pytest.mark.parametrize("spec", [P(HEADS), P(None, HEADS)], ids=["rows", "columns"])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_split_over_devices(kind, spec, name):
    """Rows or columns of codes, with scales split where blocks allow it."""
    mesh = mesh_of(kind)
    weight = ejx.quantise(normal(0, 16, 256), name)
    layer = eqx.tree_at(lambda m: m.weight, eqx.nn.Linear(256, 16, key=jax.random.key(0)), weight)
    x = normal(1, 4, 256)
    wanted = jax.vmap(layer)(x)

    def placed(a):
        sizes = [2 if axis else 1 for axis in (*spec, *[None] * (a.ndim - len(spec)))]
        fits = all(size % n == 0 for size, n in zip(a.shape, sizes))
        return jax.device_put(a, NamedSharding(mesh, spec if fits and a.ndim == 2 else P()))

    split = eqx.tree_at(lambda m: m.weight, layer, jax.tree.map(placed, weight))
    split = eqx.tree_at(lambda m: m.bias, split, jax.device_put(layer.bias, NamedSharding(mesh, P())))
    x = jax.device_put(x, NamedSharding(mesh, P(ROWS)))
    with context(kind, mesh):
        out = eqx.filter_jit(lambda layer, x: project("layer", layer, x, 16))(split, x)
    assert_close(np.asarray(out), np.asarray(wanted))
