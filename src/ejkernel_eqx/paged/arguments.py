"""Checks what a user passes to attention over pages and resolves it to `PagedArrays` and `PagedSpec`.

Every error names the argument, what was expected, what came, and what to do, before anything is computed.
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
from ..core.arguments import array
from ..sequences.packing import ended
from .cache.batch import positions_of, slots_of, to_int32
from .cache.cache import PagedKVCache, PagedLatentCache
from .cache.pages import operands_of
from .spec import PagedArrays, PagedSpec

Cache = PagedKVCache | PagedLatentCache


@dataclasses.dataclass(frozen=True)
class PagedOptions:
    """The static options that every operation of this family has."""

    left: int | None
    """Keys that a query sees before its own; `None`: all."""
    logits_soft_cap: float | None
    softmax_scale: float | None

    @classmethod
    def read(cls, sliding_window: Any, logits_soft_cap: Any, softmax_scale: Any) -> "PagedOptions":
        """From what a constructor is given. Of a window only its left side counts: no query sees past its own key."""
        ScoreOptions(logits_soft_cap, softmax_scale).check()
        cap, scale = (None if x is None else float(x) for x in (logits_soft_cap, softmax_scale))
        left = parse_window(sliding_window, True)[0]
        return cls(None if left is None else min(left, 2**30), cap, scale)


class Scoring(NamedTuple):
    """The arguments of a call that change scores or weights."""

    sinks: Any = None
    alibi_slopes: Any = None
    qq_bias: Any = None


class Tokens(NamedTuple):
    """Whose the queries are: int32 `[*, N]` each, and the most queries of one sequence."""

    q_start: Array
    q_len: Array
    max_query_len: int


def resolve(
    q: Any, cache: Cache, options: PagedOptions, tokens: Tokens, scoring: Scoring, *, return_lse: bool
) -> tuple[PagedArrays, PagedSpec]:
    """The resolved call on a cache that `read_queries` has found to fit."""
    table, lengths = tables(cache)
    lead = q.shape[:-3]
    if table.shape[-1] == 0:  # no page at all
        table = jnp.full((*table.shape[:-1], 1), -1, table.dtype)
    arrays = PagedArrays(
        q=q,
        **{"v": None, **operands_of(cache)},
        page_table=jnp.broadcast_to(table, (*lead, *table.shape[-2:])),
        q_start=tokens.q_start,
        q_len=tokens.q_len,
        kv_len=jnp.broadcast_to(lengths, (*lead, lengths.shape[-1])),
    )
    spec = _spec(q, options, tokens.max_query_len, return_lse)
    latent = isinstance(cache, PagedLatentCache)
    if latent and options.softmax_scale is None:
        raise ValueError(
            "softmax_scale: expected a number with a PagedLatentCache, received None; it is that of the expanded heads, such as "
            "(nope_dim + rope_dim) ** -0.5, which the latent does not tell."
        )
    spec = dataclasses.replace(spec, latent=latent, scales=cache.scales)
    return _with_scoring(arrays, scoring, tokens.max_query_len), spec


def _spec(q: Array, options: PagedOptions, max_query_len: int, return_lse: bool) -> PagedSpec:
    return PagedSpec(
        scale=float(q.shape[-1] ** -0.5 if options.softmax_scale is None else options.softmax_scale),
        logits_soft_cap=options.logits_soft_cap,
        left=options.left,
        max_query_len=max_query_len,
        return_lse=return_lse,
    )


def read_queries(q: Any, cache: Any, letters: str) -> Array:
    """The queries `[*, T, H, D]` on a bound cache of their heads, channels and leading axes."""
    q = array("q", q, letters)
    if not isinstance(cache, PagedKVCache | PagedLatentCache):
        raise ValueError(
            f"cache: expected a PagedKVCache or PagedLatentCache, received {type(cache).__name__}."
        )
    if not cache.is_bound:
        raise ValueError(
            "cache: expected one that is bound to tables, received one that is not; call cache.bind(page_table, lengths) or cache.bind(batch)."
        )
    lead = q.shape[:-3]
    if cache.batch_shape not in ((), lead):
        raise ValueError(
            f"cache: expected pages without leading axes{f' or with those of q, {lead}' if lead else ''}, received batch_shape "
            f"{cache.batch_shape}; take one layer of it, or jax.lax.scan or jax.vmap over the layers."
        )
    table = tables(cache)[0]
    if table.shape[:-2] not in ((), lead):
        raise ValueError(
            f"page_table: expected [N, M]{f' or the leading axes of q, {lead}' if lead else ''}, received shape {table.shape}; bind tables "
            "that fit q, or jax.vmap over both."
        )
    heads, dim = _sizes(cache)
    if q.shape[-1] != dim:
        what = "latent_dim + rope_dim" if isinstance(cache, PagedLatentCache) else "head_dim"
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


def _sizes(cache: Cache) -> tuple[int, int]:
    """Key heads and key channels."""
    if isinstance(cache, PagedLatentCache):
        return 1, cache.latent_dim + cache.rope_dim
    return cache.num_kv_heads, cache.head_dim


def one_each(q: Array, cache: Cache) -> Tokens:
    """One query of each sequence, in order."""
    count = tables(cache)[1].shape[-1]
    if q.shape[-3] != count:
        raise ValueError(
            f"q: expected one query for each of the {count} sequences of the cache, [..., {count}, H, D], received shape {q.shape}; "
            "RaggedPagedAttention takes more."
        )
    shape = (*q.shape[:-3], count)
    start = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), shape)
    return Tokens(start, jnp.ones(shape, jnp.int32), 1)


def packed(q: Array, cache: Cache, query_start_loc: Any, max_query_len: Any) -> Tokens:
    """The queries of all sequences side by side."""
    count, lead = tables(cache)[1].shape[-1], q.shape[:-3]
    offsets = jnp.asarray(query_start_loc)
    if not jnp.issubdtype(offsets.dtype, jnp.integer) or offsets.shape not in (
        (count + 1,),
        (*lead, count + 1),
    ):
        raise ValueError(
            f"query_start_loc: expected ints [{count + 1}], the offsets of the {count} sequences of the cache, received {offsets.dtype} of "
            f"shape {offsets.shape}; RaggedBatch.query_start_loc is one."
        )
    tokens = q.shape[-3]
    if max_query_len is None:
        max_query_len = tokens
    elif (
        isinstance(max_query_len, bool)
        or not isinstance(max_query_len, int | np.integer)
        or max_query_len < 1
    ):
        raise ValueError(
            f"max_query_len: expected a static int of at least 1, the most queries of one sequence, or None, received {max_query_len!r}."
        )
    offsets = check_offsets("query_start_loc", to_int32(offsets), query_start_loc, tokens, zeros_behind=True)
    offsets = jnp.broadcast_to(_read_offsets(offsets, tokens), (*lead, count + 1))
    length = offsets[..., 1:] - offsets[..., :-1]
    return Tokens(offsets[..., :-1], length, max(min(int(max_query_len), tokens), 1))


def _read_offsets(offsets: Any, tokens: int) -> Array:
    """Each the highest so far, and no higher than there are tokens: what follows the last sequence may be anything, such as zeros."""
    offsets = jnp.clip(to_int32(jnp.asarray(offsets)), 0, tokens)
    count = offsets.shape[-1]
    if count > 512:
        return jax.lax.cummax(offsets, axis=offsets.ndim - 1)
    index = jnp.arange(count)
    return jnp.max(
        jnp.where(like(index[None] <= index[:, None], offsets[..., None, :]), offsets[..., None, :], 0),
        axis=-1,
    )  # one kernel


def write_slots(arrays: PagedArrays) -> Array:
    """Where the queries' own keys are kept, `[T]`."""
    if arrays.q.ndim > 3:
        raise ValueError(
            f"q: expected [tokens, heads, head_dim] with append=True, received shape {arrays.q.shape}; jax.vmap over the leading axes."
        )
    tokens, ends = jnp.arange(arrays.q.shape[0], dtype=jnp.int32), arrays.q_start + arrays.q_len
    if ends.shape[0] == 0:
        return jnp.full_like(tokens, -1)
    real = (tokens >= arrays.q_start[0]) & (tokens < ends[-1])
    ids = jnp.where(real, ended(ends, tokens.shape[0]), -1)
    positions = positions_of(ids, ends, arrays.kv_len)
    return slots_of(ids, positions, arrays.page_table, arrays.k.shape[-3])


