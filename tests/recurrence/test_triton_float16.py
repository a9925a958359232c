"""Float16 operands as an NVIDIA device multiplies them, interpreted: what becomes float32 on the way meets in tf32 products, which cut off
what is behind 11 bits."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx.recurrence.core import problem_of
from ejkernel_eqx.recurrence.spec import CONSTANT, KEY, SCALAR
from tests.compiled import DEVICES
from tests.recurrence.cases import assert_agrees, Case, cotangents, make, PAIRWISE, Result, run_reference

pytest.importorskip("triton")
from ejkernel_eqx.launch import run
from ejkernel_eqx.recurrence.triton import compiled

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
    config = compiled.default_config(problem_of("linear_attention", arrays, spec), DEVICES["sm_90"])
    execute = functools.partial(run, interpret=True)
    results = compiled.forward(arrays._replace(initial_state=jnp.asarray(nan)), spec, config, execute=execute)
    assert np.isnan(results["out"]).all() and np.isnan(results["final_state"]).all()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if case.name in QUICK else pytest.mark.slow)
        for case in CASES
    ],
)
def test_agrees_as_on_a_device(case):
    arrays, spec = make(case)
    config = compiled.default_config(problem_of("linear_attention", arrays, spec), DEVICES["sm_90"])
    assert config.float32_dot == "tf32x3"
    execute = functools.partial(run, interpret=True)
    dout, dstate = cotangents(case)
    results = dict(compiled.forward(arrays, spec, config, execute=execute))
    out, final = results.pop("out"), results.pop("final_state")
    grads = compiled.backward(
        arrays, spec, config, results, {"out": dout, "final_state": dstate}, execute=execute
    )
    grads = {name: jnp.asarray(x, getattr(arrays, name).dtype) for name, x in grads.items()}
    assert_agrees(case, Result(out, final, grads), run_reference(arrays, dout, dstate, spec))


LARGE: dict[str, Any] = dict(T=40, D=16, V=16, initial_state=True)
PAST = (
    Case("no decay", **ONE, **LARGE),
    Case("constant", **ONE, **LARGE, decay=CONSTANT, log_decays=-1e-6),
    Case("one a token", **ONE, **LARGE, decay=SCALAR, log_decays=-1e-6, beta=1.0),
    Case("by key", **ONE, **LARGE, decay=KEY, log_decays=-1e-6),
    Case("delta", **ONE, **LARGE, delta=True, beta=1.0),
    Case("delta, by key", **ONE, **LARGE, delta=True, beta=1.0, decay=KEY, log_decays=-1e-6),
)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "case, single",
    [
        pytest.param(case, single, id=f"{case.name}{', one kernel' * single}")
        for case in PAST
        for single in ((False, True) if not case.delta and case.decay != KEY else (False,))
    ],
)
@pytest.mark.parametrize("state, gradient", [(2e5, 2**-7), (2**-7, 2e5)])
def test_states_past_the_largest_float16(case, single, state, gradient):
    """States or their gradients go from chunk to chunk, operands and results stay small."""
    arrays, spec = make(case)
    assert arrays.initial_state is not None
    small = {name: getattr(arrays, name) * jnp.float16(2**-7) for name in "qkv"}
    arrays = arrays._replace(**small, initial_state=arrays.initial_state * state)
    dout, dstate = cotangents(case)
    dout, dstate = dout * jnp.float16(2**-7), dstate * gradient
    config = compiled.default_config(problem_of("linear_attention", arrays, spec), DEVICES["sm_90"])
    config = dataclasses.replace(config, chunk_size=16, single=single)
    execute = functools.partial(run, interpret=True)
    results = dict(compiled.forward(arrays, spec, config, execute=execute))
    out, final = results.pop("out"), results.pop("final_state")
    grads = compiled.backward(
        arrays, spec, config, results, {"out": dout, "final_state": dstate}, execute=execute
    )
    grads = {name: jnp.asarray(x, getattr(arrays, name).dtype) for name, x in grads.items()}
    exact = run_reference(arrays, dout, dstate, spec)
    assert max(np.abs(exact.final_state).max(), np.abs(dstate).max()) > 2 * 65504
    assert_agrees(case, Result(out, final, grads), exact)


def test_a_state_that_grows_past_the_largest_float16():
    """Four in every key and value: after 4,096 tokens no float16 holds the state; the outputs are small."""
    case = Case("grows", **ONE, T=4224, D=16, V=16)
    arrays, spec = make(case)
    four = jnp.full_like(arrays.k, 4)
    arrays = arrays._replace(q=jnp.full_like(four, 2**-6), k=four, v=four)
    config = compiled.default_config(problem_of("linear_attention", arrays, spec), DEVICES["sm_90"])
    config = dataclasses.replace(config, chunk_size=256)
    results = compiled.forward(arrays, spec, config, execute=functools.partial(run, interpret=True))
    tokens = np.arange(1, case.T + 1)
    np.testing.assert_allclose(np.asarray(results["out"], np.float64)[0, :, 0, 0], tokens, rtol=2e-3)
    np.testing.assert_array_equal(results["final_state"], 16.0 * case.T)
