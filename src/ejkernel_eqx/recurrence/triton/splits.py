"""Sequences in splits that have programs of their own: the state before each, and the gradient of the state after it.

Both are `edges [sequences, splits, HS, D, V]`, in float32.
"""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from ...core import Named
from ...dispatch import facts_of_calls
from ...launch import NOTHING, result
from ...launch.by_name import Options
from ...launch.sizes import cdiv, padded
from ..spec import CONSTANT, heads_of, KEY, RecurrenceArrays, RecurrenceSpec, SCALAR
from . import reach, split_phase
from .call import Call
from .tile_sizes import CHUNK_SIZES, Tile

Edges = Named
"""States or gradients by name, `edges` above all; empty if sequences are not split."""
MOST_PIECES, LEAST_PIECE = 8, 32  # of a split; chunks


def edges_of(call: Call, dout: Array | None = None, dfinal: Array | None = None) -> Edges:
    """The state before every split or, with the gradients of outputs and final state, the gradient of the state after it."""
    # A whole sequence begins with its initial state, so no state before a split is needed.
    if call.splits == 1:
        return {}
    pieces, forward = pieces_of(call), dout is None
    call = call.knowing({}, PIECES=pieces, TO_END=forward)
    passed = _reached(call, pieces)
    local = _local(call, dout, passed, pieces)
    edge, (heads, dim, values) = call.arrays.initial_state if forward else dfinal, call.sizes
    # All pieces of a split, which are loaded at once, and few channels.
    width = min(64, padded(values))
    depth = min(padded(dim), max(1, 2048 // (width * pieces)))
    outputs = {"edges": result(call.sequences, call.splits, *call.sizes)}
    inputs, programs = {"edge": edge, **passed, **local}, heads * cdiv(dim, depth) * cdiv(values, width)
    numbers = {"BLOCK_K": depth, "BLOCK_V": width, "GIVEN": edge is not None}
    kernel, programs = split_phase.chain_kernel, call.sequences * programs
    return call.launch(kernel, Options(2, 1), outputs, programs, inputs, **numbers)


def _reached(call: Call, pieces: int) -> dict[str, Any]:
    """The number of chunks of each split that count beyond it, and the decays over them; nothing where `_local` computes the decays."""
    if call.spec.decay == KEY:
        return dict.fromkeys(("kept", "beyond"))
    heads, dim, _ = call.sizes
    lead = call.sequences, call.splits - 1, heads
    outputs = {"kept": result(*lead, dtype="int32"), "beyond": result(*lead, pieces)}
    outputs |= {"passed": result(*lead, dim)}
    return call.launch(reach.reach_kernel, Options(4, 1), outputs, math.prod(lead), BLOCK_K=padded(dim))


def _local(call: Call, dout: Array | None, passed: dict[str, Any], pieces: int) -> Named:
    """Computes what each piece of a split adds."""
    heads, dim, values = call.sizes
    lead = call.sequences, call.splits - 1
    tile = _local_tile(call, call.config.states if dout is None else call.config.dstates)
    decay = result(*lead, heads, dim) if call.spec.decay == KEY else NOTHING
    outputs = {"local": result(*lead, pieces, heads, dim, values), "decay": decay}
    inputs, programs = {"do": dout, **passed}, call.state_programs(tile, pieces * (call.splits - 1))
    name = "local_states_kernel" if dout is None else "local_dstates_kernel"
    results = call.launch(split_phase.local_kernel, tile, outputs, programs, inputs, name=name)
    return {"local": results["local"]} | ({"passed": results["decay"]} if call.spec.decay == KEY else {})


def pieces_of(call: Call) -> int:
    """The number of programs that sum over a split, a power of two. Several are used only with decays, where they stop early if few tokens count."""
    if call.spec.decay not in (CONSTANT, SCALAR):
        return 1
    chunks = call.chunks // (call.sequences * call.splits)
    pieces = 1
    while 2 * pieces <= min(MOST_PIECES, chunks // LEAST_PIECE):
        pieces *= 2
    return pieces


def _local_tile(call: Call, tile: Tile) -> Tile:
    """All key channels, so that values are weighed once, where it was measured."""
    device, dim = facts_of_calls(), padded(call.sizes[1])
    is_hopper = device.vendor == "nvidia" and device.capability == (9, 0)
    measured = call.arrays.q.dtype == jnp.bfloat16 and call.spec.decay in (CONSTANT, SCALAR)
    return Tile(dim, min(64, padded(call.sizes[2])), 4, 3) if is_hopper and measured and dim <= 128 else tile


def saved_axes(arrays: RecurrenceArrays, spec: RecurrenceSpec) -> dict[str, tuple[str, ...]]:
    """The axes, after the leading one, of states before splits as residuals."""
    return by_chunk_size({"edges": ("splits", f"H{heads_of(arrays, spec).out}", "D", "V")})


def by_chunk_size(axes: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """The axes of residuals over splits by names that include the chunk size, on which the lengths of splits depend."""
    return {f"{name}{size}": letters for name, letters in axes.items() for size in CHUNK_SIZES}


def to_saved(call: Call, edges: Edges) -> Named:
    """Arrays over splits as residuals, with the call's leading axis first."""
    batch, size = call.arrays.q.shape[0], call.config.chunk_size
    return {f"{name}{size}": x.reshape(batch, -1, *x.shape[2:]) for name, x in edges.items()}


def from_saved(call: Call, saved: Named, names: str, again: Callable[[], Edges]) -> Edges:
    """The inverse of `to_saved`; `again()` if this call has other splits, as a pullback that is mapped may have."""
    batch = call.arrays.q.shape[0]
    known = {name: saved.get(f"{name}{call.config.chunk_size}") for name in names.split()}
    lead, shape = (batch, call.sequences // batch * call.splits), (call.sequences, call.splits)
    if any(x is None or x.shape[:2] != lead for x in known.values()):
        return again()
    return {name: x.reshape(*shape, *x.shape[2:]) for name, x in known.items() if x is not None}


def states_of(call: Call, saved: Named, dout: Array, dfinal: Array) -> tuple[Array, Array, Array]:
    """The states at the starts of chunks, the gradients of those at their ends, and that of the initial state."""
    states, _ = call.states(from_saved(call, saved, "edges", lambda: edges_of(call)))
    return states, *call.states(edges_of(call, dout, dfinal), dout, dfinal)
