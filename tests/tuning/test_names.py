"""The names that ejKernel's users know."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

import ejkernel_eqx as ejx
from ejkernel_eqx import Platform
from tests.tolerances import assert_close
from tests.tuning.parts import default_config, device_facts, memory_cache, Tier
from tests.tuning.scaling import problem_of, QUICK, Scale, ScaleConfig

pytestmark = pytest.mark.usefixtures("second_wins")


def test_recorded_calls_are_tuned_later():
    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    assert ejx.get_invocations() == ()
    (call,) = ejx.record_invocation(Scale(), x)
    ejx.record_invocation(Scale(), x)
    given = ejx.record_invocation(Scale(config=ScaleConfig(7)), x)
    assert ejx.get_invocations() == (call, *given)
    assert (call.config, call.tier) == (ScaleConfig(1), Tier.HEURISTIC)
    tuned, untouched = ejx.autotune_recorded(options=QUICK)
    assert (tuned.problem, tuned.config, tuned.tier) == (problem_of(x), ScaleConfig(2), Tier.MEMORY)
    assert untouched == given[0]
    assert memory_cache.get(Platform.XLA, problem_of(x).key()) == ScaleConfig(2)
    ejx.clear_invocations()
    assert ejx.get_invocations() == () == ejx.autotune_recorded(options=QUICK)


def qkv():
    return tuple(jax.random.normal(key, (4, 16, 2, 8)) for key in jax.random.split(jax.random.key(0), 3))


@pytest.mark.parametrize("given", [False, True])
def test_pmap_with_config(given):
    q, k, v = qkv()
    kernel = ejx.FlashAttention(causal=True)
    config = default_config(None, device_facts()) if given else None
    mesh = jax.make_mesh((2,), ("batch",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    spec = PartitionSpec("batch")
    mapped = ejx.pmap_with_config(kernel, config, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec)
    with ejx.recording() as calls:
        out = jax.jit(mapped)(q, k, v)
    (call,) = calls
    assert call.problem.dim("B") == 2 and call.tier is (Tier.OVERRIDE if given else Tier.HEURISTIC)
    assert out.sharding.device_set == set(mesh.devices.flat)
    assert_close(out, kernel(q, k, v))


def test_a_configuration_of_another_kernel_is_refused():
    with pytest.raises(ValueError, match="ScaleConfig"):
        ejx.vmap_with_config(Scale(), default_config(None, device_facts()))
