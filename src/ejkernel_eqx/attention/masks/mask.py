"""`Mask`: which query may see which key, represented exactly."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec
from jaxtyping import Bool, Int, PRNGKeyArray

from ..._broadcast import aligned, like
from ..._sizes import is_symbolic
from ..._values import check_between, check_offsets, FAR, known
from ..spec import RowRanges
from .functions import (
    BlockTable,
    Chunk,
    Either,
    Global,
    intersection,
    is_static,
    Neither,
    PairFunction,
    Stride,
)
from .functions import Window as WindowFunction
from .lower import both as intersected
from .lower import (
    by_pair,
    either,
    heads_needed,
    Lowered,
    of_positions,
    packed_rows,
    ranked,
    same_segment,
    type_run_ends,
    window_ends,
    with_types,
)
from .pattern import Pattern
from .picture import save_picture
from .specs import AxisNames, mask_specs

Window = tuple[int | None, int | None]


class BlockMap(eqx.Module):
    """Which blocks of scores are visible: booleans `[..., H or 1, query blocks, key blocks]` and the queries and keys of a block."""

    block_map: Bool[Array, "... M N"]
    size: tuple[int, int] = eqx.field(static=True)


class Mask(eqx.Module):
    r"""A set of visible (query, key) pairs: the intersection of all given conditions.

    Query $i$ is at position $p_i = \text{offset} + i$ among the keys. Key $j$ is visible to it iff all given conditions
    hold: $j \le p_i$ (causal); $p_i - \text{left} \le j \le p_i + \text{right}$ (window);
    $\lfloor j / c \rfloor = \lfloor p_i / c \rfloor$ (chunked); $j \le p_i$ or $j < \text{prefix}$ (prefix);
    $j \le p_i$ or both have the same non-zero type (token types);
    both have the same, non-negative segment id; both lie within their row's lengths; both belong to the
    same sequence of `cu_seqlens`; `dense` is true; a function, a map of blocks or a mask made with `|` or `~` says so.

    Masks are immutable, usable inside `jit`, and combine with `&` (both), `|` (either) and `~` (not). Kernels skip whole tiles that
    windows, ranges, segments, functions and maps of blocks hide; a union or complement of masks that hold arrays is a dense mask.
    Window and chunk sizes may also be arrays, traced or one per batch row, for example to scan over layers with local and global windows;
    they become a range of keys for each query. Build masks with the class methods and combine them:

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
    functions: tuple[PairFunction, ...] = eqx.field(static=True, default=())
    tables: tuple[BlockTable, ...] = eqx.field(static=True, default=())
    maps: tuple[BlockMap, ...] = ()
    unions: tuple[tuple["Mask", ...], ...] = ()
    complements: tuple["Mask", ...] = ()

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
    def from_function(cls, f: Callable[[Any, Any, Any], Any]) -> "Mask":
        """The pairs for which `f(head, query, key)` is true, as flex attention's `mask_mod`.

        `f` is traced by JAX with three int32 scalars and returns one boolean; use `&`, `|`, `~` and `jnp.where` in it. `query` is the
        query's position among the keys, so that `lambda h, q, k: k <= q` is a causal mask. Arrays that it closes over are compiled in; if
        one is traced, the mask becomes dense. Kernels look at bounds of `f` over each tile first, and only at tiles that these leave open
        pair by pair; each distinct partly visible tile is stored once, as bits. `f` is compared by identity: define it once, not in
        every step. Source: He et al., *FlexAttention* (2024).
        """
        if not callable(f):
            raise ValueError(f"f: expected a function of (head, query, key), received {type(f).__name__}.")
        is_static(f)  # raises what is wrong with it
        return cls(functions=(f,))

    @classmethod
    def strided(cls, stride: int) -> "Mask":
        """Keys at a multiple of `stride` from the query, on either side (Child et al., *Sparse Transformers*, 2019)."""
        return cls(functions=(Stride(_whole("stride", stride, 1)),))

    @classmethod
    def dilated(cls, left: int | None, right: int | None = 0, *, rate: int) -> "Mask":
        """A window of `left` keys before and `right` after the query with gaps: every `rate`-th key, the query's own among them
        (Beltagy et al., *Longformer*, 2020)."""
        rate = _whole("rate", rate, 1)
        sides = (
            None if x is None else _whole(name, x, 0) * rate for name, x in (("left", left), ("right", right))
        )
        return cls.sliding_window(*sides) & cls.strided(rate)

    @classmethod
    def global_tokens(cls, count: int) -> "Mask":
        """The first `count` tokens see all keys and are seen by all queries; combine it with others by `|`
        (Longformer; Zaheer et al., *Big Bird*, 2020)."""
        return cls(functions=(Global(_whole("count", count, 0)),))

    @classmethod
    def from_blocks(cls, block_map: Any, block_size: int | tuple[int, int]) -> "Mask":
        """Blocks of `block_size` queries by keys (an int: as many of each) are visible as a whole or not at all.

        `block_map`: booleans broadcastable to `[..., H, ceil(T / queries), ceil(S / keys)]`. A numpy array of up to three axes is compiled
        in, and its lists of tiles are built once; a JAX array is data, from which lists are built on the device in every call.
        """
        size = (block_size, block_size) if isinstance(block_size, int | np.integer) else tuple(block_size)
        size = tuple(_whole("block_size", x, 1) for x in size)
        if len(size) != 2:
            raise ValueError(
                f"block_size: expected an int or a pair (queries, keys), received {block_size!r}."
            )
        if not isinstance(block_map, Array):
            block_map = np.asarray(block_map)
        if block_map.dtype != np.bool_ or block_map.ndim < 2:
            raise ValueError(
                f"block_map: expected booleans [..., H or 1, query blocks, key blocks], received {block_map.dtype} {block_map.shape}; "
                "compare scores of blocks with a threshold first."
            )
        if isinstance(block_map, np.ndarray) and block_map.ndim <= 3:
            return cls(tables=(BlockTable(block_map.reshape(-1, *block_map.shape[-2:]), size),))
        return cls(maps=(BlockMap(jnp.asarray(block_map), size),))

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
            functions=self.functions + other.functions,
            tables=self.tables + other.tables,
            maps=self.maps + other.maps,
            unions=self.unions + other.unions,
            complements=self.complements + other.complements,
        )

    def __or__(self, other: "Mask") -> "Mask":
        return Mask(unions=((self, other),)) if isinstance(other, Mask) else NotImplemented

    def __invert__(self) -> "Mask":
        return Mask(complements=(self,))

    def lower(
        self, num_queries: int, num_keys: int, *, q_offset: Any | None = None, num_heads: int | None = None
    ) -> Lowered:
        """The mask in the form that kernels take: a static window or key ranges per query, one pair of segment ids, a function of head, query
        and key, a map of blocks, and a dense remainder.

        The lowering is exact: the intersection of the parts is this mask. `q_offset` defaults to `num_keys - num_queries`. `num_heads` is
        required if a function or a map differs between heads.
        """
        return _lower(self, num_queries, num_keys, q_offset, num_heads)

    def as_array(
        self, num_queries: int, num_keys: int, *, q_offset: Any | None = None, num_heads: int | None = None
    ) -> Bool[Array, "... T S"]:
        """The mask as booleans `[..., H or 1, T, S]`, as large as the scores; for inspection and tests."""
        lowered = self.lower(num_queries, num_keys, q_offset=q_offset, num_heads=num_heads)
        return lowered.as_array(num_queries, num_keys)

    def visualize(
        self, num_queries: int, num_keys: int, *, q_offset: Any | None = None, path: Any | None = None
    ) -> str:
        """The mask of the first row and head as text, one line per query: `#` visible, `.` hidden.

        With `path`, which must end in `.png`, `.svg` or `.pdf`, it is also saved as a picture. Raises `ValueError` for any other
        ending, and `ImportError` without matplotlib (extra `report`).
        """
        heads = _most_heads(self)
        array = np.asarray(self.as_array(num_queries, num_keys, q_offset=q_offset, num_heads=heads))
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


