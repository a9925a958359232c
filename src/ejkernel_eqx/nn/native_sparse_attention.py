"""`NativeSparseAttention`: the attention layer of NSA."""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple, overload, TYPE_CHECKING, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import PRNGKeyArray

from .._jitted import compiled_call
from .._shapes import AnyArray, Bool, Float, Int
from .._values import stops_programs
from ..attention.ring.arguments import Split
from ..core.arguments import accumulator
from ..core.split_tokens import over_sequence_axis
from ..dispatch import PlatformLike
from ..native_sparse import blocks, PagedNativeSparseAttention
from ..native_sparse import NativeSparseAttention as SparseAttention
from ..paged import PagedKVCache, RaggedBatch
from ..paged.cache.batch import slots_of
from ..parallel import Leading, over_mesh
from ..rotary import RotaryEmbedding
from .arguments import check_flags, check_numbers, read_dtype, read_sizes
from .attention_inputs import CallInputs, check_heads, check_rows, head_dim_of
from .attention_places import locate, Places, places_of, places_over_pages
from .block_compression import BlockCompression, Compression
from .heads_for_tokens import over_tokens, OverTokens
from .kv_cache import check_room, marked
from .paged_layer import check_pool, over_pages, PagedLayer
from .parts import Parts
from .projection import compute_dtype_of, project, stored_dtype_of
from .signatures import SameOutput, TokenInputs, Tokens
from .sparse_cache import PagedSparseCache, SparseKVCache
from .split_attention import split_of
from .tokens import check_ragged, clear, ids_of, merge_heads, split_heads


class Heads(NamedTuple):
    """The projections of a call, not rotated."""

    q: Array  # [..., T, H, D]
    k: Array  # [..., T, K, D]
    v: Array  # [..., T, K, D]
    gates: Array  # [..., T, H, 3]


def _arrays_of(compression: Any) -> list[Array]:
    return jax.tree.leaves(eqx.filter(compression, eqx.is_array))


CompressionWeights = (
    tuple[Float[Array, "K l D"], Float[Array, "K m D"]]
    | tuple[
        Float[Array, "K l D"],
        Float[Array, "K m F"],
        Float[Array, "K F"],
        Float[Array, "K F D"],
        Float[Array, "K D"],
    ]
)
"""The arrays of a `BlockCompression`, in its order."""


@dataclasses.dataclass(frozen=True, eq=False)
class SparseOverTokens(OverTokens):
    """The attention of the layer over devices that share the tokens: each has all tokens of some key heads, and the queries of these."""

    max_segments: int | None = None

    @over_sequence_axis(mixes_heads=lambda operation: True)
    def __call__(
        self,
        q: Float[Array, "*B T H D"],
        k: Float[Array, "*B T K D"],
        v: Float[Array, "*B T K D"],
        gates: Float[Array, "*B T H n"],
        k_weights: CompressionWeights | None = None,
        v_weights: CompressionWeights | None = None,
        segment_ids: Int[Array, "*B T"] | None = None,
    ) -> Float[Array, "*B T H D"]:
        exchange, layer = self.exchange(k.shape[-2]), self.layer
        if k_weights is not None and v_weights is not None:
            own = iter([exchange.own(x) for x in (*k_weights, *v_weights)])
            pair = layer.k_compression, layer.v_compression
            mine = jax.tree.map(lambda x: next(own) if eqx.is_array(x) else x, pair)
            layer = eqx.tree_at(lambda layer: (layer.k_compression, layer.v_compression), layer, mine)
        heads = Heads(*(exchange.to_heads(x) for x in (q, k, v, gates)))
        if segment_ids is None:
            out = layer.over_rows(heads)
        else:
            ids = exchange.whole(segment_ids, segment_ids.ndim - 1)
            out = layer.over_segments(heads, ids, self.max_segments)
        return exchange.to_tokens(out, q.shape[-2])


