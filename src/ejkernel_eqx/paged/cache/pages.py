"""What the two kinds of cache share: checks of their arguments, reading and copying of pages."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from ..._broadcast import like
from ..._sizes import is_symbolic
from ..._values import check_between, check_distinct, checked
from ...sequences.packing import read_count
from .batch import RaggedBatch
from .batch import to_int32 as to_int32
from .quantise import dequantise, LARGEST

Tables = tuple[Array, Array]
TOKEN, HEAD = "token", "head"
_PLAIN = ("bfloat16", "float16", "float32", "float64")


def read_page_dtype(dtype: DTypeLike, scales: str | None) -> tuple[Any, str | None]:
    """The pages' dtype and the kind of their scales."""
    dtype = jnp.dtype(dtype)
    if dtype.name not in (*_PLAIN, *LARGEST):
        raise ValueError(
            f"dtype: expected one of {', '.join((*_PLAIN, *LARGEST))}, received {dtype.name}; cast it."
        )
    _check_enabled(dtype)
    if scales not in (None, TOKEN, HEAD):
        raise ValueError(f"scales: expected 'token', 'head' or None, received {scales!r}.")
    if dtype.name in _PLAIN and scales is not None:
        raise ValueError(
            f"scales: expected None for pages of {dtype.name}, received {scales!r}; take dtype int8 or float8_e4m3fn to quantise."
        )
    return dtype, scales or (None if dtype.name in _PLAIN else TOKEN)


def _check_enabled(dtype: Any) -> None:
    if dtype.name == "float64" and not jax.config.read("jax_enable_x64"):
        raise ValueError(
            "dtype: expected 64-bit types to be enabled for float64; call jax.config.update('jax_enable_x64', True), or take float32."
        )


def read_sizes(**sizes: Any) -> tuple[int, ...]:
    return tuple(read_count(name, size, least=1) for name, size in sizes.items())


def read_batch_shape(batch_shape: Any) -> tuple[int, ...]:
    shape = (batch_shape,) if isinstance(batch_shape, int | np.integer) else tuple(batch_shape)
    return tuple(read_count("batch_shape", size, least=1) for size in shape)


def check_room(num_pages: int, page_size: int) -> None:
    # A slot is an int32, and so is one past the end with the number of a token added.
    if not is_symbolic(num_pages) and num_pages * page_size > 2**30:
        raise ValueError(
            f"num_pages: expected at most 2**30 tokens in all pages, received {num_pages} pages of {page_size}; "
            "split them over several caches."
        )


def check_pages(first: tuple[str, Array], second: tuple[str, Array], rank: int) -> None:
    """Two arrays `[.., P, p, ...]` of one cache, which agree in all axes but the last."""
    (name, x), (other, y) = first, second
    letters = "P, p, K, D" if rank == 4 else "P, p, R"
    if x.ndim < rank or not x.size:
        raise ValueError(
            f"{name}: expected pages [.., {letters}], received shape {x.shape}; see the method init."
        )
    if y.ndim != x.ndim or y.shape[:-1] != x.shape[:-1] or not y.size:
        raise ValueError(
            f"{other}: expected the axes of {name} before the last, {x.shape[:-1]}, received shape {y.shape}; "
            "both hold the same tokens."
        )
    check_room(*x.shape[x.ndim - rank : x.ndim - rank + 2])


def kind_of_scale(name: str, pages: Array, scale: Array | None, rank: int) -> str | None:
    """By the shape of `scale`; `rank` is that of one cache's pages, without leading axes."""
    quantised = pages.dtype.name in LARGEST
    if scale is None:
        if quantised:
            raise ValueError(
                f"{name}: expected scales for pages of {pages.dtype}, received None; see the method init."
            )
        return None
    lead, place = pages.shape[: pages.ndim - rank], pages.shape[pages.ndim - rank + 2 : -1]
    kinds = {TOKEN: pages.shape[:-1], HEAD: (*lead, *place)}
    for kind, shape in kinds.items():
        if scale.shape == shape and quantised:
            return kind
    raise ValueError(
        f"{name}: expected {f'shape {kinds[TOKEN]} or {kinds[HEAD]}' if quantised else 'None'} for pages of {pages.dtype} "
        f"{pages.shape}, received {scale.dtype} of shape {scale.shape}; see the method init."
    )


