"""Launches, arrays for them and their interpretation, which the tests of this folder and those on a GPU share."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_eqx.launch import compile_ahead, Launch, own_call, run, staging, Target, TARGETS
from ejkernel_eqx.testing import InterpretError, poison
from tests.launch import kernels

__all__ = [
    "InterpretError",
    "S",
    "TARGETS",
    "Target",
    "added",
    "array",
    "compile_ahead",
    "interpret",
    "own_call",
    "poison",
    "staging",
]
S = jax.ShapeDtypeStruct


def interpret(launch: Launch, arrays: dict[str, Any]) -> Any:
    """What the launch gives for these arrays, numpy's among them."""
    return run(
        launch,
        {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in arrays.items()},
        interpret=True,
    )


def array(shape, dtype=jnp.float32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def added(**options: Any) -> Launch:
    """In place, with a result beside it."""
    pool, rows = S((4, 8), jnp.float32), S((3,), jnp.float32)
    return Launch(
        kernels.add_to_slots_kernel,
        {"pool": pool, "amount": rows, "slots": S((3,), jnp.int32)},
        {"new_pool": pool, "old": S((3, 8), jnp.float32)},
        {"n": 8},
        {"BLOCK": 8, "WRONG": False},
        (3,),
        aliases={"pool": "new_pool"},
        **options,
    )
