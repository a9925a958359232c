"""The losses of a decoder, which never hold all logits, against the same of its logits."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.models import Decoder, DecoderConfig, LayerConfig, MLPConfig
from tests.tolerances import assert_close

TOKENS = jax.random.randint(jax.random.key(0), (2, 7), 0, 19)
LABELS = TOKENS.at[:, :2].set(-1)
TIED = {"tie_embeddings": True, "logits_soft_cap": 3.0}
APART = {"logits_scale": 0.5, "head_bias": True}


def model_of(options, seed) -> Decoder:
    layer = LayerConfig("attention", {"num_heads": 2, "num_kv_heads": 2}, MLPConfig(16))
    model = Decoder(DecoderConfig(19, 8, (layer,), **options), key=jax.random.key(seed))
    if model.head is None or model.head.bias is None:
        return model
    bias = jax.random.normal(jax.random.key(seed), model.head.bias.shape)
    return eqx.tree_at(lambda m: m.head.bias, model, bias)


def gradients(function, model):
    return eqx.filter_jit(eqx.filter_value_and_grad(lambda model: function(model)))(model)


@pytest.mark.slow
@pytest.mark.parametrize("options", [APART, TIED])
def test_agree_with_those_of_logits(options):
    model, other = model_of(options, 0), model_of(TIED, 1)
    real = (LABELS >= 0)[..., None]

    def linear(model):
        x = model.features(TOKENS)
        each = model.token_statistics(x, LABELS, temperature=0.7)
        teacher = other.as_teacher(other.features(TOKENS))
        far = model.divergence(x, teacher, mask=LABELS >= 0, temperature=2.0)
        return model.loss(x, LABELS) + far + jnp.sum(jnp.sin(each.log_probs) + each.entropy)

    def of_logits(model):
        logits = jnp.where(real, model(TOKENS), 0.0)
        _, each = ejx.cross_entropy(logits, LABELS, temperature=0.7, return_statistics=True)
        q, p = (jax.nn.log_softmax(x / 2) for x in (logits, other(TOKENS)))
        far = jnp.sum(jnp.where(real, jnp.exp(p) * (p - q), 0)) / jnp.sum(real.astype(jnp.float32))
        return ejx.cross_entropy(logits, LABELS) + far + jnp.sum(jnp.sin(each.log_probs) + each.entropy)

    (value, grads), (expected, wanted) = gradients(linear, model), gradients(of_logits, model)
    assert_close(value, expected)
    for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True):
        assert_close(x, y, kind="gradient", scale=float(jnp.max(jnp.abs(wanted.embedding))))


@pytest.mark.slow
def test_a_quantised_teacher():
    model, other = model_of(TIED, 0), ejx.quantise(model_of(APART, 1), "int8")
    teacher = other.as_teacher(other.features(TOKENS))
    value = model.divergence(model.features(TOKENS), teacher)
    q, p = (jax.nn.log_softmax(m(TOKENS)) for m in (model, other))
    assert_close(value, jnp.mean(jnp.sum(jnp.exp(p) * (p - q), -1)), scale=1.0)
