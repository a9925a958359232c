"""Outside of `jax.jit`: a call like one before compiles nothing."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import ejkernel_eqx as ejx
from tests.attention.dense import normal, qkv
from tests.compilations import compilations
from tests.nn.recurrent_layers import build, inputs
from tests.operations import made, OPERATIONS
from tests.recurrence.operations import CASES


def check(call):
    with compilations() as first:
        jax.block_until_ready(call())
    with compilations() as later:
        for _ in range(2):
            jax.block_until_ready(call())
    assert first and not later, f"{len(later)} of 2 calls' programs were compiled again"


@pytest.mark.few(3)
@pytest.mark.parametrize("platform", ["xla", "triton-interpret"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name, platform):
    """With gradients; the module is a new one each time, as a function that builds what it calls has."""
    _, args = made(name, platform)
    total = lambda op, args: sum(jnp.sum(x) for x in jax.tree.leaves(op(*args)))
    check(lambda: jax.grad(lambda args: total(made.__wrapped__(name, platform)[0], args))(args))


def test_attention():
    arrays: dict[str, Any] = qkv(2, t=5, s=7)

    def call():
        attn = ejx.FlashAttention(causal=True, sliding_window=3)
        ids: dict[str, Any] = dict(
            segment_ids=jnp.zeros((2, 5), jnp.int32), kv_segment_ids=jnp.zeros((2, 7), jnp.int32)
        )
        out = attn(**arrays, **ids), attn(**arrays, kv_lengths=jnp.array([3, 7]), return_lse=True)
        sparse = ejx.BlockSparseAttention(ejx.Mask.causal() | ejx.Mask.strided(3))(*arrays.values())
        return out, ejx.Attention(causal=True)(*arrays.values()), sparse

    check(call)


def test_steps_and_other_operations():
    case, x, sizes = CASES["gated delta softplus"], normal(0, 2, 5, 8), jnp.array([2, 0, 3])
    state, now = case.make_state(2, dtype=jnp.float32), case.make(2, dtype=jnp.float32)

    def call():
        step = case.call(case.module(config=None, platform="xla").step, now, state)
        experts = ejx.GroupedMatmul("silu")
        product = experts(x[0], normal(1, 3, 8, 4), sizes, up=normal(1, 3, 8, 4), row_indices=jnp.arange(5))
        return step, product, ejx.MeanPooling("max", normalize=True)(x, lengths=3)

    check(call)


@pytest.mark.parametrize("name", ["mamba", pytest.param("mamba2", marks=pytest.mark.slow)])
def test_layers(name):
    """The whole pass, and decoding token by token."""
    layer, x = build(name), inputs(2, 3)

    def call():
        y, state = layer(x, layer.init_state(2))
        return y, layer(x[:, :1], state)

    check(call)


def test_a_decoder():
    """The whole pass, a prompt into a cache, a token, and the parts of a loss. One program each, besides the cache's."""
    mixer = {"num_heads": 2, "rope": ejx.nn.RotaryEmbedding(8)}
    layers = (ejx.models.LayerConfig("attention", mixer, ejx.models.MLPConfig(16)),) * 2
    model = ejx.models.Decoder(ejx.models.DecoderConfig(20, 16, layers), key=jax.random.key(0))
    tokens = jnp.zeros((2, 5), jnp.int32)

    def call():
        logits, cache = model(tokens, model.init_cache(2, 8))
        loss = model.loss(model.features(tokens), tokens)
        return model(tokens), logits, model(tokens[:, :1], cache)[0], loss

    check(call)
