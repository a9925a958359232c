"""The norm of a sum by its Triton kernels, and the cross entropy of a projection, on a GPU: against the float64 reference.

python -m pytest tests/gpu/test_residual_gpu.py
"""

import dataclasses

import jax
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.models.vocabulary import embed
from tests.agreement import assert_agrees
from tests.gpu.host import candidates, example_problem, on_host
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
    assert_agrees(case, found, on_host(cases.exact, inputs, cotangents))
    for name, x in cases.results(op, inputs, cotangents).items():
        np.testing.assert_array_equal(np.asarray(x), np.asarray(found[name]), err_msg=name)


def test_every_candidate():
    case = LONG["of a model"]
    inputs, cotangents = cases.make(case)
    expected = on_host(cases.exact, inputs, cotangents)
    problem = example_problem(NEEDS, dict(B=2, M=700, F=1024), case.dtype, {})
    for config in candidates(NEEDS, problem):
        assert_agrees(case, cases.results(ejx.ResidualRMSNorm(config=config), inputs, cotangents), expected)


@pytest.mark.parametrize("name", losses.CASES)
def test_cross_entropy(name):
    case = dataclasses.replace(losses.CASES[name], vocabulary=1000)
    inputs, labels, dout = losses.make(case)
    found = losses.results(case.operation(), inputs, labels, dout)
    for name, x in on_host(losses.exact, case, inputs, labels, dout).items():
        assert_close(found[name], x, case.dtype, "forward" if name == "out" else "gradient", name=name)


@pytest.mark.parametrize("readers", [2, 3])
def test_norm_for_several_readers(readers):
    """Each reader's norm, and the gradients of what all return, as those of one that returns their sum."""
    inputs, (dout, dsum) = cases.make(LONG["of a model"])
    op, given = ejx.ResidualRMSNorm(platform="triton"), (inputs["x"], inputs["branch"], inputs["weight"])
    (outs, total), pull = jax.vjp(lambda *given: op.for_readers(readers, *given), *given)
    (out, plain), one = jax.vjp(op, *given)
    for x, y in zip((*outs, total), (*[out] * readers, plain), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    found = pull(((dout,) * readers, dsum))
    expected = one(((readers * dout.astype("float32")).astype(dout.dtype), dsum))
    for x, y in zip(found, expected, strict=True):
        assert_close(x, np.asarray(y, np.float64), "bfloat16", "gradient")


def test_rows_of_a_small_vocabulary():
    """The product of a table with ones and zeros is the rows of the table, and its gradient their sums in float32."""
    random = np.random.default_rng(0)
    table = jax.numpy.asarray(random.standard_normal((256, 128)), "bfloat16")
    tokens = jax.numpy.asarray(random.integers(0, 256, (4, 1500)), "int32")
    dout = jax.numpy.asarray(random.standard_normal((4, 1500, 128)), "bfloat16")
    found, pull = jax.vjp(lambda table: embed(table, tokens), table)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(table[tokens]))
    expected = np.zeros((256, 128))
    np.add.at(expected, np.asarray(tokens), np.asarray(dout, np.float64))
    assert_close(pull(dout)[0], expected, "bfloat16", "gradient")
