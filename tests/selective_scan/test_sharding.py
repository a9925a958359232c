"""The selective scan on a mesh: rows and channels stay where they are, on platforms the compiler sees into and on those it does not."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import ejkernel_eqx as ejx
from tests.meshes import agree, collectives, HEADS, mesh_of, place, ROWS
from tests.recurrence import test_sharding as recurrences
from tests.recurrence.quick import quick
from tests.selective_scan import test_operation as operations
from tests.selective_scan.cases import FLOATS, PART, reference, SHARED
from tests.selective_scan.test_xla import xla

T, N = 5, operations.N


def _forward(arrays, spec, config, *, save):
    out, state = reference.scan(arrays, spec)
    results = {"out": out.astype(arrays.x.dtype), "final_state": state.astype(spec.state_dtype)}
    return results | ({"states": jnp.zeros((arrays.x.shape[0], 1, N, arrays.x.shape[2]))} if save else {})


def _backward(arrays, spec, config, saved, cotangents):
    """As kernels give them: of what rows share, for each row apart."""
    floats = {name: x for name, x in arrays._asdict().items() if name in FLOATS and x is not None}
    rows = len(arrays.x)
    floats = {n: jnp.broadcast_to(x, (rows, *x.shape)) if n in SHARED else x for n, x in floats.items()}
    _, pull = jax.vjp(jax.vmap(lambda row: reference.scan(arrays._replace(**row), spec)), floats)
    return pull((cotangents["out"], cotangents["final_state"]))[0]


# A kernel that the compiler may not look into, whose body runs on any machine: the mathematics itself.
OPAQUE = dict(
    forward=_forward,
    backward=_backward,
    step=lambda arrays, spec, config: reference.step(arrays, spec),
    default_config=xla.default_config,
    unsupported=xla.unsupported,
    config_type=xla.XlaConfig,
)
BUILD = {
    "opaque": lambda: recurrences.opaque(ejx.StateSpaceV1(dt_softplus=True), OPAQUE),
    "xla": lambda: ejx.StateSpaceV1(dt_softplus=True, platform="xla"),
    "triton": lambda: ejx.StateSpaceV1(dt_softplus=True, platform="triton-interpret"),
}
TOKENS = P(ROWS, None, HEADS)
SPECS = {"x": TOKENS, "dt": TOKENS, "z": TOKENS, "B": P(ROWS), "C": P(ROWS), "initial_state": P(ROWS, HEADS)}
SPECS |= {name: P(HEADS) for name in SHARED}


def make(tokens: int | None = T) -> dict[str, jax.Array]:
    arrays, state = operations.make(4, length=tokens, dtype="float32", I=2 * PART)
    return arrays | {"initial_state": state}


@pytest.mark.parametrize(
    "build, kind",
    [
        ("xla", "explicit"),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (("opaque", "automatic"), ("triton", "explicit"))
        ),
    ],
)
def test_a_call_is_split_where_it_stands(build, kind):
    """Forward nothing moves; backward only the sums over rows or channels."""
    module, arrays = BUILD[build](), make()
    run = lambda arrays: module(**arrays)
    loss = lambda arrays: sum(jnp.sum(jnp.sin(x)) for x in run(arrays))
    mesh = mesh_of(kind)
    sharded = place(mesh, arrays, SPECS)
    with jax.set_mesh(mesh):
        forward = quick(run).lower(sharded).compile()
        backward = quick(jax.grad(loss)).lower(sharded).compile()
        results, gradients = forward(sharded), backward(sharded)
    assert not collectives(forward)
    assert set(collectives(backward)) <= {"all-reduce"}
    agree(results, quick(run)(arrays))
    agree(gradients, quick(jax.grad(loss))(arrays), "gradient")


@pytest.mark.few(1)
@pytest.mark.parametrize("build", ["opaque", "xla"])
def test_a_step_is_split_where_it_stands(build):
    module, arrays = BUILD[build](), make(None)
    state = arrays.pop("initial_state")
    run = lambda arrays, state: module.step(state=state, **arrays)
    mesh = mesh_of("automatic")
    specs = {n: P(*(s for s in SPECS[n] if s)) if n in ("x", "dt", "z") else SPECS[n] for n in arrays}
    sharded = place(mesh, (arrays, state), (specs, SPECS["initial_state"]))
    with jax.set_mesh(mesh):
        compiled = quick(run).lower(*sharded).compile()
        results = compiled(*sharded)
    assert not collectives(compiled)
    agree(results, quick(run)(arrays, state))
