"""The selective scan in plain XLA: a scan over chunks of a scan over tokens, whose gradient keeps one state per chunk.

The state of a row is laid out as `[N, I]`, and sums over states are matrix products, because a sum fused with the exponentials would
compute each of them many times.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._broadcast import like
from .._shapes import least
from ..core.arguments import accumulator
from ..core.platforms import supports_all
from ..launch.fields import Checked, Count
from ..parallel import match_varying
from . import reference
from .chunks import chunk_table
from .spec import ScanArrays, ScanSpec, SHARED, StepArrays


@dataclasses.dataclass(frozen=True)
class XlaConfig(Checked):
    """The gradient keeps the state before every `chunk_size` tokens, and recomputes those of one chunk at a time."""

    chunk_size: Count = 32


config_type = XlaConfig
unsupported = supports_all


def default_config(problem: Any, device: Any) -> XlaConfig:
    return XlaConfig()


def candidates(problem: Any, device: Any) -> list[XlaConfig]:
    """Configurations worth timing, the heuristic first."""
    return [XlaConfig(size) for size in (32, 16, 64, 128)]


def apply(arrays: ScanArrays, spec: ScanSpec, config: XlaConfig) -> tuple[Array, Array]:
    """`out [*, T, I]` in x's dtype and the final state in the spec's."""
    call = functools.partial(_row, spec=spec, size=config.chunk_size)
    return _over_leading(call, arrays, arrays.x.ndim - 2)


def _over_leading(call: Callable[[ScanArrays], Any], arrays: ScanArrays, lead: int) -> Any:
    """Maps a function of one row over any number of leading axes; an axis of size one does not need batched products."""
    if lead == 0:
        return call(arrays)
    inner = lambda arrays: _over_leading(call, arrays, lead - 1)
    mapped = {name: x for name, x in arrays._asdict().items() if x is not None and name not in SHARED}
    if arrays.x.shape[0] == 1:
        alone = arrays._replace(**{name: x[0] for name, x in mapped.items()})
        return jax.tree.map(lambda x: x[None], inner(alone))
    axes: dict[str, Any] = {name: 0 if name in mapped else None for name in arrays._fields}
    return jax.vmap(inner, in_axes=(ScanArrays(**axes),))(arrays)


def _row(arrays: ScanArrays, spec: ScanSpec, size: int) -> tuple[Array, Array]:
    """One row without leading axes."""
    wide = accumulator(arrays.x.dtype)
    (length, channels), (_, groups, states) = arrays.x.shape, arrays.B.shape
    x = arrays.x.astype(wide)
    dt = reference.time_step(arrays.dt, arrays.dt_bias, spec.softplus, wide)
    to_groups = lambda x: x.reshape((length, groups, -1))
    tokens = (to_groups(dt), to_groups(dt * x), arrays.B.astype(wide), arrays.C.astype(wide))
    A = jnp.swapaxes(arrays.A.astype(wide).reshape((groups, -1, states)), -1, -2)
    count = () if arrays.offsets is None else (arrays.offsets.shape[0] - 1,)
    state = jnp.zeros((*count, channels, states), wide)
    state = state if arrays.initial_state is None else arrays.initial_state.astype(wide)
    state = jnp.swapaxes(state.reshape((*count, groups, -1, states)), -1, -2)  # [.., G, N, I / G]
    if arrays.offsets is not None:
        y, final = _packed(tokens, A, state, arrays.offsets, size)
    else:
        fresh = None if arrays.starts is None else arrays.starts == jnp.arange(length, dtype=jnp.int32)
        y, final = _chunked(tokens, A, state, fresh, size)
    y = y.reshape((length, channels))
    y = y if arrays.D is None else y + like(arrays.D.astype(wide), x) * x
    y = y if arrays.z is None else y * jax.nn.silu(arrays.z.astype(wide))
    final = jnp.swapaxes(final, -1, -2).reshape((*count, channels, states))
    return y.astype(arrays.x.dtype), final.astype(spec.state_dtype)


Tokens = tuple[Array, ...]


def _chunked(tokens: Tokens, A: Array, state: Array, fresh: Array | None, size: int) -> tuple[Array, Array]:
    """Outputs `[T, G, I / G]` and the last state, from those of the tokens `(dt, dt x, B, C)` and the first state `[G, N, I / G]`."""
    length = tokens[0].shape[0]
    tokens = tokens if fresh is None else (*tokens, fresh)
    size = least(size, length)
    chunks = -(-length // size)
    cut = lambda x: _pad(x, chunks * size - length).reshape((chunks, size, *x.shape[1:]))
    # The gradient keeps the state before each chunk and recomputes its tokens.
    chunk = jax.checkpoint(lambda state, tokens: lax.scan(functools.partial(_token, A), state, tokens))
    state, y = lax.scan(chunk, match_varying(state, (tokens, A)), tuple(map(cut, tokens)))
    return y.reshape((chunks * size, *y.shape[2:]))[:length], state


def _pad(x: Array, count: int) -> Array:
    """Pads the end with tokens whose time step is zero."""
    return jnp.pad(x, ((0, count), *((0, 0),) * (x.ndim - 1)))


def _packed(tokens: Tokens, A: Array, states: Array, offsets: Array, size: int) -> tuple[Array, Array]:
    """Packed sequences with initial states `[S, G, N, I / G]`, in chunks of one sequence each, one after the other."""
    length = tokens[0].shape[0]
    size = least(size, length)
    table = chunk_table(offsets, length, size)
    take = lambda x: x.at[table.rows].get(mode="fill", fill_value=0)

    @jax.checkpoint
    def chunk(state: Array, at: tuple[Array, Array, Tokens]) -> tuple[Array, tuple[Array, Array]]:
        begins, sequence, tokens = at
        state = jnp.where(begins, states[sequence], state)
        state, y = lax.scan(functools.partial(_token, A), state, tokens)
        return state, (y, state)

    first = match_varying(jnp.zeros(states.shape[1:], states.dtype), (tokens, A, states, offsets))
    _, (y, ends) = lax.scan(chunk, first, (table.begins, table.sequence, tuple(map(take, tokens))))
    out = jnp.zeros((length, *y.shape[2:]), y.dtype).at[table.rows].set(y, mode="drop")
    last = ends[jnp.maximum(table.first + table.count - 1, 0)]
    # A sequence without tokens has no chunk: its final state is its initial one.
    is_empty = (table.count == 0).reshape((-1, *(1,) * (states.ndim - 1)))
    return out, jnp.where(is_empty, states, last)


def _token(A: Array, state: Array, at: Tokens) -> tuple[Array, Array]:
    dt, write, B, C, *fresh = at
    one = functools.partial(_group, fresh[0] if fresh else None)
    # A single group avoids the batched products of `vmap`.
    if state.shape[0] == 1:
        state, y = one(A[0], state[0], dt[0], write[0], B[0], C[0])
        return state[None], y[None]
    return jax.vmap(one)(A, state, dt, write, B, C)


def _group(
    fresh: Array | None, A: Array, state: Array, dt: Array, write: Array, B: Array, C: Array
) -> tuple[Array, Array]:
    """One token of one group, with a state `[N, I]`."""
    decay = jnp.exp(like(dt, A) * A)
    decay = decay if fresh is None else jnp.where(fresh, jnp.zeros((), decay.dtype), decay)
    state = decay * state + like(write, state) * B[:, None]
    return state, jnp.dot(C, state, precision=lax.Precision.HIGHEST)


def step(arrays: StepArrays, spec: ScanSpec, config: XlaConfig) -> tuple[Array, Array]:
    """`out [*, B, I]` in x's dtype and the new states (the whole pool)."""
    out, state = reference.step(arrays, spec)
    return out.astype(arrays.x.dtype), state
