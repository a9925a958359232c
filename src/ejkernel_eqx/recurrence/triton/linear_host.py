"""Linear members without decay, with a constant one, or with one per token, on Triton: phases of forward and backward."""

import math

from jax import Array

from ...core import Named
from ...launch import NOTHING, result
from ...launch.sizes import cdiv
from ..spec import CONSTANT, NONE, RecurrenceArrays
from . import gradients, shared_host, splits
from .call import Call, sum_heads

_PARTS = 8  # at most this many partial sums of the gradient of a shared head


saved_axes = splits.saved_axes
"""The states before splits; the backward recomputes the states."""


def forward(call: Call, arrays: RecurrenceArrays) -> tuple[Array, Array, Named]:
    call = call.with_decays()
    edges = splits.edges_of(call)
    if call.config.single:
        out, final = call.single(edges)
    else:
        states, final = call.states(edges)
        out = call.out(states, _heads_each(call))
    return out, final, splits.to_saved(call, edges)


def backward(
    call: Call, arrays: RecurrenceArrays, saved: Named, dout: Array, dfinal: Array
) -> tuple[Named, Array]:
    call = call.with_decays()
    states, dstates, dinitial = splits.states_of(call, saved, dout, dfinal)
    grads = _gradients(call, states, dstates, dout)
    # The call may hold repeated values, whose gradients belong to one head of the operand.
    return grads | {"v": sum_heads(grads["v"], arrays.v.shape[2])}, dinitial


def _gradients(call: Call, states: Array, dstates: Array, dout: Array) -> Named:
    """Gradients of all given operands over tokens and of `skip`."""
    arrays, decay = call.arrays, call.spec.decay
    heads, _, values = call.sizes
    batch = arrays.q.shape[0]
    each = _heads_each(call)
    if each > 1:
        results = shared_host.gradients(call, states, dstates, dout, _shared(call), each)
    else:
        results = _separate_gradients(call, states, dstates, dout)
    grads = {name: _sum_parts(results[f"d{name}"]) for name in "qk"}
    grads["v"] = sum_heads(results["dv"], arrays.v.shape[2])
    if decay == CONSTANT:
        dg = results["dg"].reshape(batch, call.chunks // batch, heads).sum(1)
        grads["g"] = sum_heads(dg, call.launch.numbers["HG"], axis=1)
    elif decay != NONE:
        grads["g"] = sum_heads(results["dg"], call.launch.numbers["HG"])
    if arrays.beta is not None:
        grads["beta"] = sum_heads(results["dbeta"], call.launch.numbers["HB"])
    if arrays.skip is not None:
        grads["skip"] = results["dskip"].reshape(batch, call.chunks // batch, heads, values).sum(1)
    return grads


def _separate_gradients(call: Call, states: Array, dstates: Array, dout: Array) -> Named:
    """Gradients for each state head, all from one kernel."""
    arrays, tile, decay = call.arrays, call.config.gradients, call.spec.decay
    heads, dim, values = call.sizes
    parts = 2 * cdiv(dim, tile.block_k)
    scalars, sums = result(parts, *call.rows(heads).shape), result(parts, call.chunks, heads)
    outputs = {
        "dq": call.parts(arrays.q),
        "dk": call.parts(arrays.k),
        "dv": call.gradient(arrays.v),
        "dg": NOTHING if decay == NONE else sums if decay == CONSTANT else scalars,
        "dbeta": NOTHING if arrays.beta is None else scalars,
        "dskip": NOTHING if arrays.skip is None else result(call.chunks, heads, values),
    }
    inputs, programs = {"states": states, "dstates": dstates, "do": dout}, parts * call.chunks * heads
    results = call.launch(gradients.gradients_kernel, tile, outputs, programs, inputs)
    summed = [name for name in ("dg", "dbeta") if results[name].ndim > 1]
    return results | {name: _sum_parts(results[name]) for name in summed}


def _shared(call: Call) -> int:
    """The number of state heads that share a query and a key head."""
    numbers = call.launch.numbers
    return math.gcd(numbers["HS"] // numbers["HQ"], numbers["HS"] // numbers["HK"])


def _heads_each(call: Call) -> int:
    """The number of state heads that one program processes: they share a query and a key head."""
    shared, each = _shared(call), 1
    # Heads are joined until few enough partial sums of a shared head's gradient are left.
    while shared % (2 * each) == 0 and shared // each > _PARTS:
        each *= 2
    return each


def _sum_parts(x: Array) -> Array:
    return x[0] if x.shape[0] == 1 else x.sum(0)
