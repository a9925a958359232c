"""The linear-time family's kernels for TPU without one: interpreted against the reference, lowered, and compiled."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import ejkernel_eqx as ejx
from ejkernel_eqx.dispatch import kernel_registry, Platform, Problem
from ejkernel_eqx.recurrence.example import example_problem
from ejkernel_eqx.recurrence.pallas import compiled
from ejkernel_eqx.recurrence.pallas.interpreted import platform
from ejkernel_eqx.recurrence.pallas.tile_sizes import heads_of_step, PallasConfig, vmem
from ejkernel_eqx.recurrence.samples import make_inputs, spec_of
from tests import tpus
from tests.attention.dense import quick
from tests.recurrence import operations
from tests.recurrence.cases import (
    assert_agrees,
    Case,
    CASES,
    CLOSED,
    cotangents,
    EMPTY,
    floats_of,
    make,
    Result,
    run_reference,
    scale_of_constant,
)
from tests.tolerances import assert_close

pytestmark = pytest.mark.usefixtures("no_races")

PACKED: dict[str, Any] = dict(T=67, B=2, Hq=1, Hk=1, Hv=4, Hg=2, Hb=4, beta=1.0, initial_state=True)
OWN = (
    Case(
        name="queries of few states",
        Hq=6,
        Hk=2,
        Hv=2,
        Hg=1,
        decay="scalar",
        T=33,
        skip=False,
        dtype="bfloat16",
    ),
    Case(name="ssd in segments", decay="scalar", skip=True, packing="segments", **PACKED),
    Case(name="gated delta in sequences", decay="scalar", delta=True, packing="offsets", **PACKED),
    Case(name="kda in segments", decay="key", delta=True, packing="segments", dtype="bfloat16", **PACKED),
    Case(name="gla in many sequences", decay="key", packing="many", state_dtype="bfloat16", **PACKED),
)
WANTED = "linear lightning delta gla-mixed kda-correlated scalar-strong lightning-closed kda-closed no-tokens-packed".split()
NAMED = {case.name: case for case in (*CASES, *CLOSED, *EMPTY)}
INTERPRETED = {case.name: case for case in (*OWN, *(NAMED[name] for name in WANTED))}


def check(case: Case, config: PallasConfig) -> None:
    arrays, spec = make(case)
    dout, dstate = cotangents(case)

    def both(arrays: Any, dout: Any, dstate: Any) -> Any:
        found = platform.forward(arrays, spec, config)
        saved = {"states": found["states"]}
        return found, platform.backward(arrays, spec, config, saved, {"out": dout, "final_state": dstate})

    found, grads = quick(both)(arrays, dout, dstate)
    grads = {name: grads[name].astype(x.dtype) for name, x in floats_of(arrays).items()}
    scales = {"g": scale_of_constant(arrays, dout, dstate, spec)} if case.decay == "constant" else None
    exact = run_reference(arrays, dout, dstate, spec)
    assert_agrees(case, Result(found["out"], found["final_state"], grads), exact, scales)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", INTERPRETED)
def test_agrees_with_the_reference(name):
    check(INTERPRETED[name], PallasConfig(16, 2, 2))


@pytest.mark.slow
def test_a_long_chunk_of_one_head():
    check(NAMED["gated-delta-correlated"], PallasConfig(64, 1, 1))


@pytest.mark.slow
def test_the_operation():
    """Gradients of a mapped call, with the state of each example."""
    op = {name: ejx.GatedDeltaRule(platform=name) for name in ("pallas-interpret", "xla")}
    keys = iter(jax.random.split(jax.random.key(0), 8))
    normal = lambda *shape: jax.random.normal(next(keys), shape)
    given = (
        normal(2, 20, 2, 16),
        normal(2, 20, 2, 16),
        normal(2, 20, 4, 8),
        -jnp.abs(normal(2, 20, 4)),
        normal(2, 20, 4),
    )
    state = normal(2, 4, 16, 8)

    def loss(name: str) -> Any:
        def call(given: Any, state: Any) -> Any:
            q, k, v, g, beta = given
            out, final = op[name](q, k / 4, v, g, beta, initial_state=state)
            return (out**2).sum() + (final**2).sum()

        return quick(jax.vmap(jax.grad(call, (0, 1))))(given, state)

    for x, y in zip(*map(jax.tree.leaves, (loss("pallas-interpret"), loss("xla"))), strict=True):
        assert_close(x, y, "float32", "gradient")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["explicit", "shard_map"])
def test_over_devices(kind):
    """Batch and heads are split; each device interprets its own."""
    sizes = {"q": (2, 12, 2, 16), "k": (2, 12, 2, 16), "v": (2, 12, 2, 8), "g": (2, 12, 2, 16)}
    given = {name: jax.random.normal(jax.random.key(n), size) for n, (name, size) in enumerate(sizes.items())}
    given["g"] = -jnp.abs(given["g"])
    of = lambda platform: lambda q, k, v, g: ejx.GatedLinearAttention(platform=platform)(q, k, v, g)[0]
    loss = lambda call: lambda given: (call(**given) ** 2).sum()
    wanted = jax.jit(jax.value_and_grad(loss(of("xla"))))(given)
    mesh = jax.make_mesh(
        (2, 2), ("dp", "tp"), axis_types=(AxisType.Explicit if kind == "explicit" else AxisType.Auto,) * 2
    )
    spec, call = P("dp", None, "tp"), of("pallas-interpret")
    if kind == "shard_map":
        split = jax.shard_map(call, mesh=mesh, in_specs=(spec,) * 4, out_specs=spec)
        call = lambda q, k, v, g: split(q, k, v, g)
    placed = {name: jax.device_put(x, jax.NamedSharding(mesh, spec)) for name, x in given.items()}
    found = jax.jit(jax.value_and_grad(loss(call)))(placed)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert_close(np.asarray(x), np.asarray(y), "float32", "gradient")


LONG = dict(B=4, T=4096, H=16, D=128)
PROBLEMS = {
    "plain": ("linear_attention", LONG, {}),
    "scalar": ("linear_attention", LONG, dict(decay="scalar", initial_state=True)),
    "ssd": ("state_space_v2", dict(B=4, T=4096, H=64, D=128, V=64), dict(packed="segments")),
    "gla": ("gated_linear_attention", dict(T=1000, H=4, D=96, V=200), dict(packed="offsets")),
    "gated delta": ("gated_delta_rule", LONG | dict(Hq=4, Hk=4), {}),
    "kda": ("kernel_delta_attention", LONG | dict(D=64), dict(packed="segments", initial_state=True)),
}


def problem_of(name: str, dtype: str = "bfloat16") -> Problem:
    operation, dims, flags = PROBLEMS[name]
    return example_problem(operation, dims, dtype, flags)


def both(problem: Problem, config: PallasConfig) -> tuple[Any, ...]:
    """Forward and backward in one program, and its arrays."""
    spec = spec_of(problem)

    def call(arrays: Any, dout: Any, dstate: Any, **execute: Any) -> Any:
        found = compiled.forward(arrays, spec, config, **execute)
        saved = {"states": found["states"]}
        return found, compiled.backward(
            arrays, spec, config, saved, {"out": dout, "final_state": dstate}, **execute
        )

    arrays = jax.eval_shape(lambda: make_inputs(problem, 0).arrays)
    found = jax.eval_shape(lambda arrays: compiled.forward(arrays, spec, config), arrays)
    return call, arrays, found["out"], found["final_state"]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", PROBLEMS)
def test_defaults_and_candidates(name):
    """They fit every generation, lower, and take no more vector memory than they say."""
    problem = problem_of(name)
    lowered = set()
    for device in tpus.FACTS.values():
        assert compiled.unsupported(problem, device) is None
        configs = compiled.candidates(problem, device)
        assert (
            configs[0] == compiled.default_config(problem, device) and len(set(configs)) == len(configs) > 1
        )
        assert all(compiled.config_unsupported(config, problem, device) is None for config in configs)
        lowered |= {configs[0], min(configs, key=lambda config: (config.chunk_size, config.forward_heads))}
    for config in lowered:
        call, *arrays = both(problem, config)
        tpus.lower(call, *arrays)
        for label, (launch, given) in tpus.launches_of(call, *arrays).items():
            taken = launch.vmem([x.dtype for x in given[launch.scalars :]])
            estimate = vmem(label.rpartition(".")[2], config, problem)
            assert taken < 1.05 * estimate, (label, config, taken, estimate)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROBLEMS)
def test_every_other_candidate_lowers(name):
    problem = problem_of(name)
    for config in set(compiled.candidates(problem, tpus.FACTS["v5e"])):
        call, *arrays = both(problem, config)
        tpus.lower(call, *arrays)


SHORT = dict(B=1, T=256, H=4)
"""For programs that are compiled: their kernels are those of long rows."""


def compiled_for(generation: str, name: str, dtype: str = "bfloat16") -> None:
    operation, dims, flags = PROBLEMS[name]
    problem = example_problem(operation, dims | SHORT, dtype, flags)
    call, *arrays = both(problem, compiled.default_config(problem, tpus.FACTS[generation]))
    tpus.compile_ahead(generation, call, *arrays)


@pytest.mark.parametrize(
    "name",
    [
        "state space norm",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("gated delta softplus", "kernel delta bounded")
        ),
    ],
)
def test_gradients_through_what_is_computed_from_smaller(name):
    case = operations.CASES[name]
    arrays, state = case.make(1, 3, dtype=jnp.float32), case.make_state(1, dtype=jnp.float32)

    def gradients(module):
        loss = lambda *given: sum(jnp.sum(jnp.sin(x)) for x in case.run(module)(*given))
        return jax.tree.leaves(quick(jax.grad(loss, (0, 1)))(arrays, state))

    found, expected = (
        gradients(case.module(platform="pallas-interpret", config=None)),
        gradients(case.module()),
    )
    for got, want in zip(found, expected, strict=True):
        assert_close(got, want, kind="gradient")


@tpus.needs_libtpu
@pytest.mark.parametrize("generation", tpus.GENERATIONS)
@pytest.mark.parametrize("name", ["plain", "kda"])
def test_defaults_compile(name, generation):
    compiled_for(generation, name)


@tpus.needs_libtpu
@pytest.mark.parametrize("name", ["ssd", "gla", "scalar", "gated delta"])
def test_members_compile(name):
    compiled_for("v5e", name, "float32" if name == "gla" else "bfloat16")


def test_xla_is_the_default_on_a_tpu():
    for operation in ("linear_attention", "kernel_delta_attention", "state_space_v2"):
        found = {x.platform: x.priority for x, _ in kernel_registry.list_implementations(operation)}
        assert found[Platform.XLA] > found[Platform.PALLAS] > 0


@pytest.mark.parametrize(
    "operation, dims, dtype, flags, words",
    [
        ("linear_attention", dict(T=8, H=1, D=16), "float16", {}, "not float16"),
        ("linear_attention", dict(T=8, H=1, D=16), "float32", dict(decay="value"), "value channel"),
        ("linear_attention", dict(T=8, H=1, D=16, V=300), "float32", {}, "up to 256, not 300"),
    ],
)
def test_what_is_not_supported(operation, dims, dtype, flags, words):
    reason = compiled.unsupported(example_problem(operation, dims, dtype, flags), tpus.FACTS["v5e"])
    assert reason is not None and words in reason


def test_heads_of_a_step_divide_those_of_the_state():
    assert [heads_of_step(4, n) for n in (1, 2, 3, 6, 7, 8)] == [1, 2, 3, 3, 1, 4]
    with pytest.raises(ValueError, match="chunk_size"):
        PallasConfig(48, 1, 1)
    config = PallasConfig(256, 16, 16)
    reason = compiled.config_unsupported(config, problem_of("kda"), tpus.FACTS["v4"])
    assert reason is not None and "chunks of 256 and 16 heads" in reason
