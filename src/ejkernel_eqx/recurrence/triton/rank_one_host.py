"""Triton: host side of transitions of rank one, with a decay per key channel. Three kernels forward and six backward.

The forward pass keeps the scores of queries and the solution of every chunk. States are recomputed.
"""

from jax import Array

from ...core import Named
from ...launch import NOTHING, result
from ...launch.sizes import cdiv
from ..spec import heads_of, RecurrenceArrays, RecurrenceSpec
from . import delta_splits, splits
from .call import Call, sum_heads
from .delta_host import serial_of, solving_of
from .key_host import sums_precision
from .key_scores import gates
from .rank_one_gradients import rank_one_gradients_kernel, rank_one_pairs_kernel
from .rank_one_scores import rank_one_scores_kernel

_SOLVED = ("qk", "qb", "mixed", "inverse")


def saved_axes(arrays: RecurrenceArrays, spec: RecurrenceSpec) -> dict[str, tuple[str, ...]]:
    heads = f"H{heads_of(arrays, spec).out}"
    return dict.fromkeys(_SOLVED, ("T", heads, "chunk")) | delta_splits.saved_axes(arrays, spec)


def forward(call: Call, arrays: RecurrenceArrays) -> tuple[Array, Array, Named]:
    heads, _, values = call.sizes
    solved, serial = _scores(call, gates(call), None), serial_of(call)
    edges = delta_splits.edges_of(serial, solved)
    outputs = {"out": call.rows(heads, values), "final": call.edge_states(call.spec.state_dtype)}
    results = delta_splits.run_states(serial, serial.config.out, outputs, solved | edges)
    saved = {name: solved[name] for name in _SOLVED}
    return results["out"], results["final"], saved | splits.to_saved(call, edges)


def backward(
    call: Call, arrays: RecurrenceArrays, saved: Named, dout: Array, dfinal: Array
) -> tuple[Named, Array]:
    heads, dim, values = call.sizes
    key_gates, serial = gates(call), serial_of(call)
    inputs = saved | _scores(call, key_gates, saved["inverse"]) | {"do": dout}
    edges = delta_splits.from_saved(serial, inputs)
    stored = result(call.chunks, heads, values, dim, dtype=call.arrays.q.dtype)
    outputs = {"states": stored, "written": call.rows(heads, values)}
    results = delta_splits.run_states(serial, serial.config.states, outputs, inputs | edges)
    known = key_gates | {name: results[name] for name in outputs}
    inputs |= edges | {"initial": dfinal}
    inputs |= delta_splits.gradients_of(serial, inputs, edges)
    outputs |= {"final": call.edge_states("float32")}
    results = delta_splits.run_states(serial, serial.config.dstates, outputs, inputs, REVERSE=True)
    inputs |= known | {"dstates": results["states"], "dreads": results["written"]}
    # Of pairs of tokens and of the values, and then of all other operands.
    rows = call.rows(heads, call.config.chunk_size)
    outputs = dict.fromkeys(("dqk", "dqb", "dak", "dab"), rows)
    outputs |= dict.fromkeys(("own_k", "own_b", "near_k", "near_b"), call.wide_rows(heads))
    outputs |= {"dv": call.gradient(call.arrays.v)}
    inputs |= call.launch(rank_one_pairs_kernel, call.config.wy, outputs, call.chunks * heads, inputs)
    operands = {name: getattr(call.arrays, name) for name in "qkabg"}
    outputs = {f"d{name}": call.gradient(x) for name, x in operands.items()}
    tile = call.config.gradients
    programs = call.chunks * heads * cdiv(dim, tile.block_k)
    grads = {"dv": inputs.pop("dv")}
    sums = sums_precision(call)
    grads |= call.launch(rank_one_gradients_kernel, tile, outputs, programs, inputs, SUMS=sums)
    summed = {name: sum_heads(grads[f"d{name}"], getattr(arrays, name).shape[2]) for name in "qkvabg"}
    return summed, results["final"]


def _scores(call: Call, key_gates: Named, inverse: Array | None) -> Named:
    """Operands that include their decays and, unless the inverse is known, the solution of every chunk."""
    heads, dim, _ = call.sizes
    chunk, solving = call.config.chunk_size, inverse is None
    outputs = dict.fromkeys(_SOLVED, call.rows(heads, chunk) if solving else NOTHING)
    outputs |= {"scratch": result(call.chunks, heads, chunk, 32) if solving else NOTHING}
    outputs |= dict.fromkeys(("q_in", "a_in", "k_end", "b_end"), call.rows(heads, dim))
    outputs |= {"carry": result(call.chunks, heads, dim)}
    tile, numbers = call.config.scores, {"SOLVE": solving_of(call), "SOLVING": solving}
    inputs = key_gates | {"solved": inverse}
    results = call.launch(rank_one_scores_kernel, tile, outputs, call.chunks * heads, inputs, **numbers)
    unneeded = ("scratch",) if solving else ("scratch", *_SOLVED)
    return {name: x for name, x in results.items() if name not in unneeded}
