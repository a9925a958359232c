"""The selective scan token by token, as in its equation: the oracle of every test, in float64 for float64 inputs."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from .._broadcast import like
from ..core.arguments import accumulator
from ..sequences.tokens import begins, from_slots, masked, scan_tokens, to_slots
from .spec import NO_TIME, ScanArrays, ScanSpec, SHARED, StepArrays


def time_step(dt: Array, bias: Array | None, softplus: bool, wide: Any) -> Array:
    """The time step `[..., T, I]`: 0 where `dt` is at most `NO_TIME`, with no gradient there."""
    real = dt > NO_TIME
    # The sentinel is replaced before the softplus too, so that no gradient passes through it.
    step = jnp.where(real, dt, jnp.zeros((), dt.dtype)).astype(wide)
    step = step if bias is None else step + like(bias.astype(wide), step)
    step = jnp.logaddexp(step, jnp.zeros((), wide)) if softplus else step
    return jnp.where(real, step, jnp.zeros((), wide))


def scan(arrays: ScanArrays, spec: ScanSpec) -> tuple[Array, Array]:
    """`out [*, T, I]` and `final_state`, in float32 (float64 for float64 operands)."""
    call = _packed if arrays.offsets is not None else _row
    for level in range(arrays.x.ndim - 2):
        axes: dict[str, Any] = {
            name: None if x is None or (name in SHARED and not _mapped(name, x, level)) else 0
            for name, x in arrays._asdict().items()
        }
        call = jax.vmap(call, in_axes=(ScanArrays(**axes), None))
    return call(arrays, spec)


def _mapped(name: str, x: Array, level: int) -> bool:
    return x.ndim - (2 if name == "A" else 1) > level


def _row(arrays: ScanArrays, spec: ScanSpec) -> tuple[Array, Array]:
    """One row without leading axes."""
    wide = accumulator(arrays.x.dtype)
    (length, channels), states = arrays.x.shape, arrays.A.shape[-1]
    x, A = arrays.x.astype(wide), arrays.A.astype(wide)
    dt = time_step(arrays.dt, arrays.dt_bias, spec.softplus, wide)
    B, C = (x.astype(wide) for x in (arrays.B, arrays.C))
    state = jnp.zeros((channels, states), wide)
    state = state if arrays.initial_state is None else arrays.initial_state.astype(wide)
    fresh = begins(arrays.starts, length)

    def token(state: Array, at: tuple[Array, ...]) -> tuple[Array, Array]:
        x, dt, B, C, fresh = at
        B, C = (jnp.repeat(x, channels // x.shape[0], axis=0) for x in (B, C))
        # A decay of 0 forgets the sequence before.
        decay = jnp.where(fresh, jnp.zeros((), wide), jnp.exp(dt[:, None] * A))
        state = decay * state + (dt * x)[:, None] * B
        return state, jnp.sum(state * C, axis=-1)

    state, y = scan_tokens(token, state, (x, dt, B, C, fresh), length)
    y = y if arrays.D is None else y + arrays.D.astype(wide)[None] * x
    return y if arrays.z is None else y * jax.nn.silu(arrays.z.astype(wide)), state


def _packed(arrays: ScanArrays, spec: ScanSpec) -> tuple[Array, Array]:
    """One row of packed sequences, each treated as a row in which all other tokens are padding."""
    offsets = arrays.offsets
    assert offsets is not None
    tokens = jnp.arange(arrays.x.shape[0], dtype=jnp.int32)

    def one(n: Array, initial: Array | None) -> tuple[Array, Array]:
        mine = (tokens >= offsets[n]) & (tokens < offsets[n + 1])
        keep = lambda x: None if x is None else masked(x, mine)
        kept = {name: keep(getattr(arrays, name)) for name in ("x", "B", "C", "z")}
        dt = jnp.where(mine[:, None], arrays.dt, jnp.asarray(NO_TIME, arrays.dt.dtype))
        out, state = _row(arrays._replace(**kept, dt=dt, initial_state=initial, offsets=None), spec)
        return masked(out, mine), state

    outs, states = jax.vmap(one)(jnp.arange(offsets.shape[0] - 1), arrays.initial_state)
    # Every token is real in at most one sequence, so the sum selects its output.
    return outs.sum(0), states


def step(arrays: StepArrays, spec: ScanSpec) -> tuple[Array, Array]:
    """`out [*, B, I]` and the new states, by the recurrence for one token."""
    wide, pool, indices = accumulator(arrays.x.dtype), arrays.state, arrays.indices
    lead = pool.ndim - 3
    state = from_slots(pool, indices, lead)
    x, A = arrays.x.astype(wide), arrays.A.astype(wide)
    B, C = (jnp.repeat(x.astype(wide), A.shape[-2] // x.shape[-2], axis=-2) for x in (arrays.B, arrays.C))
    parameter = lambda p: None if p is None else jnp.expand_dims(p.astype(wide), p.ndim - 1)
    A = jnp.expand_dims(A, A.ndim - 2)
    bias, D = parameter(arrays.dt_bias), parameter(arrays.D)
    dt = time_step(arrays.dt, bias, spec.softplus, wide)
    new = jnp.exp(dt[..., None] * like(A, state)) * state.astype(wide) + (dt * x)[..., None] * B
    y = jnp.sum(new * C, axis=-1)
    y = y if D is None else y + like(D, x) * x
    y = y if arrays.z is None else y * jax.nn.silu(arrays.z.astype(wide))
    return to_slots(y, new.astype(pool.dtype), pool, indices, lead)
