"""`RollingKVCache`: a key/value cache of one window, for decoding of any length in bounded memory."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from .._shapes import AnyArray, Bool, Float, Int
from .._signatures import Module
from ..parallel import Leading, over_mesh
from .kv_cache import check_new, empty_rows, read_rows


class WindowKeys(NamedTuple):
    """Keys and values in the order of positions: stored ones, then new ones. The first new one is key `W`."""

    k: Float[Array, "*B W+T K D"]
    v: Float[Array, "*B W+T K V"]
    real: Bool[Array, "*B W+T"]  # False for empty slots and padding
    log_forget: Float[Array, "*B W+T H"] | None


class RollingKVCache(Module):
    """Keys and values of the last `W` tokens of each row, for layers with a static sliding window of `W` keys.

    The token at position $p$ is stored in slot $p \\bmod W$, so the cache is never full. New tokens are attended to before they replace old
    ones, so prompts and chunks may be longer than `W`. The layer returns the same as with a `KVCache` of any length; each call copies
    the `W` stored keys and values once, to order them. Immutable, like `KVCache`.

    - `k`: `[..., W, K, D]`, `v`: `[..., W, K, V]`.
    - `lengths`: int32 `[...]`, the number of tokens each row has received in total.
    - `log_forget`: as in `KVCache`, `[..., W, H]`; default `None`.
    """

    k: Float[Array, "*B W K D"]
    v: Float[Array, "*B W K V"]
    lengths: Int[Array, "*B"]
    log_forget: Float[Array, "*B W H"] | None = None

    @classmethod
    def init(
        cls,
        batch_shape: tuple[int, ...] | int,
        window: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        dtype: DTypeLike = jnp.float32,
        *,
        num_gates: int | None = None,
    ) -> "RollingKVCache":
        """Returns an empty cache with `window` slots (`W`) per row. The other arguments are those of `KVCache.init`."""
        sizes = {"window": window, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        return cls(**empty_rows(batch_shape, sizes, v_head_dim, dtype, num_gates))

    @property
    def window(self) -> int:
        """The number of slots of each row."""
        return self.k.shape[-3]

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return self.k.shape[:-3]

    @jax.named_scope("ejx.nn.RollingKVCache.append")
    def append(
        self,
        k_new: Float[AnyArray, "*B T K D"],
        v_new: Float[AnyArray, "*B T K V"],
        *,
        mask: Bool[AnyArray, "#*B #T"] | None = None,
        log_forget: Float[AnyArray, "*B T H"] | None = None,
    ) -> tuple["RollingKVCache", WindowKeys]:
        """Appends up to `T` tokens to each row, and returns the keys and values that they may see.

        **Arguments:**

        - `k_new`, `v_new`: `[..., T, K, D]` and `[..., T, K, V]`.
        - `mask`: bool `[..., T]`, True for real tokens, which must be contiguous in each row.
        - `log_forget`: `[..., T, H]`, of the new tokens, for a cache that has gates.

        **Returns:** the new cache, and a tuple `(k [..., W + T, K, D], v [..., W + T, K, V], real [..., W + T], log_forget)`. Key
        `W + t` is new token `t`. The tokens before it precede it. Raises `ValueError` for invalid arguments.
        """
        check_new(self, k_new, v_new, log_forget)
        k_new, v_new = jnp.asarray(k_new), jnp.asarray(v_new)
        tokens = k_new.shape[-3]
        mask = read_rows("mask", mask, "booleans", "[..., T]", (*self.batch_shape, tokens))
        real = jnp.ones((*self.batch_shape, tokens), bool) if mask is None else mask
        left = (
            jnp.argmax(real, axis=-1).astype(jnp.int32) if tokens else jnp.zeros(self.batch_shape, jnp.int32)
        )
        count = jnp.sum(real, axis=-1, dtype=jnp.int32)
        # The source of each visible token: a slot, or a new token.
        place = jax.lax.broadcasted_iota(
            jnp.int32, (*self.batch_shape, self.window + tokens), len(self.batch_shape)
        )
        position = self.lengths[..., None] + place - self.window - left[..., None]
        is_new = place >= self.window + left[..., None]
        source = jnp.where(is_new, place, position % self.window)
        held = (place >= left[..., None]) & (position >= 0)
        there = jnp.where(is_new, position < (self.lengths + count)[..., None], held)
        # The slots of new tokens: only of the last ones, which no later token replaces.
        rank = jax.lax.broadcasted_iota(jnp.int32, real.shape, real.ndim - 1) - left[..., None]
        kept = real & (rank >= (count - self.window)[..., None])
        outside = self.window + rank + left[..., None]
        target = jnp.where(kept, (self.lengths[..., None] + rank) % self.window, outside)
        (k, k_seen), (v, v_seen) = (
            self._roll(store, new, source, target) for store, new in ((self.k, k_new), (self.v, v_new))
        )
        gates = seen = None
        if self.log_forget is not None and log_forget is not None:
            new = jnp.asarray(log_forget)[..., None]
            gates, seen = (x[..., 0] for x in self._roll(self.log_forget[..., None], new, source, target))
        return RollingKVCache(k, v, self.lengths + count, gates), WindowKeys(k_seen, v_seen, there, seen)

    def _roll(self, store: Array, new: Array, source: Array, target: Array) -> tuple[Array, Array]:
        """The store with new tokens written at `target`, and the old and new tokens in the order of `source`."""
        heads = f"H{store.shape[-2]}"
        axes = {"store": ("W", heads, "D"), "new": ("T", heads, "D"), "seen": ("S", heads, "D")}
        axes |= {"source": ("S",), "target": ("T",)}
        given = {"store": store, "new": new.astype(store.dtype), "source": source, "target": target}
        found = over_mesh(lambda given: _rolled(**given), given, Leading(axes=axes))
        return found["store"], found["seen"]


def _rolled(store: Array, new: Array, source: Array, target: Array) -> dict[str, Array]:
    lead = store.shape[:-3]
    rows = math.prod(lead)
    store, new = (x.reshape(rows, *x.shape[-3:]) for x in (store, new))
    source, target = (x.reshape(rows, x.shape[-1]) for x in (source, target))
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    both = jnp.concatenate([store, new], axis=1)
    seen = both.at[row, source].get(mode="promise_in_bounds")
    store = store.at[row, target].set(new, mode="drop", unique_indices=True)
    return {name: x.reshape(*lead, *x.shape[1:]) for name, x in (("store", store), ("seen", seen))}
