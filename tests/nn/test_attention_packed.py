"""Packed sequences without a cache: each alone, whatever stands behind the last one."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx.nn import DynamicScaling, MultiHeadAttention, RotaryEmbedding
from tests.arrays import normal
from tests.nn.checks import refuses
from tests.tolerances import assert_close

EMBED, OFFSETS = 16, np.array([0, 5, 5, 12, 13])
LAYERS = {
    "rope": {"rope": RotaryEmbedding(8)},
    "by length": {"rope": RotaryEmbedding(8, scaling=DynamicScaling(4.0, 6))},
    "alibi, window": {"alibi": True, "sliding_window": 3},
    "both ways": {"causal": False, "rope": RotaryEmbedding(8)},
}


def _layer(name):
    return MultiHeadAttention(EMBED, num_heads=2, **LAYERS[name], key=jax.random.key(0))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", LAYERS)
def test_each_sequence_is_alone(name):
    layer = _layer(name)
    x = normal(1, (17, EMBED)).at[13:].set(jnp.nan)
    offsets = jnp.asarray(OFFSETS)

    @eqx.filter_jit
    def ours(layer, x):
        loss = lambda layer, x: jnp.sum(jnp.sin(layer(x, cu_seqlens=offsets)[:13]))
        return layer(x, cu_seqlens=offsets), *eqx.filter_grad(lambda p: loss(*p))((layer, x))

    y, grad_layer, grad_x = ours(layer, x)
    spans = [(a, b) for a, b in itertools.pairwise(OFFSETS.tolist()) if b > a]
    alone = eqx.filter_jit(lambda layer, x: jnp.concatenate([layer(x[a:b]) for a, b in spans]))
    assert_close(y[:13], alone(layer, x))
    expected, expected_x = eqx.filter_grad(lambda p: jnp.sum(jnp.sin(alone(*p))))((layer, x[:13]))
    assert_close(grad_x[:13], expected_x, kind="gradient")
    assert np.all(np.asarray(grad_x[13:]) == 0)
    for got, wanted in zip(jax.tree.leaves(grad_layer), jax.tree.leaves(expected), strict=True):
        assert_close(got, wanted, kind="gradient")


@pytest.mark.slow
def test_given_positions_replace_those_of_the_sequences():
    layer, parts = _layer("by length"), [slice(0, 5), slice(5, 12), slice(12, 13)]
    x = normal(1, (13, EMBED))
    positions = jnp.asarray(np.concatenate([np.arange(5), 9 + np.arange(7), [3]]))
    y = layer(x, cu_seqlens=jnp.asarray(OFFSETS), positions=positions)
    assert_close(y, jnp.concatenate([layer(x[part], positions=positions[part]) for part in parts]))


ERRORS = {
    "cu_seqlens: expected None with segment_ids": {"segment_ids": np.zeros(13, int)},
    "cu_seqlens: expected None with padding_mask": {"padding_mask": np.ones(13, bool)},
    "cu_seqlens: expected None with cache": {"cache": _layer("rope").init_cache((), 16)},
    r"cu_seqlens: expected offsets \[N \+ 1\] and x of shape \[T, E\]": {"x": jnp.zeros((2, 13, EMBED))},
    "cu_seqlens: expected integers": {"cu_seqlens": np.zeros(2)},
    "cu_seqlens: expected .* 14": {"cu_seqlens": np.array([0, 14])},
}


test_errors = refuses(
    ERRORS, lambda wrong: _layer("rope")(**{"x": jnp.zeros((13, EMBED)), "cu_seqlens": OFFSETS} | wrong)
)
