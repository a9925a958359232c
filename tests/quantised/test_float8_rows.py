"""Layers and models that multiply many rows in float8."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.models import Decoder, DecoderConfig
from ejkernel_eqx.nn.projection import project, project_parts, project_together
from ejkernel_eqx.quantised.dequantise import is_quantised
from tests.attention.dense import normal, quick
from tests.quantised.test_models import FULL
from tests.tolerances import assert_close, errors


def test_a_layer_multiplies_many_rows_in_float8():
    """Few rows by the numbers of the weight; the bias is added behind; parts and neighbours alike."""
    linear = ejx.quantise(eqx.nn.Linear(256, 96, key=jax.random.key(0)), "fp8-block")
    layer, x = ejx.with_float8_rows(linear), normal(1, 2, 60, 256)
    wanted = ejx.ScaledMatmul()(x, linear.weight) + linear.bias[None, None]
    assert_close(project("layer", layer, x, 96), wanted)
    assert errors(wanted, project("layer", linear, x, 96)).rms > 1e-2
    np.testing.assert_array_equal(
        project("layer", layer, x[:, :32], 96), project("layer", linear, x[:, :32], 96)
    )
    parts = project_parts("layer", layer, x, (32, 64))
    assert_close(jnp.concatenate(parts, -1), wanted)
    bare = eqx.tree_at(lambda layer: layer.bias, layer, None)
    for out in project_together({"a": bare, "b": bare}, x, (96, 96)):
        assert_close(out, wanted - linear.bias[None, None])
    grad = quick(jax.grad(lambda x: project("layer", layer, x, 96).sum()))(x)
    assert_close(grad, quick(jax.grad(lambda x: project("layer", linear, x, 96).sum()))(x), kind="gradient")


def test_experts():
    """Many rows of experts without biases; few rows, and experts with biases, by the numbers of their weights."""

    def layers(use_bias: bool) -> tuple[Any, Any]:
        options = {"num_experts": 4, "top_k": 2, "activation": "clamped_swiglu", "use_bias": use_bias}
        made = ejx.quantise(ejx.nn.MixtureOfExperts(128, 256, **options, key=jax.random.key(0)), "fp8-block")
        return made, ejx.with_float8_rows(made, where=lambda path: "experts" in path)

    plain, fast = layers(False)
    x, run = normal(1, 200, 128), eqx.filter_jit(lambda layer, x: layer(x))
    assert 1e-2 < errors(run(fast, x), run(plain, x)).rms < 0.1
    np.testing.assert_array_equal(run(fast, x[:100]), run(plain, x[:100]))
    # All rows by the first expert, as in its equation.
    product, sizes = ejx.ScaledMatmul(), jnp.array([300, 0, 0, 0])
    first = lambda w: jax.tree.map(lambda part: part[0], w)
    experts, rows = fast.experts, normal(2, 300, 128)
    gate, up = (product(rows, first(w)) for w in (experts.gate_proj, experts.up_proj))
    gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
    wanted = product(gate * jax.nn.sigmoid(1.702 * gate) * (up + 1), first(experts.down_proj))
    assert_close(experts(rows, sizes), wanted)
    biased, fast = layers(True)
    np.testing.assert_array_equal(run(fast, x), run(biased, x))


@pytest.mark.slow
def test_a_model():
    """Stacked layers, scanned over: results move by what rounding the rows costs, and only those of many tokens."""
    model = ejx.quantise(Decoder(DecoderConfig(40, 32, (FULL, FULL)), key=jax.random.key(1)), "fp8")
    fast = ejx.with_float8_rows(model)
    flags = [w.float8_rows for w in jax.tree.leaves(fast, is_leaf=is_quantised) if is_quantised(w)]
    assert flags and None not in flags
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 40, (2, 40)))
    logits = lambda model, tokens: eqx.filter_jit(model)(tokens)
    plain, rounded = logits(model, tokens), logits(fast, tokens)
    assert 1e-3 < errors(rounded, plain).rms < 0.1
    np.testing.assert_array_equal(logits(fast, tokens[:, :9]), logits(model, tokens[:, :9]))
    np.testing.assert_array_equal(logits(ejx.with_float8_rows(fast, False), tokens), plain)
    one = ejx.with_float8_rows(model, where=lambda path: path.endswith("q_proj.weight"))
    flags = [w.float8_rows for w in jax.tree.leaves(one, is_leaf=is_quantised) if is_quantised(w)]
    assert 0 < sum(flag is not None for flag in flags) < len(flags) and "float8 rows" in repr(one)


def test_the_platform_is_chosen_with_the_rows():
    """Once, where they are asked for: calls and `explain` have it."""
    linear = ejx.quantise(eqx.nn.Linear(256, 96, key=jax.random.key(0)), "fp8-block")
    options = {"num_experts": 2, "top_k": 1, "activation": "silu", "platform": "xla"}
    experts = ejx.quantise(ejx.nn.MixtureOfExperts(128, 128, **options, key=jax.random.key(0)), "fp8-block")
    x, results = normal(1, 200, 256), {}
    for name in ("xla", "triton-interpret"):
        layer, mixture = ejx.with_float8_rows((linear, experts), platform=name)
        with ejx.recording() as calls:
            results[name] = project("layer", layer, x, 96)
            jax.eval_shape(mixture, x[:, :128])
        chosen = [call.platform for call in calls if call.operation == "scaled_matmul"]
        assert chosen == [name] * 2  # of experts, three alike are traced once
        (row,) = ejx.explain(layer).choices
        assert (row.operation, row.platform) == ("scaled_matmul", name) and "float8_rows" in row.path
    assert_close(results["triton-interpret"], results["xla"])
    with pytest.raises(ValueError, match="platform: expected one of"):
        ejx.with_float8_rows(linear, platform="cuda")


@pytest.mark.parametrize("kind", [None, "int8"])
def test_a_model_without_float8(kind):
    linear = eqx.nn.Linear(8, 8, key=jax.random.key(0))
    with pytest.raises(ValueError, match="float8_e4m3fn, received none"):
        ejx.with_float8_rows(linear if kind is None else ejx.quantise(linear, kind))
