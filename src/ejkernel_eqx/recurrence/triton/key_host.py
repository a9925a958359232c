"""Triton: linear members with one decay per key channel and token (gated linear attention)."""

import jax
import jax.numpy as jnp
from jax import Array

from ...launch import Execute, run
from ...launch.sizes import cdiv
from ..spec import heads_of, RecurrenceArrays, RecurrenceSpec
from . import key_gradients, splits
from .call import (
    Call,
    first_copies,
    in_first_copies,
    make_call,
    precision_of,
    repeated,
    sum_copies,
    sum_heads,
    wide,
)
from .key_scores import fold, gates
from .tile_sizes import TritonConfig


def saved_axes(arrays: RecurrenceArrays, spec: RecurrenceSpec) -> dict[str, tuple[str, ...]]:
    """The scores and the states before splits; states and gates are recomputed."""
    return {"scores": ("T", f"H{heads_of(arrays, spec).out}", "chunk")} | splits.saved_axes(arrays, spec)


def forward(
    arrays: RecurrenceArrays, spec: RecurrenceSpec, config: TritonConfig, *, execute: Execute = run
) -> dict[str, Array]:
    """`out`, `final_state`, and the residuals of the backward pass."""
    call, copies = _call(arrays, spec, config, execute)
    folded, scores = fold(call, *gates(call), scores=True)
    assert scores is not None
    edges = splits.edges_of(folded)
    states, final = folded.states(edges)
    out = folded.out(states, scores=scores)
    if arrays.skip is not None:
        skipped = _per_head(arrays.v, out.shape[2]) * arrays.skip.astype(jnp.float32)[:, None]
        out = (out.astype(jnp.float32) + skipped).astype(out.dtype)
    saved = {"scores": scores, **splits.to_saved(folded, edges)}
    return {"out": out.astype(arrays.v.dtype), "final_state": first_copies(final, copies), **saved}


def backward(
    arrays: RecurrenceArrays,
    spec: RecurrenceSpec,
    config: TritonConfig,
    saved: dict[str, Array],
    dout: Array,
    dfinal_state: Array,
    *,
    execute: Execute = run,
) -> dict[str, Array]:
    """The gradients of all float arrays of the call, most in the array's dtype."""
    call, copies = _call(arrays, spec, config, execute)
    high, low = gates(call)
    folded, _ = fold(call, high, low, scores=False)
    states, _ = folded.states(splits.from_saved(folded, saved))
    dout = dout.astype(call.arrays.q.dtype)
    dfinal = in_first_copies(dfinal_state, copies)
    dstates, dinitial = folded.dstates(dout, dfinal, splits.edges_of(folded, dout, dfinal))
    given = {
        "folded_k": folded.launch.arrays["k"],
        "gates": high,
        "low": high if low is None else low,
        "do": dout,
        "scores": saved["scores"],
        "states": states,
        "dstates": dstates,
    }
    dv, dscores = _value_gradients(call, given)
    grads = _key_gradients(call, given | dscores)
    if arrays.initial_state is not None:
        grads["initial_state"] = sum_copies(dinitial, copies)
    if arrays.beta is not None:
        wide = dv.astype(jnp.float32)
        heads = dv.shape[2]
        dbeta = jnp.sum(wide * _per_head(arrays.v, heads), -1)
        grads["beta"] = sum_heads(dbeta, arrays.beta.shape[2])
        dv = wide * _per_head(arrays.beta[..., None], heads)
    if arrays.skip is not None:
        wide = dout.astype(jnp.float32)
        grads["skip"] = jnp.sum(wide * _per_head(arrays.v, dout.shape[2]), 1)
        dv = dv.astype(jnp.float32) + wide * arrays.skip.astype(jnp.float32)[:, None]
    grads["v"] = sum_heads(dv, arrays.v.shape[2])
    return grads


def _call(
    arrays: RecurrenceArrays, spec: RecurrenceSpec, config: TritonConfig, execute: Execute
) -> tuple[Call, int]:
    """The call in the kernels' form, without write strength and skip, and its number of copies of each state head."""
    heads = heads_of(arrays, spec)
    v = arrays.v
    if arrays.beta is not None:
        v = (_per_head(v, heads.state) * _per_head(arrays.beta[..., None], heads.state)).astype(wide(v.dtype))
        if v.dtype == jnp.float32 and precision_of(arrays, config) == "tf32":
            v = jax.lax.reduce_precision(v, exponent_bits=8, mantissa_bits=10)
    plain = repeated(arrays._replace(v=v, beta=None, skip=None), spec)
    return make_call(plain, spec, config, execute), heads.out // heads.state


def _per_head(x: Array, heads: int) -> Array:
    """`x` in float32, with heads repeated to this number."""
    return jnp.repeat(x.astype(jnp.float32), heads // x.shape[2], axis=2)


def _value_gradients(call: Call, given: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
    """Gradients of the values, over the heads of the call, and of the scores, below the diagonal and on it."""
    heads, _, values = call.sizes
    tile = call.config.wy
    shape = given["scores"].shape[2:]
    results = call.launch(
        key_gradients.key_values_kernel,
        tile,
        {
            "dv": call.gradient(call.arrays.v),
            "dscores": call.rows(*shape),
            "down": call.rows(heads, dtype=jnp.float32),
        },
        call.chunks * heads * cdiv(values, tile.block_v),
        given,
    )
    return results.pop("dv"), results


def _key_gradients(call: Call, given: dict[str, Array]) -> dict[str, Array]:
    """Gradients of `q`, `k`, `g`."""
    arrays, tile = call.arrays, call.config.gradients
    heads, dim, _ = call.sizes
    operands = {name: getattr(arrays, name) for name in "qkg"}
    results = call.launch(
        key_gradients.key_gradients_kernel,
        tile,
        {f"d{name}": call.gradient(x) for name, x in operands.items()},
        call.chunks * heads * cdiv(dim, tile.block_k),
        given,
        SUMS=_sums_precision(call),
    )
    return {name: sum_heads(results[f"d{name}"], x.shape[2]) for name, x in operands.items()}


def _sums_precision(call: Call) -> str:
    """The precision in which gradients of the gates are summed; a single pass suffices for bfloat16."""
    dot = call.config.float32_dot
    if call.arrays.q.dtype == jnp.bfloat16:
        return "tf32" if dot == "tf32x3" else dot
    return call.launch.numbers["PRECISION"]
