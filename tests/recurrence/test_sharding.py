"""Recurrences on a mesh: batch and heads stay where they are, on platforms the compiler sees into and on those it does not."""

import dataclasses
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from ejkernel_eqx._kernel import with_plan
from ejkernel_eqx.dispatch import Backend, Implementation, Platform
from tests.meshes import agree, collectives, HEADS, mesh_of, place, ROWS
from tests.recurrence.cases import floats_of, reference
from tests.recurrence.operations import CASES, PER_TOKEN, xla
from tests.recurrence.quick import quick

T = 5
SLOW = pytest.mark.slow


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
    _, pull = jax.vjp(lambda given: reference.recur(arrays._replace(**given), spec), floats_of(arrays))
    return pull((cotangents["out"], cotangents["final_state"]))[0]


# A kernel that the compiler may not look into, whose body runs on any machine: the mathematics itself.
OPAQUE = dict(
    forward=_forward,
    backward=_backward,
    saved_axes=lambda arrays, spec: {"squares": ("T", f"H{arrays.v.shape[-2]}", "V")},
    step=lambda arrays, spec, config: reference.step(arrays, spec),
    default_config=xla.default_config,
    unsupported=xla.unsupported,
    config_type=xla.XlaConfig,
)


def opaque(module: Any, parts: dict[str, Any] = OPAQUE) -> Any:
    """The module with such a kernel for all that it has."""
    kernel = types.SimpleNamespace(OPAQUE=True, **parts)
    stand_in = Implementation(module.operation, Platform.PALLAS, Backend.ANY, 100, "tests", kernel)
    snapshot = dataclasses.replace(module.plan.snapshot, implementations=(stand_in,))
    return with_plan(module, dataclasses.replace(module.plan, snapshot=snapshot))


BUILD = {
    "opaque": lambda case: opaque(case.module(config=None)),
    "xla": lambda case: case.module(),
    "triton": lambda case: case.module(platform="triton-interpret", config=None),
    "pallas": lambda case: case.module(platform="pallas-interpret", config=None),
}


def specs_of(arrays, heads: bool = True, tokens: int = 1) -> dict[str, P]:
    """Rows are split, and heads where they divide; parameters are on every device."""

    def spec(name, x):
        if name not in PER_TOKEN:
            return P()
        return P(ROWS, *(None,) * tokens, HEADS if heads and x.shape[1 + tokens] % 2 == 0 else None)

    return {name: spec(name, x) for name, x in arrays.items()}


def made(name, build, *tokens):
    case = CASES[name]
    arrays, state = case.make(4, *tokens, dtype=jnp.float32), case.make_state(4, dtype=jnp.float32)
    return case, BUILD[build](case), arrays, state


def loss_of(run):
    return lambda *given: sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(run(*given)))


# One member is split on all meshes by all that computes it, the others on one of either kind.
MEMBER = [
    ("gated delta softplus", build, kind) for build, kind in (("xla", "explicit"), ("opaque", "automatic"))
]
OTHERS = [
    *(
        ("gated delta softplus", *of)
        for of in (("xla", "automatic"), ("pallas", "explicit"), ("triton", "explicit"))
    ),
    *(("linear constant", *of) for of in (("triton", "explicit"), ("opaque", "automatic"))),
    *(("state space norm", *of) for of in (("triton", "explicit"), ("opaque", "automatic"))),
    *(("kernel delta", *of) for of in (("triton", "explicit"), ("opaque", "automatic"))),
    *(("dplr", *of) for of in (("xla", "explicit"), ("triton", "explicit"), ("opaque", "automatic"))),
    *(("gated linear bonus", build, "explicit") for build in ("xla", "triton")),
    *(("delta product gated", *of) for of in (("triton", "explicit"), ("opaque", "automatic"))),
    *(("trapezoid", *of) for of in (("xla", "explicit"), ("triton", "explicit"))),
    ("trapezoid ranks", "opaque", "automatic"),
]


@pytest.mark.parametrize("name, build, kind", [*MEMBER, *(pytest.param(*row, marks=SLOW) for row in OTHERS)])
def test_a_call_is_split_where_it_stands(name, build, kind):
    """Forward nothing moves, but what the norm of all heads needs; backward only sums over rows, or over heads that share."""
    case, module, arrays, state = made(name, build, T)
    run = case.run(module, segment_ids=jnp.array([0, 0, -1, 1, 1]))
    gradient = jax.grad(loss_of(run), (0, 1))
    mesh = mesh_of(kind)
    states = jax.tree.map(lambda _: P(ROWS, HEADS), state)
    sharded = place(mesh, (arrays, state), (specs_of(arrays), states))
    with jax.set_mesh(mesh):
        forward, backward = (quick(f).lower(*sharded).compile() for f in (run, gradient))
        results, gradients = forward(*sharded), backward(*sharded)
    assert not set(collectives(forward)) & {"all-to-all", "collective-permute"}
    assert "norm" in name or not collectives(forward)
    agree(results, quick(run)(arrays, state))
    agree(gradients, quick(gradient)(arrays, state), "gradient")


@pytest.mark.parametrize(
    "name, build, kind",
    [("kernel delta", "opaque", "automatic"), pytest.param("linear scalar", "xla", "explicit", marks=SLOW)],
)
def test_split_by_rows_nothing_moves(name, build, kind):
    """But for the gradients of parameters, which are sums over all rows."""
    case, module, arrays, state = made(name, build, T)
    mesh = mesh_of(kind, (4, 2))
    arrays, state = place(mesh, (arrays, state), (specs_of(arrays, heads=False), P(ROWS)))
    run = case.run(module, segment_ids=jnp.array([0, 0, -1, 1, 1]))
    fixed = {n: x for n, x in arrays.items() if n not in PER_TOKEN}
    moving = {n: x for n, x in arrays.items() if n in PER_TOKEN}
    call = lambda moving, state: run({**moving, **fixed}, state)
    with jax.set_mesh(mesh):
        for function in (call, jax.grad(loss_of(call), (0, 1))):
            assert not collectives(quick(function).lower(moving, state).compile())


@pytest.mark.few(1)
@pytest.mark.parametrize("build", ["triton", "xla"])
@pytest.mark.parametrize("name", ["linear normalized", "state space norm"])
def test_steps_are_split_where_they_stand(name, build):
    case, module, arrays, state = made(name, build)
    run = lambda arrays, state: case.call(module.step, arrays, state)
    mesh = mesh_of("explicit", (4, 2))
    states = jax.tree.map(lambda _: P(ROWS, HEADS), state)
    sharded = place(mesh, (arrays, state), (specs_of(arrays, tokens=0), states))
    with jax.set_mesh(mesh):
        results = quick(run)(*sharded)
    agree(results, quick(run)(arrays, state))


@pytest.mark.slow
@pytest.mark.parametrize("build, check_vma", [("opaque", True), ("opaque", False), ("pallas", True)])
def test_inside_shard_map(build, check_vma):
    case, module, arrays, state = made("state space norm", build, T)
    specs = {n: P(ROWS) if n in PER_TOKEN else P() for n in arrays}
    whole = case.run(module)
    mapped: Any = jax.shard_map(
        whole,
        mesh=mesh_of("automatic", (4, 2)),
        in_specs=(specs, P(ROWS)),
        out_specs=(P(ROWS), P(ROWS)),
        check_vma=check_vma,
    )
    agree(quick(mapped)(arrays, state), quick(whole)(arrays, state))
    found, wanted = (quick(jax.grad(loss_of(run), (0, 1)))(arrays, state) for run in (mapped, whole))
    agree(found, wanted, "gradient")
