"""`tune` over whole models: what is tuned, how often, and what happens to the model and to what must match it."""

import dataclasses
import logging
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx import Platform
from tests.arrays import normal
from tests.tolerances import assert_close
from tests.tuning.parts import memory_cache, plans_of, settle, Tier, tuner
from tests.tuning.scaling import (
    HalfBroken,
    OPERATION,
    problem_of,
    QUICK,
    Scale,
    ScaleConfig,
)

pytestmark = pytest.mark.usefixtures("second_wins")


@pytest.fixture
def tuned(monkeypatch):
    """The problems that the tuner was asked for, in order."""
    asked = []
    original = tuner.tune_problem

    def counted(problem, *args, **kwargs):
        asked.append(problem)
        return original(problem, *args, **kwargs)

    monkeypatch.setattr(tuner, "tune_problem", counted)
    return asked


def shape(n, dtype=jnp.float32):
    return jax.ShapeDtypeStruct((n,), dtype)


def choices(model, *args):
    """(configuration, tier) of every choice of a call."""
    with ejx.recording() as calls:
        eqx.filter_eval_shape(model, *args)
    return [(call.config, call.tier) for call in calls]


@pytest.mark.slow
def test_an_optimiser_state_made_before_goes_on_matching():
    model = eqx.nn.Sequential([eqx.nn.Linear(8, 8, key=jax.random.key(0)), Scale()])
    optimiser = optax.adam(1e-3)
    state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))
    x = jnp.ones(8)
    new, new_state = ejx.tune(model, x, others=state, options=QUICK)
    assert jax.tree.structure(new_state) != jax.tree.structure(state)
    gradient = eqx.filter_grad(lambda model: jnp.sum(model(x) ** 2))(new)
    with jax.numpy_dtype_promotion("standard"):  # which optax needs
        updates, _ = optimiser.update(gradient, new_state)
    assert choices(eqx.apply_updates(new, updates), x) == [(ScaleConfig(2), Tier.AUTOTUNE)]


class Pair(NamedTuple):
    first: Any
    second: Any


@pytest.mark.slow
def test_kernels_are_found_wherever_they_are(tuned):
    x = jnp.ones(8)
    model = {
        "list": [Scale(), (Scale(),)],
        "pair": Pair(
            eqx.nn.Sequential([Scale()]), jax.tree_util.Partial(lambda kernel, x: kernel(x), Scale())
        ),
        "nested": Scale(inner=Scale(inner=Scale())),
        "mapped": eqx.filter_vmap(Scale()),
        "none": None,
    }

    def call(model, x):
        parts = model["list"][0], model["list"][1][0], *model["pair"], model["nested"]
        return [part(x) for part in parts], model["mapped"](x[None])

    with ejx.recording() as calls:
        expected = call(model, x)
    assert len(plans_of(model)) == 8
    new = ejx.tune(model, x, call=call, options=QUICK)
    assert len(tuned) == len({call.problem.key() for call in calls}) == 1
    assert jax.tree.structure(new) != jax.tree.structure(model)
    assert {plan.select(problem_of(x)).config for plan in plans_of(new).values()} == {ScaleConfig(2)}
    assert {config for config, _ in choices(call, new, x)} == {ScaleConfig(2)}
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), call(new, x), expected))


@pytest.mark.slow
def test_shapes_arrays_and_keywords_may_be_mixed(tuned):
    def call(model, batch, *, key, scale):
        return model(batch["x"]) * scale, model(batch["pair"][0]) + jax.random.normal(key)

    batch = {"x": shape(8), "pair": (jnp.ones(16), None)}
    new = ejx.tune(Scale(), batch, key=jax.random.key(0), scale=2.0, call=call, options=QUICK)
    assert [problem.dim("N") for problem in tuned] == [8, 16]
    assert {config for config, _ in choices(new, shape(16))} == {ScaleConfig(2)}


@pytest.mark.slow
def test_what_is_known_is_not_tuned_again_unless_forced(tuned):
    x = jnp.ones(8)
    ejx.tune(Scale(), x, options=QUICK)
    ejx.tune(Scale(), x, options=QUICK)
    memory_cache.clear()  # the user's table still knows
    new = ejx.tune(Scale(), x, options=QUICK)
    assert len(tuned) == 1 and choices(new, x) == [(ScaleConfig(2), Tier.PERSISTENT)]
    assert choices(ejx.tune(Scale(), x, options=QUICK, force=True), x) == [(ScaleConfig(2), Tier.AUTOTUNE)]
    assert len(tuned) == 2
    with ejx.policy_override("force"):
        ejx.tune(Scale(), x, options=QUICK)
    assert len(tuned) == 3


def test_what_was_given_is_left_alone(tuned):
    with ejx.overlay_cache({OPERATION: ScaleConfig(4)}):
        under_overlay = Scale()
    model = [Scale(config=ScaleConfig(3)), under_overlay]
    call = lambda model, x: [kernel(x) for kernel in model]
    new = ejx.tune(model, shape(8), call=call, options=QUICK)
    assert tuned == [] and new == model
    new = ejx.tune([*model, Scale()], shape(8), call=call, options=QUICK)
    assert len(tuned) == 1
    assert choices(call, new, shape(8)) == [
        (ScaleConfig(3), Tier.OVERRIDE),
        (ScaleConfig(4), Tier.OVERLAY),
        (ScaleConfig(2), Tier.AUTOTUNE),
    ]


