"""Float16 operands as an NVIDIA device multiplies them, interpreted: what becomes float32 on the way meets in tf32 products, which cut off
what is behind 11 bits."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.compiled import DEVICES
from tests.recurrence import cases
from tests.recurrence.cases import Case, CONSTANT, KEY, make, PAIRWISE, SCALAR
from tests.recurrence.kernels import default_config, ON_DEVICE

SLOW = pytest.mark.slow
SM_90 = DEVICES["sm_90"]
ONE: dict[str, Any] = dict(B=1, Hq=1, Hk=1, Hv=1, Hg=1, Hb=1, dtype="float16")
HARD: dict[str, Any] = dict(delta=True, keys="correlated", T=131)
CASES = (
    Case("correlated", **ONE, **HARD, beta=1.0),
    Case("linear, decayed by key", **ONE, decay=KEY, D=128, V=64, T=131),
    next(case for case in PAIRWISE if case.name.startswith("33-")),
    Case("correlated, decayed", **ONE, **HARD, beta=2.0, decay=SCALAR),
    Case("correlated, decayed by key", **ONE, **HARD, beta=2.0, decay=KEY, D=64),
    Case("linear, decayed by key, weighted", **ONE, decay=KEY, log_decays="mixed", beta=1.0, D=64, T=131),
)


def test_a_device_s_nan_stays_one():
    """All bits of NVIDIA's NaN are set but the sign: rounding must not carry over into it."""
    arrays, spec = make(Case("decayed by key", **ONE, decay=KEY, T=40, initial_state=True))
    assert arrays.initial_state is not None
    nan = np.full(arrays.initial_state.shape, 0x7FFFFFFF, np.uint32).view(np.float32)
    config = default_config(arrays, spec, SM_90)
    results = ON_DEVICE.forward(arrays._replace(initial_state=jnp.asarray(nan)), spec, config)
    assert np.isnan(results["out"]).all() and np.isnan(results["final_state"]).all()


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=SLOW if n else ()) for n, case in enumerate(CASES)]
)
def test_agrees_as_on_a_device(case):
    config = default_config(*make(case), SM_90)
    assert config.float32_dot == "tf32x3"
    cases.check(case, ON_DEVICE, config)


LARGE: dict[str, Any] = dict(T=40, D=16, V=16, initial_state=True, log_decays=-1e-6)
PAST = {
    "no decay": dict(),
    "constant": dict(decay=CONSTANT),
    "one a token": dict(decay=SCALAR, beta=1.0),
    "by key": dict(decay=KEY),
    "delta": dict(delta=True, beta=1.0),
    "delta, by key": dict(delta=True, beta=1.0, decay=KEY),
}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name, single",
    [(name, False) for name in PAST] + [(name, True) for name in ("no decay", "constant", "one a token")],
)
@pytest.mark.parametrize("state, gradient", [(2e5, 2**-7), (2**-7, 2e5)])
def test_states_past_the_largest_float16(name, single, state, gradient):
    """States or their gradients go from chunk to chunk, operands and results stay small."""
    case = Case(name, **ONE, **LARGE, **PAST[name])
    arrays, spec = make(case)
    assert arrays.initial_state is not None
    small = {name: getattr(arrays, name) * jnp.float16(2**-7) for name in "qkv"}
    arrays = arrays._replace(**small, initial_state=arrays.initial_state * state)
    dout, dstate = cases.cotangents(case)
    given = arrays, dout * jnp.float16(2**-7), dstate * gradient, spec
    config = dataclasses.replace(default_config(arrays, spec, SM_90), chunk_size=16, single=single)
    exact = cases.run_reference(*given)
    assert max(np.abs(exact.final_state).max(), np.abs(given[2]).max()) > 2 * 65504
    cases.assert_agrees(case, cases.by_kernels(ON_DEVICE, *given, config), exact)


@pytest.mark.slow
def test_a_state_that_grows_past_the_largest_float16():
    """Four in every key and value: after 4,096 tokens no float16 holds the state; the outputs are small."""
    case = Case("grows", **ONE, T=4224, D=16, V=16)
    arrays, spec = make(case)
    four = jnp.full_like(arrays.k, 4)
    arrays = arrays._replace(q=jnp.full_like(four, 2**-6), k=four, v=four)
    config = dataclasses.replace(default_config(arrays, spec, SM_90), chunk_size=256)
    results = ON_DEVICE.forward(arrays, spec, config)
    tokens = np.arange(1, case.T + 1)
    np.testing.assert_allclose(np.asarray(results["out"], np.float64)[0, :, 0, 0], tokens, rtol=2e-3)
    np.testing.assert_array_equal(results["final_state"], 16.0 * case.T)
