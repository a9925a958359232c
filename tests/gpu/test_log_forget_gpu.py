"""Forgetting attention on a GPU: default kernels against the float64 formula, bit for bit when they run again, and on a long row."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.attention.core import problem_of
from ejkernel_eqx.dispatch import device_facts, kernel_registry
from tests.attention.test_log_forget import CASES, check_gated, gated, gates
from tests.tolerances import assert_close

if jax.default_backend() != "gpu":
    pytest.skip("needs a GPU", allow_module_level=True)

from tests.attention.kernels import assert_same, cotangents
from tests.gpu.test_attention_gpu import default_config, run_triton

pytestmark = pytest.mark.gpu
NEEDS = ejx.FlashAttention.operation


def larger(case: Any, dtype: str) -> Any:
    """The same flags over several tiles of what a GPU runs, and as much forgotten over a row; the offset stays that of the last query."""
    queries, keys = (1, 4 * case.S) if case.T == 1 else (4 * case.T, 4 * case.S)
    offset = keys - queries if case.offset else 0
    return dataclasses.replace(
        case, T=queries, S=keys, offset=offset, D=128, V=128, strength=0.25, dtype=dtype
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_default_kernels(name, dtype, monkeypatch):
    case = larger(CASES[name], dtype)
    arrays, spec = gated(case)
    run = functools.partial(run_triton, config=default_config(arrays, spec))
    check_gated(case, run, monkeypatch)
    dout, dlse = cotangents(case)
    assert_same(*(run(arrays, dout, dlse, spec) for _ in range(2)))


@pytest.mark.parametrize("name", ["grouped", "packed", "lengths"])
@pytest.mark.parametrize("dim, kv_heads", [(64, 2), (128, 2), (128, 4), (256, 4)])
def test_hoppers_kernels(name, dim, kv_heads, monkeypatch):
    """Also where they are no default."""
    case = dataclasses.replace(larger(CASES[name], "bfloat16"), D=dim, V=dim, K=kv_heads)
    arrays, spec = gated(case)
    kernels, problem = kernel_registry.get(NEEDS, "triton").load(), problem_of(NEEDS, arrays, spec)
    configs, chosen = kernels.candidates(problem, device_facts()), {}
    for kernel in ("forward", "key_gradient"):
        tiles = [getattr(config, kernel) for config in configs]
        chosen[kernel] = next((tile for tile in tiles if tile.hopper_programs), tiles[0])
    if not chosen["forward"].hopper_programs:
        pytest.skip("Hopper's kernels do not take the device")
    assert (dim == 128 and kv_heads == 4) == bool(chosen["key_gradient"].hopper_programs)
    dout, dlse = cotangents(case)
    run = functools.partial(run_triton, config=dataclasses.replace(configs[0], **chosen))
    check_gated(case, run, monkeypatch)
    assert_same(*(run(arrays, dout, dlse, spec) for _ in range(2)))


def test_a_long_row_forgets_as_a_short_one():
    """The last of 100,000 tokens, whose gates leave a few thousand to see, as if the row began there."""
    length, tail = 100_000, 4096
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (length, 2, 64)) for key in keys)
    x = gates(length, 2) - 0.05
    attend = jax.jit(ejx.FlashAttention(causal=True, platform="triton"))
    found = attend(q[-128:], k, v, log_forget=x)
    expected = attend(q[-128:], k[-tail:], v[-tail:], log_forget=x[-tail:])
    assert np.isfinite(np.asarray(expected)).all() and jnp.std(expected) > 0.1
    assert_close(found, np.asarray(expected))