@pytest.mark.slow
def test_a_platform_that_is_wrong_gives_way_to_the_next(tuned):
    x = jnp.ones(8)
    with ejx.recording() as calls:
        HalfBroken()(x)
    new = ejx.tune(HalfBroken(), x, options=QUICK)
    with ejx.recording() as now:
        new(x)
    assert [call.platform for call in (*calls, *now)] == [Platform.PALLAS, Platform.XLA]
    assert now[0].config == ScaleConfig(2) and len(tuned) == 2
    (choice,) = ejx.explain(new, x).choices
    assert "every configuration was denied" in dict(choice.rejected)["pallas"]


@pytest.mark.slow
def test_a_kernel_outside_the_pytree_is_named(caplog):
    captured = Scale()
    with caplog.at_level(logging.WARNING, "ejkernel_eqx"):
        ejx.tune(Scale(), shape(8), call=lambda model, x: model(x), options=QUICK)
        assert caplog.records == []
        new = ejx.tune(Scale(), shape(16), call=lambda model, x: model(captured(x)), options=QUICK)
    (record,) = caplog.records
    assert OPERATION in record.getMessage() and str(problem_of(shape(16))) in record.getMessage()
    assert choices(new, shape(16)) == [(ScaleConfig(2), Tier.AUTOTUNE)]
    assert choices(captured, shape(16)) == [(ScaleConfig(1), Tier.HEURISTIC)]
    assert choices(Scale(), shape(16)) == [(ScaleConfig(2), Tier.MEMORY)]


def test_a_model_without_kernels_is_returned_with_a_warning(caplog):
    model = eqx.nn.Linear(4, 4, key=jax.random.key(0))
    with caplog.at_level(logging.WARNING, "ejkernel_eqx"):
        new = ejx.tune(model, shape(4), options=QUICK)
    assert eqx.tree_equal(new, model)
    (record,) = caplog.records
    assert "no kernel" in record.getMessage()


def test_one_configuration_is_no_table(caplog):
    """Neither the first time nor when this process knows it."""
    single = dataclasses.replace(QUICK, max_candidates=1)
    with caplog.at_level(logging.INFO, "ejkernel_eqx"):
        ejx.tune(ejx.tune(Scale(), shape(8), options=single), shape(8), options=single)
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("ejx.tune")]
    expected = (
        "1 distinct problem: 0 tuned, 0 known from tables, 0 failed, 1 with only one configuration, in "
    )
    assert len(lines) == 2 and all(expected in line for line in lines)


def test_where_tuning_is_refused():
    with ejx.policy_override("heuristic"), pytest.raises(ejx.TuningError, match="policy 'heuristic' forbids"):
        ejx.tune(Scale(), shape(8), options=QUICK)
    with pytest.raises(ejx.TuningError, match="inside jit"):
        jax.jit(lambda x: ejx.tune(Scale(), x, options=QUICK)(x))(jnp.ones(8))
    with pytest.raises(ValueError, match=r"call="):
        ejx.tune([Scale()], shape(8), options=QUICK)


def test_what_the_call_raises_is_passed_on():
    q = jnp.ones((16, 2, 8))
    with pytest.raises(ValueError, match="v: expected") as direct:
        ejx.FlashAttention()(q, q, q[:5])
    with pytest.raises(ValueError) as through:
        ejx.tune(ejx.FlashAttention(), q, q, q[:5], options=QUICK)
    assert str(through.value) == str(direct.value)


@pytest.mark.slow
def test_tune_for_takes_the_same_path(tuned):
    x = jnp.ones(8)
    with ejx.tuning_options(max_candidates=2, samples=2, sample_ms=1.0, isolate=False, progress=False):
        plan = settle(Scale(), ejx.inputs(x))  # what every operation does with `tune_for=`
    new = ejx.tune(Scale(), x, options=QUICK)
    assert len(tuned) == 1 and new.plan == plan and choices(new, x)[0][0] == ScaleConfig(2)


def test_gradients_ask_for_no_problem_of_their_own(tuned):
    q = normal(0, (16, 2, 8))
    loss = lambda model, q: jnp.sum(model(q, q, q) ** 2)
    new = ejx.tune(
        ejx.FlashAttention(), q, call=eqx.filter_value_and_grad(lambda m, q: loss(m, q)), options=QUICK
    )
    assert len(tuned) == 1 and new == ejx.tune(ejx.FlashAttention(), q, call=loss, options=QUICK)
    actual, expected = (jax.grad(lambda q, m=m: loss(m, q))(q) for m in (new, ejx.FlashAttention()))
    assert_close(actual, expected, kind="gradient")


@pytest.mark.slow
def test_autotune_among_given_configurations(tuned):
    x, y = jnp.ones(8), jnp.ones(16)
    assert choices(ejx.autotune(Scale(), y, options=QUICK), y) == [(ScaleConfig(2), Tier.AUTOTUNE)]
    new = ejx.autotune(Scale(), x, configs=[ScaleConfig(6)], options=QUICK)
    assert choices(new, x) == [(ScaleConfig(6), Tier.AUTOTUNE)]
    np.testing.assert_array_equal(new(x), 2 * x)
    with pytest.raises(ValueError, match=r"ScaleConfig.*'nonsense'"):
        ejx.autotune(Scale(), x, configs=["nonsense"], options=QUICK)
    with pytest.raises(ValueError, match="built with config=ScaleConfig"):
        ejx.autotune(Scale(config=ScaleConfig(1)), x, options=QUICK)
