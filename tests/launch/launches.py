"""Launches, arrays for them and their interpretation, which the tests of this folder and those on a GPU share."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_eqx.launch import compile_ahead, Launch, own_call, run, staging, Target, TARGETS
from ejkernel_eqx.testing import InterpretError, poison
from tests.launch import kernels

__all__ = ["InterpretError", "S", "TARGETS", "Target", "compile_ahead", "own_call", "poison", "staging"]
S = jax.ShapeDtypeStruct


def interpret(launch: Launch, arrays: dict[str, Any]) -> Any:
    """What the launch gives for these arrays, numpy's among them."""
    return run(
        launch,
        {name: jax.device_put(x) if isinstance(x, np.ndarray) else x for name, x in arrays.items()},
        interpret=True,
    )


def array(shape, dtype=jnp.float32, seed=0):
    return jax.device_put(np.random.default_rng(seed).normal(size=shape).astype(dtype))


def one_to_one(
    kernel: Any, size: Any = 8, dtype: Any = "float32", n: Any = None, grid: int = 1, **constants: Any
) -> Launch:
    """From `x` to `out` of the same size and type; with a number `n`, if it has one."""
    shape = S((size,) if isinstance(size, int) else size, dtype)
    return Launch(kernel, {"x": shape}, {"out": shape}, {} if n is None else {"n": n}, constants, (grid,))


def square(n: int = 16, block: int = 8, **options: Any) -> Launch:
    launch = one_to_one(kernels.square_kernel, n, n=n, grid=-(-n // block), BLOCK=block)
    return dataclasses.replace(launch, **options)


def matmul_softmax(a: Any, b: Any, block_m: int, block_n: int, block_k: int, **options: Any) -> Launch:
    """Of operands of these shapes and types."""
    (m, k), n = a.shape, b.shape[1]
    outputs = {"out": S((m, n), a.dtype), "logits_max": S((m,), jnp.float32)}
    constants = dict(N=n, K=k, BM=block_m, BN=block_n, BK=block_k, SCALE=0.5)
    inputs, grid = {"a": S(a.shape, a.dtype), "b": S(b.shape, b.dtype)}, (-(-m // block_m),)
    return Launch(kernels.matmul_softmax_kernel, inputs, outputs, {"M": m}, constants, grid, **options)


def added(slots: int = 4, rows: int = 3, n: int = 8, wrong: bool = False, **options: Any) -> Launch:
    """In place, with a result beside it."""
    pool, real, each = S((slots, n), jnp.float32), S((rows,), jnp.float32), S((rows,), jnp.int32)
    inputs, outputs = (
        {"pool": pool, "amount": real, "slots": each},
        {"new_pool": pool, "old": S((rows, n), jnp.float32)},
    )
    constants: dict[str, Any] = {"BLOCK": 8, "WRONG": wrong}
    options = {"grid": (rows,), "aliases": {"pool": "new_pool"}} | options
    return Launch(kernels.add_to_slots_kernel, inputs, outputs, {"n": n}, constants, **options)