def read_head_scale(name: str, given: Any, scale: Array | None, lead: int) -> Array:
    """New scales in place of `scale`, one for each head; those without its leading axes are for all of them."""
    values = jnp.asarray(given)
    assert scale is not None
    shapes = (scale.shape, scale.shape[lead:])
    if not jnp.issubdtype(values.dtype, jnp.floating) or values.shape not in shapes:
        raise ValueError(
            f"{name}: expected floats {scale.shape}, received {values.dtype} of shape {values.shape}; one number for each head."
        )
    numbers = checked(
        values.astype(jnp.float32),
        given,
        lambda x: ~((x > 0) & (x < jnp.inf)),
        lambda found: f"{name}: expected positive numbers, received {found}; 1 where nothing is known.",
    )
    return jnp.broadcast_to(numbers, scale.shape)


def read_tables(page_table: Any, lengths: Any, page_size: int) -> tuple[Array, Array]:
    """What `bind` is given, as int32 `[.., N, M]` and `[.., N]`."""
    if isinstance(page_table, RaggedBatch):
        if lengths is not None:
            raise ValueError(
                "lengths: expected None with a RaggedBatch, which has its own, received another."
            )
        if page_table.page_size != page_size:
            raise ValueError(
                f"page_table: expected a RaggedBatch of this cache's page_size={page_size}, received one of {page_table.page_size}."
            )
        return page_table.page_table, page_table.lengths
    if lengths is None:
        raise ValueError(
            "lengths: expected ints [.., N] with a page table, received None; or bind a RaggedBatch."
        )
    table, counts = check_tables(jnp.asarray(page_table), jnp.asarray(lengths))
    most = table.shape[-1] * page_size
    return table, check_between(
        "lengths", counts, lengths, 0, most, f"a row of the page table has room for {most} tokens"
    )


def check_bound(table: Array | None, lengths: Array | None) -> None:
    if (table is None) != (lengths is None):
        raise ValueError(
            "lengths: expected with page_table and only with it, received one of the two; see the method bind."
        )
    if table is not None and lengths is not None:
        check_tables(table, lengths)


def check_tables(table: Array, lengths: Array) -> tuple[Array, Array]:
    if table.ndim < 2 or not jnp.issubdtype(table.dtype, jnp.integer):
        raise ValueError(
            f"page_table: expected ints [.., N, M], -1 for no page, received {table.dtype} of shape {table.shape}; "
            "PageTable.rows makes one."
        )
    if lengths.shape != table.shape[:-1] or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(
            f"lengths: expected ints {table.shape[:-1]}, one for each row of page_table, received {lengths.dtype} of shape "
            f"{lengths.shape}; new tokens count."
        )
    return to_int32(table), to_int32(lengths)


def read_new(name: str, new: Any, lead: tuple[int, ...], inner: tuple[int, ...], tokens: int | None) -> Array:
    """New tokens `[*lead, T, *inner]`; `tokens` is `T` where it is known."""
    new = jnp.asarray(new)
    shape = (*lead, "T" if tokens is None else tokens, *inner)
    if tokens is None and new.ndim > len(lead):
        tokens = new.shape[len(lead)]
    if new.shape != (*lead, tokens, *inner) or not jnp.issubdtype(new.dtype, jnp.floating):
        raise ValueError(
            f"{name}: expected floats [{', '.join(map(str, shape))}] as the cache holds it, received {new.dtype} of shape {new.shape}; "
            "pack the tokens of all sequences along one axis."
        )
    return new


def read_slots(given: Any, lead: tuple[int, ...], tokens: int, room: int) -> Array:
    """Slots for every one of the leading axes, int32 `[*lead, T]`, `room` in all."""
    slots = jnp.asarray(given)
    if not jnp.issubdtype(slots.dtype, jnp.integer) or slots.shape not in ((tokens,), (*lead, tokens)):
        raise ValueError(
            f"slots: expected ints [{tokens}], page * page_size + place for each token and -1 for nowhere, received {slots.dtype} of "
            f"shape {slots.shape}; RaggedBatch.slots has them."
        )
    array = check_distinct("slots", to_int32(slots), given, room, "each token has a slot of its own, or -1")
    return jnp.broadcast_to(array, (*lead, tokens))


