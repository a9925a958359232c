"""Recurrences on a mesh: batch and heads stay where they are, on platforms the compiler sees into and on those it does not."""

import collections
import dataclasses
import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel_eqx._kernel import with_plan
from ejkernel_eqx.dispatch import Backend, Implementation, Platform
from ejkernel_eqx.recurrence import reference, xla
from ejkernel_eqx.recurrence.spec import FLOATS
from tests.recurrence.operations import CASES, PER_TOKEN
from tests.recurrence.quick import quick
from tests.tolerances import assert_close

COLLECTIVE = re.compile(
    r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)
MESHES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
NAMES = ["linear constant", "gated delta softplus", "state space norm"]
T = 5
SLOW = pytest.mark.slow
modes = pytest.mark.parametrize(
    "build, kind",
    [
        ("opaque", "auto"),
        ("xla", "explicit"),
        pytest.param("opaque", "explicit", marks=SLOW),
        pytest.param("xla", "auto", marks=SLOW),
    ],
)


def _forward(arrays, spec, config, *, save):
    assert arrays.q.ndim == 4
    out, state = reference.recur(arrays, spec)
    return {
        "out": out.astype(arrays.v.dtype),
        "final_state": state.astype(spec.state_dtype),
        "squares": arrays.v**2,
    }


def _backward(arrays, spec, config, saved, cotangents):
    assert saved["squares"].shape == arrays.v.shape
    floats = {name: x for name, x in arrays._asdict().items() if name in FLOATS and x is not None}
    _, pull = jax.vjp(lambda given: reference.recur(arrays._replace(**given), spec), floats)
    return pull((cotangents["out"], cotangents["final_state"]))[0]


# A kernel that the compiler may not look into, whose body runs on any machine: the mathematics itself.
OPAQUE = types.SimpleNamespace(
    OPAQUE=True,
    forward=_forward,
    backward=_backward,
    saved_axes=lambda arrays, spec: {"squares": ("T", f"H{arrays.v.shape[-2]}", "V")},
    step=lambda arrays, spec, config: reference.step(arrays, spec),
    default_config=xla.default_config,
    unsupported=xla.unsupported,
    config_type=xla.XlaConfig,
)


def opaque(case) -> Any:
    module = case.module(config=None)
    name = module.operation
    implementation = Implementation(name, Platform.PALLAS, Backend.ANY, 100, "recurrence", OPAQUE)
    snapshot = dataclasses.replace(module.plan.snapshot, implementations=(implementation,))
    return with_plan(module, dataclasses.replace(module.plan, snapshot=snapshot))


BUILD = {
    "opaque": opaque,
    "xla": lambda case: case.module(),
    "pallas": lambda case: case.module(platform="pallas-interpret", config=None),
}


def collectives(compiled) -> collections.Counter:
    return collections.Counter(COLLECTIVE.findall(compiled.as_text() or ""))


def mesh_of(kind: str, shape=(4, 2)) -> Any:
    return jax.make_mesh(shape, ("dp", "tp"), axis_types=(MESHES[kind],) * 2)


def specs_of(arrays, tp: int = 2, tokens: int = 1) -> dict[str, P]:
    """Rows over `dp`, heads over `tp` where they divide; parameters are on every device."""

    def spec(name, x):
        if name not in PER_TOKEN:
            return P()
        return P("dp", *(None,) * tokens, "tp" if x.shape[1 + tokens] % tp == 0 else None)

    return {name: spec(name, x) for name, x in arrays.items()}


def place(mesh, tree, specs) -> Any:
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), tree, specs)


@pytest.mark.few(1)
@modes
@pytest.mark.parametrize("name", NAMES)
def test_a_call_is_split_where_it_stands(name, build, kind):
    case = CASES[name]
    module, arrays, state = (
        BUILD[build](case),
        case.make(4, T, dtype=jnp.float32),
        case.make_state(4, dtype=jnp.float32),
    )
    run = case.run(module)
    loss = lambda arrays, state: sum(jnp.sum(jnp.sin(x)) for x in run(arrays, state))
    expected = quick(run)(arrays, state), quick(jax.grad(loss, (0, 1)))(arrays, state)
    mesh = mesh_of(kind)
    sharded = place(mesh, (arrays, state), (specs_of(arrays), P("dp", "tp")))
    with jax.set_mesh(mesh):
        forward = quick(run).lower(*sharded).compile()
        backward = quick(jax.grad(loss, (0, 1))).lower(*sharded).compile()
        results, gradients = forward(*sharded), backward(*sharded)
    assert "all-to-all" not in collectives(forward) and "collective-permute" not in collectives(forward)
    for got, want in zip(results, expected[0], strict=True):
        assert_close(got, want)
    for got, want in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected[1]), strict=True):
        assert_close(got, want, kind="gradient")


