"""Opaque functions with arrays that the leading axes share: folded under `vmap`, split over a mesh without a collective."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel_eqx.parallel import Leading, opaque, Split

AXES = {"x": ("T", "H4"), "scale": ("H4",), "offset": ("H4",), "out": ("T", "H4"), "total": ("H4",)}


def kernel(seen: list[Any], arrays: dict[str, Any], runs: Any) -> dict[str, Any]:
    """`out = x scale + offset` and the sum of each row of the leading axis; `scale` and `offset` perhaps for each."""
    x, scale, offset = arrays["x"], arrays["scale"], arrays["offset"]
    seen.append((x.shape, scale.shape, offset.shape))
    per_row = lambda p: p[:, None] if p.ndim == 2 else p[None, None]
    out = x * per_row(scale) + per_row(offset)
    return {"out": out, "total": out.sum(1)}


def call(seen: list[Any], split: Split = Split.NOWHERE) -> Any:
    leading = Leading(axes=AXES, shared=frozenset({"scale", "offset"}))
    return opaque(functools.partial(kernel, seen), leading, split=split)


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


@pytest.mark.parametrize("spec", [P("dp", None, None), P("dp", None, "tp"), P(None, None, "tp")])
def test_split_without_a_collective(spec):
    mesh = jax.make_mesh((4, 2), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    seen: list[Any] = []
    given = arrays(8)
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    heads = P(spec[-1])
    sharded = {
        "x": put(given["x"], spec),
        "scale": put(given["scale"], heads),
        "offset": put(given["offset"], heads),
    }
    compiled = jax.jit(call(seen, split=Split.EVERYWHERE)).lower(sharded).compile()
    assert not re.search(r"all-gather|all-reduce|collective-permute|all-to-all", compiled.as_text() or "")
    assert seen[-1][0] == (8 // (4 if spec[0] else 1), 3, 4 // (2 if spec[-1] else 1))
    result, expected = compiled(sharded), call(seen)(given)
    for name in expected:
        np.testing.assert_allclose(result[name], expected[name], rtol=1e-5, atol=1e-6)
