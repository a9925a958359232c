"""The cross entropy on every kind of mesh, with rows of tokens and the vocabulary split over devices."""

import jax
import jax.numpy as jnp
import pytest

import ejkernel_eqx as ejx
from tests import meshes
from tests.attention.dense import normal
from tests.losses.cases import XlaConfig
from tests.meshes import HEADS, ROWS

ARRAYS = {"x": normal(0, 4, 6, 8), "weight": normal(1, 16, 8), "bias": normal(2, 16)}
SPECS = {"x": (ROWS,), "weight": (HEADS,), "bias": (HEADS,)}
LABELS = jnp.arange(24).reshape(4, 6) % 18 - 2


@pytest.mark.few(1)
@meshes.everywhere
@pytest.mark.parametrize("reduction, chunk", [("mean", 8), ("none", 64)])
def test_on_a_mesh(reduction, chunk, kind, layout):
    op = ejx.LinearCrossEntropy(reduction, config=XlaConfig(chunk))

    def everything(arrays, labels):
        loss, pull = jax.vjp(lambda arrays: op(labels=labels, **arrays), arrays)
        return loss, pull(jnp.cos(loss))[0]

    expected = jax.jit(everything)(ARRAYS, LABELS)
    mesh = meshes.mesh_of(kind)
    specs = {name: meshes.spec(layout, *axes) for name, axes in SPECS.items()}
    arrays, labels = meshes.place(mesh, (ARRAYS, LABELS), (specs, meshes.spec(layout, ROWS)))
    with meshes.context(kind, mesh):
        loss, gradients = jax.jit(everything)(arrays, labels)
    meshes.agree(loss, expected[0])
    meshes.agree(gradients, expected[1], "gradient")
    for name, x in gradients.items():
        if "automatic" not in kind:
            assert meshes.lies(x, mesh, specs[name]), (name, x.sharding)
