"""Forget gates: their cumulative sums in two parts, for kernels that subtract sums of near tokens, and the gradient of the gates."""

import jax
import jax.numpy as jnp
from jax import Array

from .._shapes import as_value, is_symbolic
from ..core.arguments import accumulator
from .cotangents import sum_batch
from .masks import tile_table
from .spec import AttentionArrays, AttentionSpec

_CHUNK = 64  # tokens whose sum is in the second part alone


def of_tokens(arrays: AttentionArrays, spec: AttentionSpec) -> AttentionArrays:
    """The arrays with 0 for the gates of keys that no query may see, which can be NaN."""
    log_forget, lengths = arrays.log_forget, (arrays.q.shape[1], arrays.k.shape[1])
    plain = arrays.rows is None and arrays.q_segments is None
    if log_forget is None or (plain and not any(map(is_symbolic, lengths)) and spec.covers(*lengths)):
        return arrays
    seen = tile_table.seen(arrays, spec).keys[..., None] > 0
    return arrays._replace(log_forget=jnp.where(seen, log_forget, 0))


def sums(arrays: AttentionArrays, spec: AttentionSpec, unit: float = 1.0) -> Array:
    """`[B or 1, H, 2 S + 2 T]`, float32 (float64 for float64): `unit` times the sum of the gates up to each key, its own included, in two parts
    `[S]`, and the same at each query's position, in two parts `[T]`.

    Differences of first parts are exact, those of second parts are small: `(a - b) + (c - d)` loses nothing that a difference of
    rounded sums would, however long the row.
    """
    assert arrays.log_forget is not None
    x = unit * arrays.log_forget.astype(accumulator(arrays.q.dtype)).swapaxes(1, 2)  # [B or 1, H, S]
    length = x.shape[-1]
    if is_symbolic(length):
        parts = [jnp.cumsum(x, -1), jnp.zeros_like(x)]
    else:
        x = jnp.pad(x, ((0, 0), (0, 0), (0, -length % _CHUNK)))
        x = x.reshape(*x.shape[:2], -1, _CHUNK)
        inside = jnp.cumsum(x, -1)
        totals = inside[..., -1]
        # Multiples of a power of two, of which float32 holds so many that their sums are exact.
        most = 1 + jnp.abs(totals).sum(-1, keepdims=True)
        step = jnp.ldexp(jnp.ones_like(most), jnp.frexp(most)[1] - 22)
        coarse = jnp.round(totals / step) * step
        before, rest = (jnp.cumsum(part, -1) - part for part in (coarse, totals - coarse))
        parts = [jnp.broadcast_to(before[..., None], inside.shape), inside + rest[..., None]]
        parts = [part.reshape(*x.shape[:2], -1)[..., :length] for part in parts]
    return jnp.concatenate([*parts, *(at_positions(part, arrays, spec) for part in parts)], -1)


def at_positions(x: Array, arrays: AttentionArrays, spec: AttentionSpec) -> Array:
    """`x [B or 1, H, S]` at the positions of queries, `[B or 1, H, T]`; of those outside of the keys at the nearest."""
    queries, keys = arrays.q.shape[1], x.shape[-1]
    if arrays.rows is None and spec.offset == 0 and queries == keys:
        return x
    position = jnp.arange(queries, dtype=jnp.int32)[None] + as_value(spec.offset)
    position = jnp.clip(position if arrays.rows is None else arrays.rows.position, 0, keys - 1)[:, None]
    batch = max(x.shape[0], position.shape[0])
    x, position = (jnp.broadcast_to(a, (batch, *a.shape[1:])) for a in (x, position))
    return jnp.take_along_axis(x, position, axis=-1)


def gradient(arrays: AttentionArrays, spec: AttentionSpec, by_query: Array, by_key: Array) -> Array:
    """The gradient of the gates from sums of the scores' gradients over each query's keys `[B, H, T]` and each key's queries `[B, H, S]`: of a sum of
    gates, which queries at its token add and its key subtracts, and so of every gate up to it."""
    log_forget = arrays.log_forget
    assert log_forget is not None
    (added,) = jax.linear_transpose(lambda x: at_positions(x, arrays, spec), by_key)(by_query)
    behind = jax.lax.cumsum(added - by_key, axis=2, reverse=True)
    return sum_batch(behind, log_forget).swapaxes(1, 2).astype(log_forget.dtype)
