"""`MultiHeadAttention` against the published layers, written down independently in `published.py`."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from ejkernel_eqx.nn import Llama3Scaling, MultiHeadAttention, RotaryEmbedding, YarnScaling
from tests.arrays import normal
from tests.nn import published
from tests.tolerances import assert_close


class Case(NamedTuple):
    """One published layer at a small size: our one constructor call, and its formulas."""

    build: Callable[..., MultiHeadAttention]
    formulas: Callable
    embed_dim: int
    tokens: int


def _rope(dim, theta=10000.0, **options):
    return {"rope": RotaryEmbedding(dim, theta=theta, **options)}


_layer = functools.partial(functools.partial, MultiHeadAttention, num_heads=4, num_kv_heads=2)
LLAMA = _layer(32, **_rope(8, 500000.0, scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192)))
MISTRAL = _layer(32, **_rope(8), sliding_window=5)
GEMMA2 = _layer(48, head_dim=16, **_rope(16), logits_soft_cap=50.0, softmax_scale=24**-0.5)
QWEN3 = _layer(24, head_dim=16, **_rope(16, 1000000.0), qk_norm=True)
_BIASED = {"use_qkv_bias": True, "use_output_bias": True, "sinks": True}
_YARN = YarnScaling(32.0, 4096, truncate=False)
GPT_OSS = _layer(24, head_dim=64, **_rope(64, 150000.0, scaling=_YARN), **_BIASED)
QWEN3_NEXT = _layer(24, head_dim=16, **_rope(16, 10000000.0, rotary_dim=4), qk_norm=True, output_gate=True)

_h42 = {"num_heads": 4, "num_kv_heads": 2}


def _case(layer, formulas, embed_dim, local=(), **known):
    """With options of a layer with a window, and what the formulas need to know."""
    build = functools.partial(layer, **dict(local))
    return Case(build, functools.partial(formulas, **_h42, **known), embed_dim, 13)


_gemma = functools.partial(published.gemma2, query_pre_attn_scalar=24)
CASES = {
    "llama3": _case(LLAMA, published.llama3, 32),
    "mistral": _case(MISTRAL, published.mistral, 32, window=5),
    "gemma2, local": _case(GEMMA2, _gemma, 48, {"sliding_window": 6}, window=6),
    "gemma2, global": _case(GEMMA2, _gemma, 48, window=None),
    "qwen3": _case(QWEN3, published.qwen3, 24),
    "olmo2": _case(LLAMA, published.olmo2, 32, _rope(8) | {"qk_norm": "all"}),
    "gpt-oss, local": _case(GPT_OSS, published.gpt_oss, 24, {"sliding_window": 7}, window=7),
    "gpt-oss, global": _case(GPT_OSS, published.gpt_oss, 24, window=None),
    "qwen3-next": _case(QWEN3_NEXT, published.qwen3_next, 24, rotary_dim=4),
}
PARAMETERS = [
    f"{name}.{part}"
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    for part in ("weight", "bias")
]


def get(layer, name) -> Any:
    """The parameter under its published name, or `None`."""
    return functools.reduce(lambda node, part: getattr(node, part, None), name.split("."), layer)


def names_of(layer):
    return [name for name in [*PARAMETERS, "sinks"] if get(layer, name) is not None]


def random_weights(layer, scale=3.0):
    """Weights under their published names, large enough for soft caps, sinks and norms to matter."""
    keys = jax.random.split(jax.random.key(7), len(PARAMETERS) + 1)
    weights = {}
    for key, name in zip(keys, names_of(layer)):
        size = get(layer, name).shape
        spread = scale * size[-1] ** -0.5 if len(size) == 2 else 0.5
        weights[name] = spread * jax.random.normal(key, size, jnp.float64)
    return weights


def by_name(layer, weights):
    """The layer with its parameters replaced, by name and nothing else."""
    names = list(weights)
    return eqx.tree_at(lambda m: [get(m, name) for name in names], layer, [weights[name] for name in names])


def loaded(name, dtype=jnp.float64, scale=3.0):
    case = CASES[name]
    layer = case.build(dtype=dtype, key=jax.random.key(0))
    weights = random_weights(layer, scale)
    values = {key: jnp.asarray(value, dtype) for key, value in weights.items()}
    if name == "qwen3-next":
        values |= {key: 1 + values[key] for key in ("q_norm.weight", "k_norm.weight")}
    x = normal(8, (2, case.tokens, case.embed_dim), jnp.float64)
    return by_name(layer, values), weights, x, jax.vmap(case.formulas, in_axes=(None, 0))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", CASES)
def test_output_and_every_gradient(enable_x64, name):
    layer, weights, x, formulas = loaded(name)
    cotangent = normal(9, x.shape, x.dtype)

    @eqx.filter_jit
    def ours(layer, x):
        y, pullback = eqx.filter_vjp(lambda layer, x: layer(x), layer, x)
        return y, pullback(cotangent)

    @jax.jit
    def theirs(weights, x):
        y, pullback = jax.vjp(formulas, weights, x)
        return y, pullback(cotangent)

    y, (grad_layer, grad_x) = ours(layer, x)
    expected, (grad_weights, expected_grad_x) = theirs(weights, x)
    assert_close(y, expected, name=name)
    assert_close(grad_x, expected_grad_x, kind="gradient", name=f"{name}: x")
    for parameter, expected_grad in grad_weights.items():
        grad = get(grad_layer, parameter)
        assert float(jnp.max(jnp.abs(grad))) > 0, parameter
        assert_close(grad, expected_grad, kind="gradient", name=f"{name}: {parameter}")


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama3", jnp.float32), ("gemma2, local", jnp.bfloat16), ("gpt-oss, local", jnp.bfloat16)],
)
def test_lower_precision(enable_x64, name, dtype):
    # Weights of ordinary size: with larger ones the scores pass 100, where bfloat16 inputs leave no digit.
    layer, weights, x, formulas = loaded(name, dtype, scale=1.0)
    y = eqx.filter_jit(layer)(x.astype(dtype))
    assert y.dtype == dtype
    # Rounded as ours are, so that only the computation is measured.
    rounded = {key: jnp.asarray(value, dtype).astype(jnp.float64) for key, value in weights.items()}
    expected = jax.jit(formulas)(rounded, x.astype(dtype).astype(jnp.float64))
    assert_close(y, expected, dtype, "gradient", name=name)
