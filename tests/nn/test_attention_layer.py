"""`MultiHeadAttention`: one trace for equal layers, cross attention, dropout."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx.nn import MultiHeadAttention, RotaryEmbedding
from tests.arrays import normal
from tests.tolerances import assert_close


def _layer(seed=0, **changes):
    options = {"num_heads": 4, "num_kv_heads": 2, "rope": RotaryEmbedding(8), "qk_norm": True, "sinks": True}
    return MultiHeadAttention(32, **(options | changes), key=jax.random.key(seed))


def _x(shape=(3, 11, 32)):
    return normal(1, shape)


@eqx.filter_jit
def _call(layer, x, **arrays):
    return layer(x, **arrays)


def test_jit_traces_once():
    traces = 0

    @eqx.filter_jit
    def step(layer, x):
        nonlocal traces
        traces += 1
        grad = eqx.filter_grad(lambda m: jnp.sum(m(x) ** 2))(layer)
        return eqx.apply_updates(layer, jax.tree.map(lambda g: -0.01 * g, grad))

    layer, x = _layer(0), _x()
    for _ in range(4):
        layer = step(layer, x)
    step(_layer(1), x)
    assert traces == 1


def test_cross_attention():
    layer = MultiHeadAttention(32, num_heads=4, kv_embed_dim=20, causal=False, key=jax.random.key(0))
    x, memory = _x(), normal(2, (3, 7, 20))
    y = _call(layer, x, kv_input=memory)
    real = jnp.arange(7)[None] < jnp.array([7, 2, 5])[:, None]
    poisoned = jnp.where(real[..., None], memory, jnp.nan)
    padded = _call(layer, x, kv_input=poisoned, kv_padding_mask=real)
    assert_close(padded[0], y[0])
    for row, length in enumerate([7, 2, 5]):
        assert_close(padded[row], _call(layer, x[row], kv_input=memory[row, :length]))
    # A mean over one token is that token.
    assert layer.v_proj is not None
    value = memory[:, :1] @ layer.v_proj.weight.T @ layer.o_proj.weight.T
    assert_close(_call(layer, x, kv_input=memory[:, :1]), jnp.broadcast_to(value, x.shape))
    turned = MultiHeadAttention(32, num_heads=4, causal=False, rope=RotaryEmbedding(8), key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"kv_input: expected .* received one with rope"):
        turned(x, kv_input=x)


@pytest.mark.slow
def test_dropout_needs_a_key_and_ends_in_inference_mode():
    layer, x = _layer(dropout_rate=0.5), _x()
    plain = _call(_layer(), x)
    first, same, other = (_call(layer, x, key=jax.random.key(seed)) for seed in (0, 0, 1))
    assert np.array_equal(first, same) and not np.array_equal(first, other)
    assert_close(_call(eqx.nn.inference_mode(layer), x), plain)
    assert_close(_call(layer, x, inference=True), plain)
    many = jax.vmap(lambda key: layer(x, key=key))
    many = jnp.mean(jax.jit(many)(jax.random.split(jax.random.key(2), 500)), 0)
    assert float(jnp.sqrt(jnp.mean((many - plain) ** 2) / jnp.mean(plain**2))) < 0.1
    with pytest.raises(ValueError, match="key"):
        layer(x)
