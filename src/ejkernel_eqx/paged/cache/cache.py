"""Paged caches for inference: of keys and values, and of latent attention."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int, Shaped

from ...core.arguments import read_gates
from .batch import RaggedBatch, to_int32
from .forget import sums_of
from .pages import PageDType, Pages, read_sizes
from .write import put, write


class PagedKVCache(Pages):
    r"""Keys and values of many sequences, in pages of $p$ tokens that are allocated to each sequence as it grows.

    Token $j$ of sequence $n$ is at place $j \bmod p$ of page $\text{page\_table}_{n, \lfloor j / p \rfloor}$ (vLLM; Kwon et al., 2023,
    arXiv:2309.06180, section 4). With scales, the pages hold 8-bit numbers, each of which stands for scale times number.

    The cache is immutable: `append` and `copy_pages` return a new cache and write in place if the old one is donated to
    `jit`. A cache that is not bound to tables holds only pages. So a stack of layers, with leading axes on all its
    arrays, can be scanned or mapped over. Inside, each layer can be bound to the shared tables:

    ```python
    cache = PagedKVCache.init(num_pages=1024, page_size=16, num_kv_heads=8, head_dim=128, batch_shape=(layers,))
    x, cache = jax.lax.scan(lambda x, own: layer(x, own.bind(batch)), x, cache)
    ```

    - `k`, `v`: pages `[.., P, p, K, D]` and `[.., P, p, K, V]`.
    - `page_table`: int32 `[.., N, M]`, a row of pages for each sequence, -1 (or any number outside `0 .. P - 1`) for none; or `None`.
    - `lengths`: int32 `[.., N]`, the number of tokens of each sequence, including new ones; or `None`.
    - `k_scale`, `v_scale`: float32 `[.., P, p, K]`, one for each token and head, or `[.., K]`, one for each head.
        `None` for pages that are not quantised to 8 bits.
    - `gates`: float32 `[.., P, p, H, 2]`, for a layer with forget gates: of each token and query head the sum of the logarithms up to it, in two
        parts, of which the second is what the first lacks by rounding; or `None`.

    Pages of no sequence and slots past a sequence's length may hold anything, including NaN.
    """

    k: Shaped[Array, "... P p K D"]
    v: Shaped[Array, "... P p K V"]
    page_table: Int[Array, "... N M"] | None = eqx.field(converter=to_int32, default=None)
    lengths: Int[Array, "... N"] | None = eqx.field(converter=to_int32, default=None)
    k_scale: Float[Array, "..."] | None = None
    v_scale: Float[Array, "..."] | None = None
    gates: Float[Array, "... P p H 2"] | None = None

    _names = ("k", "v", "k_scale", "v_scale")
    _kernel_names = _names
    _rank = 4

    @classmethod
    def init(
        cls,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        *,
        batch_shape: Any = (),
        dtype: PageDType = jnp.float32,
        scales: str | None = None,
        num_gates: int | None = None,
    ) -> "PagedKVCache":
        """Makes an empty cache that is not bound to tables.

        **Arguments:**

        - `num_pages`, `page_size`: `P` and `p`; the cache holds `P * p` tokens.
        - `num_kv_heads`, `head_dim`, `v_head_dim`: `K`, `D` and `V` (default `D`).
        - `batch_shape`: leading axes, such as `(layers,)`.
        - `dtype`: the dtype of stored keys and values: bfloat16, float16, float32, float64 (on XLA), or int8, float8_e4m3fn and float8_e5m2
            with scales. A pair gives one for keys and one for values, such as `("bfloat16", "int8")` to quantise only the values.
        - `scales`: the scales of 8-bit pages. `"token"`, the default, has one for each token and head, computed when it
            is written. `"head"` has one for each head, which is 1 until `with_scales` sets it.
        - `num_gates`: forget gates of a token, the query heads `H` of a layer with gates; default none.

        **Raises:** `ValueError` for sizes below 1, more than 2**30 tokens, an unsupported dtype, or scales that do not match it.
        """
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        heads, *dims = read_sizes(num_kv_heads=num_kv_heads, head_dim=head_dim, v_head_dim=v_head_dim)
        widths = [(heads, dim) for dim in dims]
        cache = cls._empty(num_pages, page_size, widths, batch_shape, dtype, scales)
        if num_gates is None:
            return cache
        shape = (*cache.k.shape[:-2], *read_sizes(num_gates=num_gates), 2)
        wide = jnp.float64 if cache.k.dtype == jnp.float64 else jnp.float32
        return dataclasses.replace(cache, gates=jnp.zeros(shape, wide))

    @property
    def num_kv_heads(self) -> int:
        """`K`."""
        return self.k.shape[-2]

    @property
    def head_dim(self) -> int:
        """The number of channels of a key, `D`."""
        return self.k.shape[-1]

    @property
    def v_head_dim(self) -> int:
        """The number of channels of a value, `V`."""
        return self.v.shape[-1]

    def with_scales(self, k_scale: Any, v_scale: Any) -> "PagedKVCache":
        """Returns the same pages with other scales per head, such as (largest magnitude of a sample) / 127. Set them before the first write.

        **Arguments:** `k_scale`, `v_scale`: positive floats `[.., K]`, or `None` for pages that are not quantised to 8 bits. New numbers
        outside the range of the scale are clipped.

        **Raises:** `ValueError` for a cache without scales per head, an invalid shape, or numbers that are not positive when their values are
        known (outside `jit`).
        """
        return self._with_scales(k_scale, v_scale)

    @jax.named_scope("ejx.PagedKVCache.append")
    def append(
        self, k: Any, v: Any, slots: Any, *, log_forget: Any = None, batch: Any = None
    ) -> "PagedKVCache":
        """Returns the cache with new tokens written; in place if the cache is donated.

        **Arguments:**

        - `k`, `v`: floats `[.., T, K, D]` and `[.., T, K, V]`, cast to the pages' dtype or quantised, with the leading axes of the pages.
        - `slots`: ints `[T]`, or with the leading axes: `page * page_size + place` for each token, as returned by `RaggedBatch.slots` and
            `PageTable.slots`. Tokens with a slot outside `0 .. P * p - 1`, such as -1, are not written. Slots must be distinct.
        - `log_forget`, `batch`: for a cache with gates, floats `[T, H]`, those of the new tokens, and the `RaggedBatch` that they are the tokens of.
            Sums go on from the last token of each sequence that is written already. Pages
            with gates take no leading axes here: use `jax.vmap`.

        **Returns:** the new cache with the same tables, whose `lengths` already include the new tokens.

        **Raises:** `ValueError` for invalid shapes, and for gates without a cache that has them or the other way round.
        """
        gates = self.gates
        expected = None if gates is None else (*gates.shape[:-4], jnp.shape(k)[-3], gates.shape[-2])
        received = None if log_forget is None else jnp.shape(log_forget)
        if received != expected or (gates is not None and not isinstance(batch, RaggedBatch)):
            raise ValueError(
                f"log_forget: expected {expected}, the gates of the cache, with a RaggedBatch, received {received} with {type(batch).__name__}; "
                "build the cache with num_gates for a layer with forget gates."
            )
        if gates is not None and gates.ndim > 4:
            raise ValueError(
                f"pages: expected pages [P, p, K, D] with gates, received {self.k.shape}; use jax.vmap over the leading axes."
            )
        new = self.append_by(write, k, v, slots)
        if gates is None:
            return new
        sums = sums_of(gates, read_gates(jnp.asarray(log_forget), log_forget), batch)
        return dataclasses.replace(new, gates=put(gates, sums, to_int32(slots)))


class PagedLatentCache(Pages):
    r"""The cache of multi-head latent attention, in pages. For each token it holds a latent and a rotary key
    (DeepSeek-V2, 2024, arXiv:2405.04434, section 2.1). The keys and values of all heads are computed from the latent.
    All heads share the rotary key.

    Query $[q_c, q_r]$ scores token $j$ with $q_c \cdot \text{latent}_j + q_r \cdot \text{rope}_j$, and the values are the latents.
    Pages, tables, leading axes, `bind`, `append`, `gather` and `copy_pages` work as in
    [`ejkernel_eqx.paged.cache.cache.PagedKVCache`][].

    - `latent`, `rope`: pages `[.., P, p, R]` and `[.., P, p, Dr]`.
    - `page_table`: int32 `[.., N, M]`, -1 for no page; or `None`.
    - `lengths`: int32 `[.., N]`, including new tokens; or `None`.
    - `latent_scale`, `rope_scale`: float32 `[.., P, p]`, one for each token, or `[..]`, one for the cache. `None` for
        pages that are not quantised to 8 bits.
    """

    latent: Shaped[Array, "... P p R"]
    rope: Shaped[Array, "... P p Dr"]
    page_table: Int[Array, "... N M"] | None = eqx.field(converter=to_int32, default=None)
    lengths: Int[Array, "... N"] | None = eqx.field(converter=to_int32, default=None)
    latent_scale: Float[Array, "..."] | None = None
    rope_scale: Float[Array, "..."] | None = None

    _names = ("latent", "rope", "latent_scale", "rope_scale")
    _kernel_names = ("k", "rope", "k_scale", "rope_scale")
    _rank = 3

    @classmethod
    def init(
        cls,
        num_pages: int,
        page_size: int,
        latent_dim: int,
        rope_dim: int,
        *,
        batch_shape: Any = (),
        dtype: PageDType = jnp.float32,
        scales: str | None = None,
    ) -> "PagedLatentCache":
        """Makes an empty cache that is not bound to tables.

        **Arguments:**

        - `num_pages`, `page_size`: `P` and `p`; the cache holds `P * p` tokens.
        - `latent_dim`, `rope_dim`: `R` and `Dr`.
        - `batch_shape`, `dtype`: as in [`ejkernel_eqx.PagedKVCache.init`][]; a pair gives one for latents and one for rotary keys.
        - `scales`: the scales of 8-bit pages. `"token"`, the default, has one for each token. `"head"` has one for all
            tokens, as the latent counts as one head. It is 1 until `with_scales` sets it.

        **Raises:** `ValueError` for sizes below 1, more than 2**30 tokens, an unsupported dtype, or scales that do not match it.
        """
        widths = [(dim,) for dim in read_sizes(latent_dim=latent_dim, rope_dim=rope_dim)]
        return cls._empty(num_pages, page_size, widths, batch_shape, dtype, scales)

    @property
    def latent_dim(self) -> int:
        """The number of channels of a latent, `R`."""
        return self.latent.shape[-1]

    @property
    def rope_dim(self) -> int:
        """The number of channels of a rotary key, `Dr`."""
        return self.rope.shape[-1]

    def with_scales(self, latent_scale: Any, rope_scale: Any) -> "PagedLatentCache":
        """Returns the same pages with another scale for the whole cache. Set it before the first write.

        **Arguments:** `latent_scale`, `rope_scale`: positive floats `[..]`, or `None` for pages that are not quantised to 8 bits. New numbers
        outside the range of the scale are clipped.

        **Raises:** `ValueError` for a cache without such scales, an invalid shape, or numbers that are not positive when their values are
        known (outside `jit`).
        """
        return self._with_scales(latent_scale, rope_scale)

    @jax.named_scope("ejx.PagedLatentCache.append")
    def append(self, latent: Any, rope: Any, slots: Any) -> "PagedLatentCache":
        """Returns the cache with new tokens written; in place if the cache is donated.

        **Arguments:**

        - `latent`, `rope`: floats `[.., T, R]` and `[.., T, Dr]`, cast to the pages' dtype or quantised, with the leading axes of the pages.
        - `slots`: ints `[T]`, or with the leading axes, as in [`ejkernel_eqx.PagedKVCache.append`][]. The result and errors are the same too.
        """
        return self.append_by(write, latent, rope, slots)
