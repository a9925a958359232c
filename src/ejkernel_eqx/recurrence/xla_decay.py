"""Decays within chunks, computed without differences of sums.

A chunk of `2s` tokens consists of two of `s` tokens and the square between them, in which token `i` of the later half sees token `j` of the
earlier one through (the decay from the middle to `i`) x (the decay from `j` to the middle), and so on down to single tokens. Log-decays and
their sums are never positive, so no exponential overflows, and the decay between two tokens is exact however strong the decays around
them are. `M = HS * NC` counts the chunks of all heads.

Within blocks of `BLOCK` tokens all halves have one form except for their masks: products of whole blocks, processed by one scan, so that a
single body is compiled and differentiated, without residuals. Only the few larger halves are sliced out.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .xla_chunks import blocks_of, ends, halves, joined, squares

_EXACT = lax.Precision.HIGHEST


class Decays(NamedTuple):
    """Decay factors. A scalar decay counts as a single channel, `X = 1`."""

    pairs: Array | None
    """For a scalar decay: `[B, M, C, C]` from `j` to `i`; at most 1 where j >= i."""
    logs: Array | None
    """For channels: the log-decays themselves, `[B, blocks, BLOCK, X]`."""
    levels: list[tuple[Array, Array]]
    """For channels: for s = BLOCK, 2 BLOCK, .. C/2, over all blocks of `2s` tokens, `[B, blocks, s, X]` from the middle of a block up to each
    of its later tokens, and from each of its earlier tokens to the middle."""
    head: Array  # [B, M, C, X]: from the start of the chunk up to each token
    tail: Array  # [B, M, C, X]: from each token to the end of the chunk
    total: Array  # [B, M, X]


def closed(g: Array) -> Array:
    """Log-decays, bounded below by one whose exponential is zero, so that no sum is infinite; the gradient below the bound is zero."""
    info = jnp.finfo(g.dtype)
    # From the exponents of the smallest number: a thread of XLA's, which partitions a program, would read that number as zero.
    return jnp.maximum(g, jnp.asarray(math.log(2) * int(info.minexp - info.nmant) - 1.0, g.dtype))


def scalar_decays(g: Array) -> Decays:
    """Decays from log-decays `g [B, M, C]`; every sum is a product with zeros and ones."""
    size = g.shape[-1]
    i, j, t = (lax.broadcasted_iota(jnp.int32, (size, size, size), axis) for axis in range(3))
    total = lambda pattern, chosen: jnp.einsum(pattern, g, chosen.astype(g.dtype), precision=_EXACT)
    # The sum from `j` to `i` excludes the decay of `j`, which applies before its key is written.
    pairs = total("...t,ijt->...ij", (j < t) & (t <= i))
    head = total("...t,it->...i", (t <= i)[:, 0])
    tail = total("...t,it->...i", (t > i)[:, 0])
    return Decays(
        jnp.exp(pairs), None, [], jnp.exp(head)[..., None], jnp.exp(tail)[..., None], jnp.exp(head[..., -1:])
    )


def channel_decays(g: Array) -> Decays:
    """Decays from log-decays `g [B, M, C, X]`."""
    logs = blocks_of(g)
    size = logs.shape[2]
    head, tail = _sums(np.tri(size, dtype=bool), logs), _sums(~np.tri(size, dtype=bool), logs)
    _, total = lax.split(head, (size - 1, 1), 2)
    levels = []
    for _ in range((g.shape[2] // size).bit_length() - 1):
        early_head, late_head = halves(head)
        early_tail, late_tail = halves(tail)
        early_total, late_total = halves(total)
        levels.append((jnp.exp(late_head), jnp.exp(early_tail)))
        # The later half's sums continue those of the whole earlier half.
        head = jnp.concatenate([early_head, late_head + early_total], 2)
        tail = jnp.concatenate([early_tail + late_total, late_tail], 2)
        total = early_total + late_total
    return Decays(None, logs, levels, jnp.exp(head), jnp.exp(tail), jnp.exp(total)[:, :, 0])


def _sums(chosen: Any, logs: Array) -> Array:
    """Sums, for each token `i` of a block, the log-decays selected by `chosen [i, t]`."""
    # One product per block: the result of a single product for all would have to be transposed.
    chosen = jnp.zeros_like(logs[:, :, :1, :1]) + jnp.asarray(chosen, logs.dtype)[None, None]
    return jnp.einsum("...it,...tx->...ix", chosen, logs, precision=_EXACT)


def _over_halves(add: Callable[[Any, Array, Array], Any], first: Any, decays: Decays) -> Any:
    """Applies `add(sums, factors, pairs)` to `first` for each level within blocks. `factors [B, blocks, BLOCK, X]` are the decays between the
    tokens and the middles of their blocks; `pairs [i, j]` selects tokens of the later and the earlier halves."""
    logs = decays.logs
    assert logs is not None
    levels = [_halves_within(logs.shape[2], 1 << n) for n in range(logs.shape[2].bit_length() - 1)]
    if not levels:
        return first

    @jax.checkpoint
    def body(sums: Any, level: tuple[Array, Array]) -> tuple[Any, None]:
        between, pairs = level
        return add(sums, jnp.exp(_sums(between, logs)), pairs), None

    between, pairs = (jnp.asarray(np.stack(x)) for x in zip(*levels, strict=True))
    return lax.scan(body, first, (between.astype(logs.dtype), pairs))[0]


def _halves_within(size: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Masks for blocks of `2 * step` tokens: which log-decays lie between token `i` and the middle, `[i, t]`; and whether `i` is in the later half
    of the block whose earlier half contains `j`, `[i, j]`."""
    # In NumPy, as the masks depend on static sizes only.
    i, t = np.arange(size)[:, None], np.arange(size)
    middle = i // (2 * step) * (2 * step) + step
    late = i >= middle
    between = np.where(late, (middle <= t) & (t <= i), (i < t) & (t < middle))
    return between, late & (t < middle) & (t >= middle - step)


