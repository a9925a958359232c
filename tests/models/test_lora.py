"""Low-rank updates of a model: their scale, and where they are."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_eqx.models import add_lora, Decoder, DecoderConfig, LayerConfig, merge_lora, MLPConfig, trained


def test_alpha_scales_the_updates():
    layer = LayerConfig("attention", {"num_heads": 2}, MLPConfig(12))
    base = Decoder(DecoderConfig(11, 8, (layer, layer)), key=jax.random.key(0))
    model = add_lora(base, 2, alpha=6.0, key=jax.random.key(1))
    learned, frozen = eqx.partition(model, trained(model))
    learned = jax.tree.map(lambda x: x + 0.5, learned)
    model = eqx.combine(learned, frozen)
    pair: tuple[Any, Any] = model, base
    projection, plain = (m.stacks[0][0].mlp.up_proj for m in pair)
    merged = merge_lora(model).stacks[0][0].mlp.up_proj.weight
    expected = np.float64(plain.weight) + 3 * np.einsum(
        "lor,lri->loi", np.float64(projection.b), np.float64(projection.a)
    )
    np.testing.assert_allclose(merged, expected, atol=1e-5)
    assert jnp.all(projection.b == 0.5) and np.array_equal(model.embedding, base.embedding)
