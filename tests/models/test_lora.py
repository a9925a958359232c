"""Low-rank updates of a model: their scale, and where they are."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.models import add_lora, Decoder, DecoderConfig, LayerConfig, merge_lora, MLPConfig, trained
from tests.tolerances import assert_close


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


def test_updates_on_updates_are_refused():
    layer = LayerConfig("attention", {"num_heads": 2}, MLPConfig(12))
    model = add_lora(Decoder(DecoderConfig(11, 8, (layer,)), key=jax.random.key(0)), 2, key=jax.random.key(1))
    with pytest.raises(ValueError, match=r"without updates, received one with LoRA; merge_lora\(model\)"):
        add_lora(model, 4, key=jax.random.key(2))
    again = add_lora(merge_lora(model), 4, key=jax.random.key(2))
    is_lora = lambda node: isinstance(node, ejx.models.LoRA)
    updates = list(filter(is_lora, jax.tree.leaves(again, is_leaf=is_lora)))
    assert len(updates) == 7 and {x.a.shape[-2] for x in updates} == {4}


def test_updates_train_on_quantised_weights(enable_x64):
    """Their gradients are those on the model of the numbers; codes and scales stay; the merged model computes the same."""
    layer = LayerConfig("attention", {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}, MLPConfig(64))
    model = Decoder(DecoderConfig(40, 32, (layer, layer)), key=jax.random.key(0))
    base = ejx.quantise(model, "int4")
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 40, (2, 6)))

    @eqx.filter_jit
    def step(model):
        train, rest = eqx.partition(model, trained(model))

        def loss(train):
            model = eqx.combine(train, rest)
            return model.loss(model.features(tokens[:, :-1]), tokens[:, 1:])

        return eqx.filter_grad(loss)(train)

    updated = add_lora(base, 2, key=jax.random.key(1))
    grads = [step(m) for m in (updated, ejx.dequantise(updated))]
    leaves, wanted = (jax.tree.leaves(g) for g in grads)
    assert len(leaves) == len(wanted) > 0
    assert max(float(jnp.abs(g).max()) for g in leaves) > 0
    for a, b in zip(leaves, wanted, strict=True):
        assert_close(a, b, kind="gradient")
    tuned = eqx.apply_updates(updated, jax.tree.map(lambda g: -0.5 * g, grads[0]))
    stored = [
        [x for x in jax.tree.leaves(m) if eqx.is_array(x) and x.dtype in (jnp.uint8, jnp.uint16)]
        for m in (updated, tuned)
    ]
    assert len(stored[0]) >= 14
    for a, b in zip(*stored, strict=True):
        np.testing.assert_array_equal(a, b)
    out = eqx.filter_jit(lambda m: m(tokens))
    assert_close(out(merge_lora(tuned)), out(tuned))
    assert not np.allclose(out(tuned), out(base))


@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
def test_updates_train_on_a_mesh(kind, enable_x64):
    """Their gradients are those of one device, whether the model was placed before it got them or after."""
    layer = LayerConfig("attention", {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}, MLPConfig(64))
    base = Decoder(DecoderConfig(40, 32, (layer, layer)), key=jax.random.key(0))
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(getattr(jax.sharding.AxisType, kind),) * 2)
    batch = np.random.default_rng(0).integers(0, 40, (4, 7))

    @eqx.filter_jit
    def grads_of(model, inputs, targets):
        train, rest = eqx.partition(model, trained(model))

        def loss(train):
            return ejx.models.split_cross_entropy(eqx.combine(train, rest)(inputs), targets)

        return eqx.filter_grad(loss)(train)

    updated = add_lora(base, 2, key=jax.random.key(1))
    is_lora = lambda node: isinstance(node, ejx.models.LoRA)
    shift = lambda node: eqx.tree_at(lambda m: m.b, node, node.b + 0.1) if is_lora(node) else node
    shifted = lambda model: jax.tree.map(shift, model, is_leaf=is_lora)
    updated = shifted(updated)
    expected = jax.tree.leaves(grads_of(updated, batch[:, :-1], batch[:, 1:]))
    after = ejx.models.place(updated, updated, mesh)
    before = add_lora(ejx.models.place(base, base, mesh), 2, key=jax.random.key(1))
    up = after.stacks[0][0].mlp.up_proj
    assert [w.sharding.spec[1:] for w in (up.base.weight, up.a, up.b)] == [
        (("tensor", "data"), None),
        (),
        (("tensor", "data"), None),
    ]
    inputs, targets = ejx.models.place_tokens(batch, mesh)
    for model in (after, shifted(before)):
        found = jax.tree.leaves(grads_of(model, inputs, targets))
        assert len(found) == len(expected) > 0
        for a, b in zip(found, expected, strict=True):
            # Angles of rotations are in float32.
            assert_close(jax.device_get(a), b, "float32", kind="gradient")
