"""The recurrent layers against the published ones, written down independently in `published_recurrent.py`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.nn.recurrent_layers import build, call, inputs, LAYERS, parameters, VARIANTS
from tests.tolerances import assert_close

CASES = LAYERS | VARIANTS


class Read(dict):
    """Remembers which of its items were asked for."""

    def __getitem__(self, name):
        self.seen = getattr(self, "seen", set()) | {name}
        return super().__getitem__(name)

    def get(self, name, default=None):
        return self[name] if name in self else default


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_published_layer(name, enable_x64):
    case = CASES[name]
    layer, x = build(name, jnp.float64), inputs(2, 13, jnp.float64)
    weights = Read({case.renamed.get(k, k): np.asarray(v) for k, v in parameters(layer).items()})
    expected = [case.formulas(weights, np.asarray(row)) for row in x]
    assert weights.seen == set(weights)
    y, state = call(layer, x, layer.init_state(2))
    assert_close(y, np.stack([y for y, _ in expected]), name=name)
    states = jax.tree.map(lambda *rows: np.stack(rows), *(state for _, state in expected))
    jax.tree.map(lambda x, y: assert_close(x, y, name=f"{name}, state"), state.recurrent, states)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mamba", "mamba2", "gla", "qwen3-next"])
def test_bfloat16(name):
    case = CASES[name]
    layer, x = build(name, jnp.bfloat16), inputs(2, 13, jnp.bfloat16)
    weights = {case.renamed.get(k, k): np.asarray(v, np.float64) for k, v in parameters(layer).items()}
    expected = [case.formulas(weights, row) for row in np.asarray(x, np.float64)]
    y, state = call(layer, x, layer.init_state(2))
    assert y.dtype == jnp.bfloat16 and state.recurrent.dtype == jnp.float32
    assert all(conv.dtype == jnp.bfloat16 for conv in state.conv)
    assert_close(y, np.stack([y for y, _ in expected]), jnp.bfloat16, name=name)
    assert_close(state.recurrent, np.stack([state for _, state in expected]), jnp.bfloat16, name=name)


@pytest.mark.parametrize("name", CASES)
def test_parameters_in_half_precision(name):
    """Those that decide how fast things are forgotten stay in float32, as in the published models."""
    layer = eqx.filter_eval_shape(lambda: CASES[name].build(dtype=jnp.bfloat16, key=jax.random.key(0)))
    found = {k: v.dtype for k, v in parameters(layer).items()}
    wide = {k for k, dtype in found.items() if dtype == jnp.float32}
    assert wide == {"A_log", "D", "dt_bias"} & set(found)
    assert all(dtype == jnp.bfloat16 for k, dtype in found.items() if k not in wide)


@pytest.mark.slow
def test_initial_decays_and_time_steps():
    mamba, mamba2 = (parameters(LAYERS[name].build(key=jax.random.key(0))) for name in ("mamba", "mamba2"))
    np.testing.assert_allclose(np.exp(mamba["A_log"]), np.tile([1, 2, 3, 4], (48, 1)), rtol=1e-6)
    assert np.all(mamba["D"] == 1) and np.all(mamba2["D"] == 1) and np.all(mamba2["norm.weight"] == 1)
    assert np.all((np.exp(mamba2["A_log"]) > 0.999) & (np.exp(mamba2["A_log"]) < 16.001))
    for bias in (mamba["dt_proj.bias"], mamba2["dt_bias"]):
        steps = np.log1p(np.exp(bias))
        assert np.all((steps > 0.99e-3) & (steps < 1.01e-1))
    assert np.abs(mamba["dt_proj.weight"]).max() <= 2**-0.5