def decayed_scores(
    xs: tuple[Array, ...], ys: tuple[Array, ...], decays: Decays, precision: Any
) -> tuple[Array, ...]:
    """`[B, M, C, C]` for each of `xs` and, with it, each of `ys`: sums over channels of `x_i y_j` decayed from `j` to `i`, zero where j > i."""
    dot = lambda x, y: jnp.einsum("...rd,...sd->...rs", x, y, precision=precision)
    y_blocks = [blocks_of(y) for y in ys]
    # One array where one of `ys` is among `xs`, as its gradient is then one, too.
    known = dict(zip(map(id, ys), y_blocks, strict=True))
    x_blocks = [known[id(x)] if id(x) in known else blocks_of(x) for x in xs]
    own = np.eye(y_blocks[0].shape[2], dtype=bool)[None, None]

    def add(scores: list[Array], factors: Array, pairs: Array) -> list[Array]:
        # A factor is at most 1 on either side of the middle, so products of two cannot overflow.
        keys = [y * factors for y in y_blocks]
        queries = [x * factors for x in x_blocks]
        new = [dot(x, y) for x in queries for y in keys]
        return [jnp.where(pairs[None, None], x, s) for x, s in zip(new, scores, strict=True)]

    first = [jnp.where(own, (x * y).sum(-1)[..., None], 0) for x in x_blocks for y in y_blocks]
    scores = _over_halves(add, first, decays)
    for late, early in decays.levels:
        step = late.shape[2]
        # Keys decay to the middle of the block, and queries from there.
        keys = [ends(y, step)[0] * early for y in ys]
        queries = [ends(x, step)[1] * late for x in xs]
        below = [dot(x, y) for x in queries for y in keys]
        scores = [joined(s, between) for s, between in zip(scores, below, strict=True)]
    return tuple(scores)


def decayed_mix(scores: Array, v: Array, decays: Decays, precision: Any) -> Array:
    """`[B, M, C, V]`: sums over `j <= i` of `scores_ij v_j`, with the channels of v decayed from `j` to `i`."""
    mix = lambda scores, v: jnp.einsum("...rs,...sv->...rv", scores, v, precision=precision)
    v_blocks = blocks_of(v)
    size = v_blocks.shape[2]
    own = squares(scores, size)
    out = _over_halves(
        lambda out, factors, pairs: (
            out + factors * mix(jnp.where(pairs[None, None], own, 0), v_blocks * factors)
        ),
        jnp.where(np.eye(size, dtype=bool)[None, None], own, 0).sum(-1)[..., None] * v_blocks,
        decays,
    )
    for late, early in decays.levels:
        step = late.shape[2]
        gained = mix(squares(scores, step, below=True), ends(v, step)[0] * early)
        before, after = halves(out)
        out = jnp.concatenate([before, after + late * gained], 2)
    return out
