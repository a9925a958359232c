"""Attention over pages in plain XLA: loops over blocks of keys with an online softmax, in two passes.

Sequences with few queries (decodes) are processed together, one block of keys of each at a time. The others are processed in tiles of
queries, one tile after another. Each starts at its first visible block, and the loops end at the last one, so nothing else is gathered.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..core import Named
from ..core.arguments import accumulator
from ..core.platforms import supports_all
from ..launch.fields import Checked, Count
from ..parallel import Leading, match_varying, opaque, Split
from .flat import flatten_rows, gather_chunks, split_pages
from .spec import axes_of, PagedArrays, PagedSpec, PAGES, SHARED, STORED, unmapped

R = TypeVar("R")
Carry = tuple[Array, Array, Array]
"""The state of an online softmax, `[n, K, G, Q]`: the largest score, the denominator, and the sum of values, which has a further axis."""


@dataclasses.dataclass(frozen=True)
class XlaConfig(Checked):
    """Queries per tile and keys per block. Sequences with up to `decode_queries` queries are computed together."""

    block_q: Count = 128
    block_k: Count = 128
    decode_queries: Count = 4


config_type = XlaConfig
unsupported = supports_all


def default_config(problem: Any, device: Any) -> XlaConfig:
    return candidates(problem, device)[0]


def candidates(problem: Any, device: Any) -> list[XlaConfig]:
    """Configurations worth timing, the heuristic first, without those that split the problem in the same way."""
    wanted = [(128, 128), (128, 256), (256, 256), (128, 512), (64, 128), (256, 512), (128, 64), (128, 1024)]  # fmt: skip
    if problem.dim("Q") == 1:
        wanted = [(128, size) for size in (128, 256, 512, 64, 1024, 32)]
    return distinct(problem, [XlaConfig(*sizes) for sizes in wanted])


def distinct(problem: Any, configs: list[XlaConfig]) -> list[XlaConfig]:
    """Those that split the problem in different ways."""
    keys, queries = problem.dim("M") * problem.dim("p"), problem.dim("Q")
    ways: dict[tuple[int, int], XlaConfig] = {}
    for config in configs:
        ways.setdefault((min(config.block_q, queries), min(config.block_k, keys)), config)
    return list(ways.values())


def forward(arrays: PagedArrays, spec: PagedSpec, config: XlaConfig) -> Named:
    """`out [*, T, H, V]` and `lse [*, T, H]`. `jax.vmap` adds leading axes, which become additional sequences."""

    attend = lambda flat: _attend(Call(PagedArrays.of(flat), spec, config))
    leading = Leading(axes=axes_of(arrays, spec), shared=SHARED.intersection(arrays.given))
    return over_rows(attend, arrays.given, leading, lambda given: unmapped(PagedArrays.of(given), spec))


def over_rows(
    attend: Callable[[Named], Named], given: Named, leading: Leading, alone: Callable[[Named], frozenset[str]]
) -> Named:
    """`attend`, which takes arrays without leading axes, on arrays with some. `alone`: those that all rows share."""

    def folded(given: Named, runs: Any) -> Named:
        return flatten_rows(attend, given, leading.shared, alone(given))

    # Where types carry shardings, indices into a sharded array must be local to one device.
    return opaque(folded, leading, split=Split.EXPLICIT, sliced=False)(given)


class Call:
    """One call during its trace, without leading axes."""

    def __init__(self, arrays: PagedArrays, spec: PagedSpec, config: XlaConfig):
        self.arrays, self.spec = arrays, spec
        self.tokens, self.heads, _ = arrays.q.shape
        _, self.page_size, self.kv_heads, self.value_dim = (arrays.k if arrays.v is None else arrays.v).shape
        self.groups = self.heads // self.kv_heads
        self.q = arrays.q.reshape(self.tokens, self.kv_heads, self.groups, -1)
        self.operand = _operand_dtype(arrays, spec)
        self.accum, self.lse_dtype = accumulator(self.operand), accumulator(arrays.q.dtype)
        # A table without columns still gives blocks of a positive size.
        keys = max(arrays.page_table.shape[-1], 1) * self.page_size
        self.block_k, self.chunk = split_pages(self.page_size, min(config.block_k, keys))
        self.block_q = min(config.block_q, spec.max_query_len, self.tokens)
        self.few = min(config.decode_queries, spec.max_query_len)
        stored = {name: x for name, x in arrays.given.items() if name in STORED}
        # Scales per head are the same for every page, so they are not gathered with them.
        self.per_head = {name: x for name, x in stored.items() if x.ndim == 1}
        self.pages = {name: x for name, x in stored.items() if x.ndim > 1}

    def dot(self, pattern: str, x: Array, y: Array) -> Array:
        # A device may otherwise round float32 operands on their way into the product.
        precision = lax.Precision.HIGHEST if self.operand == jnp.float32 else None
        x, y = x.astype(self.operand), y.astype(self.operand)
        return jnp.einsum(pattern, x, y, precision=precision, preferred_element_type=self.accum)

    def of_heads(self, x: Array) -> Array:
        """`[H]` to `[K, G, 1]`."""
        return x.reshape(self.kv_heads, self.groups, 1).astype(self.accum)


def _operand_dtype(arrays: PagedArrays, spec: PagedSpec) -> Any:
    """The dtype of the products. Quantised numbers are exact in every other dtype; a probability times a scale needs the range of float32."""
    pages = {
        x.dtype for name, x in arrays.given.items() if name in PAGES and f"{name}_scale" not in arrays.given
    }
    size = max(dtype.itemsize for dtype in {arrays.q.dtype, *pages})
    widest = {dtype for dtype in {arrays.q.dtype, *pages} if dtype.itemsize == size}
    if len(widest) > 1 or (spec.scales is not None and jnp.dtype(jnp.float16) in widest):
        return jnp.dtype(jnp.float32)
    return widest.pop()


class Queries(NamedTuple):
    """At most `Q` queries of each of `n` sequences."""

    sequence: Array  # [n]
    index: Array  # [n, Q]: index of the query in its sequence
    real: Array  # [n, Q]
    q: Array  # [n, Q, K, G, D]


def _attend(call: Call) -> Named:
    # Made from the queries, so that their type carries the sharding over heads and devices.
    lse = match_varying(jnp.zeros_like(call.q[..., 0], call.lse_dtype) - jnp.inf, call.arrays)
    out = jnp.zeros_like(lse, call.q.dtype)[..., None]
    out = jnp.broadcast_to(out, (*lse.shape, call.value_dim))
    out, lse = in_passes(call, lambda queries: softmax(call, queries, span_of(call, queries)), (out, lse))
    return {"out": out.reshape(call.tokens, call.heads, -1), "lse": lse.reshape(call.tokens, call.heads)}


def in_passes(call: Call, of_queries: Callable[[Queries], R], results: R) -> R:
    """`results`, a tree of arrays `[T, ...]`, with those of all queries written into them: `of_queries` returns arrays `[n, Q, ...]`."""
    results = _decodes(call, of_queries, results)
    return _tiles(call, of_queries, results) if call.spec.max_query_len > call.few else results


def _decodes(call: Call, of_queries: Callable[[Queries], R], results: R) -> R:
    """Computes all sequences with few queries."""
    arrays, index = call.arrays, jnp.arange(call.few, dtype=jnp.int32)
    real = index[None] < arrays.q_len[:, None]
    if call.spec.max_query_len > call.few:
        # Longer sequences are left to the tiles, which compute all of their queries.
        real &= (arrays.q_len <= call.few)[:, None]
    # Past the end where no query is real: reads give zeros there, and writes are dropped.
    token = jnp.where(real, arrays.q_start[:, None] + index[None], call.tokens)
    q = call.q.at[token].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    sequence = jnp.arange(real.shape[0], dtype=jnp.int32)
    parts = of_queries(Queries(sequence, jnp.broadcast_to(index, real.shape), real, q))
    return jax.tree.map(
        lambda x, part: x.at[token].set(part, mode="drop", wrap_negative_indices=False), results, parts
    )


def _tiles(call: Call, of_queries: Callable[[Queries], R], results: R) -> R:
    """Computes the other sequences, in tiles of queries. The loop ends at the last tile with queries."""
    arrays, size = call.arrays, call.block_q
    # Lengths are data and might exceed the static maximum; further queries are not computed.
    length = jnp.minimum(arrays.q_len, call.spec.max_query_len)
    tiles = jnp.where(length > call.few, (length + size - 1) // size, 0)
    ends = jnp.cumsum(tiles, dtype=jnp.int32)

    def tile(number: Array, results: R) -> R:
        # The sequence's index is the number of sequences whose tiles all come before this one.
        n = jnp.sum(ends <= number, dtype=jnp.int32)
        start = arrays.q_start[n] + (number - ends[n] + tiles[n]) * size
        begin = jnp.clip(start, 0, call.tokens - size)  # the last tile, moved back so that it fits
        token = begin + jnp.arange(size, dtype=jnp.int32)
        index = token - arrays.q_start[n]
        real = (token >= start) & (index < length[n])
        q = lax.dynamic_slice_in_dim(call.q, begin, size)
        new = of_queries(Queries(n[None], index[None], real[None], q[None]))

        def put(x: Array, y: Array) -> Array:
            # A tile may overlap queries of other sequences, whose results must survive.
            old = lax.dynamic_slice_in_dim(x, begin, size)
            keep = real.reshape(size, *(1,) * (x.ndim - 1))
            return lax.dynamic_update_slice_in_dim(x, jnp.where(keep, y[0], old), begin, 0)

        return jax.tree.map(put, results, new)

    return lax.fori_loop(jnp.zeros_like(ends[-1]), ends[-1], tile, results)


class Span(NamedTuple):
    """Keys that the queries see."""

    own: Array  # [n]: the first key of the sequence's new tokens
    i: Array  # [n, Q]: the positions of the queries, which are the last keys that they see
    lowest: Array  # [n, Q]: the first ones
    begin: Array  # [n]: where the sequence's first block begins
    blocks: Array  # the number of blocks of the sequence that sees most


def span_of(call: Call, queries: Queries) -> Span:
    """The keys that queries see by their positions."""
    arrays, n, left = call.arrays, queries.sequence, call.spec.left
    own = arrays.kv_len[n] - arrays.q_len[n]
    i = own[:, None] + queries.index
    first = jnp.zeros_like(own) if arrays.kv_start is None else jnp.maximum(arrays.kv_start[n], 0)
    lowest = jnp.broadcast_to(first[:, None], i.shape)
    lowest = lowest if left is None else jnp.maximum(i - left, lowest)
    return span_between(call, queries, own, lowest, i)


def span_between(call: Call, queries: Queries, own: Array, lowest: Array, i: Array) -> Span:
    """The keys from `lowest` to `i`."""
    held = call.arrays.page_table.shape[-1] * call.page_size
    # Queries that are not real must not widen the span, so each bound is neutral for them.
    end = jnp.where(queries.real, jnp.minimum(i + 1, held), 0).max(1)
    begin = jnp.where(queries.real, lowest, held).min(1) // call.chunk * call.chunk
    blocks = jnp.maximum((end - begin + call.block_k - 1) // call.block_k, 0).max()
    return Span(own, i, lowest, begin, blocks)


def softmax(call: Call, queries: Queries, span: Span) -> tuple[Array, Array]:
    """`[n, Q, K, G, V]` and `[n, Q, K, G]`, by a loop over blocks of keys."""
    begin, blocks = span.begin, span.blocks
    table = call.arrays.page_table[queries.sequence]

    def block(number: Array, carry: Carry) -> Carry:
        loaded, seen, scores = scores_at(call, queries, span, table, begin + number * call.block_k)
        return with_keys(carry, scores, lambda weights: _values(call, weights, loaded, seen.any(1)))

    return finished(call, lax.fori_loop(jnp.zeros_like(blocks), blocks, block, start_of(call, queries)))


def with_keys(carry: Carry, scores: Array, values: Callable[[Array], Array]) -> Carry:
    """The state after further keys of these scores `[n, K, G, Q, S]`; `values` returns the sum of their values under the given weights."""
    largest, total, acc = carry
    top = jnp.maximum(largest, scores.max(-1))
    # Before the first visible key the maximum is -inf, and -inf minus -inf would be NaN.
    shift = jnp.where(top > -jnp.inf, top, 0)
    weights, fade = jnp.exp(scores - shift[..., None]), jnp.exp(largest - shift)
    return top, total * fade + weights.sum(-1), acc * fade[..., None] + values(weights)


def finished(call: Call, carry: Carry) -> tuple[Array, Array]:
    """`[n, Q, K, G, V]` and `[n, Q, K, G]`."""
    largest, total, acc = carry
    # A query without a visible key or a sink gives 0 and a log-sum-exp of -inf.
    some = total != 0
    out = acc / jnp.where(some, total, 1)[..., None]
    lse = jnp.where(some, jnp.log(jnp.where(some, total, 1)) + largest, -jnp.inf)
    return jnp.moveaxis(out, 3, 1).astype(call.q.dtype), jnp.moveaxis(lse, 3, 1).astype(call.lse_dtype)


def scores_at(
    call: Call, queries: Queries, span: Span, table: Array, at: Array
) -> tuple[Named, Array, Array]:
    """The block of keys from `at [n]` on as the pages hold it, which of them the queries see, `[n, Q, S]`, and scores `[n, K, G, Q, S]`, minus
    infinity for the others."""
    own, i, lowest, _, _ = span
    j = at[:, None] + jnp.arange(call.block_k, dtype=jnp.int32)[None]  # [n, S]
    loaded, there = gather_chunks(call.pages, table, at, call.block_k, call.chunk)
    loaded |= call.per_head
    seen = there[:, None, :] & (lowest[..., None] <= j[:, None]) & (j[:, None] <= i[..., None])
    seen &= queries.real[..., None]
    return loaded, seen, jnp.where(seen[:, None, None], _scores(call, queries, loaded, i, j, own), -jnp.inf)


def start_of(call: Call, queries: Queries) -> Carry:
    """The state before any key: a sink counts as a first key whose value is 0."""
    zeros = match_varying(jnp.zeros_like(queries.q[..., 0], call.accum), call.arrays)
    zeros = jnp.moveaxis(zeros, 1, 3)  # [n, K, G, Q]
    largest = zeros - jnp.inf
    if call.arrays.sinks is not None:
        largest = zeros + call.of_heads(call.arrays.sinks)[None]
    # A sink's weight relative to itself is 1; a sink of -inf counts as none.
    total = jnp.where(largest > -jnp.inf, zeros + 1, 0)
    return largest, total, jnp.broadcast_to(zeros[..., None], (*zeros.shape, call.value_dim))


def _scores(call: Call, queries: Queries, loaded: Named, i: Array, j: Array, own: Array) -> Array:
    """`[n, K, G, Q, S]`, including hidden keys."""
    arrays, spec, width = call.arrays, call.spec, call.pages["k"].shape[-1]
    pattern = "nqkgd,nskd->nkgqs"
    scores = _scaled(call.dot(pattern, queries.q[..., :width], loaded["k"]), loaded.get("k_scale"))
    if "rope" in loaded:
        more = call.dot(pattern, queries.q[..., width:], loaded["rope"])
        scores += _scaled(more, loaded.get("rope_scale"))
    scores *= spec.scale
    if spec.logits_soft_cap is not None:
        scores = spec.logits_soft_cap * jnp.tanh(scores / spec.logits_soft_cap)
    if arrays.slopes is not None:
        distance = (j[:, None] - i[..., None]).astype(call.accum)
        scores += call.of_heads(arrays.slopes)[None, ..., None] * distance[:, None, None]
    if arrays.own_gates is not None:
        token = arrays.q_start[queries.sequence][:, None] + queries.index
        ours = arrays.own_gates.at[token].get(mode="fill", fill_value=0)  # [n, Q, H, 2]
        gates = (ours[:, :, None] - loaded["gates"][:, None]).sum(-1)  # [n, Q, S, H]
        scores += jnp.moveaxis(gates.reshape(*gates.shape[:3], call.kv_heads, call.groups), (1, 2), (3, 4))
    if arrays.qq_bias is not None:
        place = (j - own[:, None])[:, None]
        # Clipped for the lookup only: keys before the new tokens get no bias.
        clipped = (jnp.clip(x, 0, arrays.qq_bias.shape[-1] - 1) for x in (queries.index[..., None], place))
        bias = arrays.qq_bias[tuple(clipped)].astype(call.accum)
        scores += jnp.where(place >= 0, bias, 0)[:, None, None]
    return scores


def _values(call: Call, weights: Array, loaded: Named, seen: Array) -> Array:
    """`[n, K, G, Q, V]`; a value that no query sees counts as 0."""
    name = "k" if call.spec.latent else "v"
    scale = loaded.get(f"{name}_scale")
    if scale is not None and scale.ndim > 1:
        # The weights take the scale per token; that of an unseen slot may be NaN and counts as 0.
        weights = _scaled(weights, jnp.where(seen[..., None], scale, 0))
        scale = None
    # Unseen slots may hold NaN, which a weight of 0 would not remove.
    values = jnp.where(seen[..., None, None], loaded[name], jnp.zeros((), loaded[name].dtype))
    result = call.dot("nkgqs,nskv->nkgqv", weights, values)
    return result if scale is None else result * scale[None, :, None, None, None].astype(result.dtype)


def _scaled(x: Array, scale: Array | None) -> Array:
    """`[n, K, G, Q, S]` times scales `[n, S, K]` or `[K]`."""
    if scale is None:
        return x
    scale = scale.astype(x.dtype)
    if scale.ndim == 1:
        return x * scale[None, :, None, None, None]
    return x * jnp.swapaxes(scale, 1, 2)[:, :, None, None]
