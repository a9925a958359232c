"""The recurrent layers: rates without bounds, states in half precision, and what they say when misused."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx import nn
from tests.nn.checks import refuses
from tests.nn.recurrent_layers import build, call, inputs, parameters
from tests.tolerances import assert_close

KEY = jax.random.key(0)


@eqx.filter_jit
def _gradient(layer, x, weight):
    return eqx.filter_grad(lambda layer: jnp.sum(jnp.sin(layer(x)) * weight))(layer)


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


def test_states_in_half_precision():
    layer = nn.LightningAttention(24, num_heads=4, state_dtype=jnp.bfloat16, key=KEY)
    y, state = call(layer, inputs(2, 3), layer.init_state(2))
    assert y.dtype == jnp.float32 and state.recurrent.dtype == jnp.bfloat16


ERRORS = {
    "num_heads: expected a divisor of num_v_heads=4, received 3": lambda: nn.KimiDeltaAttention(24, num_heads=3, num_v_heads=4, key=KEY),
    "num_k_heads: expected a divisor of num_v_heads=4, received 3": lambda: nn.GatedDeltaNet(24, num_k_heads=3, num_v_heads=4, key=KEY),
}  # fmt: skip


test_errors = refuses(ERRORS)
