"""Attention in plain XLA: one scan over the visible (query tile, key tile) pairs, with its own backward.

The list of pairs is built at trace time from the static window, so causal and windowed attention computes only the
tiles it needs and no loop bound depends on data. Tiles are never padded: if a length is not a multiple of the tile, the last
tile starts earlier and hides what the tile before it has done. No matmul contracts the rows of its left operand, which
costs three times as much on a CPU: the backward also uses `q` and `dout` transposed, and accumulates `dk`
and `dv` transposed.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .._shapes import as_value, is_symbolic
from ..core.arguments import accumulator
from ..core.platforms import supports_all
from ..dispatch import Backend, BOTH, FORWARD
from ..launch.fields import Checked, Count
from ..parallel import match_varying
from . import log_forget, xla_symbols
from .cotangents import clean_cotangent, row_terms, sinks_gradient, sum_batch
from .masks import tile_table
from .masks.bounds.classify import touched
from .philox import philox_keep
from .score_mod import modified_and_slope
from .spec import AttentionArrays, AttentionGrads, AttentionSpec

PARTS = {"forward": FORWARD, "backward": BOTH}
_ALIGNMENT = 16  # tile lengths are multiples of this, unless the whole axis is shorter


@dataclasses.dataclass(frozen=True)
class XlaTile(Checked):
    """Tile lengths along queries and keys; a tile longer than the axis covers the whole axis."""

    block_q: Count
    block_k: Count


@dataclasses.dataclass(frozen=True)
class XlaConfig:
    """Tiles of the forward and of the backward."""

    forward: XlaTile
    backward: XlaTile


config_type = XlaConfig
unsupported = supports_all
_TILES_IN_MEMORY = 48  # a GPU's memory holds this many times the scores of one tile
_TILES = tuple(
    XlaTile(*sides)
    for sides in (
        *((256, 512), (128, 512), (256, 256), (512, 512), (128, 256), (512, 256)),
        *((128, 128), (256, 1024), (512, 1024), (1024, 512), (1024, 1024), (512, 128)),
    )
)


def default_config(problem: Any, device: Any) -> XlaConfig:
    first = _ordered(problem, device)[0]
    return XlaConfig(first, first)


def _ordered(problem: Any, device: Any) -> list[XlaTile]:
    """The heuristic first. On a GPU that is the largest square tile whose scores are a small part of its memory, since every tile
    takes a round of launches."""
    if device.backend is not Backend.GPU:
        return list(_TILES)
    sides = (512, 256) if problem.dtype("qkv") == "float32" else (1024, 512, 256)
    if problem.dtype("qkv") != "float32" and problem.dim("D") > 256:  # what a tile adds to is as wide
        sides = (2048, *sides)
    rows, most = problem.dim("B") * problem.dim("H"), device.memory / _TILES_IN_MEMORY
    lengths = problem.dim("T"), problem.dim("S")

    def fits(side: int) -> bool:
        return 4 * rows * math.prod(min(side, length) for length in lengths) <= most

    side = next((side for side in sides if fits(side)), sides[-1])
    return list(dict.fromkeys([XlaTile(side, side), *_TILES]))


def candidates(problem: Any, device: Any) -> list[XlaConfig]:
    """Configurations worth timing, the heuristic first. Tiles that split the axes alike appear once."""
    distinct = {}
    for tile in _ordered(problem, device):
        cut = _split(problem.dim("T"), tile.block_q)[0], _split(problem.dim("S"), tile.block_k)[0]
        distinct.setdefault(cut, tile)
    return [XlaConfig(tile, tile) for tile in distinct.values()]


def _split(length: int, block: int) -> tuple[int, Any, Any]:
    """Tile length, the start of each tile, and the first index that no earlier tile covers; tiles have equal size."""
    if is_symbolic(length):
        start = xla_symbols.starts(length, block)
        return block, start, start
    count = max(-(-length // block), 1)
    size = min(max(-(-length // (count * _ALIGNMENT)), 1) * _ALIGNMENT, length)
    fresh = np.arange(0, length, size) if size else np.zeros(0, int)
    return size, np.minimum(fresh, length - size), fresh


class _Tiles(NamedTuple):
    """The visible pairs of tiles in order: their starts and the first new query and key of each. All static."""

    block_q: int
    block_k: int
    pairs: Any  # int32 [pairs, 4]: query start, key start, first new query, first new key; traced if a length is symbolic
    overlap_q: bool
    overlap_k: bool

    @classmethod
    def make(cls, t: int, s: int, spec: AttentionSpec, tile: XlaTile) -> "_Tiles":
        block_q, q_start, q_fresh = _split(t, tile.block_q)
        block_k, k_start, k_fresh = _split(s, tile.block_k)
        overlap = [
            not is_symbolic(x) and bool(x % max(block, 1)) for x, block in ((t, block_q), (s, block_k))
        ]
        if is_symbolic(t) or is_symbolic(s):
            return cls(block_q, block_k, xla_symbols.pairs(q_start, q_fresh, k_start, k_fresh), *overlap)
        q_last, k_last = q_start + block_q - 1, k_start + block_k - 1
        lowest = q_fresh + spec.offset - (np.inf if spec.left is None else spec.left)
        highest = q_last + spec.offset + (np.inf if spec.right is None else spec.right)
        seen = (k_last >= lowest[:, None]) & (k_fresh <= highest[:, None])
        if spec.pattern is not None:
            seen &= touched(spec.pattern, (q_start, q_last), (k_start, k_last))
        a, b = np.nonzero(seen)
        pairs = np.stack([q_start[a], k_start[b], q_fresh[a], k_fresh[b]], axis=1).astype(np.int32)
        return cls(block_q, block_k, pairs, *overlap)


class _Call:
    """One call during its trace: its arrays in tile layout, and the score of a tile."""

    def __init__(self, arrays: AttentionArrays, spec: AttentionSpec, tile: XlaTile):
        self.spec, self.offset = spec, as_value(spec.offset)
        self.lengths = xla_symbols.lengths_of(arrays)  # without padding, if there is any
        self.arrays = arrays = xla_symbols.whole(arrays, tile)
        self.batch, self.t, self.heads, self.dim = arrays.q.shape
        self.s, self.kv_heads, self.value_dim = arrays.v.shape[1:]
        self.groups = self.heads // self.kv_heads
        self.accum = accumulator(arrays.q.dtype)
        self.precision = lax.Precision.HIGHEST if arrays.q.dtype == jnp.float32 else None
        self.tiles = _Tiles.make(self.t, self.s, spec, tile)
        self.bias, self.mask = self.full(arrays.bias), self.full(arrays.mask)
        self.slopes, self.sinks = self.per_head(arrays.alibi_slopes), self.per_head(arrays.sinks)
        self.seeds: Any = None if arrays.seeds is None else self.per_head(arrays.seeds)[:, :, :, None, None]
        self.blocks = self.full(arrays.blocks)
        # Of forget gates, as in `log_forget.sums`: both parts [B, K, G, 2, S] of keys and [B, K, G, 2, T] of queries.
        self.key_sums = self.query_sums = None
        if arrays.log_forget is not None:
            parts = log_forget.sums(arrays)
            at_queries = [log_forget.at_positions(x, arrays, spec) for x in parts]
            self.key_sums, self.query_sums = (self.per_head(jnp.stack(x, -2)) for x in (parts, at_queries))
        # Only a hidden query or key can be NaN, and only a mask hides.
        conditions = [x is not None for x in (arrays.rows, arrays.mask, arrays.q_segments)]
        self.hides = spec.ranged or spec.listed or any(conditions)
        self.by_tile = self.hides and self._is_known_by_tile()
        self.keys_seen = self._keys_seen() if self.hides and not self.by_tile else None
        self.q, self.k, self.v = self.queries(arrays.q), self.keys(arrays.k), self.keys(arrays.v)

    def zeros(self, shape: tuple[int, ...], summed: tuple[int, ...] = ()) -> Array:
        """Zeros `[B, K, G, ...]`, with 1 for the `summed` axes, to start a carry from.

        Their type matches that of the loop's results: the same sharding (Explicit meshes), the same varying axes
        (`shard_map`).
        """
        start = jnp.zeros_like(self.q, self.accum).sum((3, 4)).sum(summed, keepdims=True)
        start = match_varying(start, self.arrays)
        start = start.reshape(*start.shape, *(1,) * (len(shape) - 3))
        return jnp.broadcast_to(start, shape)

    def full(self, x: Any) -> Any:
        """`[B, H, T, S]` to `[B, K, G, T, S]`; any axis may have size 1."""
        if x is None:
            return None
        heads = (1, 1) if x.shape[1] == 1 else (self.kv_heads, self.groups)
        return x.reshape(x.shape[0], *heads, *x.shape[2:])

    def per_head(self, x: Array | None) -> Any:
        """`[B, H, ...]` to `[B, K, G, ...]`."""
        return None if x is None else x.reshape(x.shape[0], self.kv_heads, self.groups, *x.shape[2:])

    def queries(self, x: Array) -> Array:
        """`[B, T, H, D]` to `[B, K, G, T, D]`."""
        x = x.reshape(self.batch, self.t, self.kv_heads, self.groups, x.shape[-1])
        return x.transpose(0, 2, 3, 1, 4)

    def keys(self, x: Array) -> Array:
        """`[B, S, K, D]` to `[B, K, S, D]`, with zeros for the keys that no query may see."""
        if self.keys_seen is not None:
            x = jnp.where(self.keys_seen[..., None], x, 0)
        return x.transpose(0, 2, 1, 3)

    def _is_known_by_tile(self) -> bool:
        """Returns whether a key that no query sees is found tile by tile only, because several conditions hide it together, or ids, a pattern, a
        map of blocks or symbolic lengths."""
        arrays, spec, has_mask = self.arrays, self.spec, self.mask is not None
        if spec.listed or self.lengths is not None:
            return True
        if arrays.q_segments is not None:
            return has_mask or not spec.sees_itself
        return spec.ranged + (arrays.rows is not None) + has_mask > 1

    def _keys_seen(self) -> Array | None:
        """`[B or 1, S, K or 1]`: whether the window, ranges, segments or mask let some query see the key; `None` for all keys."""
        arrays, spec = self.arrays, self.spec
        if arrays.rows is not None or arrays.q_segments is not None:
            return (tile_table.seen(arrays, spec).keys > 0)[..., None]
        if self.mask is not None:
            # XLA would reduce a constant mask while compiling, which takes seconds instead of microseconds at run time.
            return lax.optimization_barrier(self.mask).any((2, 3)).swapaxes(1, 2)
        first = 0 if spec.left is None else spec.offset - spec.left
        end = self.s if spec.right is None else self.t + spec.offset + spec.right
        if first <= 0 and end >= self.s:
            return None
        j = jnp.arange(self.s, dtype=jnp.int32)
        return ((first <= j) & (j < end))[None, :, None]

    def rows(self, x: Array | None, pair: Array, axis: int) -> Any:
        """The query tile of `x` along `axis`; all of it if that axis is broadcast."""
        if x is None or (x.shape[axis] == 1 != self.t):
            return x
        return lax.dynamic_slice_in_dim(x, pair[0], self.tiles.block_q, axis)

    def columns(self, x: Array | None, pair: Array, axis: int) -> Any:
        """The key tile of `x` along `axis`; all of it if that axis is broadcast."""
        if x is None or (x.shape[axis] == 1 != self.s):
            return x
        return lax.dynamic_slice_in_dim(x, pair[1], self.tiles.block_k, axis)

    def dot(self, pattern: str, x: Array, y: Array) -> Array:
        return jnp.einsum(pattern, x, y, precision=self.precision, preferred_element_type=self.accum)

    def fold(self, x: Array) -> Array:
        """`[.., G, Q, D]` to `[.., G * Q, D]`: the query heads of a key head become rows of one matmul."""
        return x.reshape(*x.shape[:-3], self.groups * self.tiles.block_q, x.shape[-1])

    def fold_last(self, x: Array) -> Array:
        """`[.., D, G, Q]` to `[.., D, G * Q]`."""
        return x.reshape(*x.shape[:-2], self.groups * self.tiles.block_q)

    def unfold(self, x: Array) -> Array:
        """Undoes `fold`."""
        return x.reshape(*x.shape[:-2], self.groups, self.tiles.block_q, x.shape[-1])

    def indices(self, pair: Array) -> tuple[Array, Array]:
        """Queries `[Q]` and keys `[K]` of a tile, counted from 0."""
        sizes = self.tiles.block_q, self.tiles.block_k
        i, j = (pair[n] + jnp.arange(size, dtype=jnp.int32) for n, size in enumerate(sizes))
        return i, j

    def positions(self, pair: Array) -> tuple[Array, Array]:
        """Positions of the queries `[B or 1, 1, 1, Q, 1]` and keys `[1, 1, 1, 1, K]` of a tile, counted in keys."""
        i, j = self.indices(pair)
        rows, at = self.arrays.rows, (i + self.offset)[None, None, None, :, None]
        return at if rows is None else self._tile_rows(rows.position, pair), j[None, None, None, None, :]

    def _tile_rows(self, x: Array, pair: Array) -> Array:
        return self.rows(x, pair, 1)[:, None, None, :, None]

    def visible(self, pair: Array) -> Array | None:
        """Returns which entries of a tile are visible, broadcastable to `[B, K, G, Q, K]`; `None` for all."""
        spec, arrays, (i, j) = self.spec, self.arrays, self.positions(pair)
        terms = []
        if self.tiles.overlap_q:
            terms.append((self.indices(pair)[0] >= pair[2])[None, None, None, :, None])
        if self.tiles.overlap_k:
            terms.append(j >= pair[3])
        if self.lengths is not None:
            terms.append(j < as_value(self.lengths[1]))
        if spec.left is not None:
            terms.append(j >= i - spec.left)
        if spec.right is not None:
            terms.append(j <= i + spec.right)
        if arrays.rows is not None:
            start, end = self._tile_rows(arrays.rows.start, pair), self._tile_rows(arrays.rows.end, pair)
            terms.append((start <= j) & (j < end))
        if arrays.q_segments is not None:
            assert arrays.kv_segments is not None
            ours = self._tile_rows(arrays.q_segments, pair)
            theirs = self.columns(arrays.kv_segments, pair, 1)[:, None, None, None, :]
            terms.append((ours == theirs) & (ours >= 0))
        if self.mask is not None:
            terms.append(self.columns(self.rows(self.mask, pair, 3), pair, 4))
        if spec.pattern is not None:
            heads = None if arrays.heads is None else arrays.heads[0]
            terms.append(self.full(spec.pattern.seen(heads, *self.indices(pair))[None]))
        if self.blocks is not None:
            assert spec.block_size is not None
            blocks = self.blocks
            for axis, index, size in zip((3, 4), self.indices(pair), spec.block_size, strict=True):
                blocks = jnp.take(blocks, index // size, axis=axis, mode="clip")
            terms.append(blocks)
        return functools.reduce(operator.and_, terms) if terms else None

    def scores(self, q: Array, pair: Array) -> tuple[Array, Array, Array, Array | None, Array | None]:
        """Keys and values `[B, K, S, D]` of a tile, zeroed where no query of it sees them if they have not been before; its masked scores
        `[B, K, G, Q, K]` with queries `q`, the `tanh` of the soft cap, and the slope of the function of scores."""
        seen, spec, bent, slope = self.visible(pair), self.spec, None, None
        k, v = self.columns(self.k, pair, 2), self.columns(self.v, pair, 2)
        if self.by_tile:
            assert seen is not None
            some = seen.any((2, 3))[..., None]
            k, v = jnp.where(some, k, 0), jnp.where(some, v, 0)
        scores = self.unfold(self.dot("bkqd,bksd->bkqs", self.fold(self.rows(q, pair, 3)), k)) * spec.scale
        if spec.logits_soft_cap is not None:
            bent = jnp.tanh(scores / spec.logits_soft_cap)
            scores = bent * spec.logits_soft_cap
        if self.bias is not None:
            scores += self.columns(self.rows(self.bias, pair, 3), pair, 4).astype(self.accum)
        if self.slopes is not None:
            scores += self.slopes.astype(self.accum)[..., None, None] * self.distance(pair)
        if self.key_sums is not None:
            ours = self.rows(self.query_sums, pair, 4)[..., :, None]  # [B, K, G, 2, Q, 1]
            apart = ours - self.columns(self.key_sums, pair, 4)[..., None, :]  # [B, K, G, 2, Q, K]
            scores += apart[..., 0, :, :] + apart[..., 1, :, :]
        if spec.score_mod is not None:
            heads = self.per_head(self.arrays.heads)[..., None, None]
            scores, slope = modified_and_slope(spec.score_mod, scores, heads, *self.positions(pair))
        if seen is not None:
            slope = None if slope is None else jnp.where(seen, slope, 0)
            scores = jnp.where(seen, scores, -jnp.inf)
        return k, v, scores, bent, slope

    def distance(self, pair: Array) -> Array:
        i, j = self.positions(pair)
        return (j - i).astype(self.accum)

    def dropped(self, x: Array, pair: Array) -> Array:
        """`x` with dropout applied."""
        rate = self.spec.dropout_rate
        if rate == 0:
            return x
        keep = philox_keep(self.seeds, *self.positions(pair), rate)
        return jnp.where(keep, x * (1 / (1 - rate)), 0)

    def scan(self, body: Callable[[Any, Array], Any], carry: Any) -> Any:
        """`carry` after every pair of tiles that the window leaves visible, which may not be known while tracing."""
        if self.lengths is None and self.batch * self.heads * len(self.tiles.pairs) == 0:
            return carry

        def step(carry: Any, pair: Array) -> tuple[Any, None]:
            inside = None
            if self.lengths is not None:
                inside = xla_symbols.in_window(pair, self.tiles.block_q, self.tiles.block_k, self.spec)
            if inside is None:
                return body(carry, pair), None
            return lax.cond(inside, body, lambda carry, _: carry, carry, pair), None

        return lax.scan(step, carry, jnp.asarray(self.tiles.pairs))[0]


def _put(x: Array, tile: Array, start: Array, axis: int) -> Array:
    return lax.dynamic_update_slice_in_dim(x, tile, start, axis)


def _add(x: Array, tile: Array, start: Array, axis: int) -> Array:
    return _put(x, lax.dynamic_slice_in_dim(x, start, tile.shape[axis], axis) + tile, start, axis)


def forward(arrays: AttentionArrays, spec: AttentionSpec, config: XlaConfig) -> tuple[Array, Array]:
    """Output `[B, T, H, V]` and log-sum-exp `[B, H, T]`."""
    call = _Call(arrays, spec, config.forward)
    rows = call.q.shape[:-1]
    total = call.zeros(rows)
    largest = total - jnp.inf
    if call.sinks is not None:  # A sink is a key that is seen first and whose value is 0.
        largest = total + call.sinks.astype(call.accum)[..., None]
        total = jnp.where(largest > -jnp.inf, total + 1, total)
    acc = call.zeros((*rows, call.value_dim))

    def body(carry, pair):
        largest, total, acc = carry
        _, v, scores, *_ = call.scores(call.q, pair)
        before = call.rows(largest, pair, 3)
        after = jnp.maximum(before, scores.max(-1))
        shift = jnp.where(after == -jnp.inf, 0, after)
        weights = jnp.exp(scores - shift[..., None])
        decay = jnp.exp(before - shift)
        kept = call.fold(call.dropped(weights, pair).astype(call.v.dtype))
        new = call.unfold(call.dot("bkqs,bksv->bkqv", kept, v))
        return (
            _put(largest, after, pair[0], 3),
            _put(total, call.rows(total, pair, 3) * decay + weights.sum(-1), pair[0], 3),
            _put(acc, call.rows(acc, pair, 3) * decay[..., None] + new, pair[0], 3),
        )

    largest, total, acc = call.scan(body, (largest, total, acc))
    empty = total == 0
    total = jnp.where(empty, 1, total)
    lse = jnp.where(empty, -jnp.inf, largest + jnp.log(total))
    out = (acc / total[..., None]).astype(arrays.q.dtype).transpose(0, 3, 1, 2, 4)
    out = out.reshape(call.batch, call.t, call.heads, call.value_dim)
    lse = lse.reshape(call.batch, call.heads, call.t)
    if call.lengths is None:
        return out, lse
    return out[:, : call.lengths[0]], lse[..., : call.lengths[0]]


def backward(
    arrays: AttentionArrays,
    spec: AttentionSpec,
    config: XlaConfig,
    out: Array,
    lse: Array,
    dout: Array,
    dlse: Array | None,
    *,
    key_dtype: Any = None,
) -> AttentionGrads:
    """Cotangents of the differentiable arrays, from the results of `forward` and their cotangents: `out`, `lse`, `dout` and `dlse`, which may be
    `None`. That of the keys may have a dtype of its own."""
    call = _Call(arrays, spec, config.backward)
    given, arrays = arrays, call.arrays
    out, lse, dout, dlse = xla_symbols.whole_rows(out, lse, dout, dlse, tile=config.backward)
    given_lse, (by_row, empty) = lse, row_terms(arrays, out, lse, dout, dlse)
    q, do = _cleaned(call, empty, dout)
    lse, delta = call.per_head(lse), call.per_head(by_row)
    q_transposed, do_transposed = (x.transpose(0, 1, 4, 2, 3) for x in (q, do))  # [B, K, D, G, T]
    safe = jnp.where(lse == -jnp.inf, jnp.inf, lse)
    slopes, bias = call.slopes, None if call.bias is None else _BiasGradient(call)

    def body(carry, pair):
        dq, dk, dv, dbias, dslopes, dsums = carry
        k, v, scores, bent, slope = call.scores(q, pair)
        weights = jnp.exp(scores - call.rows(safe, pair, 3)[..., None])
        kept = call.fold(call.dropped(weights, pair).astype(v.dtype))
        dv_tile = call.dot("bkvq,bkqs->bkvs", call.fold_last(call.rows(do_transposed, pair, 4)), kept)
        dweights = call.unfold(call.dot("bkqv,bksv->bkqs", call.fold(call.rows(do, pair, 3)), v))
        dscores = weights * (call.dropped(dweights, pair) - call.rows(delta, pair, 3)[..., None])
        if slope is not None:
            dscores *= slope
        if bias is not None:
            dbias = bias.add(dbias, dscores, pair)
        if slopes is not None:
            dslopes += (dscores * call.distance(pair)).sum((-2, -1))
        if dsums is not None:
            by_query, by_key = dsums
            dsums = _add(by_query, dscores.sum(-1), pair[0], 3), _add(by_key, dscores.sum(-2), pair[1], 3)
        if bent is not None:
            dscores *= 1 - bent * bent
        dscores = call.fold(dscores.astype(k.dtype))
        dq_tile = call.unfold(call.dot("bkqs,bksd->bkqd", dscores, k))
        dk_tile = call.dot("bkdq,bkqs->bkds", call.fold_last(call.rows(q_transposed, pair, 4)), dscores)
        dk, dv = _add(dk, dk_tile, pair[1], 3), _add(dv, dv_tile, pair[1], 3)
        return _add(dq, dq_tile, pair[0], 3), dk, dv, dbias, dslopes, dsums

    heads = q.shape[:3]
    dq = call.zeros(q.shape)
    dk, dv = (call.zeros((*heads[:2], 1, dim, call.s), (2,))[:, :, 0] for dim in (call.dim, call.value_dim))
    dslopes = None if slopes is None else call.zeros(heads)
    dbias = None if bias is None else bias.zeros()
    dsums = None
    if call.key_sums is not None:
        dsums = call.zeros((*heads, call.t)), call.zeros((*heads, call.s))
    dq, dk, dv, dbias, dslopes, dsums = call.scan(body, (dq, dk, dv, dbias, dslopes, dsums))
    if dsums is not None:
        dsums = [x.reshape(call.batch, call.heads, x.shape[-1]) for x in dsums]
    dq = (dq * spec.scale).astype(arrays.q.dtype).transpose(0, 3, 1, 2, 4)
    grads = AttentionGrads(
        q=dq.reshape(arrays.q.shape),
        k=(dk * spec.scale).astype(key_dtype or arrays.k.dtype).transpose(0, 3, 1, 2),
        v=dv.astype(arrays.v.dtype).transpose(0, 3, 1, 2),
        bias=None if bias is None else bias.finish(dbias),
        alibi_slopes=_per_head_gradient(dslopes, arrays.alibi_slopes),
        sinks=sinks_gradient(arrays, given_lse, by_row),
        log_forget=None if dsums is None else log_forget.gradient(arrays, spec, *dsums),
    )
    return grads if call.lengths is None else xla_symbols.cut(grads, given)


def _cleaned(call: _Call, empty: Array, dout: Array) -> tuple[Array, Array]:
    """`q` and `dout` in tile layout, made finite for `empty` queries, which see no key."""
    q, do = call.q, dout
    if call.hides or call.bias is not None:
        # A row that sees a key may look empty through rounding, but then its query is finite: a NaN would have reached the lse.
        q = jnp.where(call.per_head(empty)[..., None] & ~jnp.isfinite(q), 0, q)
        do = clean_cotangent(do, empty)
    return q, call.queries(do).astype(call.arrays.v.dtype)


def _per_head_gradient(gradient: Array | None, array: Array | None) -> Array | None:
    """`[B, K, G]` to the shape and dtype of an array `[B or 1, H]`."""
    if gradient is None or array is None:
        return None
    return sum_batch(gradient.reshape(gradient.shape[0], array.shape[1]), array).astype(array.dtype)


class _BiasGradient:
    """Sums score gradients into the shape of the bias, tile by tile."""

    def __init__(self, call: _Call):
        self.call, bias = call, call.bias
        lengths = (call.batch, call.kv_heads, call.groups, call.t, call.s)
        self.summed = tuple(a for a in range(5) if bias.shape[a] == 1 != lengths[a])
        # For a bias over both queries and keys, batch and heads are summed at once, so that the carry has the size of the bias. Any
        # other bias is small, so its batch and heads are summed once, after the loop, with one reduction between devices.
        self.small = bool({3, 4} & set(self.summed))
        late = tuple(a for a in self.summed if a < 3) if self.small else ()
        self.late, self.early = late, tuple(a for a in self.summed if a not in late)
        self.shape = tuple(lengths[a] if a in late else bias.shape[a] for a in range(5))

    def zeros(self) -> Array:
        return self.call.zeros(self.shape, tuple(a for a in self.early if a < 3))

    def add(self, total: Array, dscores: Array, pair: Array) -> Array:
        tile = dscores.sum(self.early, keepdims=True)
        tile = tile if self.small else self._over_mapped(tile)
        zero = jnp.zeros((), pair.dtype)
        start = (zero, zero, zero, *(zero if axis in self.summed else pair[axis - 3] for axis in (3, 4)))
        return lax.dynamic_update_slice(total, lax.dynamic_slice(total, start, tile.shape) + tile, start)

    def finish(self, total: Array) -> Array:
        array: Any = self.call.arrays.bias
        total = total.sum(self.late, keepdims=True)
        total = self._over_mapped(total) if self.small else total
        return total.reshape(array.shape).astype(array.dtype)

    def _over_mapped(self, x: Array) -> Array:
        axes = self.call.spec.bias_over
        return lax.psum(x, axes) if axes else x
