"""Checks what a user passes to attention over pages and resolves it to `PagedArrays` and `PagedSpec`.

Errors are raised before anything is computed and name the argument, what was expected, what was received, and the remedy.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._broadcast import like
from .._values import check_between, check_offsets
from ..attention.arguments import parse_window, ScoreOptions
from ..core.arguments import accumulator, array
from ..sequences.packing import ended
from .cache.batch import positions_of, slots_of, to_int32
from .cache.cache import PagedKVCache, PagedLatentCache
from .cache.pages import operands_of, read_array
from .cache.write import at_slots
from .signature import Cache
from .spec import PagedArrays, PagedSpec


@dataclasses.dataclass(frozen=True)
class PagedOptions:
    """The static options shared by every operation of this family."""

    left: int | None
    """The number of keys before its own that a query sees; `None`: all."""
    logits_soft_cap: float | None
    softmax_scale: float | None

    @classmethod
    def read(cls, sliding_window: Any, logits_soft_cap: Any, softmax_scale: Any) -> "PagedOptions":
        """Reads the constructor's arguments. Only the left side of a window matters, because no query sees past its own key."""
        ScoreOptions(logits_soft_cap, softmax_scale)  # raises what is wrong with them
        cap, scale = (None if x is None else float(x) for x in (logits_soft_cap, softmax_scale))
        left = parse_window(sliding_window, True)[0]
        # Bounded, so that a position minus the window fits int32; no cache holds more tokens.
        return cls(None if left is None else min(left, 2**30), cap, scale)


class Scoring(NamedTuple):
    """The arguments of a call that change scores or weights, and whether their log-sum-exp is returned."""

    return_lse: bool
    sinks: Any = None
    alibi_slopes: Any = None
    qq_bias: Any = None


class Tokens(NamedTuple):
    """Queries of each sequence, int32 `[*, N]` each, and the maximum number of queries per sequence."""

    q_start: Array
    q_len: Array
    max_query_len: int


def resolve(
    q: Any, cache: Cache, options: PagedOptions, tokens: Tokens, scoring: Scoring
) -> tuple[PagedArrays, PagedSpec]:
    """The resolved call on a cache that `read_queries` has checked."""
    table, lengths = tables(cache)
    lead = q.shape[:-3]
    if table.shape[-1] == 0:  # no pages at all
        table = jnp.full((*table.shape[:-1], 1), -1, table.dtype)
    table = jnp.broadcast_to(table, (*lead, *table.shape[-2:]))
    lengths = jnp.broadcast_to(lengths, (*lead, lengths.shape[-1]))
    pages = {"v": None, **operands_of(cache)}
    arrays = PagedArrays(
        q, page_table=table, q_start=tokens.q_start, q_len=tokens.q_len, kv_len=lengths, **pages
    )
    if isinstance(cache, PagedKVCache) and cache.gates is not None:
        if scoring.alibi_slopes is not None or cache.gates.shape[-2] != q.shape[-2]:
            raise ValueError(
                f"cache: expected gates of the {q.shape[-2]} heads of q and no alibi_slopes, received those of {cache.gates.shape[-2]} heads."
            )
        if q.ndim > 3:
            raise ValueError(
                f"q: expected [tokens, heads, head_dim] with pages that hold gates, received shape {q.shape}; use jax.vmap over the leading axes."
            )
        arrays = arrays._replace(gates=cache.gates, own_gates=at_slots(cache.gates, write_slots(arrays)))
    latent = isinstance(cache, PagedLatentCache)
    if latent and options.softmax_scale is None:
        raise ValueError(
            "softmax_scale: expected a number with a PagedLatentCache, received None; pass the scale of the expanded heads, such as "
            "(nope_dim + rope_dim) ** -0.5, which cannot be derived from the latent."
        )
    more = {"latent": latent, "scales": cache.scales}
    return _with_options(arrays, options, scoring, tokens.max_query_len, **more)


