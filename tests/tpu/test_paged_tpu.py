"""Attention over pages on a TPU: the interpreted cases with head dims of a whole register, by the compiled kernels."""

import dataclasses

import jax
import pytest

from ejkernel_eqx.dispatch import Backend, device_facts
from ejkernel_eqx.paged.pallas import compiled
from tests.paged.cases import assert_agrees, make, with_leading_axis
from tests.paged.test_pallas import CASES, CONFIG

pytestmark = pytest.mark.tpu


@pytest.mark.skipif(device_facts().backend is not Backend.TPU, reason="needs a TPU")
@pytest.mark.parametrize("name", CASES)
def test_agrees(name):
    case = CASES[name]
    case = dataclasses.replace(case, D=128, V=128, rope=None if case.rope is None else 64)
    arrays, spec = make(case)
    arrays = arrays if case.batch else with_leading_axis(arrays)
    assert_agrees(case, jax.jit(compiled.forward, static_argnums=(1, 2))(arrays, spec, CONFIG))
