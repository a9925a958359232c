"""`MultiHeadAttention` as people use it in Equinox: vmap, jit, scan, saving, dropout, and what it says when
misused."""

import io

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx.nn import KVCache, MultiHeadAttention, RotaryEmbedding
from tests.tolerances import assert_close


def _layer(seed=0, **changes):
    options = {"num_heads": 4, "num_kv_heads": 2, "rope": RotaryEmbedding(8), "qk_norm": True, "sinks": True}
    return MultiHeadAttention(32, **(options | changes), key=jax.random.key(seed))


def _x(shape=(3, 11, 32)):
    return jax.random.normal(jax.random.key(1), shape)


@eqx.filter_jit
def _call(layer, x, **arrays):
    return layer(x, **arrays)


@eqx.filter_jit
def _mapped(layer, x, **arrays):
    return jax.vmap(jax.vmap(lambda x, arrays: layer(x, **arrays)))(x, arrays)


@pytest.mark.slow
def test_any_number_of_batch_dimensions_and_vmap():
    layer, x = _layer(), _x((2, 3, 11, 32))
    y = _call(layer, x)
    assert_close(_mapped(layer, x), y)
    assert_close(_call(layer, x[1, 2]), y[1, 2])
    real = jnp.arange(11)[None, None] < jnp.array([[11, 4, 7], [1, 11, 2]])[..., None]
    padded = _call(layer, x, padding_mask=real)
    mapped = _mapped(layer, x, padding_mask=real)
    assert_close(jnp.where(real[..., None], mapped, 0), jnp.where(real[..., None], padded, 0))


def test_gradient_of_vmap_is_gradient_of_batch():
    layer, x = _layer(), _x()
    grad = lambda function: eqx.filter_jit(eqx.filter_grad(lambda m: jnp.sum(jnp.sin(function(m)(x)))))(layer)
    batched, mapped = grad(lambda m: m), grad(jax.vmap)
    for ours, theirs in zip(jax.tree.leaves(mapped), jax.tree.leaves(batched), strict=True):
        assert_close(ours, theirs, kind="gradient")


def test_an_unbatched_layer_over_a_batch_of_layers():
    layers = eqx.filter_vmap(lambda key: MultiHeadAttention(32, num_heads=4, key=key))(
        jax.random.split(jax.random.key(0), 3)
    )
    x = _x()
    y = eqx.filter_jit(eqx.filter_vmap(lambda m, x: m(x)))(layers, x)
    for i in range(3):
        one = jax.tree.map(lambda leaf, i=i: leaf[i] if eqx.is_array(leaf) else leaf, layers)
        assert_close(y[i], _call(one, x[i]))


def test_jit_traces_once():
    traces = 0

    @eqx.filter_jit
    def step(layer, x):
        nonlocal traces
        traces += 1
        grad = eqx.filter_grad(lambda m: jnp.sum(m(x) ** 2))(layer)
        return eqx.apply_updates(layer, jax.tree.map(lambda g: -0.01 * g, grad))

    layer, other, x = _layer(0), _layer(1), _x()
    for _ in range(4):
        layer = step(layer, x)
    step(other, x)
    step(eqx.tree_deserialise_leaves(_written(layer), other), x)
    assert traces == 1


def test_stacked_layers_scan_with_their_caches():
    keys = jax.random.split(jax.random.key(0), 3)
    make = lambda key: MultiHeadAttention(32, num_heads=4, num_kv_heads=2, rope=RotaryEmbedding(8), key=key)
    stacked, x = eqx.filter_vmap(make)(keys), _x()
    arrays, static = eqx.partition(stacked, eqx.is_array)

    def body(x, leaves):
        layer, cache = leaves
        layer = eqx.combine(layer, static)
        if cache is None:
            return x + layer(x), None
        y, cache = layer(x, cache)
        return x + y, cache

    expected = x
    for key in keys:
        expected = expected + _call(make(key), expected)
    y, _ = jax.jit(lambda x: jax.lax.scan(body, x, (arrays, None)))(x)
    assert_close(y, expected)

    run = jax.jit(lambda x, cache: jax.lax.scan(body, x, (arrays, cache)))
    y, cache = run(x[:, :9], KVCache.init((3, 3), 12, 2, 8))
    assert_close(y, expected[:, :9])
    y, cache = run(x[:, 9:], cache)
    assert_close(y, expected[:, 9:])
    assert cache.lengths.tolist() == [[11] * 3] * 3


def _written(layer):
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, layer)
    file.seek(0)
    return file


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_serialises(dtype):
    options = {"dtype": dtype, "use_qkv_bias": True, "output_gate": True}
    layer, like = _layer(0, **options), _layer(1, **options)
    back = eqx.tree_deserialise_leaves(_written(layer), like)
    x = _x().astype(dtype)
    assert np.array_equal(_call(back, x), _call(layer, x)) and not np.array_equal(
        _call(like, x), _call(layer, x)
    )
    hollow = eqx.filter_eval_shape(lambda: _layer(1, **options))
    assert np.array_equal(_call(eqx.tree_deserialise_leaves(_written(layer), hollow), x), _call(layer, x))


def test_cross_attention():
    layer = MultiHeadAttention(32, num_heads=4, kv_embed_dim=20, causal=False, key=jax.random.key(0))
    x, memory = _x(), jax.random.normal(jax.random.key(2), (3, 7, 20))
    y = _call(layer, x, kv_input=memory)
    real = jnp.arange(7)[None] < jnp.array([7, 2, 5])[:, None]
    poisoned = jnp.where(real[..., None], memory, jnp.nan)
    padded = _call(layer, x, kv_input=poisoned, kv_padding_mask=real)
    assert_close(padded[0], y[0])
    for row, length in enumerate([7, 2, 5]):
        assert_close(padded[row], _call(layer, x[row], kv_input=memory[row, :length]))
    # A mean over one token is that token.
    value = memory[:, :1] @ layer.v_proj.weight.T @ layer.o_proj.weight.T
    assert_close(_call(layer, x, kv_input=memory[:, :1]), jnp.broadcast_to(value, x.shape))


@pytest.mark.slow
def test_dropout_needs_a_key_and_ends_in_inference_mode():
    layer, x = _layer(dropout_rate=0.5), _x()
    plain = _call(_layer(), x)
    first, same, other = (_call(layer, x, key=jax.random.key(seed)) for seed in (0, 0, 1))
    assert np.array_equal(first, same) and not np.array_equal(first, other)
    assert_close(_call(eqx.nn.inference_mode(layer), x), plain)
    assert_close(_call(layer, x, inference=True), plain)
    many = jax.vmap(lambda key: layer(x, key=key))
    many = jnp.mean(jax.jit(many)(jax.random.split(jax.random.key(2), 500)), 0)
    assert float(jnp.sqrt(jnp.mean((many - plain) ** 2) / jnp.mean(plain**2))) < 0.1
    with pytest.raises(ValueError, match="key"):
        layer(x)


def _cross(**changes):
    return MultiHeadAttention(32, num_heads=4, causal=False, key=jax.random.key(0), **changes)


def test_cross_attention_has_no_rotation():
    layer = _cross(rope=RotaryEmbedding(8))
    with pytest.raises(ValueError, match=r"kv_input: expected .* received one with rope"):
        layer(_x(), kv_input=_x())
