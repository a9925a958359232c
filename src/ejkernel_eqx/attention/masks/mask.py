"""`Mask`: which query may see which key, represented exactly."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec
from jaxtyping import Bool, Int, PRNGKeyArray

from ..._broadcast import aligned, like
from ..._values import check_between, check_offsets, FAR, known
from ..spec import RowRanges
from .lower import both as intersected
from .lower import Lowered, packed_rows, ranked, same_segment, type_run_ends, window_ends, with_types
from .picture import save_picture
from .specs import AxisNames, mask_specs

Window = tuple[int | None, int | None]


class Mask(eqx.Module):
    r"""A set of visible (query, key) pairs: the intersection of all given conditions.

    Query $i$ is at position $p_i = \text{offset} + i$ among the keys. Key $j$ is visible to it iff all given conditions
    hold: $j \le p_i$ (causal); $p_i - \text{left} \le j \le p_i + \text{right}$ (window);
    $\lfloor j / c \rfloor = \lfloor p_i / c \rfloor$ (chunked); $j \le p_i$ or $j < \text{prefix}$ (prefix);
    $j \le p_i$ or both have the same non-zero type (token types);
    both have the same, non-negative segment id; both lie within their row's lengths; both belong to the
    same sequence of `cu_seqlens`; `dense` is true.

    Masks are immutable, usable inside `jit`, and combine with `&`. Static conditions (causal, window, chunks) let kernels skip
    whole tiles. Window and chunk sizes may also be arrays, traced or one per batch row, for example to scan over layers with local
    and global windows; they become a range of keys for each query. Build masks with the class methods and combine them:

    ```python
    mask = ejx.Mask.causal() & ejx.Mask.from_segments(ids)
    out = ejx.FlashAttention()(q, k, v, mask=mask)
    ```
    """

    is_causal: bool = eqx.field(static=True, default=False)
    window: Window = eqx.field(static=True, default=(None, None))
    chunk_sizes: tuple[int, ...] = eqx.field(static=True, default=())
    prefix_lengths: Int[Array, "..."] | None = None
    segments: tuple[tuple[Int[Array, "... T"], Int[Array, "... S"]], ...] = ()
    types: tuple[tuple[Int[Array, "... T"], Int[Array, "... S"]], ...] = ()
    type_runs: tuple[tuple[Int[Array, "... T"], Int[Array, "... S"]], ...] = ()
    q_lengths: Int[Array, "..."] | None = None
    kv_lengths: Int[Array, "..."] | None = None
    cu_seqlens: tuple[Int[Array, "offsets"], Int[Array, "offsets"]] | None = None
    dense: Bool[Array, "..."] | None = None
    windows: tuple[tuple[Int[Array, "..."] | None, Int[Array, "..."] | None], ...] = ()
    chunks: tuple[Int[Array, "..."], ...] = ()

    @classmethod
    def causal(cls) -> "Mask":
        """Keys up to the query's own position."""
        return cls(is_causal=True)

    @classmethod
    def sliding_window(cls, left: Any | None, right: Any | None = 0) -> "Mask":
        """`left` keys before and `right` keys after the query's position, plus its own; `None` is unbounded.

        Ints or integer arrays: one number, traced or not, or one per batch row `[...]`. Any size is valid; a window longer than
        the sequence hides nothing.
        """
        sides = {"left": _size("left", left, 0), "right": _size("right", right, 0)}
        if all(side is None or isinstance(side, int) for side in sides.values()):
            return cls(window=(sides["left"], sides["right"]))  # pyright: ignore[reportArgumentType]
        arrays = (None if side is None else jnp.asarray(side, jnp.int32) for side in sides.values())
        return cls(windows=(tuple(arrays),))  # pyright: ignore[reportArgumentType]

    @classmethod
    def chunked(cls, size: Any) -> "Mask":
        """Only keys in the query's own chunk of `size` positions (Llama 4's local layers, with `& Mask.causal()`).

        An int or an integer array, as in `sliding_window`.
        """
        read = _size("size", size, 1)
        return cls(chunk_sizes=(read,)) if isinstance(read, int) else cls(chunks=(read,))  # pyright: ignore[reportArgumentType]

    @classmethod
    def prefix(cls, lengths: Any) -> "Mask":
        """Prefix-LM: causal, but the first `lengths` keys (an int or one per batch row) are visible to all queries."""
        return cls(prefix_lengths=jnp.asarray(lengths, jnp.int32))

    @classmethod
    def token_types(cls, type_ids: Any, kv_type_ids: Any | None = None, *, runs: bool = False) -> "Mask":
        """Causal, but tokens of the same non-zero type, `[..., T]` and `[..., S]`, also see each other ahead (images in text).

        Type 0 is causal only. Any other id is a type, including negative ones: mask padding with `& Mask.from_segments(...)`.
        With `runs`, a query sees ahead only while every key in between has its type, as in Gemma 3, where two separate images
        do not see each other ahead. That is a range of keys and costs no more than a causal mask. Without `runs`, a type may
        recur later, which requires a dense mask.
        """
        q_ids = jnp.asarray(type_ids)
        kv_ids = q_ids if kv_type_ids is None else jnp.asarray(kv_type_ids)
        for name, ids in (("type_ids", q_ids), ("kv_type_ids", kv_ids)):
            if ids.ndim < 1 or not jnp.issubdtype(ids.dtype, jnp.integer):
                raise ValueError(
                    f"{name}: expected ints, one per token, 0 for causal only, received {ids.dtype} {ids.shape}; cast them first."
                )
        pairs = ((q_ids.astype(jnp.int32), kv_ids.astype(jnp.int32)),)
        return cls(type_runs=pairs) if runs else cls(types=pairs)

    @classmethod
    def from_segments(cls, segment_ids: Any, kv_segment_ids: Any | None = None) -> "Mask":
        """Tokens with equal, non-negative ids `[..., T]` and `[..., S]` see each other; negative ids are padding."""
        q_ids = jnp.asarray(segment_ids, jnp.int32)
        same = kv_segment_ids is None or kv_segment_ids is segment_ids
        return cls(segments=((q_ids, q_ids if same else jnp.asarray(kv_segment_ids, jnp.int32)),))

    @classmethod
    def from_lengths(cls, q_lengths: Any | None = None, kv_lengths: Any | None = None) -> "Mask":
        """The first `q_lengths` queries and `kv_lengths` keys of each row `[...]` are real, the rest is padding."""
        return cls(q_lengths=_counts("q_lengths", q_lengths), kv_lengths=_counts("kv_lengths", kv_lengths))

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Any, kv_cu_seqlens: Any | None = None) -> "Mask":
        """Packed sequences: sequence `n` holds the tokens from `cu_seqlens[n]` up to `cu_seqlens[n + 1]`. Positions are per
        sequence, with its last query aligned with its last key. Tokens past the last offset are padding."""
        q = check_offsets("cu_seqlens", jnp.asarray(cu_seqlens, jnp.int32), cu_seqlens, None)
        if kv_cu_seqlens is None:
            return cls(cu_seqlens=(q, q))
        kv = check_offsets("kv_cu_seqlens", jnp.asarray(kv_cu_seqlens, jnp.int32), kv_cu_seqlens, None)
        return cls(cu_seqlens=(q, kv))

    @classmethod
    def from_dense(cls, mask: Any) -> "Mask":
        """A boolean array broadcastable to `[..., H, T, S]`, true where visible."""
        array = jnp.asarray(mask)
        if array.dtype != jnp.bool_:
            raise ValueError(
                f"mask: expected a boolean array, received dtype {array.dtype}; pass an additive mask as bias=."
            )
        return cls(dense=array)

    @classmethod
    def random(cls, num_queries: int, num_keys: int, *, visible: float = 0.5, key: PRNGKeyArray) -> "Mask":
        """Each pair is visible independently with probability `visible`; for tests."""
        return cls(dense=jax.random.bernoulli(key, visible, (1, num_queries, num_keys)))

    def __and__(self, other: "Mask") -> "Mask":
        if not isinstance(other, Mask):
            return NotImplemented
        if self.cu_seqlens is not None and other.cu_seqlens is not None:
            raise ValueError(
                "cu_seqlens: expected in at most one of two combined masks, received in both; merge the packings first."
            )
        return Mask(
            is_causal=self.is_causal or other.is_causal,
            window=(_both(min, self.window[0], other.window[0]), _both(min, self.window[1], other.window[1])),
            chunk_sizes=tuple(sorted({*self.chunk_sizes, *other.chunk_sizes})),
            prefix_lengths=_both(jnp.minimum, self.prefix_lengths, other.prefix_lengths),
            segments=self.segments + other.segments,
            types=self.types + other.types,
            type_runs=self.type_runs + other.type_runs,
            q_lengths=_both(jnp.minimum, self.q_lengths, other.q_lengths),
            kv_lengths=_both(jnp.minimum, self.kv_lengths, other.kv_lengths),
            cu_seqlens=self.cu_seqlens or other.cu_seqlens,
            dense=_both(jnp.logical_and, self.dense, other.dense),
            windows=self.windows + other.windows,
            chunks=self.chunks + other.chunks,
        )

    def lower(self, num_queries: int, num_keys: int, *, q_offset: Any | None = None) -> Lowered:
        """The mask in the form that kernels take: a static window or key ranges per query, one pair of segment ids, and a dense remainder.

        The lowering is exact: the intersection of the parts is this mask. `q_offset` defaults to `num_keys - num_queries`.
        """
        return _lower(self, num_queries, num_keys, q_offset)

    def as_array(
        self, num_queries: int, num_keys: int, *, q_offset: Any | None = None
    ) -> Bool[Array, "... T S"]:
        """The mask as booleans `[..., H or 1, T, S]`, as large as the scores; for inspection and tests."""
        return self.lower(num_queries, num_keys, q_offset=q_offset).as_array(num_queries, num_keys)

    def visualize(
        self, num_queries: int, num_keys: int, *, q_offset: Any | None = None, path: Any | None = None
    ) -> str:
        """The mask of the first row and head as text, one line per query: `#` visible, `.` hidden.

        With `path`, which must end in `.png`, `.svg` or `.pdf`, it is also saved as a picture. Raises `ValueError` for any other
        ending, and `ImportError` without matplotlib (extra `report`).
        """
        array = np.asarray(self.as_array(num_queries, num_keys, q_offset=q_offset))
        grid = array[(0,) * (array.ndim - 2)]
        if path is not None:
            save_picture(grid, path)
        return "\n".join("".join("#" if seen else "." for seen in row) for row in grid)

    def sharding_specs(
        self,
        batch: AxisNames | PartitionSpec = None,
        heads: AxisNames = None,
        queries: AxisNames = None,
        keys: AxisNames = None,
    ) -> "Mask":
        """How to split this mask over the axes of a mesh: the same structure with a `jax.sharding.PartitionSpec` for every array.

        Pass it to `jax.shard_map` as `in_specs` or, with each spec in a `NamedSharding`, to `jax.device_put` and `jax.jit`:

        ```python
        specs = mask.sharding_specs(batch="data", heads="model")
        mask = jax.device_put(mask, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))
        ```

        Broadcast axes of size one stay whole, as do `cu_seqlens`, which have none of these axes. Under `jit` a split mask keeps
        its meaning. Inside `shard_map` each device has only its part, while positions, lengths and offsets still count from the
        beginning of the row: if `queries` or `keys` are split, pass each device its own `q_offset`.

        **Arguments:** each is a mesh axis, a tuple of mesh axes or `None` (whole). With several leading axes, `batch` is a
        `PartitionSpec`.

        **Returns:** a `Mask` with specs in place of arrays.

        **Raises:** `ValueError` if one name is given for several leading axes, or if a mesh axis is used for two of the four.
        """
        return mask_specs(self, batch, heads, queries, keys)


