"""The elementwise formulas: values, where they could overflow, and gradients at the edges."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx.recurrence import gates
from tests.arrays import normal
from tests.tolerances import assert_close

EXTREMES = jnp.array([-1e4, -100.0, -20.0, -1e-6, 0.0, 1e-6, 20.0, 100.0, 1e4])


def elementwise_gradient(function, x):
    return jax.grad(lambda x: function(x).sum())(x)


def test_softplus_neither_overflows_nor_loses_small_values():
    wide = np.logaddexp(np.asarray(EXTREMES, np.float64), 0)
    assert_close(gates.softplus(EXTREMES), wide)
    assert_close(gates.softplus(jnp.float32(-50.0)), np.exp(np.float64(-50.0)))
    assert_close(elementwise_gradient(gates.softplus, EXTREMES), jax.nn.sigmoid(EXTREMES))


@pytest.mark.parametrize("gate, bound", [("softplus", None), ("bounded", -5.0)])
def test_decays_never_rise_and_stay_finite(gate, bound):
    for A_log in (-20.0, 0.0, 5.0):
        rate, bias = jnp.float32(A_log), jnp.float32(0.5)
        function = lambda x, rate=rate, bias=bias: gates.log_decay(gate, bound, x, rate, bias)
        g = function(EXTREMES)
        assert jnp.isfinite(g).all() and (g <= 0).all() and (bound is None or (g >= bound).all())
        assert jnp.isfinite(elementwise_gradient(function, EXTREMES)).all()


@pytest.mark.parametrize("gate, bound", [("softplus", None), ("bounded", -5.0)])
def test_rates_beyond_the_largest_number(gate, bound):
    """A state that such a decay clears says nothing of it: its gradient of 0 reaches `A_log` and the raw number as 0."""
    raw = jnp.array([-200.0, -1.0, 0.5, 300.0])
    function = lambda A_log, raw: gates.log_decay(gate, bound, raw, A_log, None)
    for A_log in (88.5, 89.0, 1e4, jnp.inf):
        g, pull = jax.vjp(function, jnp.full(4, A_log, jnp.float32), raw)
        assert g[2] < -1e37 or (g[2] == bound == g[3] and g[0] == 0)
        for gradient in pull(jnp.zeros(4)):
            np.testing.assert_array_equal(gradient, 0)
    # Fast and slow cancel: e^87 and log(1 + e^-86).
    cancelled = gates.log_decay("softplus", None, jnp.float32(-86.0), jnp.float32(87.0), None)
    assert_close(cancelled, -np.exp(np.float64(1)), kind="gradient")


def test_gates_of_sixteen_bits_are_computed_in_float32():
    raw = jnp.linspace(-3, 3, 7).astype(jnp.bfloat16)
    one = jnp.ones((), jnp.bfloat16)
    wide = raw.astype(jnp.float32)
    for gate, bound in (("softplus", None), ("bounded", -5.0)):
        got = gates.log_decay(gate, bound, raw, one, one)
        assert_close(got, gates.log_decay(gate, bound, wide, jnp.float32(1), jnp.float32(1)), jnp.float32)
    assert_close(gates.write_strength(raw, True, True), 2 * jax.nn.sigmoid(wide), jnp.float32)
    assert_close(gates.write_strength(raw, False, True), 2 * wide, jnp.float32)
    assert_close(gates.time_step(raw, one, True, None), jnp.logaddexp(wide + 1.0, 0.0), jnp.float32)
    assert gates.write_strength(raw, False, False) is raw
    assert gates.l2norm(raw).dtype == jnp.bfloat16


def test_derivatives_of_l2norm():
    x = normal(0, (4, 5)) * jnp.array([[1.0], [1e-3], [30.0], [0.0]])
    weight = normal(1, (4, 5))
    plain = lambda x: x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
    of = lambda norm: lambda x: jnp.sum(weight * norm(x))
    squared = lambda norm: lambda x: jnp.sum(jax.grad(of(norm))(x) ** 2)
    for derivative in (lambda norm: jax.grad(of(norm)), jax.jacfwd, lambda norm: jax.grad(squared(norm))):
        found, wanted = (jax.jit(derivative(norm))(x) for norm in (gates.l2norm, plain))
        assert_close(found, np.asarray(wanted, np.float64), kind="gradient")


def test_time_steps_have_no_gradient_outside_their_bounds_and_all_of_it_on_them():
    dt = jnp.array([-1.0, 0.25, 0.5, 1.0, 1.5])
    function = lambda dt: gates.time_step(dt, None, False, (0.25, 1.0))
    np.testing.assert_array_equal(function(dt), [0.25, 0.25, 0.5, 1.0, 1.0])
    np.testing.assert_array_equal(elementwise_gradient(function, dt), [0, 1, 1, 1, 0])
    bounded = gates.time_step(EXTREMES, jnp.float32(1.0), True, (0.0, float("inf")))
    assert jnp.isfinite(bounded).all() and (bounded >= 0).all()


def test_gated_outputs():
    y, z = jnp.array([1.0, 2.0], jnp.bfloat16), jnp.array([-1.0, 3.0], jnp.bfloat16)
    got = gates.silu_gated(y, z)
    assert_close(got, y.astype(jnp.float32) * jax.nn.silu(z.astype(jnp.float32)), jnp.float32)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("softplus", -1.0), "lower_bound: expected None with gate='softplus', received -1.0"),
        (("bounded", 0.0), "lower_bound: expected a negative number"),
        (("bounded", float("-inf")), "lower_bound: expected a negative number"),
    ],
)
def test_gates_that_are_none(arguments, message):
    with pytest.raises(ValueError, match=message):
        gates.check_gate(*arguments)


@pytest.mark.parametrize("limit", [(-1.0, 1.0), (0.1,), 3.0, (float("nan"), 1.0)])
def test_limits_that_are_none(limit):
    with pytest.raises(ValueError, match=r"dt_limit: expected \(low, high\) with 0 <= low <= high or None"):
        gates.check_limit(limit)
