"""Hopper's backward kernels on a Hopper: every option they have, against the float64 reference; repeated when the device is full, many programs
in a chain."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.attention.core import problem_of
from ejkernel_eqx.attention.triton.hopper import backward_tiles, tile_sizes
from ejkernel_eqx.dispatch import device_facts, kernel_registry
from tests.attention.cases import Case, CASES, make, poison
from tests.attention.kernels import cotangents

if jax.default_backend() != "gpu":
    pytest.skip("needs a GPU", allow_module_level=True)

from tests.gpu.test_attention_gpu import assert_agrees, assert_same, run_triton

pytestmark = pytest.mark.gpu
OPERATION = ejx.FlashAttention.operation
NEEDS = OPERATION
REPEATS = 5


def hopper_configs(case: Case, arrays: Any, spec: Any) -> list[Any]:
    """Candidates with Hopper's backward; a test of problems that it does not take is skipped."""
    kernels, problem = kernel_registry.get(OPERATION, "triton").load(), problem_of(OPERATION, arrays, spec)
    found = [c for c in kernels.candidates(problem, device_facts()) if c.key_gradient.hopper_programs]
    if not found:
        pytest.skip("Hopper's kernel does not take the problem or the device")
    forward = kernels.default_config(problem, device_facts()).forward
    return [dataclasses.replace(config, forward=forward) for config in found]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("n", range(len(CASES)), ids=[case.name for case in CASES])
def test_options(n, dtype, monkeypatch):
    """The same bit for bit when run again, and with NaN in what is hidden."""
    monkeypatch.setattr(tile_sizes, "LEAST_QUERIES", 1)
    case = dataclasses.replace(CASES[n], dtype=dtype)
    arrays, spec = make(case)
    dout, dlse = cotangents(case)
    for config in hopper_configs(case, arrays, spec):
        run = functools.partial(run_triton, spec=spec, config=config)
        actual = run(arrays, dout, dlse)
        assert_agrees(case, arrays, dout, dlse, actual)
        assert_same(actual, run(poison(case, arrays), dout, dlse))
        for _ in range(REPEATS - 1):
            assert_same(actual, run(arrays, dout, dlse))


ODD = Case(B=1, T=777, S=777, H=4, K=2, D=128, V=128)


@pytest.mark.parametrize(
    "case",
    [
        ODD,
        dataclasses.replace(ODD, right=0),
        dataclasses.replace(ODD, left=150, right=40),
        dataclasses.replace(ODD, T=300, S=1300, right=0, offset=1000),
        dataclasses.replace(ODD, D=64, V=64, right=0),
        dataclasses.replace(ODD, D=64, V=64, left=150, right=40, soft_cap=20.0),
        dataclasses.replace(ODD, D=64, V=64, segments=True, right=0),
        dataclasses.replace(ODD, D=40, V=64, T=400, S=700, rows="scattered"),
        dataclasses.replace(ODD, D=80, V=72, rows="packed"),
        dataclasses.replace(ODD, segments=True, sinks="BH"),
        dataclasses.replace(ODD, B=2, T=1100, S=1100, segments=True, right=0),
    ],
    ids=[
        "full",
        "causal",
        "window",
        "late",
        "64",
        "64-window-cap",
        "64-segments",
        "40-scattered",
        "packed",
        "segments",
        "causal-segments",
    ],
)
@pytest.mark.parametrize("programs", [backward_tiles.PROGRAMS, 2])
def test_odd_lengths(case, programs, monkeypatch):
    """With two programs each takes several tiles of keys."""
    monkeypatch.setattr(backward_tiles, "PROGRAMS", programs)
    case = dataclasses.replace(case, dtype="bfloat16")
    arrays, spec = make(case)
    dout, dlse = cotangents(case)
    for config in hopper_configs(case, arrays, spec):
        assert_agrees(case, arrays, dout, dlse, run_triton(arrays, dout, dlse, spec, config))


@pytest.mark.parametrize(
    "flags", [dict(), dict(right=0), dict(left=300, right=0)], ids=["full", "causal", "window"]
)
@pytest.mark.parametrize("dim", [64, 128])
def test_it_repeats_when_the_device_is_full(dim, flags):
    """Many more programs than run at a time, all of which wait for one another's sums."""
    case = Case(B=4, T=4096, S=4096, H=16, K=8, D=dim, V=dim, dtype="bfloat16", **flags)
    arrays, spec = make(case)
    dout, dlse = cotangents(case)
    for config in hopper_configs(case, arrays, spec):
        first = run_triton(arrays, dout, dlse, spec, config)
        for _ in range(REPEATS - 1):
            again = run_triton(arrays, dout, dlse, spec, config)
            assert all(
                bool(jnp.array_equal(a, b)) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again))
            )
