"""The step on XLA and by its Triton kernel, interpreted: against the recurrence of one token in float64, in place, and with slots."""

import dataclasses
import functools
import importlib
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx.parallel import Leading, opaque, Split
from ejkernel_eqx.recurrence.triton.step_kernel import default_tile, step, StepTile
from tests.compiled import executed
from tests.recurrence.cases import (
    KEY,
    letters_of,
    NONE,
    RecurrenceSpec,
    reference,
    SCALAR,
    sizes_of,
    StepArrays,
    VALUE,
)
from tests.recurrence.kernels import report_of, run
from tests.recurrence.operations import xla
from tests.tolerances import assert_close

interpreted = executed(step, functools.partial(run, interpret=True))


@dataclasses.dataclass(frozen=True)
class Case:
    decay: str = NONE
    delta: bool = False
    beta: bool = False
    skip: bool = False
    transposed: bool = False
    rank_one: bool = False
    heads: tuple[int, int, int, int] = (2, 2, 2, 2)  # of q, k, v, g and beta
    slots: int = 0
    lead: int = 1
    rows: int = 3
    dim: int = 12
    values: int = 20
    dtype: str = "float32"
    state: str = "float32"
    tile: tuple[int, int] = (16, 4)

    @property
    def spec(self) -> RecurrenceSpec:
        return RecurrenceSpec(0.3, self.decay, self.delta, transposed=self.transposed)

    @property
    def config(self) -> Any:
        return types.SimpleNamespace(step=StepTile(*self.tile))


def make(case: Case, seed: int = 0) -> StepArrays:
    rng = np.random.default_rng(seed)
    hq, hk, hv, hg = case.heads
    state_heads = max(case.heads[1:])

    def normal(*shape: int, dtype: str = case.dtype) -> Any:
        return jnp.asarray(rng.normal(size=(case.lead, *shape)), dtype)

    gates = {SCALAR: (), KEY: (case.dim,), VALUE: (case.values,)}
    g = None
    if case.decay != NONE:
        g = -jnp.abs(normal(case.rows, hg, *gates[case.decay], dtype="float32"))
    sizes = (case.values, case.dim) if case.transposed else (case.dim, case.values)
    indices = None
    if case.slots:
        rows = [rng.permutation(case.slots)[: case.rows] for _ in range(case.lead)]
        indices = jnp.asarray(np.stack(rows), jnp.int32).at[:, 1].set(-1)
    arrays = StepArrays(
        normal(case.rows, hq, case.dim),
        normal(case.rows, hk, case.dim),
        normal(case.rows, hv, case.values),
        normal(case.slots or case.rows, state_heads, *sizes, dtype=case.state),
        g,
        jax.nn.sigmoid(normal(case.rows, hg, dtype="float32")) if case.beta else None,
        normal(state_heads, case.values, dtype="float32") if case.skip else None,
        indices,
    )
    if case.rank_one:
        arrays = arrays._replace(a=normal(case.rows, hk, case.dim), b=normal(case.rows, hg, case.dim))
    return arrays


def exact(arrays: StepArrays, spec: RecurrenceSpec) -> tuple[np.ndarray, np.ndarray]:
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64) if x.dtype != jnp.int32 else x, arrays)
        out, state = reference.step(jax.tree.map(lambda x: jnp.asarray(x, x.dtype), wide), spec)
        return np.asarray(out), np.asarray(state)


CASES = {
    "plain": Case(),
    "ssd": Case(SCALAR, beta=True, skip=True, transposed=True, heads=(1, 1, 4, 4), dim=16, values=8),
    "gla": Case(KEY, heads=(4, 2, 2, 2), dtype="bfloat16"),
    "kda": Case(KEY, delta=True, beta=True, heads=(2, 2, 4, 4), slots=5),
    "gated delta": Case(SCALAR, delta=True, beta=True, state="bfloat16", lead=2, slots=4, dtype="float16"),
    "dplr": Case(KEY, rank_one=True, heads=(4, 1, 2, 2), slots=5),
    "value decay": Case(VALUE, skip=True, lead=2, rows=1),
    "delta, transposed": Case(NONE, delta=True, beta=True, transposed=True, slots=3, tile=(32, 2)),
    "few of all": Case(SCALAR, heads=(6, 1, 2, 1), dim=1, values=1, rows=1, tile=(8, 1)),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_reference(name, closed):
    case = CASES[name]
    arrays = make(case)
    if closed and arrays.g is not None:
        arrays = arrays._replace(g=jnp.where(arrays.g < -0.5, -jnp.inf, arrays.g))
    expected, expected_state = exact(arrays, case.spec)
    on_xla = jax.jit(lambda arrays: xla.step(arrays, case.spec, xla.XlaConfig(16)))(arrays)
    for out, state in (interpreted(arrays, case.spec, case.config), on_xla):
        assert out.dtype == arrays.v.dtype and state.dtype == arrays.state.dtype
        assert_close(out, expected, case.dtype, name="out")
        assert_close(state, expected_state, case.state, name="state")


@pytest.mark.few(2)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.dtype == "float32"])
def test_gradients_on_xla(name):
    """Of every input, in float32, as those of the reference."""
    case = CASES[name]
    arrays = make(case)
    floats = {n: x for n, x in arrays._asdict().items() if x is not None and n != "indices"}

    @functools.partial(jax.jit, static_argnums=0)
    def gradients(step, floats):
        results, pull = jax.vjp(lambda floats: step(arrays._replace(**floats)), floats)
        return pull(
            jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), results)
        )

    found = gradients(lambda arrays: xla.step(arrays, case.spec, xla.XlaConfig(16)), floats)
    expected = gradients(lambda arrays: reference.step(arrays, case.spec), floats)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_close(a, b, kind="gradient")