def _lower(mask: Mask, num_queries: int, num_keys: int, q_offset: Any | None) -> Lowered:
    # A window longer than any sequence is equivalent to an unbounded one, and sums with positions fit 32 bits.
    left, right = (None if side is None else min(side, 2 * FAR) for side in mask.window)
    right = 0 if mask.is_causal and (right is None or right > 0) else right
    if q_offset is None:
        q_offset = num_keys - num_queries
    pairs = mask.segments
    segments, dense = (pairs[0] if pairs else None), mask.dense
    for pair in pairs[1:]:
        dense = intersected(same_segment(*pair), dense)
    by_window = isinstance(q_offset, int) and not (mask.chunk_sizes or mask.windows or mask.chunks)
    ranges = (mask.prefix_lengths, mask.q_lengths, mask.kv_lengths, mask.cu_seqlens)
    _check_types(mask, num_queries, num_keys)
    if by_window and all(r is None for r in ranges) and not mask.type_runs:
        if mask.types:
            dense = with_types(
                mask.types, dense, jnp.arange(num_queries, dtype=jnp.int32) + q_offset, num_keys
            )
        return Lowered(left, right, int(q_offset), None, segments, dense)
    rows = _row_ranges(mask, left, right, num_queries, num_keys, q_offset)
    dense = with_types(mask.types, dense, rows.position, num_keys)
    return Lowered(None, None, 0, rows, segments, dense)


