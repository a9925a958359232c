"""The caches of a decoder: rows of keys, values and states, or the pages and slots of a server."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from .._shapes import Int, Numbers
from .._signatures import Module
from ..nn import CacheState, MultiHeadAttention
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
        return [cache for stack in self.stacks for cache in stack if hasattr(cache, "overflowed")]

    def check_room(self, tokens: int, padding_mask: Any) -> None:
        """Raises `ValueError` if a row is known to have no room for so many tokens."""
        for cache in self.bounded:
            check_room(cache, tokens, padding_mask)

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self))


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