def read_queries(q: Any, cache: Any, letters: str) -> Array:
    """The queries `[*, T, H, D]`, checked against a bound cache: heads, channels and leading axes must match."""
    q = array("q", q, letters)
    if not isinstance(cache, PagedKVCache | PagedLatentCache):
        raise ValueError(
            f"cache: expected a PagedKVCache or PagedLatentCache, received {type(cache).__name__}."
        )
    if not cache.is_bound:
        raise ValueError(
            "cache: expected a cache bound to page tables, received an unbound one; call cache.bind(page_table, lengths) or cache.bind(batch)."
        )
    lead = q.shape[:-3]
    if cache.batch_shape not in ((), lead):
        raise ValueError(
            f"cache: expected pages without leading axes{f' or with those of q, {lead}' if lead else ''}, received batch_shape "
            f"{cache.batch_shape}; select one layer, or use jax.lax.scan or jax.vmap over the layers."
        )
    table = tables(cache)[0]
    if table.shape[:-2] not in ((), lead):
        raise ValueError(
            f"page_table: expected [N, M]{f' or the leading axes of q, {lead}' if lead else ''}, received shape {table.shape}; bind tables "
            "that match q, or use jax.vmap over both."
        )
    if isinstance(cache, PagedLatentCache):
        what, heads, dim = "latent_dim + rope_dim", 1, cache.latent_dim + cache.rope_dim
    else:
        what, heads, dim = "head_dim", cache.num_kv_heads, cache.head_dim
    if q.shape[-1] != dim:
        raise ValueError(
            f"q: expected the {what} of the cache, {dim}, received {q.shape[-1]} in shape {q.shape}."
        )
    _check_heads(q, heads)
    return q


def _check_heads(q: Array, kv_heads: int) -> None:
    if q.shape[-2] == 0 or kv_heads == 0 or q.shape[-2] % kv_heads:
        raise ValueError(
            f"q: expected a number of query heads that is a multiple of the {kv_heads} key heads, received {q.shape[-2]} in shape "
            f"{q.shape}; the layout is [..., tokens, heads, head_dim]."
        )


def tables(cache: Cache) -> tuple[Array, Array]:
    assert cache.page_table is not None and cache.lengths is not None
    return cache.page_table, cache.lengths


def one_each(q: Array, cache: Cache) -> Tokens:
    """One query per sequence, in order."""
    count = tables(cache)[1].shape[-1]
    if q.shape[-3] != count:
        raise ValueError(
            f"q: expected one query for each of the {count} sequences of the cache, [..., {count}, H, D], received shape {q.shape}; "
            "RaggedPagedAttention accepts more."
        )
    shape = (*q.shape[:-3], count)
    # In numpy, so that the device computes nothing for it.
    start = np.broadcast_to(np.arange(count, dtype=np.int32), shape)
    return Tokens(jnp.asarray(start), jnp.asarray(np.ones(shape, np.int32)), 1)


def packed(q: Array, cache: Cache, query_start_loc: Any, max_query_len: Any) -> Tokens:
    """The queries of all sequences, packed."""
    count, lead = tables(cache)[1].shape[-1], q.shape[:-3]
    shapes = ((count + 1,), (*lead, count + 1))
    expected = f"ints [{count + 1}], the offsets of the {count} sequences of the cache"
    remedy = "; RaggedBatch.query_start_loc holds them"
    offsets = read_array("query_start_loc", query_start_loc, shapes, expected, remedy)
    tokens = q.shape[-3]
    is_int = isinstance(max_query_len, int | np.integer) and not isinstance(max_query_len, bool)
    if max_query_len is not None and (not is_int or max_query_len < 1):
        raise ValueError(
            f"max_query_len: expected a static int of at least 1, the maximum number of queries per sequence, or None, received {max_query_len!r}."
        )
    offsets = check_offsets("query_start_loc", to_int32(offsets), query_start_loc, tokens, zeros_behind=True)
    # Entries after the last sequence are arbitrary, such as zeros.
    offsets = jnp.broadcast_to(_highest_so_far(jnp.clip(offsets, 0, tokens)), (*lead, count + 1))
    length = offsets[..., 1:] - offsets[..., :-1]
    most = tokens if max_query_len is None else max_query_len
    return Tokens(offsets[..., :-1], length, max(min(int(most), tokens), 1))


def _highest_so_far(offsets: Array) -> Array:
    if offsets.shape[-1] > 512:
        return jax.lax.cummax(offsets, axis=offsets.ndim - 1)
    index, others = jnp.arange(offsets.shape[-1]), offsets[..., None, :]
    # This compiles to one kernel; a cumulative maximum does not.
    return jnp.max(jnp.where(like(index[None] <= index[:, None], others), others, 0), axis=-1)


def write_slots(arrays: PagedArrays) -> Array:
    """The slots of the queries' own keys, `[T]`."""
    if arrays.q.ndim > 3:
        raise ValueError(
            f"q: expected [tokens, heads, head_dim] with append=True, received shape {arrays.q.shape}; use jax.vmap over the leading axes."
        )
    tokens, ends = jnp.arange(arrays.q.shape[0], dtype=jnp.int32), arrays.q_start + arrays.q_len
    # Without sequences no token has a slot.
    if ends.shape[0] == 0:
        return jnp.full_like(tokens, -1)
    # Tokens outside all sequences are padding, which is not written.
    real = (tokens >= arrays.q_start[0]) & (tokens < ends[-1])
    ids = jnp.where(real, ended(ends, tokens.shape[0]), -1)
    positions = positions_of(ids, ends, arrays.kv_len)
    return slots_of(ids, positions, arrays.page_table, arrays.k.shape[-3])


