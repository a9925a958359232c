"""The caches of a decoder: rows of keys, values and states, or the pages and slots of a server."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from .._shapes import Int, Numbers
from .._signatures import Module
from ..nn import CacheState, KVCache, MultiHeadAttention
from ..nn.arguments import read_batch_shape
from ..nn.kv_cache import check_room
from ..paged import RaggedBatch


class DecoderCache(Module):
    """The caches of all layers of a `Decoder`, with one row for each sequence. A call takes a cache and returns a new one. If the old one is donated
    to `jit`, it is written in place.

    - `stacks`: for each stack of layers, the caches of its pattern. Their arrays have a leading axis for the repetitions of the pattern.
    """

    stacks: tuple[tuple[Any, ...], ...]

    @classmethod
    def init(
        cls,
        model: Any,
        batch_shape: Any,
        max_length: int,
        dtype: DTypeLike | None,
        rolling: bool,
    ) -> "DecoderCache":
        rows = read_batch_shape(batch_shape)

        def empty(layer: Any, mixer: Any, count: int) -> Any:
            sizes = ((count, *rows), max_length, dtype)
            rolls = (
                rolling
                and isinstance(mixer, MultiHeadAttention)
                and mixer.attention.window[0] is not None
                and not layer.config.gives_keys
            )
            return mixer.init_cache(*sizes, rolling=True) if rolls else mixer.init_cache(*sizes)

        blocks = model.shared_blocks
        each = lambda stack, shape: tuple(
            empty(layer, mixer, shape[2]) for layer in stack for mixer in layer.mixers(blocks)
        )
        return cls(tuple(map(each, model.stacks, model.config.stacks())))

    @property
    def overflowed(self) -> Array:
        """Bool `[...]`: True for rows that were full in any layer ([`ejkernel_eqx.nn.KVCache`][]). A scalar False if no layer has a capacity."""
        flags = [jnp.any(cache.overflowed, axis=0) for cache in self.bounded]
        return functools.reduce(jnp.logical_or, flags) if flags else jnp.zeros((), bool)

    @property
    def bounded(self) -> list[Any]:
        """The caches with a capacity."""
        caches = [cache for stack in self.stacks for cache in stack]
        caches = [cache.cache if isinstance(cache, FirstKeys) else cache for cache in caches]
        return [cache for cache in caches if hasattr(cache, "overflowed")]

    def check_room(self, tokens: int, padding_mask: Any) -> None:
        """Raises `ValueError` if a row is known to have no room for so many tokens."""
        for cache in self.bounded:
            check_room(cache, tokens, padding_mask)

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self))


class FirstKeys(Module):
    """The empty cache of layers of attention, before the first tokens of all rows, which begin where the rows do. A layer returns keys and values
    `[..., T, K, D]` for it, and reads none: a loop over layers need not copy the caches of each out and in."""

    cache: KVCache

    def put(self, index: Array, keys: tuple[Array, Array]) -> "FirstKeys":
        """The cache with the keys and values of the layer `index`."""
        write = lambda store, new: jax.lax.dynamic_update_index_in_dim(
            store, new.astype(store.dtype), index, 0
        )
        k, v = map(write, (self.cache.k, self.cache.v), keys)
        return FirstKeys(dataclasses.replace(self.cache, k=k, v=v))


def before_prompts(model: Any, cache: DecoderCache) -> DecoderCache:
    """An empty cache with `FirstKeys` in the place of keys and values; the same cache if a layer reads those of others or has other caches."""
    is_plain = lambda mixer: (
        type(mixer) is MultiHeadAttention
        and mixer.fgate_proj is None
        and not (mixer.rope is not None and mixer.rope.by_length)  # the length of a row without its padding
    )
    layers = [layer for stack in model.stacks for layer in stack]
    kept = any(layer.split is not None or layer.config.gives_keys for layer in layers) or model.shared_blocks
    caches = [one for stack in cache.stacks for one in stack]
    both = zip((mixer for stack in model.mixers for mixer in stack), caches, strict=True)
    if kept or not all(is_plain(mixer) for mixer, one in both if hasattr(one, "overflowed")):
        return cache
    swap = lambda one: FirstKeys(one) if isinstance(one, KVCache) else one
    return DecoderCache(tuple(tuple(map(swap, stack)) for stack in cache.stacks))


def after_prompts(cache: DecoderCache, count: Array) -> DecoderCache:
    """The cache after prompts of `count [N]` tokens, without `FirstKeys`."""

    def end(one: Any) -> Any:
        if not isinstance(one, FirstKeys):
            return one
        return dataclasses.replace(one.cache, lengths=jnp.broadcast_to(count, one.cache.lengths.shape))

    return DecoderCache(tuple(tuple(map(end, stack)) for stack in cache.stacks))


class ServingCache(Module):
    """The pages and slots of all layers of a `Decoder`, for calls with `batch=`.

    - `stacks`: a [`CacheState`][ejkernel_eqx.nn.CacheState] for each stack of layers.
    """

    stacks: tuple[CacheState, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of all pages and states."""
        return sum(stack.nbytes for stack in self.stacks)

    def copy_pages(self, source: Int[Numbers, " C"], target: Int[Numbers, " C"]) -> "ServingCache":
        """Copies pages in all layers, as [`ejkernel_eqx.nn.CacheState`][]`.copy_pages`."""
        return ServingCache(tuple(stack.copy_pages(source, target) for stack in self.stacks))

    def copy_states(self, source: Int[Numbers, " C"], target: Int[Numbers, " C"]) -> "ServingCache":
        """Copies states in all layers, as [`ejkernel_eqx.nn.CacheState`][]`.copy_states`."""
        return ServingCache(tuple(stack.copy_states(source, target) for stack in self.stacks))

    def accept(self, accepted: Int[Numbers, " N"], batch: RaggedBatch) -> "ServingCache":
        """Keeps only the draft tokens that were accepted, in all layers, as [`ejkernel_eqx.nn.CacheState`][]`.accept`."""
        return ServingCache(tuple(stack.accept(accepted, batch) for stack in self.stacks))
