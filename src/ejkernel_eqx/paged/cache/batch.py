"""A batch of sequences with different numbers of new tokens, packed along one axis."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jaxtyping import Bool, Int

from ..._signatures import Module
from ...sequences import cu_seqlens_to_segment_ids
from ...sequences.packing import read_count
from .buckets import Buckets as Buckets
from .buckets import BucketSizes as BucketSizes


def to_int32(x: Any) -> Any:
    """Integers of any width as int32. Numbers that do not fit stay out of every range; other dtypes are unchanged."""
    if not isinstance(x, Array | np.ndarray) or not jnp.issubdtype(x.dtype, jnp.integer):
        return x
    # Clipped before the cast, which would wrap around to a number that might be valid.
    if x.dtype.itemsize >= 4 and x.dtype != jnp.int32:
        clip = np.clip if isinstance(x, np.ndarray) else jnp.clip
        x = clip(x, max(-1, int(jnp.iinfo(x.dtype).min)), 2**31 - 1)
    return jnp.asarray(x, jnp.int32)


class RaggedBatch(Module):
    r"""A packed batch of the new tokens of several sequences, `T` in total, which may mix decodes and chunks of prompts.

    Sequence $n$ has `query_len` $= c_{n+1} - c_n$ new tokens, where $c$ is `query_start_loc`. Token $t$ of the batch
    has position $\text{lengths}_n - (c_{n+1} - c_n) + (t - c_n)$ in its sequence. Its page is entry $\lfloor
    \text{position} / p \rfloor$ of the sequence's row of `page_table`. Its slot is $\text{page} \cdot p +
    \text{position} \bmod p$. Tokens from $c_N$ on are padding, as are sequences without tokens.

    [`RaggedBatch.build`][ejkernel_eqx.paged.cache.batch.RaggedBatch.build] makes a batch from lists outside `jit`; the constructor takes
    integer arrays, also inside `jit`.

    **Arguments:**

    - `query_start_loc`: int32 `[N + 1]`, starting at 0, never decreasing.
    - `lengths`: int32 `[N]`, the number of tokens of each sequence, including new ones.
    - `page_table`: int32 `[N, M]`, -1 for no page.
    - `state_indices`: int32 `[N]`, the slot of each sequence's recurrent state, -1 for none; or `None`.
    - `page_size`: tokens per page, $p$; static.
    - `max_query_len`: the maximum number of new tokens per sequence; static.
    - `num_tokens`: `T`, including padding; static.
    - `of_rows`: whether the sequences are the rows of a dense cache. Each then has `max_query_len` tokens, or is
        padding if its length is 0, and begins with the state in its slot. All pages of a layer are those of rows, in their order. Static.

    **Raises:** `ValueError` for invalid shapes.
    """

    query_start_loc: Int[Array, "offsets"] = eqx.field(converter=to_int32)
    lengths: Int[Array, "N"] = eqx.field(converter=to_int32)
    page_table: Int[Array, "N M"] = eqx.field(converter=to_int32)
    state_indices: Int[Array, "N"] | None = eqx.field(converter=to_int32, default=None)
    page_size: int = eqx.field(static=True, kw_only=True)
    max_query_len: int = eqx.field(static=True, kw_only=True)
    num_tokens: int = eqx.field(static=True, kw_only=True)
    of_rows: bool = eqx.field(static=True, kw_only=True, default=False)

    def __check_init__(self):
        for name, least in (("page_size", 1), ("max_query_len", 1), ("num_tokens", 0)):
            read_count(name, getattr(self, name), least)
        names = ("lengths", "query_start_loc", "page_table", "state_indices")
        arrays = {name: x for name in names if (x := getattr(self, name)) is not None}
        if not all(hasattr(x, "shape") for x in arrays.values()):
            return  # leaves that are not arrays, such as the axes for jax.vmap
        # The size exists for any rank; a wrong rank is reported below.
        count = self.lengths.size
        shapes = {"query_start_loc": (count + 1,), "page_table": (count, *self.page_table.shape[-1:])}
        letters = {"query_start_loc": "[N + 1]", "page_table": "[N, M]"}
        for name, x in arrays.items():
            rank = 2 if name == "page_table" else 1
            fits = x.ndim == rank and x.shape == shapes.get(name, (count,))
            if not fits or not jnp.issubdtype(x.dtype, jnp.integer):
                raise ValueError(
                    f"{name}: expected int32 {letters.get(name, '[N]')}, received {x.dtype} of shape {x.shape} with lengths of shape "
                    f"{self.lengths.shape}; RaggedBatch.build makes the arrays from lists."
                )

    @classmethod
    def build(
        cls,
        query_lens: Any,
        lengths: Any,
        page_table: Any,
        *,
        page_size: int,
        buckets: Buckets | None = None,
        state_indices: Any | None = None,
    ) -> "RaggedBatch":
        """Makes a batch from lists or NumPy arrays, padded to `buckets`. Runs on the host, outside `jit`.

        **Arguments:**

        - `query_lens`: ints `[N]`, the number of new tokens of each sequence.
        - `lengths`: ints `[N]`, the number of tokens of each sequence, including new ones.
        - `page_table`: a list of pages for each sequence, or ints `[N, M]`, -1 for none; enough for its length.
        - `page_size`: tokens per page.
        - `buckets`: the sizes to pad to. Padding sequences have no tokens, no pages and state -1; padding tokens come last. By default
            nothing is padded.
        - `state_indices`: ints `[N]`, or `None`.

        **Returns:** the batch; the packed tokens must have the length `num_tokens`.

        **Raises:** `ValueError` for negative numbers, more new tokens than tokens, too few pages, a state shared by two sequences with new
        tokens, a page that new tokens are written to and that two sequences have, or sizes that no bucket holds. Pages of earlier tokens may be
        shared.
        """
        page_size = read_count("page_size", page_size, least=1)
        queries, totals = _host("query_lens", query_lens, least=0), _host("lengths", lengths, least=0)
        rows = _rows(page_table)
        states = None if state_indices is None else _host("state_indices", state_indices, least=-1)
        count = len(queries)
        for name, x in (("lengths", totals), ("page_table", rows), ("state_indices", states)):
            if x is not None and len(x) != count:
                raise ValueError(
                    f"{name}: expected an entry for each of the {count} sequences of query_lens, received {len(x)}."
                )
        for n, (query_len, length, row) in enumerate(zip(queries, totals, rows, strict=True)):
            if query_len > length:
                raise ValueError(
                    f"lengths: expected at least the {query_len} new tokens of sequence {n}, received {length}; lengths include new tokens."
                )
            if len(row) * page_size < length:
                raise ValueError(
                    f"page_table: expected {-(-int(length) // page_size)} pages for the {length} tokens of sequence {n}, received "
                    f"{len(row)}; use -1 for pages that are no longer needed."
                )
        _check_written(rows, queries, totals, page_size)
        if states is not None:
            # A sequence without new tokens does not write its state, so it may share one.
            given, times = np.unique(states[(states >= 0) & (queries > 0)], return_counts=True)
            if np.any(times > 1):
                raise ValueError(
                    f"state_indices: expected a slot of its own for each sequence with new tokens, received {int(given[times > 1][0])} "
                    f"{int(times.max())} times; copy the state of a sequence that is forked (CacheState.copy_states)."
                )
        if buckets is not None and not isinstance(buckets, Buckets):
            raise ValueError(
                f"buckets: expected Buckets or None, received {type(buckets).__name__}; build Buckets(tokens=, sequences=, pages=, query_len=) "
                "from tuples of sizes."
            )
        total, longest = int(queries.sum()), int(queries.max(initial=1))
        sizes = BucketSizes(total, count, max([1, *map(len, rows)]), longest)
        if buckets is not None:
            # A row may be as wide as the longest possible sequence; only the longest actual sequence matters.
            needed = -(-int(totals.max(initial=0)) // page_size)
            sizes = buckets.pick(total, count, needed, longest)
        table = np.full((sizes.sequences, sizes.pages), -1, np.int32)
        for n, row in enumerate(rows):
            # A row is cut only where it holds no tokens, as the width covers the longest sequence.
            table[n, : len(row)] = row[: sizes.pages]
        # Padding sequences start and end at the last real token's end, so they have no tokens.
        starts = np.full(sizes.sequences + 1, total, np.int32)
        starts[: count + 1] = np.concatenate([[0], np.cumsum(queries)])
        arrays = starts, _padded(totals, sizes.sequences, 0), table
        if states is not None:
            arrays = (*arrays, _padded(states, sizes.sequences, -1))
        counts = {"max_query_len": sizes.query_len, "num_tokens": sizes.tokens}
        return cls(*jax.device_put(arrays), page_size=page_size, **counts)

    @property
    def is_decode(self) -> bool:
        """True if no sequence has more than one new token; static."""
        return self.max_query_len == 1

    @property
    def sequence_ids(self) -> Int[Array, "T"]:
        """The index of each token's sequence, int32 `[T]`; -1 for padding."""
        if self.of_rows:
            rows = jax.lax.broadcasted_iota(jnp.int32, (self.lengths.shape[0], self.max_query_len), 0)
            return jnp.where(self.lengths[:, None] > 0, rows, -1).reshape(-1)
        return cu_seqlens_to_segment_ids(self.query_start_loc, self.num_tokens)

    @property
    def is_real(self) -> Bool[Array, "T"]:
        """True for each token that belongs to a sequence, bool `[T]`."""
        return self.sequence_ids >= 0

    @property
    def positions(self) -> Int[Array, "T"]:
        """Each token's position in its sequence, int32 `[T]`; 0 for padding."""
        return self._positions(self.sequence_ids)

    @property
    def slots(self) -> Int[Array, "T"]:
        """The slot of each token, `page * page_size + place`, int32 `[T]`; -1 for padding and for tokens without a page."""
        ids = self.sequence_ids
        return slots_of(ids, self._positions(ids), self.page_table, self.page_size)

    @property
    def last_tokens(self) -> Int[Array, "N"]:
        """The index of each sequence's last new token among the `T`, int32 `[N]`; -1 if it has none."""
        starts = self.query_start_loc
        return jnp.where(starts[1:] > starts[:-1], starts[1:] - 1, -1)

    def _positions(self, ids: Array) -> Array:
        return positions_of(ids, self.query_start_loc[1:], self.lengths)


