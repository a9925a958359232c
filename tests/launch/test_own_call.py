"""Launches that are compiled and staged here, without a GPU: what is traced and lowered, when compilation begins, and which launches share it."""

import ast
import concurrent.futures
import dataclasses
import functools
import importlib
import inspect
import os
import re
import subprocess
import sys
import threading
import types
import zlib

import jax
import jax.export
import jax.numpy as jnp
import pytest

from ejkernel_eqx.dispatch import Backend, DeviceFacts
from tests.launch import kernels
from tests.launch.launches import added, Launch, one_to_one, own_call, run, S, square, staging, Target

_run = importlib.import_module("ejkernel_eqx.launch.by_name")

TARGET = Target("sm_90", "cuda", 90, 32, 0)


def squared(**options):
    """A function that no other test has traced."""
    return lambda x: run(square(**options), {"x": x})["out"]


@pytest.fixture
def begun(monkeypatch):
    """Launches whose compilation has begun; nothing is compiled."""
    seen = []

    def begin(launch, target):
        assert target == TARGET
        seen.append(launch)

    def staged(launch, target):
        begin(launch, target)
        return staging.Staged(b"opaque", 384 if launch.num_warps == 2 else 0)

    monkeypatch.setattr(own_call, "begin", begin)
    monkeypatch.setattr(own_call, "staged", staged)
    monkeypatch.setattr(_run, "own_target", lambda: TARGET)
    return seen


def lowered(function, *arrays):
    return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def test_a_call_is_one_foreign_call(begun):
    x = jnp.ones(16)
    text = lowered(squared(), x)
    assert text.count("custom_call") == 1 and "triton_kernel_call_ffi" in text and 'opaque = "opaque"' in text
    # At the trace, so that it compiles beside the rest of it; and awaited at the lowering.
    assert len(begun) == 2
    # Where programs write descriptors is a further result of the call, and none of the launch.
    text = lowered(squared(num_warps=2), x)
    assert "tensor<384xui8>" in text
    assert jax.eval_shape(lambda x: run(square(num_warps=2), {"x": x}), x).keys() == {"out"}


def test_equal_launches_are_one_operation(begun):
    jaxpr = str(jax.make_jaxpr(squared())(jnp.ones(16)))
    assert "ejkernel_eqx_triton_call" in jaxpr
    one, same, other = (own_call._Described(launch) for launch in (square(), square(), square(block=4)))
    assert one == same and hash(one) == hash(same) and one != other


def test_what_python_takes_for_equal_is_compiled_apart():
    """1, 1.0 and True are one key of a dictionary, and so are 0.0 and -0.0; to Triton they are constants of different kinds."""
    values = (1, 1.0, True, 0.0, -0.0, (1,), (1.0,))
    launches = [one_to_one(kernels.constant_tail_kernel, 16, n=5, grid=2, TAIL=x, BLOCK=8) for x in values]
    assert len({own_call._Described(launch) for launch in launches}) == len(values)
    assert len({staging._kernel_identity(launch) for launch in launches}) == len(values)


GIVEN = {"pool": jnp.ones((4, 8)), "amount": jnp.ones(3), "slots": jnp.arange(3, dtype=jnp.int32)}


def test_an_output_in_place_is_an_alias_of_the_call(begun):
    call = lambda *arrays, **options: run(added(**options), dict(zip(GIVEN, arrays, strict=True)))

    text = lowered(call, *GIVEN.values())
    assert text.count("custom_call @triton") == 1
    assert re.search(r"output_tuple_indices = \[0\],\s+operand_index = 0,", text)
    assert text.count("optimization_barrier") == 2
    # A donated argument is the result's buffer.
    traced = jax.jit(call, donate_argnums=0).trace(*GIVEN.values())
    assert "tf.aliasing_output" in traced.lower(lowering_platforms=("cuda",)).as_text()
    # With scratch, which is a result after the others; and a call that writes in place alone, whose one result is no tuple.
    text = lowered(functools.partial(call, num_warps=2), *GIVEN.values())
    assert "tensor<384xui8>" in text and "output_tuple_indices = [0]" in text
    beside = one_to_one(kernels.copy_through_kernel, BLOCK=8)
    through = dataclasses.replace(beside, aliases={"x": "out"})
    text = lowered(lambda x: run(through, {"x": x})["out"], jnp.ones(8))
    assert "output_tuple_indices = []" in text
    assert own_call._Described(through) != own_call._Described(beside)


