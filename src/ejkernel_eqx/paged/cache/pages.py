"""Shared by both kinds of cache: their base class, checks of arguments, and reading and copying of pages."""

import dataclasses
import math
from typing import Any, ClassVar, TYPE_CHECKING, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from ..._broadcast import like
from ..._shapes import is_symbolic
from ..._signatures import Module
from ..._values import check_between, check_distinct, checked
from ...core import Named
from ...sequences.packing import read_count
from ...sequences.tokens import over
from ..spec import WriteArrays
from .batch import RaggedBatch, to_int32
from .quantise import dequantise, LARGEST
from .write import Writer

C = TypeVar("C", bound="Pages")
T = TypeVar("T")
Tables = tuple[Array, Array]
PageDType = DTypeLike | tuple[DTypeLike, DTypeLike]
"""One dtype for both kinds of pages, or a pair: for keys and values, or for latents and rotary keys."""
TOKEN, HEAD = "token", "head"
_PLAIN = ("bfloat16", "float16", "float32", "float64")


class Pages(Module):
    """Two arrays of pages that hold the same tokens, each with or without scales, and the page tables.

    A subclass names them, first the pages and then their scales, and gives the names that kernels use. Kernels take pages with an axis
    of heads, `[.., P, p, K, D]`. Pages of a cache without that axis (`_rank` 3 instead of 4) are passed as a single head.
    """

    if TYPE_CHECKING:  # type checkers would take fields declared here for the first arguments of a cache
        page_table: ClassVar[Any]
        lengths: ClassVar[Any]
    else:
        page_table: eqx.AbstractVar[Array | None]
        lengths: eqx.AbstractVar[Array | None]
    _names: ClassVar[tuple[str, str, str, str]]
    _kernel_names: ClassVar[tuple[str, str, str, str]]
    _rank: ClassVar[int]

    def __check_init__(self):
        if not all(hasattr(x, "shape") for x in jax.tree.leaves(self)):
            return  # leaves that are not arrays, such as the axes for jax.vmap
        (name, x, scale), (other, y, other_scale) = self._pairs
        letters = "P, p, K, D" if self._rank == 4 else "P, p, R"
        if x.ndim < self._rank or not x.size:
            raise ValueError(
                f"{name}: expected pages [.., {letters}], received shape {x.shape}; use init to build a cache."
            )
        if y.ndim != x.ndim or y.shape[:-1] != x.shape[:-1] or not y.size:
            raise ValueError(
                f"{other}: expected the axes of {name} before the last, {x.shape[:-1]}, received shape {y.shape}; "
                "both hold the same tokens."
            )
        check_room(*x.shape[x.ndim - self._rank :][:2])
        kind = kind_of_scale(f"{name}_scale", x, scale, self._rank)
        other_kind = kind_of_scale(f"{other}_scale", y, other_scale, self._rank)
        # One of the two may not be quantised and then has no kind to compare.
        if kind != other_kind and None not in (kind, other_kind):
            raise ValueError(
                f"{other}_scale: expected the kind of {name}_scale, {kind!r}, received {other_kind!r}; use the same kind for both."
            )
        if (self.page_table is None) != (self.lengths is None):
            raise ValueError(
                "lengths: expected both page_table and lengths or neither, received one of the two; use bind to set both."
            )
        if self.page_table is not None and self.lengths is not None:
            check_tables(self.page_table, self.lengths)

    @classmethod
    def _empty(
        cls: type[C], num_pages: Any, page_size: Any, widths: Any, batch_shape: Any, dtype: Any, scales: Any
    ) -> C:
        """`widths`: the axes of a token in both arrays."""
        room = read_sizes(num_pages=num_pages, page_size=page_size)
        dtypes, scales = read_page_dtypes(dtype, scales)
        check_room(*room)
        lead = read_batch_shape(batch_shape)
        # Each array is separate, because all may be donated.
        kinds = list(zip(widths, dtypes, strict=True))
        arrays = [jnp.zeros((*lead, *room, *width), dtype) for width, dtype in kinds]
        # Scales per token lie in pages of their own, `[P, p, K]`; those per head are `[K]`.
        rows = room if scales == TOKEN else ()
        scale = lambda width: jnp.ones((*lead, *rows, *width[:-1]), jnp.float32)
        arrays += [scale(width) if dtype.name in LARGEST else None for width, dtype in kinds]
        return cls(**dict(zip(cls._names, arrays, strict=True)))

    @property
    def _arrays(self) -> list[Any]:
        return [getattr(self, name) for name in self._names]

    @property
    def _pairs(self) -> list[tuple[str, Any, Any]]:
        """The name of each array of pages, the pages, and their scales."""
        first, second, first_scale, second_scale = self._arrays
        return [(self._names[0], first, first_scale), (self._names[1], second, second_scale)]

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """The leading axes of the pages."""
        return getattr(self, self._names[0]).shape[: -self._rank]

    @property
    def num_pages(self) -> int:
        """The number of pages of all sequences together, `P`."""
        return getattr(self, self._names[0]).shape[-self._rank]

    @property
    def page_size(self) -> int:
        """The number of tokens per page, `p`."""
        return getattr(self, self._names[0]).shape[1 - self._rank]

    @property
    def scales(self) -> str | None:
        """`"token"`, `"head"` (one for the cache, if its tokens have no heads), or `None` if no pages are quantised."""
        kinds = (kind_of_scale(f"{name}_scale", x, scale, self._rank) for name, x, scale in self._pairs)
        return next((kind for kind in kinds if kind is not None), None)

    @property
    def is_bound(self) -> bool:
        """True if the cache is bound to page tables."""
        return self.page_table is not None

    def bind(self: C, page_table: Any, lengths: Any | None = None) -> C:
        """Returns the same pages, bound to tables that assign them to sequences.

        **Arguments:** `page_table`, ints `[.., N, M]`, and `lengths`, ints `[.., N]`; or a
        [`RaggedBatch`][ejkernel_eqx.paged.cache.batch.RaggedBatch] alone, which holds both.

        **Raises:** `ValueError` for inconsistent shapes, or a batch with another page size.
        """
        table, lengths = read_tables(page_table, lengths, self.page_size)
        return dataclasses.replace(self, page_table=table, lengths=lengths)

    def unbind(self: C) -> C:
        """Returns the same pages without tables."""
        return dataclasses.replace(self, page_table=None, lengths=None)

    def _with_scales(self: C, *given: Any) -> C:
        if self.scales != HEAD:
            raise ValueError(
                f"with_scales: expected a cache with scales='head', received one with {self.scales!r}; pass scales='head' to init."
            )
        lead, old = len(self.batch_shape), zip(self._names[2:], self._arrays[2:], given, strict=True)
        scales: Any = {name: read_head_scale(name, x, scale, lead) for name, scale, x in old}
        return dataclasses.replace(self, **scales)

    def append_by(self: C, writer: Writer, first: Any, second: Any, slots: Any) -> C:
        """`append` with a given write function; operations pass that of their platform."""
        return holding(self, writer(write_arrays(self, (first, second), slots)))

    def gather(
        self, max_length: int | None = None, *, dtype: DTypeLike | None = None
    ) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
        """Returns the tokens of each sequence as dense arrays, as dense attention takes them. Differentiable.

        **Arguments:**

        - `max_length`: `S`, the number of tokens to return per sequence; static, by default all that a row of pages can hold, `M * p`.
        - `dtype`: the dtype of the results, by default that of the pages, or float32 if they are quantised or have different dtypes.

        **Returns:** keys `[.., N, S, K, D]` and values `[.., N, S, K, V]`; for a latent cache, latents `[.., N, S, R]` and rotary keys
        `[.., N, S, Dr]`. Positions without a token or a page are zero. The leading axes of the pages come first; tables without leading
        axes are shared.

        **Raises:** `ValueError` for a cache that is not bound to tables.
        """
        with jax.named_scope(f"ejx.{type(self).__name__}.gather"):
            tables, size, dtype = self._read_gather(max_length, dtype)
            lead = len(self.batch_shape)
            first, second = (gather(x, scale, tables, size, dtype, lead) for _, x, scale in self._pairs)
            return first, second

    def _read_gather(self, max_length: Any, dtype: Any) -> tuple[Tables, int, Any]:
        """The tables, the number of tokens per sequence and the dtype of the results of `gather`."""
        table, lengths, lead = self.page_table, self.lengths, self.batch_shape
        name = self._names[0]
        if table is None or lengths is None:
            raise ValueError(
                "gather: expected a cache bound to tables, received one without; call cache.bind(page_table, lengths)."
            )
        if table.ndim > 2 and table.shape[: len(lead)] != lead:
            raise ValueError(
                f"page_table: expected shape [N, M] or the leading axes {lead} of {name} in front, received {table.shape}; use jax.vmap over more."
            )
        if dtype is None:
            kept = {x.dtype for x in self._arrays[:2]}
            dtype = kept.pop() if len(kept) == 1 else jnp.dtype(jnp.float32)
            # 8-bit numbers mean nothing without their scales, so their products have a wider dtype.
            if dtype.name in LARGEST:
                dtype = jnp.float32
        dtype = jnp.dtype(dtype)
        if dtype.name not in _PLAIN:
            raise ValueError(f"dtype: expected one of {', '.join(_PLAIN)}, received {dtype.name}.")
        _check_enabled(dtype)
        size = table.shape[-1] * self.page_size if max_length is None else max_length
        return (table, lengths), read_count("max_length", size), dtype

    def copy_pages(self: C, source: Any, target: Any) -> C:
        """Returns the cache with whole pages copied, as `PageTable.allocate` requests before a shared page is written; in place if donated.

        **Arguments:** `source`, `target`: ints `[C]`, the same for all leading axes. All sources are read before any target is written;
        targets must be distinct. A copy with a number outside `0 .. P - 1` on either side, such as -1, is skipped.

        **Raises:** `ValueError` for invalid shapes.
        """
        with jax.named_scope(f"ejx.{type(self).__name__}.copy_pages"):
            source, target = read_copies(source, target)
            # Scales per token move with their pages; scales per head belong to no page.
            lead, names = len(self.batch_shape), self._names[: 4 if self.scales == TOKEN else 2]
            there = {name: x for name in (*names, "gates") if (x := getattr(self, name, None)) is not None}
            return dataclasses.replace(self, **copy(there, source, target, lead))


