"""8-bit pages in Triton: every code in float16, and latents of more rows than go in pairs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ejkernel_eqx.launch import Launch
from tests.paged.cases import assert_agrees, Case
from tests.paged.ptx import evaluate, halves_of

pytest.importorskip("triton")
from ejkernel_eqx.paged.triton import compiled, latent_bytes, pairs
from ejkernel_eqx.paged.triton.call import PagedTile
from tests.paged.bytes_kernel import bytes_kernel, queries_kernel
from tests.paged.test_triton_decode import CONFIG, interpret, with_axis

DTYPES = {"int8": 1, "float8_e4m3fn": 2, "float8_e5m2": 3}
CODES = np.arange(256, dtype=np.uint8)


def converted(dtype: str) -> np.ndarray:
    """All codes in float16, which represents each exactly."""
    found = CODES.view(np.int8 if dtype == "int8" else getattr(ml_dtypes, dtype)).astype(np.float64)
    exact = found.astype(np.float16)
    assert np.array_equal(exact.astype(np.float64), found, equal_nan=True)
    return exact


def launch(dtype: str, fast: bool) -> tuple[Launch, dict[str, Any]]:
    """That of all codes, each as a whole and in pairs."""
    half = lambda size: jax.ShapeDtypeStruct((size,), jnp.float16)
    x = jax.lax.bitcast_convert_type(jnp.asarray(CODES), jnp.dtype(dtype))
    return Launch(
        bytes_kernel,
        {"x_ptr": jax.ShapeDtypeStruct(x.shape, x.dtype)},
        {"one_ptr": half(256), "even_ptr": half(128), "odd_ptr": half(128)},
        {},
        {"PAIRS": DTYPES[dtype], "FAST": fast, "BLOCK": 256},
        (1,),
        1,
        1,
    ), {"x_ptr": x}


def assert_converted(dtype: str, results: dict[str, Any]) -> None:
    exact = converted(dtype)
    for name, part in (("one", exact), ("even", exact[::2]), ("odd", exact[1::2])):
        np.testing.assert_array_equal(np.asarray(results[f"{name}_ptr"]), part, name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code(dtype):
    assert_converted(dtype, interpret(*launch(dtype, fast=False)))


CODE: dict[str, tuple[Any, Any]] = {
    "int8": (latent_bytes._INTEGERS, pairs._EXACT_INTEGERS),
    "float8_e4m3fn": (latent_bytes._FLOATS, pairs._FLOATS),
    "float8_e5m2": (latent_bytes._UPPER_HALVES, pairs._UPPER_HALVES),
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_instructions_convert_every_code(dtype):
    """NVIDIA's instructions, four bytes at once, each code in each place."""
    exact, order = converted(dtype), np.stack([np.roll(np.arange(256), 61 * n) for n in range(4)], axis=-1)
    words = CODES[order].copy().view(np.uint32)[:, 0]
    four, two = CODE[dtype]
    first, last = (halves_of(x) for x in evaluate(four.value, words))
    np.testing.assert_array_equal(np.concatenate([first, last], axis=-1), exact[order])
    even, odd = (halves_of(x) for x in evaluate(two.value, words))
    np.testing.assert_array_equal(np.stack([even, odd], axis=-1), exact[order].reshape(256, 2, 2))


def test_integers_that_are_too_large():
    words = CODES.repeat(4).view(np.uint32)
    for x in evaluate(pairs._INTEGERS.value, words):
        expected = converted("int8").astype(np.float64) + pairs.BIASED.value
        np.testing.assert_array_equal(halves_of(x), np.stack([expected, expected], axis=-1))


MANY = Case((1, 4, 2), (33, 50, 17), p=16, H=16, K=1, D=34, rope=10, tail=1, dtype="bfloat16")
WIDE = dataclasses.replace(CONFIG, decode=PagedTile(64, 32, 4, 2))


def attend(case: Case, config: Any = WIDE, **changes: Any) -> dict[str, Any]:
    arrays, spec = with_axis(case)
    constants = []

    def execute(launch: Launch, inputs: Any) -> Any:
        constants.append(launch.constants)
        return interpret(launch, inputs)

    results = compiled.forward(arrays._replace(**changes), spec, config, execute=execute)
    assert constants[0]["BYTES"] and not constants[0]["PAIRS"]
    return results


@pytest.mark.few(2)
@pytest.mark.parametrize("splits", (1, 2))
@pytest.mark.parametrize(
    "case",
    (
        dataclasses.replace(MANY, kv_dtype="int8", scales="token", left=40, sinks=True),
        dataclasses.replace(MANY, kv_dtype="int8", scales="head", missing=((1, 1),)),
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
@pytest.mark.parametrize("size", (2.0**-100, 2.0**-20, 2.0**100))
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
    q = jnp.asarray([[[0.0, 0.0], [3.0, -1e-3], [jnp.inf, 1.0], [2.0**-140, 0.0]]], jnp.float32)
    like = lambda *size, dtype: jax.ShapeDtypeStruct(size, dtype)
    outputs = {
        "own_ptr": like(8, dtype=jnp.float16),
        "half_ptr": like(4, 2, dtype=jnp.float16),
        "factor_ptr": like(4, dtype=jnp.float32),
    }
    x = q[0].astype(jnp.bfloat16)
    found = interpret(
        Launch(
            queries_kernel,
            {"q_ptr": like(4, 2, dtype=x.dtype)},
            outputs,
            {},
            {"ROWS": 4, "WIDTH": 2},
            (1,),
            1,
            1,
        ),
        {"q_ptr": x},
    )
    half, factor = found["half_ptr"], found["factor_ptr"]
    product = np.asarray(half, np.float64) * np.asarray(factor, np.float64)[..., None]
    np.testing.assert_allclose(product[1], np.asarray(x[1], np.float64), rtol=2**-11)
    assert (product[0] == 0).all() and np.isinf(product[2, 0])
