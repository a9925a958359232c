"""What the tuner is given, and what is compiled: inputs of their very problem, results that agree, configurations that fit."""

import numpy as np
import pytest

from ejkernel_eqx.normalization.core import problem_of
from ejkernel_eqx.normalization.workload import example_problem, make_arrays
from tests.compiled import DEVICES
from tests.residual.cases import SPEC
from tests.workloads import assert_agrees, assert_defaults_fit, BOTH, FORWARD, kernel_registry

OPERATION = "residual_rms_norm"
KINDS = {
    "whole": example_problem(OPERATION, dict(B=2, M=6, F=24), "float32", {}),
    "bare": example_problem(OPERATION, dict(M=4, F=16), "float16", dict(branch=False, weight=False)),
}


@pytest.mark.parametrize("name", KINDS)
def test_inputs_are_of_their_problem(name):
    wanted = KINDS[name]
    found = problem_of(OPERATION, make_arrays(wanted, 0), SPEC)
    assert (found, found.key()) == (wanted, wanted.key())
    assert (np.asarray(make_arrays(wanted, 1).x) != np.asarray(make_arrays(wanted, 0).x)).any()


@pytest.mark.parametrize("platform, name", [("xla", "whole"), ("xla", "bare"), ("triton-interpret", "whole")])
def test_agrees_with_the_reference(platform, name):
    work, _ = assert_agrees(OPERATION, platform, KINDS[name])
    assert work.costs[BOTH].bytes > work.costs[FORWARD].bytes > 0


FIT = {
    "sm_80": (dict(B=4, M=4096, F=4096), {}),
    "sm_90": (dict(B=8, M=2048, F=1024), {}),
    "sm_100": (dict(M=1000, F=500), dict(branch=False)),
    "gfx942": (dict(M=100, F=1000), dict(weight=False)),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("target", FIT)
def test_defaults_fit(target):
    sizes, flags = FIT[target]
    assert_defaults_fit(OPERATION, example_problem(OPERATION, sizes, "bfloat16", flags), target)


def test_what_triton_does_not_take():
    pytest.importorskip("triton")
    wide = example_problem(OPERATION, dict(M=1, F=20000), "bfloat16", {})
    triton = kernel_registry.get(OPERATION, "triton").load()
    assert "16384" in (triton.unsupported(wide, DEVICES["sm_90"]) or "")
