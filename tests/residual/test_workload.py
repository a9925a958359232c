"""What the tuner is given, and what is compiled: inputs of their very problem, results that agree, configurations that fit."""

import jax
import numpy as np
import pytest

from ejkernel_eqx.dispatch import BOTH, FORWARD
from ejkernel_eqx.normalization.residual.core import problem_of
from ejkernel_eqx.normalization.residual.spec import ResidualSpec
from ejkernel_eqx.normalization.residual.workload import example_problem, make_arrays, make_inputs
from tests.compiled import DEVICES, launches_of
from tests.workloads import assert_agrees

OPERATION = "residual_rms_norm"
KINDS = {
    "whole": example_problem(OPERATION, dict(B=2, M=6, F=24), "float32", {}),
    "bare": example_problem(OPERATION, dict(M=4, F=16), "float16", dict(branch=False, weight=False)),
}


@pytest.mark.parametrize("name", KINDS)
def test_inputs_are_of_their_problem(name):
    wanted = KINDS[name]
    found = problem_of(OPERATION, make_arrays(wanted, 0), ResidualSpec())
    assert (found, found.key()) == (wanted, wanted.key())
    assert (np.asarray(make_arrays(wanted, 1).x) != np.asarray(make_arrays(wanted, 0).x)).any()


@pytest.mark.parametrize("platform, name", [("xla", "whole"), ("xla", "bare"), ("triton-interpret", "whole")])
def test_agrees_with_the_reference(platform, name):
    work, reference = assert_agrees(OPERATION, platform, KINDS[name])
    assert set(reference) == set(work.tolerances)
    assert work.costs[BOTH].bytes > work.costs[FORWARD].bytes > 0


@pytest.mark.parametrize(
    "target", ["sm_90", *(pytest.param(t, marks=pytest.mark.slow) for t in DEVICES if t != "sm_90")]
)
def test_defaults_fit(target):
    pytest.importorskip("triton")
    from ejkernel_eqx.launch import compile_ahead
    from ejkernel_eqx.normalization.residual.triton import compiled as triton

    sizes, flags = {
        "sm_80": (dict(B=4, M=4096, F=4096), {}),
        "sm_90": (dict(B=8, M=2048, F=1024), {}),
        "sm_100": (dict(M=1000, F=500), dict(branch=False)),
        "gfx942": (dict(M=100, F=1000), dict(weight=False)),
    }[target]
    problem, device = example_problem(OPERATION, sizes, "bfloat16", flags), DEVICES[target]
    assert triton.unsupported(problem, device) is None
    configs = triton.candidates(problem, device)
    assert configs[0] == triton.default_config(problem, device) and len(set(configs)) == len(configs) > 1
    spec = ResidualSpec()
    arrays, cotangents = jax.eval_shape(lambda: make_inputs(problem, spec, 0))

    def both(arrays, cotangents, execute):
        saved = triton.forward(arrays, spec, configs[0], execute=execute)
        return triton.backward(arrays, spec, configs[0], saved, cotangents, execute=execute)

    launches = launches_of(both, arrays, cotangents)
    assert set(launches) == {"forward_kernel", "backward_kernel"}
    for name, launch in launches.items():
        report = compile_ahead(launch, target)
        assert report.fits, (name, report)


def test_what_triton_does_not_take():
    pytest.importorskip("triton")
    from ejkernel_eqx.normalization.residual.triton import compiled as triton

    reason = triton.unsupported(
        example_problem(OPERATION, dict(M=1, F=20000), "bfloat16", {}), DEVICES["sm_90"]
    )
    assert reason is not None and "16384" in reason