def operands_of(pages: Pages) -> Named:
    """The pages and scales that are present, in the names and shapes of the kernels."""
    named, at = zip(pages._kernel_names, pages._arrays, strict=True), len(pages.batch_shape) + 2
    # An axis of one head follows pages and places; in a scale for the whole cache it replaces them.
    with_head = lambda x: x if pages._rank == 4 else jnp.expand_dims(x, min(x.ndim, at))
    return {name: with_head(x) for name, x in named if x is not None}


def holding(pages: C, operands: Named) -> C:
    """The cache with these pages and scales, given in the names and shapes of the kernels."""
    # The inverse of `operands_of`: only the axis that it added is removed.
    names, at = dict(zip(pages._kernel_names, pages._names, strict=True)), len(pages.batch_shape) + 2
    without_head = lambda x: x if pages._rank == 4 else jnp.squeeze(x, min(x.ndim - 1, at))
    return dataclasses.replace(pages, **{names[name]: without_head(x) for name, x in operands.items()})


def write_arrays(pages: Pages, given: tuple[Any, Any], slots: Any) -> WriteArrays:
    """The arguments of a platform's write: the new tokens of both arrays, with their slots."""
    lead, new, tokens = pages.batch_shape, {}, None
    for kernel_name, (name, old, _), x in zip(pages._kernel_names, pages._pairs, given):
        inner = old.shape[len(lead) + 2 :]
        words = ", ".join(map(str, (*lead, "T" if tokens is None else tokens, *inner)))
        expected = f"floats [{words}] as in the cache"
        remedy = "; pack the tokens of all sequences along one axis"
        x = read_array(name, x, ((*lead, tokens, *inner),), expected, remedy)
        # The first array fixes the number of tokens, which the second must have.
        tokens = x.shape[len(lead)]
        new[kernel_name] = x if pages._rank == 4 else x[..., None, :]
    slots = read_slots(slots, lead, tokens, pages.num_pages * pages.page_size)
    return WriteArrays(operands_of(pages), new, slots)


