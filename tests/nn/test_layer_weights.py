"""What stands in a projection's place, the dtype that layers compute in, and calls without tokens or rows: in every layer."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx import nn
from tests.nn.recurrent_layers import build, EMBED, inputs
from tests.nn.recurrent_layers import LAYERS as RECURRENT
from tests.recurrence.quick import quick
from tests.tolerances import assert_close

NAMES = ("attention", *RECURRENT)
LINEARS = {
    "lfm2": "in_proj out_proj".split(),
    "attention": "q_proj k_proj v_proj o_proj".split(),
    "mamba": "in_proj x_proj dt_proj out_proj".split(),
    "mamba2": "in_proj out_proj".split(),
    "mamba3": "in_proj out_proj".split(),
    "gla": "q_proj k_proj v_proj g_proj gk_proj.0 gk_proj.1 o_proj".split(),
    "lightning": "qkv_proj output_gate out_proj".split(),
    "kimi": "q_proj k_proj v_proj f_a_proj f_b_proj b_proj g_a_proj g_b_proj o_proj".split(),
    "qwen3-next": "in_proj_qkvz in_proj_ba out_proj".split(),
    "rwkv6": "x_down r_proj k_proj v_proj g_proj w_lora.down w_lora.up o_proj".split(),
    "rwkv7": "r_proj k_proj v_proj o_proj w_lora.down w_lora.up a_lora.down a_lora.up g_lora.down g_lora.up".split(),
    "rwkv7 channels": "key value".split(),
}
RANK = 2


def _layer(name, **options) -> Any:
    if name != "attention":
        return build(name) if not options else RECURRENT[name].build(key=jax.random.key(0), **options)
    heads = {"num_heads": 4, "num_kv_heads": 2, "qk_norm": True, "output_gate": True, "use_qkv_bias": True}
    return nn.MultiHeadAttention(EMBED, **heads, rope=nn.RotaryEmbedding(6), key=jax.random.key(0), **options)


class LoRA(eqx.Module):
    """A low-rank update of a linear layer, `y = (W + b a) x + bias`, which takes one vector."""

    base: eqx.nn.Linear
    a: jax.Array  # [R, in]
    b: jax.Array  # [out, R]

    def __call__(self, x):
        assert x.ndim == 1
        return self.base(x) + self.b @ (self.a @ x)


class Int8Linear(eqx.Module):
    """Weights in 8 bits with a scale a row, `y = (scale q) x + bias`, over any leading axes."""

    q: jax.Array  # int8 [out, in]
    scale: jax.Array  # [out]
    bias: jax.Array | None

    def __call__(self, x):
        y = (x @ self.q.T.astype(x.dtype)) * self.scale.astype(x.dtype)
        return y if self.bias is None else y + self.bias.astype(x.dtype)


def _linears(layer, name):
    def at(path):
        head, *rest = path.split(".")
        found = getattr(layer, head)
        if not rest:
            return found
        return found[int(rest[0])] if rest[0].isdigit() else getattr(found, rest[0])

    return [at(path) for path in LINEARS[name]]


def _replaced(linear, low_rank, random):
    """The module in the place of `linear`, and the weight that it stands for."""
    weight = np.asarray(linear.weight)
    if low_rank:
        a = 0.3 * random.standard_normal((RANK, weight.shape[1]))
        b = 0.3 * random.standard_normal((weight.shape[0], RANK))
        return LoRA(linear, jnp.asarray(a, "float32"), jnp.asarray(b, "float32")), weight + b @ a
    scale = np.abs(weight).max(1) / 127
    q = np.round(weight / scale[:, None])
    return Int8Linear(jnp.asarray(q, "int8"), jnp.asarray(scale, "float32"), linear.bias), q * scale[:, None]


@eqx.filter_jit
def _gradients(layer, x):
    arrays, rest = eqx.partition(layer, eqx.is_inexact_array)

    def loss(arrays):
        y = eqx.combine(arrays, rest)(x)
        return jnp.sum(jnp.sin(y)), y

    return jax.grad(loss, has_aux=True)(arrays)


# Which projections are low-rank updates: of neighbours one and the other kind, then the other way round.
@pytest.mark.few(1)
@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_any_module_in_a_projections_place(name, first):
    # Small inputs: with large ones rounding, which float32 cannot help, comes near what is allowed.
    layer, x, random = _layer(name), 0.5 * inputs(2, 5), np.random.default_rng(3)
    places = lambda layer: _linears(layer, name)
    made = [_replaced(linear, i % 2 == first, random) for i, linear in enumerate(places(layer))]
    pairs = zip(places(layer), made, strict=True)
    merged = [eqx.tree_at(lambda m: m.weight, linear, np.asarray(w)) for linear, (_, w) in pairs]
    gradient, y = _gradients(eqx.tree_at(places, layer, [module for module, _ in made]), x)
    with jax.enable_x64(True):
        double = lambda leaf: leaf.astype("float64") if eqx.is_inexact_array(leaf) else leaf
        wide = jax.tree.map(double, eqx.tree_at(places, layer, merged))
        wanted, expected = _gradients(wide, x.astype("float64"))
    assert_close(y, expected)
    for own, like, (module, _) in zip(places(gradient), places(wanted), made, strict=True):
        slope = np.asarray(like.weight, np.float64)
        measure = float(np.sqrt(np.mean(slope**2)))
        if isinstance(module, LoRA):
            assert_close(own.base.weight, slope, kind="gradient")
            assert_close(own.a, np.asarray(module.b).T @ slope, kind="gradient", scale=measure)
            assert_close(own.b, slope @ np.asarray(module.a).T, kind="gradient", scale=measure)
        else:
            scales = (slope * np.asarray(module.q)).sum(1)
            assert_close(own.scale, scales, kind="gradient", scale=127 * measure)
        if module.bias is not None if isinstance(module, Int8Linear) else module.base.bias is not None:
            bias = own.bias if isinstance(module, Int8Linear) else own.base.bias
            assert_close(bias, like.bias, kind="gradient", scale=measure)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("name", NAMES)
def test_they_decode_too(name):
    """States and caches follow from the layer, whatever its projections are."""
    layer, x = _layer(name), inputs(2, 3)
    places = lambda layer: _linears(layer, name)
    random = np.random.default_rng(3)
    layer = eqx.tree_at(places, layer, [_replaced(linear, False, random)[0] for linear in places(layer)])
    start = layer.init_cache(2, 4) if name == "attention" else layer.init_state(2)
    assert all(leaf.dtype in (jnp.float32, jnp.int32, jnp.bool_) for leaf in jax.tree.leaves(start))

    @quick
    def both(x, start):
        first, middle = layer(x[:, :2], start)
        last, _ = layer(x[:, 2:], middle)
        return layer(x), jnp.concatenate([first, last], 1)

    whole, parts = both(x, start)
    assert_close(parts, whole)


GIVEN = [
    # the weights, what is chosen, the input -> what the layer computes in and gives
    ("float32", None, "bfloat16", "float32"),
    ("bfloat16", None, "float32", "float32"),
    ("bfloat16", None, "bfloat16", "bfloat16"),
    ("float32", "bfloat16", "float32", "bfloat16"),
    ("bfloat16", "float32", "float16", "float32"),
]


@pytest.mark.few(3)
@pytest.mark.parametrize("name", NAMES)
def test_what_a_layer_computes_in(name):
    """What input and weights promote to, whatever JAX is told to do with two dtypes (the suite runs with "strict"); or what was chosen."""
    for dtype, chosen, given, expected in GIVEN:

        def call(x, dtype=dtype, chosen=chosen):
            layer = _layer(name, dtype=dtype, compute_dtype=chosen)
            start = layer.init_cache(2, 4) if name == "attention" else layer.init_state(2)
            return layer(x, start), start

        (y, new), start = eqx.filter_eval_shape(call, jax.ShapeDtypeStruct((2, 1, EMBED), given))
        assert y.dtype == expected
        assert jax.tree.map(lambda a: a.dtype, new) == jax.tree.map(lambda a: a.dtype, start)
        kept = [start.k] if name == "attention" else start.conv
        assert all(a.dtype == (chosen or dtype) for a in kept)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", NAMES)
def test_a_chosen_dtype_is_that_of_cast_projections(name):
    """What a float32 layer that computes in bfloat16 gives is, bit for bit, what the layer with cast projections gives for a cast input:
    nothing else of it is cast."""
    layer, x = _layer(name), inputs(2, 5)
    hollow = eqx.filter_eval_shape(lambda: _layer(name, compute_dtype="bfloat16"))
    chosen = jax.tree.unflatten(jax.tree.structure(hollow), jax.tree.leaves(layer))
    linears = lambda layer: _linears(layer, name)
    half = lambda a: a.astype(jnp.bfloat16)
    cast = eqx.tree_at(linears, layer, [jax.tree.map(half, linear) for linear in linears(layer)])
    if name == "mamba":  # the bias of the time steps is added in float32
        cast = eqx.tree_at(lambda m: m.dt_proj.bias, cast, layer.dt_proj.bias)
    run = eqx.filter_jit(lambda layer, x: layer(x))
    y = run(chosen, x)
    assert y.dtype == jnp.bfloat16
    assert np.array_equal(y, run(cast, half(x)))


EMPTY = {"no tokens": (2, 0), "no rows": (0, 3), "neither": (0, 0)}


@pytest.mark.few(1)
@pytest.mark.parametrize("lead", EMPTY.values(), ids=EMPTY)
@pytest.mark.parametrize("name", NAMES)
def test_nothing_gives_nothing(name, lead):
    """No tokens or no rows: an empty output, a state or cache as it came, and gradients of zero."""
    layer, x = _layer(name), jnp.zeros((*lead, EMBED))
    start = layer.init_cache(lead[0], 4) if name == "attention" else layer.init_state(lead[0])
    start = jax.tree.map(lambda a: a + jnp.ones((), a.dtype), start)
    real = jnp.ones(lead, bool)
    arrays, rest = eqx.partition(layer, eqx.is_inexact_array)

    @quick
    def run(arrays, x, start):
        def loss(arrays, x):
            layer = eqx.combine(arrays, rest)
            y, new = layer(x, start, padding_mask=real)
            plain = layer(x)
            return jnp.sum(y) + jnp.sum(plain), (y, plain, new)

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(arrays, x)

    (value, (y, plain, new)), (of_weights, of_x) = run(arrays, x, start)
    assert y.shape == plain.shape == of_x.shape == x.shape and value == 0
    jax.tree.map(np.testing.assert_array_equal, new, start)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(of_weights))


@pytest.mark.few(1)
@pytest.mark.parametrize("lead", EMPTY.values(), ids=EMPTY)
def test_nothing_gives_nothing_in_parts(lead):
    """The same for the layers that others are made of, and for cross attention to nothing."""
    conv, norm = nn.ShortConvolution(6, use_bias=True, key=jax.random.key(0)), nn.GatedRMSNorm(6)
    rope, x = nn.RotaryEmbedding(6), jnp.zeros((*lead, 6))
    cross = nn.MultiHeadAttention(6, num_heads=2, causal=False, key=jax.random.key(0))

    arrays, rest = eqx.partition((conv, norm, cross), eqx.is_inexact_array)

    @quick
    @functools.partial(jax.grad, has_aux=True)
    def run(arrays, x):
        conv, norm, cross = eqx.combine(arrays, rest)
        y, state = conv(x, conv.init_state(lead[0]))
        outs = conv(x), y, norm(x, x), rope(x[..., None, :])[..., 0, :], cross(x, kv_input=x)
        return sum(map(jnp.sum, outs)), (outs, state)

    gradient, (outs, state) = run(arrays, x)
    assert all(out.shape == x.shape for out in outs) and not np.any(state)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(gradient))


def test_a_token_that_sees_nothing():
    """Cross attention to no keys at all gives what its output's bias is."""
    layer = nn.MultiHeadAttention(6, num_heads=2, causal=False, use_output_bias=True, key=jax.random.key(0))
    y = layer(jnp.ones((2, 3, 6)), kv_input=jnp.zeros((2, 0, 6)))
    assert_close(y, np.broadcast_to(np.asarray(layer.o_proj.bias), y.shape))
