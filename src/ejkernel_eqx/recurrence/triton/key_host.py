"""Triton: linear members with one decay per key channel and token (gated linear attention)."""

import jax
import jax.numpy as jnp
from jax import Array

from ...core import Named
from ...launch.sizes import cdiv
from ..spec import heads_of, RecurrenceArrays, RecurrenceSpec
from . import key_gradients, splits
from .call import Call, precision_of, sum_heads, wide
from .key_scores import fold, gates
from .tile_sizes import TritonConfig


def saved_axes(arrays: RecurrenceArrays, spec: RecurrenceSpec) -> dict[str, tuple[str, ...]]:
    """The scores and the states before splits; states and gates are recomputed."""
    return {"scores": ("T", f"H{heads_of(arrays, spec).out}", "chunk")} | splits.saved_axes(arrays, spec)


def weighted(arrays: RecurrenceArrays, spec: RecurrenceSpec, config: TritonConfig) -> RecurrenceArrays:
    """This call with write strengths in the values, and without a skip."""
    heads, v = heads_of(arrays, spec).state, arrays.v
    if arrays.beta is not None:
        v = (_per_head(v, heads) * _per_head(arrays.beta[..., None], heads)).astype(wide(v.dtype))
        if v.dtype == jnp.float32 and precision_of(arrays, config) == "tf32":
            v = jax.lax.reduce_precision(v, exponent_bits=8, mantissa_bits=10)
    return arrays._replace(v=v, beta=None, skip=None)


def forward(call: Call, arrays: RecurrenceArrays) -> tuple[Array, Array, Named]:
    folded = fold(call, gates(call), scores=True)
    edges = splits.edges_of(folded)
    states, final = folded.states(edges)
    out = folded.out(states)
    if arrays.skip is not None:
        skipped = _per_head(arrays.v, out.shape[2]) * arrays.skip.astype(jnp.float32)[:, None]
        out = (out.astype(jnp.float32) + skipped).astype(out.dtype)
    return out, final, {"scores": folded.launch.arrays["scores"], **splits.to_saved(folded, edges)}


def backward(
    call: Call, arrays: RecurrenceArrays, saved: Named, dout: Array, dfinal: Array
) -> tuple[Named, Array]:
    key_gates = gates(call)
    folded = fold(call, key_gates, scores=False)
    states, dstates, dinitial = splits.states_of(folded, saved, dout, dfinal)
    inputs = {**key_gates, "do": dout, "scores": saved["scores"]}
    inputs |= {"folded_k": folded.launch.arrays["k"], "states": states, "dstates": dstates}
    # Of the values, over the heads of the call, and of the scores, below the diagonal and on it.
    heads, dim, values = call.sizes
    outputs = {"dv": call.gradient(call.arrays.v), "down": call.wide_rows(heads)}
    outputs |= {"dscores": call.rows(*saved["scores"].shape[2:])}
    programs, tile = call.chunks * heads * cdiv(values, call.config.wy.block_v), call.config.gradients
    inputs |= call.launch(key_gradients.key_values_kernel, call.config.wy, outputs, programs, inputs)
    dv = inputs.pop("dv")
    # Of `q`, `k`, `g`.
    operands = {name: getattr(call.arrays, name) for name in "qkg"}
    outputs = {f"d{name}": call.gradient(x) for name, x in operands.items()}
    programs, sums = call.chunks * heads * cdiv(dim, tile.block_k), sums_precision(call)
    results = call.launch(key_gradients.key_gradients_kernel, tile, outputs, programs, inputs, SUMS=sums)
    grads = {name: sum_heads(results[f"d{name}"], x.shape[2]) for name, x in operands.items()}
    if arrays.beta is not None:
        wide, heads = dv.astype(jnp.float32), dv.shape[2]
        dbeta = jnp.sum(wide * _per_head(arrays.v, heads), -1)
        grads["beta"] = sum_heads(dbeta, arrays.beta.shape[2])
        dv = wide * _per_head(arrays.beta[..., None], heads)
    if arrays.skip is not None:
        wide = dout.astype(jnp.float32)
        grads["skip"] = jnp.sum(wide * _per_head(arrays.v, dout.shape[2]), 1)
        dv = dv.astype(jnp.float32) + wide * arrays.skip.astype(jnp.float32)[:, None]
    grads["v"] = sum_heads(dv, arrays.v.shape[2])
    return grads, dinitial


def _per_head(x: Array, heads: int) -> Array:
    """`x` in float32, with heads repeated to this number."""
    return jnp.repeat(x.astype(jnp.float32), heads // x.shape[2], axis=2)


def sums_precision(call: Call) -> str:
    """The precision in which gradients of the gates are summed; a single pass suffices for bfloat16."""
    dot = call.config.float32_dot
    if call.arrays.q.dtype == jnp.bfloat16:
        return "tf32" if dot == "tf32x3" else dot
    return call.launch.numbers["PRECISION"]