def positions_of(ids: Array, ends: Array, lengths: Array) -> Array:
    """The position `[T]` of each token in its sequence, given by `ids [T]`; `ends [N]`: one past the last token of each sequence."""
    # Without sequences there is no length to read, and every token is padding.
    if lengths.shape[0] == 0:
        return jnp.zeros_like(ids)
    # A sequence's last token has position lengths - 1 and comes right before the next sequence's first token.
    tokens = jnp.arange(ids.shape[0], dtype=jnp.int32)
    return jnp.where(ids >= 0, tokens + (lengths - ends)[jnp.maximum(ids, 0)], 0)


def slots_of(ids: Array, positions: Array, page_table: Array, page_size: int) -> Array:
    """The slot of each token, `[T]`; -1 for tokens without a sequence or a page."""
    # A table without rows or columns cannot be read, and no token has a page.
    if 0 in page_table.shape:
        return jnp.full_like(ids, -1)
    column, width = positions // page_size, page_table.shape[1]
    page = page_table[jnp.maximum(ids, 0), jnp.clip(column, 0, width - 1)]
    # No cache has a page number so large that its slots exceed int32.
    largest = (2**31 - page_size) // page_size
    there = (ids >= 0) & (positions >= 0) & (column < width) & (page >= 0) & (page <= largest)
    # The inner choice keeps the product of an invalid page number from overflowing.
    return jnp.where(there, jnp.where(there, page, 0) * page_size + positions % page_size, -1)


