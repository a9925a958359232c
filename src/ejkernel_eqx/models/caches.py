"""What a decoder keeps of the tokens before: rows of keys, values and states, or the pages and slots of a server."""

from typing import Any

import equinox as eqx
import jax
from jax import Array
from jax.typing import DTypeLike

from ..nn import CacheState
from ..nn.arguments import read_batch_shape


class DecoderCache(eqx.Module):
    """The caches of all layers of a `Decoder`, a row for each sequence. A pure value: a call takes one and returns the next; donate it to
    `jit` to have it written in place.

    - `stacks`: for each stack of layers the caches of its pattern, whose arrays have a leading axis of repetitions.
    """

    stacks: tuple[tuple[Any, ...], ...]

    @classmethod
    def init(
        cls, stacks: Any, repeats: Any, batch_shape: Any, max_length: int, dtype: DTypeLike | None
    ) -> "DecoderCache":
        rows = read_batch_shape(batch_shape)

        def empty(mixer: Any, count: int) -> Any:
            return (
                mixer.init_cache((count, *rows), max_length, dtype)
                if hasattr(mixer, "init_cache")
                else mixer.init_state((count, *rows))
            )

        return cls(
            tuple(
                tuple(empty(layer.mixer, count) for layer in stack) for stack, count in zip(stacks, repeats)
            )
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self))


class ServingCache(eqx.Module):
    """The pages and slots of all layers of a `Decoder`, for calls on a `RaggedBatch`; see [`ejkernel_eqx.nn.CacheState`][].

    - `stacks`: a `CacheState` for each stack of layers.
    """

    stacks: tuple[CacheState, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all pages and states."""
        return sum(stack.nbytes for stack in self.stacks)

    def copy_pages(self, source: Array, target: Array) -> "ServingCache":
        """As [`ejkernel_eqx.nn.CacheState`][]`.copy_pages`, in all layers."""
        return ServingCache(tuple(stack.copy_pages(source, target) for stack in self.stacks))

    def copy_states(self, source: Array, target: Array) -> "ServingCache":
        """As [`ejkernel_eqx.nn.CacheState`][]`.copy_states`, in all layers."""
        return ServingCache(tuple(stack.copy_states(source, target) for stack in self.stacks))