def _with_options(
    arrays: PagedArrays, options: PagedOptions, scoring: Scoring, max_query_len: int = 1, **more: Any
) -> tuple[PagedArrays, PagedSpec]:
    """The call with the options of its operation and its small arrays, which are checked."""
    scale = arrays.q.shape[-1] ** -0.5 if options.softmax_scale is None else options.softmax_scale
    more |= {"max_query_len": max_query_len, "return_lse": scoring.return_lse}
    spec = PagedSpec(float(scale), options.logits_soft_cap, options.left, **more)
    heads = arrays.q.shape[-2]

    def floats(name: str, *shapes: Any, expected: str) -> Array | None:
        value = getattr(scoring, name)
        x = None if value is None else read_array(name, value, shapes, f"floats {expected}")
        return None if x is None else x.astype(accumulator(arrays.q.dtype))

    sinks = floats("sinks", (heads,), (heads, None), expected=f"[{heads}] or [{heads}, n]")
    if sinks is not None and sinks.ndim == 2:
        # Several sinks of a head join the denominator as their log-sum-exp.
        sinks = jax.nn.logsumexp(sinks, axis=1)
    slopes = floats("alibi_slopes", (heads,), expected=f"[{heads}], one per query head")
    bias = floats("qq_bias", (None, None), expected="[Q, Q]")
    if bias is not None and (bias.shape[0] != bias.shape[1] or bias.shape[0] < max_query_len):
        raise ValueError(
            f"qq_bias: expected [Q, Q] with Q at least max_query_len={max_query_len}, received shape {bias.shape}; pass max_query_len, or "
            "pad the bias."
        )
    return arrays._replace(sinks=sinks, slopes=slopes, qq_bias=bias), spec


def resolve_dense(
    q: Any, k: Any, v: Any, start: Any, end: Any, options: PagedOptions, scoring: Scoring
) -> tuple[PagedArrays, PagedSpec]:
    """One query per row on the row's own keys. Each row is a sequence, and its keys are a single page."""
    q, k, v = array("q", q, "H D"), array("k", k, "S K D"), array("v", v, "S K V")
    lead = q.shape[:-2]
    if k.shape[:-3] != lead or k.shape[-1] != q.shape[-1] or k.shape[-3] == 0:
        raise ValueError(
            f"k: expected [..., S, K, D] with the leading axes {lead} and the D = {q.shape[-1]} of q and at least one key, received shape "
            f"{k.shape}."
        )
    if v.shape[:-1] != k.shape[:-1] or v.dtype != k.dtype:
        raise ValueError(
            f"v: expected the dtype of k, {k.dtype}, and its shape up to the last axis, {k.shape[:-1]}, received {v.dtype} of shape {v.shape}."
        )
    _check_heads(q, k.shape[-2])
    ranges = {}
    for name, value in (("start", start), ("end", end)):
        x = read_array(name, value, ((), lead), f"ints {lead}, one for each row of q")
        x = check_between(name, x.astype(jnp.int32), value, 0, k.shape[-3], "it indexes the row's keys")
        ranges[name] = jnp.broadcast_to(x, lead)[..., None]
    start, count = jnp.zeros((*lead, 1), jnp.int32), jnp.ones((*lead, 1), jnp.int32)
    # Each row becomes a sequence of one query `[*, 1, H, D]` on one page `[*, 1, S, K, D]`.
    q, k, v = q[..., None, :, :], k[..., None, :, :, :], v[..., None, :, :, :]
    arrays = PagedArrays(q, k, v, start[..., None], start, count, ranges["end"], ranges["start"])
    return _with_options(arrays, options, scoring)


def resolve_rows(
    q: Array, dense: Any, options: PagedOptions, tokens: Any, scoring: Scoring
) -> tuple[PagedArrays, PagedSpec]:
    """Queries `[*, T, H, R + Dr]` on dense latents `[*, S, R]` and rotary keys `[*, S, Dr]`: those of a row are a single page, which each of its
    sequences reads up to its length, `[*, N]`."""
    tokens, lengths = tokens
    k, rope = (x[..., None, :, None, :] for x in dense)
    table = jnp.zeros((*lengths.shape, 1), jnp.int32)
    arrays = PagedArrays(q, k, None, table, tokens.q_start, tokens.q_len, lengths, rope=rope)
    return _with_options(arrays, options, scoring, tokens.max_query_len, latent=True)
