"""`CacheState`: the caches of all layers of a model."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.typing import DTypeLike

from .._shapes import Int, Numbers
from .._signatures import Module
from ..paged import RaggedBatch
from ..paged.cache.pages import copy, read_batch_shape, read_copies
from ..sequences.packing import read_count


class CacheState(Module):
    """The caches of all layers of a model that serves many sequences: pages of keys and values for attention layers, pools of
    slots for recurrent layers. An `ejkernel_eqx.RaggedBatch` assigns pages and a slot to each sequence, the same in every layer.

    ```python
    caches = ejx.nn.CacheState.init(mixers, num_pages=512, page_size=16, num_slots=64)
    new = []
    for mixer, cache in zip(mixers, caches.layers):
        x, cache = mixer(x, cache, batch=batch)
        new.append(cache)
    caches = caches.with_layers(new)
    ```

    Immutable; written in place if donated to `jit`. With `batch_shape=(layers,)` all arrays have a leading axis, for models
    that scan over stacked layers: see `of_layer` and the guide "Recurrent layers".

    - `layers`: one cache per mixer: a `PagedKVCache` without tables, a `RecurrentState` whose rows are slots, or `None` where it has none.
    - `batch_ndim`: number of leading axes before pages and slots; static.
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
        """Returns empty caches.

        **Arguments:**

        - `mixers`: the attention and recurrent layers of the model, in order.
        - `num_pages`, `page_size`: of each attention layer, as in `PagedKVCache.init`.
        - `num_slots`: of each recurrent layer: the maximum number of sequences with a state at the same time.
        - `batch_shape`: leading axes of all arrays, such as `(layers,)` if each of `mixers` is a stack of that many layers.
        - `dtype`, `scales`: of the pages, as in `PagedKVCache.init` (a pair sets keys and values separately); default the `compute_dtype`
            of the layer, or else the dtype of its weights. Recurrent states have the dtypes of `init_state`.
        - `num_draft_tokens`: of each recurrent layer: the maximum number of new tokens per sequence that `accept` can roll back. At least the
            number of tokens that one call verifies, including the certain one before the drafts. They need little memory.

        **Raises:** `ValueError` for sizes below 1, or an unsupported mixer.
        """
        lead = read_batch_shape(batch_shape)
        slots = read_count("num_slots", num_slots, least=1)
        num_pages = read_count("num_pages", num_pages, least=1)
        page_size = read_count("page_size", page_size, least=1)
        if not isinstance(mixers, Sequence):
            raise ValueError(
                f"mixers: expected a tuple or a list of layers, received {type(mixers).__name__}; list them in the order of the model's calls."
            )
        drafts = read_count("num_draft_tokens", num_draft_tokens)
        options = {"batch_shape": lead, "dtype": dtype, "scales": scales}
        layers = []
        for index, mixer in enumerate(mixers):
            if hasattr(mixer, "init_pool"):
                sizes = {"num_pages": num_pages, "page_size": page_size, "num_slots": slots}
                layers.append(mixer.init_pool(**sizes, **options, num_draft_tokens=drafts))
            elif hasattr(mixer, "init_paged_cache"):  # a user-defined layer with pages only
                layers.append(mixer.init_paged_cache(num_pages, page_size, **options))
            else:
                raise ValueError(
                    f"mixers[{index}]: expected an attention layer with init_paged_cache or a RecurrentLayer, received "
                    f"{type(mixer).__name__}; pass only layers with a cache, which have a method init_pool."
                )
        return cls(tuple(layers), len(lead))

    def __check_init__(self):
        if not isinstance(self.layers, tuple | list):
            return  # not arrays but, for example, axes to map over
        for index, layer in enumerate(self.layers):
            _check_unbound(index, layer)

    def with_layers(self, layers: Sequence[Any]) -> "CacheState":
        """Returns the caches with each layer replaced by the result of its call. Results for the caches of `of_layer` are accepted as well.

        **Raises:** `ValueError` for a wrong number of layers, or a layer of another type, size or dtype.
        """
        if len(layers) != len(self.layers):
            raise ValueError(
                f"layers: expected {len(self.layers)}, one per mixer, received {len(layers)}; pass the results of all layers in order."
            )
        for index, (old, new) in enumerate(zip(self.layers, layers, strict=True)):
            _check_unbound(index, new)
            self._check_kept(index, old, new)
        # Scales per head are never written. If only those of one layer are returned, all keep their values.
        alone = lambda old, new: self._is_scale(old) and new.shape != old.shape
        put = lambda old, new: old if alone(old, new) else new.reshape(old.shape)
        return CacheState(jax.tree.map(put, self.layers, tuple(layers)), self.batch_ndim)

    def of_layer(
        self, index: int | Int[Numbers, ""], batch: RaggedBatch
    ) -> tuple[tuple[Any, ...], RaggedBatch]:
        """Returns one layer of each stack without copying it: the whole stack as one pool of pages or slots, and the
        batch renumbered accordingly. In `jax.lax.scan` over stacked layers, pass the caches as part of the carry, so
        that only new tokens are written. A scan over the caches would copy all of them.

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

        **Arguments:**

        - `index`: index of the layer, an integer, traced or not.
        - `batch`: the batch of the call.

        **Returns:** the caches for one call of each layer, whose results go to `with_layers`; and the batch for these calls.

        **Raises:** `ValueError` unless the caches have exactly one leading axis and equal numbers of pages and of slots; and (when its
        value is known) for an index out of range.
        """
        if self.batch_ndim != 1:
            raise ValueError(
                f"of_layer: expected caches with one leading axis, received {self.batch_ndim}; build them with a batch_shape such as (layers,)."
            )
        index = self._read_index(index)
        return self.pools(index), dataclasses.replace(batch, **self._numbers(batch, index))

    def numbers(self, batch: RaggedBatch) -> dict[str, Array | np.ndarray]:
        """The fields of the batches that `of_layer` returns which differ between layers, for all of them at once: with a leading axis."""
        arrays = jax.tree.leaves(self.layers)
        if not arrays:
            return {}
        count, pages = arrays[0].shape[0], self._count(True)
        numbers: dict[str, Any] = self._numbers(batch, jnp.arange(count, dtype=jnp.int32))
        if batch.of_rows and pages == batch.page_table.size:
            # Constants of the program: slices of a small array would be copied, by a launch for each layer.
            table = np.arange(count * pages, dtype=np.int32)
            numbers["page_table"] = table.reshape(count, *batch.page_table.shape)
        return numbers

    def _numbers(self, batch: RaggedBatch, index: Array) -> dict[str, Array]:
        numbers = {"page_table": (batch.page_table, True), "state_indices": (batch.state_indices, False)}
        return {
            name: _numbered(x, index, self._count(paged))
            for name, (x, paged) in numbers.items()
            if x is not None
        }

    def pools(self, index: Array) -> tuple[Any, ...]:
        """The caches that `of_layer` returns."""
        one = lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]) if x.ndim > 2 else x[index]
        return jax.tree.map(one, self.layers)  # arrays with at most two axes are scales per head

    def _count(self, paged: bool) -> int:
        """The number of pages, or of slots, of a layer."""
        there = [layer for layer in self.layers if layer is not None]
        arrays = [jax.tree.leaves(layer)[0] for layer in there if hasattr(layer, "copy_pages") == paged]
        counts = {x.shape[self.batch_ndim] for x in arrays}
        if len(counts) > 1:
            raise ValueError(
                f"layers: expected equal numbers of {'pages' if paged else 'slots'}, received {sorted(counts)}; a batch uses the same numbers in "
                "all layers, so build them with equal sizes."
            )
        return counts.pop() if counts else 0

    def _read_index(self, index: Any) -> Array:
        """The index of a layer in its stack, checked when its value is known."""
        count = jax.tree.leaves(self.layers)[0].shape[0] if jax.tree.leaves(self.layers) else 0
        number = jnp.asarray(index)
        if number.shape or not jnp.issubdtype(number.dtype, jnp.integer):
            raise ValueError(
                f"index: expected one integer, received {number.dtype} of shape {number.shape}; use jax.lax.scan over "
                f"jnp.arange({count})."
            )
        if not isinstance(number, Tracer) and not 0 <= int(number) < count:
            raise ValueError(
                f"index: expected 0 to {count - 1}, received {int(number)}; it is the index of a layer in its stack."
            )
        return number.astype(jnp.int32)

    def _check_kept(self, index: int, old: Any, new: Any) -> None:
        """`new` has the arrays of `old`, possibly with the axis of stacked layers merged."""
        fits = jax.tree.structure(old) == jax.tree.structure(new)
        pairs = list(zip(jax.tree.leaves(old), jax.tree.leaves(new))) if fits else []
        sizes = lambda x, y: x.size == y.size or (self._is_scale(x) and y.shape == x.shape[1:])
        if not fits or not all(x.dtype == y.dtype and sizes(x, y) for x, y in pairs):
            raise ValueError(
                f"layers[{index}]: expected the result of a call with the {_described(old)}, received {_described(new)}; pass the caches "
                "of this state in order."
            )

    def _is_scale(self, x: Array) -> bool:
        """Returns whether an array of a stack holds scales, per head or per cache, and no pages."""
        return self.batch_ndim == 1 and x.ndim <= 2

    @property
    def nbytes(self) -> int:
        """Size of all pages and states in bytes."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self))

    def copy_pages(self, source: Int[Numbers, " C"], target: Int[Numbers, " C"]) -> "CacheState":
        """Copies whole pages in every attention layer, as requested by `PageTable.allocate` before a shared page is written.

        **Arguments:** `source`, `target`: integers `[C]`, one per copy; copies with -1 on either side are skipped. All pages are read before
        any is written.

        **Raises:** `ValueError` for invalid shapes.
        """
        read_copies(source, target)
        pages = lambda layer: layer.copy_pages(source, target) if hasattr(layer, "copy_pages") else layer
        return self.with_layers([pages(layer) for layer in self.layers])

    def accept(self, accepted: Int[Numbers, " N"], batch: RaggedBatch) -> "CacheState":
        """Keeps only the first `accepted` new tokens of each sequence and discards the others, for speculative decoding. Call it after the
        call that verified the tokens and before the next one; without it all new tokens are kept.

        Recurrent layers roll the others back. Attention layers only need shorter lengths in the next batch (`PageTable.truncate`).

        **Arguments:**

        - `accepted`: integers `[N]`, traced or not, from 0 to the number of new tokens of each sequence; ignored for padded sequences. A
            sequence with more new tokens than `num_draft_tokens` keeps all of them.
        - `batch`: the batch of the call; not the renumbered one of `of_layer`.

        **Raises:** `ValueError` for recurrent layers without `num_draft_tokens`, a wrong shape or (when values are known) numbers out of
        range.
        """
        return self._with_states(lambda state: state.accept(accepted, batch))

    def copy_states(self, source: Int[Numbers, " C"], target: Int[Numbers, " C"]) -> "CacheState":
        """Copies slots in every recurrent layer, for sequences that are forked.

        **Arguments:** `source`, `target`: integers `[C]`, one per copy; copies with -1 on either side are skipped. All slots are read before
        any is written.

        **Raises:** `ValueError` for invalid shapes.
        """
        source, target = read_copies(source, target)
        return self._with_states(lambda state: copy(state, source, target, self.batch_ndim))

    def _with_states(self, change: Callable[[Any], Any]) -> "CacheState":
        """The caches with each one of a recurrent layer changed."""
        keep = lambda layer: layer if layer is None or hasattr(layer, "copy_pages") else change(layer)
        return self.with_layers([keep(layer) for layer in self.layers])


def _check_unbound(index: int, layer: Any) -> None:
    if getattr(layer, "is_bound", False):
        raise ValueError(
            f"layers[{index}]: expected a {type(layer).__name__} that is bound to no tables, received a bound one; call its unbind(): "
            "tables are passed with each batch."
        )


def _described(layer: Any) -> str:
    arrays = (f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(layer))
    return f"{type(layer).__name__} of {', '.join(arrays)}"


def _numbered(numbers: Array, index: Array, count: int) -> Array:
    """Numbers below `count`, renumbered for the `index`-th of several concatenated pools, or for each of several; -1 for all others."""
    there = (numbers >= 0) & (numbers < count)
    first = (index * count).reshape(*index.shape, *[1] * numbers.ndim)
    there, numbers = (
        jnp.broadcast_to(x, (*index.shape, *x.shape)) for x in (there, numbers.astype(jnp.int32))
    )
    return jnp.where(there, numbers + first, -1)
