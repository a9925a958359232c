"""Decays within chunks, none of which is ever formed as a difference of two sums.

A chunk of `2s` tokens is two of `s` and the square between them, in which token `i` of the later half sees token `j` of the earlier one
through (the decay from the middle to `i`) x (the decay from `j` to the middle), and so on down to single tokens. Log-decays are never
positive and neither are their sums, so no exponential overflows; and the decay between two tokens is exact however strong those
around them are. Here `M = HS * NC`, the chunks of all heads.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from .xla_chunks import ends, halves, merge

_EXACT = lax.Precision.HIGHEST


class Decays(NamedTuple):
    """Factors. A scalar decay counts as one of a single channel, `X = 1`."""

    pairs: Array | None
    """Of a scalar decay: `[B, M, C, C]` from `j` to `i`; at most 1 where j >= i."""
    levels: list[tuple[Array, Array]]
    """Of channels: for s = 1, 2, .. C/2, over all blocks of `2s` tokens, `[B, blocks, s, X]` from the middle of a block up to each of its
    later tokens, and from each of its earlier tokens to the middle."""
    head: Array  # [B, M, C, X]: from the chunk's start up to each token
    tail: Array  # [B, M, C, X]: from each token to the chunk's end
    total: Array  # [B, M, X]


def scalar_decays(g: Array) -> Decays:
    """Of log-decays `g [B, M, C]`: every sum is a product with zeros and ones."""
    size = g.shape[-1]
    i, j, t = (lax.broadcasted_iota(jnp.int32, (size, size, size), axis) for axis in range(3))
    total = lambda pattern, chosen: jnp.einsum(pattern, g, chosen.astype(g.dtype), precision=_EXACT)
    pairs = total("...t,ijt->...ij", (j < t) & (t <= i))
    head = total("...t,it->...i", (t <= i)[:, 0])
    tail = total("...t,it->...i", (t > i)[:, 0])
    return Decays(
        jnp.exp(pairs), [], jnp.exp(head)[..., None], jnp.exp(tail)[..., None], jnp.exp(head[..., -1:])
    )


def channel_decays(g: Array) -> Decays:
    """Of log-decays `g [B, M, C, X]`."""
    head = total = merge(g, 1)[:, :, None]
    tail, levels = jnp.zeros_like(head), []
    for _ in range(g.shape[2].bit_length() - 1):
        early_head, late_head = halves(head)
        early_tail, late_tail = halves(tail)
        early_total, late_total = halves(total)
        levels.append((jnp.exp(late_head), jnp.exp(early_tail)))
        head = jnp.concatenate([early_head, late_head + early_total], 2)
        tail = jnp.concatenate([early_tail + late_total, late_tail], 2)
        total = early_total + late_total
    return Decays(None, levels, jnp.exp(head), jnp.exp(tail), jnp.exp(total)[:, :, 0])


def decayed_scores(x: Array, y: Array, decays: Decays, precision: Any) -> Array:
    """`[B, M, C, C]`: sums over channels of `x_i y_j` decayed from `j` to `i`, zero where j > i."""
    scores = merge((x * y).sum(-1), 1)[..., None, None]
    for late, early in decays.levels:
        step = late.shape[2]
        below = jnp.einsum(
            "...rd,...sd->...rs", ends(x, step)[1] * late, ends(y, step)[0] * early, precision=precision
        )
        before, after = halves(scores)
        above = jnp.concatenate([before, jnp.zeros_like(before)], -1)
        scores = jnp.concatenate([above, jnp.concatenate([below, after], -1)], 2)
    return scores


def decayed_mix(x: Array, y: Array, v: Array, decays: Decays, precision: Any, visible: Any) -> Array:
    """`[B, M, C, V]`: sums over `j <= i` of `(x_i . y_j) v_j`, the channels of v decayed from `j` to `i`.

    `visible` gives, for a level's s, `[B, blocks, s, s]`: which tokens of the earlier half those of the later half see, or `None`.
    """
    out = merge((x * y).sum(-1)[..., None] * v, 1)[:, :, None]
    for late, early in decays.levels:
        step = late.shape[2]
        scores = jnp.einsum("...rd,...sd->...rs", ends(x, step)[1], ends(y, step)[0], precision=precision)
        seen = visible(step)
        scores = scores if seen is None else jnp.where(seen, scores, 0)
        gained = jnp.einsum("...rs,...sv->...rv", scores, ends(v, step)[0] * early, precision=precision)
        before, after = halves(out)
        out = jnp.concatenate([before, after + late * gained], 2)
    return out
