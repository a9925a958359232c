"""What a whole model keeps of the sequences that it serves."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer
from jax.typing import DTypeLike

from ..paged import RaggedBatch
from ..paged.cache.pages import copy, read_batch_shape, read_copies
from ..sequences.packing import read_count


class CacheState(eqx.Module):
    """The caches of all layers of a model that serves many sequences: pages of keys and values for its attention layers, pools of
    slots for its recurrent ones. An `ejkernel_eqx.RaggedBatch` says which pages and which slot belong to each sequence; they are the same
    in every layer.

    ```python
    caches = ejx.nn.CacheState.init(mixers, num_pages=512, page_size=16, num_slots=64)
    new = []
    for mixer, cache in zip(mixers, caches.layers):
        x, cache = mixer(x, cache, batch=batch)
        new.append(cache)
    caches = caches.with_layers(new)
    ```

    A pure value: donate it to `jit` to have it written in place. With `batch_shape=(layers,)` every array has a leading axis, for models
    that scan over stacked layers: see `of_layer`, and the guide "Recurrent layers".

    - `layers`: one for each mixer, a `PagedKVCache` bound to no tables, or a `RecurrentState` whose rows are slots.
    - `batch_ndim`: how many leading axes there are before pages and slots; static.
    """

    layers: tuple[Any, ...]
    batch_ndim: int = eqx.field(static=True, default=0)

    @classmethod
    def init(
        cls,
        mixers: Sequence[Any],
        *,
        num_pages: int,
        page_size: int,
        num_slots: int,
        batch_shape: tuple[int, ...] | int = (),
        dtype: DTypeLike | tuple[DTypeLike | None, DTypeLike | None] | None = None,
        scales: str | None = None,
        num_draft_tokens: int = 0,
    ) -> "CacheState":
        """Empty caches.

        **Arguments:**

        - `mixers`: the model's attention and recurrent layers, in order.
        - `num_pages`, `page_size`: of each attention layer, as in `PagedKVCache.init`.
        - `num_slots`: of each recurrent layer, how many sequences have a state at once.
        - `batch_shape`: leading axes of all arrays, such as `(layers,)` where each of `mixers` is a stack of as many.
        - `dtype`, `scales`: of the pages, by default the dtype of the layer's weights; as in `PagedKVCache.init`, also a pair for keys and
            values. Recurrent states are as `init_state` makes them.
        - `num_draft_tokens`: of each recurrent layer, how many new tokens of a sequence `accept` can take back: at least as many as one call
            verifies, the sure one before the drafts included. They take little room.

        **Raises:** `ValueError` for sizes below 1, or a mixer of another kind.
        """
        lead = read_batch_shape(batch_shape)
        slots = read_count("num_slots", num_slots, least=1)
        num_pages = read_count("num_pages", num_pages, least=1)
        page_size = read_count("page_size", page_size, least=1)
        if not isinstance(mixers, Sequence):
            raise ValueError(
                f"mixers: expected a tuple or a list of layers, received {type(mixers).__name__}; in the order in which the model calls them."
            )
        drafts = read_count("num_draft_tokens", num_draft_tokens)
        options = {"batch_shape": lead, "dtype": dtype, "scales": scales}
        layers = []
        for index, mixer in enumerate(mixers):
            if hasattr(mixer, "init_pool"):
                sizes = {"num_pages": num_pages, "page_size": page_size, "num_slots": slots}
                layers.append(mixer.init_pool(**sizes, **options, num_draft_tokens=drafts))
            elif hasattr(mixer, "init_paged_cache"):  # a layer of the user's own that has pages alone
                layers.append(mixer.init_paged_cache(num_pages, page_size, **options))
            else:
                raise ValueError(
                    f"mixers[{index}]: expected an attention layer with init_paged_cache or a RecurrentLayer, received "
                    f"{type(mixer).__name__}; give the layers that keep something of the tokens, each with a method init_pool."
                )
        return cls(tuple(layers), len(lead))

    def __check_init__(self):
        if not isinstance(self.layers, tuple | list):
            return  # something else in the places of arrays, such as axes to map over
        for index, layer in enumerate(self.layers):
            _check_unbound(index, layer)

    def with_layers(self, layers: Sequence[Any]) -> "CacheState":
        """The same with what calls have given for each layer, also for those of `of_layer`.

        **Raises:** `ValueError` for another number of layers, or one of another kind, size or dtype.
        """
        if len(layers) != len(self.layers):
            raise ValueError(
                f"layers: expected {len(self.layers)}, one for each mixer, received {len(layers)}."
            )
        for index, (old, new) in enumerate(zip(self.layers, layers, strict=True)):
            _check_unbound(index, new)
            self._check_kept(index, old, new)
        # Scales a head are never written. Those of one layer may come back alone: all stay as they were.
        alone = lambda old, new: self._is_scale(old) and new.shape != old.shape
        put = lambda old, new: old if alone(old, new) else new.reshape(old.shape)
        return CacheState(jax.tree.map(put, self.layers, tuple(layers)), self.batch_ndim)

    def of_layer(self, index: Any, batch: RaggedBatch) -> tuple[tuple[Any, ...], RaggedBatch]:
        """One layer of each stack, without taking it out: the pages and slots of the whole stack as one pool, and the batch with the
        numbers that they have there. In `jax.lax.scan` over stacked layers with the caches as part of the carry, nothing but what is
        new is written; as part of what is scanned over, all would be copied.

        ```python
        def period(carry, own):
            x, caches = carry
            mixers, index = own
            layers, numbered = caches.of_layer(index, batch)
            new = []
            for mixer, cache in zip(mixers, layers):
                x, cache = mixer(x, cache, batch=numbered)
                new.append(cache)
            return (x, caches.with_layers(new)), None
        ```

        **Arguments:** `index`, an integer, traced or not; `batch`.

        **Returns:** the layers' caches, for one call each, whose results `with_layers` takes back; and the batch for these calls.

        **Raises:** `ValueError` for caches with another number of leading axes than one, with unequal numbers of pages or slots, or for
        an index that is no layer's, where it is known.
        """
        if self.batch_ndim != 1:
            raise ValueError(
                f"of_layer: expected caches of one stack, with a batch_shape such as (layers,), received {self.batch_ndim} leading axes."
            )
        pages, slots = (self._count(paged) for paged in (True, False))
        index = self._read_index(index)
        states = None if batch.state_indices is None else _numbered(batch.state_indices, index, slots)
        batch = dataclasses.replace(
            batch, page_table=_numbered(batch.page_table, index, pages), state_indices=states
        )
        one = lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]) if x.ndim > 2 else x[index]
        return jax.tree.map(one, self.layers), batch  # what has no more axes than two is a scale a head

    def _count(self, paged: bool) -> int:
        """Pages, or slots, of a layer."""
        arrays = [jax.tree.leaves(layer)[0] for layer in self.layers if hasattr(layer, "copy_pages") == paged]
        counts = {x.shape[self.batch_ndim] for x in arrays}
        if len(counts) > 1:
            raise ValueError(
                f"layers: expected as many {'pages' if paged else 'slots'} in each, received {sorted(counts)}; a batch numbers them alike in "
                "all layers, so build them with equal sizes."
            )
        return counts.pop() if counts else 0

    def _read_index(self, index: Any) -> Array:
        """The number of a layer in its stack. Where it is traced, nobody can check it."""
        count = jax.tree.leaves(self.layers)[0].shape[0] if jax.tree.leaves(self.layers) else 0
        number = jnp.asarray(index)
        if number.shape or not jnp.issubdtype(number.dtype, jnp.integer):
            raise ValueError(
                f"index: expected one integer, received {number.dtype} of shape {number.shape}; jax.lax.scan over jnp.arange({count}) "
                "gives one after the other."
            )
        if not isinstance(number, Tracer) and not 0 <= int(number) < count:
            raise ValueError(
                f"index: expected 0 to {count - 1}, one of the layers, received {int(number)}; count from the first one."
            )
        return number.astype(jnp.int32)

    def _check_kept(self, index: int, old: Any, new: Any) -> None:
        """`new` holds what `old` does, of all layers of a stack or with their axis merged."""
        fits = jax.tree.structure(old) == jax.tree.structure(new)
        pairs = list(zip(jax.tree.leaves(old), jax.tree.leaves(new))) if fits else []
        sizes = lambda x, y: x.size == y.size or (self._is_scale(x) and y.shape == x.shape[1:])
        if not fits or not all(x.dtype == y.dtype and sizes(x, y) for x, y in pairs):
            raise ValueError(
                f"layers[{index}]: expected what a call gives for the {_described(old)}, received {_described(new)}; give the caches of "
                "this state, each in its place."
            )

    def _is_scale(self, x: Array) -> bool:
        """Whether an array of a stack has no pages: scales a head, or one for a cache."""
        return self.batch_ndim == 1 and x.ndim <= 2

    @property
    def nbytes(self) -> int:
        """Bytes of all pages and states."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self))

    def copy_pages(self, source: Any, target: Any) -> "CacheState":
        """With whole pages copied in every attention layer, as `PageTable.allocate` asks for before a shared page is written.

        **Arguments:** `source`, `target`: ints `[C]`; a copy with -1 on either side is left out. All are read before any is written.

        **Raises:** `ValueError` for shapes that do not fit.
        """
        read_copies(source, target)
        pages = lambda layer: layer.copy_pages(source, target) if hasattr(layer, "copy_pages") else layer
        return self.with_layers([pages(layer) for layer in self.layers])

    def accept(self, accepted: Any, batch: RaggedBatch) -> "CacheState":
        """The caches after only the first `accepted` new tokens of each sequence, as if the others had never been there: for speculative
        decoding, after the call that verified them and before the next one. Without it all of them count.

        Recurrent layers take the others back; for attention layers shorter lengths in the next batch (`PageTable.truncate`) are all that is
        needed.

        **Arguments:**

        - `accepted`: ints `[N]`, traced or not, from 0 to each sequence's new tokens; of padded sequences anything. A sequence with more
            new tokens than `num_draft_tokens` keeps all of them.
        - `batch`: that of the call, with the numbers of one layer, not those of `of_layer`.

        **Raises:** `ValueError` for recurrent layers without `num_draft_tokens`, another shape or, where they are known, numbers out of range.
        """
        layers = [
            layer if hasattr(layer, "copy_pages") else layer.accept(accepted, batch) for layer in self.layers
        ]
        return self.with_layers(layers)

    def copy_states(self, source: Any, target: Any) -> "CacheState":
        """With slots copied in every recurrent layer: where a sequence is forked, its state is needed twice.

        **Arguments:** `source`, `target`: ints `[C]`; a copy with -1 on either side is left out. All are read before any is written.

        **Raises:** `ValueError` for shapes that do not fit.
        """
        source, target = read_copies(source, target)
        slots = lambda x: copy(x, source, target, self.batch_ndim)
        return self.with_layers(
            [layer if hasattr(layer, "copy_pages") else jax.tree.map(slots, layer) for layer in self.layers]
        )


def _check_unbound(index: int, layer: Any) -> None:
    if getattr(layer, "is_bound", False):
        raise ValueError(
            f"layers[{index}]: expected a {type(layer).__name__} that is bound to no tables, received one that is; call its unbind(): "
            "tables come with each batch."
        )


def _described(layer: Any) -> str:
    arrays = (f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(layer))
    return f"{type(layer).__name__} of {', '.join(arrays)}"


def _numbered(numbers: Array, index: Array, count: int) -> Array:
    """Numbers below `count` as they are in the `index`-th of many pools side by side; -1 for all others."""
    there = (numbers >= 0) & (numbers < count)
    return jnp.where(there, numbers.astype(jnp.int32) + index * count, -1)
