"""Sequences of a delta rule in splits that have programs of their own: the state before each, and the gradient of the state after it.

Both are `edges [sequences, splits, HS, V, D]` in float32; `turns [sequences, splits, HS, D, D]` is what each split makes of the identity.
"""

import dataclasses

from jax import Array

from ...launch import NOTHING, result
from ...launch.sizes import cdiv, padded
from ..spec import heads_of, KEY, RecurrenceArrays, RecurrenceSpec
from .call import Call
from .delta_states import delta_chain_kernel, delta_dstates_kernel, delta_states_kernel
from .tile_sizes import CHUNK_SIZES, Tile

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
    results = call.launch(
        delta_states_kernel,
        tile,
        NO_STATES | {"local": result(*lead, values, dim), "turns": result(*lead, dim, dim)},
        call.sequences * call.splits * heads * (cdiv(values, tile.block_v) + cdiv(dim, tile.block_v)),
        solved,
        OUT=False,
        LOCAL=True,
        name="delta_local_states_kernel",
    )
    return _chain(call, call.arrays.initial_state, results["local"], results["turns"], True), results["turns"]


def gradients_of(call: Call, given: Arrays, dfinal: Array, turns: Array | None) -> Array | None:
    """The gradient of the state after every split."""
    if turns is None:
        return None
    heads, dim, values = call.sizes
    tile = call.config.dstates
    results = call.launch(
        delta_dstates_kernel,
        tile,
        dict.fromkeys(("dstates", "derrors", "dinitial"), NOTHING)
        | {"local": result(call.sequences, call.splits - 1, heads, values, dim)},
        call.sequences * (call.splits - 1) * heads * cdiv(values, tile.block_v),
        given | {"dfinal": None},
        LOCAL=True,
        name="delta_local_dstates_kernel",
    )
    return _chain(call, dfinal, results["local"], turns, False)


def _chain(call: Call, edge: Array | None, local: Array, turns: Array, forward: bool) -> Array:
    heads, dim, values = call.sizes
    tile = Tile(padded(dim), min(_CHAIN_ROWS, padded(values)), 4, 1)
    results = call.launch(
        delta_chain_kernel,
        tile,
        {"edges": result(call.sequences, call.splits, heads, values, dim)},
        call.sequences * heads * cdiv(values, tile.block_v),
        {"edge": edge, "local": local, "turns": turns},
        BLOCK_D=min(_CHAIN_CHANNELS, padded(dim)),
        PASS=call.config.float32_dot,
        GIVEN=edge is not None,
        FORWARD=forward,
    )
    return results["edges"]


def saved_axes(arrays: RecurrenceArrays, spec: RecurrenceSpec) -> dict[str, tuple[str, ...]]:
    """The axes, after the leading one, of what the backward pass reads. Names include the chunk size, on which the lengths of splits depend."""
    heads = f"H{heads_of(arrays, spec).out}"
    axes = {"edges": ("splits", heads, "V", "D"), "turns": ("splits", heads, "square")}
    return {f"{name}{size}": axes[name] for name in axes for size in CHUNK_SIZES}


def to_saved(call: Call, edges: Array | None, turns: Array | None) -> Arrays:
    """As residuals, with the call's leading axis first."""
    if edges is None or turns is None:
        return {}
    batch, size, (heads, dim, values) = call.arrays.q.shape[0], call.config.chunk_size, call.sizes
    return {
        f"edges{size}": edges.reshape(batch, -1, heads, values, dim),
        f"turns{size}": turns.reshape(batch, -1, heads, dim * dim),
    }


def from_saved(call: Call, saved: Arrays) -> tuple[Array | None, Array | None]:
    """The inverse of `to_saved`. They are computed again if this call has other splits, as a pullback that is mapped may have."""
    size, (heads, dim, values) = call.config.chunk_size, call.sizes
    edges, turns = saved.get(f"edges{size}"), saved.get(f"turns{size}")
    batch = call.arrays.q.shape[0]
    if edges is None or turns is None or edges.shape[:2] != (batch, call.sequences // batch * call.splits):
        return edges_of(call, saved)
    lead = call.sequences, call.splits, heads
    return edges.reshape(*lead, values, dim), turns.reshape(*lead, dim, dim)
