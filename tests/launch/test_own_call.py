"""Launches that are compiled and staged here, without a GPU: what is traced and lowered, when compilation begins, and which launches share it."""

import concurrent.futures
import importlib
import sys
import threading
import types

import jax
import jax.numpy as jnp
import pytest

from ejkernel_eqx.launch import Launch, run, Target
from ejkernel_eqx.launch.staging import Staged
from tests.launch import kernels

own_call = importlib.import_module("ejkernel_eqx.launch.own_call")
staging = importlib.import_module("ejkernel_eqx.launch.staging")
_run = importlib.import_module("ejkernel_eqx.launch._run")

S = jax.ShapeDtypeStruct
TARGET = Target("sm_90", "cuda", 90, 32, 0)


def square(n=16, block=8, **options):
    shape = S((n,), jnp.float32)
    return Launch(
        kernels.square_kernel,
        {"x": shape},
        {"out": shape},
        {"n": n},
        {"BLOCK": block},
        (n // block,),
        **options,
    )


@pytest.fixture
def begun(monkeypatch):
    """Launches whose compilation has begun; nothing is compiled."""
    seen = []

    def begin(launch, target):
        assert target == TARGET
        seen.append(launch)
        done = concurrent.futures.Future()
        done.set_result(Staged(b"opaque", 384 if launch.num_warps == 2 else 0))
        return done

    monkeypatch.setattr(own_call, "begin", begin)
    monkeypatch.setattr(_run, "own_target", lambda: TARGET)
    return seen


def lowered(function, *arrays):
    return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def test_a_call_is_one_foreign_call(begun):
    x = jnp.ones(16)
    text = lowered(lambda x: run(square(), {"x": x})["out"], x)
    assert text.count("custom_call") == 1 and "triton_kernel_call_ffi" in text and 'opaque = "opaque"' in text
    assert (
        len(begun) == 2
    )  # at the trace, so that it compiles beside the rest of it; and awaited at the lowering


def test_where_programs_write_descriptors_is_a_result(begun):
    text = lowered(lambda x: run(square(num_warps=2), {"x": x})["out"], jnp.ones(16))
    assert "tensor<384xui8>" in text
    assert jax.eval_shape(lambda x: run(square(num_warps=2), {"x": x}), jnp.ones(16)).keys() == {"out"}


def test_equal_launches_are_one_operation(begun):
    jaxpr = str(jax.make_jaxpr(lambda x: run(square(), {"x": x})["out"])(jnp.ones(16)))
    assert "ejkernel_eqx_triton_call" in jaxpr
    one, same, other = (own_call._Described(launch) for launch in (square(), square(), square(block=4)))
    assert one == same and hash(one) == hash(same) and one != other


def test_a_kernel_is_staged_once(monkeypatch):
    started, count = threading.Event(), []

    def stage(launch, target):
        started.wait(5)
        count.append(launch)
        return Staged(launch.label.encode(), 0)

    monkeypatch.setattr(staging, "_stage", stage)
    monkeypatch.setattr(staging, "_stagings", {})
    first, again = staging.begin(square(), TARGET), staging.begin(square(), TARGET)
    other = staging.begin(square(), Target("sm_80", "cuda", 80, 32, 0))
    assert first is again and other is not first and not first.done()
    started.set()
    assert first.result() == Staged(b"square_kernel", 0) == other.result() and len(count) == 2


def test_an_error_of_the_compiler_is_raised_at_the_lowering(monkeypatch):
    def fail(launch, target):
        raise RuntimeError("does not compile")

    monkeypatch.setattr(staging, "_stage", fail)
    monkeypatch.setattr(staging, "_stagings", {})
    monkeypatch.setattr(_run, "own_target", lambda: TARGET)
    traced = jax.jit(lambda x: run(square(), {"x": x})["out"]).trace(jnp.ones(16))
    with pytest.raises(RuntimeError, match="does not compile"):
        traced.lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize(
    "version, target, word",
    [
        ("0.11.1", "triton_kernel_call_ffi", None),
        ("0.10.2", "triton_kernel_call_ffi", "JAX"),
        ("0.12.0", "triton_kernel_call", "jax-triton"),
    ],
)
def test_versions(monkeypatch, version, target, word):
    library = types.SimpleNamespace(
        CUSTOM_CALL_TARGET_NAME=target, CompilationResult=types.SimpleNamespace(global_scratch_size=None)
    )
    monkeypatch.setitem(sys.modules, "jax_triton", types.SimpleNamespace(triton_lib=library))
    monkeypatch.setattr(staging.jaxlib.version, "__version__", version)
    reason = staging.versions_unfit()
    assert reason is None if word is None else word in reason
