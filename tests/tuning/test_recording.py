"""What `recording` sees: every distinct choice, in order, also of functions that were compiled before."""

import equinox as eqx
import jax
import jax.numpy as jnp

import ejkernel_eqx as ejx
from ejkernel_eqx import Platform
from tests.tuning.parts import memory_cache, Tier
from tests.tuning.scaling import OPERATION, problem_of, Scale, ScaleConfig


def shape(n):
    return jax.ShapeDtypeStruct((n,), jnp.float32)


def test_distinct_choices_in_order():
    memory_cache.put(Platform.XLA, problem_of(shape(64)).key(), ScaleConfig(5))
    kernel, given = Scale(), Scale(config=ScaleConfig(7))
    with ejx.recording() as calls:
        assert calls == []
        for n in (8, 64, 8):
            kernel(jnp.ones(n))
        assert len(calls) == 2  # filled while it is open
        given(jnp.ones(8))
    kernel(jnp.ones(16))
    assert [(c.problem, c.config, c.tier) for c in calls] == [
        (problem_of(shape(8)), ScaleConfig(1), Tier.HEURISTIC),
        (problem_of(shape(64)), ScaleConfig(5), Tier.MEMORY),
        (problem_of(shape(8)), ScaleConfig(7), Tier.OVERRIDE),
    ]
    assert {(c.operation, c.platform) for c in calls} == {(OPERATION, Platform.XLA)}
    assert calls[1].origin and calls[1].origin in str(calls[1])


def test_functions_compiled_before_are_seen_each_time():
    kernel = Scale()
    step = eqx.filter_jit(lambda x: jnp.sum(kernel(x)))
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(kernel(x) ** 2)))
    x = jnp.arange(8.0)
    before = step(x), gradient(x)
    for _ in range(2):
        with ejx.recording() as calls:
            assert step(x) == before[0]
        assert [call.problem.dim("N") for call in calls] == [8]
        with ejx.recording() as calls:
            assert (gradient(x) == before[1]).all()
        assert [call.problem.dim("N") for call in calls] == [8]


def test_recordings_inside_each_other_both_see():
    with ejx.recording() as outer:
        Scale()(jnp.ones(4))
        with ejx.recording() as inner:
            Scale()(jnp.ones(8))
    assert [c.problem.dim("N") for c in outer] == [4, 8]
    assert [c.problem.dim("N") for c in inner] == [8]
