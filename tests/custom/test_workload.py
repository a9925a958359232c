"""What the tuner makes of a user's kernel."""

import dataclasses
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx import kernel_registry, Problem, tuning_options, TuningError
from ejkernel_eqx.custom import platforms
from ejkernel_eqx.custom.workload import example_problem
from ejkernel_eqx.dispatch import BOTH, device_facts, FORWARD
from ejkernel_eqx.dispatch.persistent import lookup, made_with, Record, user_cache
from ejkernel_eqx.launch import compile_ahead
from ejkernel_eqx.tuning import Status, tune_problem
from tests.attention.dense import quick
from tests.custom.kernels import Block, Blocks, Opaque, Square
from tests.tolerances import errors, TOLERANCES

PROBLEM = example_problem("tests.square", {"B": 3, "D": 40}, "float32", {"scale": 3.0})


def implementation(platform: str, operation: str = "tests.square") -> Any:
    return kernel_registry.get(operation, platform)


def workload(platform: str, problem: Problem = PROBLEM) -> Any:
    return implementation(platform, problem.operation).make_workload(problem)


def test_the_key_knows_all_that_matters():
    keys = {
        example_problem("tests.square", dims, dtype, flags).key()
        for dims in ({"B": 4, "D": 8}, {"B": 4, "D": 64}, {"B": 64, "D": 8})
        for dtype in ("float32", "bfloat16")
        for flags in ({}, {"scale": 3.0}, {"rows": False})
    }
    assert len(keys) == 18
    # B always, D as declared: their next power of two.
    near = example_problem("tests.square", {"B": 3, "D": 7}, "float32", {})
    assert near.key() == example_problem("tests.square", {"B": 4, "D": 8}, "float32", {}).key()
    assert dict(PROBLEM.flags) == {"scale": 3.0, "rows": True}


def test_a_call_is_of_the_problem_that_the_command_line_names():
    kernel = Square(scale=3.0)
    choice = ejx.explain(kernel, jnp.ones((3, 40)), jnp.ones(40)).choices[0]
    assert choice.problem == str(PROBLEM)
    with pytest.raises(ValueError, match=r"for D and optionally B, .*unknown .'E'. and missing .'D'."):
        example_problem("tests.square", {"E": 2}, "float32", {})
    with pytest.raises(ValueError, match=r"flags: expected rows, scale, .*'causal'."):
        example_problem("tests.square", {"D": 2}, "float32", {"causal": True})


@pytest.mark.parametrize("platform", ["xla", "triton-interpret"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_run_agrees_with_reference(platform, dtype):
    if platform != "xla":
        pytest.importorskip("triton")
    problem = example_problem("tests.square", {"B": 3, "D": 40}, dtype, {})
    work = workload(platform, problem)
    inputs = work.make_inputs(0)
    assert inputs["arrays"]["x"].dtype == dtype
    config = implementation(platform).load().default_config(problem, device_facts())
    results, reference = quick(lambda x: work.run(x, config))(inputs), quick(work.reference)(inputs)
    assert set(results) == set(reference) == {"out", "d_x", "d_weight"} and work.forward == ("out",)
    for name, x in results.items():
        measured, allowed = errors(x, reference[name]), work.tolerances[name]
        assert measured.rms <= allowed.rms and measured.peak <= allowed.peak
        assert reference[name].dtype == jnp.float32 and float(jnp.max(jnp.abs(reference[name]))) > 0.1
    assert work.tolerances["d_x"] == TOLERANCES[dtype]["gradient"]
    other = work.make_inputs(1)
    assert all(bool(jnp.any(x != y)) for x, y in zip(*map(jax.tree.leaves, (inputs, other)), strict=True))


def test_hooks_of_the_workload():
    problem = example_problem("tests.opaque", {"B": 4, "D": 8}, "float32", {})
    work = workload("pallas", problem)
    assert work.make_inputs(0)["arrays"]["index"].tolist() == [0, 1, 2, 3]
    assert work.tolerances["place"] == (0.0, 0.0)
    assert work.launches is None and work.parts == ()
    # x, weight, index; out, total, place. The backward reads all again, and cotangents, and writes two gradients.
    read, written = 4 * (32 + 8 + 4), 4 * (32 + 4 + 4)
    assert work.costs[FORWARD].bytes == read + written
    assert work.costs[BOTH].bytes == 2 * (read + written) + 4 * (32 + 4) + 4 * (32 + 8)


def test_integer_inputs_have_to_be_given(monkeypatch):
    monkeypatch.delattr(Opaque, "example_inputs")
    work = workload("xla", example_problem("tests.opaque", {"B": 4, "D": 8}, "float32", {}))
    with pytest.raises(TuningError, match=r"for index; return it from Opaque.example_inputs"):
        work.make_inputs(0)
    wrong = lambda *_: {"index": jnp.zeros(5, jnp.int32)}
    monkeypatch.setattr(Opaque, "example_inputs", wrong, raising=False)
    with pytest.raises(ValueError, match=r"index: expected .* with batch axes"):
        work.make_inputs(0)


def test_launches_compile_for_a_device_that_is_not_there():
    pytest.importorskip("triton")
    work = workload("triton")
    assert [part.field for part in work.parts] == ["forward", "backward"]
    assert work.parts[1].results == ("d_x", "d_weight")
    launches = work.launches(Blocks(Block(32), Block(16)))
    assert [(x.label, x.constants["BLOCK"]) for x in launches] == [
        ("tests.square.forward_kernel", 32),
        ("tests.square.backward_kernel", 16),
    ]
    assert compile_ahead(launches[0], "sm_90").fits


def test_another_process_can_import_it():
    found = implementation("triton-interpret")
    assert pickle.loads(pickle.dumps(found)) == found


def test_a_wrong_candidate_is_denied(monkeypatch):
    pytest.importorskip("triton")
    run = Square.run_triton

    def wrong(self, arrays, config, launch):
        return run(self, arrays, config, launch) * (1.01 if config.forward.block_n == 32 else 1)

    monkeypatch.setattr(Square, "run_triton", wrong)
    problem = dataclasses.replace(PROBLEM, flags=(("rows", True), ("scale", 5.0)))
    with tuning_options(samples=2, sample_ms=1.0, progress=False):
        result = tune_problem(problem, implementation("triton-interpret"), force=True)
    assert {m.part for m in result.measurements} == {"forward", "backward"}
    assert {m.config.block_n for m in result.measurements} == {16, 32}
    denied = [m for m in result.measurements if m.status is Status.DENIED and m.part == "forward"]
    assert [m.config.block_n for m in denied] == [32] and result.config.forward == Block(16)


def test_what_was_tuned_of_another_text_is_not_asked(monkeypatch, tmp_path):
    """A kernel that is being worked on: yesterday's winner, and yesterday's denials, say nothing of today's code."""
    monkeypatch.setenv("EJKERNEL_EQX_CACHE_DIR", str(tmp_path))
    x, weight = jnp.ones((2, 16)), jnp.ones(16)
    with ejx.recording() as calls:
        jax.eval_shape(Square(), x, weight)
    (call,) = calls
    device, implementation = device_facts(), call.implementation
    assert len(made_with(implementation)["source"]) == 12
    key, exact = call.problem.key(), call.problem.to_dict()
    place = (call.operation, implementation.platform.value, implementation.version, key, exact)
    user_cache(device, implementation.core).put(Record(*place, made_with(implementation), {}))
    assert lookup(implementation, call.problem, device) is not None
    monkeypatch.setattr(platforms, "source_digest", lambda kernel: "another")
    assert lookup(implementation, call.problem, device) is None
