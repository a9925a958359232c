"""A dense reference implementation of attention, differentiable by JAX: the oracle of every test."""

import jax
import jax.numpy as jnp
from jax import Array

from ..core.arguments import accumulator
from .log_forget import at_positions
from .masks.dense import by_pair
from .philox import philox_keep
from .score_mod import modified
from .spec import AttentionArrays, AttentionSpec


def _positions(arrays: AttentionArrays, spec: AttentionSpec) -> tuple[Array, Array]:
    """Query positions `[B or 1, 1, T, 1]` and key positions `[1, 1, 1, S]`."""
    j = jnp.arange(arrays.k.shape[1], dtype=jnp.int32)[None, None, None]
    if arrays.rows is not None:
        return arrays.rows.position[:, None, :, None], j
    return (jnp.arange(arrays.q.shape[1], dtype=jnp.int32) + spec.offset)[None, None, :, None], j


def visibility(arrays: AttentionArrays, spec: AttentionSpec) -> Array:
    """Returns which keys each query sees: bool `[B, H, T, S]`."""
    (batch, t, heads, _), s = arrays.q.shape, arrays.k.shape[1]
    return jnp.broadcast_to(visible(arrays, spec), (batch, heads, t, s))


def visible(arrays: AttentionArrays, spec: AttentionSpec) -> Array:
    """Returns which keys each query sees: bool `[B or 1, H or 1, T, S]`."""
    (batch, t), s = arrays.q.shape[:2], arrays.k.shape[1]
    i, j = _positions(arrays, spec)
    seen = jnp.ones((1, 1, t, s), bool)
    if spec.left is not None:
        seen &= j >= i - spec.left
    if spec.right is not None:
        seen &= j <= i + spec.right
    if arrays.rows is not None:
        seen &= (arrays.rows.start[:, None, :, None] <= j) & (j < arrays.rows.end[:, None, :, None])
    if arrays.q_segments is not None:
        assert arrays.kv_segments is not None
        ours, theirs = arrays.q_segments[:, None, :, None], arrays.kv_segments[:, None, None, :]
        seen &= (ours == theirs) & (ours >= 0)
    if arrays.mask is not None:
        seen &= _every_row(arrays.mask, spec.mask_run, batch)
    if spec.pattern is not None:
        index, heads = jnp.arange(t, dtype=jnp.int32), None if arrays.heads is None else arrays.heads[0]
        seen &= spec.pattern.seen(heads, index, jnp.arange(s, dtype=jnp.int32))[None]
    if arrays.blocks is not None and spec.block_size is not None:
        seen &= by_pair(arrays.blocks, spec.block_size, t, s)
    return seen


def _every_row(x: Array, run: int, batch: int) -> Array:
    """`[B or 1, ...]` from an array over the scores whose rows are shared by the batch."""
    if x.shape[0] in (1, batch):
        return x
    return x[jnp.arange(batch) // run % x.shape[0]]


def attend(arrays: AttentionArrays, spec: AttentionSpec) -> tuple[Array, Array]:
    """Output `[B, T, H, V]` and log-sum-exp `[B, H, T]`, in float64 for float64 inputs and in float32 otherwise."""
    return attend_with_weights(arrays, spec)[:2]


def attend_with_weights(arrays: AttentionArrays, spec: AttentionSpec) -> tuple[Array, Array, Array]:
    """Works as `attend`, plus the weights `[B, H, T, S]` that multiply the values."""
    dtype = accumulator(arrays.q.dtype)
    heads, groups = arrays.q.shape[2], arrays.q.shape[2] // arrays.k.shape[2]
    seen = visibility(arrays, spec)
    key_seen = jnp.swapaxes(seen.any(2), 1, 2)[..., None]  # [B, S, H, 1]
    q = jnp.where(jnp.swapaxes(seen.any(3), 1, 2)[..., None], arrays.q.astype(dtype), 0)
    k = jnp.where(key_seen, jnp.repeat(arrays.k.astype(dtype), groups, axis=2), 0)
    v = jnp.where(key_seen, jnp.repeat(arrays.v.astype(dtype), groups, axis=2), 0)

    i, j = _positions(arrays, spec)
    scores = spec.scale * jnp.einsum("bthd,bshd->bhts", q, k, precision="highest")
    if spec.logits_soft_cap is not None:
        scores = spec.logits_soft_cap * jnp.tanh(scores / spec.logits_soft_cap)
    if arrays.bias is not None:
        scores = scores + _every_row(arrays.bias.astype(dtype), spec.bias_run, len(q))
    if arrays.alibi_slopes is not None:
        scores = scores + arrays.alibi_slopes.astype(dtype)[..., None, None] * (j - i).astype(dtype)
    if arrays.log_forget is not None:
        ends = jnp.cumsum(arrays.log_forget.astype(dtype), axis=1).swapaxes(1, 2)  # [B or 1, H, S]
        scores = scores + at_positions(ends, arrays, spec)[..., None] - ends[:, :, None]

    if spec.score_mod is not None:
        assert arrays.heads is not None
        scores = modified(spec.score_mod, scores, arrays.heads[..., None, None], i, j)

    # The shift cancels, so it carries no gradient; the inner `where` keeps infinities out of `exp` and its derivative.
    seen &= jax.lax.stop_gradient(scores) > -jnp.inf
    scores = jnp.where(seen, scores, 0)
    sinks = jnp.full((1, heads), -jnp.inf, dtype) if arrays.sinks is None else arrays.sinks.astype(dtype)
    sinks = sinks[..., None]  # [B or 1, H, 1]
    shift = jnp.where(seen, scores, -jnp.inf).max(-1, initial=-jnp.inf)
    shift = jax.lax.stop_gradient(jnp.maximum(shift, sinks))
    shift = jnp.where(jnp.isfinite(shift), shift, 0)
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, scores - shift[..., None], 0)), 0)
    total = weights.sum(-1) + (0 if arrays.sinks is None else jnp.exp(sinks - shift))
    some = total > 0
    total = jnp.where(some, total, 1)
    lse = jnp.where(some, jnp.log(total) + shift, -jnp.inf)
    weights = weights / total[..., None]
    if spec.dropout_rate > 0:
        assert arrays.seeds is not None
        keep = philox_keep(arrays.seeds[:, :, None, None], i, j, spec.dropout_rate)
        weights = jnp.where(keep, weights / (1 - spec.dropout_rate), 0)
    return jnp.einsum("bhts,bshv->bthv", weights, v, precision="highest"), lse, weights
