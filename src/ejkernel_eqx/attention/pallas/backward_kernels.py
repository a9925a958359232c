"""The kernels of gradients: of keys and values (`[BK, BQ]` tiles), of queries and slopes, and of a bias. Every sum has one fixed order."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from .steps import Entry, FIRST, LAST
from .tile import clean, distance, dot, Form, Head, keep, keys_of, run_step, scores, upright, visible, wide


class Weights(NamedTuple):
    kept: Array
    """After dropout."""
    ds: Array
    """The gradient of scores."""
    through: Array
    """The gradient of scores before the soft cap."""
    seen: Array | None
    """Which entries are visible, if any is not."""


def _weights(
    form: Form,
    refs: Any,
    tiles: tuple[Any, Any],
    head: Head,
    factors: tuple[Array, ...],
    rows: tuple[Array, Array],
    masked: bool,
) -> Weights:
    """`tiles`: those of queries and keys. `factors`: two of the scores and two of the weights' gradient. `rows`: lse in log2 units, infinite where
    nothing is seen, and delta."""
    a, b, c, d = factors
    s, t = scores(form, dot(form, a, b, transposed=True), refs, head, *tiles)
    dp = dot(form, c, d, transposed=True)
    seen = visible(form, refs, *tiles) if masked else None
    if seen is not None:
        s = jnp.where(seen, s, -jnp.inf)
    exponent = s * form.multiplier - rows[0]
    if form.bias:
        # Where all scores of a row are large, the lse is rounded by more than 1.
        exponent = jnp.minimum(exponent, 0.0)
    p = jnp.exp2(exponent)
    kept = p
    if form.spec.dropout_rate > 0:
        mine, rate = keep(form, refs, head, *tiles), 1 / (1 - form.spec.dropout_rate)
        kept, dp = jnp.where(mine, p * rate, 0.0), jnp.where(mine, dp * rate, 0.0)
    ds = p * (dp - rows[1])
    # What nothing sees may hold NaN. All else that holds it has made results NaN already, so that a second choice by the mask would be in vain.
    real = seen if form.blind else None
    if real is not None:
        ds = jnp.where(real, ds, 0.0)
    through = ds
    if form.spec.logits_soft_cap is not None:
        t = t if real is None else jnp.where(real, t, 0.0)
        through = ds * (1.0 - t * t)
    return Weights(kept, ds, through, seen)


def key_gradient_kernel(form: Form, refs: Any, entry: Entry, head: Head, first: Any, last: Any) -> None:
    """`entry.own` is the tile of keys. `first` and `last`: whether this is the first and last head of a group."""

    @pl.when((entry.flags & FIRST != 0) & first)
    def _start() -> None:
        refs.dk_sum[...] = jnp.zeros(refs.dk_sum.shape, jnp.float32)
        refs.dv_sum[...] = jnp.zeros(refs.dv_sum.shape, jnp.float32)

    def add(masked: bool) -> None:
        q, do = refs.q[...], refs.do[...]  # [BQ, D], [BQ, V]
        factors, rows = (keys_of(form, refs), q, refs.v[...], do), (refs.lse[...], refs.delta[...])
        found = _weights(form, refs, (entry.other, entry.own), head, factors, rows, masked)
        if found.seen is not None and form.blind:
            q, do = clean(found.seen, q, do)
        refs.dv_sum[...] += dot(form, found.kept.astype(do.dtype), do)
        refs.dk_sum[...] += dot(form, found.through.astype(q.dtype), q)

    run_step(form, entry.flags, add)

    @pl.when((entry.flags & LAST != 0) & last)
    def _finish() -> None:
        dk = refs.dk_sum[...] * form.spec.scale
        own = refs.dk.shape[-1]
        refs.dk[...] = dk[:, :own].astype(refs.dk.dtype)
        if form.shared:
            refs.dk_rope[...] = dk[:, own:].T
        refs.dv[...] = refs.dv_sum[...].astype(refs.dv.dtype)


def query_gradient_kernel(form: Form, refs: Any, entry: Entry, head: Head) -> None:
    @pl.when(entry.flags & FIRST != 0)
    def _start() -> None:
        refs.dq_sum[...] = jnp.zeros(refs.dq_sum.shape, jnp.float32)
        refs.lse_column[...] = upright(refs.lse[...])
        refs.delta_column[...] = upright(refs.delta[...])
        if form.alibi:
            refs.slope_sum[...] = jnp.zeros(refs.slope_sum.shape, jnp.float32)

    def add(masked: bool) -> None:
        k = keys_of(form, refs)
        rows = wide(refs.lse_column[...], form.block_k), wide(refs.delta_column[...], form.block_k)
        factors = (refs.q[...], k, refs.do[...], refs.v[...])
        found = _weights(form, refs, (entry.own, entry.other), head, factors, rows, masked)
        if found.seen is not None and form.blind:
            (k,) = clean(found.seen, k)
        refs.dq_sum[...] += dot(form, found.through.astype(k.dtype), k)
        if form.alibi:
            slopes = found.ds * distance(form, refs, entry.own, entry.other)
            refs.slope_sum[...] += jnp.sum(slopes, axis=0, keepdims=True)

    run_step(form, entry.flags, add)

    @pl.when(entry.flags & LAST != 0)
    def _finish() -> None:
        refs.dq[...] = (refs.dq_sum[...] * form.spec.scale).astype(refs.dq.dtype)
        if form.alibi:
            total = jnp.sum(refs.slope_sum[...], axis=1, keepdims=True)
            refs.dslope[...] = jnp.broadcast_to(total, refs.dslope.shape)


def bias_gradient_kernel(
    form: Form, refs: Any, tiles: tuple[Any, Any], head: Head, first: Any, axes: tuple[bool, bool]
) -> None:
    """Every tile of scores, hidden ones too, whose gradient is zero. `first`: whether nothing has been added to this tile of the bias. `axes`:
    whether the bias has queries and keys."""

    @pl.when(first)
    def _start() -> None:
        refs.dbias[...] = jnp.zeros(refs.dbias.shape, jnp.float32)

    rows = wide(upright(refs.lse[...]), form.block_k), wide(upright(refs.delta[...]), form.block_k)
    factors = (refs.q[...], keys_of(form, refs), refs.do[...], refs.v[...])
    ds = _weights(form, refs, tiles, head, factors, rows, True).ds
    for axis, has in enumerate(axes):
        if not has:
            ds = jnp.sum(ds, axis=axis, keepdims=True)
    refs.dbias[...] += ds
