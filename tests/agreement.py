"""What tests of operations share: the platforms that run here, results beside expected ones, and results that are the same bit for bit."""

from typing import Any

import numpy as np
import pytest

from tests.attention.dense import INTERPRET
from tests.tolerances import assert_close


def platforms() -> Any:
    """A fixture: XLA, and Triton's kernels where they can be interpreted."""

    @pytest.fixture(params=["xla", INTERPRET])
    def platform(request):
        if request.param == INTERPRET:
            pytest.importorskip("triton")
        return request.param

    return platform


def assert_agrees(case: Any, found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Results, and gradients under all other names, within the tolerances of the case's dtype."""
    assert set(found) == set(expected)
    for name, x in found.items():
        is_result = name in ("out", "sum") or name.startswith("final_")
        assert_close(x, expected[name], case.dtype, "forward" if is_result else "gradient", name=name)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, x in expected.items():
        np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(x), err_msg=name)
