"""Tuning needs actual computation and is refused while a function is being staged."""

import jax
import jax.core
import jax.numpy as jnp

from .._errors import TuningError


def inside_trace() -> bool:
    """Tells whether computations are staged rather than executed, as under `jit`, `eval_shape` and `scan`.

    Under `vmap` or `grad` alone they are executed, which does not count.
    """
    with jax.transfer_guard("allow"):
        return isinstance(jnp.zeros(()), jax.core.Tracer)


def refuse_trace(what: str) -> None:
    """Raises `TuningError` with the remedy if `inside_trace()`."""
    if inside_trace():
        raise TuningError(
            f"{what}: nothing can be timed inside jit, eval_shape or another staged transformation; "
            "build or tune outside jit, or use cached configurations."
        )
