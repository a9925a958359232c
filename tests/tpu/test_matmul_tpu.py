"""The grouped matmul on a TPU: the compiled Pallas kernels against the reference, every option, every candidate.

Nothing here has run yet: its authors have no TPU."""

import dataclasses

import jax
import numpy as np
import pytest

from ejkernel_eqx.dispatch import device_facts
from ejkernel_eqx.matmul.pallas import compiled
from ejkernel_eqx.matmul.workload import example_problem
from tests.matmul.cases import Case, CASES, exact, make, results
from tests.tolerances import assert_close

if jax.default_backend() != "tpu":
    pytest.skip("needs a TPU", allow_module_level=True)

pytestmark = pytest.mark.tpu


def check(case: Case, **options) -> None:
    given, dout = make(case)
    op = case.operation("pallas", **options)
    found, again = (results(case, op, given, dout) for _ in range(2))
    expected = exact(case, given, dout)
    for name, x in found.items():
        assert_close(x, expected[name], case.dtype, "forward" if name == "out" else "gradient", name=name)
        np.testing.assert_array_equal(x, again[name], err_msg=name)


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_reference(name):
    case = CASES[name]
    check(dataclasses.replace(case, dtype="bfloat16" if case.dtype == "float16" else case.dtype))


MANY = Case(sizes=(700, 0, 33, 900, 1, 256), M=2048, K=1536, N=640, dtype="bfloat16")


@pytest.mark.parametrize(
    "options", [{}, dict(activation="silu", gated="halves", bias=True), dict(stored="int8")], ids=str
)
def test_many_tiles(options):
    check(dataclasses.replace(MANY, **options))


def test_every_candidate():
    sizes = dict(M=MANY.M, K=MANY.K, N=MANY.N, E=len(MANY.sizes))
    problem = example_problem("grouped_matmul", sizes, MANY.dtype, {})
    for config in compiled.candidates(problem, device_facts()):
        check(MANY, config=config)
