"""Taking times: what is launched, how often, and that nothing of it is optimised away."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx import TuneOptions, TuningError
from ejkernel_eqx.tuning import inside_trace
from tests.arrays import normal
from tests.tuning.parts import measure

FEW = {"samples": 3, "sample_ms": 0.5}


def test_any_function_and_any_result():
    linear = eqx.nn.Linear(3, 2, key=jax.random.key(0))

    def fn(layer, x, activation, *, scale):
        y = activation(layer(x)) * scale
        return {"y": (y, None, "text"), "n": 3, "empty": ()}

    timing = ejx.benchmark(fn, linear, np.ones(3, np.float32), jax.nn.relu, scale=2.0, **FEW)
    assert len(timing.samples) == 3 and timing.ms == sorted(timing.samples)[1] > 0
    assert timing.spread == pytest.approx((max(timing.samples) - min(timing.samples)) / timing.ms)
    assert ejx.benchmark(lambda: jnp.zeros(3), **FEW).ms > 0


def test_without_jit_the_function_itself_is_called():
    calls = []
    timing = ejx.benchmark(lambda x, y: calls.append(y) or x, jnp.ones(2), y=5, jit=False, **FEW)
    assert len(calls) >= 3 * timing.launches and set(calls) == {5}


def test_launches_rotate_through_the_input_sets(monkeypatch):
    seen = []

    def host(x):
        seen.append(int(x))
        return np.asarray(x)

    fn = lambda x: jax.pure_callback(host, jax.ShapeDtypeStruct((), jnp.int32), x)
    monkeypatch.setattr(measure, "runs_needed", lambda ms, floor: 1)
    monkeypatch.setattr(measure, "_launches", lambda work, seconds: 3)
    ejx.benchmark(fn, jnp.int32(0), input_sets=[(jnp.int32(1),), (jnp.int32(2),)], **FEW)
    assert set(seen) == {0, 1, 2}


@pytest.mark.gpu
def test_repeated_runs_are_neither_merged_nor_dropped():
    """A product of matrices stands in the program as often as it is run; on a GPU in the optimised one, too."""
    x = normal(0, (64, 64))
    lowered = jax.jit(measure.repeated(lambda x: {"y": jnp.dot(x, x)}, 5)).lower(x)
    assert lowered.as_text().count("dot_general") == 5
    assert lowered.as_text().count("optimization_barrier") == 4
    compiled = lowered.compile()
    for results in compiled(x):
        np.testing.assert_array_equal(results["y"], jax.jit(jnp.dot)(x, x))
    if jax.default_backend() == "gpu":
        once = jax.jit(lambda x: {"y": jnp.dot(x, x)}).lower(x).compile()
        calls = [
            len(re.findall(r"custom-call\(| fusion\(", str(program.as_text())))
            for program in (once, compiled)
        ]
        assert calls[1] >= 5 * calls[0] > 0


@pytest.mark.gpu
def test_what_is_short_is_run_several_times_in_a_launch():
    """On a CPU never."""
    expected = {4.0: 1, 100.0: 1, 3.0: 4, 2.0: 8, 1.0: 16, 0.5: 16}
    found = {ms: measure.runs_needed(ms, floor=1.0) for ms in expected}
    assert found == (dict.fromkeys(expected, 1) if jax.default_backend() == "cpu" else expected)


def test_the_time_of_several_runs_is_divided(monkeypatch):
    taken = iter([measure.Timing(ms, 0.5, (ms,), 7) for ms in (3.0, 1.0, 8.0)])  # once, the floor, four runs
    monkeypatch.setattr(measure, "runs_needed", lambda ms, floor: {(3.0, 1.0): 4}[ms, floor])
    monkeypatch.setattr(measure, "time_in_turn", lambda works, *_, **__: {next(iter(works)): next(taken)})
    assert ejx.benchmark(lambda x: x + 1, jnp.ones(3)) == measure.Timing(2.0, 0.5, (2.0,), 7)


def test_a_trace_is_told_from_a_computation():
    found = {}

    def look(name):
        def function(x):
            found[name] = inside_trace()
            if found[name]:
                with pytest.raises(TuningError, match=r"benchmark: nothing can be timed inside jit"):
                    ejx.benchmark(jnp.sin, x)
            return x

        return function

    x = jnp.ones(2)
    look("none")(x)
    jax.vmap(look("vmap"))(x)
    jax.grad(lambda x: look("grad")(x).sum())(x)
    jax.jit(look("jit"))(x)
    jax.vmap(jax.jit(look("vmap of jit")))(x)
    jax.eval_shape(look("eval_shape"), x)
    jax.lax.map(look("map"), x)
    assert {name for name, inside in found.items() if not inside} == {"none", "vmap", "grad"}
    assert set(found) - {"none", "vmap", "grad"} == {"jit", "vmap of jit", "eval_shape", "map"}


@pytest.mark.parametrize(
    ("option", "value"),
    [("isolate", "no"), ("max_candidates", True), ("time_budget", "a"), ("target", "zz"), ("jobs", 0), ("samples", 0), ("sample_ms", -1.0)],
)  # fmt: skip
def test_options_that_mean_nothing_are_refused(option, value, unchecked):
    with pytest.raises(ValueError, match=f"TuneOptions.{option}: expected .* received {value!r}"):
        TuneOptions(**{option: value})
