"""Low-rank updates on a model whose weights are quantised, as in QLoRA."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import ejkernel_eqx as ejx
from ejkernel_eqx.models import Decoder, DecoderConfig, LayerConfig, lora, MLPConfig
from tests.tolerances import assert_close

LAYER = LayerConfig("attention", {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}, MLPConfig(64))


def test_updates_train_on_quantised_weights():
    """Their gradients are those on the model of the numbers; codes and scales stay; the merged model computes the same."""
    model = Decoder(DecoderConfig(40, 32, (LAYER, LAYER)), key=jax.random.key(0))
    base = ejx.quantise(model, "int4")
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 40, (2, 6)))

    @eqx.filter_jit
    def step(model):
        train, rest = eqx.partition(model, lora.trained(model))

        def loss(train):
            model = eqx.combine(train, rest)
            return model.loss(model.features(tokens[:, :-1]), tokens[:, 1:])

        return eqx.filter_grad(loss)(train)

    updated = lora.add_lora(base, 2, key=jax.random.key(1))
    grads = [step(m) for m in (updated, ejx.dequantise(updated))]
    leaves, wanted = (jax.tree.leaves(g) for g in grads)
    assert len(leaves) == len(wanted) > 0
    assert max(float(jnp.abs(g).max()) for g in leaves) > 0
    for a, b in zip(leaves, wanted, strict=True):
        assert_close(a, b, kind="gradient")
    trained = eqx.apply_updates(updated, jax.tree.map(lambda g: -0.5 * g, grads[0]))
    stored = [
        [x for x in jax.tree.leaves(m) if eqx.is_array(x) and x.dtype in (jnp.uint8, jnp.uint16)]
        for m in (updated, trained)
    ]
    assert len(stored[0]) >= 14
    for a, b in zip(*stored, strict=True):
        np.testing.assert_array_equal(a, b)
    out = eqx.filter_jit(lambda m: m(tokens))
    assert_close(out(lora.merge_lora(trained)), out(trained))
    assert not np.allclose(out(trained), out(base))