def read_page_dtypes(dtype: PageDType, scales: str | None) -> tuple[tuple[Any, Any], str | None]:
    """The dtypes of both kinds of pages, and the kind of scales of those quantised to 8 bits."""
    pair = tuple(dtype) if isinstance(dtype, tuple | list) else (dtype, dtype)
    if len(pair) != 2:
        raise ValueError(
            f"dtype: expected one dtype for all pages or a pair, received {len(pair)}; a pair such as (bfloat16, int8) is for keys and "
            "values."
        )
    first, second = (jnp.dtype(one) for one in pair)
    for one in (first, second):
        if one.name not in (*_PLAIN, *LARGEST):
            raise ValueError(
                f"dtype: expected one of {', '.join((*_PLAIN, *LARGEST))}, received {one.name}; cast it."
            )
        _check_enabled(one)
    if scales not in (None, TOKEN, HEAD):
        raise ValueError(f"scales: expected 'token', 'head' or None, received {scales!r}.")
    plain = first.name in _PLAIN and second.name in _PLAIN
    if plain and scales is not None:
        names = first.name if first == second else f"{first.name} and {second.name}"
        raise ValueError(
            f"scales: expected None for pages of {names}, received {scales!r}; use dtype {', '.join(LARGEST)} to quantise."
        )
    # Scales per token are the default, as they need no sample of the data in advance.
    return (first, second), scales or (None if plain else TOKEN)


