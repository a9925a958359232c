"""Arrays that a launch writes in place, kept apart from all others."""

import jax


def kept_apart(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Puts a barrier around the arrays of a call that aliases them, at no cost if their buffers are donated or carried.

    Before the call: XLA merges equal values (two empty caches), and copies them for the call only if they are different operands,
    which the results of a barrier are. On both sides: XLA on GPUs fuses a call with slices that produce an operand or consume
    a result (layers stacked in a scan), and then passes both as if there were no alias."""
    return jax.lax.optimization_barrier(arrays) if arrays else {}
