"""The arrays of a call of multi-head latent attention in its expanded form, in which every head has keys and values of its own.

The static half of a call is an `AttentionSpec`. Letters: `B` batch, `T` queries, `S` keys, `H` heads, `Dn` and `Dr` channels of a key without
and with a rotation, `V` value dim.
"""

from collections import namedtuple

import jax.numpy as jnp

from ..attention.spec import AttentionArrays, AttentionGrads

_FIELDS = ("q", "k", "k_rope", *AttentionArrays._fields[2:])


class LatentArrays(namedtuple("LatentArrays", _FIELDS, defaults=AttentionArrays._field_defaults.values())):
    """The arrays of a call: those of attention, whose `K` is `H`, with keys in two parts. `q [B, T, H, Dn + Dr]`, `k [B, S, H, Dn]`, `k_rope
    [B, S, Dr]` of all heads, `v [B, S, H, V]`; the others, `None` if absent, are described at `AttentionArrays`."""

    @property
    def apart(self) -> AttentionArrays:
        """The arrays without the rotary keys, so that keys are narrower than queries."""
        return AttentionArrays(**{name: x for name, x in self._asdict().items() if name != "k_rope"})

    @property
    def whole(self) -> AttentionArrays:
        """The arrays with the rotary keys repeated for every head, as dense attention takes them."""
        shape = (*self.k.shape[:-1], self.k_rope.shape[-1])
        # Dense attention knows one width of keys, so the shared part is repeated: `[B, S, H, Dr]`.
        rope = jnp.broadcast_to(self.k_rope[..., None, :], shape)
        return self.apart._replace(k=jnp.concatenate([self.k, rope], axis=-1))


LEARNED = ("q", "k", "k_rope", "v", "bias", "alibi_slopes", "sinks")
"""The arrays that have gradients."""


LatentGrads = namedtuple("LatentGrads", (*AttentionGrads._fields, "k_rope"))
"""Cotangents of the differentiable arrays, `None` for absent ones. That of rotary keys is at least float32."""
