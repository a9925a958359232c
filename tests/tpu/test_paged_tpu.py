"""Attention over pages on a TPU: the interpreted cases, with head dims of a whole register, by the compiled kernels.

Nothing here has run yet: its authors have no TPU."""

import dataclasses

import jax
import pytest

from ejkernel_eqx.paged.pallas import compiled
from tests.paged.cases import assert_agrees, make, with_leading_axis
from tests.paged.test_pallas import CASES, CONFIG
from tests.paged.test_pallas_write import CASES as WRITES
from tests.paged.test_pallas_write import WIDE
from tests.paged.writes import assert_same
from tests.paged.writes import make as make_write

if jax.default_backend() != "tpu":
    pytest.skip("needs a TPU", allow_module_level=True)

pytestmark = pytest.mark.tpu


@pytest.mark.parametrize("name", CASES)
def test_agrees(name):
    case = CASES[name]
    case = dataclasses.replace(case, D=128, V=128, rope=None if case.rope is None else 64)
    arrays, spec = make(case)
    arrays = arrays if case.batch else with_leading_axis(arrays)
    assert_agrees(case, jax.jit(compiled.forward, static_argnums=(1, 2))(arrays, spec, CONFIG))


@pytest.mark.parametrize("name", WRITES)
def test_writes(name):
    """The kernel that writes new tokens, and its scatters, beside XLA's scatter alone."""
    assert_same(jax.jit(compiled.write), make_write(**{"kinds": WIDE, **WRITES[name]}))