def filled_dtype(dtype: Any, default: Any) -> Any:
    """A dtype of pages, or a pair, with `default` in place of `None`."""
    pick = lambda one: default if one is None else one
    return tuple(map(pick, dtype)) if isinstance(dtype, tuple | list) else pick(dtype)


def _check_enabled(dtype: Any) -> None:
    if dtype.name == "float64" and not jax.config.read("jax_enable_x64"):
        raise ValueError(
            "dtype: expected 64-bit types to be enabled for float64; call jax.config.update('jax_enable_x64', True), or use float32."
        )


def read_sizes(**sizes: Any) -> tuple[int, ...]:
    return tuple(read_count(name, size, least=1) for name, size in sizes.items())


def read_batch_shape(batch_shape: Any) -> tuple[int, ...]:
    shape = (batch_shape,) if isinstance(batch_shape, int | np.integer) else tuple(batch_shape)
    return tuple(read_count("batch_shape", size, least=1) for size in shape)


def check_room(num_pages: int, page_size: int) -> None:
    # Slots are int32, including one past the end plus the index of a token.
    if not is_symbolic(num_pages) and num_pages * page_size > 2**30:
        raise ValueError(
            f"num_pages: expected at most 2**30 tokens in all pages, received {num_pages} pages of {page_size}; "
            "split them across several caches."
        )


