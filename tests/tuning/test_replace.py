"""`replan` and `with_config`: new plans for the kernels of a pytree, and for what must match it."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx import Platform
from tests.tuning.parts import memory_cache, plans_of, Tier
from tests.tuning.scaling import OPERATION, problem_of, Scale, ScaleConfig

X = jax.ShapeDtypeStruct((8,), jnp.float32)


def chosen(kernel):
    with ejx.recording() as calls:
        eqx.filter_eval_shape(kernel, X)
    (call,) = calls
    return call.config, call.tier


def model_and_state() -> tuple[Any, Any]:
    model = {"a": [Scale(), Scale(inner=Scale())], "weight": jnp.ones(3)}
    return model, optax.adam(1e-3).init(eqx.filter(model, eqx.is_array))


def test_replan_reads_the_tables_as_they_now_stand():
    model, state = model_and_state()
    given = Scale(config=ScaleConfig(9))
    with ejx.overlay_cache({OPERATION: ScaleConfig(7)}):
        under_overlay = Scale()
    memory_cache.put(Platform.XLA, problem_of(X).key(), ScaleConfig(5))
    assert chosen(model["a"][0]) == (ScaleConfig(1), Tier.HEURISTIC)
    new, new_state = ejx.replan(model, state)
    assert chosen(new["a"][0]) == chosen(new["a"][1].inner) == (ScaleConfig(5), Tier.MEMORY)
    assert chosen(ejx.replan(given)) == (ScaleConfig(9), Tier.OVERRIDE)
    assert chosen(ejx.replan(under_overlay)) == (ScaleConfig(5), Tier.MEMORY)
    assert jax.tree.structure(new_state[0].mu) == jax.tree.structure(eqx.filter(new, eqx.is_array))
    assert chosen(model["a"][0]) == (ScaleConfig(1), Tier.HEURISTIC)  # the original is untouched


def test_with_config_by_path_and_by_operation():
    model, _ = model_and_state()
    assert list(plans_of(model)) == ["['a'][0]", "['a'][1].inner", "['a'][1]"]
    new = ejx.with_config(model, {"['a'][1].inner": ScaleConfig(3)})
    assert chosen(new["a"][0]) == (ScaleConfig(1), Tier.HEURISTIC)
    assert new["a"][1].inner == Scale(config=ScaleConfig(3))
    new = ejx.with_config(model, {OPERATION: ScaleConfig(4), "['a'][0]": ScaleConfig(6)})
    expected = [ScaleConfig(block) for block in (6, 4, 4)]
    assert [plan.snapshot.override for plan in plans_of(new).values()] == expected
    assert plans_of(ejx.with_config(new, {OPERATION: None})) == plans_of(model)
    np.testing.assert_array_equal(new["a"][1](jnp.ones(8)), model["a"][1](jnp.ones(8)))


def test_paths_are_those_that_explain_shows():
    model, _ = model_and_state()
    for choice in ejx.explain(model).choices:
        ejx.with_config(model, {choice.path: ScaleConfig(3)})


def test_with_config_changes_copies_of_the_model_alike():
    model, state = model_and_state()
    new, new_state, unrelated = ejx.with_config(model, {"['a'][0]": ScaleConfig(3)}, state, jnp.ones(2))
    mu = new_state[0].mu
    assert jax.tree.structure(mu) == jax.tree.structure(eqx.filter(new, eqx.is_array))
    assert jax.tree.structure(mu) != jax.tree.structure(state[0].mu)
    np.testing.assert_array_equal(unrelated, jnp.ones(2))
    with pytest.raises(ValueError, match=r"others\[0\].*copy of the model's kernels"):
        ejx.with_config(model, {OPERATION: ScaleConfig(3)}, [Scale()])


def test_with_config_refuses_what_does_not_fit():
    model, _ = model_and_state()
    with pytest.raises(ValueError, match=r"\['a'\]\[0\].*tests.scaling.*received '.layers'.*explain"):
        ejx.with_config(model, {".layers": ScaleConfig(1)})
    with pytest.raises(ValueError, match=r"configs\[.*\['a'\]\[0\].*ScaleConfig.*received 'nonsense'"):
        ejx.with_config(model, {"['a'][0]": "nonsense"})
