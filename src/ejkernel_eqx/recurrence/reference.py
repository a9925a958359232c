"""The recurrence token by token, as in its equation: the oracle of every test, in float64 for float64 inputs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..core.arguments import accumulator
from ..sequences.tokens import begins, from_slots, masked, scan_tokens, to_slots
from .heads import repeat_heads
from .spec import CONSTANT, heads_of, KEY, RecurrenceArrays, RecurrenceSpec, SCALAR, StepArrays

_BY_TOKEN = ("q", "k", "v", "g", "beta", "a", "b")


def recur(arrays: RecurrenceArrays, spec: RecurrenceSpec) -> tuple[Array, Array]:
    """`out [*, T, R, V]` and `final_state`, in float32 (float64 for float64 operands)."""
    call = _packed if arrays.offsets is not None else _row
    for _ in range(arrays.q.ndim - 3):
        call = jax.vmap(call, in_axes=(0, None))
    return call(arrays, spec)


def _row(arrays: RecurrenceArrays, spec: RecurrenceSpec) -> tuple[Array, Array]:
    """One row without leading axes."""
    wide = accumulator(arrays.q.dtype)
    out_heads, state_heads = heads_of(arrays, spec)
    length, dim, values = arrays.q.shape[0], arrays.q.shape[-1], arrays.v.shape[-1]
    q = repeat_heads(arrays.q.astype(wide), 1, out_heads)
    k = repeat_heads(arrays.k.astype(wide), 1, state_heads)
    v = repeat_heads(arrays.v.astype(wide), 1, state_heads)
    decay = _decay(arrays, spec, length, state_heads, wide)
    beta = jnp.ones((length, 1), wide) if arrays.beta is None else arrays.beta.astype(wide)
    beta = repeat_heads(beta, 1, state_heads)
    of_heads = lambda x: None if x is None else repeat_heads(x.astype(wide), 1, state_heads)
    a, b = of_heads(arrays.a), of_heads(arrays.b)
    first = jnp.zeros((state_heads, dim, values), wide)
    state = first if arrays.initial_state is None else arrays.initial_state.astype(wide)
    fresh = begins(arrays.starts, length)

    def token(state: Array, x: Any) -> tuple[Array, Array]:
        q, k, v, decay, beta, a, b, fresh = x
        before = jnp.where(fresh, 0.0, state)
        state = before * decay
        if spec.delta:
            v = v - jnp.einsum("hdv,hd->hv", state, k)
        if a is not None:
            state = state + jnp.einsum("hd,hc,hcv->hdv", b, a, before)
        state = state + jnp.einsum("h,hd,hv->hdv", beta, k, v)
        read = repeat_heads(before if spec.before else state, 0, out_heads)
        return state, spec.scale * jnp.einsum("hdv,hd->hv", read, q)

    state, out = scan_tokens(token, state, (q, k, v, decay, beta, a, b, fresh), length)
    if arrays.skip is not None:
        out = out + arrays.skip.astype(wide)[None] * v
    return out, state


def _packed(arrays: RecurrenceArrays, spec: RecurrenceSpec) -> tuple[Array, Array]:
    """One row of packed sequences, as segments with their own initial and final states."""
    offsets = arrays.offsets
    assert offsets is not None
    length, count = arrays.q.shape[0], offsets.shape[0] - 1
    tokens = jnp.arange(length, dtype=jnp.int32)
    if spec.decay == CONSTANT:  # one number per head cannot express padding, so it becomes one per token
        assert arrays.g is not None
        arrays = arrays._replace(g=jnp.broadcast_to(arrays.g, (length, arrays.g.shape[-1])))
        spec = dataclasses.replace(spec, decay=SCALAR)

    def one(n: Array, initial: Array | None) -> tuple[Array, Array]:
        # Masked tokens leave the state as it is: no decay, no key and no value.
        mine = (tokens >= offsets[n]) & (tokens < offsets[n + 1])
        kept = {name: masked(x, mine) for name in _BY_TOKEN if (x := getattr(arrays, name)) is not None}
        return _row(arrays._replace(**kept, initial_state=initial, offsets=None), spec)

    outs, states = jax.vmap(one)(jnp.arange(count, dtype=jnp.int32), arrays.initial_state)
    # Every token has an output other than 0 in one sequence at most, so the sum selects it.
    return outs.sum(0), states


def _decay(arrays: RecurrenceArrays, spec: RecurrenceSpec, length: int, heads: int, wide: Any) -> Array:
    """Factors `[T, HS, D or 1, V or 1]`."""
    if arrays.g is None:
        return jnp.ones((length, 1, 1, 1), wide)
    g = jnp.exp(arrays.g.astype(wide))
    g = repeat_heads(jnp.broadcast_to(g, (length, *g.shape)) if spec.decay == CONSTANT else g, 1, heads)
    if spec.decay in (CONSTANT, SCALAR):
        return g[..., None, None]
    return g[..., :, None] if spec.decay == KEY else g[..., None, :]


def step(arrays: StepArrays, spec: RecurrenceSpec) -> tuple[Array, Array]:
    """`out [*, B, R, V]` and the new states, by the recurrence for one token."""
    state = arrays.state
    lead = state.ndim - 4
    count = arrays.q.shape[-3]
    rows = from_slots(state, arrays.indices, lead)
    rows = jnp.swapaxes(rows, -1, -2) if spec.transposed else rows
    initial = rows.astype(accumulator(arrays.q.dtype))
    # One token per row: `[*, B, ...]` becomes `[*, B, 1, ...]`.
    token: Any = lambda x: None if x is None else jnp.expand_dims(x, lead + 1)
    skip = None
    if arrays.skip is not None:
        skip = jnp.broadcast_to(
            jnp.expand_dims(arrays.skip, lead), (*state.shape[:lead], count, *arrays.skip.shape[-2:])
        )
    tokens = {name: token(getattr(arrays, name)) for name in _BY_TOKEN}
    whole = RecurrenceArrays(**tokens, skip=skip, initial_state=initial)
    out, new = recur(whole, RecurrenceSpec(spec.scale, spec.decay, spec.delta, before=spec.before))
    out = jnp.squeeze(out, lead + 1)
    new = (jnp.swapaxes(new, -1, -2) if spec.transposed else new).astype(state.dtype)
    return to_slots(out, new, state, arrays.indices, lead)