def _check_types(mask: Mask, num_queries: int, num_keys: int) -> None:
    for q_ids, kv_ids in (*mask.types, *mask.type_runs):
        if q_ids.shape[-1] != num_queries or kv_ids.shape[-1] != num_keys:
            raise ValueError(
                f"mask: expected token types for {num_queries} queries and {num_keys} keys, received {q_ids.shape} and "
                f"{kv_ids.shape}; pass both to Mask.token_types."
            )


def _row_ranges(
    mask: Mask, left: int | None, right: int | None, num_queries: int, num_keys: int, q_offset: Any
) -> RowRanges:
    index = jnp.arange(num_queries, dtype=jnp.int32)
    if mask.cu_seqlens is not None:
        first, last, position, real = packed_rows(*mask.cu_seqlens, index)
    else:
        position = jnp.clip(jnp.asarray(q_offset, jnp.int32), -FAR, FAR)[..., None]
        position = position + like(index, position)
        first, last, real = jnp.int32(0), jnp.int32(num_keys), jnp.bool_(True)
    start, end = window_ends(position, left, right, num_keys)
    start, end = jnp.maximum(start, first), jnp.minimum(end, last)
    for window in mask.windows:
        start, end, at, *sides = ranked(
            start, end, position, *(None if w is None else w[..., None] for w in window)
        )
        low, high = window_ends(at, *sides, num_keys)
        start, end = jnp.maximum(start, low), jnp.minimum(end, high)
    for size in (
        *(min(size, 2 * FAR) for size in mask.chunk_sizes),
        *(size[..., None] for size in mask.chunks),
    ):
        start, end, at, base, size = ranked(start, end, position, first, size)
        chunk = (at - base) // size
        start, end = jnp.maximum(start, base + chunk * size), jnp.minimum(end, base + (chunk + 1) * size)
    if mask.prefix_lengths is not None:
        prefix = jnp.clip(mask.prefix_lengths, 0, num_keys)[..., None]
        first, prefix, behind = ranked(first, prefix, position + 1)
        prefix = first + prefix
        end = jnp.minimum(*aligned(end, jnp.maximum(behind, prefix)))
    for pair in mask.type_runs:
        end = jnp.minimum(*aligned(end, type_run_ends(*pair, position)))
    if mask.kv_lengths is not None:
        end = jnp.minimum(*aligned(end, mask.kv_lengths[..., None]))
    if mask.q_lengths is not None:
        lengths = mask.q_lengths[..., None]
        real = intersected(real, like(index, lengths) < lengths)
    real, start, end, position = aligned(real, start, end, position)
    start, end, position = jnp.broadcast_arrays(jnp.where(real, start, 0), jnp.where(real, end, 0), position)
    return RowRanges(start.astype(jnp.int32), end.astype(jnp.int32), position.astype(jnp.int32))


