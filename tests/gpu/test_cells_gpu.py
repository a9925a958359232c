"""Recurrent cells on a GPU: the Triton kernels against the float64 reference, in both forms, and what only a GPU can show.

python -m pytest tests/gpu/test_cells_gpu.py -n 8
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.cells.workload import example_problem
from ejkernel_eqx.dispatch import device_facts, kernel_registry
from tests.cells.cases import called, Case, CASES, exact, make, poison, results
from tests.tolerances import assert_close

if jax.default_backend() != "gpu":
    pytest.skip("needs a GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu
REPEATS = 4
KINKED = {"relu", "hard_tanh", "hard_sigmoid"}


@pytest.fixture(scope="module", autouse=True)
def _usable():
    reason = kernel_registry.get("recurrent", "triton").unusable(device_facts())
    if reason is not None:
        pytest.skip(f"platform triton is not usable here: {reason}")


def on_host(function, *arguments):
    """The float64 reference runs on the CPU, beside the device under test."""
    with jax.default_device(jax.devices("cpu")[0]):
        return function(*arguments)


def assert_agrees(found: dict[str, Any], expected: dict[str, Any], dtype: str) -> None:
    assert set(found) == set(expected)
    for name, x in found.items():
        assert_close(x, expected[name], dtype, "gradient" if name.startswith("d_") else "forward", name=name)


def assert_same(first: Any, second: Any, what: str = "a second run") -> None:
    """Bit for bit."""
    for name, x in first.items():
        np.testing.assert_array_equal(np.asarray(x), np.asarray(second[name]), err_msg=f"{what}: {name}")


def larger(case: Case) -> Case:
    """The same with more rows and features than a tile has."""
    if case.offsets is not None:
        return dataclasses.replace(case, H=136, I=72)
    more = {name: getattr(case, name) for name in ("packed", "lengths", "resets")}
    more = {name: None if rows is None else tuple(rows) * 20 for name, rows in more.items()}
    return dataclasses.replace(case, B=20 * case.B, H=136, I=72, **more)


LARGER = CASES | {f"{name}, larger": larger(case) for name, case in CASES.items()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", LARGER)
def test_agrees_with_the_reference(name, dtype):
    """Results and every gradient; the same bit for bit when run again, and with NaN in the padding."""
    case = dataclasses.replace(LARGER[name], dtype=dtype)
    arrays, cotangents = make(case)
    op = case.operation(platform="triton")
    found, expected = results(op, arrays, case.packing, cotangents), on_host(exact, case, arrays, cotangents)
    if dtype != "float32" and "larger" in name and {case.activation, case.gate} & KINKED:
        # Among so many units, rounding to 16 bits moves some across the kink, and their gradients are others.
        forward = lambda results: {name: x for name, x in results.items() if name[:2] != "d_"}
        assert_agrees(forward(found), forward(expected), dtype)
    else:
        assert_agrees(found, expected, dtype)
    poisoned = results(op, poison(case, arrays), case.packing, cotangents)
    assert_same(found, poisoned, "a run with NaN in the padding")
    for n in range(1, REPEATS):
        assert_same(found, results(op, arrays, case.packing, cotangents), f"run {n}")


@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn"])
@pytest.mark.parametrize("packed", [None, "marks"])
def test_every_candidate(kind, packed):
    case = Case(
        kind, B=40, T=33, H=136, I=32, dtype="bfloat16", lengths=(33, 7, 0, 20) * 10 if packed else None
    )
    arrays, cotangents = make(case)
    expected = on_host(exact, case, arrays, cotangents)
    of = example_problem("recurrent", dict(B=40, T=33, H=136), "bfloat16", dict(cell=kind, packed=packed))
    for config in kernel_registry.get("recurrent", "triton").load().candidates(of, device_facts()):
        found = results(case.operation(config=config), arrays, case.packing, cotangents)
        assert_agrees(found, expected, case.dtype)


@pytest.mark.parametrize("H, B", [(1024, 64), (256, 256)])
def test_long_sequences_agree_with_xla(H, B):
    """At the sizes of the benchmark, in bfloat16; both against float32 on XLA. Rounding grows over so many steps as in a gradient."""
    case = Case(B=B, T=512, H=H, I=64, initial=False)
    arrays, _ = make(case)
    run = lambda platform, arrays: jax.jit(lambda a: called(ejx.Recurrent(platform=platform), a, {}))(arrays)
    exactly = run("xla", arrays)
    narrow = {name: x.astype(jnp.bfloat16) for name, x in arrays.items()}
    for platform in ("xla", "triton"):
        for found, expected in zip(run(platform, narrow), exactly, strict=True):
            assert_close(found, expected, "bfloat16", "gradient")


def test_launches_per_step_write_in_place():
    """The arrays that are carried from launch to launch are not copied: temporary memory does not grow with the number of tokens."""

    def temporary(length: int) -> int:
        shape = jax.ShapeDtypeStruct((16, length, 4096), jnp.bfloat16)
        weight = jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16)
        call = jax.jit(lambda x, w: ejx.Recurrent(platform="triton")(x, w)[0])
        analysis: Any = call.lower(shape, weight).compile().memory_analysis()
        return analysis.temp_size_in_bytes

    out = 16 * 1024 * 2  # bytes for each token
    assert temporary(2048) - temporary(1024) <= 1.5 * 1024 * out
