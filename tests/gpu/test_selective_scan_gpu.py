"""The selective scan on a GPU: the Triton kernels against the float64 reference, and what only a GPU can show.

python -m pytest tests/gpu/test_selective_scan_gpu.py -n 8
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.dispatch import kernel_registry
from ejkernel_eqx.selective_scan import reference
from ejkernel_eqx.selective_scan.core import problem_of
from ejkernel_eqx.selective_scan.spec import SHARED, StepArrays
from tests.gpu.host import candidates, default_config
from tests.selective_scan.cases import assert_agrees, Case, CASES, cotangents, lengths, make, padded, Result
from tests.tolerances import assert_close

if jax.default_backend() != "gpu":
    pytest.skip("needs a GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu
OPERATION = ejx.StateSpaceV1.operation
NEEDS = OPERATION
TRITON = kernel_registry.get(OPERATION, "triton")
REPEATS = 4


@functools.partial(jax.jit, static_argnums=(3, 4))
def run_triton(arrays, dout, dstate, spec, config: Any) -> Result:
    kernels = TRITON.load()
    results = kernels.forward(arrays, spec, config)
    grads = kernels.backward(arrays, spec, config, results, {"out": dout, "final_state": dstate})
    grads = {n: x.sum(0) if n in SHARED else x for n, x in grads.items()}
    grads = {n: x.astype(getattr(arrays, n).dtype) for n, x in grads.items()}
    return Result(results["out"], results["final_state"], grads)


def check(case: Case, config: Any = None) -> None:
    """Results and all gradients; the same bit for bit when run again."""
    arrays, spec = make(case)
    if config is None:
        config = default_config(OPERATION, problem_of(OPERATION, arrays, spec))
    dout, dstate = cotangents(case)
    first = run_triton(padded(case, arrays), dout, dstate, spec, config)
    with jax.default_device(jax.devices("cpu")[0]):
        assert_agrees(case, first)
    if arrays.offsets is not None:
        return  # what stands at tokens of no sequence is never written
    for _ in range(REPEATS - 1):
        again = run_triton(padded(case, arrays), dout, dstate, spec, config)
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_triton(case, dtype):
    check(dataclasses.replace(case, dtype=dtype, T=3 * case.T, I=8 * case.I))


@pytest.mark.parametrize("case", lengths(16), ids=lambda case: case.name)
def test_lengths(case):
    check(case)


@pytest.mark.parametrize("n", range(10))
def test_candidates(n):
    """Every configuration that the tuner may choose, at a size where sequences are split."""
    case = Case(B=2, T=150, I=70, N=5, softplus=True, D=True, z=True, dt_bias=True, packing="segments")
    arrays, spec = make(case)
    check(case, candidates(OPERATION, problem_of(OPERATION, arrays, spec))[n])


def test_more_sequences_than_a_grid_axis_holds():
    check(Case(B=70_000, T=2, I=1, N=1, initial_state=True))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_step(dtype):
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32).astype(dtype)
    rows, slots, channels, states = 5, 9, 70, 16
    arrays = StepArrays(
        normal(1, rows, channels),
        normal(1, rows, channels),
        -jnp.exp(normal(channels, states)),
        normal(1, rows, 1, states),
        normal(1, rows, 1, states),
        normal(1, slots, channels, states).astype(jnp.float32),
        normal(channels),
        normal(1, rows, channels),
        normal(channels),
        jnp.array([[3, -1, 0, 8, 1]], jnp.int32),
    )
    spec = make(Case(softplus=True))[1]
    kernels = TRITON.load()
    config = default_config(OPERATION, problem_of(OPERATION, *make(Case())))
    out, pool = jax.jit(lambda arrays: kernels.step(arrays, spec, config))(arrays)
    expected, new = reference.step(arrays, spec)
    assert_close(out, expected, dtype)
    assert_close(pool, new, "float32")
    for untouched in (2, 4, 5, 6, 7):
        np.testing.assert_array_equal(pool[0, untouched], arrays.state[0, untouched])


def test_the_public_operation():
    arrays, _ = make(Case(B=2, T=40, I=64, N=16, z=True, D=True))
    operation = ejx.StateSpaceV1(platform="triton")
    total = lambda op: (
        lambda x: jnp.sum(
            jnp.sin(
                op(x, arrays.dt, arrays.A, arrays.B[:, :, 0], arrays.C[:, :, 0], D=arrays.D, z=arrays.z)[0]
            )
        )
    )
    got, want = (
        jax.jit(jax.grad(total(op)))(arrays.x) for op in (operation, ejx.StateSpaceV1(platform="xla"))
    )
    assert_close(got, want, kind="gradient")
