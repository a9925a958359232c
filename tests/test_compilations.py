"""Outside of `jax.jit`: a call like one before compiles nothing."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import ejkernel_eqx as ejx
from tests.attention.dense import normal, qkv
from tests.compilations import compilations
from tests.nn.recurrent_layers import build, inputs, LAYERS
from tests.recurrence.operations import CASES


def check(call, *, again: int = 2):
    with compilations() as first:
        jax.block_until_ready(call())
    with compilations() as later:
        for _ in range(again):
            jax.block_until_ready(call())
    assert first and not later, f"{len(later)} of {again} calls' programs were compiled again"


PLATFORMS = ["xla", "triton-interpret"]


@pytest.mark.few(1)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_attention(platform):
    if platform != "xla":
        pytest.importorskip("triton")
    arrays: dict[str, Any] = qkv(2, t=5, s=7)
    ids = jnp.zeros((2, 5), jnp.int32)

    def call():
        # A module of its own each time, as a function that builds what it calls has.
        attn = ejx.FlashAttention(causal=True, sliding_window=3, platform=platform)
        out = attn(**arrays, segment_ids=ids, kv_segment_ids=jnp.zeros((2, 7), jnp.int32))
        return out, attn(**arrays, kv_lengths=jnp.array([3, 7])), attn(**arrays, return_lse=True)

    check(call)


@pytest.mark.few(1)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_gradients_of_attention(platform):
    if platform != "xla":
        pytest.importorskip("triton")
    arrays = qkv(t=5, s=7)

    def call():
        attn = ejx.FlashAttention(causal=True, platform=platform)
        return jax.grad(lambda arrays: jnp.sum(attn(**arrays) ** 2))(arrays)

    check(call)


def test_attention_with_weights():
    arrays = qkv(t=5, s=7)
    check(lambda: ejx.Attention(causal=True)(*arrays.values()))
    check(lambda: ejx.ScaledDotProductAttention()(*arrays.values()))
    check(lambda: ejx.BlockSparseAttention(ejx.Mask.causal() | ejx.Mask.strided(3))(*arrays.values()))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["linear constant", "gated delta softplus", "state space norm"])
@pytest.mark.parametrize("platform", PLATFORMS)
def test_recurrences(name, platform):
    if platform != "xla":
        pytest.importorskip("triton")
    case = CASES[name]
    arrays, state = case.make(2, 5, dtype=jnp.float32), case.make_state(2, dtype=jnp.float32)
    now = case.make(2, dtype=jnp.float32)

    def call():
        module = case.module(config=None, platform=platform)
        return case.run(module)(arrays, state), case.call(module.step, now, state)

    check(call)


def test_grouped_matmuls():
    x, w, sizes = normal(0, 5, 8), normal(1, 3, 8, 4), jnp.array([2, 0, 3])
    check(lambda: ejx.GroupedMatmul("silu")(x, w, sizes, up=w, row_indices=jnp.arange(5)))


def test_scans_convolutions_norms_and_pooling():
    x, state = normal(0, 2, 5, 8), normal(1, 2, 8, 4)
    weight, projection = normal(2, 8, 3), normal(3, 2, 5, 4)

    def call():
        scan = ejx.StateSpaceV1(dt_softplus=True)
        results = scan(x, x, -jnp.exp(normal(4, 8, 4)), projection, projection, initial_state=state)
        pooled = ejx.MeanPooling(chunk_size=4)(x), ejx.MeanPooling("max", normalize=True)(x, lengths=3)
        cell = ejx.Recurrent("rnn")(
            x, normal(5, 8, 8), normal(6, 8), segment_ids=jnp.zeros((2, 5), jnp.int32)
        )
        return results, ejx.CausalConv1d()(x, weight), ejx.GatedRMSNorm()(x, x), pooled, cell

    check(call)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", LAYERS)
def test_recurrent_layers(name):
    """The whole pass, and decoding token by token."""
    layer, x = build(name), inputs(2, 3)

    def call():
        y, state = layer(x, layer.init_state(2))
        return y, layer(x[:, :1], state)

    check(call)


@pytest.mark.slow
def test_attention_layer_decodes():
    layer = ejx.nn.MultiHeadAttention(
        16, num_heads=4, num_kv_heads=2, rope=ejx.nn.RotaryEmbedding(4), key=jax.random.key(0)
    )
    x = normal(0, 2, 4, 16)

    def call():
        y, cache = layer(x, layer.init_cache(2, max_length=8))
        z, cache = layer(x[:, :1], cache)
        return y, z, layer(x[:, :1], cache)[0]

    check(call)


def test_a_decoder():
    """The whole pass, a prompt into a cache, and the parts of a loss. One program each, besides the cache's."""
    layers = (ejx.models.LayerConfig("attention", {"num_heads": 2}, ejx.models.MLPConfig(16)),) * 2
    model = ejx.models.Decoder(ejx.models.DecoderConfig(20, 16, layers), key=jax.random.key(0))
    tokens = jnp.zeros((2, 5), jnp.int32)

    def call():
        return (
            model(tokens),
            model(tokens, model.init_cache(2, 8)),
            model.loss(model.features(tokens), tokens),
        )

    check(call)
