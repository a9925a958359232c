"""Initial weights in 16 bits are those of float32, rounded once: JAX's own draws in 16 bits have few values and a mean of their own."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx import nn
from ejkernel_eqx.nn import initial

KEY = jax.random.key(5)
SPARSE = {"block_size": 2, "num_blocks": 2, "sliding_window": 2, "compression_size": 4, "compression_stride": 2}
EXPERTS = {"num_experts": 3, "top_k": 2, "use_bias": True, "shared_dim": 4, "shared_gate": True}
LATENT = {"num_heads": 2, "kv_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4}
DECODER = ejx.models.DecoderConfig(
    9, 8, (ejx.models.LayerConfig("attention", {"num_heads": 2}, ejx.models.MLPConfig(12)),)
)

LAYERS = {
    "decoder": lambda **given: ejx.models.Decoder(DECODER, **given),
    "experts": lambda **given: nn.MixtureOfExperts(8, 4, **EXPERTS, **given),
    "native sparse attention": lambda **given: nn.NativeSparseAttention(8, num_heads=2, **SPARSE, **given),
    "lstm": lambda **given: nn.LSTM(8, 4, **given),
    "mamba": lambda **given: nn.Mamba1Mixer(8, **given),
    "mamba2": lambda **given: nn.Mamba2Mixer(8, head_dim=4, state_size=4, **given),
    "kimi": lambda **given: nn.KimiDeltaAttention(8, num_heads=1, head_dim=4, **given),
    "gated delta net": lambda **given: nn.GatedDeltaNet(8, num_k_heads=1, num_v_heads=1, head_dim=4, **given),
    "latent attention": lambda **given: nn.MultiHeadLatentAttention(8, **LATENT, **given),
    "gated linear attention": lambda **given: nn.GatedLinearAttention(8, num_heads=2, **given),
    "lightning attention": lambda **given: nn.LightningAttention(8, num_heads=2, **given),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", LAYERS)
def test_weights_in_16_bits(name):
    wide, narrow = (
        eqx.filter(LAYERS[name](dtype=dtype, key=KEY), eqx.is_array) for dtype in ("float32", "bfloat16")
    )
    assert any(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(narrow))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(b, a.astype(b.dtype)), wide, narrow)


def test_weights_in_32_bits_are_those_of_equinox_and_jax():
    ours, theirs = initial.linear(KEY, 6, 5, True, jnp.float32), eqx.nn.Linear(6, 5, key=KEY)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    numbers = initial.uniform(KEY, (7, 3), jnp.float32, 0.5)
    np.testing.assert_array_equal(numbers, jax.random.uniform(KEY, (7, 3), jnp.float32, -0.5, 0.5))
    np.testing.assert_array_equal(initial.normal(KEY, (7,), jnp.float32), jax.random.normal(KEY, (7,)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("draw", [initial.normal, lambda *given: initial.uniform(*given, 0.25)])
def test_the_mean_is_that_of_the_range(draw, dtype):
    numbers = np.asarray(draw(KEY, (200_000,), jnp.dtype(dtype)), np.float64)
    assert abs(numbers.mean()) < 4 * numbers.std() / 200_000**0.5
    assert len(np.unique(numbers)) > 2000
