"""8-bit pages in Triton: every code in float16, and latents of more rows than go in pairs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import ejkernel_eqx as ejx
from tests.paged.cases import assert_agrees, Case
from tests.paged.triton_calls import attend_by, config_of, interpret, kernels, with_axis

DTYPES = {"int8": 1, "float8_e4m3fn": 2, "float8_e5m2": 3}
CODES = np.arange(256, dtype=np.uint8)


def converted(dtype: str) -> np.ndarray:
    """All codes in float16, which represents each exactly."""
    found = CODES.view(np.int8 if dtype == "int8" else getattr(ml_dtypes, dtype)).astype(np.float64)
    exact = found.astype(np.float16)
    assert np.array_equal(exact.astype(np.float64), found, equal_nan=True)
    return exact


def launch(dtype: str, fast: bool) -> tuple[ejx.launch.Launch, dict[str, Any]]:
    """That of all codes, each as a whole and in pairs."""
    x = jax.lax.bitcast_convert_type(jnp.asarray(CODES), jnp.dtype(dtype))
    constants = {"PAIRS": DTYPES[dtype], "FAST": fast, "BLOCK": 256}
    sizes = {"one_ptr": (256,), "even_ptr": (128,), "odd_ptr": (128,)}
    return launch_of(kernels.bytes_kernel, {"x_ptr": x}, sizes, constants), {"x_ptr": x}


def launch_of(kernel: Any, inputs: Any, outputs: dict[str, Any], constants: Any) -> ejx.launch.Launch:
    """One program; outputs are float16 but for factors."""
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    dtype = lambda name: jnp.float32 if name == "factor_ptr" else jnp.float16
    results = {name: jax.ShapeDtypeStruct(size, dtype(name)) for name, size in outputs.items()}
    given = {name: shape(x) for name, x in inputs.items()}
    return ejx.launch.Launch(kernel, given, results, {}, constants, (1,), 1, 1)


def assert_converted(dtype: str, results: dict[str, Any]) -> None:
    exact = converted(dtype)
    for name, part in (("one", exact), ("even", exact[::2]), ("odd", exact[1::2])):
        np.testing.assert_array_equal(np.asarray(results[f"{name}_ptr"]), part, name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code(dtype):
    assert_converted(dtype, interpret(*launch(dtype, fast=False)))


MANY = Case((1, 4, 2), (33, 50, 17), p=16, H=16, K=1, D=34, rope=10, tail=1, dtype="bfloat16")
WIDE = config_of(64, 32, 4, 2, split_k=3, chunk_size=16)


def attend(case: Case, config: Any = WIDE, **changes: Any) -> dict[str, Any]:
    results, constants = attend_by(case, config, **changes)
    assert constants["BYTES"] and not constants["PAIRS"]
    return results


@pytest.mark.few(2)
@pytest.mark.parametrize("splits", (1, 2))
@pytest.mark.parametrize(
    "case",
    (
        dataclasses.replace(MANY, kv_dtype="int8", scales="token", left=40, sinks=True),
        dataclasses.replace(MANY, kv_dtype="float8_e4m3fn", scales="token", cap=3.0, sinks=True),
        dataclasses.replace(MANY, kv_dtype="float8_e5m2", scales="head", v_dtype="bfloat16"),
        dataclasses.replace(MANY, kv_dtype="int8", scales="token", v_dtype="float16", dtype="float16"),
        dataclasses.replace(MANY, kv_dtype="float8_e5m2", scales="token", v_dtype="int8", dtype="float16"),
    ),
    ids=lambda case: f"{case.kv_dtype}, rope {case.v_dtype}, scales of a {case.scales}, {case.dtype}",
)
def test_latents_of_many_rows(case, splits):
    assert_agrees(case, attend(case, dataclasses.replace(WIDE, split_k=splits)))


@pytest.mark.few(1)
@pytest.mark.parametrize("size", (2.0**-100, 2.0**100))
@pytest.mark.parametrize("kv_dtype", ("int8", "float8_e4m3fn"))
def test_latents_of_any_size(kv_dtype, size):
    """Float16 holds neither such queries nor such scales; here latents grow as the queries shrink."""
    case = dataclasses.replace(MANY, kv_dtype=kv_dtype, scales="token")
    arrays, _ = with_axis(case)
    plain = attend(case)
    scales = {name: getattr(arrays, name) * size for name in ("k_scale", "rope_scale")}
    results = attend(case, q=arrays.q / size, **scales)
    expected = np.asarray(plain["out"], np.float64) * size
    np.testing.assert_allclose(
        np.asarray(results["out"], np.float64), expected, rtol=2**-7, atol=2**-8 * size
    )
    np.testing.assert_allclose(np.asarray(results["lse"]), np.asarray(plain["lse"]), rtol=1e-3, atol=1e-3)


def test_queries_of_nothing():
    """A row of zeros has no power of two, and one of infinities none that float32 represents; the others are exact."""
    q = [[0.0, 0.0], [3.0, -1e-3], [np.inf, 1.0], [2.0**-140, 0.0]]
    x = jnp.asarray(q, jnp.float32).astype(jnp.bfloat16)
    sizes = {"own_ptr": (8,), "half_ptr": (4, 2), "factor_ptr": (4,)}
    launched = launch_of(kernels.queries_kernel, {"q_ptr": x}, sizes, {"ROWS": 4, "WIDTH": 2})
    found = interpret(launched, {"q_ptr": x})
    half, factor = found["half_ptr"], found["factor_ptr"]
    product = np.asarray(half, np.float64) * np.asarray(factor, np.float64)[..., None]
    np.testing.assert_allclose(product[1], np.asarray(x[1], np.float64), rtol=2**-11)
    assert (product[0] == 0).all() and np.isinf(product[2, 0])
