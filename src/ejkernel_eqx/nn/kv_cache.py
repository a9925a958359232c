"""`KVCache`: the dense key/value cache of autoregressive decoding."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from .._broadcast import like
from .._shapes import AnyArray, Bool, Float, Int
from .._signatures import Module
from .._values import check_known, refused_if, stops_programs
from ..core.arguments import accumulator
from ..parallel import Leading, over_mesh
from ..sequences.cumsum import running_count
from .arguments import broadcasts, is_known, named_dtype, read_array, read_batch_shape, read_sizes


class KVCache(Module):
    """Keys and values of all tokens so far: one row per sequence, each with its own length.

    A cache is immutable: `append` returns a new one, written in place if the old one is donated to `jit`. All
    leaves have the same leading axes, so a cache with batch shape `(layers, B)` can be scanned over
    together with stacked layers.

    A row that would exceed the capacity is an error, outside `jit` and inside. Only a program for a GPU goes on, unless
    `ejkernel_eqx.check_values` is on, and one that is traced in `check_values(False)`: there the row is closed. Nothing is written to it
    from then on, its length stays, the outputs of the layer for it are NaN, and `overflowed` says so. Other rows are as without it.

    A cache has these four arrays and no more, as each one takes time where a compiled function begins; that of a layer with forget gates has a fifth:

    - `k`: `[..., S, K, D]`, `v`: `[..., S, K, V]`, with `S` the capacity in tokens.
    - `lengths`: int32 `[...]`, the number of tokens in each row; slots beyond are never read.
    - `overflowed`: bool `[...]`, True for rows that are closed; default False.
    - `log_forget`: float32 `[..., S, H]`, logarithms of the forget gates of the tokens; default `None`.
    """

    k: Float[Array, "*B S K D"]
    v: Float[Array, "*B S K V"]
    lengths: Int[Array, "*B"]
    overflowed: Bool[Array, "*B"]
    log_forget: Float[Array, "*B S H"] | None

    def __init__(self, k: Any, v: Any, lengths: Any, overflowed: Any = None, log_forget: Any = None):
        self.k, self.v, self.lengths, self.log_forget = k, v, lengths, log_forget
        self.overflowed = none_overflowed(lengths) if overflowed is None else overflowed

    @classmethod
    def init(
        cls,
        batch_shape: tuple[int, ...] | int,
        max_length: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        dtype: DTypeLike = jnp.float32,
        *,
        num_gates: int | None = None,
    ) -> "KVCache":
        """Returns an empty cache.

        **Arguments:**

        - `batch_shape`: leading axes; `()` for one sequence, an integer `B` for `(B,)`.
        - `max_length`: capacity `S` of each row, in tokens.
        - `num_kv_heads`, `head_dim`, `v_head_dim`: `K`, `D` and `V` (default `D`).
        - `dtype`: floating dtype of the stored keys and values; new ones are cast to it. For 8-bit integers, which need
            scales, use [`ejkernel_eqx.PagedKVCache`][].
        - `num_gates`: forget gates of a token, the query heads `H` of a layer with gates; default none.
        """
        sizes = {"max_length": max_length, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        return cls(**empty_rows(batch_shape, sizes, v_head_dim, dtype, num_gates))

    @property
    def max_length(self) -> int:
        """Capacity of each row, in tokens."""
        return self.k.shape[-3]

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return self.k.shape[:-3]

    @jax.named_scope("ejx.nn.KVCache.append")
    def append(
        self,
        k_new: Float[AnyArray, "*B T K D"],
        v_new: Float[AnyArray, "*B T K V"],
        *,
        new_lengths: Int[AnyArray, "#*B"] | None = None,
        mask: Bool[AnyArray, "#*B #T"] | None = None,
        log_forget: Float[AnyArray, "*B T H"] | None = None,
    ) -> "KVCache":
        """Appends up to `T` tokens to each row, starting at the length of the row.

        **Arguments:**

        - `k_new`, `v_new`: `[..., T, K, D]` and `[..., T, K, V]`.
        - `new_lengths`: integers `[...]`, the number of real tokens of each row; the rest of its `T` tokens is right padding.
        - `mask`: bool `[..., T]`, True for real tokens. Padding may be anywhere; real tokens are stored contiguously, and
            rows without any are unchanged.
        - `log_forget`: `[..., T, H]`, of the new tokens, for a cache that has gates.

        **Returns:** the new cache. Raises `ValueError` for invalid arguments, and if a row would exceed `max_length`.
        Inside `jit` the program raises an error whose last line says so. On a GPU it closes the row, as described
        above.
        """
        check_new(self, k_new, v_new, log_forget)
        gates = self.log_forget
        if new_lengths is None and mask is None and k_new.shape[-3] > self.max_length:
            raise ValueError(
                f"k_new: expected at most max_length={self.max_length} tokens, received {k_new.shape[-3]}; "
                "build the cache with a larger max_length."
            )
        if new_lengths is not None and mask is not None:
            raise ValueError(
                "new_lengths, mask: expected at most one of the two, received both; "
                "combine the lengths with the mask."
            )
        rows, real = k_new.shape[:-2], (mask, new_lengths)
        new_lengths = read_rows("new_lengths", new_lengths, "integers", "[...]", rows[:-1])
        mask = read_rows("mask", mask, "booleans", "[..., T]", rows)
        if new_lengths is not None:
            _check_lengths(new_lengths, rows[-1])
            token = jax.lax.broadcasted_iota(jnp.int32, rows, len(rows) - 1)
            mask = token < new_lengths.astype(jnp.int32)[..., None]
        count = k_new.shape[-3] if mask is None else jnp.sum(mask, axis=-1, dtype=jnp.int32)
        k_new, v_new = jnp.asarray(k_new), jnp.asarray(v_new)
        if stops_programs():
            lengths = self.lengths + count
            lengths = refused_if(lengths > self.max_length, lengths, full_message(self.max_length))
            # Starting from the checked lengths keeps the error from being dropped as dead code.
            start, overflowed = lengths - count, self.overflowed
        else:
            check_room(self, rows[-1], *real)
            refused = refused_rows(self, count)
            # Nothing is written behind the end, and refused rows start behind that of the padding.
            start = jnp.where(refused, self.max_length + rows[-1], self.lengths)
            lengths = self.lengths + jnp.where(refused, 0, count)
            overflowed = self.overflowed | refused
        k, v = (self.write(store, new, start, mask) for store, new in ((self.k, k_new), (self.v, v_new)))
        if gates is not None:
            gates = self.write(gates[..., None], jnp.asarray(log_forget)[..., None], start, mask)[..., 0]
        return KVCache(k, v, lengths, overflowed, gates)

    def write(self, store: Array, new: AnyArray, start: Array, mask: AnyArray | None) -> Array:
        """One of the arrays with new tokens from `start` on in each row."""
        given: Any = {"store": store, "new": new, "start": start} | ({} if mask is None else {"mask": mask})
        heads = f"H{store.shape[-2]}"
        axes = {"store": ("S", heads, "D"), "new": ("T", heads, "D"), "start": (), "mask": ("T",)}
        put = lambda given: {"store": self._put(**given)}
        return over_mesh(put, given, Leading(axes=axes))["store"]

    def _put(self, store: Array, new: Array, start: Array, mask: Array | None = None) -> Array:
        new = new.astype(store.dtype)
        if start.ndim == 0 and mask is None:
            if not stops_programs():  # a refused row starts behind the end, and the slice is clamped
                old = jax.lax.dynamic_slice_in_dim(store, start, new.shape[0], axis=0)
                new = jnp.where(start + new.shape[0] <= self.max_length, new, old)
            return jax.lax.dynamic_update_slice_in_dim(store, new, start, axis=0)
        tokens, start = new.shape[-3], start[..., None]
        token = like(jnp.arange(tokens, dtype=jnp.int32), start)
        slots = start + token
        if mask is not None:
            # A dynamic slice is clamped if padding extends past the end; a scatter drops exactly the padding.
            place = start + running_count(mask, mask.ndim - 1) - 1
            slots = jnp.where(mask, place, self.max_length + token)
        rows = math.prod(self.batch_shape)
        flat = store.reshape(rows, *store.shape[-3:])
        flat = flat.at[jnp.arange(rows)[:, None], slots.reshape(rows, tokens)].set(
            new.reshape(rows, *new.shape[-3:]), mode="drop", unique_indices=True
        )
        return flat.reshape(store.shape)


def empty_rows(
    batch_shape: Any, sizes: dict[str, Any], v_head_dim: Any, dtype: DTypeLike, num_gates: int | None
) -> dict[str, Any]:
    """The fields of an empty cache with the `sizes` of its keys `[S, K, D]`, by the names of the arguments."""
    batch = read_batch_shape(batch_shape)
    *rows, dim, v_dim = read_sizes(
        **sizes, v_head_dim=sizes["head_dim"] if v_head_dim is None else v_head_dim
    )
    check_stored(dtype)
    k, v = (jnp.zeros((*batch, *rows, width), dtype) for width in (dim, v_dim))
    cache = {"k": k, "v": v, "lengths": jnp.zeros(batch, jnp.int32)}
    if num_gates is None:
        return cache
    shape = (*k.shape[:-2], *read_sizes(num_gates=num_gates))
    return cache | {"log_forget": jnp.zeros(shape, accumulator(k.dtype))}


def none_overflowed(lengths: Any) -> Any:
    """False for each row; for what is no array, such as a sharding or an axis, the same."""
    return jnp.zeros_like(lengths, bool) if hasattr(lengths, "dtype") else lengths


def full_message(max_length: int) -> str:
    return (
        f"KVCache is full: max_length={max_length} tokens would be exceeded by this append; "
        "build the cache with a larger max_length."
    )


def check_room(cache: Any, tokens: int, mask: Any, new_lengths: Any = None) -> None:
    """Raises if a row of known length would exceed the capacity by so many tokens, of which those in `mask`, or the first `new_lengths`, are
    real. Caches of several layers may have leading axes more than the rows."""

    def check(values: Any) -> None:
        lengths, mask, count = values
        if mask is not None:
            count = np.sum(np.broadcast_to(mask, (*np.shape(mask)[:-1], tokens)), axis=-1)
        if np.any(np.asarray(lengths) + np.asarray(tokens if count is None else count) > cache.max_length):
            raise ValueError(full_message(cache.max_length))

    check_known((cache.lengths, mask, new_lengths), check)


def refused_rows(cache: Any, count: Array | int) -> Array:
    """Rows that get none of `count` new tokens, because these do not fit or earlier ones did not; bool `[...]`."""
    is_full = (cache.lengths + count > cache.max_length) | cache.overflowed
    return is_full & (jnp.asarray(count) > 0)


def marked(out: Array, cache: Any) -> Array:
    """The output `[..., T, E]` of a call, NaN in rows of the new cache that are closed."""
    if stops_programs() or not hasattr(cache, "overflowed"):
        return out
    nan = jnp.asarray(jnp.nan, out.dtype)
    mark = lambda given: {"out": jnp.where(given["closed"][..., None, None], nan, given["out"])}
    axes: Any = {"out": ("T", "E"), "closed": ()}
    return over_mesh(mark, {"out": out, "closed": cache.overflowed}, Leading(axes=axes))["out"]


def check_new(cache: Any, k_new: Any, v_new: Any, log_forget: Any) -> None:
    """New keys, values and gates have the rows, heads and channels of the cache."""
    for name, new, store in (("k_new", k_new, cache.k), ("v_new", v_new, cache.v)):
        check_stored(store.dtype)
        new = read_array(name, new, "floats", "[..., T, K, D]")
        expected = (*store.shape[:-3], "T", *store.shape[-2:])
        if new.ndim != store.ndim or (*new.shape[:-3], "T", *new.shape[-2:]) != expected:
            shown = "[" + ", ".join(map(str, expected)) + "]"
            raise ValueError(
                f"{name}: expected {shown}, the shape of the cache, received shape {new.shape}; "
                "build the cache with the batch shape, heads and head dimensions of the layer."
            )
    if k_new.shape[-3] != v_new.shape[-3]:
        raise ValueError(
            f"v_new: expected {k_new.shape[-3]} tokens like k_new, received {v_new.shape[-3]}; "
            "append keys and values of the same tokens."
        )
    gates = cache.log_forget
    expected = None if gates is None else (*k_new.shape[:-2], gates.shape[-1])
    if (received := None if log_forget is None else log_forget.shape) != expected:
        raise ValueError(
            f"log_forget: expected {expected}, the gates of the cache, received {received}; build the cache with the layer's init_cache."
        )


def check_stored(dtype: Any) -> None:
    found = named_dtype(dtype)
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise ValueError(
            f"dtype: expected a floating dtype, received {dtype if found is None else found.name!r}, which needs scales; "
            "use PagedKVCache for 8-bit integers."
        )


def read_rows(name: str, value: Any, kind: str, form: str, shape: tuple[int, ...]) -> Array | None:
    """An array of `kind`, broadcast to `shape`."""
    if value is None:
        return None
    value = read_array(name, value, kind, form)
    if not broadcasts(value.shape, shape):
        raise ValueError(
            f"{name}: expected {form} that broadcasts to {shape}, received shape {value.shape}; its rows are those of k_new."
        )
    return jnp.broadcast_to(value, shape)


def _check_lengths(new_lengths: Array, tokens: int) -> None:
    if is_known(new_lengths) and new_lengths.size:
        least, most = int(np.min(new_lengths)), int(np.max(new_lengths))
        if least < 0 or most > tokens:
            raise ValueError(
                f"new_lengths: expected 0 to {tokens}, the tokens of k_new, received {least if least < 0 else most}; lengths count "
                "new tokens only."
            )