def kind_of_scale(name: str, pages: Array, scale: Array | None, rank: int) -> str | None:
    """The kind of scale, from its shape; `rank` is the rank of the pages without leading axes."""
    quantised = pages.dtype.name in LARGEST
    if scale is None:
        if quantised:
            raise ValueError(
                f"{name}: expected scales for pages of {pages.dtype}, received None; use init to build a cache."
            )
        return None
    lead, place = pages.shape[: pages.ndim - rank], pages.shape[pages.ndim - rank + 2 : -1]
    # The two kinds differ in rank, so the shape alone tells them apart.
    kinds = {TOKEN: pages.shape[:-1], HEAD: (*lead, *place)}
    for kind, shape in kinds.items():
        if scale.shape == shape and quantised:
            return kind
    raise ValueError(
        f"{name}: expected {f'shape {kinds[TOKEN]} or {kinds[HEAD]}' if quantised else 'None'} for pages of {pages.dtype} "
        f"{pages.shape}, received {scale.dtype} of shape {scale.shape}; use init to build a cache."
    )


def read_head_scale(name: str, given: Any, scale: Array | None, lead: int) -> Array | None:
    """New scales in place of `scale`, one per head; without the leading axes, they apply to all of them."""
    if scale is None:
        if given is not None:
            raise ValueError(
                f"{name}: expected None for pages that are not quantised to 8 bits, received {type(given).__name__}; scale only the others."
            )
        return None
    if given is None:
        raise ValueError(f"{name}: expected floats {scale.shape}, received None; pass one number per head.")
    shapes = (scale.shape, scale.shape[lead:])
    values = read_array(name, given, shapes, f"floats {scale.shape}", "; pass one number per head")
    wrong = lambda x: ~((x > 0) & (x < jnp.inf))
    message = lambda x: f"{name}: expected positive numbers, received {x}; use 1 if no scale is known."
    numbers = checked(values.astype(jnp.float32), given, wrong, message)
    return jnp.broadcast_to(numbers, scale.shape)


def read_tables(page_table: Any, lengths: Any, page_size: int) -> tuple[Array, Array]:
    """The arguments of `bind` as int32 `[.., N, M]` and `[.., N]`."""
    if isinstance(page_table, RaggedBatch):
        if lengths is not None:
            raise ValueError(
                "lengths: expected None with a RaggedBatch, which has its own lengths, received a value; pass the batch alone."
            )
        if page_table.page_size != page_size:
            raise ValueError(
                f"page_table: expected a RaggedBatch of this cache's page_size={page_size}, received one with {page_table.page_size}."
            )
        return page_table.page_table, page_table.lengths
    if lengths is None:
        raise ValueError(
            "lengths: expected ints [.., N] with a page table, received None; pass lengths, or bind a RaggedBatch."
        )
    table, counts = check_tables(jnp.asarray(page_table), jnp.asarray(lengths))
    most = table.shape[-1] * page_size
    why = f"a row of the page table holds {most} tokens"
    return table, check_between("lengths", counts, lengths, 0, most, why)


def check_tables(table: Array, lengths: Array) -> tuple[Array, Array]:
    if table.ndim < 2 or not jnp.issubdtype(table.dtype, jnp.integer):
        raise ValueError(
            f"page_table: expected ints [.., N, M], -1 for no page, received {table.dtype} of shape {table.shape}; "
            "PageTable.rows returns one."
        )
    if lengths.shape != table.shape[:-1] or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(
            f"lengths: expected ints {table.shape[:-1]}, one for each row of page_table, received {lengths.dtype} of shape "
            f"{lengths.shape}; lengths include new tokens."
        )
    return to_int32(table), to_int32(lengths)


def read_array(name: str, given: Any, shapes: Any, expected: str, remedy: str = "") -> Array:
    """`given` as an array of integers or floats (the first word of `expected`) with one of `shapes`, in which `None` is any size."""
    x, kind = jnp.asarray(given), jnp.integer if expected.startswith("ints") else jnp.floating
    matches = lambda shape: all(want in (None, size) for want, size in zip(shape, x.shape))
    fits = any(len(shape) == x.ndim and matches(shape) for shape in shapes)
    if not fits or not jnp.issubdtype(x.dtype, kind):
        raise ValueError(f"{name}: expected {expected}, received {x.dtype} of shape {x.shape}{remedy}.")
    return x


