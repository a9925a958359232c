"""What the tuner is given, and what is compiled: inputs of their very problem, results that agree, configurations that fit."""

import numpy as np
import pytest

from ejkernel_eqx.normalization.core import problem_of
from ejkernel_eqx.normalization.workload import example_problem, make_arrays
from tests.compiled import DEVICES
from tests.normalization.cases import NormSpec
from tests.workloads import (
    assert_agrees,
    assert_defaults_fit,
    BOTH,
    FORWARD,
    kernel_registry,
    refusals,
    work_of,
)

OPERATION = "gated_rms_norm"
KINDS = {
    "plain": example_problem(OPERATION, dict(B=2, M=6, F=24), "float32", {}),
    "groups": example_problem(OPERATION, dict(M=9, G=3, F=8), "bfloat16", dict(activation="sigmoid")),
    "bare": example_problem(OPERATION, dict(M=4, F=16), "float16", dict(activation=None, weight=False)),
}


@pytest.mark.parametrize("name", KINDS)
def test_inputs_are_of_their_problem(name):
    wanted = KINDS[name]
    spec = NormSpec(str(wanted.flag("activation") or "silu"), bool(wanted.flag("norm_before_gate")))
    found = problem_of(OPERATION, make_arrays(wanted, 0), spec)
    assert (found, found.key()) == (wanted, wanted.key())
    assert (np.asarray(make_arrays(wanted, 1).x) != np.asarray(make_arrays(wanted, 0).x)).any()


@pytest.mark.parametrize(
    "platform, name", [("xla", "plain"), ("xla", "bare"), ("triton-interpret", "groups")]
)
def test_agrees_with_the_reference(platform, name):
    assert_agrees(OPERATION, platform, KINDS[name])


def test_costs_are_the_arrays_once():
    costs = work_of(OPERATION, "xla", KINDS["bare"]).costs
    assert costs[FORWARD].bytes == 2 * 4 * 16 * 2 and costs[BOTH].bytes == 5 * 4 * 16 * 2


test_words_that_do_not_fit = refusals(
    OPERATION,
    example_problem,
    [
        (dict(F=4), {}, "missing"),
        (dict(M=1, F=4, X=2), {}, "X"),
        (dict(M=0, F=4), {}, "M=0"),
        (dict(M=1, F=4), dict(weight=1), "weight"),
        (dict(M=1, F=4), dict(gate=True), "gate"),
    ],
)


FIT = {
    "sm_80": (dict(B=4, M=4096, F=4096), {}),
    "sm_90": (dict(B=4096, M=16, F=128), dict(norm_before_gate=True)),
    "sm_100": (dict(M=1000, G=8, F=500), dict(activation="sigmoid")),
    "gfx942": (dict(M=100, F=1000), dict(activation=None)),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("target", FIT)
def test_defaults_fit(target):
    sizes, flags = FIT[target]
    assert_defaults_fit(OPERATION, example_problem(OPERATION, sizes, "bfloat16", flags), target)


def test_what_triton_does_not_take():
    pytest.importorskip("triton")
    triton = kernel_registry.get(OPERATION, "triton").load()
    wide = example_problem(OPERATION, dict(M=1, F=20000), "bfloat16", {})
    assert "16384" in (triton.unsupported(wide, DEVICES["sm_90"]) or "")
    for device, fast in (("sm_90", True), ("gfx942", False)):
        assert triton.default_config(KINDS["plain"], DEVICES[device]).fast_sigmoid == fast
    with pytest.raises(ValueError, match="power of two"):
        triton.NormTile(3, 4)
    with pytest.raises(ValueError, match="num_warps"):
        triton.NormTile(4, 5)
