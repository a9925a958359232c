"""Calls outside of `shard_map` whose tokens a mesh axis splits: on explicit and automatic meshes, beside split rows and heads."""

import contextlib
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel_eqx as ejx
from tests.attention.dense import normal
from tests.meshes import lies
from tests.recurrence import test_along as along
from tests.recurrence.test_along import AXIS, CASES, IDS, T, WHOLE, whole
from tests.tolerances import assert_close

KINDS = ("explicit", "explicit in context", "automatic", "automatic in context")
HEADS = {"q", "k", "v", "g", "gk", "gv", "beta", "x", "dt", "z", "trap"}
SIZES = {"data": 2, AXIS: 2, "tensor": 2}


def mesh_of(kind: str, sizes: dict[str, int] = SIZES) -> Any:
    axis_type = AxisType.Explicit if kind.startswith("explicit") else AxisType.Auto
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(axis_type,) * len(sizes))


def spec_of(name: str, x: Any, heads: bool) -> P:
    if name == "initial_state":
        return P("data")
    if name in WHOLE or x.ndim < 2:
        return P()
    return P("data", AXIS, *(("tensor",) if heads and name in HEADS and x.ndim > 2 else ()))


def put(mesh: Any, arrays: Any, heads: bool = True) -> Any:
    place = lambda name, x: jax.device_put(x, NamedSharding(mesh, spec_of(name, x, heads)))
    return {name: place(name, x) for name, x in arrays.items()}


def compared(name: str, kind: str, ids: Any, heads: bool = True, **options: Any) -> None:
    build, shared, arrays, _ = CASES[name]
    mesh = mesh_of(kind)
    over = functools.partial(build, sequence_axis=AXIS)
    given = None if ids is None else jax.device_put(ids, NamedSharding(mesh, P("data", AXIS)))
    on_all = {name: jax.device_put(x, NamedSharding(mesh, P())) for name, x in shared.items()}
    with jax.set_mesh(mesh) if kind.endswith("context") else contextlib.nullcontext():
        found = along.results_and_gradients(whole(over, given, **options))(put(mesh, arrays, heads), on_all)
    along.assert_same(found, along.results_and_gradients(whole(build, ids, **options))(arrays, shared))


# Every member on one kind of mesh, every second with segments; one on all kinds.
PAIRS = [(name, KINDS[n % 4], n % 2 == 1) for n, name in enumerate(CASES)]
PAIRS += [("gla", kind, True) for kind in KINDS if kind != "explicit in context"]


@pytest.mark.parametrize(
    "name, kind, packed",
    [pytest.param(*pair, marks=() if pair[0] == "lightning" else pytest.mark.slow) for pair in PAIRS],
)
def test_numbers_of_one_device(name, kind, packed):
    compared(name, kind, IDS if packed else None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gla", "mamba"])
def test_interpreted_kernels(name):
    """On explicit meshes; elsewhere their callbacks are run on all tokens."""
    pytest.importorskip("triton")
    for kind in ("explicit", "automatic"):
        compared(name, kind, IDS, heads=False, platform="triton-interpret")


def gathered(name: str, kind: str) -> list[int]:
    """The sizes of what all devices gather of a long row, rows and heads being split, too; and the size of what one has of an operand."""
    length, mesh, heads = 4096, mesh_of(kind), name != "ssd"  # the norm of `ssd` reads all heads of a token
    build, shared, arrays, _ = CASES[name]

    def shape(key: str, x: Any) -> Any:
        sizes = (*x.shape[:1], length, *x.shape[2:]) if x.ndim > 1 and x.shape[1] == T else x.shape
        return jax.ShapeDtypeStruct(sizes, x.dtype, sharding=NamedSharding(mesh, spec_of(key, x, heads)))

    arrays = {key: shape(key, x) for key, x in arrays.items()}
    on_all = NamedSharding(mesh, P())
    shared = {key: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_all) for key, x in shared.items()}
    loss = lambda arrays, shared: jnp.sum(build(sequence_axis=AXIS)(**arrays, **shared)[0] ** 2)
    text = jax.jit(jax.grad(loss)).lower(arrays, shared).compile().as_text() or ""
    assert not re.search(r"(all-to-all|collective-permute)(-start)?\(", text)
    return along.sizes_in(re.findall(r"= (.*?) all-gather(?:-start)?\(", text))


