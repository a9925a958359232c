"""Attention whose tokens a mesh axis splits, by exchanging heads for tokens: each device gets all tokens of some heads, and returns its own.

Jacobs et al., "DeepSpeed Ulysses" (2023). What heads share, such as latents, is gathered.
"""

import dataclasses
from typing import Any, TypeGuard

import jax.numpy as jnp
from jax import Array, lax

from .._shapes import Float, Int
from ..attention.ring.arguments import Split
from ..core.split_tokens import over_sequence_axis
from ..parallel.mesh import inside_manual_mesh
from ..sequences import reorder_sequence, restore_sequence
from .projection import product
from .split_attention import check_offsets
from .tokens import split_heads


class HeadsForTokens:
    """The exchange of one call; without an axis, each device has all tokens of all heads. `stored`: the number of devices whose zigzag order
    the tokens have, or 1. `groups`: of heads that stay together. If the devices do not divide them, some get empty ones."""

    def __init__(self, axis: str | None, stored: int, groups: int):
        self.axis, self.stored = axis, stored
        self.devices = 1 if axis is None else lax.axis_size(axis)
        self.groups, self.empty = groups, -groups % self.devices

    def whole(self, x: Array, axis: int) -> Array:
        """All tokens of what heads share, in temporal order."""
        if self.axis is not None:
            x = lax.all_gather(x, self.axis, axis=axis, tiled=True)
        return self._in_time(x, axis)

    def own(self, x: Array) -> Array:
        """This device's part of an array with heads on its first axis."""
        if self.axis is None:
            return x
        x = self._padded(x, 0)
        size = x.shape[0] // self.devices
        return lax.dynamic_slice_in_dim(x, lax.axis_index(self.axis) * size, size, 0)

    def to_heads(self, x: Array) -> Array:
        """`[..., T / n, H, D]` to `[..., T, H / n, D]`, in temporal order."""
        heads = x.ndim - 2
        if self.axis is not None:
            x = lax.all_to_all(self._padded(x, heads), self.axis, heads, heads - 1, tiled=True)
        return self._in_time(x, heads - 1)

    def to_tokens(self, x: Array, num_heads: int) -> Array:
        """Undoes `to_heads`."""
        heads = x.ndim - 2
        if self.stored > 1:
            x = reorder_sequence(x, self.stored, axis=heads - 1)
        if self.axis is not None:
            x = lax.all_to_all(x, self.axis, heads - 1, heads, tiled=True)
        return lax.slice_in_dim(x, 0, num_heads, axis=heads)

    def _in_time(self, x: Array, axis: int) -> Array:
        return x if self.stored == 1 else restore_sequence(x, self.stored, axis=axis)

    def _padded(self, x: Array, axis: int) -> Array:
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, x.shape[axis] // self.groups * self.empty)
        return jnp.pad(x, widths) if self.empty else x


def over_tokens(split: Split | None, x: Array, cu_seqlens: Any, mask: Any = None) -> TypeGuard[Split]:
    """Returns whether a layer exchanges heads for the tokens of `x` `[..., T, E]`. Those of packed sequences by offsets are gathered instead."""
    if split is None:
        return False
    if mask is not None:
        raise ValueError(
            f"mask: expected None with sequence_axis={split.axis!r}, received {type(mask).__name__}; give segment_ids or padding_mask, or build the "
            "layer without the axis."
        )
    if cu_seqlens is not None:
        check_offsets(split.times(x, x.shape[-2]), cu_seqlens)
    return cu_seqlens is None


@dataclasses.dataclass(frozen=True, eq=False)
class OverTokens:
    """A layer's attention over tokens that are split, as an operation for `over_sequence_axis`."""

    layer: Any
    sequence_axis: str | None
    stored: int

    @classmethod
    def of(cls, layer: Any, split: Split, q: Array, **more: Any) -> Any:
        """The operation for queries `[..., T, H, D]` on the mesh that they are on. Raises `ValueError` if it cannot split them."""
        split.over({"q": q})
        return cls(layer, split.axis, split.devices(q) if split.order == "zigzag" else 1, **more)

    @property
    def plan(self) -> Any:
        return self.layer.attention.plan

    def exchange(self, groups: int) -> HeadsForTokens:
        return HeadsForTokens(self.sequence_axis if inside_manual_mesh() else None, self.stored, groups)


class LatentOverTokens(OverTokens):
    """Latent attention: devices gather latents, and expand those of all tokens to keys and values of their own heads."""

    @over_sequence_axis()
    def __call__(
        self,
        q: Float[Array, "*B T H D"],
        latent: Float[Array, "*B T Rk"],
        k_rope: Float[Array, "*B T Dr"],
        w_uk: Float[Array, "H Dn Rk"],
        w_uv: Float[Array, "H V Rk"],
        segment_ids: Int[Array, "*B T"] | None = None,
    ) -> Float[Array, "*B T H V"]:
        heads = q.shape[-2]
        exchange = self.exchange(heads)
        latent, k_rope = (exchange.whole(x, x.ndim - 2) for x in (latent, k_rope))
        ids = None if segment_ids is None else exchange.whole(segment_ids, segment_ids.ndim - 1)
        own = [exchange.own(w) for w in (w_uk, w_uv)]
        k, v = (split_heads(product(latent, w.reshape(-1, w.shape[-1])), w.shape[0]) for w in own)
        out = self.layer.attention(exchange.to_heads(q), k, k_rope, v, segment_ids=ids)
        return exchange.to_tokens(out, heads)