def test_a_row_without_a_slot_touches_nothing():
    """Neither the last slot nor any other; what the row and the free slots hold may be NaN."""
    case = dataclasses.replace(CASES["kda"], slots=6)
    arrays = make(case)
    assert arrays.indices is not None
    indices = jnp.asarray([[4, -1, 0]], jnp.int32)
    nan = lambda x, row: x.at[:, row].set(jnp.nan)
    free = [1, 2, 3, 5]
    pool = functools.reduce(nan, free, arrays.state)
    without = {name: nan(getattr(arrays, name), 1) for name in "qkv"}
    arrays = arrays._replace(**without, state=pool, indices=indices)
    out, new = interpreted(arrays, case.spec, case.config)
    assert not np.asarray(out[:, 1]).any()
    assert np.isfinite(np.asarray(out)).all()
    before, after = np.asarray(pool), np.asarray(new)
    np.testing.assert_array_equal(before[:, free].view(np.uint32), after[:, free].view(np.uint32))
    assert np.isfinite(after[:, [0, 4]]).all() and (before[:, [0, 4]] != after[:, [0, 4]]).any()
    outside = arrays._replace(indices=jnp.asarray([[6, 7, -9]], jnp.int32))
    out, new = interpreted(outside, case.spec, case.config)
    assert not np.asarray(out).any()
    np.testing.assert_array_equal(before.view(np.uint32), np.asarray(new).view(np.uint32))


def test_steps_on_a_donated_pool():
    case = CASES["kda"]
    arrays = make(case)

    @functools.partial(jax.jit, donate_argnums=0)
    def one(pool, rest):
        return interpreted(rest._replace(state=pool), case.spec, case.config)

    pool, expected = jnp.array(arrays.state), arrays.state
    for seed in range(3):
        rest = make(case, seed)._replace(indices=arrays.indices)
        out, pool = one(pool, rest._replace(state=jnp.zeros(())))
        wanted, expected = exact(rest._replace(state=expected), case.spec)
        assert_close(out, wanted, case.dtype)
        assert_close(pool, expected, case.state)


@pytest.mark.slow
def test_vmap_folds_into_one_launch(monkeypatch):
    """The pool of each mapped element, and one pool for all of them."""
    module, launches = importlib.import_module("ejkernel_eqx.testing.interpret"), []
    original = module.interpret
    monkeypatch.setattr(module, "interpret", lambda *given: launches.append(given) or original(*given))
    case = dataclasses.replace(CASES["kda"], lead=2)
    arrays = make(case)
    given = {name: x for name, x in arrays._asdict().items() if x is not None}
    axes = letters_of(arrays, case.spec).named(sizes_of(arrays, case.spec))

    def launch(given: dict[str, Any], runs: Any) -> dict[str, Any]:
        out, state = interpreted(StepArrays(**given), case.spec, case.config)
        return {"out": out, "state": state}

    call = opaque(launch, Leading(axes=axes), split=Split.NOWHERE)
    results = jax.vmap(call)(given)
    expected, expected_state = exact(arrays, case.spec)
    assert_close(results["out"], expected)
    assert_close(results["state"], expected_state)
    shared = dict(given, state=given["state"][0])
    results = jax.vmap(call, in_axes=({name: None if name == "state" else 0 for name in given},))(shared)
    assert_close(results["out"][0], expected[0])
    assert len(launches) == 2


FIT = {
    "sm_80": Case(KEY, delta=True, beta=True, dim=128, values=128, slots=9),
    "sm_90": Case(SCALAR, beta=True, skip=True, transposed=True, dim=128, values=64),
    "sm_100": Case(VALUE, dim=64, values=100, state="bfloat16", dtype="bfloat16"),
    "gfx942": Case(SCALAR, delta=True, dim=256, values=256, heads=(4, 2, 2, 2)),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("target", FIT)
def test_fits_everywhere(target):
    case, found = FIT[target], []

    def record(launch: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        found.append(launch)
        return {name: jnp.zeros(out.shape, out.dtype) for name, out in launch.outputs.items()}

    config = types.SimpleNamespace(step=default_tile(case.dim, case.values, jnp.dtype(case.state).itemsize))
    jax.eval_shape(executed(lambda arrays: step(arrays, case.spec, config), record), make(case))
    assert report_of(found[0], target).spills == 0


def test_tiles():
    assert default_tile(128, 128) == StepTile(64, 4) and default_tile(16, 8) == StepTile(8, 4)
    assert default_tile(128, 128, 2) == StepTile(32, 2) and default_tile(2048, 512).block_v == 8
    with pytest.raises(ValueError, match="power of two"):
        StepTile(12, 4)
