"""Launches that tests with and without a GPU share."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_eqx.launch import Launch
from tests.launch import kernels


def added(**options: Any) -> Launch:
    """In place, with a result beside it."""
    shape = jax.ShapeDtypeStruct
    pool, rows = shape((4, 8), jnp.float32), shape((3,), jnp.float32)
    return Launch(
        kernels.add_to_slots_kernel,
        {"pool": pool, "amount": rows, "slots": shape((3,), jnp.int32)},
        {"new_pool": pool, "old": shape((3, 8), jnp.float32)},
        {"n": 8},
        {"BLOCK": 8, "WRONG": False},
        (3,),
        aliases={"pool": "new_pool"},
        **options,
    )
