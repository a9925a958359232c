"""Gradients of 16-bit arrays that many tokens share, and of tokens that are copied, are summed in float32: where the summands are alike, a sum in
bfloat16 ends at 256 of them."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx import nn
from ejkernel_eqx.models import vocabulary
from tests import meshes
from tests.meshes import HEADS, ROWS
from tests.tolerances import assert_close

BF16 = jnp.bfloat16


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 256), ("float16", 2048)])
def test_a_frequent_token(dtype, most):
    """Of 6,000 equal tokens and a rare one, in reverse mode, under `vmap` and with `cast` inside of the loss."""
    table, tokens = jnp.zeros((5, 2), dtype), jnp.full(6000, 3).at[7].set(1)
    loss = lambda table: vocabulary.embed(table, tokens).astype(jnp.float32).sum()
    expected = np.zeros((5, 2))
    expected[1], expected[3] = 1, 5999
    gradient = jax.grad(loss)(table)
    assert gradient.dtype == dtype and most < 5999
    assert_close(gradient, expected, kind="gradient")
    assert_close(jax.vmap(jax.grad(loss))(table[None])[0], expected, kind="gradient")
    cast = jax.grad(lambda table: loss(table.astype(dtype)))(table.astype(jnp.float32))
    assert_close(cast, expected, dtype, kind="gradient")


@pytest.mark.slow
def test_directions_of_a_table():
    """Forward mode gives the rows of the tangent, and the second derivative is that of indexing."""
    random = np.random.default_rng(0)
    table, tangent = (jnp.asarray(random.standard_normal((5, 2)), BF16) for _ in range(2))
    tokens = jnp.asarray([[3, 3, 0], [1, 3, 4]])
    rows, moved = jax.jvp(lambda table: vocabulary.embed(table, tokens), (table,), (tangent,))
    np.testing.assert_array_equal(rows, table[tokens])
    np.testing.assert_array_equal(moved, tangent[tokens])
    cube = lambda embed: lambda table: jnp.sum(embed(table.astype(jnp.float32)) ** 3)
    hessian = jax.hessian(cube(lambda table: vocabulary.embed(table, tokens)))(table)
    assert_close(hessian, jax.hessian(cube(lambda table: table[tokens]))(table))


@pytest.mark.parametrize("split", ["rows", "features"])
def test_a_frequent_token_on_a_mesh(split):
    mesh = meshes.mesh_of("explicit without context")
    spec = {"rows": (HEADS, None), "features": (None, HEADS)}[split]
    table = jax.device_put(jnp.zeros((4, 2), BF16), jax.NamedSharding(mesh, jax.P(*spec)))
    tokens = jax.device_put(jnp.full((4, 1500), 3), jax.NamedSharding(mesh, jax.P(ROWS)))
    loss = lambda table, tokens: vocabulary.embed(table, tokens).astype(jnp.float32).sum()
    gradient = jax.jit(jax.grad(loss))(table, tokens)
    expected = np.zeros((4, 2))
    expected[3] = 6000
    assert_close(gradient, expected, kind="gradient")
    assert meshes.lies(gradient, mesh, jax.P(*spec))


@pytest.mark.slow
def test_frequent_tokens_of_a_decoder():
    """A model in bfloat16 learns a frequent word as the same model in float32 does, with the same weights."""
    layer = ejx.models.LayerConfig("attention", {"num_heads": 1}, ejx.models.MLPConfig(8))
    model = ejx.models.Decoder(ejx.models.DecoderConfig(6, 8, (layer,)), dtype=BF16, key=jax.random.key(0))
    tokens = jnp.full((4, 300), 2)

    def gradient(model):
        arrays, static = eqx.partition(model, eqx.is_inexact_array)
        # Only the way through the table: the logits of features that differ in the row alone.
        features = lambda arrays: eqx.combine(arrays, static).features(tokens)[..., 0]
        loss = lambda arrays: jnp.mean(features(arrays).astype(jnp.float32))
        return jax.grad(loss)(arrays).embedding

    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if eqx.is_inexact_array(x) else x, model)
    assert_close(gradient(model), gradient(wide), "bfloat16", kind="gradient")


def _gradients(layer, x):
    """Of the sum of a layer's results, in its weights and tokens."""
    arrays, static = eqx.partition(layer, eqx.is_inexact_array)
    wide = x.dtype if x.dtype == jnp.float64 else jnp.float32
    loss = lambda arrays, x: jnp.sum(eqx.combine(arrays, static)(x), dtype=wide)
    return jax.jit(jax.grad(loss, argnums=(0, 1)))(arrays, x)


def test_places_and_biases_of_compressed_blocks():
    layer = nn.BlockCompression(1, 4, size=4, stride=1, hidden_dim=4, dtype=BF16, key=jax.random.key(0))
    # Nothing is near the bend of its activation.
    layer = jax.tree.map(lambda x: abs(x) if eqx.is_array(x) else x, layer)
    x = jnp.asarray(1 + np.random.default_rng(0).standard_normal((1500, 1, 4)) / 8, BF16)
    found = _gradients(layer, x)
    with jax.enable_x64(True):
        wide = lambda tree: jax.tree.map(lambda x: x.astype("float64") if eqx.is_array(x) else x, tree)
        expected = _gradients(wide(layer), wide(x))
    for name in ("positions", "bias", "out_bias"):
        ours, theirs = (getattr(gradients[0], name) for gradients in (found, expected))
        assert_close(ours, theirs, "bfloat16", kind="gradient", name=name)
    assert_close(found[1], expected[1], "bfloat16", kind="gradient")


KEY = jax.random.key(0)
SPARSE: Any = {"block_size": 2, "num_blocks": 2, "sliding_window": 2, "compression_size": 4}
SPARSE |= {"compression_stride": 2, "num_heads": 2, "dtype": BF16, "key": KEY}
EXPERTS: Any = {"num_experts": 4, "top_k": 3, "use_bias": True, "shared_dim": 4, "shared_gate": True}
LAYERS = {
    "experts": lambda: nn.MixtureOfExperts(8, 4, **EXPERTS, dtype=BF16, key=KEY),
    "sparse attention": lambda: nn.NativeSparseAttention(8, **SPARSE),
}


def _sums(jaxpr):
    """The dtypes that sums of several numbers are taken in."""
    for equation in jaxpr.eqns:
        name, inputs, params = equation.primitive.name, equation.invars, equation.params
        if name == "reduce_sum" and math.prod(inputs[0].aval.shape[axis] for axis in params["axes"]) > 1:
            yield str(inputs[0].aval.dtype)
        if name == "scatter-add" and not params["unique_indices"]:
            yield str(inputs[0].aval.dtype)
        for inner in jax.tree.leaves(list(params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner := getattr(inner, "jaxpr", inner), "eqns"):
                yield from _sums(inner)


@pytest.mark.parametrize("name", LAYERS)
def test_no_sum_in_16_bits(name):
    """XLA for CPUs adds wider than it is told to; other compilers may not."""
    program = jax.make_jaxpr(_gradients)(LAYERS[name](), jnp.ones((2, 8, 8), BF16))
    assert {"float32"} <= set(_sums(program.jaxpr)) <= {"float32", "int32"}