def test_a_launch_is_exported(begun):
    call = jax.jit(squared())
    with pytest.raises(ValueError, match="triton_kernel_call_ffi"):
        jax.export.export(call, platforms=["cuda"])(jnp.ones(16))
    checks = [jax.export.DisabledSafetyCheck.custom_call("triton_kernel_call_ffi")]
    exported = jax.export.export(call, platforms=["cuda"], disabled_checks=checks)(jnp.ones(16))
    assert "triton_kernel_call_ffi" in exported.mlir_module()


def test_a_launch_is_lowered_for_nvidia_only(begun):
    traced = jax.jit(squared()).trace(jnp.ones(16))
    with pytest.raises(NotImplementedError, match=r"square_kernel.*sm_90.*cpu.*platform='xla'"):
        traced.lower(lowering_platforms=("cpu",))


@pytest.mark.parametrize("transform, words", [(jax.vmap, "custom_vmap"), (jax.grad, "custom_vjp")])
def test_a_launch_has_no_rules(begun, transform, words):
    call = lambda x: squared()(x).sum()
    with pytest.raises(NotImplementedError, match=words):
        transform(call)(jnp.ones((2, 16) if transform is jax.vmap else 16))


def test_an_unused_launch_is_removed(begun):
    text = lowered(lambda x: (squared()(x), x)[1], jnp.ones(16))
    assert "custom_call" not in text


def test_a_kernel_is_compiled_once(monkeypatch):
    started, count = threading.Event(), []

    def compile(launch, target):
        started.wait(5)
        count.append(launch)
        return staging.Kernel(launch.label, 4, 0, 0, "ptx")

    monkeypatch.setattr(staging, "_compile", compile)
    monkeypatch.setattr(staging, "_kernels", {})
    first, again = staging.begin(square(), TARGET), staging.begin(square(), TARGET)
    longer = staging.begin(square(n=32), TARGET)  # another grid, and another number
    other = staging.begin(square(), Target("sm_80", "cuda", 80, 32, 0))
    assert first is again and first is longer and other is not first and not first.done()
    started.set()
    assert first.result() == other.result() and len(count) == 2


# Staging, with a library that takes down what jaxlib would be given


@pytest.fixture
def library(monkeypatch):
    class Call:
        def __init__(self, *all):
            self.all = all

        def to_proto(self, label, metadata):
            kernel, *grid, parameters = self.all
            return repr((label, kernel, tuple(grid), parameters)).encode()

    known = types.SimpleNamespace(
        TritonKernel=lambda *all: all,
        TritonKernelCall=Call,
        create_array_parameter=lambda zeroed, alignment: ("array", zeroed, alignment),
        create_scalar_parameter=lambda value, kind: (kind, value),
    )
    triton_lib = types.SimpleNamespace(triton_kernel_call_lib=known)
    monkeypatch.setitem(sys.modules, "jax_triton", types.SimpleNamespace(triton_lib=triton_lib))
    monkeypatch.setitem(sys.modules, "jax_triton.triton_lib", triton_lib)
    monkeypatch.setattr(staging, "_kernels", {})


def read(call):
    return ast.literal_eval(zlib.decompress(call.opaque).decode())


ARRAY = ("array", 0, 16)


def test_parameters_are_those_of_the_compiled_kernel(library):
    label, kernel, grid, parameters = read(staging.staged(square(), TARGET))
    assert label == "square_kernel" and grid == (2, 1, 1) and parameters == [ARRAY, ("i32", 16), ARRAY]
    name, warps, clusters, shared, ptx, ttir, capability = kernel
    assert (name, warps, clusters, shared, ttir, capability) == ("square_kernel", 4, 1, 0, "", 90)
    assert ".entry square_kernel" in ptx and "sm_90" in ptx
    # Two pointers, a number, and the two hidden ones that Triton appends: where programs write descriptors and profiles.
    assert ptx.split("{")[0].count(".param ") == 3 + 2
    # The input and its output in place are a pointer each, and the result beside them another.
    assert read(staging.staged(added(), TARGET))[3] == [ARRAY, ARRAY, ARRAY, ("i32", 8), ARRAY, ARRAY]


