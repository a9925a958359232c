"""Layers and models that multiply many rows in float8."""

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


def test_a_model():
    """Stacked layers, scanned over: results move by what rounding the rows costs, and only those of many tokens."""
    model = ejx.quantise(Decoder(DecoderConfig(40, 32, (FULL, FULL)), key=jax.random.key(1)), "fp8")
    fast = ejx.with_float8_rows(model)
    flags = [w.float8_rows for w in jax.tree.leaves(fast, is_leaf=is_quantised) if is_quantised(w)]
    assert flags and all(flags)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 40, (2, 40)))
    logits = lambda model, tokens: eqx.filter_jit(model)(tokens)
    plain, rounded = logits(model, tokens), logits(fast, tokens)
    assert 1e-3 < errors(rounded, plain).rms < 0.1
    np.testing.assert_array_equal(logits(fast, tokens[:, :9]), logits(model, tokens[:, :9]))
    np.testing.assert_array_equal(logits(ejx.with_float8_rows(fast, False), tokens), plain)
    one = ejx.with_float8_rows(model, where=lambda path: path.endswith("q_proj.weight"))
    flags = [w.float8_rows for w in jax.tree.leaves(one, is_leaf=is_quantised) if is_quantised(w)]
    assert 0 < sum(flags) < len(flags) and "float8 rows" in repr(one)


@pytest.mark.parametrize("kind", [None, "int8"])
def test_a_model_without_float8(kind):
    linear = eqx.nn.Linear(8, 8, key=jax.random.key(0))
    with pytest.raises(ValueError, match="float8_e4m3fn, received none"):
        ejx.with_float8_rows(linear if kind is None else ejx.quantise(linear, kind))