class NativeSparseAttention(PagedLayer[PagedSparseCache]):
    r"""The attention layer of NSA (Yuan et al. 2025, arXiv:2502.11089, section 3), for long sequences: every query attends compressed keys, a few
    chosen blocks of keys and a window ([`ejkernel_eqx.NativeSparseAttention`][]), under gates of its own for each head,

    $$q = \mathrm{rope}(x W_q^\top),\quad k = \mathrm{rope}(x W_k^\top),\quad v = x W_v^\top,\quad g = \sigma(x W_g^\top)$$

    $$\tilde k_c = \mathrm{rope}_{cd}\big(\varphi_k(x_{cd \le i < cd + l} W_k^\top)\big),\quad
      \tilde v_c = \varphi_v(x_{cd \le i < cd + l} W_v^\top),\quad y = \mathrm{NSA}(q, k, v, \tilde k, \tilde v, g)\, W_o^\top$$

    Compression sees keys before their rotation and adds a learned embedding of places inside the block; the compressed key is rotated as its first
    token. So the score of a compressed key depends on distances only, as every other does. With `compression="mean"`, compressed keys are the means
    of rotated keys, without weights.

    The three branches share keys and values. The paper projects them for each branch separately, and publishes no code or weights; the
    implementations that others published share them too. Parameters have the names and shapes (`[out, in]`) of one of these,
    flash-linear-attention, whose weights load by renaming (`compression="mean"` with the sizes of the blocks).
    """

    q_proj: eqx.nn.Linear  # [H * D, E]
    k_proj: eqx.nn.Linear  # [K * D, E]
    v_proj: eqx.nn.Linear  # [K * D, E]
    g_proj: eqx.nn.Linear  # [H * 3, E], the gates of each head: compressed, selected, sliding
    o_proj: eqx.nn.Linear  # [E, H * D]
    k_compression: BlockCompression | None
    v_compression: BlockCompression | None
    rope: RotaryEmbedding | None
    attention: SparseAttention
    paged_attention: PagedNativeSparseAttention
    embed_dim: int = eqx.field(static=True)
    num_heads: int = eqx.field(static=True)
    num_kv_heads: int = eqx.field(static=True)
    head_dim: int = eqx.field(static=True)
    max_segments: int | None = eqx.field(static=True)
    split: Split | None = eqx.field(static=True)
    compute_dtype: str | None = eqx.field(static=True)

    def __init__(
        self,
        embed_dim: int,
        *,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        block_size: int = 64,
        num_blocks: int = 16,
        sliding_window: int = 512,
        compression_size: int = 32,
        compression_stride: int = 16,
        compression: Compression = "mlp",
        compression_hidden_dim: int | None = None,
        rope: RotaryEmbedding | None = None,
        use_qkv_bias: bool = False,
        softmax_scale: float | None = None,
        max_segments: int | None = None,
        sequence_axis: str | None = None,
        token_order: Literal["contiguous", "zigzag"] = "contiguous",
        platform: PlatformLike | None = None,
        config: Any = None,
        dtype: DTypeLike | None = None,
        compute_dtype: DTypeLike | None = None,
        key: PRNGKeyArray,
    ):
        r"""**Arguments:**

        - `embed_dim`: features `E` of the input and output.
        - `num_heads`: number of query heads, `H`.
        - `num_kv_heads`: number of key and value heads `K`, a divisor of `H`; default `H`. Chosen blocks are shared by the queries of a group,
            which makes groups of 16 fast (the paper has 64 and 4).
        - `head_dim`: features `D` of a head; default `embed_dim // num_heads`.
        - `block_size`, `num_blocks`, `sliding_window`: the tokens of a block of the selected branch, the blocks that
            each query chooses (including its own and the first), and the keys of the sliding branch.
        - `compression_size`, `compression_stride`: tokens $l$ of a compressed key, and $d$ between the first tokens of two. The stride divides both
            it and `block_size`.
        - `compression`: how the $l$ keys (and values) of each head become one. `"mlp"` is two products with a ReLU
            between, and `"linear"` is one product. Both add an embedding of the places inside the block first. `"mean"`
            is the mean.
        - `compression_hidden_dim`: features between the products of `"mlp"`; default `4 * D`.
        - `rope`: rotary embedding of queries and keys; default none. Its frequencies do not depend on the length of a sequence.
        - `use_qkv_bias`: whether the projections to queries, keys and values have biases.
        - `max_segments`: the largest number of segments in a row of `segment_ids`; later ones are padding. Default: as many as tokens; the memory
            of a gradient grows by a block of keys and values for each.
        - `softmax_scale`, `platform`, `config`: as in [`ejkernel_eqx.NativeSparseAttention`][].
        - `sequence_axis`, `token_order`: a mesh axis that the tokens are split over, and their order, as in [`ejkernel_eqx.nn.MultiHeadAttention`][].
            Devices exchange heads for tokens: each has all tokens of some key heads, with their queries. Devices beyond the number of key heads have
            none.
        - `dtype`, `compute_dtype`: as in [`ejkernel_eqx.nn.MultiHeadAttention`][].
        - `key`: PRNG key for the initial weights.
        """
        embed_dim, num_heads = read_sizes(embed_dim=embed_dim, num_heads=num_heads)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        head_dim = head_dim_of(embed_dim, num_heads, head_dim)
        num_kv_heads, head_dim = read_sizes(num_kv_heads=num_kv_heads, head_dim=head_dim)
        check_heads(num_heads, num_kv_heads, head_dim, rope)
        _check_rope(rope)
        check_flags(use_qkv_bias=use_qkv_bias)
        check_numbers(softmax_scale=softmax_scale)
        if max_segments is not None:
            (max_segments,) = read_sizes(max_segments=max_segments)
        hidden = _read_compression(compression, compression_hidden_dim, head_dim)
        sparse = (block_size, num_blocks, sliding_window)
        options: Any = {"compression_size": compression_size, "compression_stride": compression_stride}
        options |= {"softmax_scale": softmax_scale, "platform": platform}
        self.attention = SparseAttention(*sparse, **options, config=config)
        self.paged_attention = PagedNativeSparseAttention(*sparse, **options)
        parts = Parts(key, 5, dtype, compute_dtype)
        self.q_proj = parts.linear(embed_dim, num_heads * head_dim, use_qkv_bias)
        self.k_proj = parts.linear(embed_dim, num_kv_heads * head_dim, use_qkv_bias)
        self.v_proj = parts.linear(embed_dim, num_kv_heads * head_dim, use_qkv_bias)
        self.g_proj = parts.linear(embed_dim, num_heads * 3)
        self.o_proj = parts.linear(num_heads * head_dim, embed_dim)
        self.k_compression = self.v_compression = None
        if compression != "mean":
            sizes: Any = {"size": compression_size, "stride": compression_stride, "hidden_dim": hidden}
            make = functools.partial(BlockCompression, num_kv_heads, head_dim, **sizes, dtype=parts.dtype)
            keys = (jax.random.fold_in(key, n) for n in range(2))
            self.k_compression, self.v_compression = (make(key=key) for key in keys)
        self.rope, self.split = rope, split_of(sequence_axis, token_order)
        self.embed_dim, self.head_dim = embed_dim, head_dim
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.max_segments, self.compute_dtype = max_segments, parts.compute_dtype

    def init_cache(
        self, batch_shape: tuple[int, ...] | int, max_length: int, dtype: DTypeLike | None = None
    ) -> SparseKVCache:
        """Returns an empty [`SparseKVCache`][ejkernel_eqx.nn.SparseKVCache] for this layer.

        **Arguments:**

        - `batch_shape`: leading axes; `()` for one sequence, an integer `B` for `(B,)`.
        - `max_length`: capacity of each row, in tokens.
        - `dtype`: of keys and values; default `compute_dtype`, or else the dtype of the weights.
        """
        kept: DTypeLike = self._stored_dtype() if dtype is None else dtype
        sizes: Any = {"compression_size": self._size, "compression_stride": self._stride}
        return SparseKVCache.init(batch_shape, max_length, self.num_kv_heads, self.head_dim, kept, **sizes)

    def init_paged_cache(
        self,
        num_pages: int,
        page_size: int,
        *,
        batch_shape: tuple[int, ...] | int = (),
        dtype: DTypeLike | None = None,
        scales: str | None = None,
    ) -> PagedSparseCache:
        """Returns an empty [`PagedSparseCache`][ejkernel_eqx.nn.PagedSparseCache] for this layer.

        **Arguments:**

        - `num_pages`, `page_size`: as in `PagedKVCache.init`; the page size is a multiple of `compression_stride`.
        - `batch_shape`: leading axes of stacked layers.
        - `dtype`: of the pages, at least 16 bits; default `compute_dtype`, or else the dtype of the weights.
        - `scales`: None; those of other layers are for pages of 8 bits, which this one does not have.
        """
        found = read_dtype("dtype", dtype)
        if scales is not None:
            raise ValueError(
                f"scales: expected None, received {scales!r}; native sparse attention reads pages of at least 16 bits."
            )
        sizes = (num_pages, page_size, self.num_kv_heads, self.head_dim)
        kept = self._stored_dtype() if found is None else found
        return PagedSparseCache.init(
            *sizes, compression_stride=self._stride, batch_shape=batch_shape, dtype=kept
        )

    if TYPE_CHECKING:

        @overload
        def __call__(self, x: Tokens, cache: None = None, **given: Unpack[TokenInputs]) -> SameOutput: ...

        @overload
        def __call__(
            self, x: Tokens, cache: SparseKVCache, **given: Unpack[TokenInputs]
        ) -> tuple[SameOutput, SparseKVCache]: ...

        @overload
        def __call__(
            self, x: Tokens, cache: PagedSparseCache, *, batch: RaggedBatch
        ) -> tuple[SameOutput, PagedSparseCache]: ...

    @compiled_call("ejx.nn.NativeSparseAttention")
    def __call__(
        self,
        x: Float[AnyArray, "*B T E"],
        cache: SparseKVCache | PagedSparseCache | None = None,
        *,
        padding_mask: Bool[AnyArray, "*B T"] | None = None,
        segment_ids: Int[AnyArray, "*B T"] | None = None,
        cu_seqlens: Int[AnyArray, " N+1"] | None = None,
        batch: RaggedBatch | None = None,
    ) -> SameOutput | tuple[SameOutput, SparseKVCache | PagedSparseCache]:
        """**Arguments:**

        - `x`: `[..., T, E]` with any number of leading axes.
        - `cache`: what is kept of the tokens before `x`; that of `x` is added. Processing a prompt at once, in chunks or token by token, with rows
            at different positions, returns the same as processing whole sequences at once.
        - `padding_mask`: bool `[..., T]`, True for real tokens, which must be contiguous in each row (padding left, right or both). Padding
            may hold NaN and is not cached; outputs at padding positions are undefined.
        - `segment_ids`: integers `[..., T]`; a run of equal ids is a sequence with its own blocks and compressed keys, and negative ids are padding.
            Not with a cache.
        - `cu_seqlens`: offsets `[N + 1]` of packed sequences, with `x` of shape `[T, E]`. Each sequence has its own positions, blocks and compressed
            keys; tokens past the last offset are padding. Not with `padding_mask`, `segment_ids` or a cache.
        - `batch`: an `ejkernel_eqx.RaggedBatch`, for serving. `x [T, E]` holds the new tokens of its sequences and `cache` is a
            `PagedSparseCache`, into whose pages they are written. It may be bound to the tables of the batch or not, and is returned in the same
            state. Padding may hold NaN; outputs at padding positions are undefined. Donate the cache for writing in place.

        **Returns:** `y`, of the shape of `x`, in the dtype of the computation. With a cache: `(y, cache)`.

        Raises `ValueError` for invalid arguments; values are checked when they are known (outside `jit`).
        """
        given = CallInputs(padding_mask=padding_mask, segment_ids=segment_ids, cu_seqlens=cu_seqlens)
        if batch is not None:
            x = check_ragged(x, batch, self.embed_dim, given._asdict())
            sizes = self.num_kv_heads, self.head_dim, self._stride
            sizes_of = lambda c: (
                c.tokens.num_kv_heads,
                c.tokens.head_dim,
                c.page_size // c.compressed.page_size,
            )
            check_pool(cache, PagedSparseCache, "(K, D) and stride", sizes, sizes_of)
            return over_pages(self, x, cache, batch, functools.partial(self._over_pages, batch))
        x = check_rows(self.embed_dim, (SparseKVCache, PagedSparseCache), x, cache, given)
        assert not isinstance(cache, PagedSparseCache)
        x = x.astype(compute_dtype_of(self.compute_dtype, self, x))
        # Without tokens nothing is computed, and the cache stays as it is.
        if 0 in x.shape:
            return x if cache is None else (x, cache)
        if cache is not None:
            return self._after(x, cache, padding_mask)
        if over_tokens(self.split, x, cu_seqlens):
            return self._split(self.split, x, ids_of(segment_ids, padding_mask), segment_ids is None)
        if cu_seqlens is not None:
            return self._packed(x, given)
        if segment_ids is not None:
            ids = ids_of(segment_ids, padding_mask)
            assert ids is not None
            heads = self._heads(clear(x, ids >= 0))
            return self._finish(self.over_segments(heads, ids, self.max_segments))
        if padding_mask is None:
            return self._whole(x)
        # Rows that begin with their first real token: what follows the last one is seen by none.
        real = jnp.asarray(padding_mask)
        first = jnp.argmax(real, axis=-1).astype(jnp.int32)
        return rolled(self._whole(rolled(clear(x, real), first)), -first)

    def _whole(self, x: Array) -> Array:
        return self._finish(self.over_rows(self._heads(x)))

    def over_rows(self, heads: Heads) -> Array:
        """Rows of which each token is real, or follows those that are."""
        count = blocks.num_compressed(heads.q.shape[-3], self._size, self._stride, False)
        return self._attend(heads, Places(), Places(jnp.arange(count) * self._stride))

    def _split(self, split: Split, x: Array, ids: Array | None, is_one: bool) -> Array:
        """Rows over devices that share their tokens; `is_one`: those that are not padding are one sequence."""
        heads = self._heads(x if ids is None else clear(x, ids >= 0))
        others: dict[str, Any] = {} if ids is None else {"segment_ids": ids}
        if self.k_compression is not None:
            weights = [tuple(_arrays_of(x)) for x in (self.k_compression, self.v_compression)]
            others |= {"k_weights": weights[0], "v_weights": weights[1]}
        most = 1 if is_one else self.max_segments
        over = SparseOverTokens.of(self, split, heads.q, max_segments=most)
        return self._finish(over(*heads, **others))

    def _packed(self, x: Array, given: CallInputs) -> Array:
        rows = locate(x, None, given)
        heads, length = self._heads(clear(x, rows.real)), x.shape[0]
        places = places_of(self.rope, None, rows)
        assert rows.cu_seqlens is not None and places.positions is not None
        offsets = jnp.asarray(rows.cu_seqlens)
        sizes = self.attention.options.block_size, self._size, self._stride
        begin = blocks.of_offsets(offsets, length, *sizes).compressed_begin
        # A compressed key that does not exist begins past the end, and any position serves it.
        starts = jnp.asarray(places.positions)[jnp.minimum(begin, length - 1)]
        return self._finish(self._attend(heads, places, Places(starts), begin=begin, cu_seqlens=offsets))

    def over_segments(self, heads: Heads, ids: Array, most: int | None) -> Array:
        """Rows of segments, at most so many; `None` for as many as tokens."""
        length, options = heads.q.shape[-3], self.attention.options
        # A row has no more sequences than tokens.
        most = min(most or length, length)
        begin = blocks.of_ids(ids, most, options.block_size, self._size, self._stride).compressed_begin
        starts = Places(jnp.minimum(begin, length - 1))
        return self._attend(heads, Places(), starts, begin=begin, segment_ids=ids, max_segments=most)

    def _attend(
        self, heads: Heads, places: Places, starts: Places, begin: Array | None = None, **how: Any
    ) -> Array:
        """A call without a cache; `starts` are the positions of compressed keys."""
        q, k = places.turn(self.rope, heads.q), places.turn(self.rope, heads.k)
        if self.k_compression is not None and self.v_compression is not None:
            compressed_k = starts.turn(self.rope, self.k_compression(heads.k, begin))
            how |= {"compressed_k": compressed_k, "compressed_v": self.v_compression(heads.v, begin)}
        return self.attention(q, k, heads.v, heads.gates, **how)

    def _after(
        self, x: Array, cache: SparseKVCache, padding_mask: AnyArray | None
    ) -> tuple[Array, SparseKVCache]:
        """A call with a dense cache."""
        tokens, real, behind = x.shape[-2], None, None
        offset = cache.lengths  # the position of the first token
        if padding_mask is not None:
            if not stops_programs():
                check_room(cache, tokens, padding_mask)  # as given, since only inputs have known values
            # Rows that end with their last real token: padding before sees no more than tokens that are in the cache.
            given = jnp.asarray(padding_mask)
            count = jnp.sum(given, axis=-1, dtype=jnp.int32)
            behind = jnp.argmax(given[..., ::-1], axis=-1).astype(jnp.int32)
            x, offset = rolled(clear(x, given), -behind), offset + count - tokens
            token = jax.lax.broadcasted_iota(jnp.int32, given.shape, given.ndim - 1)
            real = token >= (tokens - count)[..., None]
        heads, places = self._heads(x), Places(offset=offset)
        q, k = places.turn(self.rope, heads.q), places.turn(self.rope, heads.k)
        # Tokens are cached first, as the blocks that they complete contain them.
        new = self._completed(cache.append(k, heads.v, mask=real), cache.lengths, tokens)
        k, v, *compressed = (x.astype(q.dtype) for x in (new.k, new.v, new.compressed_k, new.compressed_v))
        how: Any = {"compressed_k": compressed[0], "compressed_v": compressed[1], "q_offset": offset}
        y = marked(self._finish(self.attention(q, k, v, heads.gates, **how)), new)
        return (y if behind is None else rolled(y, behind)), new

    def _completed(self, cache: SparseKVCache, before: Array, tokens: int) -> SparseKVCache:
        """The cache with the compressed keys of blocks that have become complete since there were `before` tokens, at most `tokens` ago."""
        first, end = self._complete(before), self._complete(cache.lengths)
        # A bound for all rows, since their lengths are data: each stride completes one key at most.
        most = min(-(-tokens // self._stride), cache.compressed_k.shape[-3])
        width = (most - 1) * self._stride + self._size
        at = jax.lax.broadcasted_iota(jnp.int32, (*first.shape, width), first.ndim)
        at = at + first[..., None] * self._stride
        k, v = (taken(x, at) for x in (cache.k, cache.v))
        compressed_k, compressed_v = self._compressed(k, v, at)
        return cache.complete(compressed_k, compressed_v, first, end)

    def _over_pages(
        self, batch: RaggedBatch, x: Array, bound: PagedSparseCache
    ) -> tuple[Array, PagedSparseCache]:
        """A call with a batch: keys and values are written to their pages first, then the compressed ones of blocks that they complete."""
        heads, places = self._heads(x), places_over_pages(self.rope, batch, None)
        q, k = places.turn(self.rope, heads.q), places.turn(self.rope, heads.k)
        tokens = bound.tokens.append(k, heads.v, batch.slots)
        new = PagedSparseCache(tokens, self._completed_pages(tokens, bound.compressed, batch))
        sizes: Any = {"query_start_loc": batch.query_start_loc, "max_query_len": batch.max_query_len}
        out = self.paged_attention(q.astype(tokens.k.dtype), heads.gates, new.tokens, new.compressed, **sizes)
        return self._finish(out.astype(x.dtype)), new

    def _completed_pages(
        self, tokens: PagedKVCache, compressed: PagedKVCache, batch: RaggedBatch
    ) -> PagedKVCache:
        """The compressed keys with those of blocks that the tokens of a batch complete."""
        size, stride, page_size = self._size, self._stride, tokens.page_size
        new = batch.query_start_loc[1:] - batch.query_start_loc[:-1]
        first, end = self._complete(batch.lengths - new), self._complete(batch.lengths)
        counts = end - first
        most = batch.num_tokens // stride + counts.shape[0]  # of all sequences together
        ends = jnp.cumsum(counts, dtype=jnp.int32)
        number = jnp.arange(most, dtype=jnp.int32)
        sequence = jnp.searchsorted(ends, number, side="right").astype(jnp.int32)
        is_used = sequence < counts.shape[0]
        # Unused numbers read the last sequence's entries, and `is_used` keeps them from being written.
        sequence = jnp.minimum(sequence, counts.shape[0] - 1)
        c = first[sequence] + number - (ends - counts)[sequence]  # which compressed key of its sequence
        token = jnp.arange(size, dtype=jnp.int32)
        at = (c * stride)[:, None] + token[None]  # [most, l]
        ids = jnp.broadcast_to(sequence[:, None], at.shape)
        slots = slots_of(jnp.where(is_used[:, None], ids, -1), at, batch.page_table, page_size)
        k, v = (taken_from_pages(pages, slots) for pages in (tokens.k, tokens.v))
        compressed_k, compressed_v = (x[:, 0] for x in self._compressed(k, v, at))
        slot = c + size // stride - 1  # in the page of its last token, which no other sequence writes
        into = slots_of(jnp.where(is_used, sequence, -1), slot, batch.page_table, page_size // stride)
        return compressed.append(compressed_k, compressed_v, into)

    def _compressed(self, k: Array, v: Array, at: Array) -> tuple[Array, Array]:
        """The compressed keys and values of cached ones `[..., N, K, D]` at the positions `at [..., N]`."""
        sizes = self._size, self._stride
        # Means are those of rotated keys, so there is no rotation to undo.
        if self.k_compression is None or self.v_compression is None:
            return blocks.means(k, *sizes, None), blocks.means(v, *sizes, None)
        dtype = compute_dtype_of(self.compute_dtype, self)
        k = self.k_compression(unrotated(self.rope, k, at).astype(dtype))
        starts = Places(at[..., :: self._stride][..., : k.shape[-3]])
        return starts.turn(self.rope, k), self.v_compression(v.astype(dtype))

    def _complete(self, lengths: Array) -> Array:
        """The number of compressed keys so many tokens have."""
        return jnp.maximum((lengths - self._size) // self._stride + 1, 0)

    def _heads(self, x: Array) -> Heads:
        wide, narrow = self.num_heads, self.num_kv_heads
        q = split_heads(project("q_proj", self.q_proj, x, wide * self.head_dim), wide)
        k = split_heads(project("k_proj", self.k_proj, x, narrow * self.head_dim), narrow)
        v = split_heads(project("v_proj", self.v_proj, x, narrow * self.head_dim), narrow)
        gates = split_heads(project("g_proj", self.g_proj, x, wide * 3), wide)
        return Heads(q, k, v, jax.nn.sigmoid(gates.astype(accumulator(gates.dtype))))

    def _finish(self, out: Array) -> Array:
        return project("o_proj", self.o_proj, merge_heads(out), self.embed_dim)

    @property
    def _size(self) -> int:
        return self.attention.options.compression_size

    @property
    def _stride(self) -> int:
        return self.attention.options.compression_stride

    def _stored_dtype(self) -> Any:
        return stored_dtype_of(self.compute_dtype, (self.k_proj, self.v_proj))


def rolled(x: Array, by: Array) -> Array:
    """Rows `[..., T, E]`, each turned: `x[..., t + by, :]` at `t`, around the end."""
    # A row of one token is the same however it is turned.
    if x.shape[-2] == 1:
        return x

    token = jax.lax.broadcasted_iota(jnp.int32, (*by.shape, x.shape[-2]), by.ndim)
    axes = {"x": ("T", "E"), "at": ("T",), "out": ("T", "E")}
    return _taken(x, (token + by[..., None]) % x.shape[-2], axes)


def taken(x: Array, at: Array) -> Array:
    """The tokens `at [..., N]` of a cache `[..., S, K, D]`: `[..., N, K, D]`; any for one that there is not."""
    heads = f"H{x.shape[-2]}"
    axes = {"x": ("S", heads, "D"), "at": ("N",), "out": ("N", heads, "D")}
    return _taken(x, jnp.clip(at, 0, x.shape[-3] - 1), axes)


def taken_from_pages(pages: Array, slots: Array) -> Array:
    """The tokens at `slots [N, l]` of pages `[P, p, K, D]`: `[N, l, K, D]`; any for one that there is not."""
    heads = f"H{pages.shape[-2]}"
    axes = {"x": ("P", "p", heads, "D"), "at": ("N", "l"), "out": ("N", "l", heads, "D")}

    def take(given: Any) -> dict[str, Array]:
        flat = given["x"].reshape(-1, *pages.shape[2:])
        return {"out": jnp.take(flat, jnp.clip(given["at"], 0, flat.shape[0] - 1), axis=0)}

    given = {"x": pages, "at": slots}
    return over_mesh(take, given, Leading(axes=axes, shared=frozenset(given)))["out"]


def _taken(x: Array, at: Array, axes: dict[str, tuple[str, ...]]) -> Array:
    """The entries `at [..., N]` along the first of the axes of `x`."""

    def take(given: Any) -> dict[str, Array]:
        x, at = given["x"], given["at"]
        return {"out": jnp.take_along_axis(x, jax.lax.expand_dims(at, range(at.ndim, x.ndim)), at.ndim - 1)}

    return over_mesh(take, {"x": x, "at": at}, Leading(axes=axes))["out"]


def unrotated(rope: RotaryEmbedding | None, k: Array, positions: Array) -> Array:
    """Keys before their rotation, at least in float32."""
    k = k.astype(accumulator(k.dtype))
    if rope is None:
        return k
    # The opposite rotation undoes the first; the magnitude, then applied twice, is divided out.
    k = rope(k, -positions)
    magnitude = 1.0 if rope.scaling is None else rope.scaling.magnitude  # pyright: ignore
    if magnitude == 1:
        return k
    return jnp.concatenate([k[..., : rope.rotary_dim] / magnitude**2, k[..., rope.rotary_dim :]], axis=-1)


def _check_rope(rope: Any) -> None:
    if rope is None:
        return
    if not isinstance(rope, RotaryEmbedding) or rope.num_axes is not None or rope.by_length:
        raise ValueError(
            f"rope: expected a RotaryEmbedding of one axis whose frequencies do not depend on the length, or None, received {rope!r}; compressed "
            "keys stay as they were when their block was complete."
        )


def _read_compression(compression: Any, hidden: Any, head_dim: int) -> int | None:
    """The features between the products of an MLP, or `None` for one product."""
    if compression not in ("mlp", "linear", "mean"):
        raise ValueError(
            f"compression: expected 'mlp', 'linear' or 'mean', received {compression!r}; 'mean' has no weights."
        )
    if hidden is not None and compression != "mlp":
        raise ValueError(
            f"compression_hidden_dim: expected None with compression={compression!r}, received {hidden}; it is of 'mlp'."
        )
    if compression != "mlp":
        return None
    hidden = 4 * head_dim if hidden is None else hidden
    return read_sizes(compression_hidden_dim=hidden)[0]
