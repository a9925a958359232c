"""Runs a call with few tokens a row on the kernels of serving. The arrays of a `DecoderCache` are reshaped to pages and slots for it.

These kernels write new tokens into arrays over all layers, which a loop over the layers carries. So nothing is copied. A scan over the layers' parts
of these arrays would copy them in every step.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._broadcast import like
from .._shapes import is_symbolic
from .._values import checks_traced, stopped
from ..dispatch import Backend, place_of_calls, Platform
from ..nn import KVCache, LatentCache, MultiHeadAttention, MultiHeadLatentAttention
from ..nn.kv_cache import full_message, refused_rows
from ..nn.recurrent import RecurrentLayer, RecurrentState
from ..paged import PagedKVCache, PagedLatentCache, RaggedBatch
from ..sequences.cumsum import running_count
from .caches import CacheState, DecoderCache, ServingCache
from .cross_layer_attention import CrossLayerAttention

MOST_TOKENS = 8
"""Of a row. With more, reading all keys of a row once for many queries is worth a copy."""
_LARGEST_PAGE, _SMALLEST_PAGE = 64, 16
_STORED = ("bfloat16", "float16", "float32")


class PagedRows(NamedTuple):
    """A call over rows, in the form of a call over pages."""

    rows: DecoderCache
    """The cache before the call."""
    pages: ServingCache
    batch: RaggedBatch
    count: Array
    """Int32 `[...]`: how many tokens each row gets."""
    refused: Array
    """Bool `[...]`: rows that are full."""
    place: Array | None
    """Int32 `[N * T]`: the number of each token among those of the batch; `None` if it is the same."""

    @classmethod
    def of(cls, shape: tuple[int, ...], cache: DecoderCache, rows: dict[str, Any]) -> "PagedRows":
        """Makes it from a call over rows whose input has the shape `[..., T, E]`."""
        lead, tokens, bounded = shape[:-2], shape[-2], cache.bounded
        size, real = math.prod(lead), rows.get("padding_mask")
        count = jnp.full(lead, tokens, jnp.int32) if real is None else jnp.sum(real, axis=-1, dtype=jnp.int32)
        before, refused, page = jnp.ones(lead, jnp.int32), jnp.zeros(lead, bool), 1
        table = np.zeros((size, 1), np.int32)
        if bounded:
            one = jax.tree.map(lambda x: x[0], bounded[0])
            before, refused, page = one.lengths, refused_rows(one, count), _page_size(one.max_length)
            if checks_traced():
                before = stopped(before, refused, full_message(one.max_length))
            count = jnp.where(refused, 0, count)
            table = np.arange(size * one.max_length // page, dtype=np.int32).reshape(size, -1)
        starts, place = np.arange(size + 1, dtype=np.int32) * tokens, None
        of_rows = tokens == 1 or real is None
        if not of_rows:
            # Only the real tokens, one sequence after the other.
            there = jnp.asarray(real) & ~refused[..., None]
            place = jnp.where(there.reshape(-1), running_count(there.reshape(-1), 0) - 1, size * tokens)
            starts = jnp.concatenate([starts[:1], jnp.cumsum(count.reshape(-1), dtype=jnp.int32)])
        batch = RaggedBatch(
            starts,
            jnp.where(count > 0, before + count, 0).reshape(-1),
            jnp.asarray(table),
            jnp.where(count.reshape(-1) > 0, jnp.arange(size, dtype=jnp.int32), -1),
            page_size=page,
            max_query_len=tokens,
            num_tokens=size * tokens,
            of_rows=of_rows,
        )
        view = lambda stack: CacheState(tuple(_as_pages(one, page, len(lead)) for one in stack), 1)
        return cls(cache, ServingCache(tuple(map(view, cache.stacks))), batch, count, refused, place)

    def tokens(self, x: Array) -> Array:
        """The features `[..., T, E]` of rows as packed features of the batch."""
        x = x.reshape(-1, x.shape[-1])
        if self.place is None:
            return x
        return jnp.zeros_like(x).at[self.place].set(x, mode="drop")

    def results(self, x: Array, pages: ServingCache) -> tuple[Array, DecoderCache]:
        """The packed features of the batch as `[..., T, E]`, and the cache after the call."""
        if self.place is not None:
            x = x.at[self.place].get(mode="clip")
        x = x.reshape(*self.count.shape, -1, x.shape[-1])
        x = jnp.where(self.refused[..., None, None], jnp.asarray(jnp.nan, x.dtype), x)

        def as_rows(old: Any, new: Any) -> Any:
            if isinstance(old, RecurrentState):
                return jax.tree.map(lambda old, new: new.reshape(old.shape), old, new)
            if old is None:
                return None
            names = ("k", "v") if isinstance(old, KVCache) else ("latent", "rope")
            stored = {name: getattr(new, name).reshape(getattr(old, name).shape) for name in names}
            lengths = old.lengths + like(self.count, old.lengths)
            closed = old.overflowed | like(self.refused, old.overflowed)
            return dataclasses.replace(old, **stored, lengths=lengths, overflowed=closed)

        both = zip(self.rows.stacks, pages.stacks, strict=True)
        return x, DecoderCache(tuple(tuple(map(as_rows, old, new.layers)) for old, new in both))


def have_pages(model: Any, x: Array, cache: DecoderCache, rows: dict[str, Any]) -> bool:
    """Returns whether a call of the layers with the input `x [..., T, E]` can run over pages and is faster so."""
    lead, tokens = x.shape[:-2], x.shape[-2]
    if (
        any(map(is_symbolic, x.shape))
        or tokens > MOST_TOKENS
        or 0 in x.shape
        or "segment_ids" in rows
        or not _on_one_device((model.stacks, model.shared_blocks, x, cache))
    ):
        return False
    mixers = [mixer for stack in model.mixers for mixer in stack]
    caches = [one for stack in cache.stacks for one in stack]
    alike = len({one.max_length for one in cache.bounded}) < 2
    return alike and all(_has_pages(mixer, one, lead) for mixer, one in zip(mixers, caches, strict=True))


def as_differentiated(call: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    """The function `call` with the derivative of `other`, which has the same results."""

    def run(*args: Any) -> Any:
        arrays, static = eqx.partition(args, eqx.is_array)
        result = jax.custom_jvp(lambda arrays: call(*eqx.combine(arrays, static)))
        of_other = lambda arrays: other(*eqx.combine(arrays, static))
        result.defjvp(lambda primals, tangents: jax.jvp(of_other, primals, tangents))
        return result(arrays)

    return run


def _page_size(max_length: int) -> int:
    """The tokens of a page: the largest power of two that kernels take and that divides the capacity of a row. Else the row is one page."""
    page = math.gcd(max_length, _LARGEST_PAGE)
    return page if page >= _SMALLEST_PAGE else max_length


def _as_pages(cache: Any, page: int, lead: int) -> Any:
    """The cache of stacked layers, reshaped to pages or slots. `lead` is the number of axes of its rows."""
    pool = lambda x, rank: x.reshape(x.shape[0], -1, page, *x.shape[x.ndim - rank :])
    if isinstance(cache, KVCache):
        return PagedKVCache(pool(cache.k, 2), pool(cache.v, 2))
    if isinstance(cache, LatentCache):
        return PagedLatentCache(pool(cache.latent, 1), pool(cache.rope, 1))
    return jax.tree.map(lambda x: x.reshape(x.shape[0], -1, *x.shape[1 + lead :]), cache)


def _has_pages(mixer: Any, cache: Any, lead: tuple[int, ...]) -> bool:
    """Returns whether the cache of a layer can be reshaped to pages or slots, and compiled kernels run the layer over them."""
    if isinstance(mixer, CrossLayerAttention):
        return _is_compiled(mixer.paged_attention)
    arrays, batch = jax.tree.leaves(cache), 1 + len(lead)
    if any(x.shape[1:batch] != lead for x in arrays):
        return False
    if isinstance(mixer, RecurrentLayer):
        return type(cache) is RecurrentState and cache.drafts is None and _is_compiled(mixer.recurrence)
    if isinstance(mixer, MultiHeadAttention) and type(cache) is KVCache and cache.log_forget is None:
        if mixer.chunk_size is not None and cache.max_length > mixer.chunk_size:
            return False
        heads = mixer.num_kv_heads
        stored, sizes = (cache.k, cache.v), ((heads, mixer.head_dim), (heads, mixer.v_head_dim))
    elif isinstance(mixer, MultiHeadLatentAttention) and type(cache) is LatentCache:
        stored, sizes = (cache.latent, cache.rope), ((mixer.kv_lora_rank,), (mixer.qk_rope_head_dim,))
    else:
        return False
    # Numbers of 8 bits have no scales here. Slots of all layers are counted in 32 bits.
    fits = all(x.shape[batch + 1 :] == size for x, size in zip(stored, sizes)) and all(
        x.dtype.name in _STORED and math.prod(x.shape[: batch + 1]) < 2**31 for x in stored
    )
    return fits and _is_compiled(mixer.paged_attention)


def _is_compiled(kernel: Any) -> bool:
    """Returns whether Triton runs the operation, compiled or interpreted."""
    platforms = [implementation.platform for _, implementation in kernel.plan.here.asked]
    if place_of_calls()[0] is not Backend.GPU:
        return platforms[:1] == [Platform.TRITON_INTERPRET]
    return platforms[:1] in ([Platform.TRITON], [Platform.TRITON_INTERPRET])


def meshes_of(tree: Any) -> list[Any]:
    """The meshes of the context and of the types of the arrays, automatic ones included."""
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, Array)]
    meshes = [jax.sharding.get_abstract_mesh(), *(jax.typeof(x).sharding.mesh for x in arrays)]
    return [mesh for mesh in dict.fromkeys(meshes) if not mesh.empty]


def _on_one_device(tree: Any) -> bool:
    """Returns whether all arrays are on one device. On several, a cache of rows may be split by its axes. A pool of pages cannot be split so."""
    return all(mesh.size == 1 and len(mesh.auto_axes) == len(mesh.axis_names) for mesh in meshes_of(tree))
