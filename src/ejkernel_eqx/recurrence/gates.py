"""Elementwise formulas around the recurrences: decays, write strengths, time steps, norms.

All are computed in float32 (float64 for float64), in one chain that the compiler fuses into one pass over memory. They run on operands
whose padding is already zero, and callers mask their results again, because a bias makes padding non-zero.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._broadcast import aligned, like
from ..core.arguments import rate_of, wide
from ..core.l2norm import l2norm as l2norm

LOG, SOFTPLUS, BOUNDED = "log", "softplus", "bounded"
GATES = (LOG, SOFTPLUS, BOUNDED)
"""Forms of a gate: the log-decay itself, or a raw number that one of two formulas turns into it."""


def softplus(x: Array) -> Array:
    """`log(1 + e^x)` without overflow."""
    return jnp.logaddexp(x, jnp.zeros((), x.dtype))


def check_gate(gate: str, lower_bound: float | None) -> float | None:
    """The bound as a float; `ValueError` for an unknown gate or a bound that does not fit it."""
    if gate not in GATES:
        raise ValueError(f"gate: expected one of {', '.join(map(repr, GATES))}, received {gate!r}.")
    if gate != BOUNDED:
        if lower_bound is not None:
            raise ValueError(
                f"lower_bound: expected None with gate={gate!r}, received {lower_bound}; only gate='bounded' uses it."
            )
        return None
    if lower_bound is None or not (math.isfinite(lower_bound) and lower_bound < 0):
        raise ValueError(
            f"lower_bound: expected a negative number with gate='bounded', received {lower_bound}; a common value is -5.0."
        )
    return float(lower_bound)


def log_decay(
    gate: str, lower_bound: float | None, raw: Array, A_log: Array | None, dt_bias: Array | None
) -> Array:
    """Log-decays in the shape of `raw`; `A_log` and `dt_bias` broadcast to it."""
    # The log-decay is given as it is, in its own dtype.
    if gate == LOG:
        return raw
    assert A_log is not None
    x = wide(raw)
    rate, x = aligned(rate_of(A_log.astype(x.dtype)), x)
    x = x if dt_bias is None else x + like(dt_bias.astype(x.dtype), x)
    if gate == SOFTPLUS:
        return -rate * softplus(x)
    assert lower_bound is not None
    # The sigmoid is below 1, so no decay is stronger than the bound.
    return lower_bound * jax.nn.sigmoid(rate * x)


def write_strength(beta: Array, sigmoid: bool, doubled: bool) -> Array:
    """`beta` or its sigmoid, optionally doubled."""
    if sigmoid:
        beta = jax.nn.sigmoid(wide(beta))
    return 2.0 * wide(beta) if doubled else beta


def check_limit(limit: Any) -> tuple[float, float] | None:
    """The bounds of a time step; `ValueError` if they are invalid."""
    if limit is None:
        return None
    pair = tuple(limit) if isinstance(limit, tuple | list) else ()
    if len(pair) != 2 or not 0.0 <= pair[0] <= pair[1]:
        raise ValueError(f"dt_limit: expected (low, high) with 0 <= low <= high or None, received {limit!r}.")
    return float(pair[0]), float(pair[1])


def time_step(
    dt: Array, dt_bias: Array | None, dt_softplus: bool, dt_limit: tuple[float, float] | None
) -> Array:
    """The time step of a state space model from the output of a projection."""
    x = wide(dt)
    x = x if dt_bias is None else x + like(dt_bias.astype(x.dtype), x)
    x = softplus(x) if dt_softplus else x
    if dt_limit is None:
        return x
    low, high = (jnp.asarray(bound, x.dtype) for bound in dt_limit)
    # Unlike `jnp.clip`, whose gradient is halved exactly at a bound.
    return jnp.where(x < low, low, jnp.where(x > high, high, x))


def silu_gated(y: Array, z: Array) -> Array:
    """`y silu(z)` in the wide dtype."""
    return wide(y) * jax.nn.silu(wide(z).astype(wide(y).dtype))


def rms_norm(x: Array, weight: Array | None, groups: int, eps: float) -> Array:
    """RMS norm of `[..., H, P]` over all heads of each of `groups` groups; `weight` is `[H, P]`."""
    *lead, heads, channels = x.shape
    grouped = x.reshape(*lead, groups, heads // groups, channels)
    mean = jnp.mean(grouped * grouped, axis=(-2, -1), keepdims=True)
    # `eps` keeps a group of zeros, such as padding, from a division by 0.
    x = (grouped * lax.rsqrt(mean + eps)).reshape(x.shape)
    return x if weight is None else x * like(weight.astype(x.dtype), x)