def read_slots(given: Any, lead: tuple[int, ...], tokens: int | None, room: int) -> Array:
    """Slots for all leading axes, int32 `[*lead, T]`; the cache has `room` slots."""
    expected = f"ints [{tokens}], page * page_size + place for each token, or -1 to skip it"
    shapes = ((tokens,), (*lead, tokens))
    slots = read_array("slots", given, shapes, expected, "; RaggedBatch.slots has them")
    array = check_distinct("slots", to_int32(slots), given, room, "each token has its own slot, or -1")
    return jnp.broadcast_to(array, (*lead, tokens))


def read_copies(source: Any, target: Any) -> tuple[Array, Array]:
    given = target
    pages = {"source": jnp.asarray(source), "target": jnp.asarray(target)}
    for name, x in pages.items():
        # An empty list has no dtype of its own.
        ints = jnp.issubdtype(x.dtype, jnp.integer) or not x.size
        if x.ndim != 1 or x.shape != pages["source"].shape or not ints:
            raise ValueError(
                f"{name}: expected ints [C], one page per copy, received {x.dtype} of shape {x.shape} (source: shape "
                f"{pages['source'].shape}); -1 copies nothing."
            )
    source, target = (to_int32(x) if x.size else jnp.zeros(0, jnp.int32) for x in pages.values())
    return source, check_distinct("target", target, given, 2**31, "each page is written at most once")


def copy(arrays: T, source: Array, target: Array, lead: int) -> T:
    """`arrays` of pages `[.., P, ...]` with pages `source` copied to `target`; all are read before any is written."""
    count = jax.tree.leaves(arrays)[0].shape[lead]
    known = (source >= 0) & (source < count) & (target >= 0) & (target < count)
    source = jnp.where(known, source, 0)
    target = jnp.where(known, target, count + jnp.arange(target.shape[0], dtype=jnp.int32))

    def move(pages: Array) -> Array:
        taken = pages.at[source].get(mode="promise_in_bounds", wrap_negative_indices=False)
        return pages.at[target].set(taken, mode="drop", unique_indices=True, wrap_negative_indices=False)

    return jax.tree.map(over(lead, move), arrays)


def gather(pages: Array, scale: Array | None, tables: Tables, size: int, dtype: Any, lead: int) -> Array:
    """Dense `[.., N, size, ...]` from `pages [P, p, ...]`, by `table [.., N, M]`; 0 at positions without a token."""
    if lead:
        own = None if scale is None else 0
        each = (0, 0) if tables[0].ndim > 2 else (None, None)
        inner = lambda pages, scale, tables: gather(pages, scale, tables, size, dtype, lead - 1)
        return jax.vmap(inner, in_axes=(0, own, each))(pages, scale, tables)
    table, lengths = tables
    count, page_size = pages.shape[:2]
    table = table[..., : math.ceil(size / page_size)]
    index = jnp.clip(table, 0, count - 1)
    places = jnp.arange(table.shape[-1] * page_size, dtype=jnp.int32)
    seen = jnp.repeat((table >= 0) & (table < count), page_size, -1)
    seen &= like(places, table) < lengths[..., None]

    def take(x: Array) -> Array:
        """Zeroes unused slots before any computation, so that their contents do not reach gradients either."""
        taken = x[index].reshape(*seen.shape, *x.shape[2:])
        return jnp.where(seen.reshape(*seen.shape, *(1,) * (x.ndim - 2)), taken, jnp.zeros((), x.dtype))

    dense = take(pages)
    if scale is not None:
        dense = dequantise(dense, take(scale) if scale.ndim == pages.ndim - 1 else scale, dtype)
    dense = dense.astype(dtype)[..., :size, *(slice(None),) * (pages.ndim - 2)]
    missing, axis = max(size - places.shape[0], 0), seen.ndim - 1
    return jnp.pad(dense, [(0, missing if n == axis else 0) for n in range(dense.ndim)]) if missing else dense
