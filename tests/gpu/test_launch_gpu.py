"""Both ways to launch a kernel, our own and jax-triton's, on a device: the same bits, whatever the arguments.

python -m pytest tests/gpu/test_launch_gpu.py
"""

import dataclasses
import functools
import os
import subprocess
import sys
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx.launch import Launch, run
from tests.launch import kernels
from tests.launch.launches import added

if jax.default_backend() != "gpu":
    pytest.skip("needs a GPU", allow_module_level=True)

from ejkernel_eqx.launch.own_call import own_target

pytestmark = pytest.mark.gpu
NEEDS = "ragged_paged_attention"
S = jax.ShapeDtypeStruct
WAYS = ("own", "jax-triton")


@pytest.fixture(autouse=True)
def _own():
    if own_target() is None:
        pytest.skip("jax-triton launches here")


def both(monkeypatch: Any, launch: Launch, arrays: dict[str, Any]) -> dict[str, Any]:
    """The results of our own launch, which are those of jax-triton, and of the interpreter."""
    found = {}
    for way in WAYS:
        monkeypatch.setenv("EJKERNEL_EQX_LAUNCH", way)
        found[way] = jax.jit(functools.partial(run, launch))(arrays)
    for name, ours in found["own"].items():
        np.testing.assert_array_equal(ours, found["jax-triton"][name])
    return found["own"]


def square(n: int, **options: Any) -> Launch:
    shape = S((64,), jnp.float32)
    return Launch(
        kernels.square_kernel, {"x": shape}, {"out": shape}, {"n": n}, {"BLOCK": 16}, (4,), **options
    )


@pytest.mark.parametrize("n", [0, 1, 2, 63, -3])
def test_numbers(monkeypatch, n):
    x = jnp.arange(1.0, 65.0)
    out = both(monkeypatch, square(n), {"x": x})["out"]
    np.testing.assert_array_equal(out[: max(n, 0)], (x * x)[: max(n, 0)])


@pytest.mark.parametrize("n", [2**31, 2**40])
def test_numbers_beyond_32_bits(n):
    """By our own launch alone: jax-triton 0.4.1 asks JAX for the type of the number, which is one of 32 bits there."""
    x = jnp.arange(1.0, 65.0)
    np.testing.assert_array_equal(jax.jit(functools.partial(run, square(n)))({"x": x})["out"], x * x)


@pytest.mark.parametrize("options", [{"num_warps": 1}, {"num_warps": 8}, {"max_registers": 32}])
def test_options(monkeypatch, options):
    x = jnp.arange(64.0)
    np.testing.assert_array_equal(both(monkeypatch, square(64, **options), {"x": x})["out"], x * x)


def in_place() -> dict[str, Any]:
    return {"pool": jnp.ones((4, 8)), "amount": jnp.arange(3.0), "slots": jnp.array([2, -1, 0])}


def test_in_place(monkeypatch):
    arrays = in_place()
    found = both(monkeypatch, added(), arrays)
    np.testing.assert_array_equal(found["new_pool"][:, 0], [3, 1, 1, 1])
    np.testing.assert_array_equal(arrays["pool"], np.ones((4, 8)))  # not donated, so it is as it was


@pytest.mark.parametrize("way", WAYS)
def test_a_donated_buffer_is_written(monkeypatch, way):
    monkeypatch.setenv("EJKERNEL_EQX_LAUNCH", way)
    call = jax.jit(lambda pool, rest: run(added(), {"pool": pool, **rest})["new_pool"], donate_argnums=0)
    arrays = in_place()
    pool = jax.device_put(arrays.pop("pool"))
    address = pool.unsafe_buffer_pointer()
    assert call(pool, arrays).unsafe_buffer_pointer() == address and pool.is_deleted()


def test_a_loop_in_a_graph(monkeypatch):
    """Several launches in place become one CUDA graph, from the second call on, and buffers move between calls."""

    def steps(pool: Any, rest: Any) -> Any:
        for _ in range(12):
            pool = run(added(), {"pool": pool, **rest})["new_pool"]
        return pool

    arrays = in_place()
    pool, call = arrays.pop("pool"), jax.jit(steps)
    results = [call(pool, arrays) for _ in range(5)]  # all are kept, so each has another buffer
    for result in results:
        np.testing.assert_array_equal(result[:, 0], [25, 1, 1, 1])


def test_descriptors_and_specialised_warps(monkeypatch):
    """With scratch memory, and with more warps than were asked for, which jax-triton does not launch."""
    a, b = (jax.random.normal(jax.random.key(n), (512 if n else 64, 64), jnp.bfloat16) for n in (1, 0))
    out = {"out": S(a.shape, a.dtype)}
    shapes = {"a": S(a.shape, a.dtype), "b": S(b.shape, b.dtype)}
    launch = Launch(kernels.specialised_kernel, shapes, out, {}, {"SIZE": 64, "STEPS": 8}, (1,))
    found = jax.jit(functools.partial(run, launch))({"a": a, "b": b})["out"]
    expected = a.astype(jnp.float32) @ b.astype(jnp.float32)
    np.testing.assert_allclose(found.astype(jnp.float32), expected, rtol=2e-2, atol=2e-1)


def test_an_output_without_elements(monkeypatch):
    shape = S((0,), jnp.float32)
    launch = dataclasses.replace(square(0), inputs={"x": shape}, grid=(1,))
    both(monkeypatch, launch, {"x": jnp.zeros(0)})


def test_a_compiled_program_is_stored_and_loaded():
    from jax.experimental import serialize_executable

    compiled = jax.jit(functools.partial(run, square(64))).lower({"x": jnp.ones(64)}).compile()
    stored = serialize_executable.serialize(compiled)
    loaded = serialize_executable.deserialize_and_load(*stored, execution_devices=jax.devices()[:1])
    x = jnp.arange(64.0)
    np.testing.assert_array_equal(loaded({"x": x})["out"], x * x)


def test_an_exported_program():
    checks = [jax.export.DisabledSafetyCheck.custom_call("triton_kernel_call_ffi")]
    call = jax.jit(functools.partial(run, square(64)))
    exported = jax.export.export(call, platforms=["cuda"], disabled_checks=checks)({"x": jnp.ones(64)})
    x = jnp.arange(64.0)
    np.testing.assert_array_equal(jax.export.deserialize(exported.serialize()).call({"x": x})["out"], x * x)


def test_a_second_process_finds_the_program(tmp_path):
    """In JAX's cache of compiled programs, with the kernel from Triton's: it compiles nothing."""
    program = """
import collections, jax
events = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **_: events.update([name.rpartition("/")[2]]))
from tests.gpu.test_launch_gpu import added, in_place, run
jax.block_until_ready(jax.jit(lambda arrays: run(added(), arrays))(in_place()))
print(events["cache_hits"], events["cache_misses"])
"""
    own = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "jax"), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    own |= {
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    variables = os.environ | own | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program]
    run_once = functools.partial(
        subprocess.run, command, env=variables, capture_output=True, text=True, check=True
    )
    first, second = (run_once(timeout=500).stdout.split()[-2:] for _ in range(2))
    assert int(first[1]) > 0 and int(second[0]) > 0 and int(second[1]) == 0