@pytest.mark.parametrize(
    "number, given",
    [
        (1, []),  # a constant of the kernel
        (True, []),
        (-3, [("i32", -3)]),
        (2**31, [("u32", 2**31)]),
        (2**40, [("i64", 2**40)]),
        (2**63, [("u64", 2**63)]),
    ],
)
def test_numbers(library, number, given):
    _, (_, _, _, _, ptx, *_), _, parameters = read(staging.staged(square_of(number), TARGET))
    assert parameters == [ARRAY, *given, ARRAY]
    assert ptx.split("{")[0].count(".param ") == 2 + len(given) + 2


def square_of(number):
    return dataclasses.replace(square(), scalars={"n": number})


def test_scratch_is_of_all_programs(library):
    shape = S((3, 8, 16), jnp.float32)
    arrays = {"x": shape, "y": S((16,), jnp.float32), "order": S((3, 8, 16), jnp.int32)}
    outputs = {"gathered": shape, "counted": S((3, 16), jnp.int32), "joined": shape, "moved": shape}
    launch = Launch(kernels.shapes_kernel, arrays, outputs, {}, {"ROWS": 8, "COLUMNS": 16}, (3,))
    call = staging.staged(launch, TARGET)
    assert call.scratch == 3 * 128 and read(call)[3] == [*[ARRAY] * 7, ("array", 0, 128)]


def test_specialised_warps_are_launched(library):
    """A kernel whose warps are specialised has more than it was told."""
    a, b = S((512, 64), jnp.bfloat16), S((64, 64), jnp.bfloat16)
    out = {"out": S((512, 64), jnp.bfloat16)}
    launch = Launch(kernels.specialised_kernel, {"a": a, "b": b}, out, {}, {"SIZE": 64, "STEPS": 8}, (1,))
    assert read(staging.staged(launch, TARGET))[1][1] > launch.num_warps


# What goes wrong


def test_an_error_of_the_compiler_names_the_kernel(library, monkeypatch):
    calls = []

    def fail(launch, target):
        calls.append(launch)
        raise KeyError("does not compile")

    monkeypatch.setattr(staging, "_compile", fail)
    monkeypatch.setattr(_run, "own_target", lambda: TARGET)
    traced = jax.jit(squared()).trace(jnp.ones(16))
    message = "square_kernel cannot be launched on sm_90: KeyError: 'does not compile'.*platform='xla'"
    with pytest.raises(RuntimeError, match=message):
        traced.lower(lowering_platforms=("cuda",))
    with pytest.raises(RuntimeError, match=message):  # and is tried again
        traced.lower(lowering_platforms=("cuda",))
    assert len(calls) == 2


@pytest.mark.parametrize("field, words", [("tmem_size", "tensor memory"), ("profile_scratch_size", "Proton")])
def test_kernels_that_would_hang_or_crash_the_device(monkeypatch, field, words):
    about = dict(name="k", num_warps=4, shared=0, global_scratch_size=0)
    about |= {"tmem_size": 512, "profile_scratch_size": 0, field: 1024}
    found = types.SimpleNamespace(metadata=types.SimpleNamespace(**about), asm={"ptx": ""})
    monkeypatch.setattr(staging, "compiled", lambda launch, target: found)
    with pytest.raises(ValueError, match=words):
        staging._compile(square(), TARGET)


@pytest.mark.slow
def test_a_forked_process_compiles():
    """The threads of the parent, and what they were about to do, do not exist in a fork."""
    program = """
import os, sys, threading
from tests.launch.test_own_call import square, staging, TARGET
go = threading.Event()
def compile(launch, target):
    go.wait()
    return staging.Kernel(launch.label, 4, 0, 0, "ptx")
staging._compile = compile
staging.begin(square(), TARGET)
if os.fork() == 0:
    go.set()
    os._exit(0 if staging.begin(square(), TARGET).result(20).name == "square_kernel" else 1)
status = os.wait()[1]
go.set()
sys.exit(os.waitstatus_to_exitcode(status))
"""
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", "-c", program]
    assert subprocess.run(command, timeout=100, env=os.environ | paths).returncode == 0


