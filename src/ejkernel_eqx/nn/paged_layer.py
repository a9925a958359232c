"""`PagedLayer`: what the attention layers share whose tokens are kept in pages."""

import abc
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax.numpy as jnp
from jax import Array

from .._signatures import Module
from ..paged import RaggedBatch
from .projection import compute_dtype_of
from .tokens import clear

C = TypeVar("C")


class PagedLayer(Module, Generic[C]):
    """An attention layer with a cache of pages, of type `C`, for serving."""

    @abc.abstractmethod
    def init_paged_cache(self, *sizes: Any, **options: Any) -> C:
        """Returns an empty cache."""

    def init_pool(
        self,
        *,
        num_pages: int,
        page_size: int,
        num_slots: int,
        batch_shape: tuple[int, ...] | int = (),
        dtype: Any = None,
        scales: str | None = None,
        num_draft_tokens: int = 0,
    ) -> C:
        """Returns `init_paged_cache(num_pages, page_size, batch_shape=..., dtype=..., scales=...)`. Attention and recurrent layers share this
        method and its arguments, so that a server can treat them alike. `num_slots` and `num_draft_tokens` are for recurrent layers and not
        used here: shorter lengths are enough to reject tokens in pages."""
        return self.init_paged_cache(
            num_pages, page_size, batch_shape=batch_shape, dtype=dtype, scales=scales
        )


def over_pages(
    layer: Any,
    x: Array,
    cache: Any,
    batch: RaggedBatch,
    call: Callable[[Array, Any], Any],
    empty: Callable[[Array], Any] | None = None,
    clears: bool = True,
) -> tuple[Any, Any]:
    """The results of a call with a batch, and the cache, which is bound to tables if it was. `call(x, cache)` has tokens, by default with zeros for
    padding, and a bound cache, and returns the results and the new one; `empty(x)` returns the results of no tokens, by default as wide as inputs."""
    bound = cache.bind(batch)
    x = x.astype(compute_dtype_of(layer.compute_dtype, layer, x))
    if 0 in (x.shape[0], batch.lengths.shape[0]):
        results = jnp.zeros((x.shape[0], layer.embed_dim), x.dtype) if empty is None else empty(x)
        return results, bound if cache.is_bound else cache
    results, new = call(clear(x, batch.is_real) if clears else x, bound)
    return results, new if cache.is_bound else new.unbind()


def check_pool(
    cache: Any, kind: type, words: str, expected: tuple[int, ...], sizes_of: Callable[[Any], tuple[int, ...]]
) -> None:
    """The cache of a call with a batch: pages of one layer, with the `expected` sizes, which `words` name."""
    if not isinstance(cache, kind):
        raise ValueError(
            f"cache: expected a {kind.__name__} with a batch, received {type(cache).__name__}; build it with init_paged_cache."
        )
    if sizes_of(cache) != expected or cache.batch_shape:
        raise ValueError(
            f"cache: expected pages of one layer with {words} = {expected}, received {sizes_of(cache)} and batch_shape {cache.batch_shape}; "
            "build it with init_paged_cache, and jax.lax.scan over stacked layers."
        )
