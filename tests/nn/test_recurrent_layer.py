"""The recurrent layers as people use them in Equinox: gradients, vmap, scan, saving, and what they say when misused."""

import io

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx import nn
from tests.nn.recurrent_layers import build, call, inputs, LAYERS, parameters
from tests.tolerances import assert_close

KEY = jax.random.key(0)
SPANS = [(0, 4), (2, 6)]
REAL = np.array([[a <= t < b for t in range(7)] for a, b in SPANS])


def _loss(layer, x, weight, real=None):
    y = layer(x, padding_mask=real)
    y = y if real is None else jnp.where(real[..., None], y, 0)
    return jnp.sum(jnp.sin(y) * weight)


@eqx.filter_jit
def _gradient(layer, x, weight, real=None):
    return eqx.filter_grad(_loss)(layer, x, weight, real)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_every_parameter_has_a_gradient_through_padding(name):
    x = jnp.where(REAL[..., None], inputs(2, 7), jnp.nan)
    gradient = parameters(_gradient(build(name), x, jnp.ones_like(x), jnp.asarray(REAL)))
    assert set(gradient) == set(parameters(build(name)))
    for parameter, value in gradient.items():
        assert np.all(np.isfinite(value)) and np.any(value != 0), parameter


WITH_RATES = ("mamba2", "kimi, many value heads, bounded, doubled", "mamba", "kimi", "qwen3-next")


@pytest.mark.few(2)
@pytest.mark.parametrize("name", WITH_RATES)
def test_a_rate_beyond_the_largest_number(name):
    """States that are cleared at once, whether by `e^60` or by what would be infinite: the same gradients of everything."""
    layer, x = build(name), inputs(1, 5)

    def of(A_log):
        fast = eqx.tree_at(lambda layer: layer.A_log, layer, replace_fn=lambda rates: rates.at[0].set(A_log))
        return _gradient(fast, x, jnp.cos(x))

    fast, faster = parameters(of(60.0)), parameters(of(120.0))
    assert not np.any(faster["A_log"][0]) and np.all(faster["A_log"][1:])
    for parameter, value in fast.items():
        assert_close(faster[parameter], value, kind="gradient", name=parameter)


def test_gradient_of_padded_rows_is_that_of_the_rows():
    layer, x = build("mamba2"), inputs(2, 7)
    weight = jnp.cos(x)
    padded = _gradient(layer, jnp.where(REAL[..., None], x, jnp.nan), weight, jnp.asarray(REAL))
    alone = _gradient(layer, *(jnp.stack([a[r, i:j] for r, (i, j) in enumerate(SPANS)]) for a in (x, weight)))
    expected = parameters(alone)
    for parameter, value in parameters(padded).items():
        assert_close(value, expected[parameter], kind="gradient", name=parameter)


def test_any_number_of_batch_dimensions_and_vmap():
    layer, x = build("mamba2"), inputs(6, 5).reshape(2, 3, 5, -1)
    y, state = call(layer, x, layer.init_state((2, 3)))
    mapped = eqx.filter_jit(jax.vmap(jax.vmap(layer)))(x, layer.init_state((2, 3)))
    for ours, theirs in zip(jax.tree.leaves(mapped), jax.tree.leaves((y, state)), strict=True):
        assert_close(ours, theirs)
    assert_close(call(layer, x[1, 2]), y[1, 2])


def test_stacked_layers_scan_with_their_states():
    """Each lightning layer has its own slopes, though they are stacked."""

    make = lambda key, i: nn.LightningAttention(24, num_heads=4, layer_index=i, num_layers=3, key=key)
    stacked = eqx.filter_jit(eqx.filter_vmap(make))(jax.random.split(KEY, 3), jnp.arange(3))
    x = inputs(2, 6)
    arrays, static = eqx.partition(stacked, eqx.is_array)

    @jax.jit
    def run(x, states):
        def body(x, layer_and_state):
            layer, state = layer_and_state
            y, state = eqx.combine(layer, static)(x, state)
            return x + y, state

        return jax.lax.scan(body, x, (arrays, states))

    expected = x
    for index in range(3):
        layer = jax.tree.map(lambda leaf, i=index: leaf[i] if eqx.is_array(leaf) else leaf, stacked)
        expected = expected + call(layer, expected)
    first, states = run(x[:, :5], stacked.init_state((3, 2)))
    second, states = run(x[:, 5:], states)
    assert_close(jnp.concatenate([first, second], axis=1), expected)
    slopes = [ejx.lightning_slopes("minimax", 4, index, 3) for index in range(3)]
    np.testing.assert_allclose(eqx.filter_vmap(lambda layer: layer.slopes())(stacked), slopes, rtol=1e-6)


def test_the_place_of_a_lightning_layer_is_no_parameter():
    layer = build("lightning")
    assert "layer_index" not in parameters(layer)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x, layer)
    assert half.layer_index.dtype == jnp.int32


@pytest.mark.few(5)
@pytest.mark.parametrize("name", LAYERS)
def test_serialises(name):
    layer, file = build(name), io.BytesIO()
    eqx.tree_serialise_leaves(file, layer)
    for like in (build(name, seed=1), eqx.filter_eval_shape(lambda: build(name, seed=1))):
        file.seek(0)
        back = eqx.tree_deserialise_leaves(file, like)
        assert jax.tree.structure(back) == jax.tree.structure(layer)
        for ours, theirs in zip(jax.tree.leaves(back), jax.tree.leaves(layer)):
            assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("name", LAYERS)
def test_static_fields_hold_no_arrays(name):
    _, static = eqx.partition(build(name), eqx.is_array)
    hash(jax.tree.structure(static))


def test_states_in_half_precision():
    layer = nn.LightningAttention(24, num_heads=4, state_dtype=jnp.bfloat16, key=KEY)
    y, state = call(layer, inputs(2, 3), layer.init_state(2))
    assert y.dtype == jnp.float32 and state.recurrent.dtype == jnp.bfloat16


ERRORS = {
    "another layer's state": (
        lambda: build("gla")(inputs(2, 5), build("kimi").init_state(2)),
        "state: expected arrays of shapes",
    ),
    "offsets with a mask": (
        lambda: build("gla")(
            inputs(1, 5)[0], padding_mask=jnp.ones(5, bool), cu_seqlens=jnp.array([0, 5], jnp.int32)
        ),
        "cu_seqlens: expected None with padding_mask",
    ),
    "kimi, heads": (
        lambda: nn.KimiDeltaAttention(24, num_heads=3, num_v_heads=4, key=KEY),
        "num_heads: expected a divisor of num_v_heads=4, received 3",
    ),
    "qwen3-next, heads": (
        lambda: nn.GatedDeltaNet(24, num_k_heads=3, num_v_heads=4, key=KEY),
        "num_k_heads: expected a divisor of num_v_heads=4, received 3",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    make, message = ERRORS[name]
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("name", LAYERS)
def test_platform_reaches_every_kernel(name):
    layer = eqx.filter_eval_shape(lambda: LAYERS[name].build(platform="xla", key=KEY))
    is_kernel = lambda node: isinstance(node, ejx.Kernel)
    kernels = [node for node in jax.tree.leaves(layer, is_leaf=is_kernel) if is_kernel(node)]
    assert kernels and all(str(kernel.plan.snapshot.requested) == "xla" for kernel in kernels)
