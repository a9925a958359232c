"""The norm of a sum by its Triton kernels, and the cross entropy of a projection, on a GPU: against the float64 reference.

python -m pytest tests/gpu/test_residual_gpu.py
"""

import dataclasses

import jax
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.dispatch import device_facts, kernel_registry
from ejkernel_eqx.normalization.residual.workload import example_problem
from tests.gpu.host import on_host
from tests.losses import cases as losses
from tests.residual import cases
from tests.tolerances import assert_close

if jax.default_backend() != "gpu":
    pytest.skip("needs a GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu
NEEDS = "residual_rms_norm"
LONG = cases.CASES | {
    "long": cases.Case((3, 301, 200)),
    "wide": cases.Case((37, 5000), branch=False),
    "of a model": cases.Case((2, 700, 1024), "bfloat16"),
}


@pytest.mark.parametrize("name", LONG)
def test_norm_of_a_sum(name):
    """Results and every gradient; the same bit for bit when run again."""
    case = LONG[name]
    inputs, cotangents = cases.make(case)
    op = ejx.ResidualRMSNorm(platform="triton")
    found = cases.results(op, inputs, cotangents)
    cases.assert_agrees(case, found, on_host(cases.exact, inputs, cotangents))
    for name, x in cases.results(op, inputs, cotangents).items():
        np.testing.assert_array_equal(np.asarray(x), np.asarray(found[name]), err_msg=name)


def test_every_candidate():
    case = LONG["of a model"]
    inputs, cotangents = cases.make(case)
    expected = on_host(cases.exact, inputs, cotangents)
    problem = example_problem(NEEDS, dict(B=2, M=700, F=1024), case.dtype, {})
    for config in kernel_registry.get(NEEDS, "triton").load().candidates(problem, device_facts()):
        cases.assert_agrees(
            case, cases.results(ejx.ResidualRMSNorm(config=config), inputs, cotangents), expected
        )


@pytest.mark.parametrize("name", losses.CASES)
def test_cross_entropy(name):
    case = dataclasses.replace(losses.CASES[name], vocabulary=1000)
    inputs, labels, dout = losses.make(case)
    found = losses.results(case.operation(), inputs, labels, dout)
    for name, x in on_host(losses.exact, case, inputs, labels, dout).items():
        assert_close(found[name], x, case.dtype, "forward" if name == "out" else "gradient", name=name)
