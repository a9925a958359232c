"""Models on a machine with a GPU and a CPU: the kernels are those of the device that is compiled for.

python -m pytest tests/gpu/test_devices_gpu.py -n 0
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from tests.tolerances import assert_close

if jax.default_backend() != "gpu":
    pytest.skip("needs a GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu
CPU, GPU = jax.devices("cpu")[0], jax.devices()[0]


class Model(eqx.Module):
    """Attention and a recurrence, as a language model has them."""

    weight: jax.Array
    attention: ejx.FlashAttention
    rule: ejx.GatedDeltaRule

    def __init__(self, platform: ejx.PlatformLike | None = None):
        self.weight = jax.random.normal(jax.random.key(0), (64, 64), jnp.bfloat16) / 8
        self.attention = ejx.FlashAttention(causal=True, platform=platform)
        self.rule = ejx.GatedDeltaRule(platform=platform)

    def __call__(self, x):
        x = x + self.attention(x @ self.weight, x, x)
        gate = -jnp.ones(x.shape[:-1], jnp.float32) / 8
        out, _ = self.rule(x, x / 8, x, gate, jnp.full(x.shape[:-1], 0.5, x.dtype))
        return x + out


def data() -> Any:
    return jax.random.normal(jax.random.key(1), (2, 256, 4, 64), jnp.bfloat16)


def text_of(model, x) -> str:
    arrays, static = eqx.partition(model, eqx.is_array)
    lowered = jax.jit(lambda arrays, x: eqx.combine(arrays, static)(x)).lower(arrays, x)
    return str(lowered.compile().as_text()).lower()


def choices(model, x):
    return [(choice.platform, choice.device) for choice in ejx.explain(model, x).choices]


def test_a_model_initialised_on_the_cpu_runs_the_kernels_of_the_gpu():
    with jax.default_device(CPU):
        model = Model()
        assert {platform for platform, _ in choices(model, data())} == {"xla"}
        expected = np.asarray(eqx.filter_jit(model)(data()), np.float32)
    moved, x = jax.device_put((model, data()), GPU)
    assert all(
        platform in ("cuda", "triton") and GPU.device_kind in device for platform, device in choices(moved, x)
    )
    text = text_of(moved, x)
    assert "triton" in text and "custom-call" in text
    result = eqx.filter_jit(moved)(x)
    assert result.devices() == {GPU}
    difference = np.asarray(result, np.float32) - expected
    assert np.sqrt(np.mean(difference**2)) < 0.02 * np.sqrt(np.mean(expected**2))
    assert moved.attention.plan == ejx.FlashAttention(causal=True).plan  # as one that is built on the GPU


def test_a_model_of_the_gpu_runs_under_the_cpu():
    model, x = Model(), data()
    with jax.default_device(GPU):
        on_gpu = np.asarray(eqx.filter_jit(model)(x), np.float32)
    on_cpu = jax.device_put(model, CPU)
    with jax.default_device(CPU):
        assert all(platform == "xla" and "cpu" in device for platform, device in choices(on_cpu, x))
        assert "triton" not in text_of(on_cpu, x)
        result = eqx.filter_jit(on_cpu)(x)
    assert result.devices() == {CPU}
    difference = np.asarray(result, np.float32) - on_gpu
    assert np.sqrt(np.mean(difference**2)) < 0.02 * np.sqrt(np.mean(on_gpu**2))


def test_a_platform_of_the_gpu_may_be_asked_for_while_the_cpu_initialises():
    with jax.default_device(CPU):
        model = Model(platform="triton")
        with pytest.raises(ejx.UnsupportedError, match="needs a GPU"):
            model(data())
    x = jax.device_put(data(), GPU)
    assert {platform for platform, _ in choices(model, x)} == {"triton"}
    assert "triton" in text_of(jax.device_put(model, GPU), x)


def test_a_mesh_of_gpus_decides_over_the_default_device():
    mesh = jax.make_mesh((1,), ("data",), devices=[GPU])
    with jax.default_device(CPU):
        model = Model()
        with jax.set_mesh(mesh):
            found = choices(model, jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16))
    assert all(platform != "xla" and GPU.device_kind in device for platform, device in found)


@jax.default_matmul_precision("highest")
def test_a_layer_decodes_outside_of_jit_until_its_cache_is_full():
    """Calls compiled by the layer itself give what the user's program gives. A full cache is an error in the former, and closes its rows in the
    latter."""
    layer = ejx.nn.MultiHeadAttention(64, num_heads=4, causal=True, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (2, 6, 64))
    step = eqx.filter_jit(lambda layer, x, cache: layer(x, cache=cache))
    whole = layer(x)
    for call in (lambda layer, x, cache: layer(x, cache=cache), step):
        cache = layer.init_cache((2,), 6)
        outputs = []
        for t in (slice(0, 3), slice(3, 4), slice(4, 6)):
            y, cache = call(layer, x[:, t], cache)
            outputs.append(y)
        assert_close(jnp.concatenate(outputs, 1), whole)
        if call is step:
            y, cache = call(layer, x[:, :1], cache)
            assert jnp.all(jnp.isnan(y)) and jnp.all(cache.overflowed) and jnp.all(cache.lengths == 6)
        else:
            with pytest.raises(ValueError, match="KVCache is full: max_length=6"):
                call(layer, x[:, :1], cache)
