"""Weights in 8 and 4 bits: their numbers by the definitions of the formats, and how they compose."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.quantised.numbers import numbers
from tests.attention.dense import normal, quick
from tests.tolerances import assert_close

KINDS = ("int8", "fp8", "fp8-block", "int4", "mxfp4", "nvfp4")
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
FORMATS = {
    "per channel": (ejx.QuantFormat("int8"), (5, 24)),
    "blocks that are cut off": (ejx.QuantFormat("float8_e4m3fn", (4, 16), "bfloat16"), (6, 40)),
    "one scale": (ejx.QuantFormat("float8_e5m2", (0, 0), "float16"), (3, 7)),
    "zero points": (ejx.QuantFormat("uint4", (1, 8), "float16", True), (5, 32)),
    "powers of two": (ejx.QuantFormat("float4_e2m1fn", (1, 32), "float8_e8m0fnu"), (4, 64)),
    "a factor": (ejx.QuantFormat("float4_e2m1fn", (1, 16), "float8_e4m3fn"), (4, 48)),
}


def drawn(form, shape, lead=(), seed=0):
    """A quantised weight of random bits without NaN, and its numbers in float64."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 2**form.bits, (*lead, *shape)).astype(np.uint8)
    if form.element.startswith("float8"):
        codes &= 0xBB  # no NaN, no infinities
    blocks = (*lead, *form.blocks(*shape))
    scales = 2.0 ** rng.integers(-3, 4, blocks)
    if form.scale != "float8_e8m0fnu":
        scales *= rng.uniform(1, 2, blocks)
    scales = scales.astype(getattr(ml_dtypes, form.scale, None) or form.scale)
    zeros = rng.integers(0, 16, blocks).astype(np.uint8) if form.zeros else None
    factor = rng.uniform(0.5, 2, lead).astype(np.float32) if form.block[1] == 16 and form.bits == 4 else None
    if form.element == "int8":
        x = codes.view(np.int8).astype(np.float64)
    elif form.bits == 8:
        x = codes.view(getattr(ml_dtypes, form.element)).astype(np.float64)
    else:
        x = E2M1[codes] if form.element == "float4_e2m1fn" else codes.astype(np.float64)

    def spread(a):
        row = np.arange(shape[0]) // (form.block[0] or shape[0])
        column = np.arange(shape[1]) // (form.block[1] or shape[1])
        return np.asarray(a, np.float64)[..., row[:, None], column[None, :]]

    if form.element == "uint4":
        x -= 8 if zeros is None else spread(zeros)
    x *= spread(scales)
    x = x if factor is None else x * factor[..., None, None].astype(np.float64)
    packed = codes[..., 0::2] | codes[..., 1::2] << 4 if form.bits == 4 else codes
    bits = scales.view(f"uint{8 * scales.dtype.itemsize}")
    factor = None if factor is None else jnp.asarray(factor.view(np.uint32))
    zeros = None if zeros is None else jnp.asarray(zeros)
    return ejx.QuantizedWeight(jnp.asarray(packed), jnp.asarray(bits), zeros, factor, form, jnp.float32), x


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_are_those_of_the_definition(name):
    form, shape = FORMATS[name]
    weight, exact = drawn(form, shape, (2,))
    assert weight.shape == (2, *shape) and weight.ndim == 3 and weight.dtype == jnp.float32
    values = quick(ejx.dequantise)(weight)
    np.testing.assert_allclose(values, exact, rtol=3e-7)
    np.testing.assert_array_equal(ejx.dequantise(weight[1]), values[1])
    np.testing.assert_array_equal(ejx.dequantise(weight[1].T), values[1].T)
    rows = jnp.array([[2, 0], [-1, 1]])
    np.testing.assert_array_equal(weight[0][rows], values[0][rows])
    np.testing.assert_array_equal(weight[0].T[1], values[0].T[1])