GATHERED = [
    ("gated delta", "automatic"),
    ("ssd", "explicit"),
    ("mamba", "explicit"),
    ("convolution", "automatic"),
]


@pytest.mark.parametrize(
    "name, kind",
    [("gated delta", "explicit"), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in GATHERED)],
)
def test_only_states_are_gathered(name, kind):
    """Nothing as long as the tokens of a single channel, forward and backward."""
    sizes = gathered(name, kind)
    assert sizes and max(sizes) < 2048, sizes


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, kind", [("gla", "automatic"), ("ssd", "explicit"), ("convolution", "automatic")]
)
def test_under_vmap(name, kind):
    build, shared, arrays, _ = CASES[name]
    arrays = {key: x for key, x in arrays.items() if key != "initial_state"}
    mesh = mesh_of(kind)

    def rows(operation: Any) -> Any:
        axes = {key: None if key in WHOLE else 0 for key in arrays}
        call = lambda arrays: operation(**arrays, **shared)[0]
        return jax.jit(jax.value_and_grad(lambda arrays: jnp.sum(jnp.sin(jax.vmap(call, (axes,))(arrays)))))

    expected = rows(build())(arrays)
    place = lambda key, x: jax.device_put(x, NamedSharding(mesh, P() if key in WHOLE else P(None, AXIS)))
    found = rows(build(sequence_axis=AXIS))({key: place(key, x) for key, x in arrays.items()})
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_close(x, y, kind="gradient")


@pytest.mark.parametrize("kind", ["explicit", pytest.param("automatic", marks=pytest.mark.slow)])
def test_meshes_that_cannot_split_the_tokens(kind):
    """Without the axis, or with one that does not divide them."""
    arrays = {key: x for key, x in CASES["gla"][2].items() if key != "initial_state"}
    expected = ejx.GatedLinearAttention()(**arrays)[0]
    operation = ejx.GatedLinearAttention(sequence_axis=AXIS)
    for sizes in ({"data": 2}, {"data": 1, AXIS: 7}):
        mesh = mesh_of(kind, sizes)
        placed = {key: jax.device_put(x, NamedSharding(mesh, P("data"))) for key, x in arrays.items()}
        assert_close(jax.jit(lambda a: operation(**a)[0])(placed), expected)


def test_forward_mode():
    """On an automatic mesh it is an error with a remedy, on an explicit one it is there."""
    x, weight = normal(5, 2, T, 6), normal(18, 6, 5)
    operation = ejx.CausalConv1d(sequence_axis=AXIS, platform="xla")
    call = jax.jit(lambda x: jax.jvp(lambda x: operation(x, weight)[0], (x,), (x,)))
    placed = {
        kind: jax.device_put(x, NamedSharding(mesh_of(kind), P(None, AXIS)))
        for kind in ("explicit", "automatic")
    }
    with pytest.raises(ejx.UnsupportedError, match="Use an explicit mesh"):
        call(placed["automatic"])
    out, tangent = call(placed["explicit"])
    assert_close(tangent, out)  # linear


def test_layouts_of_results():
    """On an explicit mesh the types say them; final states are whole."""
    mesh = mesh_of("explicit")
    placed = put(mesh, CASES["gla"][2])
    out, state = jax.jit(lambda a: ejx.GatedLinearAttention(sequence_axis=AXIS)(**a))(placed)
    assert lies(out, mesh, P("data", AXIS, "tensor")) and lies(state, mesh, P("data", "tensor"))
