"""A call whose tokens are split over a mesh axis: each device's tokens from a zero state, then what the state that enters them adds.

Outputs and states are linear in the entering state. For linear members both are products with the decays up to a token. For a delta rule, and
for transitions of rank one, they are what the same kernels give for no values and the identity as the state.
"""

import dataclasses

import jax.numpy as jnp
from jax import Array, lax

from .._kernel import Plan
from ..core.along import Along, first_tokens, passed_on
from ..core.arguments import accumulator
from ..sequences.cumsum import shifted
from .core import RECUR
from .heads import repeat_heads
from .spec import CONSTANT, heads_of, NONE, RecurrenceArrays, RecurrenceSpec, SCALAR, VALUE
from .xla_decay import closed

_EXACT = lax.Precision.HIGHEST


def recur_along(
    along: Along, plan: Plan, operation: str, arrays: RecurrenceArrays, spec: RecurrenceSpec
) -> tuple[Array, Array]:
    """Runs `core.recur`: this device's outputs, and the state after the last token of all devices."""
    wide, heads = accumulator(arrays.q.dtype), heads_of(arrays, spec)
    # States stay wide between devices; only the last one is rounded to the spec's dtype.
    inner = dataclasses.replace(spec, state_dtype=jnp.dtype(wide).name)
    # The initial state enters with the other devices' states, since outputs are linear in it.
    local = arrays._replace(initial_state=None)
    out, local_state = RECUR.in_order(plan, operation, local, inner)
    state = jnp.zeros_like(local_state) if arrays.initial_state is None else arrays.initial_state.astype(wide)
    if spec.delta or arrays.a is not None:
        read, passed = _of_identity(plan, operation, local, inner, heads.state)
        step = lambda part, state: _product("...hde,...hev->...hdv", part[0], state) + part[1]
        entering, final = along.carry(step, (passed, local_state), state)
        added = _outputs(read.astype(wide), entering)
    else:
        read, passed, after = _of_decays(arrays, spec, heads.out, heads.state)
        step = lambda part, state: part[0] * state + part[1]
        entering, final = along.carry(step, (passed, local_state), state)
        added = _outputs(read, entering)
        added = added if after is None else added * after
    out = (out.astype(wide) + added).astype(out.dtype)
    return out, along.last(final).astype(spec.state_dtype)


def _of_identity(
    plan: Plan, operation: str, arrays: RecurrenceArrays, spec: RecurrenceSpec, heads: int
) -> tuple[Array, Array]:
    """Computes what the tokens read from a state, `[*, T, R, D]`, and what they leave of it, `[*, HS, D, D]`."""
    *lead, _, _, dim = arrays.q.shape
    identity = jnp.broadcast_to(jnp.eye(dim, dtype=spec.state_dtype), (*lead, heads, dim, dim))
    # Values have the channels of the identity, and as zeros they write nothing of their own.
    values = jnp.zeros((*arrays.v.shape[:-1], dim), arrays.v.dtype)
    return RECUR.in_order(plan, operation, arrays._replace(v=values, skip=None, initial_state=identity), spec)


def _of_decays(
    arrays: RecurrenceArrays, spec: RecurrenceSpec, out_heads: int, state_heads: int
) -> tuple[Array, Array, Array | None]:
    """Computes what the tokens read of a state, `[*, T, R, D]`; the factor that remains of it after them, which broadcasts to `[*, HS, D, V]`; and
    for decays of values a factor of the outputs, `[*, T, R, V]`."""
    wide, after = accumulator(arrays.q.dtype), None
    *lead, length, _, _ = arrays.q.shape
    read = spec.scale * repeat_heads(arrays.q.astype(wide), -2, out_heads)
    if spec.decay == NONE:
        passed = jnp.ones((*lead, state_heads, 1, 1), wide)
    else:
        assert arrays.g is not None
        g = closed(arrays.g.astype(wide))
        if spec.decay == CONSTANT:
            # A token reads the state after its own decay, so the first one counts 1.
            tokens = jnp.arange(1, length + 1, dtype=wide)
            sums = jnp.expand_dims(g, -2) * tokens.reshape(*(1,) * (g.ndim - 1), length, 1)
        else:
            sums = jnp.cumsum(g, len(lead))
        if spec.decay in (CONSTANT, SCALAR):
            sums = sums[..., None]  # one channel
        decay = jnp.exp(sums)
        # What a token reads before its own decay, it reads after the decays of those before it.
        seen = jnp.exp(shifted(sums, len(lead), 1, False)) if spec.before else decay
        factor = repeat_heads(seen, -2, out_heads)
        read, after = (read, factor) if spec.decay == VALUE else (read * factor, None)
        passed = repeat_heads(lax.index_in_dim(decay, length - 1, len(lead), keepdims=False), -2, state_heads)
        passed = passed[..., None, :] if spec.decay == VALUE else passed[..., None]
    reached = first_tokens(arrays.starts, read)
    # Tokens of later segments do not see the entering state.
    read = read if reached is None else jnp.where(reached, read, 0)
    return read, passed_on(passed, arrays.starts), after


def _outputs(read: Array, state: Array) -> Array:
    """`[*, T, R, V]`: what each output head reads, `[*, T, R, D]`, of its state head."""
    *lead, heads, dim = read.shape
    count = state.shape[-3]
    grouped = read.reshape(*lead, count, heads // count, dim)
    out = _product("...thrd,...hdv->...thrv", grouped, state)
    return out.reshape(*lead, heads, state.shape[-1])


def _product(pattern: str, x: Array, y: Array) -> Array:
    return jnp.einsum(pattern, x, y, precision=_EXACT)
