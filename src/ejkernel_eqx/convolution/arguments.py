"""Checks what a user passes to a convolution and resolves it to `ConvArrays`."""

import dataclasses
import operator
from typing import Any

import jax.numpy as jnp
from jax import Array

from .._broadcast import like
from .._take import take_along
from ..core.along import Along
from ..core.arguments import array, fitting
from ..core.frame import frame_of, step_frame_of
from ..sequences.cumsum import running_count
from ..sequences.packing import ended
from ..sequences.rows import Packing
from ..sequences.tokens import scattered
from .spec import ACTIVATIONS, ConvArrays, Places


def check_activation(activation: str | None) -> str | None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: expected None or 'silu', received {activation!r}.")
    return activation


def check_norm_size(size: Any, sequence_axis: str | None) -> int | None:
    if size is None:
        return None
    if isinstance(size, bool) or not hasattr(size, "__index__") or operator.index(size) < 1:
        raise ValueError(
            f"norm_size: expected a positive integer or None, received {size!r}; it is the size of a head."
        )
    if sequence_axis is not None:
        raise ValueError(
            f"norm_size: expected None with sequence_axis={sequence_axis!r}, received {size}; normalise the result instead."
        )
    return operator.index(size)


def check_heads(size: int | None, channels: int) -> None:
    if size is not None and channels % size:
        raise ValueError(
            f"x: expected a multiple of norm_size={size} channels, received {channels}; heads have equal sizes."
        )


def fits_kernels(size: int | None) -> bool:
    """Returns whether a program has whole heads of this size."""
    return size is not None and size & (size - 1) == 0 and size <= 128


def parameters(x: Array, weight: Any, bias: Any) -> tuple[Array, Array | None]:
    """The weight `[C, W]` and the bias `[C]`."""
    channels = x.shape[-1]
    weight = array("weight", weight, "C W")
    if weight.ndim != 2 or weight.shape[0] != channels or weight.shape[1] < 1:
        raise ValueError(
            f"weight: expected [C, W] with C = {channels}, the last axis of x, received shape {weight.shape}; for published "
            "weights of shape [C, 1, W], drop the middle axis."
        )
    return weight, None if bias is None else fitting("bias", bias, (channels,), "C")


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A resolved call, and the conversion of its results to the caller's layout."""

    arrays: ConvArrays
    state_dtype: Any
    packing: Packing
    along: Along | None = None

    def finish(self, results: dict[str, Array]) -> tuple[Array, Array]:
        state = results["final_state"].astype(self.state_dtype)
        return results["out"], state if self.packing.offsets is not None else jnp.squeeze(state, -3)


def resolve(
    x: Any,
    weight: Any,
    bias: Any,
    initial_state: Any,
    cu_seqlens: Any,
    segment_ids: Any,
    sequence_axis: str | None = None,
) -> Call:
    frame = frame_of(x, "x", "C", cu_seqlens, segment_ids, False, sequence_axis=sequence_axis)
    x, packing = jnp.asarray(x), frame.packing
    weight, bias = parameters(x, weight, bias)
    held = weight.shape[-1] - 1
    arrays = ConvArrays(x, weight, bias)
    if packing.real is not None:
        arrays = arrays._replace(**places_of(packing, held)._asdict())
    state = frame.states(initial_state, (held, x.shape[-1]), "W-1 C").entering
    if state is None:
        return Call(arrays, x.dtype, packing, frame.along)
    entering = state.astype(x.dtype)
    # A row without offsets has one sequence: [*, K, C] to [*, 1, K, C].
    entering = entering if packing.offsets is not None else jnp.expand_dims(entering, -3)
    return Call(arrays._replace(initial_state=entering), state.dtype, packing, frame.along)


def places_of(packing: Packing, held: int) -> Places:
    """The positions of real tokens, contiguous within each row."""
    real = packing.real
    assert real is not None
    axis = real.ndim - 1
    length = real.shape[-1]
    rank = running_count(real, axis) - 1
    # Tables that are made from one of the rows are split over a mesh as the rows are. In some versions of JAX those of `zeros_like` are not.
    tokens = rank * 0 + like(jnp.arange(length, dtype=jnp.int32), rank)
    total = rank[..., -1:] + 1 if length else jnp.zeros((*real.shape[:-1], 1), jnp.int32)
    # Padding comes last, in its original order: a permutation.
    goes = jnp.where(real, rank, total + tokens - rank - 1)
    order = scattered(goes, tokens)
    is_real = tokens < total
    if packing.offsets is not None:
        # Places count real tokens, so padding before the first sequence is subtracted.
        offsets = packing.offsets.astype(jnp.int32) - packing.offsets[:1].astype(jnp.int32)
        ends = offsets[1:]
        # Padding belongs to no sequence, but the last one keeps its indices valid.
        number = jnp.minimum(ended(ends, length), ends.shape[0] - 1)
        spans = jnp.stack([offsets[:-1], ends] * 2, -1)
        first, end = offsets[number], ends[number]
        enter = leave = number
    else:
        assert packing.starts is not None
        taken = take_along(packing.starts, order, axis)
        first = jnp.where(taken < 0, 0, take_along(rank, jnp.maximum(taken, 0), axis))
        # The final state is that of the last segment, which begins at the largest start.
        last = jnp.where(is_real, first, 0).max(axis, keepdims=True, initial=0)
        end = jnp.zeros_like(rank) + total
        # The initial state enters the first segment alone, and only the last one leaves a state.
        enter, leave = jnp.where(first == 0, 0, -1), jnp.where(first == last, 0, -1)
        first_end = jnp.where(is_real & (first == 0), tokens + 1, 0).max(axis, keepdims=True, initial=0)
        spans = jnp.concatenate([jnp.zeros_like(total), first_end, last, total], -1)[..., None, :]
    entry = held - (end - tokens)  # counted from the end, as the last token is the newest
    leaves = is_real & (leave >= 0) & (entry >= 0)
    known = lambda x: jnp.where(is_real, x, -1)
    leave = jnp.where(leaves, leave * held + entry, -1)
    return Places(order, known(first), known(enter), leave, spans)


def resolve_step(
    x: Any, weight: Any, bias: Any, state: Any, state_indices: Any
) -> tuple[Array, Array, Array | None, Array, Array | None]:
    frame = step_frame_of(x, "x", "C", state_indices)
    x = jnp.asarray(x)
    weight, bias = parameters(x, weight, bias)
    return x, weight, bias, *frame.row_states(state, (weight.shape[-1] - 1, x.shape[-1]), "W-1 C")
