"""`Mask`: which query may see which key, represented exactly."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec
from jaxtyping import Bool, Int, PRNGKeyArray

from ..._signatures import Module
from ..._values import check_offsets
from .block_map import BlockMap
from .functions import BlockTable, Global, is_static, PairFunction, Stride
from .lower import lower, Lowered
from .picture import save_picture
from .sizes import block_pair, counts, whole_number, window_size
from .specs import AxisNames, mask_specs

Window = tuple[int | None, int | None]


class Mask(Module):
    r"""A set of visible (query, key) pairs: the intersection of all given conditions.

    Query $i$ is at position $p_i = \text{offset} + i$ among the keys. Key $j$ is visible to it iff all given conditions
    hold:

    - causal: $j \le p_i$
    - window: $p_i - \text{left} \le j \le p_i + \text{right}$
    - chunked: $\lfloor j / c \rfloor = \lfloor p_i / c \rfloor$
    - prefix: $j \le p_i$ or $j < \text{prefix}$
    - token types: $j \le p_i$, or both have the same non-zero type
    - segments: both have the same, non-negative id
    - lengths: both lie within their row's lengths
    - `cu_seqlens`: both belong to the same sequence
    - dense, a function, a map of blocks, a mask made with `|` or `~`: it is true there

    Masks are immutable, usable inside `jit`, and combine with `&` (both), `|` (either) and `~` (not). Kernels skip
    whole tiles that windows, ranges, segments, functions and maps of blocks hide. A union or complement of masks that
    hold arrays is a dense mask. Arrays that both parts of a union share are an exception: `(segments & a) | (segments &
    b)` is `segments & (a | b)`. Window and chunk sizes may also be arrays, traced or one per batch row. So a scan can
    run over layers with local and global windows. Such a size becomes a range of keys for each query. Build masks with
    the class methods and combine them:

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
        sides = {"left": window_size("left", left, 0), "right": window_size("right", right, 0)}
        if all(side is None or isinstance(side, int) for side in sides.values()):
            return cls(window=(sides["left"], sides["right"]))  # pyright: ignore[reportArgumentType]
        arrays = (None if side is None else jnp.asarray(side, jnp.int32) for side in sides.values())
        return cls(windows=(tuple(arrays),))  # pyright: ignore[reportArgumentType]

    @classmethod
    def chunked(cls, size: Any) -> "Mask":
        """Only keys in the query's own chunk of `size` positions (Llama 4's local layers, with `& Mask.causal()`).

        An int or an integer array, as in `sliding_window`.
        """
        read = window_size("size", size, 1)
        return cls(chunk_sizes=(read,)) if isinstance(read, int) else cls(chunks=(read,))  # pyright: ignore[reportArgumentType]

    @classmethod
    def prefix(cls, lengths: Any) -> "Mask":
        """Prefix-LM: causal, but the first `lengths` keys (an int or one per batch row) are visible to all queries."""
        return cls(prefix_lengths=jnp.asarray(lengths, jnp.int32))

    @classmethod
    def token_types(cls, type_ids: Any, kv_type_ids: Any | None = None, *, runs: bool = False) -> "Mask":
        """Causal, but tokens of the same non-zero type, `[..., T]` and `[..., S]`, also see each other ahead (images in text).

        Type 0 is causal only. Any other id is a type, including negative ones: mask padding with `&
        Mask.from_segments(...)`. With `runs`, a query sees ahead only while every key in between has its type. So a
        separate, later image is not seen, as in Gemma 3. That is a range of keys and costs no more than a causal mask.
        Without `runs`, a type may recur later, which requires a dense mask.
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
        return cls(q_lengths=counts("q_lengths", q_lengths), kv_lengths=counts("kv_lengths", kv_lengths))

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

        `f` is traced by JAX with three int32 scalars and returns one boolean; use `&`, `|`, `~` and `jnp.where` in it.
        `query` is the query's position among the keys, so that `lambda h, q, k: k <= q` is a causal mask. Arrays that
        it closes over are compiled in; if one is traced, the mask becomes dense. Bounds of `f` over each tile decide
        most tiles. Only the others are evaluated pair by pair. Each distinct partly visible tile is stored once, as
        bits. `f` is compared by identity: define it once, not in every step. Source: He et al., *FlexAttention* (2024).
        """
        if not callable(f):
            raise ValueError(f"f: expected a function of (head, query, key), received {type(f).__name__}.")
        is_static(f)  # raises what is wrong with it
        return cls(functions=(f,))

    @classmethod
    def strided(cls, stride: int) -> "Mask":
        """Keys at a multiple of `stride` from the query, on either side (Child et al., *Sparse Transformers*, 2019)."""
        return cls(functions=(Stride(whole_number("stride", stride, 1)),))

    @classmethod
    def dilated(cls, left: int | None, right: int | None = 0, *, rate: int) -> "Mask":
        """A window of `left` keys before and `right` after the query with gaps: every `rate`-th key, the query's own among them
        (Beltagy et al., *Longformer*, 2020)."""
        rate = whole_number("rate", rate, 1)
        sides = (
            None if x is None else whole_number(name, x, 0) * rate
            for name, x in (("left", left), ("right", right))
        )
        return cls.sliding_window(*sides) & cls.strided(rate)

    @classmethod
    def global_tokens(cls, count: int) -> "Mask":
        """The first `count` tokens see all keys, and all queries see them. Combine it with others by `|` (Longformer;
        Zaheer et al., *Big Bird*, 2020)."""
        return cls(functions=(Global(whole_number("count", count, 0)),))

    @classmethod
    def from_blocks(cls, block_map: Any, block_size: int | tuple[int, int]) -> "Mask":
        """Blocks of `block_size` queries by keys (an int: as many of each) are visible as a whole or not at all.

        `block_map`: booleans broadcastable to `[..., H, ceil(T / queries), ceil(S / keys)]`. A numpy array of up to
        three axes is compiled in, and its lists of tiles are built once. A JAX array is data, and the device builds
        lists from it in every call.
        """
        size = block_pair(block_size)
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
        listed = {name: getattr(self, name) + getattr(other, name) for name in _LISTED}
        single = {name: _both(f, getattr(self, name), getattr(other, name)) for name, f in _SINGLE.items()}
        return Mask(
            is_causal=self.is_causal or other.is_causal,
            window=(_both(min, self.window[0], other.window[0]), _both(min, self.window[1], other.window[1])),
            chunk_sizes=tuple(sorted({*self.chunk_sizes, *other.chunk_sizes})),
            cu_seqlens=self.cu_seqlens or other.cu_seqlens,
            **listed,
            **single,
        )

    def __or__(self, other: "Mask") -> "Mask":
        if not isinstance(other, Mask):
            return NotImplemented
        if self.cu_seqlens is not None or other.cu_seqlens is not None:
            return Mask(unions=((self, other),))  # they change what the other conditions mean
        # Conditions with the same arrays hold for the whole, so that kernels take them as they are.
        shared = {}
        for name in _SEVERAL:
            mine, theirs = getattr(self, name), getattr(other, name)
            if both := tuple(x for x in mine if any(_same(x, y) for y in theirs)):
                shared[name] = both
        for name in _SINGLE:
            value = getattr(self, name)
            if value is not None and value is getattr(other, name):
                shared[name] = value
        union = Mask(unions=((_without(self, shared), _without(other, shared)),))
        return Mask(**shared) & union if shared else union

    def __invert__(self) -> "Mask":
        alone = lambda **fields: jax.tree.structure(dataclasses.replace(self, **fields)) == _EVERYTHING
        if len(self.complements) == 1 and alone(complements=()):
            return self.complements[0]
        if len(self.unions) == 1 and alone(unions=()):
            return functools.reduce(lambda a, b: a & b, (~part for part in self.unions[0]))
        return Mask(complements=(self,))

    def lower(
        self, num_queries: int, num_keys: int, *, q_offset: Any | None = None, num_heads: int | None = None
    ) -> Lowered:
        """The mask in the form that kernels take: a static window or key ranges per query, one pair of segment ids, a function of head, query
        and key, a map of blocks, and a dense remainder.

        The lowering is exact: the intersection of the parts is this mask. `q_offset` defaults to `num_keys - num_queries`. `num_heads` is
        required if a function or a map differs between heads.
        """
        return lower(self, num_queries, num_keys, q_offset, num_heads)

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
        """Splits this mask over the axes of a mesh: the same structure with a `jax.sharding.PartitionSpec` for every array.

        Pass it to `jax.shard_map` as `in_specs` or, with each spec in a `NamedSharding`, to `jax.device_put` and `jax.jit`:

        ```python
        specs = mask.sharding_specs(batch="data", heads="model")
        mask = jax.device_put(mask, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))
        ```

        Broadcast axes of size one stay whole, as do `cu_seqlens`, which have none of these axes. Under `jit` a split
        mask keeps its meaning. Inside `shard_map` each device has only its part. Positions, lengths and offsets still
        count from the beginning of the row. If `queries` or `keys` are split, pass each device its own `q_offset`.

        **Arguments:** each is a mesh axis, a tuple of mesh axes or `None` (whole). With several leading axes, `batch` is a
        `PartitionSpec`.

        **Returns:** a `Mask` with specs in place of arrays.

        **Raises:** `ValueError` if one name is given for several leading axes, or if a mesh axis is used for two of the four.
        """
        return mask_specs(self, batch, heads, queries, keys)