def _lower(
    mask: Mask, num_queries: int, num_keys: int, q_offset: Any | None, num_heads: int | None
) -> Lowered:
    extra = (mask.functions, mask.tables, mask.maps, mask.unions, mask.complements)
    if not any(extra):
        return _lower_ranges(mask, num_queries, num_keys, q_offset)
    place = _Place(num_queries, num_keys, num_keys - num_queries if q_offset is None else q_offset, num_heads)
    functions, rest = _functions(mask, place)
    offset = place.fixed(mask)
    if functions and offset is not None:
        rest, window = _without_window(rest)
        functions = (*window, *functions)
    lowered = _lower_ranges(rest, num_queries, num_keys, q_offset)
    dense, pattern = lowered.dense, None
    if functions and offset is not None:
        pattern = Pattern.make(intersection(functions), offset, num_heads or 0)
        if pattern.heads == 0 and Pattern.make(intersection(functions), offset, 1).heads:
            heads_needed(num_heads)
    else:
        rest = dataclasses.replace(rest, functions=functions + rest.functions)
    if rest.functions:
        dense = intersected(place.dense(intersection(rest.functions), rest), dense)
    array_of = lambda part: part.as_array(num_queries, num_keys, q_offset=q_offset, num_heads=num_heads)
    for union in rest.unions:
        dense = intersected(functools.reduce(either, map(array_of, union)), dense)
    for part in rest.complements:
        dense = intersected(~array_of(part), dense)
    blocks, size = None, None
    for one in rest.maps:
        _check_map(one.block_map.shape, one.size, place)
        if size in (None, one.size):
            blocks, size = one.block_map if blocks is None else intersected(one.block_map, blocks), one.size
        else:
            dense = intersected(by_pair(one.block_map, one.size, num_queries, num_keys), dense)
    if blocks is not None and blocks.ndim == 2:
        blocks = blocks[None]
    return lowered._replace(dense=dense, pattern=pattern, blocks=blocks, block_size=size)


