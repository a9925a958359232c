"""Tokens split over a mesh axis, inside `shard_map`: how states pass from each device to the next ones.

What happens to a state on its way through the tokens of one device is an affine function of it. Every device computes its own, all devices
gather them, and each applies those of the devices before it in order. A segment that begins on a device takes nothing from those before.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._take import take_along
from ..parallel.mesh import inside_manual_mesh
from ..sequences.rows import Packing


def check_sequence_axis(axis: Any) -> str | None:
    if axis is not None and not isinstance(axis, str):
        raise ValueError(f"sequence_axis: expected the name of a mesh axis or None, received {axis!r}.")
    return axis


@dataclasses.dataclass(frozen=True, eq=False)
class Along:
    """The devices that share the tokens of a call, and the packing of those on this one."""

    axis: str
    devices: tuple[int, ...]
    """In the order of the kernels' time: the last first in a reversed call."""
    packing: Packing

    def carry(
        self, step: Callable[[Any, Array], Array], own: Any, initial_state: Array
    ) -> tuple[Array, Array]:
        """The state that enters this device's tokens, and the one after all tokens. `step(own, state)` is the state after the tokens of the device
        that `own`, arrays with the leading axes of the state, belongs to. Zeros enter where a device begins with a new segment."""
        every = lax.all_gather(own, self.axis)
        state, entering = initial_state, {}
        for device, joins in zip(self.devices, self._joins(), strict=True):
            if joins is not None:
                state = jnp.where(joins.reshape(*joins.shape, *(1,) * (state.ndim - joins.ndim)), state, 0)
            entering[device] = state
            state = step(jax.tree.map(lambda x, device=device: x[device], every), state)
        ordered = jnp.stack([entering[device] for device in range(len(entering))])
        return lax.dynamic_index_in_dim(ordered, lax.axis_index(self.axis), 0, keepdims=False), state

    def last(self, state: Array) -> Array:
        """The state of the device with the last tokens, on all devices."""
        is_last = lax.axis_index(self.axis) == self.devices[-1]
        return lax.psum(jnp.where(is_last, state, 0), self.axis)

    def _joins(self) -> list[Array | None]:
        """For every device in order and each row: whether its first token belongs to the segment of the last token before; or it has none, or none
        are before. `None`: always."""
        ids = self.packing.ids
        if ids is None:
            return [None] * len(self.devices)
        real, axis = ids >= 0, ids.ndim - 1
        first = jnp.argmax(real, axis, keepdims=True)
        final = ids.shape[-1] - 1 - jnp.argmax(jnp.flip(real, axis), axis, keepdims=True)
        ends = [take_along(ids, index, axis)[..., 0] for index in (first, final)]
        begins, finishes, filled = lax.all_gather((*ends, real.any(axis)), self.axis)
        latest, seen = jnp.zeros_like(ends[0]), jnp.zeros_like(real[..., 0])
        joins = []
        for device in self.devices:
            joins.append(~filled[device] | ~seen | (begins[device] == latest))
            latest = jnp.where(filled[device], finishes[device], latest)
            seen = seen | filled[device]
        return joins


def along_of(axis: str | None, packing: Packing) -> Along | None:
    """Returns how the tokens of a call are split; `None` outside of `shard_map`, where a call has all of them."""
    if axis is None or not inside_manual_mesh():
        return None
    mesh = jax.sharding.get_abstract_mesh()
    if axis not in mesh.manual_axes:
        raise ValueError(
            f"sequence_axis: expected an axis that shard_map has made manual, {', '.join(map(repr, mesh.manual_axes))}, received {axis!r}; "
            "add it to axis_names of shard_map."
        )
    if packing.offsets is not None:
        raise ValueError(
            "cu_seqlens: expected None in a call whose tokens are split over sequence_axis, received offsets; use segment_ids, whose values each "
            "device has for its own tokens."
        )
    if mesh.shape[axis] == 1:
        return None
    devices = tuple(range(mesh.shape[axis]))
    return Along(axis, devices[::-1] if packing.reverse else devices, packing)


def first_tokens(starts: Array | None, like_tokens: Array) -> Array | None:
    """Returns which tokens `[*, T, 1..]` the entering state reaches: those of the row's first segment. `None`: all."""
    if starts is None:
        return None
    reached = starts < 0
    return reached.reshape(*reached.shape, *(1,) * (like_tokens.ndim - reached.ndim))


def passed_on(decay: Array, starts: Array | None) -> Array:
    """The factor of a state over all tokens of a row, zero if a segment begins among them."""
    if starts is None:
        return decay
    whole = starts[..., -1] < 0
    return jnp.where(whole.reshape(*whole.shape, *(1,) * (decay.ndim - whole.ndim)), decay, 0)