def _size(name: str, value: Any | None, least: int) -> int | Array | None:
    """An int if the value is known now, else an int32 array."""
    if value is None:
        return None
    if isinstance(value, bool) or not jnp.issubdtype(jnp.result_type(value), jnp.integer):
        raise ValueError(
            f"{name}: expected an int or an integer array{', or None' if least == 0 else ''}, received {value!r}; cast it first."
        )
    values = known(value)
    if values is not None and values.ndim == 0:
        if values < least:
            expected = "a key count >= 0 or None" if least == 0 else "a chunk of at least one position"
            raise ValueError(f"{name}: expected {expected}, received {values}.")
        return min(int(values), 2 * FAR)
    # Numbers that exceed 32 bits must not wrap around.
    clipped, info = jnp.asarray(value) if values is None else values, jnp.iinfo(jnp.result_type(value))
    if info.max > 2 * FAR:
        clipped = clipped.clip(max(-1, int(info.min)), 2 * FAR)
    array = check_between(
        name, jnp.asarray(clipped, jnp.int32), clipped, least, 2 * FAR, "it is a number of keys"
    )
    return jnp.maximum(array, least)


def _counts(name: str, value: Any | None) -> Array | None:
    if value is None:
        return None
    return check_between(
        name, jnp.asarray(value, jnp.int32), value, 0, FAR, "it counts from the beginning of the row"
    )


def _both(combine: Any, a: Any | None, b: Any | None) -> Any:
    return b if a is None else a if b is None else combine(a, b)
