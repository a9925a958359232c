"""The arrays of a call of multi-head latent attention in its expanded form, in which every head has keys and values of its own.

The static half of a call is an `AttentionSpec`. Letters: `B` batch, `T` queries, `S` keys, `H` heads, `Dn` and `Dr` channels of a key without
and with a rotation, `V` value dim.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from ..attention.spec import AttentionArrays, RowRanges


class LatentArrays(NamedTuple):
    """The arrays of a call; what is visible is described as in `AttentionArrays`."""

    q: Array  # [B, T, H, Dn + Dr]
    k: Array  # [B, S, H, Dn]
    k_rope: Array  # [B, S, Dr], of all heads
    v: Array  # [B, S, H, V]
    bias: Array | None = None  # [B or its divisor, H or 1, T or 1, S or 1], any float dtype
    alibi_slopes: Array | None = None  # [B or 1, H] float32
    sinks: Array | None = None  # [B or 1, H] float32
    mask: Array | None = None  # bool [B or its divisor, H or 1, T or 1, S or 1]
    q_segments: Array | None = None  # int32 [B or 1, T]
    kv_segments: Array | None = None  # int32 [B or 1, S]
    rows: RowRanges | None = None
    seeds: Array | None = None  # uint32 [B, H, 2]; given iff dropout_rate > 0
    blocks: Array | None = None  # bool [B or 1, H or 1, blocks of queries, blocks of keys]
    heads: Array | None = None  # int32 [1, H], the number of each head

    @property
    def apart(self) -> AttentionArrays:
        """The arrays without the rotary keys, so that keys are narrower than queries."""
        return AttentionArrays(**{name: x for name, x in self._asdict().items() if name != "k_rope"})

    @property
    def whole(self) -> AttentionArrays:
        """The arrays with the rotary keys repeated for every head, as dense attention takes them."""
        shape = (*self.k.shape[:-1], self.k_rope.shape[-1])
        rope = jnp.broadcast_to(self.k_rope[..., None, :], shape)
        return self.apart._replace(k=jnp.concatenate([self.k, rope], axis=-1))


LEARNED = ("q", "k", "k_rope", "v", "bias", "alibi_slopes", "sinks")
"""The arrays that have gradients."""


class LatentGrads(NamedTuple):
    """Cotangents of the differentiable arrays; that of the rotary keys is at least float32."""

    q: Array
    k: Array
    k_rope: Array
    v: Array
    bias: Array | None = None
    alibi_slopes: Array | None = None
    sinks: Array | None = None
