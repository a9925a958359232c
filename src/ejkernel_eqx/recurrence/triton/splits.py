"""Sequences in splits that have programs of their own: what each does to the state that passes through it.

A split decays the state before it and adds to it: `local [sequences, splits, HS, D, V]` is what it makes of a zero state, and
`passed [sequences, splits, HS, D]` its decay, both in float32.
"""

import dataclasses

from jax import Array

from ...dispatch import facts_of_calls
from ...launch import NOTHING, result
from ..spec import CONSTANT, heads_of, RecurrenceArrays, RecurrenceSpec, SCALAR
from . import states_phase
from .call import Call
from .tile_sizes import CHUNK_SIZES, Tile

Effects = dict[str, Array]
"""By name; empty if sequences are not split."""
_MOST_LOADED = 144 * 1024  # bytes of shared memory for what a program loads ahead
_AXES = {"local": ("D", "V"), "passed": ("D",)}  # those after splits and heads


def effects_of(call: Call, dout: Array | None = None) -> Effects:
    """The effects of every split except the last on states; with `dout`, of every split except the first on gradients of states."""
    if call.splits == 1:
        return {}
    shape, (heads, dim, values) = (call.sequences, call.splits), call.sizes
    effects = {"local": result(*shape, heads, dim, values), "passed": result(*shape, heads, dim)}
    if dout is None:
        tile, kernel, others = call.config.states, states_phase.states_kernel, ("states", "final")
    else:
        tile, kernel, others = call.config.dstates, states_phase.dstates_kernel, ("dstates", "dinitial")
    if call.spec.decay in (CONSTANT, SCALAR):
        tile = _ahead(tile, call)
    results = call.launch(
        kernel,
        tile,
        effects | dict.fromkeys(others, NOTHING),
        call.state_programs(tile, call.splits - 1),
        {"do": dout, "dfinal": None},
        name=f"local_{kernel.fn.__name__}",
        LOCAL=True,
    )
    return {name: results[name] for name in effects}


def _ahead(tile: Tile, call: Call) -> Tile:
    """The tile with more stages on Hopper, where it was measured; on Blackwell it would spill. The few splits that are read from end to end, of
    heads that hardly decay, wait for memory in each step."""
    device = facts_of_calls()
    if device.vendor != "nvidia" or device.capability != (9, 0) or tile.num_stages == 1:
        return tile
    step = call.config.chunk_size * (tile.block_k + tile.block_v) * call.arrays.q.dtype.itemsize
    return dataclasses.replace(
        tile, num_stages=max(tile.num_stages, min(2 * tile.num_stages, _MOST_LOADED // step))
    )


def saved_axes(arrays: RecurrenceArrays, spec: RecurrenceSpec) -> dict[str, tuple[str, ...]]:
    """The axes, after the leading one, of effects as residuals. Names include the chunk size, on which the lengths of splits depend."""
    heads = f"H{heads_of(arrays, spec).out}"
    return {f"{name}{size}": ("splits", heads, *_AXES[name]) for name in _AXES for size in CHUNK_SIZES}


def to_saved(call: Call, effects: Effects) -> dict[str, Array]:
    """Effects as residuals, with the call's leading axis first."""
    batch, size = call.arrays.q.shape[0], call.config.chunk_size
    return {f"{name}{size}": x.reshape(batch, -1, *x.shape[2:]) for name, x in effects.items()}


def from_saved(call: Call, saved: dict[str, Array]) -> Effects:
    """The inverse of `to_saved`. They are computed again if this call has other splits, as a pullback that is mapped may have."""
    found = {name: saved.get(f"{name}{call.config.chunk_size}") for name in _AXES}
    batch = call.arrays.q.shape[0]
    expected = batch, call.sequences // batch * call.splits
    if any(x is None or x.shape[:2] != expected for x in found.values()):
        return effects_of(call)
    return {
        name: x.reshape(call.sequences, call.splits, *x.shape[2:])
        for name, x in found.items()
        if x is not None
    }