@pytest.mark.slow
def test_kernels_for_tpu_on_an_explicit_mesh():
    test_a_call_is_split_where_it_stands("gated delta softplus", "pallas", "explicit")


@pytest.mark.few(1)
@modes
@pytest.mark.parametrize("name", ["linear scalar", "kernel delta"])
def test_split_by_rows_nothing_moves(name, build, kind):
    """But for the gradients of parameters, which are sums over all rows."""
    case = CASES[name]
    module, arrays, state = (
        BUILD[build](case),
        case.make(4, T, dtype=jnp.float32),
        case.make_state(4, dtype=jnp.float32),
    )
    mesh = mesh_of(kind)
    specs = {n: P("dp") if n in PER_TOKEN else P() for n in arrays}
    sharded = place(mesh, (arrays, state), (specs, P("dp")))
    run = case.run(module, segment_ids=jnp.array([0, 0, -1, 1, 1]))
    moving = {n: x for n, x in sharded[0].items() if n in PER_TOKEN}
    fixed = {n: x for n, x in sharded[0].items() if n not in PER_TOKEN}

    def loss(moving, state):
        return sum(jnp.sum(jnp.sin(x)) for x in run({**moving, **fixed}, state))

    with jax.set_mesh(mesh):
        forward = quick(lambda moving, state: run({**moving, **fixed}, state))
        assert not collectives(forward.lower(moving, sharded[1]).compile())
        assert not collectives(quick(jax.grad(loss, (0, 1))).lower(moving, sharded[1]).compile())


@pytest.mark.few(2)
@pytest.mark.parametrize("build", ["opaque", "xla"])
@pytest.mark.parametrize("name", ["linear normalized", "state space norm"])
def test_steps_are_split_where_they_stand(name, build):
    case = CASES[name]
    module, arrays, state = (
        BUILD[build](case),
        case.make(4, dtype=jnp.float32),
        case.make_state(4, dtype=jnp.float32),
    )
    run = lambda arrays, state: case.call(module.step, arrays, state)
    mesh = mesh_of("explicit", (4, 2))
    states = jax.tree.map(lambda _: P("dp", "tp"), state)
    sharded = place(mesh, (arrays, state), (specs_of(arrays, tokens=0), states))
    with jax.set_mesh(mesh):
        results = quick(run)(*sharded)
    for got, want in zip(jax.tree.leaves(results), jax.tree.leaves(quick(run)(arrays, state)), strict=True):
        assert_close(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=SLOW)])
@pytest.mark.parametrize("build", ["opaque", "xla"])
@pytest.mark.parametrize("name", ["linear constant", "state space norm"])
def test_inside_shard_map(name, build, check_vma):
    case = CASES[name]
    module, arrays, state = (
        BUILD[build](case),
        case.make(4, T, dtype=jnp.float32),
        case.make_state(4, dtype=jnp.float32),
    )
    specs = {n: P("dp") if n in PER_TOKEN else P() for n in arrays}
    mapped: Any = jax.shard_map(
        case.run(module),
        mesh=mesh_of("auto", (4, 2)),
        in_specs=(specs, P("dp")),
        out_specs=(P("dp"), P("dp")),
        check_vma=check_vma,
    )
    loss = lambda run: lambda arrays, state: sum(jnp.sum(jnp.sin(x)) for x in run(arrays, state))
    whole = case.run(module)
    for got, want in zip(quick(mapped)(arrays, state), quick(whole)(arrays, state), strict=True):
        assert_close(got, want)
    gradients = quick(jax.grad(loss(mapped), (0, 1)))(arrays, state)
    wanted = quick(jax.grad(loss(whole), (0, 1)))(arrays, state)
    for got, want in zip(jax.tree.leaves(gradients), jax.tree.leaves(wanted), strict=True):
        assert_close(got, want, kind="gradient")