def _host(name: str, values: Any, least: int, rank: int = 1) -> np.ndarray:
    if isinstance(values, Tracer):
        raise ValueError(
            f"{name}: expected a list or an array outside jit, received a traced array; use RaggedBatch(...) inside jit."
        )
    array = np.asarray(values)
    if array.ndim != rank or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise ValueError(
            f"{name}: expected ints {['[N]', '[N, M]'][rank - 1]}, received {array.dtype} of shape {array.shape}; one entry for each "
            "sequence."
        )
    wrong = array[(array < least) | (array >= 2**31)]
    if wrong.size:
        raise ValueError(f"{name}: expected ints from {least} to 2**31 - 1, received {wrong.tolist()}.")
    # int64, so that sums and products on the host do not overflow.
    return array.astype(np.int64)


def _check_written(rows: list[np.ndarray], queries: np.ndarray, totals: np.ndarray, page_size: int) -> None:
    """Refuses to write new tokens of a sequence to a page that another one has, or that it has twice."""
    used, written = [np.zeros(0, int)], [np.zeros(0, int)]
    for row, query_len, length in zip(rows, queries, totals, strict=True):
        if query_len:
            # A row may list pages behind the sequence's length; nothing is written to them.
            own = np.asarray(row[: -(-length // page_size)], int)
            used.append(own)
            # The first written page may hold earlier tokens too, so the division rounds down.
            written.append(own[(length - query_len) // page_size :])
    pages, targets = np.concatenate(used), np.concatenate(written)
    hit, times = np.unique(pages[(pages >= 0) & np.isin(pages, targets)], return_counts=True)
    if np.any(times > 1):
        raise ValueError(
            f"page_table: expected a page of its own for the new tokens of each sequence, received page {int(hit[times > 1][0])} "
            f"{int(times.max())} times; copy a shared page before a sequence writes to it (PageTable.allocate tells which)."
        )


def _rows(page_table: Any) -> list[np.ndarray]:
    if isinstance(page_table, Sequence):
        return [_host(f"page_table[{n}]", row, least=-1) for n, row in enumerate(page_table)]
    return list(_host("page_table", page_table, least=-1, rank=2))


def _padded(values: np.ndarray, size: int, fill: int) -> np.ndarray:
    return np.concatenate([values, np.full(size - len(values), fill)]).astype(np.int32)
