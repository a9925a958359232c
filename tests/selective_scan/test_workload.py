"""What the tuner is given: inputs that are of their very problem, results that agree with the plain mathematics, and their cost."""

import jax
import numpy as np
import pytest

from ejkernel_eqx.selective_scan.core import problem_of, step_problem_of
from tests.selective_scan.cases import example_problem, samples
from tests.selective_scan.test_xla import xla
from tests.workloads import assert_agrees, BOTH, FORWARD, refusals, work_of

OPERATION = "state_space_v1"


def problem(dtype="float32", flags=None, **dims):
    return example_problem(OPERATION, dict(B=2, T=9, I=4, N=3) | dims, dtype, flags or {})


KINDS = {
    "plain": problem(),
    "few options": problem("bfloat16", dict(D=False, z=False, softplus=False, dt_bias=False), G=2),
    "packed": problem(flags=dict(packed="offsets", initial_state=True), S=3),
    "segments": problem("float16", dict(packed="segments")),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", KINDS)
def test_inputs_are_of_their_problem(name):
    wanted = KINDS[name]
    arrays = samples.make_inputs(wanted, 0).arrays
    assert problem_of(OPERATION, arrays, samples.spec_of(wanted)) == wanted
    other = samples.make_inputs(wanted, 1).arrays
    assert (np.asarray(arrays.x) != np.asarray(other.x)).any()


def test_steps_are_of_their_problem():
    for slots in (False, True):
        wanted = problem(flags=dict(step=True, slots=slots))
        arrays = samples.make_step_inputs(wanted, 0)
        assert step_problem_of(OPERATION, arrays, samples.spec_of(wanted)) == wanted


@pytest.mark.few(1)
@pytest.mark.parametrize("name, platform", [("packed", "xla"), ("plain", "triton-interpret")])
def test_platforms_agree_with_the_reference(name, platform):
    config = xla.XlaConfig(4) if platform == "xla" else None
    assert_agrees(OPERATION, platform, KINDS[name], config)


def test_costs():
    costs = work_of(OPERATION, "xla", problem("bfloat16")).costs
    assert costs[FORWARD].flops == 7 * 2 * 9 * 4 * 3 and costs[BOTH].bytes > 2 * costs[FORWARD].bytes
    step = work_of(OPERATION, "xla", problem(flags=dict(step=True)))
    inputs = jax.eval_shape(lambda: step.make_inputs(0))
    assert step.costs[FORWARD].bytes > 2 * 4 * inputs.state.size


test_words_that_do_not_fit = refusals(
    OPERATION,
    example_problem,
    [
        (dict(T=8), {}, ["T, I", "missing ['I']"]),
        (dict(T=8, I=4, H=2), {}, ["unknown ['H']"]),
        (dict(T=8, I=4, G=3), {}, ["divisor of I", "G=3"]),
        (dict(T=8, I=4), dict(gate=True), ["received gate"]),
        (dict(T=8, I=4), dict(packed="rows"), ["packed=offsets", "'rows'"]),
    ],
)