def _most_heads(mask: Mask) -> int:
    """A number of heads that all maps of a mask have, if they have heads."""
    heads = [1, *(table.table.shape[0] for table in mask.tables)]
    heads += [one.block_map.shape[-3] for one in mask.maps if one.block_map.ndim > 2]
    parts = (part for union in (*mask.unions, mask.complements) for part in union)
    return max(*heads, *map(_most_heads, parts), 1)


def _both(combine: Any, a: Any | None, b: Any | None) -> Any:
    return b if a is None else a if b is None else combine(a, b)


_SEVERAL = ("segments", "types", "type_runs", "windows", "chunks", "maps")
_LISTED = (*_SEVERAL, "functions", "tables", "unions", "complements")
_SINGLE = {
    **dict.fromkeys(("prefix_lengths", "q_lengths", "kv_lengths"), jnp.minimum),
    "dense": jnp.logical_and,
}
_EVERYTHING = jax.tree.structure(Mask())


def _without(mask: Mask, conditions: dict[str, Any]) -> Mask:
    rest: dict[str, Any] = dict.fromkeys(conditions)
    for name in conditions.keys() & _SEVERAL:
        rest[name] = tuple(x for x in getattr(mask, name) if not any(_same(x, y) for y in conditions[name]))
    return dataclasses.replace(mask, **rest)


def _same(a: Any, b: Any) -> bool:
    """Tells whether two conditions hold the same arrays, not only equal ones."""
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        x is y for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )
