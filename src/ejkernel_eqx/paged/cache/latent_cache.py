"""The paged cache of latent attention."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int, Shaped

from ..spec import WriteArrays
from . import pages as paging
from .write import write, Writer

_RANK = 3
_WRITTEN = {"latent": "k", "rope": "rope", "latent_scale": "k_scale", "rope_scale": "rope_scale"}
"""The names that a write knows the arrays by, which sees one head."""


class PagedLatentCache(eqx.Module):
    r"""What multi-head latent attention keeps of each token, in pages: a latent that all heads share, of which their keys and values
    are made, and a key with its rotary embedding, shared too (DeepSeek-V2, 2024, arXiv:2405.04434, section 2.1).

    Query $[q_c, q_r]$ scores token $j$ with $q_c \cdot \text{latent}_j + q_r \cdot \text{rope}_j$, and the values are the latents.
    Pages and tables are those of [`ejkernel_eqx.paged.cache.cache.PagedKVCache`][], and so are leading axes, `bind`, `append`, `gather` and
    `copy_pages`.

    - `latent`, `rope`: pages `[.., P, p, R]` and `[.., P, p, Dr]`.
    - `page_table`: int32 `[.., N, M]`, -1 for no page; or `None`.
    - `lengths`: int32 `[.., N]`, new tokens included; or `None`.
    - `latent_scale`, `rope_scale`: float32 `[.., P, p]`, one for each token, or `[..]`, one for the cache; or `None`.
    """

    latent: Shaped[Array, "... P p R"]
    rope: Shaped[Array, "... P p Dr"]
    page_table: Int[Array, "... N M"] | None = eqx.field(converter=paging.to_int32, default=None)
    lengths: Int[Array, "... N"] | None = eqx.field(converter=paging.to_int32, default=None)
    latent_scale: Float[Array, "..."] | None = None
    rope_scale: Float[Array, "..."] | None = None

    def __check_init__(self):
        if not all(hasattr(x, "shape") for x in jax.tree.leaves(self)):
            return  # something else in the places of arrays, such as axes to map over
        paging.check_pages(("latent", self.latent), ("rope", self.rope), _RANK)
        kind = paging.kind_of_scale("latent_scale", self.latent, self.latent_scale, _RANK)
        other = paging.kind_of_scale("rope_scale", self.rope, self.rope_scale, _RANK)
        if kind != other:
            raise ValueError(
                f"rope_scale: expected the kind of latent_scale, {kind!r}, received {other!r}; scale both."
            )
        paging.check_bound(self.page_table, self.lengths)

    @classmethod
    def init(
        cls,
        num_pages: int,
        page_size: int,
        latent_dim: int,
        rope_dim: int,
        *,
        batch_shape: Any = (),
        dtype: DTypeLike = jnp.float32,
        scales: str | None = None,
    ) -> "PagedLatentCache":
        """An empty cache, bound to no tables.

        **Arguments:**

        - `num_pages`, `page_size`: `P` and `p`; there is room for `P * p` tokens.
        - `latent_dim`, `rope_dim`: `R` and `Dr`.
        - `batch_shape`: leading axes, such as `(layers,)`.
        - `dtype`: how both are stored: bfloat16, float16, float32, float64 (on XLA), or int8 and float8_e4m3fn with scales.
        - `scales`: of 8-bit pages, `"token"` (the default), one for each token; or `"head"`, one for all tokens (the latent is the one
            head), 1 until `with_scales` sets it.

        **Raises:** `ValueError` for sizes below 1, more than 2**30 tokens, another dtype, or scales that do not fit it.
        """
        num_pages, page_size, latent_dim, rope_dim = paging.read_sizes(
            num_pages=num_pages, page_size=page_size, latent_dim=latent_dim, rope_dim=rope_dim
        )
        dtype, scales = paging.read_page_dtype(dtype, scales)
        paging.check_room(num_pages, page_size)
        lead = paging.read_batch_shape(batch_shape)
        tokens = (*lead, num_pages, page_size)
        shape = {None: None, paging.TOKEN: tokens, paging.HEAD: lead}[scales]
        # Two arrays, not one twice: both may be donated.
        latent_scale, rope_scale = (None if shape is None else jnp.ones(shape, jnp.float32) for _ in range(2))
        latent, rope = jnp.zeros((*tokens, latent_dim), dtype), jnp.zeros((*tokens, rope_dim), dtype)
        return cls(latent, rope, latent_scale=latent_scale, rope_scale=rope_scale)

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """The leading axes of the pages."""
        return self.latent.shape[:-_RANK]

    @property
    def num_pages(self) -> int:
        """Pages of all sequences together, `P`."""
        return self.latent.shape[-3]

    @property
    def page_size(self) -> int:
        """Tokens a page, `p`."""
        return self.latent.shape[-2]

    @property
    def latent_dim(self) -> int:
        """Channels of a latent, `R`."""
        return self.latent.shape[-1]

    @property
    def rope_dim(self) -> int:
        """Channels of a rotary key, `Dr`."""
        return self.rope.shape[-1]

    @property
    def scales(self) -> str | None:
        """`"token"`, `"head"` (one for the cache), or `None` for pages that are not quantised."""
        return paging.kind_of_scale("latent_scale", self.latent, self.latent_scale, _RANK)

    @property
    def is_bound(self) -> bool:
        """Whether there are tables to read the pages by."""
        return self.page_table is not None

    def bind(self, page_table: Any, lengths: Any | None = None) -> "PagedLatentCache":
        """The same pages, with tables that say whose they are.

        **Arguments:** `page_table`, ints `[.., N, M]`, and `lengths`, ints `[.., N]`; or a
        [`RaggedBatch`][ejkernel_eqx.paged.cache.batch.RaggedBatch] alone, which has both.

        **Raises:** `ValueError` for shapes that do not fit each other, or a batch of another page size.
        """
        table, lengths = paging.read_tables(page_table, lengths, self.page_size)
        return PagedLatentCache(self.latent, self.rope, table, lengths, self.latent_scale, self.rope_scale)

    def unbind(self) -> "PagedLatentCache":
        """The same pages without tables."""
        return PagedLatentCache(self.latent, self.rope, None, None, self.latent_scale, self.rope_scale)

    def with_scales(self, latent_scale: Any, rope_scale: Any) -> "PagedLatentCache":
        """The same pages with another scale for the whole cache: set it before anything is written.

        **Arguments:** `latent_scale`, `rope_scale`: positive floats `[..]`; new numbers beyond what they reach are clipped.

        **Raises:** `ValueError` for a cache without such scales, another shape, or numbers that are not positive, where they are known.
        """
        if self.scales != paging.HEAD:
            raise ValueError(
                f"with_scales: expected a cache with scales='head', received one with {self.scales!r}; see the method init."
            )
        lead = len(self.batch_shape)
        latent_scale = paging.read_head_scale("latent_scale", latent_scale, self.latent_scale, lead)
        rope_scale = paging.read_head_scale("rope_scale", rope_scale, self.rope_scale, lead)
        return PagedLatentCache(
            self.latent, self.rope, self.page_table, self.lengths, latent_scale, rope_scale
        )

    @jax.named_scope("ejx.PagedLatentCache.append")
    def append(self, latent: Any, rope: Any, slots: Any) -> "PagedLatentCache":
        """The cache with new tokens in it; in place where it is donated.

        **Arguments:**

        - `latent`, `rope`: floats `[.., T, R]` and `[.., T, Dr]`, cast to the pages' dtype or quantised; leading axes as the pages have.
        - `slots`: ints `[T]`, or with the leading axes: `page * page_size + place` for each token; one outside `0 .. P * p - 1`,
            such as -1, writes nowhere. No slot may be given twice.

        **Returns:** the new cache, with the same tables: `lengths` count new tokens from the start.

        **Raises:** `ValueError` for shapes that do not fit.
        """
        return self.append_by(write, latent, rope, slots)

    def append_by(self, writer: Writer, latent: Any, rope: Any, slots: Any) -> "PagedLatentCache":
        """`append` by a function that writes; operations give that of their platform."""
        lead = self.batch_shape
        latent = paging.read_new("latent", latent, lead, (self.latent_dim,), None)
        tokens = latent.shape[len(lead)]
        rope = paging.read_new("rope", rope, lead, (self.rope_dim,), tokens)
        slots = paging.read_slots(slots, lead, tokens, self.num_pages * self.page_size)
        # An axis of one head, behind the pages and places or, of a scale for the cache, in their stead.
        axes = {name: min(x.ndim, len(lead) + 2) for name, x in self._pages().items()}
        pages = {_WRITTEN[name]: jnp.expand_dims(x, axes[name]) for name, x in self._pages().items()}
        written = writer(WriteArrays(pages, {"k": latent[..., None, :], "rope": rope[..., None, :]}, slots))
        return self._with({name: jnp.squeeze(written[_WRITTEN[name]], axis) for name, axis in axes.items()})

    @jax.named_scope("ejx.PagedLatentCache.gather")
    def gather(
        self, max_length: int | None = None, *, dtype: DTypeLike | None = None
    ) -> tuple[Float[Array, "... N S R"], Float[Array, "... N S Dr"]]:
        """The tokens of each sequence side by side. It is differentiable.

        **Arguments:**

        - `max_length`: `S`, how many tokens of each sequence to give; static, by default all that its row of pages may hold, `M * p`.
        - `dtype`: of the results, by default the pages', or float32 for quantised ones.

        **Returns:** latents `[.., N, S, R]` and rotary keys `[.., N, S, Dr]`, zero where there is no token or no page.

        **Raises:** `ValueError` for a cache that is not bound to tables.
        """
        lead = self.batch_shape
        given = (self.page_table, self.lengths)
        tables, size, dtype = paging.read_gather(("latent", self.latent), given, lead, max_length, dtype)
        latent = paging.gather(self.latent, self.latent_scale, tables, size, dtype, len(lead))
        return latent, paging.gather(self.rope, self.rope_scale, tables, size, dtype, len(lead))

    @jax.named_scope("ejx.PagedLatentCache.copy_pages")
    def copy_pages(self, source: Any, target: Any) -> "PagedLatentCache":
        """The cache with whole pages copied, as `PageTable.allocate` asks for before a shared page is written; in place where donated.

        **Arguments:** `source`, `target`: ints `[C]`, the same for all leading axes. All are read before any is written; no target
        may be given twice. A copy with a number outside `0 .. P - 1` on either side, such as -1, is left out.

        **Raises:** `ValueError` for shapes that do not fit.
        """
        source, target = paging.read_copies(source, target)
        lead = len(self.batch_shape)
        paged = {name: x for name, x in self._pages().items() if x.ndim > lead}  # not a scale for the cache
        return self._with({name: paging.copy(x, source, target, lead) for name, x in paged.items()})

    def _pages(self) -> dict[str, Array]:
        return {name: x for name in _WRITTEN if (x := getattr(self, name)) is not None}

    def _with(self, arrays: dict[str, Array]) -> "PagedLatentCache":
        new = {**self._pages(), **arrays}
        return PagedLatentCache(
            new["latent"],
            new["rope"],
            self.page_table,
            self.lengths,
            new.get("latent_scale"),
            new.get("rope_scale"),
        )
