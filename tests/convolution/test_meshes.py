"""Meshes that split the channels of a convolution, and heads that it normalises."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import ejkernel_eqx as ejx
from tests import meshes
from tests.arrays import normal
from tests.meshes import HEADS, ROWS

TOKENS = P(ROWS, None, HEADS)
SPECS = {"x": TOKENS, "weight": P(HEADS, None), "bias": P(HEADS), "initial_state": TOKENS}
SIZES = {"x": (2, 9, 32), "weight": (32, 3), "bias": (32,), "initial_state": (2, 2, 32)}
INPUTS = {name: normal(n, size) for n, (name, size) in enumerate(SIZES.items())}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "kind, size", [("explicit", 32), ("explicit without context", 16), ("explicit", 8), ("automatic", 8)]
)
def test_normalised_heads(kind, size):
    """Of which a mesh has fewer than devices, as many, or more: results and gradients, split as without a norm."""
    op: Any = ejx.CausalConv1d("silu", norm_size=size, platform="xla")

    call = lambda inputs: op(**inputs)
    step = lambda inputs: op.step(
        inputs["x"][:, 0], *(inputs[n] for n in ("weight", "bias", "initial_state"))
    )

    def loss(inputs):
        out, final = call(inputs)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(final))

    mesh = meshes.mesh_of(kind, (1, 4) if size > 8 else (2, 2))
    for function in (call, step, jax.grad(loss)):
        with meshes.context(kind, mesh):
            found = jax.jit(function)(meshes.place(mesh, INPUTS, SPECS))
        meshes.agree(found, jax.jit(function)(INPUTS), "gradient")
        if kind != "automatic" and function is call:
            assert all(meshes.lies(x, mesh, TOKENS) for x in found)
        elif kind != "automatic" and function is not step:
            assert all(meshes.lies(found[name], mesh, SPECS[name]) for name in found)


@pytest.mark.parametrize("size", [None, 8, 32])
def test_a_mesh_that_splits_the_weights_alone(size):
    """Results are split as these are, with whole heads and with parts of one on a device."""
    op: Any = ejx.CausalConv1d("silu", norm_size=size, platform="xla")
    specs = SPECS | {"x": P(ROWS, None, None), "initial_state": P(ROWS, None, None)}
    mesh = meshes.mesh_of("explicit", (1, 4))
    with meshes.context("explicit", mesh):
        found = jax.jit(lambda inputs: op(**inputs))(meshes.place(mesh, INPUTS, specs))
    meshes.agree(found, op(**INPUTS))
    assert all(meshes.lies(x, mesh, TOKENS) for x in found)
