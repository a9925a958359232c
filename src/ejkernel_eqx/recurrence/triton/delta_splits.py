"""Sequences of a delta rule in splits that have programs of their own: the state before each, and the gradient of the state after it.

Both are `edges [sequences, splits, HS, V, D]` in float32; `turns [sequences, splits, HS, D, D]` is what each split makes of the identity.
"""

import dataclasses
import math

from jax import Array

from ...launch import NOTHING, result
from ...launch.sizes import cdiv, padded
from ..spec import heads_of, KEY, RecurrenceArrays, RecurrenceSpec
from . import splits
from .call import Call
from .delta_states import delta_chain_kernel, delta_dstates_kernel, delta_states_kernel
from .tile_sizes import Tile

Arrays = dict[str, Array]
NO_STATES = dict.fromkeys(("out", "final", "states", "written", "local", "turns"), NOTHING)
"""The results of `delta_states_kernel`, none of which are written."""
# Values of a program that goes from split to split, and channels of a step.
_CHAIN_ROWS, _CHAIN_CHANNELS = 16, 64


def edges_of(call: Call, solved: Arrays) -> tuple[Array | None, Array | None]:
    """The state before every split, and `turns`; nothing if sequences are not split."""
    if call.splits == 1:
        return None, None
    heads, dim, values = call.sizes
    tile = call.config.states
    if call.spec.decay == KEY:  # two programs of two stages share a multiprocessor
        tile = dataclasses.replace(tile, num_stages=min(tile.num_stages, 2))
    lead = call.sequences, call.splits, heads
    outputs = NO_STATES | {"local": result(*lead, values, dim), "turns": result(*lead, dim, dim)}
    programs = math.prod(lead) * (cdiv(values, tile.block_v) + cdiv(dim, tile.block_v))
    options = {"OUT": False, "LOCAL": True, "name": "delta_local_states_kernel"}
    results = call.launch(delta_states_kernel, tile, outputs, programs, solved, **options)
    return _chain(call, call.arrays.initial_state, results["local"], results["turns"], True), results["turns"]


def gradients_of(call: Call, inputs: Arrays, dfinal: Array, turns: Array | None) -> Array | None:
    """The gradient of the state after every split."""
    if turns is None:
        return None
    heads, dim, values = call.sizes
    tile, splits = call.config.dstates, call.splits - 1
    outputs = dict.fromkeys(("dstates", "derrors", "dinitial"), NOTHING)
    outputs |= {"local": result(call.sequences, splits, heads, values, dim)}
    arrays, programs = inputs | {"dfinal": None}, call.state_programs(tile, splits)
    options = {"LOCAL": True, "name": "delta_local_dstates_kernel"}
    results = call.launch(delta_dstates_kernel, tile, outputs, programs, arrays, **options)
    return _chain(call, dfinal, results["local"], turns, False)


def _chain(call: Call, edge: Array | None, local: Array, turns: Array, forward: bool) -> Array:
    heads, dim, values = call.sizes
    tile = Tile(padded(dim), min(_CHAIN_ROWS, padded(values)), 4, 1)
    outputs = {"edges": result(call.sequences, call.splits, heads, values, dim)}
    inputs, programs = {"edge": edge, "local": local, "turns": turns}, call.state_programs(tile, 1)
    numbers = {"BLOCK_D": min(_CHAIN_CHANNELS, padded(dim)), "PASS": call.config.float32_dot}
    numbers |= {"GIVEN": edge is not None, "FORWARD": forward}
    return call.launch(delta_chain_kernel, tile, outputs, programs, inputs, **numbers)["edges"]


def saved_axes(arrays: RecurrenceArrays, spec: RecurrenceSpec) -> dict[str, tuple[str, ...]]:
    """The axes, after the leading one, of what the backward pass reads."""
    heads = f"H{heads_of(arrays, spec).out}"
    return splits.by_chunk_size({"edges": ("splits", heads, "V", "D"), "turns": ("splits", heads, "square")})


def to_saved(call: Call, edges: Array | None, turns: Array | None) -> Arrays:
    """Residuals, with the call's leading axis first."""
    if edges is None or turns is None:
        return {}
    return splits.to_saved(call, {"edges": edges, "turns": turns.reshape(*turns.shape[:3], -1)})


def from_saved(call: Call, saved: Arrays) -> tuple[Array | None, Array | None]:
    """The inverse of `to_saved`. They are computed again if this call has other splits."""
    known = splits.saved_splits(call, saved, "edges", "turns")
    if known is None:
        return edges_of(call, saved)
    edges, turns = known
    return edges, turns.reshape(*turns.shape[:3], call.sizes[1], call.sizes[1])
