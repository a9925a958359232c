"""The linear-time family on a TPU: the compiled Pallas kernels against the reference, every member, every candidate.

Nothing here has run yet: its authors have no TPU."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from ejkernel_eqx.dispatch import device_facts
from ejkernel_eqx.recurrence.core import problem_of
from ejkernel_eqx.recurrence.pallas import compiled
from ejkernel_eqx.recurrence.spec import CONSTANT, VALUE
from tests.recurrence.cases import (
    assert_agrees,
    Case,
    CASES,
    CLOSED,
    cotangents,
    floats_of,
    make,
    Result,
    run_reference,
    scale_of_constant,
)

if jax.default_backend() != "tpu":
    pytest.skip("needs a TPU", allow_module_level=True)

pytestmark = pytest.mark.tpu
SUPPORTED = [
    dataclasses.replace(case, dtype="bfloat16" if case.dtype == "float16" else case.dtype)
    for case in (*CASES, *CLOSED)
    if case.decay != VALUE and not (case.delta and case.skip)
]
HEADS = dict.fromkeys(("Hq", "Hk", "Hv", "Hg", "Hb"), 4)
LONG = Case("long", T=1000, B=2, D=128, V=128, beta=1.0, dtype="bfloat16", initial_state=True, **HEADS)


def check(case: Case, config: Any = None) -> None:
    arrays, spec = make(case)
    dout, dstate = cotangents(case)
    config = config or compiled.default_config(problem_of("linear_attention", arrays, spec), device_facts())

    def both(arrays: Any, dout: Any, dstate: Any) -> Any:
        found = compiled.forward(arrays, spec, config)
        saved = {"states": found["states"]}
        return found, compiled.backward(arrays, spec, config, saved, {"out": dout, "final_state": dstate})

    run = jax.jit(both)
    found, grads = run(arrays, dout, dstate)
    for x, y in zip(*map(jax.tree.leaves, ((found, grads), run(arrays, dout, dstate))), strict=True):
        np.testing.assert_array_equal(x, y)
    grads = {name: grads[name].astype(x.dtype) for name, x in floats_of(arrays).items()}
    scales = {"g": scale_of_constant(arrays, dout, dstate, spec)} if case.decay == CONSTANT else None
    exact = run_reference(arrays, dout, dstate, spec)
    assert_agrees(case, Result(found["out"], found["final_state"], grads), exact, scales)


@pytest.mark.parametrize("case", SUPPORTED, ids=lambda case: case.name)
def test_agrees_with_the_reference(case):
    check(case)


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("decay", ["none", "scalar", "key"])
def test_long_rows(decay, delta):
    check(dataclasses.replace(LONG, decay=decay, delta=delta))


def test_every_candidate():
    case = dataclasses.replace(LONG, decay="scalar", delta=True)
    arrays, spec = make(case)
    for config in compiled.candidates(problem_of("linear_attention", arrays, spec), device_facts()):
        check(case, config)