@pytest.mark.parametrize("name", FORMATS)
def test_products_and_their_gradient(name):
    form, shape = FORMATS[name]
    weight, exact = drawn(form, shape)
    x, target = normal(1, shape[1]), normal(2, shape[0])

    def loss(x):
        return (weight @ x * target).sum() + (x @ weight.T).sum()

    value, grad = quick(jax.value_and_grad(loss))(x)
    wanted = exact.T @ (np.asarray(target, np.float64) + 1)
    assert_close(value, np.asarray(x, np.float64) @ wanted, scale=float(np.abs(exact).max()))
    assert_close(grad, wanted, kind="gradient")
    both = quick(jax.vmap(lambda x: weight @ x))(jnp.stack([x, -x]))
    assert_close(both, np.stack([exact @ np.asarray(x, np.float64), -exact @ np.asarray(x, np.float64)]))
    stacked, many = drawn(form, shape, (3,), seed=4)
    scanned = quick(lambda x: jax.lax.scan(lambda c, w: (c, w @ x), 0, stacked)[1])(x)
    assert_close(scanned, many @ np.asarray(x, np.float64))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_rounding_is_to_the_nearest(kind, dtype):
    """No other code is nearer, for the scales that were chosen; zeros stay zeros, whole rows of them too."""
    w = np.array(normal(3, 140, 128), np.float32)
    w[7], w[3, 5], w[9] = 0, 0, w[9] * 1e-4
    w = jnp.asarray(w, dtype)
    weight = ejx.quantise(w, kind)
    assert weight.dtype == dtype and weight.shape == w.shape
    wide, exact = np.asarray(w, np.float64), np.asarray(numbers(weight), np.float64)
    assert (exact[7] == 0).all() and exact[3, 5] == 0
    form = weight.format
    one = eqx.tree_at(lambda v: v.codes, weight, jnp.zeros_like(weight.codes))
    nearest = np.full_like(wide, np.inf)
    for code in range(2**form.bits):
        byte = code | code << 4 if form.bits == 4 else code
        other = eqx.tree_at(lambda v: v.codes, one, jnp.full_like(weight.codes, byte))
        nearest = np.fmin(nearest, np.abs(np.asarray(numbers(other), np.float64) - wide))
    np.testing.assert_allclose(np.abs(exact - wide), nearest, rtol=1e-4, atol=1e-7)
    if kind == "mxfp4":
        top = np.abs(wide.reshape(140, 4, 32)).max(-1)
        scales = 2.0 ** (np.asarray(weight.scales, np.float64) - 127)
        some = top > 0
        np.testing.assert_array_equal(scales[some], 2.0 ** (np.floor(np.log2(top[some])) - 2))
    else:  # the largest of a block is kept
        blocks = {"int8": (1, 128), "fp8": (1, 128), "int4": (1, 128), "nvfp4": (1, 16)}
        if kind in blocks:
            top = np.abs(wide).reshape(140, -1, blocks[kind][1]).max(-1)
            kept = np.abs(exact).reshape(140, -1, blocks[kind][1]).max(-1)
            np.testing.assert_allclose(kept, top, rtol=0.07)


