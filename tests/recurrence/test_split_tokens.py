"""Calls outside of `shard_map` whose tokens a mesh axis splits: on explicit and automatic meshes, beside split rows and heads."""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.attention.dense import normal
from tests.meshes import collectives
from tests.recurrence.test_along import AXIS, CASES, IDS, WHOLE, whole
from tests.tolerances import assert_close

KINDS = ("explicit", "explicit in context", "automatic", "automatic in context")
HEADS = {"q", "k", "v", "g", "gk", "gv", "beta", "x", "dt", "z"}
SIZES = {"data": 2, AXIS: 2, "tensor": 2}


def mesh_of(kind: str, sizes: dict[str, int] = SIZES) -> Any:
    axis_type = AxisType.Explicit if kind.startswith("explicit") else AxisType.Auto
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(axis_type,) * len(sizes))


def spec_of(name: str, x: Any, heads: bool) -> P:
    if name in WHOLE - {"initial_state"} or x.ndim < 2:
        return P()
    if name == "initial_state":
        return P("data")
    return P("data", AXIS, *(("tensor",) if heads and name in HEADS and x.ndim > 2 else ()))


def loss(call: Any, arrays: Any, shared: Any) -> Any:
    results = call(arrays, shared)
    weighted = [jnp.sum(x * normal(30 + i, *x.shape)) for i, x in enumerate(jax.tree.leaves(results))]
    return sum(weighted), results


def compared(name: str, kind: str, ids: Any, heads: bool = True, **options: Any) -> Any:
    build, shared, arrays, _ = CASES[name]
    mesh = mesh_of(kind)
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    placed = {name: put(x, spec_of(name, x, heads)) for name, x in arrays.items()}
    split = {name: put(x, P()) for name, x in shared.items()}
    over = whole(
        functools.partial(build, sequence_axis=AXIS),
        None if ids is None else put(ids, P("data", AXIS)),
        **options,
    )

    def weighted(call: Any, arrays: Any, shared: Any) -> Any:
        results = call(arrays, shared)
        weights = [
            jax.device_put(normal(30 + i, *x.shape), jax.typeof(x).sharding)
            if kind.startswith("explicit")
            else normal(30 + i, *x.shape)
            for i, x in enumerate(jax.tree.leaves(results))
        ]
        return sum(jnp.sum(x * w) for x, w in zip(jax.tree.leaves(results), weights, strict=True)), results

    gradient = lambda f: jax.jit(jax.value_and_grad(f, argnums=(0, 1), has_aux=True))
    one = gradient(functools.partial(loss, whole(build, ids, **options)))(arrays, shared)
    with jax.set_mesh(mesh) if kind.endswith("context") else contextlib.nullcontext():
        compiled = gradient(functools.partial(weighted, over)).lower(placed, split).compile()
    found = compiled(placed, split)
    for expected, x in zip(jax.tree.leaves(one[0][1]), jax.tree.leaves(found[0][1]), strict=True):
        assert_close(x, expected)
    grads = dict(jax.tree_util.tree_leaves_with_path(found[1]))
    for path, expected in jax.tree_util.tree_leaves_with_path(one[1]):
        assert_close(grads[path], expected, kind="gradient", name=str(path))
    return compiled, found, mesh


@pytest.mark.parametrize("packed", [False, True], ids=["whole rows", "segments"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_numbers_of_one_device(name, kind, packed):
    compiled, found, mesh = compared(name, kind, IDS if packed else None)
    print(collectives(compiled))
