"""Sequences of a delta rule in splits that have programs of their own: the state before each, and the gradient of the state after it.

Both are `edges [sequences, splits, HS, V, D]` in float32; `turns [sequences, splits, HS, D, D]` is what each split makes of the identity.
"""

import dataclasses
import math
from typing import Any

from jax import Array

from ...launch import NOTHING, result
from ...launch.sizes import cdiv, padded
from ..spec import heads_of, KEY, RecurrenceArrays, RecurrenceSpec
from . import splits
from .call import Call
from .delta_states import delta_chain_kernel, delta_states_kernel
from .rank_one_states import rank_one_states_kernel
from .tile_sizes import Tile

Arrays = dict[str, Any]
_RESULTS = ("out", "final", "states", "written", "local", "turns")
# Values of a program that goes from split to split, and channels of a step.
_CHAIN_ROWS, _CHAIN_CHANNELS = 16, 64


def run_states(
    call: Call, tile: Tile, outputs: Arrays, inputs: Arrays, programs: int = 0, **options: bool
) -> Arrays:
    """A pass over the states of a sequence, or with `REVERSE` over their gradients; results that are not in `outputs` are not written."""
    numbers: Arrays = {"OUT": "out" in outputs, "LOCAL": False, "REVERSE": False, **options}
    if numbers["REVERSE"]:
        numbers["INITIAL"] = True
    kernel, member = delta_states_kernel, "delta"
    if call.arrays.a is not None:
        kernel, member = rank_one_states_kernel, "rank_one"
    numbers["name"] = f"{member}_{'local_' * numbers['LOCAL']}{'d' * numbers['REVERSE']}states_kernel"
    outputs, programs = dict.fromkeys(_RESULTS, NOTHING) | outputs, programs or call.state_programs(tile)
    return call.launch(kernel, tile, outputs, programs, inputs, **numbers)


def edges_of(call: Call, solved: Arrays) -> Arrays:
    """The state before every split, and `turns`; nothing if sequences are not split."""
    if call.splits == 1:
        return {}
    heads, dim, values = call.sizes
    tile = call.config.states
    if call.spec.decay == KEY:  # two programs of two stages share a multiprocessor
        tile = dataclasses.replace(tile, num_stages=min(tile.num_stages, 2))
    lead = call.sequences, call.splits, heads
    outputs = {"local": result(*lead, values, dim), "turns": result(*lead, dim, dim)}
    programs = math.prod(lead) * (cdiv(values, tile.block_v) + cdiv(dim, tile.block_v))
    results = run_states(call, tile, outputs, solved, programs, LOCAL=True)
    turns = {"turns": results["turns"]}
    return turns | _chain(call, call.arrays.initial_state, results["local"], turns, True)


def gradients_of(call: Call, inputs: Arrays, edges: Arrays) -> Arrays:
    """The gradient of the state after every split, from the results of `edges_of`."""
    if not edges:
        return {}
    heads, dim, values = call.sizes
    tile, splits = call.config.dstates, call.splits - 1
    outputs = {"local": result(call.sequences, splits, heads, values, dim)}
    programs, alone = call.state_programs(tile, splits), inputs | {"initial": None}
    results = run_states(call, tile, outputs, alone, programs, LOCAL=True, REVERSE=True)
    return _chain(call, inputs["initial"], results["local"], edges, False)


def _chain(call: Call, edge: Array | None, local: Array, turns: Arrays, forward: bool) -> Arrays:
    heads, dim, values = call.sizes
    tile = Tile(padded(dim), min(_CHAIN_ROWS, padded(values)), 4, 1)
    outputs = {"edges": result(call.sequences, call.splits, heads, values, dim)}
    inputs, programs = {**turns, "edge": edge, "local": local}, call.state_programs(tile, 1)
    numbers = {"BLOCK_D": min(_CHAIN_CHANNELS, padded(dim)), "PASS": call.config.float32_dot}
    numbers |= {"GIVEN": edge is not None, "FORWARD": forward}
    return call.launch(delta_chain_kernel, tile, outputs, programs, inputs, **numbers)


def saved_axes(arrays: RecurrenceArrays, spec: RecurrenceSpec) -> dict[str, tuple[str, ...]]:
    """The axes, after the leading one, of what the backward pass reads."""
    heads = f"H{heads_of(arrays, spec).out}"
    axes = {"edges": ("splits", heads, "V", "D"), "turns": ("splits", heads, "D", "square")}
    return splits.by_chunk_size(axes)


def from_saved(call: Call, saved: Arrays) -> Arrays:
    """The results of `edges_of` from residuals. They are computed again if this call has other splits."""
    return splits.from_saved(call, saved, "edges turns", lambda: edges_of(call, saved))
