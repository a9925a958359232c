"""The selective scan on a mesh: rows and channels stay where they are, on platforms the compiler sees into and on those it does not."""

import dataclasses
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import ejkernel_eqx as ejx
from ejkernel_eqx._kernel import with_plan
from ejkernel_eqx.dispatch import Backend, Implementation, Platform
from ejkernel_eqx.selective_scan import reference, xla
from ejkernel_eqx.selective_scan.spec import FLOATS, PART, parts_of
from tests.recurrence.quick import quick
from tests.recurrence.test_sharding import collectives, mesh_of, place
from tests.tolerances import assert_close

T, I, N = 5, 2 * PART, 2


def _forward(arrays, spec, config, *, save):
    out, state = reference.scan(arrays, spec)
    results = {"out": out.astype(arrays.x.dtype), "final_state": state.astype(spec.state_dtype)}
    return results | ({"states": jnp.zeros((arrays.x.shape[0], 1, N, arrays.x.shape[2]))} if save else {})


def _backward(arrays, spec, config, saved, cotangents):
    """As kernels give them: of each row apart, those of B and C summed from parts of the channels."""
    floats = {name: x for name, x in arrays._asdict().items() if name in FLOATS and x is not None}
    parts = parts_of(arrays.x.shape[-1], arrays.B.shape[-2])
    dout, dfinal = cotangents["out"], cotangents["final_state"]

    def apart(name, x):
        if name in ("B", "C"):
            return jnp.broadcast_to(x[:, None], (len(x), parts, *x.shape[1:]))
        return (
            x if name in ("x", "dt", "z", "initial_state") else jnp.broadcast_to(x, (len(arrays.x), *x.shape))
        )

    def row(given):
        channels = arrays.x.shape[-1] // parts
        total = 0.0
        for b in range(arrays.x.shape[0]):
            for part in range(parts):
                keep = slice(part * channels, (part + 1) * channels)
                cut = {n: x[b, part] if n in ("B", "C") else x[b] for n, x in given.items()}
                cut = {
                    n: x if n in ("B", "C") else x[keep] if x.shape[0] == channels * parts else x[:, keep]
                    for n, x in cut.items()
                }
                out, state = reference.scan(arrays._replace(**cut), spec)
                total += jnp.sum(out * dout[b, :, keep]) + jnp.sum(state * dfinal[b, keep])
        return total

    grads = jax.grad(row)({name: apart(name, x) for name, x in floats.items()})
    return grads | {name: grads[name].sum(1) for name in ("B", "C")}


# A kernel that the compiler may not look into, whose body runs on any machine: the mathematics itself.
OPAQUE = types.SimpleNamespace(
    OPAQUE=True,
    forward=_forward,
    backward=_backward,
    step=lambda arrays, spec, config: reference.step(arrays, spec),
    default_config=xla.default_config,
    unsupported=xla.unsupported,
    config_type=xla.XlaConfig,
)


def opaque() -> Any:
    module = ejx.StateSpaceV1(dt_softplus=True)
    implementation = Implementation(module.operation, Platform.PALLAS, Backend.ANY, 100, "scan", OPAQUE)
    snapshot = dataclasses.replace(module.plan.snapshot, implementations=(implementation,))
    return with_plan(module, dataclasses.replace(module.plan, snapshot=snapshot))


BUILD = {"opaque": opaque, "xla": lambda: ejx.StateSpaceV1(dt_softplus=True, platform="xla")}
SPECS = {
    "x": P("dp", None, "tp"),
    "dt": P("dp", None, "tp"),
    "A": P("tp"),
    "B": P("dp"),
    "C": P("dp"),
    "D": P("tp"),
    "z": P("dp", None, "tp"),
    "dt_bias": P("tp"),
    "initial_state": P("dp", "tp"),
}


def make(tokens: int | None = T) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    rows = (4,) if tokens is None else (4, tokens)
    return dict(
        x=normal(*rows, I),
        dt=normal(*rows, I),
        A=-jnp.abs(normal(I, N)),
        B=normal(*rows, N),
        C=normal(*rows, N),
        D=normal(I),
        z=normal(*rows, I),
        dt_bias=normal(I),
        initial_state=normal(4, I, N),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "build, kind",
    [
        ("opaque", "auto"),
        ("xla", "explicit"),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in (("xla", "auto"), ("opaque", "explicit"))),
    ],
)
def test_a_call_is_split_where_it_stands(build, kind):
    """Forward nothing moves; backward only the sums over rows or channels."""
    module, arrays = BUILD[build](), make()
    run = lambda arrays: module(**arrays)
    loss = lambda arrays: sum(jnp.sum(jnp.sin(x)) for x in run(arrays))
    expected = quick(run)(arrays), quick(jax.grad(loss))(arrays)
    mesh = mesh_of(kind, (2, 2))
    sharded = place(mesh, arrays, SPECS)
    with jax.set_mesh(mesh):
        forward = quick(run).lower(sharded).compile()
        backward = quick(jax.grad(loss)).lower(sharded).compile()
        results, gradients = forward(sharded), backward(sharded)
    assert not collectives(forward)
    assert set(collectives(backward)) <= {"all-reduce"}
    for got, want in zip(results, expected[0], strict=True):
        assert_close(got, want)
    for name, want in expected[1].items():
        assert_close(gradients[name], want, kind="gradient", name=name)


@pytest.mark.few(1)
@pytest.mark.parametrize("build", BUILD)
def test_a_step_is_split_where_it_stands(build):
    module, arrays = BUILD[build](), make(None)
    state = arrays.pop("initial_state")
    run = lambda arrays, state: module.step(state=state, **arrays)
    mesh = mesh_of("auto", (2, 2))
    specs = {n: P(*(s for s in SPECS[n] if s)) if n in ("x", "dt", "z") else SPECS[n] for n in arrays}
    sharded = place(mesh, (arrays, state), (specs, SPECS["initial_state"]))
    with jax.set_mesh(mesh):
        compiled = quick(run).lower(*sharded).compile()
        results = compiled(*sharded)
    assert not collectives(compiled)
    for got, want in zip(results, quick(run)(arrays, state), strict=True):
        assert_close(got, want)
