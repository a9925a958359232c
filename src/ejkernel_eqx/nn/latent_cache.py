"""`LatentCache`: the dense cache of multi-head latent attention."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from .._shapes import AnyArray, Bool, Float, Int
from .._signatures import Module
from .kv_cache import KVCache, none_overflowed


class LatentCache(Module):
    """Latents and rotary keys of all tokens so far: one row per sequence, each with its own length.

    It is a pure value, as [`ejkernel_eqx.nn.KVCache`][]. `append` returns a new one, which is written in place if the
    old one is donated to `jit`. A cache with batch shape `(layers, B)` can be scanned over together with stacked
    layers.

    - `latent`: `[..., S, R]`, `rope`: `[..., S, Dr]`, with `S` the capacity in tokens.
    - `lengths`: int32 `[...]`, the number of tokens in each row; slots beyond are never read.
    - `overflowed`: bool `[...]`, True for rows that were full, as in `KVCache`.
    """

    latent: Float[Array, "*B S R"]
    rope: Float[Array, "*B S Dr"]
    lengths: Int[Array, "*B"]
    overflowed: Bool[Array, "*B"]

    def __init__(self, latent: Any, rope: Any, lengths: Any, overflowed: Any = None):
        self.latent, self.rope, self.lengths = latent, rope, lengths
        self.overflowed = none_overflowed(lengths) if overflowed is None else overflowed

    @classmethod
    def init(
        cls,
        batch_shape: tuple[int, ...] | int,
        max_length: int,
        latent_dim: int,
        rope_dim: int,
        dtype: DTypeLike = jnp.float32,
    ) -> "LatentCache":
        """Returns an empty cache.

        **Arguments:**

        - `batch_shape`: leading axes; `()` for one sequence, an integer `B` for `(B,)`.
        - `max_length`: capacity `S` of each row, in tokens.
        - `latent_dim`, `rope_dim`: `R` and `Dr`.
        - `dtype`: floating dtype of the stored numbers; new ones are cast to it.
        """
        # One head, with the latent as its key and the rotary key as its value.
        return cls._of(KVCache.init(batch_shape, max_length, 1, latent_dim, rope_dim, dtype))

    @property
    def max_length(self) -> int:
        """Capacity of each row, in tokens."""
        return self.latent.shape[-2]

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return self.latent.shape[:-2]

    @jax.named_scope("ejx.nn.LatentCache.append")
    def append(
        self,
        latent_new: Float[AnyArray, "*B T R"],
        rope_new: Float[AnyArray, "*B T Dr"],
        *,
        new_lengths: Int[AnyArray, "#*B"] | None = None,
        mask: Bool[AnyArray, "#*B #T"] | None = None,
    ) -> "LatentCache":
        """Appends up to `T` tokens to each row, as [`ejkernel_eqx.nn.KVCache.append`][] does, with the same errors."""
        # A latent is a key and a rotary key a value of a single head.
        rows = KVCache(self.latent[..., None, :], self.rope[..., None, :], self.lengths, self.overflowed)
        new = (jnp.asarray(x)[..., None, :] for x in (latent_new, rope_new))
        return self._of(rows.append(*new, new_lengths=new_lengths, mask=mask))

    @classmethod
    def _of(cls, rows: KVCache) -> "LatentCache":
        return cls(rows.k[..., 0, :], rows.v[..., 0, :], rows.lengths, rows.overflowed)
