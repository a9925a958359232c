"""The names that ejKernel's users know."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

import ejkernel_eqx as ejx
from ejkernel_eqx.attention.xla import default_config
from ejkernel_eqx.dispatch import device_facts, memory_cache, Platform, Tier
from ejkernel_eqx.tuning.names import (
    autotune_recorded,
    clear_invocations,
    get_invocations,
    pmap_with_config,
    record_invocation,
    vmap_with_config,
)
from ejkernel_eqx.tuning.recording import recording
from tests.tolerances import assert_close
from tests.tuning.scaling import nothing_in_memory, problem_of, QUICK, Scale, ScaleConfig, SLOW_VARIABLE


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch, tmp_path):
    monkeypatch.setenv("EJKERNEL_EQX_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv(SLOW_VARIABLE, "1")
    with nothing_in_memory():
        yield
        clear_invocations()


def test_recorded_calls_are_tuned_later():
    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    assert get_invocations() == ()
    (call,) = record_invocation(Scale(), x)
    record_invocation(Scale(), x)
    given = record_invocation(Scale(config=ScaleConfig(7)), x)
    assert get_invocations() == (call, *given)
    assert (call.config, call.tier) == (ScaleConfig(1), Tier.HEURISTIC)
    tuned, untouched = autotune_recorded(options=QUICK)
    assert (tuned.problem, tuned.config, tuned.tier) == (problem_of(x), ScaleConfig(2), Tier.MEMORY)
    assert untouched == given[0]
    assert memory_cache.get(Platform.XLA, problem_of(x).key()) == ScaleConfig(2)
    clear_invocations()
    assert get_invocations() == () == autotune_recorded(options=QUICK)


def qkv():
    return tuple(jax.random.normal(key, (4, 16, 2, 8)) for key in jax.random.split(jax.random.key(0), 3))


@pytest.mark.few(1)
@pytest.mark.parametrize("given", [False, True])
def test_vmap_with_config(given):
    q, k, v = qkv()
    kernel = ejx.FlashAttention(causal=True)
    config = default_config(None, device_facts()) if given else None
    mapped = vmap_with_config(kernel, config, in_axes=(0, None, 0))
    with recording() as calls:
        out = mapped(q, k[0], v)
    assert [(call.config, call.tier) for call in calls] == [
        (default_config(None, device_facts()), Tier.OVERRIDE if given else Tier.HEURISTIC)
    ]
    assert_close(out[2], kernel(q[2], k[0], v[2]))


@pytest.mark.parametrize("given", [False, True])
def test_pmap_with_config(given):
    q, k, v = qkv()
    kernel = ejx.FlashAttention(causal=True)
    config = default_config(None, device_facts()) if given else None
    mesh = jax.make_mesh((2,), ("batch",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    spec = PartitionSpec("batch")
    mapped = pmap_with_config(kernel, config, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec)
    with recording() as calls:
        out = jax.jit(mapped)(q, k, v)
    (call,) = calls
    assert call.problem.dim("B") == 2 and call.tier is (Tier.OVERRIDE if given else Tier.HEURISTIC)
    assert out.sharding.device_set == set(mesh.devices.flat)
    assert_close(out, kernel(q, k, v))


def test_a_configuration_of_another_kernel_is_refused():
    with pytest.raises(ValueError, match="ScaleConfig"):
        vmap_with_config(Scale(), default_config(None, device_facts()))
