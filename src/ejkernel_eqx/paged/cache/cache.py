"""The paged caches of inference: of keys and values, and of latent attention."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int, Shaped

from .batch import to_int32
from .pages import PageDType, Pages, read_sizes
from .write import write


class PagedKVCache(Pages):
    r"""Keys and values of many sequences, in pages of $p$ tokens that each sequence takes as it grows.

    Token $j$ of sequence $n$ is at place $j \bmod p$ of page $\text{page\_table}_{n, \lfloor j / p \rfloor}$ (vLLM; Kwon et al., 2023,
    arXiv:2309.06180, section 4). With scales the pages hold 8-bit numbers, and what one stands for is scale times number.

    A pure value: `append` and `copy_pages` give a new cache and, where the old one is donated to `jit`, write in place. One that is
    not bound to tables has pages only, so that a stack of layers, with leading axes on all its arrays, may be scanned or mapped
    over and each layer bound inside to tables that all share:

    ```python
    cache = PagedKVCache.init(num_pages=1024, page_size=16, num_kv_heads=8, head_dim=128, batch_shape=(layers,))
    x, cache = jax.lax.scan(lambda x, own: layer(x, own.bind(batch)), x, cache)
    ```

    - `k`, `v`: pages `[.., P, p, K, D]` and `[.., P, p, K, V]`.
    - `page_table`: int32 `[.., N, M]`, a row of pages for each sequence, -1 (or any number outside `0 .. P - 1`) for none; or `None`.
    - `lengths`: int32 `[.., N]`, each sequence's tokens, new ones included; or `None`.
    - `k_scale`, `v_scale`: float32 `[.., P, p, K]`, one for each token and head, or `[.., K]`, one for each head; or `None` for pages
        that are not in 8 bits.

    What lies in pages of no sequence and in slots past a sequence's length may be anything, also NaN.
    """

    k: Shaped[Array, "... P p K D"]
    v: Shaped[Array, "... P p K V"]
    page_table: Int[Array, "... N M"] | None = eqx.field(converter=to_int32, default=None)
    lengths: Int[Array, "... N"] | None = eqx.field(converter=to_int32, default=None)
    k_scale: Float[Array, "..."] | None = None
    v_scale: Float[Array, "..."] | None = None

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
    ) -> "PagedKVCache":
        """An empty cache, bound to no tables.

        **Arguments:**

        - `num_pages`, `page_size`: `P` and `p`; there is room for `P * p` tokens.
        - `num_kv_heads`, `head_dim`, `v_head_dim`: `K`, `D` and `V` (default `D`).
        - `batch_shape`: leading axes, such as `(layers,)`.
        - `dtype`: how keys and values are stored: bfloat16, float16, float32, float64 (on XLA), or int8, float8_e4m3fn and float8_e5m2 with
            scales. A pair is that of keys and that of values, such as `("bfloat16", "int8")` for values in 8 bits alone.
        - `scales`: of 8-bit pages, `"token"` (the default), one for each token and head, found as it is written; or `"head"`, one
            for each head, ones until `with_scales` sets them.

        **Raises:** `ValueError` for sizes below 1, more than 2**30 tokens, another dtype, or scales that do not fit it.
        """
        num_pages, page_size, heads, dim = read_sizes(
            num_pages=num_pages, page_size=page_size, num_kv_heads=num_kv_heads, head_dim=head_dim
        )
        (v_dim,) = read_sizes(v_head_dim=dim if v_head_dim is None else v_head_dim)
        widths = ((heads, dim), (heads, v_dim))
        return cls._empty((num_pages, page_size), widths, batch_shape, dtype, scales)

    @property
    def num_kv_heads(self) -> int:
        """`K`."""
        return self.k.shape[-2]

    @property
    def head_dim(self) -> int:
        """Channels of a key, `D`."""
        return self.k.shape[-1]

    @property
    def v_head_dim(self) -> int:
        """Channels of a value, `V`."""
        return self.v.shape[-1]

    def with_scales(self, k_scale: Any, v_scale: Any) -> "PagedKVCache":
        """The same pages with other scales a head, such as (largest magnitude of a sample) / 127: set them before anything is written.

        **Arguments:** `k_scale`, `v_scale`: positive floats `[.., K]`, `None` for pages that are not in 8 bits; new numbers beyond what they
        reach are clipped.

        **Raises:** `ValueError` for a cache without scales a head, another shape, or numbers that are not positive, where they are known.
        """
        return self._with_scales(k_scale, v_scale)

    @jax.named_scope("ejx.PagedKVCache.append")
    def append(self, k: Any, v: Any, slots: Any) -> "PagedKVCache":
        """The cache with new tokens in it; in place where it is donated.

        **Arguments:**

        - `k`, `v`: floats `[.., T, K, D]` and `[.., T, K, V]`, cast to the pages' dtype or quantised; leading axes as the pages have.
        - `slots`: ints `[T]`, or with the leading axes: `page * page_size + place` for each token, as `RaggedBatch.slots` and
            `PageTable.slots` give; one outside `0 .. P * p - 1`, such as -1, writes nowhere. No slot may be given twice.

        **Returns:** the new cache, with the same tables: `lengths` count new tokens from the start.

        **Raises:** `ValueError` for shapes that do not fit.
        """
        return self.append_by(write, k, v, slots)


class PagedLatentCache(Pages):
    r"""What multi-head latent attention keeps of each token, in pages: a latent that all heads share, of which their keys and values
    are made, and a key with its rotary embedding, shared too (DeepSeek-V2, 2024, arXiv:2405.04434, section 2.1).

    Query $[q_c, q_r]$ scores token $j$ with $q_c \cdot \text{latent}_j + q_r \cdot \text{rope}_j$, and the values are the latents.
    Pages and tables are those of [`ejkernel_eqx.paged.cache.cache.PagedKVCache`][], and so are leading axes, `bind`, `append`, `gather` and
    `copy_pages`.

    - `latent`, `rope`: pages `[.., P, p, R]` and `[.., P, p, Dr]`.
    - `page_table`: int32 `[.., N, M]`, -1 for no page; or `None`.
    - `lengths`: int32 `[.., N]`, new tokens included; or `None`.
    - `latent_scale`, `rope_scale`: float32 `[.., P, p]`, one for each token, or `[..]`, one for the cache; or `None` for pages that are not
        in 8 bits.
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
        """An empty cache, bound to no tables.

        **Arguments:**

        - `num_pages`, `page_size`: `P` and `p`; there is room for `P * p` tokens.
        - `latent_dim`, `rope_dim`: `R` and `Dr`.
        - `batch_shape`, `dtype`: as in [`ejkernel_eqx.PagedKVCache.init`][]; a pair is that of latents and that of rotary keys.
        - `scales`: of 8-bit pages, `"token"` (the default), one for each token; or `"head"`, one for all tokens (the latent is the one
            head), 1 until `with_scales` sets it.

        **Raises:** `ValueError` for sizes below 1, more than 2**30 tokens, another dtype, or scales that do not fit it.
        """
        num_pages, page_size, latent_dim, rope_dim = read_sizes(
            num_pages=num_pages, page_size=page_size, latent_dim=latent_dim, rope_dim=rope_dim
        )
        widths = ((latent_dim,), (rope_dim,))
        return cls._empty((num_pages, page_size), widths, batch_shape, dtype, scales)

    @property
    def latent_dim(self) -> int:
        """Channels of a latent, `R`."""
        return self.latent.shape[-1]

    @property
    def rope_dim(self) -> int:
        """Channels of a rotary key, `Dr`."""
        return self.rope.shape[-1]

    def with_scales(self, latent_scale: Any, rope_scale: Any) -> "PagedLatentCache":
        """The same pages with another scale for the whole cache: set it before anything is written.

        **Arguments:** `latent_scale`, `rope_scale`: positive floats `[..]`, `None` for pages that are not in 8 bits; new numbers beyond what
        they reach are clipped.

        **Raises:** `ValueError` for a cache without such scales, another shape, or numbers that are not positive, where they are known.
        """
        return self._with_scales(latent_scale, rope_scale)

    @jax.named_scope("ejx.PagedLatentCache.append")
    def append(self, latent: Any, rope: Any, slots: Any) -> "PagedLatentCache":
        """The cache with new tokens in it; in place where it is donated.

        **Arguments:**

        - `latent`, `rope`: floats `[.., T, R]` and `[.., T, Dr]`, cast to the pages' dtype or quantised; leading axes as the pages have.
        - `slots`: ints `[T]`, or with the leading axes, as in [`ejkernel_eqx.PagedKVCache.append`][], and so are result and errors.
        """
        return self.append_by(write, latent, rope, slots)
