"""The forward kernel: for each tile of queries a running maximum, denominator and sum over the tiles of keys that it sees."""

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from ...launch.by_name import LOG2E
from .steps import Entry, FIRST, LAST
from .tile import clean, dot, Form, Head, keep, keys_of, run_step, scores, visible, wide

_LN2 = 1 / LOG2E


def forward_kernel(form: Form, refs: Any, entry: Entry, head: Head, *, guarded: bool) -> None:
    """`guarded`: a query may see nothing in its first tile."""

    @pl.when(entry.flags & FIRST != 0)
    def _start() -> None:
        # A sink is a key without a value: its score is the first maximum, its weight relative to that is 1.
        top = refs.sink * LOG2E if form.sinks else -jnp.inf
        refs.top[...] = jnp.full(refs.top.shape, top, jnp.float32)
        refs.total[...] = jnp.full(refs.total.shape, 1.0 if form.sinks else 0.0, jnp.float32)
        refs.acc[...] = jnp.zeros(refs.acc.shape, jnp.float32)

    def attend(masked: bool) -> None:
        v = refs.v[...]  # [BK, V]
        qk = dot(form, refs.q[...], keys_of(form, refs), transposed=True)  # [BQ, BK]
        s, _ = scores(form, qk, refs, head, entry.own, entry.other)
        if masked:
            seen = visible(form, refs, entry.own, entry.other)
            s = jnp.where(seen, s, -jnp.inf)
            if form.blind:
                (v,) = clean(seen, v)
        top = refs.top[...]  # [BQ, LANES], all columns alike
        new = jnp.maximum(top, jnp.max(s, axis=1, keepdims=True) * form.multiplier)
        shift = jnp.where(new == -jnp.inf, 0.0, new) if guarded else new
        p = jnp.exp2(s * form.multiplier - wide(shift, form.block_k))
        alpha = jnp.exp2(top - shift)
        refs.top[...] = new
        refs.total[...] = refs.total[...] * alpha + jnp.sum(p, axis=1, keepdims=True)
        # Dropout applies to the weights of the values, not to the denominator.
        rate = form.spec.dropout_rate
        if rate > 0:
            p = jnp.where(keep(form, refs, head, entry.own, entry.other), p / (1 - rate), 0.0)
        refs.acc[...] = refs.acc[...] * wide(alpha, v.shape[1]) + dot(form, p.astype(v.dtype), v)

    run_step(form, entry.flags, attend)

    @pl.when(entry.flags & LAST != 0)
    def _finish() -> None:
        # out = acc / total, lse = top + log(total); 0 and minus infinity for a row that saw no key.
        total = refs.total[...]
        some = total > 0
        safe = jnp.where(some, total, 1.0)
        inverse = jnp.where(some, 1.0 / safe, 0.0)
        refs.out[...] = (refs.acc[...] * wide(inverse, refs.acc.shape[1])).astype(refs.out.dtype)
        lse = jnp.where(some, refs.top[...] * _LN2 + jnp.log(safe), -jnp.inf)
        refs.lse[...] = lse.T[:1]