def read_copies(source: Any, target: Any) -> tuple[Array, Array]:
    given = target
    pages = {"source": jnp.asarray(source), "target": jnp.asarray(target)}
    for name, x in pages.items():
        # An empty list has no dtype of its own.
        ints = jnp.issubdtype(x.dtype, jnp.integer) or not x.size
        if x.ndim != 1 or x.shape != pages["source"].shape or not ints:
            raise ValueError(
                f"{name}: expected ints [C], a page for each copy, received {x.dtype} of shape {x.shape} (source: shape "
                f"{pages['source'].shape}); -1 copies nothing."
            )
    source, target = (to_int32(x) if x.size else jnp.zeros(0, jnp.int32) for x in pages.values())
    return source, check_distinct("target", target, given, 2**31, "each page is written once")


def copy(pages: Array, source: Array, target: Array, lead: int) -> Array:
    """`pages [.., P, ...]` with the pages `source` in the places `target`: all are read before any is written."""
    if lead:
        return jax.vmap(copy, in_axes=(0, None, None, None))(pages, source, target, lead - 1)
    count = pages.shape[0]
    known = (source >= 0) & (source < count) & (target >= 0) & (target < count)
    nowhere = count + jnp.arange(target.shape[0], dtype=jnp.int32)
    taken = pages[jnp.clip(source, 0, count - 1)]
    return pages.at[jnp.where(known, target, nowhere)].set(taken, mode="drop", unique_indices=True)


def read_gather(
    pages: tuple[str, Array],
    tables: tuple[Array | None, Array | None],
    lead: tuple[int, ...],
    max_length: Any,
    dtype: Any,
) -> tuple[Tables, int, Any]:
    """The tables, the tokens a sequence and the dtype of what `gather` gives."""
    name, x = pages
    table, lengths = tables
    if table is None or lengths is None:
        raise ValueError(
            "gather: expected a cache bound to tables, received one without; call cache.bind(page_table, lengths)."
        )
    if table.ndim > 2 and table.shape[: len(lead)] != lead:
        raise ValueError(
            f"page_table: expected shape [N, M] or the leading axes {lead} of {name} in front, received {table.shape}; jax.vmap over more."
        )
    if dtype is None:
        dtype = jnp.float32 if x.dtype.name in LARGEST else x.dtype
    dtype = jnp.dtype(dtype)
    if dtype.name not in _PLAIN:
        raise ValueError(f"dtype: expected one of {', '.join(_PLAIN)}, received {dtype.name}.")
    _check_enabled(dtype)
    if max_length is None:
        max_length = table.shape[-1] * x.shape[len(lead) + 1]
    return (table, lengths), read_count("max_length", max_length), dtype


def gather(pages: Array, scale: Array | None, tables: Tables, size: int, dtype: Any, lead: int) -> Array:
    """Dense `[.., N, size, ...]` from `pages [P, p, ...]`, by `table [.., N, M]`; 0 where there is no token."""
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
    seen = jnp.repeat((table >= 0) & (table < count), page_size, -1) & (
        like(places, table) < lengths[..., None]
    )

    def take(x: Array) -> Array:
        """Zero before anything is computed with it, so that what lies in unused slots reaches no gradient either."""
        taken = x[index].reshape(*seen.shape, *x.shape[2:])
        return jnp.where(seen.reshape(*seen.shape, *(1,) * (x.ndim - 2)), taken, jnp.zeros((), x.dtype))

    dense = take(pages)
    if scale is not None:
        own = take(scale) if scale.ndim == pages.ndim - 1 else scale
        dense = dequantise(dense, own, dtype)
    dense = dense.astype(dtype)[..., :size, *(slice(None),) * (pages.ndim - 2)]
    missing = size - places.shape[0]
    if missing <= 0:
        return dense
    widths = [(0, 0)] * dense.ndim
    widths[seen.ndim - 1] = (0, missing)
    return jnp.pad(dense, widths)
