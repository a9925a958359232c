"""Opaque functions with arrays that the leading axes share: folded under `vmap`, split over a mesh without a collective."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ejkernel_eqx import parallel
from tests import meshes

AXES = {"x": ("T", "H4"), "scale": ("H4",), "offset": ("H4",), "out": ("T", "H4"), "total": ("H4",)}


def kernel(seen: list[Any], arrays: dict[str, Any], runs: Any) -> dict[str, Any]:
    """`out = x scale + offset` and the sum of each row of the leading axis; `scale` and `offset` perhaps for each."""
    x, scale, offset = arrays["x"], arrays["scale"], arrays["offset"]
    seen.append((x.shape, scale.shape, offset.shape))
    per_row = lambda p: p[:, None] if p.ndim == 2 else p[None, None]
    out = x * per_row(scale) + per_row(offset)
    return {"out": out, "total": out.sum(1)}


def call(seen: list[Any], split: parallel.Split = parallel.Split.NOWHERE) -> Any:
    leading = parallel.Leading(axes=AXES, shared=frozenset({"scale", "offset"}))
    return parallel.opaque(functools.partial(kernel, seen), leading, split=split)


def arrays(*lead: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {"x": (*lead, 3, 4), "scale": (4,), "offset": (4,)}
    return {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}


def test_shared_arrays_stay_as_they_are():
    seen: list[Any] = []
    given = arrays(2, 5)
    result = call(seen)(given)
    assert seen[-1] == ((10, 3, 4), (4,), (4,))
    host = jax.tree.map(np.asarray, given)
    np.testing.assert_allclose(result["out"], host["x"] * host["scale"] + host["offset"], rtol=1e-6)
    assert result["total"].shape == (2, 5, 4)
    mapped = jax.vmap(call(seen), in_axes=({"x": 0, "scale": None, "offset": None},))(given)
    assert seen[-1] == ((10, 3, 4), (4,), (4,))
    np.testing.assert_array_equal(mapped["total"], result["total"])


@pytest.mark.parametrize("lead", [(), (5,)])
def test_a_mapped_one_gets_all_leading_axes(lead):
    seen: list[Any] = []
    given = arrays(2, *lead)
    given["scale"] = jnp.stack([given["scale"], 2 * given["scale"]])
    axes = {"x": 0, "scale": 0, "offset": None}
    result = jax.vmap(call(seen), in_axes=(axes,))(given)
    rows, host = 2 * int(np.prod(lead)), jax.tree.map(np.asarray, given)
    assert seen[-1] == ((rows, 3, 4), (rows, 4), (4,))
    for row in range(2):
        expected = host["x"][row] * host["scale"][row] + host["offset"]
        np.testing.assert_allclose(result["out"][row], expected, rtol=1e-6)
    only = jax.vmap(call(seen), in_axes=({"x": None, "scale": 0, "offset": None},))(
        given | {"x": given["x"][0]}
    )
    np.testing.assert_allclose(only["out"][1], host["x"][0] * host["scale"][1] + host["offset"], rtol=1e-6)


@pytest.mark.parametrize("spec", [P("dp"), P("dp", None, "tp")])
def test_split_without_a_collective(spec):
    """What stands for a kernel of a GPU on an automatic mesh, where interpreted ones are not split."""
    mesh, seen = meshes.mesh_of("automatic", (4, 2)), []
    given, heads = arrays(8), P(*spec[2:])
    sharded = meshes.place(mesh, given, {"x": spec, "scale": heads, "offset": heads})
    compiled = jax.jit(call(seen, split=parallel.Split.EVERYWHERE)).lower(sharded).compile()
    assert not meshes.collectives(compiled)
    assert seen[-1][0] == (2, 3, 2 if heads else 4)
    result = compiled(sharded)
    meshes.agree(result, call(seen)(given))
    assert meshes.lies(result["out"], mesh, spec) and meshes.lies(result["total"], mesh, P("dp", *heads))
