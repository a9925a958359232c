"""Tuning needs a device that really computes: it is refused while a function is being staged."""

import jax
import jax.core
import jax.numpy as jnp

from .._errors import TuningError


def inside_trace() -> bool:
    """Whether computations are staged rather than done: under `jit`, `eval_shape`, `scan` and the like.

    Under `vmap` or `grad` alone they are done, so that is no trace in this sense.
    """
    with jax.transfer_guard("allow"):
        return isinstance(jnp.zeros(()), jax.core.Tracer)


def refuse_trace(what: str) -> None:
    """`TuningError` naming the remedy, where `inside_trace()`."""
    if inside_trace():
        raise TuningError(
            f"{what}: nothing can be timed inside jit, eval_shape or another staged transformation; "
            "build or tune outside jit, or use cached configurations."
        )
