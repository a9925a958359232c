"""Triton: host side of the delta rules. Two kernels forward and three backward; three and five with a decay per key channel.

The forward pass keeps the scores, the inverse of every chunk's matrix, and three factors per token. States are recomputed.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from ...core import Named
from ...launch import NOTHING, result
from ...launch.sizes import cdiv, padded
from ..spec import CONSTANT, heads_of, KEY, RecurrenceArrays, RecurrenceSpec
from . import delta_splits, splits
from .call import Call, sum_heads
from .delta_gradients import delta_gradients_kernel, delta_pairs_kernel
from .delta_key_gradients import delta_key_gradients_kernel
from .key_scores import gates
from .wy import delta_scores_kernel
from .wy_key import delta_key_scores_kernel


def saved_axes(arrays: RecurrenceArrays, spec: RecurrenceSpec) -> dict[str, tuple[str, ...]]:
    heads = f"H{heads_of(arrays, spec).out}"
    matrix = ("T", heads, "chunk")
    solved = {"scores": matrix, "inverse": matrix, "factors": (heads, "factors", "T")}
    return solved | delta_splits.saved_axes(arrays, spec)


def forward(call: Call, arrays: RecurrenceArrays) -> tuple[Array, Array, Named]:
    heads, _, values = call.sizes
    solved = _key_scores(call, gates(call), solving=True) if call.spec.decay == KEY else _scores(call)
    serial = serial_of(call)
    edges = delta_splits.edges_of(serial, solved)
    outputs = {"out": call.rows(heads, values), "final": call.edge_states(call.spec.state_dtype)}
    results = delta_splits.run_states(serial, serial.config.out, outputs, solved | edges)
    saved = {name: solved[name] for name in ("scores", "inverse", "factors")}
    return results["out"], results["final"], saved | splits.to_saved(call, edges)


def backward(
    call: Call, arrays: RecurrenceArrays, saved: Named, dout: Array, dfinal: Array
) -> tuple[Named, Array]:
    heads, dim, values = call.sizes
    decay, named = call.spec.decay, saved | {"do": dout}
    key_gates = gates(call) if decay == KEY else {}
    folded = _key_scores(call, key_gates, solving=False) if decay == KEY else {}
    serial = serial_of(call)
    edges = delta_splits.from_saved(serial, named | folded)
    stored = result(call.chunks, heads, values, dim, dtype=call.arrays.q.dtype)
    outputs = {"states": stored, "written": call.rows(heads, values)}
    results = delta_splits.run_states(serial, serial.config.states, outputs, named | folded | edges)
    named |= {name: results[name] for name in outputs}
    inputs = named | folded | {"initial": dfinal}
    inputs |= delta_splits.gradients_of(serial, inputs, edges)
    outputs |= {"final": call.edge_states("float32")}
    results = delta_splits.run_states(serial, serial.config.dstates, outputs, inputs, REVERSE=True)
    named |= {"dstates": results["states"], "derrors": results["written"]}
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
    return summed, results["final"]


def _scores(call: Call) -> Named:
    heads, each = call.sizes[0], _heads_each(call)
    numbers = {"BLOCK_K": padded(call.sizes[1]), "HEADS": each, "SOLVE": solving_of(call)}
    outputs, programs = _solutions(call), call.chunks * (heads // each)
    return call.launch(delta_scores_kernel, call.config.scores, outputs, programs, **numbers)


def _key_scores(call: Call, key_gates: Named, *, solving: bool) -> Named:
    """Queries and keys with their decays included instead of the plain ones; with `solving` also the scores and inverses."""
    heads, dim, _ = call.sizes
    outputs = _solutions(call) if solving else dict.fromkeys(_solutions(call), NOTHING)
    outputs |= dict.fromkeys(("q_in", "k_in", "k_end"), call.rows(heads, dim))
    outputs |= {"carry": result(call.chunks, heads, dim)}
    tile, numbers = call.config.scores, {"SOLVE": solving_of(call), "SOLVING": solving}
    programs = call.chunks * heads
    results = call.launch(delta_key_scores_kernel, tile, outputs, programs, key_gates, **numbers)
    kept = ("scores", "inverse", "factors") if solving else ()
    others = {"q": results["q_in"], "k": results["k_in"]}
    return {name: results[name] for name in (*kept, "k_end", "carry")} | others


def _solutions(call: Call) -> dict[str, jax.ShapeDtypeStruct]:
    heads, chunk = call.sizes[0], call.config.chunk_size
    batch, length = call.arrays.q.shape[:2]
    matrices = dict.fromkeys(("scores", "inverse"), call.rows(heads, chunk))
    # The scratch is for the solver alone and is not kept for the backward.
    factors, scratch = result(batch, heads, 3, length), result(call.chunks, heads, chunk, 32)
    return matrices | {"factors": factors, "scratch": scratch}


def _gradients(call: Call, inputs: Named) -> Named:
    """Gradients over state heads; those of queries and keys are summed over the heads that share them."""
    heads, dim, values = call.sizes
    keyed, g = call.spec.decay == KEY, call.arrays.g
    each, tile = 1 if keyed else _heads_each(call), call.config.gradients
    # The contributions of pairs of tokens, `dv`, and a part of `dbeta`.
    outputs = dict.fromkeys(("dscores", "dreads"), call.rows(heads, call.config.chunk_size))
    outputs |= dict.fromkeys(("diagonal", "dbeta"), call.wide_rows(heads))
    outputs |= {"dv": _shared(call, heads, values, "HV")}
    pairs = call.launch(delta_pairs_kernel, call.config.wy, outputs, call.chunks * heads, inputs)
    inputs = inputs | {name: pairs[name] for name in ("dscores", "dreads", "diagonal")}
    tiles = cdiv(dim, tile.block_k)
    parts = call.wide_rows(tiles, heads)
    outputs = {"dg": NOTHING if g is None else call.gradient(g) if keyed else parts, "dbeta": parts}
    outputs |= {f"d{x}": _shared(call, heads // each, dim, f"H{x.upper()}") for x in "qk"}
    kernel = delta_key_gradients_kernel if keyed else delta_gradients_kernel
    programs = call.chunks * (heads // each) * tiles
    results = call.knowing({}, HEADS=each).launch(kernel, tile, outputs, programs, inputs)
    # Each kernel has a part of the gradient, the second one for every tile of key channels.
    results["dbeta"] = pairs["dbeta"] + results["dbeta"].sum(2)
    if g is not None and not keyed:
        results["dg"] = results["dg"].sum(2)
    return results | {"dv": pairs["dv"]}


def _shared(call: Call, count: int, width: int, owner: str) -> jax.ShapeDtypeStruct:
    """The shape of gradients of `count` heads; in float32 if they are still to be summed."""
    return call.rows(count, width, dtype=None if count == call.launch.numbers[owner] else jnp.float32)


def _heads_each(call: Call) -> int:
    """The number of state heads that share a query head and a key head."""
    queries, keys = call.launch.numbers["HQ"], call.launch.numbers["HK"]
    return call.sizes[0] // keys if queries == keys else 1


def solving_of(call: Call) -> str:
    """The precision in which blocks of the inverses are multiplied: float32, but a single pass for bfloat16 operands where that is faster.
    A single pass truncates numbers to 11 bits, no more than float16 has, and an inverse propagates the error."""
    if call.arrays.q.dtype == jnp.bfloat16 and call.config.float32_dot == "tf32x3":
        return "tf32"
    return call.config.float32_dot


def serial_of(call: Call) -> Call:
    """The call as the serial passes see it: their programs hold all key channels, and operands that include their decays are over state heads."""
    heads, dim, _ = call.sizes
    widened = lambda tile: dataclasses.replace(tile, block_k=padded(dim))
    whole = {name: widened(getattr(call.config, name)) for name in ("out", "states", "dstates")}
    decayed = call.spec.decay == KEY
    call = call.knowing({}, DECAYED=decayed, **({"HQ": heads, "HK": heads} if decayed else {}))
    return dataclasses.replace(call, config=dataclasses.replace(call.config, **whole))


def _sum_tokens(x: Array, offsets: Array | None) -> Array:
    """`[B, T, HS]` summed over tokens, for packed sequences over those of each."""
    if offsets is not None:
        token = jnp.arange(x.shape[1])[None]
        # Gradients outside all sequences are not written and may hold anything.
        inside = (token >= offsets[:, :1]) & (token < offsets[:, -1:])
        x = jnp.where(inside[..., None], x, 0.0)
    return x.sum(1)