class _Place(NamedTuple):
    """Where a mask is lowered."""

    queries: int
    keys: int
    offset: Any
    heads: int | None

    def fixed(self, mask: Mask) -> int | None:
        """The position of the first query if it is known while tracing, and those of the others follow."""
        symbolic = is_symbolic(self.queries) or is_symbolic(self.keys)
        if symbolic or not isinstance(self.offset, int) or _packed_apart(mask):
            return None
        return self.offset

    def dense(self, function: PairFunction, mask: Mask) -> Array:
        """The function of positions that are not known while tracing."""
        positions = _row_ranges(
            Mask(cu_seqlens=mask.cu_seqlens), None, None, self.queries, self.keys, self.offset
        ).position
        return of_positions(function, positions, self.keys, self.heads)


def _packed_apart(mask: Mask) -> bool:
    """Whether packed queries may have other positions than their own index."""
    return mask.cu_seqlens is not None and mask.cu_seqlens[0] is not mask.cu_seqlens[1]


def _functions(mask: Mask, place: _Place) -> tuple[tuple[PairFunction, ...], Mask]:
    """The functions that hold for a mask besides its other conditions, and a mask of those."""
    functions, unions, complements, tables = [f for f in mask.functions if is_static(f)], [], [], []
    for table in mask.tables:
        _check_map(table.table.shape, table.size, place)
        fixed = place.fixed(mask)
        if fixed is None:
            tables.append(BlockMap(jnp.asarray(table.table), table.size))
        else:
            functions.append(dataclasses.replace(table, offset=fixed))
    for union in mask.unions:
        parts = [_as_function(part, place) for part in union]
        if any(part is None for part in parts):
            unions.append(union)
        else:
            functions.append(Either(tuple(part for part in parts if part is not None)))
    for part in mask.complements:
        function = _as_function(part, place)
        if function is None:
            complements.append(part)
        else:
            functions.append(Neither(function))
    rest = dataclasses.replace(
        mask,
        functions=tuple(f for f in mask.functions if not is_static(f)),
        tables=(),
        maps=(*mask.maps, *tables),
        unions=tuple(unions),
        complements=tuple(complements),
    )
    return tuple(functions), rest


def _as_function(mask: Mask, place: _Place) -> PairFunction | None:
    """The whole mask as a function, if it is known while tracing."""
    functions, rest = _functions(mask, place)
    rest, window = _without_window(rest)
    if rest.functions or jax.tree.leaves(rest) or place.fixed(mask) is None:
        return None
    functions = (*window, *functions)
    return intersection(functions) if functions else WindowFunction(None, None)


def _without_window(mask: Mask) -> tuple[Mask, tuple[PairFunction, ...]]:
    """A mask without its static window and chunks, and those as functions. In packed sequences, chunks count from each one's start."""
    if mask.cu_seqlens is not None:
        return mask, ()
    left, right = (None if side is None else min(side, 2 * FAR) for side in mask.window)
    right = 0 if mask.is_causal and (right is None or right > 0) else right
    functions: list[PairFunction] = [Chunk(size) for size in mask.chunk_sizes]
    if left is not None or right is not None:
        functions.insert(0, WindowFunction(left, right))
    return dataclasses.replace(mask, is_causal=False, window=(None, None), chunk_sizes=()), tuple(functions)


def _most_heads(mask: Mask) -> int:
    """A number of heads that all maps of a mask have, if they have heads."""
    own = [table.table.shape[0] for table in mask.tables]
    own += [one.block_map.shape[-3] for one in mask.maps if one.block_map.ndim > 2]
    return max(
        [1, *own, *map(_most_heads, (*(m for union in mask.unions for m in union), *mask.complements))]
    )


def _check_map(shape: tuple[int, ...], size: tuple[int, int], place: _Place) -> None:
    expected = (-(-place.queries // size[0]), -(-place.keys // size[1]))
    if shape[-2:] != expected:
        raise ValueError(
            f"block_map: expected {expected[0]} by {expected[1]} blocks of {size[0]} by {size[1]} for {place.queries} queries and {place.keys} "
            f"keys, received shape {shape}; the last block of each may be shorter."
        )
    heads = shape[-3] if len(shape) > 2 else 1
    if heads != 1 and place.heads not in (None, heads):
        raise ValueError(f"block_map: expected 1 or {place.heads} heads, received {heads} in shape {shape}.")


def _lower_ranges(mask: Mask, num_queries: int, num_keys: int, q_offset: Any | None) -> Lowered:
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


def _whole(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{name}: expected an int of at least {least}, received {value!r}.")
    return int(value)


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
