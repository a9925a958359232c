"""Triton: host side of the delta rules. Two kernels forward and three backward; three and five with a decay per key channel.

The forward pass keeps the scores, the inverse of every chunk's matrix, and three factors per token. States are recomputed.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from ...launch import NOTHING, result
from ...launch.sizes import cdiv, padded
from ..spec import CONSTANT, heads_of, KEY, RecurrenceArrays, RecurrenceSpec
from . import delta_splits
from .call import Call, sum_heads
from .delta_gradients import delta_gradients_kernel, delta_pairs_kernel
from .delta_key_gradients import delta_key_gradients_kernel
from .delta_states import delta_dstates_kernel, delta_states_kernel
from .key_scores import gates
from .tile_sizes import Tile
from .wy import delta_scores_kernel
from .wy_key import delta_key_scores_kernel

Arrays = dict[str, Array]


def saved_axes(arrays: RecurrenceArrays, spec: RecurrenceSpec) -> dict[str, tuple[str, ...]]:
    heads = f"H{heads_of(arrays, spec).out}"
    matrix = ("T", heads, "chunk")
    solved = {"scores": matrix, "inverse": matrix, "factors": (heads, "factors", "T")}
    return solved | delta_splits.saved_axes(arrays, spec)


def forward(call: Call, arrays: RecurrenceArrays) -> tuple[Array, Array, Arrays]:
    heads, _, values = call.sizes
    solved = _key_scores(call, _gates(call), solving=True) if call.spec.decay == KEY else _scores(call)
    serial = _serial(call)
    edges, turns = delta_splits.edges_of(serial, solved)
    results = serial.launch(
        delta_states_kernel,
        serial.config.out,
        delta_splits.NO_STATES
        | {"out": call.rows(heads, values), "final": call.edge_states(call.spec.state_dtype)},
        _programs(call, call.config.out),
        solved | {"edges": edges},
        OUT=True,
        LOCAL=False,
    )
    saved = {name: solved[name] for name in ("scores", "inverse", "factors")}
    return results["out"], results["final"], saved | delta_splits.to_saved(call, edges, turns)


def backward(
    call: Call, arrays: RecurrenceArrays, saved: Arrays, dout: Array, dfinal: Array
) -> tuple[Arrays, Array]:
    heads, _, values = call.sizes
    decay, config, named = call.spec.decay, call.config, saved | {"do": dout}
    key_gates = _gates(call) if decay == KEY else {}
    folded = _key_scores(call, key_gates, solving=False) if decay == KEY else {}
    serial = _serial(call)
    edges, turns = delta_splits.from_saved(serial, named | folded)
    results = serial.launch(
        delta_states_kernel,
        serial.config.states,
        delta_splits.NO_STATES | {"states": _states(call), "written": call.rows(heads, values)},
        _programs(call, config.states),
        named | folded | {"edges": edges},
        OUT=False,
        LOCAL=False,
    )
    named |= {name: results[name] for name in ("states", "written")}
    edges = delta_splits.gradients_of(serial, named | folded, dfinal, turns)
    results = serial.launch(
        delta_dstates_kernel,
        serial.config.dstates,
        {
            "dstates": _states(call),
            "derrors": call.rows(heads, values),
            "dinitial": call.edge_states("float32"),
            "local": NOTHING,
        },
        _programs(call, config.dstates),
        named | folded | {"dfinal": dfinal, "edges": edges},
        LOCAL=False,
    )
    named |= {name: results[name] for name in ("dstates", "derrors")}
    grads = _gradients(call, named | key_gates)
    if decay == CONSTANT:
        grads["dg"] = _sum_tokens(grads["dg"], arrays.offsets)
    # The head axis of each array.
    axes = {"q": 2, "k": 2, "v": 2, "g": 1 if decay == CONSTANT else 2, "beta": 2}
    summed = {
        name: sum_heads(grads[f"d{name}"], x.shape[axis], axis=axis)
        for name, axis in axes.items()
        if (x := getattr(arrays, name)) is not None
    }
    return summed, results["dinitial"]


def _scores(call: Call) -> Arrays:
    heads, each = call.sizes[0], _heads_each(call)
    return call.launch(
        delta_scores_kernel,
        call.config.scores,
        _solutions(call),
        call.chunks * (heads // each),
        BLOCK_K=padded(call.sizes[1]),
        HEADS=each,
        SOLVE=_solving(call),
    )


def _gates(call: Call) -> Arrays:
    high, low = gates(call)
    return {"gates": high, "low": high if low is None else low}


def _key_scores(call: Call, key_gates: Arrays, *, solving: bool) -> Arrays:
    """Queries and keys with their decays included instead of the plain ones; with `solving` also the scores and inverses."""
    heads, dim, _ = call.sizes
    wide = call.rows(heads, dim)
    solutions = _solutions(call) if solving else dict.fromkeys(_solutions(call), NOTHING)
    results = call.launch(
        delta_key_scores_kernel,
        call.config.scores,
        solutions
        | {
            "q_in": wide,
            "k_in": wide,
            "k_end": wide,
            "carry": result(call.chunks, heads, dim),
        },
        call.chunks * heads,
        key_gates,
        SOLVE=_solving(call),
        SOLVING=solving,
    )
    kept = ("scores", "inverse", "factors") if solving else ()
    return {name: results[name] for name in (*kept, "k_end", "carry")} | {
        "q": results["q_in"],
        "k": results["k_in"],
    }


def _solutions(call: Call) -> dict[str, jax.ShapeDtypeStruct]:
    heads, chunk = call.sizes[0], call.config.chunk_size
    batch, length = call.arrays.q.shape[:2]
    return {
        "scores": call.rows(heads, chunk),
        "inverse": call.rows(heads, chunk),
        "factors": result(batch, heads, 3, length),
        "scratch": result(call.chunks, heads, chunk, 32),
    }


def _pairs(call: Call, given: Arrays) -> Arrays:
    """The contributions of pairs of tokens to the gradients, `dv`, and a part of `dbeta`."""
    heads, chunk, values = call.sizes[0], call.config.chunk_size, call.sizes[2]
    a_head = call.rows(heads, dtype=jnp.float32)
    return call.launch(
        delta_pairs_kernel,
        call.config.wy,
        {
            "dscores": call.rows(heads, chunk),
            "dreads": call.rows(heads, chunk),
            "diagonal": a_head,
            "dv": _shared(call, heads, values, "HV"),
            "dbeta": a_head,
        },
        call.chunks * heads,
        given,
    )


def _gradients(call: Call, given: Arrays) -> Arrays:
    """Gradients over state heads; those of queries and keys are summed over the heads that share them."""
    heads, dim, _ = call.sizes
    keyed, gated = call.spec.decay == KEY, call.arrays.g is not None
    each = 1 if keyed else _heads_each(call)
    pairs = _pairs(call, given)
    tiles = cdiv(dim, call.config.gradients.block_k)
    parts = call.rows(tiles, heads, dtype=jnp.float32)
    results = call.knowing({}, HEADS=each).launch(
        delta_key_gradients_kernel if keyed else delta_gradients_kernel,
        call.config.gradients,
        {
            "dq": _shared(call, heads // each, dim, "HQ"),
            "dk": _shared(call, heads // each, dim, "HK"),
            "dg": call.rows(heads, dim, dtype=jnp.float32) if keyed else parts if gated else NOTHING,
            "dbeta": parts,
        },
        call.chunks * (heads // each) * tiles,
        given | {name: pairs[name] for name in ("dscores", "dreads", "diagonal")},
    )
    results["dbeta"] = pairs["dbeta"] + results["dbeta"].sum(2)
    if gated and not keyed:
        results["dg"] = results["dg"].sum(2)
    return results | {"dv": pairs["dv"]}


def _shared(call: Call, count: int, width: int, owner: str) -> jax.ShapeDtypeStruct:
    """The shape of gradients of `count` heads; in float32 if they are still to be summed."""
    return call.rows(count, width, dtype=None if count == call.launch.numbers[owner] else jnp.float32)


def _heads_each(call: Call) -> int:
    """The number of state heads that share a query head and a key head."""
    queries, keys = call.launch.numbers["HQ"], call.launch.numbers["HK"]
    return call.sizes[0] // keys if queries == keys else 1


def _solving(call: Call) -> str:
    """The precision in which blocks of the inverses are multiplied: float32, but a single pass for bfloat16 operands where that is faster.
    A single pass truncates numbers to 11 bits, no more than float16 has, and an inverse propagates the error."""
    if call.arrays.q.dtype == jnp.bfloat16 and call.config.float32_dot == "tf32x3":
        return "tf32"
    return call.config.float32_dot


def _serial(call: Call) -> Call:
    """The call as the serial passes see it: their programs hold all key channels, and operands that include their decays are over state heads."""
    heads, dim, _ = call.sizes
    whole = {
        name: dataclasses.replace(getattr(call.config, name), block_k=padded(dim))
        for name in ("out", "states", "dstates")
    }
    decayed = call.spec.decay == KEY
    call = call.knowing({}, DECAYED=decayed, **({"HQ": heads, "HK": heads} if decayed else {}))
    return dataclasses.replace(call, config=dataclasses.replace(call.config, **whole))


def _programs(call: Call, tile: Tile) -> int:
    heads, _, values = call.sizes
    return call.sequences * call.splits * heads * cdiv(values, tile.block_v)


def _states(call: Call) -> jax.ShapeDtypeStruct:
    heads, dim, values = call.sizes
    return result(call.chunks, heads, values, dim, dtype=call.arrays.q.dtype)


def _sum_tokens(x: Array, offsets: Array | None) -> Array:
    """`[B, T, HS]` summed over tokens, for packed sequences over those of each."""
    if offsets is not None:
        token = jnp.arange(x.shape[1])[None]
        inside = (token >= offsets[:, :1]) & (token < offsets[:, -1:])
        x = jnp.where(inside[..., None], x, 0.0)
    return x.sum(1)
