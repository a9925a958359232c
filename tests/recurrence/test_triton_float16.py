"""Float16 operands as an NVIDIA device multiplies them, interpreted: what becomes float32 on the way meets in tf32 products, which cut off
what is behind 11 bits."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx.recurrence.core import problem_of
from ejkernel_eqx.recurrence.spec import KEY, SCALAR
from tests.compiled import DEVICES
from tests.recurrence.cases import assert_agrees, Case, cotangents, make, PAIRWISE, Result, run_reference

pytest.importorskip("triton")
from ejkernel_eqx.launch import run
from ejkernel_eqx.recurrence import triton

ONE: dict[str, Any] = dict(B=1, Hq=1, Hk=1, Hv=1, Hg=1, Hb=1, dtype="float16")
HARD: dict[str, Any] = dict(delta=True, keys="correlated", T=131)
CASES = (
    next(case for case in PAIRWISE if case.name.startswith("33-")),
    Case("correlated", **ONE, **HARD, beta=1.0),
    Case("correlated, decayed", **ONE, **HARD, beta=2.0, decay=SCALAR),
    Case("correlated, decayed by key", **ONE, **HARD, beta=2.0, decay=KEY, D=64),
    Case("linear, decayed by key", **ONE, decay=KEY, D=128, V=64, T=131),
    Case("linear, decayed by key, weighted", **ONE, decay=KEY, log_decays="mixed", beta=1.0, D=64, T=131),
)
QUICK = {"correlated", "linear, decayed by key"}


def test_a_device_s_nan_stays_one():
    """All bits of NVIDIA's NaN are set but the sign: rounding must not carry over into it."""
    case = Case("decayed by key", **ONE, decay=KEY, T=40, initial_state=True)
    arrays, spec = make(case)
    assert arrays.initial_state is not None
    nan = np.full(arrays.initial_state.shape, 0x7FFFFFFF, np.uint32).view(np.float32)
    config = triton.default_config(problem_of("linear_attention", arrays, spec), DEVICES["sm_90"])
    execute = functools.partial(run, interpret=True)
    results = triton.forward(arrays._replace(initial_state=jnp.asarray(nan)), spec, config, execute=execute)
    assert np.isnan(results["out"]).all() and np.isnan(results["final_state"]).all()


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if case.name in QUICK else pytest.mark.slow)
        for case in CASES
    ],
)
def test_agrees_as_on_a_device(case):
    arrays, spec = make(case)
    config = triton.default_config(problem_of("linear_attention", arrays, spec), DEVICES["sm_90"])
    assert config.float32_dot == "tf32x3"
    execute = functools.partial(run, interpret=True)
    dout, dstate = cotangents(case)
    results = dict(triton.forward(arrays, spec, config, execute=execute))
    out, final = results.pop("out"), results.pop("final_state")
    grads = triton.backward(arrays, spec, config, results, dout, dstate, execute=execute)
    grads = {name: jnp.asarray(x, getattr(arrays, name).dtype) for name, x in grads.items()}
    assert_agrees(case, Result(out, final, grads), run_reference(arrays, dout, dstate, spec))