def test_ties_go_to_the_even_code():
    w = jnp.array(
        [
            [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
            + [0.0] * 8
            + [-x for x in (6.0, 0.25, 0.75)]
            + [0.0] * 13
        ]
    )
    weight = ejx.quantise(w, "mxfp4")
    wanted = [6, 0, 1, 1, 2, 2, 4, 4] + [0] * 8 + [-6, 0, -1] + [0] * 13
    np.testing.assert_array_equal(ejx.dequantise(weight)[0], wanted)


def test_training_passes_by():
    """Weight decay and gradients leave codes and scales as they are, bit by bit; what is left trains."""
    model = eqx.nn.MLP(32, 8, 32, 1, key=jax.random.key(0))
    model = ejx.quantise(model, "int4", where=lambda path: path == ".layers[0].weight")
    optimiser = optax.adamw(1e-2, weight_decay=0.5)
    before, state = model, optimiser.init(eqx.filter(model, eqx.is_inexact_array))
    x = normal(1, 5, 32)

    @eqx.filter_jit
    def step(model, state):
        grads = eqx.filter_grad(lambda model: (jax.vmap(model)(x) ** 2).sum())(model)
        updates, state = optimiser.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state

    with jax.numpy_dtype_promotion("standard"):  # optax counts in integers
        for _ in range(10):
            model, state = step(model, state)
    first, last = before.layers[0].weight, model.layers[0].weight
    assert type(last) is ejx.QuantizedWeight
    np.testing.assert_array_equal(last.codes, first.codes)
    np.testing.assert_array_equal(last.scales, first.scales)
    assert not np.allclose(model.layers[1].weight, before.layers[1].weight)


def test_tools_of_equinox(tmp_path):
    linear = ejx.quantise(eqx.nn.Linear(32, 4, key=jax.random.key(0)), "nvfp4")
    arrays, static = eqx.partition(linear, eqx.is_array)
    assert eqx.tree_equal(eqx.combine(arrays, static), linear)
    other = ejx.quantise(eqx.nn.Linear(32, 4, key=jax.random.key(1)), "nvfp4")
    eqx.tree_serialise_leaves(tmp_path / "a", linear)
    assert eqx.tree_equal(eqx.tree_deserialise_leaves(tmp_path / "a", other), linear)
    ejx.save(tmp_path / "b", linear)
    assert eqx.tree_equal(ejx.load(tmp_path / "b", other), linear)
    shown = "QuantizedWeight(float32[4, 32] as float4_e2m1fn with a float8_e4m3fn scale per 1x16)"
    assert repr(linear.weight) == shown and shown in repr(linear)
    assert linear.weight.nbytes == 4 * (16 + 2) + 4
    floats = ejx.dequantise(linear)
    assert_close(linear(normal(2, 32)), floats(normal(2, 32)))
    assert type(floats.weight) is not ejx.QuantizedWeight


def test_errors_of_weights():
    w = normal(0, 8, 64)
    weight, errors = ejx.quantise(w, "int8", return_errors=True)
    exact = np.asarray(ejx.dequantise(weight), np.float64) - np.asarray(w, np.float64)
    np.testing.assert_allclose(
        errors[""], np.sqrt((exact**2).mean() / (np.asarray(w, np.float64) ** 2).mean()), rtol=1e-4
    )


def test_weights_from_outside_of_a_trace():
    """A `like` of `load` quantises the model at hand, as shapes."""
    weight = jnp.ones((4, 32))
    shapes = jax.eval_shape(lambda: ejx.quantise(weight, "int8"))
    same = lambda x, y: (x.shape, x.dtype) == (y.shape, y.dtype)
    assert all(jax.tree.leaves(jax.tree.map(same, shapes, ejx.quantise(weight, "int8"))))
    with pytest.raises(ValueError, match="infinities"):
        broken = weight.at[0, 0].set(jnp.nan)
        jax.jit(lambda: ejx.quantise(broken, "int8"))()


W, FORM = jnp.ones((4, 32)), ejx.QuantFormat("uint4", (1, 32), "float16", True)
NO_FORM: Any = "uint4"
CODES, SCALES = jnp.zeros((4, 16), jnp.uint8), jnp.zeros((4, 1), jnp.uint16)
BYTES = jnp.zeros((4, 1), jnp.uint8)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: ejx.quantise(W, "int3"), ["kind", "int8", "int3"]),
        (lambda: ejx.quantise(W, "int8", group_size=32), ["group_size", "None", "int4"]),
        (lambda: ejx.quantise(W, "int4", group_size=48), ["group_size", "128, 64, 32", "48"]),
        (lambda: ejx.quantise(W[:, :30], "int4"), ["group_size", "30 inputs", "where"]),
        (lambda: ejx.quantise(W[:, :24], "nvfp4"), ["multiple of 16", "24"]),
        (lambda: ejx.quantise(W.at[1, 1].set(jnp.inf), "int8"), ["weight", "finite", "infinities"]),
        (lambda: ejx.quantise(W[0], "int8"), ["tree", "[..., out, in]", "(32,)"]),
        (lambda: ejx.quantise(eqx.nn.LayerNorm(4), "int8"), ["tree", "received none", "where"]),
        (lambda: ejx.QuantFormat("int4"), ["element", "uint4", "int4"]),
        (lambda: ejx.QuantFormat("int8", scale="float64"), ["scale", "float64"]),
        (lambda: ejx.QuantFormat("int8", (1, -1)), ["block", "(1, -1)"]),
        (lambda: ejx.QuantFormat("int8", zeros=True), ["zeros", "uint4"]),
        (lambda: ejx.QuantizedWeight(W, SCALES, BYTES, None, FORM), ["codes", "uint8", "float32"]),
        (lambda: ejx.QuantizedWeight(CODES, SCALES[:3], BYTES, None, FORM), ["scales", "(4, 1)", "(3, 1)"]),
        (lambda: ejx.QuantizedWeight(CODES, SCALES, None, None, FORM), ["zeros", "an array", "none"]),
        (lambda: ejx.QuantizedWeight(CODES, SCALES, BYTES, W, FORM), ["tensor_scale", "uint32"]),
        (lambda: ejx.QuantizedWeight(CODES[0], SCALES, BYTES, None, FORM), ["codes", "[..., out, in]"]),
        (
            lambda: ejx.QuantizedWeight(CODES, SCALES, BYTES, None, FORM, jnp.int8),
            ["dtype", "floats", "int8"],
        ),
        (lambda: ejx.QuantizedWeight(CODES, SCALES, BYTES, None, NO_FORM), ["format", "QuantFormat", "str"]),
    ],
)
def test_errors(make, words):
    with pytest.raises(ValueError) as error:
        make()
    assert all(word in str(error.value) for word in words), str(error.value)
