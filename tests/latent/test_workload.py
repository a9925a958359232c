"""What the tuner is given: inputs of their very problem, and results that agree with the reference."""

import numpy as np
import pytest

from ejkernel_eqx.attention.samples import spec_of
from ejkernel_eqx.dispatch import BOTH, FORWARD
from ejkernel_eqx.latent.workload import example_problem, make_inputs
from tests.latent.cases import OPERATION, problem_of
from tests.workloads import assert_agrees, refusals, work_of

SIZES = dict(B=2, T=40, H=3, D=24, V=12, Dr=8)
KINDS = {
    "causal": example_problem(OPERATION, SIZES, "float32", {}),
    "bfloat16": example_problem(OPERATION, SIZES, "bfloat16", dict(soft_cap=True, lse=True)),
    "segments": example_problem(OPERATION, SIZES | dict(S=50), "float16", dict(segments=True, sinks=True)),
    "bias": example_problem(OPERATION, SIZES, "float32", dict(bias="HTS", alibi_slopes=True, dropout=True)),
    "lengths": example_problem(OPERATION, SIZES, "float32", dict(rows=True, window=7)),
}


@pytest.mark.parametrize("name", KINDS)
def test_inputs_are_of_their_problem(name):
    wanted = KINDS[name]
    found = problem_of(OPERATION, make_inputs(wanted, 0).arrays, spec_of(wanted))
    assert (found, found.key()) == (wanted, wanted.key())
    one, other = (make_inputs(wanted, seed).arrays.k_rope for seed in (0, 1))
    assert (np.asarray(one) != np.asarray(other)).any()


@pytest.mark.few(2)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("platform", ["xla", "triton-interpret"])
def test_agrees_with_the_reference(platform, name):
    assert_agrees(OPERATION, platform, KINDS[name])


def test_costs():
    """Two products forward, five more backward, of the visible half."""
    of = example_problem(OPERATION, dict(T=64, H=2, D=24, V=12), "bfloat16", {})
    work = work_of(OPERATION, "xla", of)
    assert work.costs[FORWARD].flops == 2.0 * 2 * (24 + 12) * 64 * 65 / 2
    assert work.costs[BOTH].flops == 3.5 * work.costs[FORWARD].flops


test_wrong_words = refusals(
    OPERATION,
    example_problem,
    [
        (SIZES | dict(Dr=24), {}, "Dr from 1 to"),
        (SIZES | dict(K=1), {}, "as many key heads"),
        (SIZES, dict(deterministic=True), "deterministic"),
    ],
)
