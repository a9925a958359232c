"""The grouped matmul on XLA: against the reference, and how it composes."""

import numpy as np
import pytest

from tests.matmul.cases import Case, CASES, exact, formula, learned, make, results
from tests.tolerances import assert_close


@pytest.fixture(params=["xla"])
def platform(request):
    return request.param


def assert_agrees(case: Case, found, expected) -> None:
    assert set(found) == set(expected)
    for name, x in found.items():
        assert_close(x, expected[name], case.dtype, "forward" if name == "out" else "gradient", name=name)


@pytest.mark.few(8)
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_reference(name, platform):
    case = CASES[name]
    given, dout = make(case)
    found = results(case, case.operation(platform), given, dout)
    assert found["out"].dtype == (case.out or case.dtype)
    assert all(
        found[n].dtype == x.dtype and found[n].shape == x.shape for n, x in learned(case, given).items()
    )
    assert_agrees(case, found, exact(case, given, dout))


@pytest.mark.few(6)
@pytest.mark.parametrize("name", CASES)
def test_the_reference_is_the_formula(name):
    case = CASES[name]
    given, dout = make(case)
    np.testing.assert_allclose(exact(case, given, dout)["out"], formula(case, given), rtol=1e-12, atol=1e-14)
