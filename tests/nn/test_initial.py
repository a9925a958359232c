"""Initial weights in 16 bits are those of float32, rounded once: JAX's own draws in 16 bits have few values and a mean of their own."""

import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx import nn
from ejkernel_eqx.nn import initial
from tests.compilations import compilations
from tests.nn import layers

KEY = jax.random.key(5)
EXPERTS: Any = {"num_experts": 3, "top_k": 2, "use_bias": True, "shared_dim": 4, "shared_gate": True}
BLOCK = ejx.models.LayerConfig("attention", {"num_heads": 2}, ejx.models.MLPConfig(12))
DECODER = ejx.models.DecoderConfig(9, 8, (BLOCK,))

LAYERS = {
    **layers.LAYERS,
    "decoder": lambda **given: ejx.models.Decoder(DECODER, **given),
    "experts": lambda **given: nn.MixtureOfExperts(8, 4, **EXPERTS, **given),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", LAYERS)
def test_weights_in_16_bits(name):
    wide, narrow = (
        eqx.filter(LAYERS[name](dtype=dtype, key=KEY), eqx.is_array) for dtype in ("float32", "bfloat16")
    )
    assert any(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(narrow))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(b, a.astype(b.dtype)), wide, narrow)


KEYS = {"typed": lambda: KEY, "raw": lambda: jax.random.PRNGKey(5)}
KEYS |= {"another generator": lambda: jax.random.key(5, impl="rbg")}


@pytest.mark.parametrize("name, by_place", [("typed", True), ("raw", False), ("another generator", True)])
def test_weights_in_32_bits_are_those_of_equinox_and_jax(name, by_place):
    """Also where the numbers of an array are not the first of a larger one's."""
    with jax.threefry_partitionable(by_place):
        key = KEYS[name]()
        ours, theirs = initial.linear(key, 6, 5, True, jnp.float32), eqx.nn.Linear(6, 5, key=key)
        assert jax.tree.structure(ours) == jax.tree.structure(theirs)
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)
        numbers = initial.uniform(key, (7, 3), jnp.float32, 0.5)
        np.testing.assert_array_equal(numbers, jax.random.uniform(key, (7, 3), jnp.float32, -0.5, 0.5))
        np.testing.assert_array_equal(initial.normal(key, (7,), jnp.float32), jax.random.normal(key, (7,)))
        found, expected = jnp.stack(initial.keys_of(key, 3)), jax.random.split(key, 3)
        np.testing.assert_array_equal(jax.random.key_data(found), jax.random.key_data(expected))


def test_mapped_and_large_weights():
    keys, shape = jax.random.split(KEY, 2), (300, 257)
    mapped = jax.vmap(lambda key: initial.uniform(key, (4, 3), jnp.float32, 0.25))(keys)
    for key, numbers in zip(keys, mapped, strict=True):
        np.testing.assert_array_equal(numbers, jax.random.uniform(key, (4, 3), jnp.float32, -0.25, 0.25))
    large = initial.uniform(KEY, shape, jnp.float32, 0.25)
    np.testing.assert_array_equal(large, jax.random.uniform(KEY, shape, jnp.float32, -0.25, 0.25))


def test_weights_of_other_shapes_are_drawn_by_the_same_programs():
    with compilations():
        nn.MultiHeadAttention(8, num_heads=2, key=KEY)
    with compilations() as later:
        nn.MultiHeadAttention(40, num_heads=5, num_kv_heads=1, use_qkv_bias=True, key=KEY)
    assert later and not [name for name in later if re.search("uniform|split|bits", name)], later


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "draw", [initial.normal, lambda key, shape, dtype: initial.uniform(key, shape, dtype, 0.25)]
)
def test_the_mean_is_that_of_the_range(draw, dtype):
    numbers = np.asarray(draw(KEY, (200_000,), jnp.dtype(dtype)), np.float64)
    assert abs(numbers.mean()) < 4 * numbers.std() / 200_000**0.5
    assert len(np.unique(numbers)) > 2000
