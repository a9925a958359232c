"""Decoding of rows by the kernels of pages: the logits and caches of layers that run one after the other over rows."""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.models import Decoder, DecoderConfig, LayerConfig, MLPConfig, MoEConfig

INTERPRET = "triton-interpret"
HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
ROPE = {"rope": ejx.nn.RotaryEmbedding(16)}
FULL = LayerConfig("attention", HEADS | ROPE | {"qk_norm": True}, MLPConfig(24))
LOCAL = dataclasses.replace(FULL, options=HEADS | ROPE | {"sliding_window": 5, "sinks": True})
DELTA = LayerConfig("gated_delta_net", {"num_k_heads": 1, "num_v_heads": 2, "head_dim": 16}, MLPConfig(24))
EXPERTS = MoEConfig({"hidden_dim": 8, "num_experts": 4, "top_k": 2})
LATENT_SIZES = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16}
LATENT = LayerConfig("latent_attention", {"num_heads": 2, "v_head_dim": 16, **LATENT_SIZES}, EXPERTS)
MAMBA = LayerConfig("mamba2", {"head_dim": 8, "state_size": 8})
CONFIGS = {
    "attention": DecoderConfig(40, 32, (FULL,) * 2),
    "window": DecoderConfig(40, 32, (LOCAL, FULL)),
    "hybrid": DecoderConfig(40, 32, (FULL, DELTA, FULL, DELTA, FULL)),
    "latent": DecoderConfig(40, 32, (LATENT,) * 2),
    "states": DecoderConfig(40, 32, (MAMBA,) * 2),
}
ROWS = 3
PROMPTS = np.random.default_rng(0).integers(0, 40, (ROWS, 4)).astype(np.int32)
REAL = np.array([[True] * 4, [False, False, True, True], [False, True, True, True]])
STEPS = np.random.default_rng(1).integers(0, 40, (3, ROWS, 1)).astype(np.int32)
GOES_ON = np.array([[True, True, True], [True, True, False], [True, True, False]])[..., None]


@functools.cache
def model_of(name: str, platform: str) -> Decoder:
    return Decoder(CONFIGS[name], platform=platform, key=jax.random.key(3))


def close(found: Any, expected: Any) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * max(1.0, float(np.max(np.abs(b)))))


def decoded(model: Decoder, prompts: Any, steps: Any, length: int = 48) -> Any:
    """The logits of each step in a loop, and the caches after the prompt and the last one, which are made in the program itself."""
    _, begun = model(prompts, model.init_cache(ROWS, length), padding_mask=jnp.asarray(REAL))

    def step(cache: Any, now: Any) -> tuple[Any, Any]:
        tokens, real = now
        logits, cache = model(tokens, cache, padding_mask=real)
        return cache, jnp.where(real[..., None], logits, 0)

    cache, logits = jax.lax.scan(step, begun, (steps, jnp.asarray(GOES_ON)))
    return logits, begun, cache


@functools.cache
def run(name: str, platform: str, length: int = 48) -> Any:
    return eqx.filter_jit(decoded)(model_of(name, platform), PROMPTS, STEPS, length)


def primitives(jaxpr: Any) -> list[str]:
    inner = lambda value: jax.tree.leaves(value, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"))
    names = []
    for eqn in jaxpr.eqns:
        names.append(eqn.primitive.name)
        for value in inner(list(eqn.params.values())):
            value = getattr(value, "jaxpr", value)
            names += primitives(value) if hasattr(value, "eqns") else []
    return names


@pytest.mark.parametrize("name", CONFIGS)
def test_steps_in_a_loop_are_those_over_rows(name):
    logits, _, cache = run(name, INTERPRET)
    expected, _, whole = run(name, "xla")
    close(logits, expected)
    close(cache, whole)


@pytest.mark.parametrize("name", ["hybrid", "latent"])
def test_a_row_that_is_done_keeps_its_cache_bit_for_bit(name):
    _, begun, cache = run(name, INTERPRET)
    for before, after in zip(jax.tree.leaves(begun), jax.tree.leaves(cache), strict=True):
        if before.ndim > 2:
            first = run(name, INTERPRET)[2] is cache  # rows that go on have changed
            assert first and not np.array_equal(before[:, 0], after[:, 0])
    lengths = [c.lengths for stack in cache.stacks for c in stack if hasattr(c, "lengths")]
    assert all(x.tolist() == [[7, 5, 4]] * len(x) for x in lengths)
