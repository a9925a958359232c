"""Pooling on a GPU: the Triton kernels against numpy in float64, repeated runs, and every candidate of the tuner.

```sh
python -m pytest tests/gpu/test_pooling_gpu.py -n 8
```
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.pooling.arguments import resolve
from ejkernel_eqx.pooling.core import problem_of
from tests.gpu.host import candidates
from tests.pooling.cases import by_hand, Case, CASES, make, results
from tests.tolerances import assert_close

if jax.default_backend() != "gpu":
    pytest.skip("needs a GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu
NEEDS = "mean_pooling"
REPEATS = 4
NO_TABLES = dict.fromkeys(("mask", "lengths", "cu_seqlens", "segment_ids"))


def longer(case: Case) -> Case:
    """The same at a size of several programs, with a last one that is not full."""
    times = lambda numbers: None if numbers is None else tuple(37 * n for n in numbers)
    ids = case.ids and tuple(tuple(int(n) for n in np.repeat(row, 37)) for row in case.ids)
    chunk = case.chunk and 29 * case.chunk
    sizes = {"lengths": times(case.lengths), "offsets": times(case.offsets), "chunk": chunk}
    most = None if case.most is None else 37 * case.T  # always enough
    return dataclasses.replace(case, T=37 * case.T, C=200, ids=ids, most=most, **sizes)


SHORT = {name: case for name, case in CASES.items() if case.segments or not case.ids}
EVERY = SHORT | {f"{name}, long": longer(case) for name, case in SHORT.items()}
WIDE = {
    "chunks": Case(T=1024, C=2048, chunk=64),
    "largest of chunks": Case("max", T=1024, C=2048, chunk=64),
    "one long row": Case(T=70_001, B=1, C=96),
    "largest of a long row": Case("max", T=70_001, B=1, C=96, masked=True),
    "many rows": Case(T=130, B=300, C=768, masked=True, normalize=True),
    "short chunks": Case(T=4096, B=1, C=1024, chunk=3),
    "skewed": Case(T=20_000, C=512, offsets=(0, 1, 2, 3, 19_990, 20_000)),
}


def assert_agrees(case: Case, found: Any, x: Any, dout: Any) -> None:
    expected = by_hand(case, x, dout)
    assert_close(found["out"], expected["out"], case.dtype, name="out")
    assert_close(found["x"], expected["x"], case.dtype, "gradient", name="x")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", EVERY | WIDE)
def test_pooling(name, dtype):
    """Results and gradients; the same bit for bit when run again, and with NaN in the padding."""
    case = dataclasses.replace((EVERY | WIDE)[name], dtype=dtype)
    x, dout = make(case)
    op, tables = case.operation("triton"), case.tables()
    found = results(op, x, tables, dout)
    assert_agrees(case, found, x, dout)
    poisoned = jnp.where(case.padding()[..., None], jnp.nan, x)
    for given in (poisoned, *[x] * (REPEATS - 1)):
        again = results(op, given, tables, dout)
        for key, value in found.items():
            np.testing.assert_array_equal(np.asarray(again[key]), np.asarray(value), err_msg=key)


@pytest.mark.parametrize("name", ["chunks", "largest of chunks", "many rows", "skewed", "short chunks"])
def test_every_candidate(name):
    case = dataclasses.replace(WIDE[name], dtype="bfloat16")
    x, dout = make(case)
    call = resolve(case.operation().options, x, **{**NO_TABLES, **case.tables()})
    of = problem_of("mean_pooling", call.arrays, call.spec)
    for config in candidates("mean_pooling", of):
        op = ejx.MeanPooling(**case.options, config=config)
        assert_agrees(case, results(op, x, case.tables(), dout), x, dout)


@pytest.mark.memory(16)
def test_past_two_gigabytes():
    """The last rows of a call that is larger than 32-bit offsets reach, against a call of theirs alone."""
    length, channels = 2**17 + 64, 2**14 + 64
    x = jax.random.normal(jax.random.key(0), (length, channels), jnp.bfloat16)
    op = ejx.MeanPooling(chunk_size=64, platform="triton")

    def both(x):
        out, pull = jax.vjp(op, x)
        return out[-2:], pull(out)[0][-128:]

    for found, alone in zip(jax.jit(both)(x), jax.jit(both)(x[-128:])):
        np.testing.assert_array_equal(np.asarray(found), np.asarray(alone))


def test_more_programs_than_a_grid_axis_has():
    x = jax.random.normal(jax.random.key(0), (70_000, 3, 16))
    found = jax.jit(ejx.MeanPooling(platform="triton"))(x)
    assert_close(found, np.asarray(x, np.float64).mean(1), "float32")
