"""The norm and the residual of a block as arguments of its layers: what they give, however the layer is called."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel_eqx as ejx
from ejkernel_eqx.models import Decoder, DecoderConfig, generate, LayerConfig, MLPConfig
from ejkernel_eqx.models.mlp import MLP
from ejkernel_eqx.nn import MultiHeadAttention, RotaryEmbedding
from tests.attention.dense import normal
from tests.tolerances import assert_close

KEY = jax.random.key(0)
NORM = eqx.tree_at(lambda n: n.weight, eqx.nn.RMSNorm(16, 1e-5, use_bias=False), normal(9, 16))


def attention(platform: Any = "xla", **options: Any) -> MultiHeadAttention:
    return MultiHeadAttention(
        16, num_heads=2, head_dim=8, rope=RotaryEmbedding(8), platform=platform, key=KEY, **options
    )


def over_pages(layer, x, **block):
    """A call with one sequence, and its keys."""
    tokens, pages = x.shape[0], -(-x.shape[0] // 16)
    batch = ejx.RaggedBatch(
        jnp.array([0, tokens]), jnp.array([tokens]), jnp.arange(pages)[None],
        page_size=16, max_query_len=tokens, num_tokens=tokens,
    )  # fmt: skip
    y, cache = layer(x, layer.init_paged_cache(pages, 16), batch=batch, **block)
    return y, cache.k


def apart(norm, x):
    return jax.vmap(norm)(x.reshape(-1, x.shape[-1])).reshape(x.shape)


@pytest.mark.parametrize(
    "platform, tokens, replaced",
    [("xla", 5, False), ("xla", 5, True)]
    + [("triton-interpret", *case) for case in ((5, False), (70, False), (5, True))],
)
def test_over_pages(platform, tokens, replaced):
    """Few tokens and many, and a rotation in the place of the one that the layer was built with."""
    layer, x, residual = attention(platform), normal(1, tokens, 16), normal(2, tokens, 16)
    if replaced:
        layer = eqx.tree_at(lambda m: m.rope, layer, RotaryEmbedding(8, interleaved=True))
    (found, keys), (plain, expected) = (
        over_pages(layer, x, norm=NORM, residual=residual),
        over_pages(layer, apart(NORM, x)),
    )
    assert_close(found, residual + plain)
    assert_close(keys, expected)


def test_without_pages_and_with_padding():
    """Padding that holds NaN reaches no result, and no gradient of the norm."""
    real = jnp.array([[True] * 5, [False, False, True, True, True]])
    x = jnp.where(real[..., None], normal(1, 2, 5, 16), jnp.nan)
    layer, residual = attention(), jnp.zeros_like(x)
    call = lambda norm: jnp.where(
        real[..., None], layer(x, padding_mask=real, norm=norm, residual=residual), 0
    )
    clean = jnp.where(real[..., None], x, 0)
    expected = jnp.where(real[..., None], layer(apart(NORM, clean), padding_mask=real), 0)
    assert_close(call(NORM), expected)
    assert bool(jnp.isfinite(eqx.filter_grad(lambda norm: call(norm).sum())(NORM).weight).all())


def test_an_mlp():
    mlp, x, residual = MLP(16, MLPConfig(24), platform="xla", key=KEY), normal(1, 3, 16), normal(2, 3, 16)
    assert_close(mlp(x, norm=NORM, residual=residual), residual + mlp(apart(NORM, x)))
    with pytest.raises(ValueError, match="again: expected None"):
        mlp(x, x, residual=residual)
    with pytest.raises(ValueError, match="residual: expected the shape"):
        mlp(x, residual=residual[:2])


@pytest.mark.parametrize(
    "block, words",
    [
        (dict(residual=jnp.ones((5, 8))), "residual: expected the shape of the output"),
        (dict(norm=NORM, kv_input=jnp.ones((5, 16))), "kv_input: expected"),
    ],
)
def test_errors(block, words):
    with pytest.raises(ValueError, match=words):
        attention()(jnp.ones((5, 16)), **block)
    wide = eqx.tree_at(lambda m: m.k_proj, attention(), eqx.nn.Linear(16, 32, use_bias=False, key=KEY))
    with pytest.raises(ValueError, match="k_proj: expected an "):
        over_pages(wide, jnp.ones((5, 16)), norm=NORM)


def model_of(platform: Any, dtype: Any = None) -> Decoder:
    layer = LayerConfig(
        "attention", {"num_heads": 2, "head_dim": 8, "rope": RotaryEmbedding(8)}, MLPConfig(24)
    )
    return Decoder(DecoderConfig(32, 16, (layer,) * 2), platform=platform, dtype=dtype, key=KEY)


def test_a_model_in_half_precision():
    tokens = [
        generate(model_of(platform, "float16"), [[1, 2, 3]], max_new_tokens=3, stop_tokens=()).tokens
        for platform in ("triton-interpret", "xla")
    ]
    np.testing.assert_array_equal(tokens[0], tokens[1])


@pytest.mark.slow
def test_more_mapped_rows_than_a_tile_has():
    model = model_of("triton-interpret")
    cache, tokens = model.init_cache((), 16), jnp.arange(65)[:, None] % 32
    found = jax.vmap(lambda t: model(t, cache)[0])(tokens)
    plain = model_of("xla")
    assert_close(found, jax.vmap(lambda t: plain(t, plain.init_cache((), 16))[0])(tokens))


def test_serving_with_rows_of_weights_split_over_an_explicit_mesh():
    mesh = jax.make_mesh(
        (2, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4]
    )
    put = lambda x: jax.device_put(x, NamedSharding(mesh, P(None, "tensor", None) if x.ndim == 3 else P()))
    model = model_of("xla")
    batch = ejx.RaggedBatch(
        jnp.array([0, 4]), jnp.array([4]), jnp.arange(2)[None], jnp.array([0]),
        page_size=16, max_query_len=4, num_tokens=4,
    )  # fmt: skip
    call = lambda model: model(
        jnp.arange(4), model.init_serving_cache(num_pages=4, page_size=16, num_slots=2), batch=batch
    )[0]
    split = jax.tree.map(lambda x: put(x) if eqx.is_array(x) else x, model)
    assert_close(np.asarray(call(split)), call(model))