WORKERS = {
    # A program that fails while it is traced ends after the kernel that is being compiled, not after all.
    "not begun is dropped": """
for _ in range(500):
    workers.submit(lambda: time.sleep(0.5))
raise SystemExit(7)
""",
    "a thread that outlives the main one": """
begun = [workers.submit(lambda: time.sleep(0.5)) for _ in range(3)]
def outlives():
    threading.main_thread().join()
    begun[0].result(20)
    try:
        begun[2].result(20)
    except concurrent.futures.CancelledError:
        os._exit(workers.submit(lambda: 7).result(20))
threading.Thread(target=outlives).start()
""",
}


@pytest.mark.parametrize("name", WORKERS)
def test_work_at_the_end_of_a_process(name):
    program = (
        "import concurrent.futures, os, threading, time\nfrom _workers import Workers\nworkers = Workers(1)\n"
    )
    paths = {"PYTHONPATH": os.path.dirname(inspect.getfile(staging.Staged))}  # of the file alone
    command = [sys.executable, "-c", program + WORKERS[name]]
    assert subprocess.run(command, timeout=100, env=os.environ | paths).returncode == 7


def test_cancelled_kernels_are_compiled_by_who_waits(library, monkeypatch):
    cancelled = concurrent.futures.Future()
    cancelled.cancel()
    monkeypatch.setattr(staging, "_compile", lambda *_: staging.Kernel("a kernel", 4, 0, 0, "ptx"))
    staging._kernels[staging._kernel_identity(square()), TARGET] = cancelled
    assert read(staging.staged(square(), TARGET))[1][0] == "a kernel"


# Where it is used


@pytest.fixture
def stageable(monkeypatch):
    monkeypatch.setattr(own_call, "_can_stage", lambda: True)


def facts(capability):
    return DeviceFacts(Backend.GPU, "a card", "nvidia", capability, shared_memory=232_448)


def test_the_target_is_the_device_of_the_call_unless_jax_triton_launches(stageable, monkeypatch):
    assert own_call.own_target() is None  # the default device is a CPU
    monkeypatch.setattr(own_call, "facts_of_calls", lambda: facts("10.3"))
    assert own_call.own_target() == Target("sm_103", "cuda", 103, 32, 232_448)
    monkeypatch.setenv("EJKERNEL_EQX_LAUNCH", "jax-triton")
    assert own_call.own_target() is None
    monkeypatch.setenv("EJKERNEL_EQX_LAUNCH", "torch")
    with pytest.raises(ValueError, match="expected one of own, jax-triton, received 'torch'"):
        own_call.own_target()


@pytest.mark.parametrize(
    "version, target, triton, word",
    [
        ("0.11.1", "triton_kernel_call_ffi", "3.7.1", None),
        ("0.10.2", "triton_kernel_call_ffi", "3.7.1", "JAX"),
        ("0.12.0", "triton_kernel_call", "3.7.1", "jax-triton"),
        ("0.12.0", "triton_kernel_call_ffi", "3.8.0", None),
        ("0.12.0", "triton_kernel_call_ffi", "3.9.0", "not 3.9.0 (pip install"),
        ("0.12.0", "triton_kernel_call_ffi", "3.70.0", "Triton 3.7 or 3.8, not"),
        ("0.12.0", "triton_kernel_call_ffi", "3.6.0", "pip install 'triton>=3.7.1"),
    ],
)
def test_versions(monkeypatch, version, target, triton, word):
    of = types.SimpleNamespace
    library = of(CUSTOM_CALL_TARGET_NAME=target, CompilationResult=of(global_scratch_size=None))
    monkeypatch.setitem(sys.modules, "jax_triton", of(triton_lib=library))
    monkeypatch.setitem(sys.modules, "triton", of(__version__=triton))
    monkeypatch.setattr(staging, "jaxlib", of(version=of(__version__=version)))
    reason = staging.versions_unfit()
    assert reason is None if word is None else word in reason
