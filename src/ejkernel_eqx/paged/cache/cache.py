"""The paged key/value cache of inference."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int, Shaped

from ..spec import WriteArrays
from . import pages as paging
from .latent_cache import PagedLatentCache as PagedLatentCache
from .write import write, Writer

_RANK = 4


class PagedKVCache(eqx.Module):
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
    - `k_scale`, `v_scale`: float32 `[.., P, p, K]`, one for each token and head, or `[.., K]`, one for each head; or `None`.

    What lies in pages of no sequence and in slots past a sequence's length may be anything, also NaN.
    """

    k: Shaped[Array, "... P p K D"]
    v: Shaped[Array, "... P p K V"]
    page_table: Int[Array, "... N M"] | None = eqx.field(converter=paging.to_int32, default=None)
    lengths: Int[Array, "... N"] | None = eqx.field(converter=paging.to_int32, default=None)
    k_scale: Float[Array, "..."] | None = None
    v_scale: Float[Array, "..."] | None = None

    def __check_init__(self):
        if not all(hasattr(x, "shape") for x in jax.tree.leaves(self)):
            return  # something else in the places of arrays, such as axes to map over
        paging.check_pages(("k", self.k), ("v", self.v), _RANK)
        kind = paging.kind_of_scale("k_scale", self.k, self.k_scale, _RANK)
        other = paging.kind_of_scale("v_scale", self.v, self.v_scale, _RANK)
        if kind != other:
            raise ValueError(
                f"v_scale: expected the kind of k_scale, {kind!r}, received {other!r}; scale both."
            )
        paging.check_bound(self.page_table, self.lengths)

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
        dtype: DTypeLike = jnp.float32,
        scales: str | None = None,
    ) -> "PagedKVCache":
        """An empty cache, bound to no tables.

        **Arguments:**

        - `num_pages`, `page_size`: `P` and `p`; there is room for `P * p` tokens.
        - `num_kv_heads`, `head_dim`, `v_head_dim`: `K`, `D` and `V` (default `D`).
        - `batch_shape`: leading axes, such as `(layers,)`.
        - `dtype`: how keys and values are stored: bfloat16, float16, float32, float64 (on XLA), or int8 and float8_e4m3fn with scales.
        - `scales`: of 8-bit pages, `"token"` (the default), one for each token and head, found as it is written; or `"head"`, one
            for each head, ones until `with_scales` sets them.

        **Raises:** `ValueError` for sizes below 1, more than 2**30 tokens, another dtype, or scales that do not fit it.
        """
        num_pages, page_size, heads, dim = paging.read_sizes(
            num_pages=num_pages, page_size=page_size, num_kv_heads=num_kv_heads, head_dim=head_dim
        )
        (v_dim,) = paging.read_sizes(v_head_dim=dim if v_head_dim is None else v_head_dim)
        dtype, scales = paging.read_page_dtype(dtype, scales)
        paging.check_room(num_pages, page_size)
        lead = paging.read_batch_shape(batch_shape)
        tokens = (*lead, num_pages, page_size, heads)
        shape = {None: None, paging.TOKEN: tokens, paging.HEAD: (*lead, heads)}[scales]
        # Two arrays, not one twice: both may be donated.
        k_scale, v_scale = (None if shape is None else jnp.ones(shape, jnp.float32) for _ in range(2))
        k, v = jnp.zeros((*tokens, dim), dtype), jnp.zeros((*tokens, v_dim), dtype)
        return cls(k, v, k_scale=k_scale, v_scale=v_scale)

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """The leading axes of the pages."""
        return self.k.shape[:-_RANK]

    @property
    def num_pages(self) -> int:
        """Pages of all sequences together, `P`."""
        return self.k.shape[-4]

    @property
    def page_size(self) -> int:
        """Tokens a page, `p`."""
        return self.k.shape[-3]

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

    @property
    def scales(self) -> str | None:
        """`"token"`, `"head"`, or `None` for pages that are not quantised."""
        return paging.kind_of_scale("k_scale", self.k, self.k_scale, _RANK)

    @property
    def is_bound(self) -> bool:
        """Whether there are tables to read the pages by."""
        return self.page_table is not None

    def bind(self, page_table: Any, lengths: Any | None = None) -> "PagedKVCache":
        """The same pages, with tables that say whose they are.

        **Arguments:** `page_table`, ints `[.., N, M]`, and `lengths`, ints `[.., N]`; or a
        [`RaggedBatch`][ejkernel_eqx.paged.cache.batch.RaggedBatch] alone, which has both.

        **Raises:** `ValueError` for shapes that do not fit each other, or a batch of another page size.
        """
        table, lengths = paging.read_tables(page_table, lengths, self.page_size)
        return PagedKVCache(self.k, self.v, table, lengths, self.k_scale, self.v_scale)

    def unbind(self) -> "PagedKVCache":
        """The same pages without tables."""
        return PagedKVCache(self.k, self.v, None, None, self.k_scale, self.v_scale)

    def with_scales(self, k_scale: Any, v_scale: Any) -> "PagedKVCache":
        """The same pages with other scales a head, such as (largest magnitude of a sample) / 127: set them before anything is written.

        **Arguments:** `k_scale`, `v_scale`: positive floats `[.., K]`; new numbers beyond what they reach are clipped.

        **Raises:** `ValueError` for a cache without scales a head, another shape, or numbers that are not positive, where they are known.
        """
        if self.scales != paging.HEAD:
            raise ValueError(
                f"with_scales: expected a cache with scales='head', received one with {self.scales!r}; see the method init."
            )
        lead = len(self.batch_shape)
        k_scale = paging.read_head_scale("k_scale", k_scale, self.k_scale, lead)
        v_scale = paging.read_head_scale("v_scale", v_scale, self.v_scale, lead)
        return PagedKVCache(self.k, self.v, self.page_table, self.lengths, k_scale, v_scale)

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

    def append_by(self, writer: Writer, k: Any, v: Any, slots: Any) -> "PagedKVCache":
        """`append` by a function that writes; operations give that of their platform."""
        lead, heads = self.batch_shape, self.num_kv_heads
        k = paging.read_new("k", k, lead, (heads, self.head_dim), None)
        tokens = k.shape[len(lead)]
        v = paging.read_new("v", v, lead, (heads, self.v_head_dim), tokens)
        slots = paging.read_slots(slots, lead, tokens, self.num_pages * self.page_size)
        return self._with(writer(WriteArrays(self._pages(), {"k": k, "v": v}, slots)))

    @jax.named_scope("ejx.PagedKVCache.gather")
    def gather(
        self, max_length: int | None = None, *, dtype: DTypeLike | None = None
    ) -> tuple[Float[Array, "... N S K D"], Float[Array, "... N S K V"]]:
        """The tokens of each sequence side by side: what dense attention takes. It is differentiable.

        **Arguments:**

        - `max_length`: `S`, how many tokens of each sequence to give; static, by default all that its row of pages may hold, `M * p`.
        - `dtype`: of the results, by default the pages', or float32 for quantised ones.

        **Returns:** keys `[.., N, S, K, D]` and values `[.., N, S, K, V]`, zero where there is no token or no page. With leading
        axes, the pages' come first; those of tables without leading axes are shared.

        **Raises:** `ValueError` for a cache that is not bound to tables.
        """
        lead = self.batch_shape
        given = (self.page_table, self.lengths)
        tables, size, dtype = paging.read_gather(("k", self.k), given, lead, max_length, dtype)
        k = paging.gather(self.k, self.k_scale, tables, size, dtype, len(lead))
        return k, paging.gather(self.v, self.v_scale, tables, size, dtype, len(lead))

    @jax.named_scope("ejx.PagedKVCache.copy_pages")
    def copy_pages(self, source: Any, target: Any) -> "PagedKVCache":
        """The cache with whole pages copied, as `PageTable.allocate` asks for before a shared page is written; in place where donated.

        **Arguments:** `source`, `target`: ints `[C]`, the same for all leading axes. All are read before any is written; no target
        may be given twice. A copy with a number outside `0 .. P - 1` on either side, such as -1, is left out.

        **Raises:** `ValueError` for shapes that do not fit.
        """
        source, target = paging.read_copies(source, target)
        lead = len(self.batch_shape)
        paged = {name: x for name, x in self._pages().items() if x.ndim > lead + 1}  # not scales a head
        return self._with({name: paging.copy(x, source, target, lead) for name, x in paged.items()})

    def _pages(self) -> dict[str, Array]:
        return {
            name: x for name in ("k", "v", "k_scale", "v_scale") if (x := getattr(self, name)) is not None
        }

    def _with(self, arrays: dict[str, Array]) -> "PagedKVCache":
        new = {**self._pages(), **arrays}
        return PagedKVCache(
            new["k"], new["v"], self.page_table, self.lengths, new.get("k_scale"), new.get("v_scale")
        )
