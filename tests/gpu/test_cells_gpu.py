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
from ejkernel_eqx.dispatch import device_facts, kernel_registry
from tests.cells.cases import called, Case, CASES, exact, make, poison, results
from tests.gpu.host import candidates, example_problem, on_host
from tests.tolerances import assert_close

if jax.default_backend() != "gpu":
    pytest.skip("needs a GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu
NEEDS = "recurrent"
REPEATS = 4
KINKED = {"relu", "hard_tanh", "hard_sigmoid"}


def assert_agrees(found: dict[str, Any], expected: dict[str, Any], dtype: str) -> None:
    assert set(found) == set(expected)
    for name, x in found.items():
        assert_close(x, expected[name], dtype, "gradient" if name.startswith("d_") else "forward", name=name)


def assert_same(first: Any, second: Any, what: str = "a second run") -> None:
    """Bit for bit."""
    for name, x in first.items():
        np.testing.assert_array_equal(np.asarray(x), np.asarray(second[name]), err_msg=f"{what}: {name}")


def assert_right(name: str, case: Case, found: dict[str, Any], arrays: Any, cotangents: Any) -> None:
    """Against the reference: results and every gradient."""
    expected = on_host(exact, case, arrays, cotangents)
    if case.dtype != "float32" and "larger" in name and {case.activation, case.gate} & KINKED:
        # Among so many units, rounding to 16 bits moves some across the kink, and their gradients are others.
        forward = lambda results: {name: x for name, x in results.items() if name[:2] != "d_"}
        assert_agrees(forward(found), forward(expected), case.dtype)
    else:
        assert_agrees(found, expected, case.dtype)


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
    found = results(op, arrays, case.packing, cotangents)
    assert_right(name, case, found, arrays, cotangents)
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
    for config in candidates("recurrent", of):
        found = results(case.operation(config=config), arrays, case.packing, cotangents)
        assert_agrees(found, expected, case.dtype)


PERSISTENT = {
    "four share columns": ((32, 16, 64, 4, 1), (32, 16, 64, 4, 2)),
    "two share columns": ((16, 64, 64, 8, 1), (16, 32, 128, 4, 1)),
    "none share": ((64, 16, 64, 4, 2), (16, 64, 128, 8, 1)),
    "64 rows": ((16, 16, 256, 4, 1), (64, 16, 64, 4, 2)),
}


@pytest.mark.parametrize(
    "tiles, dtype", [*((tiles, "bfloat16") for tiles in PERSISTENT), ("four share columns", "float32")]
)
@pytest.mark.parametrize("name", LARGER)
def test_programs_that_wait_for_each_other(name, tiles, dtype):
    """The weight on the chip, in one launch: right, and the same bit for bit whichever program arrives first."""
    from ejkernel_eqx.cells.triton.tile_sizes import CellTile, TritonConfig

    device = device_facts()
    forward, backward = (CellTile(*sizes, "persistent") for sizes in PERSISTENT[tiles])
    config = TritonConfig(forward, backward, concurrent_programs=device.num_multiprocessors)
    implementation = kernel_registry.get("recurrent", "triton")
    of = example_problem("recurrent", dict(B=64, T=8, H=64), dtype, dict(cell="lstm"))
    reason = implementation.config_unsupported(config, of, device)
    if reason is not None:
        pytest.skip(reason)
    case = dataclasses.replace(LARGER[name], dtype=dtype)
    arrays, cotangents = make(case)
    op = case.operation(config=config)
    found = results(op, arrays, case.packing, cotangents)
    assert_right(name, case, found, arrays, cotangents)
    for n in range(1, REPEATS):
        assert_same(found, results(op, arrays, case.packing, cotangents), f"run {n}")


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize("H, B", [(1024, 64), (256, 256)])
def test_gradients_of_long_sequences_agree_with_xla(H, B, kind):
    """At the sizes of the benchmark, in bfloat16, against float32 on XLA; and the same bit for bit when run again."""
    case = Case(kind, B=B, T=512, H=H, I=64, initial=False)
    arrays, cotangents = make(case)
    arrays |= {"weight_hh": arrays["weight_hh"] * 3**-0.5}  # as in a new layer, uniform in +-H^-1/2
    narrow = {name: x.astype(jnp.bfloat16) for name, x in arrays.items()}
    out, *finals = cotangents
    run = lambda: results(
        ejx.Recurrent(kind, platform="triton"), narrow, {}, (out.astype(jnp.bfloat16), *finals)
    )
    found, expected = run(), results(ejx.Recurrent(kind, platform="xla"), arrays, {}, cotangents)
    for name, x in expected.items():
        assert_close(found[name], x, "bfloat16", "gradient", name=name)
    assert_same(found, run())


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
