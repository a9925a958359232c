"""The all-to-all form: devices exchange a part of the tokens of all heads for all tokens of a part of the heads, and back.

Jacobs et al., "DeepSpeed Ulysses" (2023). A device runs one kernel's call over the whole sequence for its heads.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from ...sequences import reorder_sequence, restore_sequence
from ..spec import AttentionArrays, AttentionGrads
from .spec import RingSpec


class Exchange:
    """One call on one device, inside `shard_map` over its axis."""

    def __init__(self, arrays: AttentionArrays, spec: RingSpec):
        self.spec, self.devices = spec, lax.axis_size(spec.axis)
        self.index = lax.axis_index(spec.axis)
        self.heads, self.kv_heads = arrays.q.shape[2], arrays.k.shape[2]
        self.copies = max(self.devices // self.kv_heads, 1)
        """How many devices read each key head."""

    def in_time(self, x: Array, axis: int) -> Array:
        return restore_sequence(x, self.devices, axis=axis) if self.spec.order == "zigzag" else x

    def as_stored(self, x: Array, axis: int) -> Array:
        return reorder_sequence(x, self.devices, axis=axis) if self.spec.order == "zigzag" else x

    def to_heads(self, x: Array, tokens: int = 1, heads: int = 2) -> Array:
        """`[B, T / n, H, D]` to `[B, T, H / n, D]`, in temporal order, for the numbers of these two axes."""
        return self.in_time(lax.all_to_all(x, self.spec.axis, heads, tokens, tiled=True), tokens)

    def to_tokens(self, x: Array, tokens: int = 1, heads: int = 2) -> Array:
        """Undoes `to_heads`."""
        return lax.all_to_all(self.as_stored(x, tokens), self.spec.axis, tokens, heads, tiled=True)

    def keys_to_heads(self, x: Array) -> Array:
        return self.to_heads(jnp.repeat(x, self.copies, axis=2) if self.copies > 1 else x)

    def gradient_to_tokens(self, x: Array) -> Array:
        """Of keys or values; summed over the devices that read the same head."""
        x = self.to_tokens(x)
        if self.copies == 1:
            return x
        each = x.reshape(*x.shape[:2], self.kv_heads, self.copies, x.shape[3])
        return each.astype(jnp.float32).sum(3).astype(x.dtype)

    def own_heads(self, x: Array | None) -> Array | None:
        """The heads of this device, of an array with heads on axis 1."""
        if x is None or x.shape[1] == 1 != self.heads:
            return x
        size = self.heads // self.devices
        return lax.dynamic_slice_in_dim(x, self.index * size, size, 1)

    def every_head(self, gradient: Array | None, like: Array | None) -> Array | None:
        """This device's part of a sum over devices."""
        if gradient is None or like is None or gradient.shape[1] == like.shape[1]:
            return gradient
        size = self.heads // self.devices
        whole = jnp.zeros_like(gradient, shape=(gradient.shape[0], self.heads, *gradient.shape[2:]))
        whole = whole + gradient.sum() * 0  # varies over devices, as what is put into it
        return lax.dynamic_update_slice_in_dim(whole, gradient, self.index * size, 1)

    def ids(self, x: Array | None) -> Array | None:
        """Segment ids of all tokens: four bytes each."""
        return None if x is None else self.in_time(lax.all_gather(x, self.spec.axis, axis=1, tiled=True), 1)

    def over_scores(self, x: Array | None) -> Array | None:
        """An array over scores, which has one row for all queries."""
        x = self.own_heads(x)
        return x if x is None or x.shape[3] == 1 else self.in_time(x, 3)

    def arrays(self, given: AttentionArrays) -> AttentionArrays:
        moves = {
            self.keys_to_heads: ("k", "v"),
            self.over_scores: ("bias", "mask"),
            self.own_heads: ("alibi_slopes", "sinks", "seeds"),
            self.ids: ("q_segments", "kv_segments"),
        }
        moved = {name: move(getattr(given, name)) for move, names in moves.items() for name in names}
        return given._replace(q=self.to_heads(given.q), **moved)


def forward(platform: Any, arrays: AttentionArrays, spec: RingSpec, config: Any) -> tuple[Array, Array]:
    """`out [B, T, H, V]` and `lse [B, H, T]` of this device's queries."""
    exchange = Exchange(arrays, spec)
    out, lse = platform.forward(exchange.arrays(arrays), spec.plain(), config)
    return exchange.to_tokens(out), exchange.to_tokens(lse, 2, 1)


def backward(
    platform: Any, arrays: AttentionArrays, spec: RingSpec, config: Any, *results: Array
) -> AttentionGrads:
    """The gradients of this device's queries, keys and values, and its parts of those of other arrays, from `out`, `lse` and their cotangents."""
    exchange = Exchange(arrays, spec)
    of_heads = [exchange.to_heads(x) if x.ndim == 4 else exchange.to_heads(x, 2, 1) for x in results]
    grads = platform.backward(exchange.arrays(arrays), spec.plain(), config, *of_heads)
    dbias = grads.bias
    if dbias is not None and dbias.shape[3] > 1:
        dbias = exchange.as_stored(dbias, 3)
    return AttentionGrads(
        exchange.to_tokens(grads.q),
        exchange.gradient_to_tokens(grads.k),
        exchange.gradient_to_tokens(grads.v),
        exchange.every_head(dbias, arrays.bias),
        exchange.every_head(grads.alibi_slopes, arrays.alibi_slopes),
        exchange.every_head(grads.sinks, arrays.sinks),
    )