def _with_scoring(arrays: PagedArrays, scoring: Scoring, max_query_len: int) -> PagedArrays:
    heads = arrays.q.shape[-2]
    wide = jnp.float64 if arrays.q.dtype == jnp.float64 else jnp.float32
    sinks = _floats("sinks", scoring.sinks, ((heads,), (heads, None)), f"[{heads}] or [{heads}, n]")
    if sinks is not None:
        # Several sinks of a head join the denominator as their log-sum-exp.
        sinks = sinks.astype(wide)
        sinks = jax.nn.logsumexp(sinks, axis=1) if sinks.ndim == 2 else sinks
    slopes = _floats("alibi_slopes", scoring.alibi_slopes, ((heads,),), f"[{heads}], one per query head")
    bias = _floats("qq_bias", scoring.qq_bias, ((None, None),), "[Q, Q]")
    if bias is not None and (bias.shape[0] != bias.shape[1] or bias.shape[0] < max_query_len):
        raise ValueError(
            f"qq_bias: expected [Q, Q] with Q at least max_query_len={max_query_len}, received shape {bias.shape}; give max_query_len, or "
            "pad the bias."
        )
    slopes, bias = (None if x is None else x.astype(wide) for x in (slopes, bias))
    return arrays._replace(sinks=sinks, slopes=slopes, qq_bias=bias)


def _floats(name: str, value: Any, shapes: Any, expected: str) -> Array | None:
    if value is None:
        return None
    x = jnp.asarray(value)
    fits = any(
        len(shape) == x.ndim and all(want in (None, size) for want, size in zip(shape, x.shape))
        for shape in shapes
    )
    if not fits or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{name}: expected floats {expected}, received {x.dtype} of shape {x.shape}.")
    return x


def resolve_dense(
    q: Any, k: Any, v: Any, start: Any, end: Any, options: PagedOptions, scoring: Scoring, *, return_lse: bool
) -> tuple[PagedArrays, PagedSpec]:
    """One query of each row on the row's own keys: they are one page, and the row one sequence."""
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
        x = jnp.asarray(value)
        if not jnp.issubdtype(x.dtype, jnp.integer) or x.shape not in ((), lead):
            raise ValueError(
                f"{name}: expected ints {lead}, one for each row of q, received {x.dtype} of shape {x.shape}."
            )
        x = check_between(name, x.astype(jnp.int32), value, 0, k.shape[-3], "it counts the row's keys")
        ranges[name] = jnp.broadcast_to(x, lead)[..., None]
    zeros = jnp.zeros((*lead, 1), jnp.int32)
    arrays = PagedArrays(
        q=q[..., None, :, :],
        k=k[..., None, :, :, :],
        v=v[..., None, :, :, :],
        page_table=zeros[..., None],
        q_start=zeros,
        q_len=zeros + 1,
        kv_len=ranges["end"],
        kv_start=ranges["start"],
    )
    return _with_scoring(arrays, scoring, 1), _spec(q, options, 1, return_lse)
