"""A convolution whose tokens are split over a mesh axis: each device starts from the last inputs of those before it."""

import jax.numpy as jnp
from jax import Array

from .._broadcast import like
from .._take import take_along
from ..core.along import Along
from .spec import ConvArrays
from .xla import entering, final_state


def with_entering(along: Along, arrays: ConvArrays) -> tuple[ConvArrays, Array]:
    """The call with the inputs before this device's first token as initial state, and the last inputs of all devices, `[*, 1, K, C]`."""
    local, held = final_state(arrays._replace(initial_state=None)), arrays.weight.shape[-1] - 1

    def step(part: tuple[Array, Array], state: Array) -> Array:
        last, count = part
        # The entering inputs move towards the start by the number of newer ones.
        newer = count[..., None]
        at = like(jnp.arange(held, dtype=jnp.int32), newer) + newer
        moved = take_along(state, jnp.minimum(at, max(held - 1, 0))[..., None], -2)
        return last + jnp.where((at < held)[..., None], moved, 0)

    first, final = along.carry(step, (local, _kept(arrays, held)), entering(arrays))
    return arrays._replace(initial_state=first), along.last(final)


def _kept(arrays: ConvArrays, held: int) -> Array:
    """The number of inputs by which the entering state moves, int32 `[*, 1]`; at least `held` if a segment begins among the tokens."""
    lead, length = arrays.x.shape[:-2], arrays.x.shape[-2]
    if arrays.places is None:
        return jnp.full((*lead, 1), length, jnp.int32)
    enter_first, enter_end, first, end = (arrays.places.spans[..., i] for i in range(4))
    whole = (enter_first == first) & (enter_end == end)
    # Where a segment begins on this device, nothing of the entering state is left after it.
    return jnp.where(whole, end - first, like(jnp.int32(held), end))
