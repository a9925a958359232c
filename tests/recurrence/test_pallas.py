"""The linear-time family's kernels for TPU without one: interpreted against the reference, lowered, and compiled."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from ejkernel_eqx.dispatch import kernel_registry, Platform, Problem
from ejkernel_eqx.recurrence.pallas import compiled
from ejkernel_eqx.recurrence.pallas.compiled import interpreted as platform
from ejkernel_eqx.recurrence.pallas.tile_sizes import heads_of_step, PallasConfig, vmem
from tests import tpus
from tests.attention.dense import quick
from tests.recurrence import cases, operations
from tests.recurrence.cases import Case, example_problem, make, NAMED, samples
from tests.tolerances import assert_close

pytestmark = pytest.mark.usefixtures("no_races")

PACKED: dict[str, Any] = dict(T=67, B=2, Hq=1, Hk=1, Hv=4, Hg=2, Hb=4, beta=1.0, initial_state=True)
OWN = (
    Case("queries of few states", Hq=6, Hg=1, decay="scalar", T=33, dtype="bfloat16"),
    Case(name="ssd in segments", decay="scalar", skip=True, packing="segments", **PACKED),
    Case(name="gated delta in sequences", decay="scalar", delta=True, packing="offsets", **PACKED),
    Case(name="kda in segments", decay="key", delta=True, packing="segments", dtype="bfloat16", **PACKED),
    Case(name="gla in many sequences", decay="key", packing="many", state_dtype="bfloat16", **PACKED),
)
WANTED = "linear gla-mixed lightning-closed kda-closed no-tokens-packed".split()
INTERPRETED = {case.name: case for case in (*OWN, *(NAMED[name] for name in WANTED))}


def check(case: Case, config: PallasConfig) -> None:
    arrays, spec = make(case)
    given = cases.cotangents(case)
    run = lambda arrays, *given: cases.by_kernels(platform, arrays, *given, spec=spec, config=config)
    scales = {"g": cases.scale_of_constant(arrays, *given, spec)} if case.decay == "constant" else None
    exact = cases.run_reference(arrays, *given, spec)
    cases.assert_agrees(case, quick(run)(arrays, *given), exact, scales)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("name", INTERPRETED)
def test_agrees_with_the_reference(name):
    check(INTERPRETED[name], PallasConfig(16, 2, 2))


@pytest.mark.slow
def test_a_long_chunk_of_one_head():
    check(NAMED["gated-delta-correlated"], PallasConfig(64, 1, 1))


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
    spec = samples.spec_of(problem)

    def call(arrays: Any, dout: Any, dstate: Any) -> Any:
        found = compiled.forward(arrays, spec, config)
        given = {"out": dout, "final_state": dstate}
        return found, compiled.backward(arrays, spec, config, {"states": found["states"]}, given)

    arrays = jax.eval_shape(lambda: samples.make_inputs(problem, 0).arrays)
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
        assert configs[0] == compiled.default_config(problem, device)
        assert len(set(configs)) == len(configs) > 1
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
@pytest.mark.parametrize("name", ["ssd", "gla", "kda"])
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


SMALLER = ("gated delta softplus", "kernel delta bounded")


@pytest.mark.parametrize(
    "name", ["state space norm", *(pytest.param(name, marks=pytest.mark.slow) for name in SMALLER)]
)
def test_gradients_through_what_is_computed_from_smaller(name):
    case = operations.CASES[name]
    arrays, state = case.make(1, 3, dtype=jnp.float32), case.make_state(1, dtype=jnp.float32)

    def gradients(module):
        loss = lambda *given: sum(jnp.sum(jnp.sin(x)) for x in case.run(module)(*given))
        return jax.tree.leaves(quick(jax.grad(loss, (0, 1)))(arrays, state))

    found = gradients(case.module(platform="pallas-interpret", config=None))
    expected = gradients(case.module())
    for got, want in zip(found, expected, strict=True):
        assert_close(got, want, kind="gradient")


@tpus.needs_libtpu
@pytest.mark.parametrize("generation", tpus.GENERATIONS)
@pytest.mark.parametrize("name", ["kda"])
def test_defaults_compile(name, generation):
    compiled_for(generation, name)


@tpus.needs_libtpu
@pytest.mark.parametrize("name", ["plain", "ssd", "gla", "scalar", "gated delta"])
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
