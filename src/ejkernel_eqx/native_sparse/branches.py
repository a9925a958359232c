"""The compressed and the sliding branch as calls of softmax attention, and the sum of the three branches under their gates."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from ..attention.spec import AttentionArrays, AttentionGrads, AttentionSpec, RowRanges
from ..core import Named
from ..core.arguments import accumulator
from .spec import BRANCHES, compressed_ranges, NativeArrays, NativeSpec, of_sequence, positions


def compressed(arrays: NativeArrays, spec: NativeSpec) -> tuple[AttentionArrays, AttentionSpec]:
    """Attention over compressed keys: each query sees a range of them."""
    start, end = compressed_ranges(arrays, spec)
    rows = RowRanges(start, end, jnp.broadcast_to(positions(arrays, spec), end.shape))
    call = AttentionArrays(arrays.q, arrays.compressed_k, arrays.compressed_v, rows=rows)
    return call, AttentionSpec(spec.scale, return_lse=True)


def sliding(arrays: NativeArrays, spec: NativeSpec) -> tuple[AttentionArrays, AttentionSpec]:
    """Attention over the last keys: a static window, or ranges if the positions are data."""
    call, own = AttentionArrays(arrays.q, arrays.k, arrays.v), AttentionSpec(spec.scale, return_lse=True)
    if arrays.position is None:
        return call, dataclasses.replace(own, left=spec.window - 1, right=0, offset=spec.offset)
    last = arrays.position
    # The window must not reach into the sequence before.
    start = jnp.maximum(of_sequence(arrays.first), last - (spec.window - 1))
    return call._replace(rows=RowRanges(start, last + 1, last)), own


def combine(gates: Array, results: Named, dtype: Any) -> Array:
    """The sum of the branches' outputs under their gates. A branch in which a row sees nothing gives 0, whatever its gate."""
    wide = accumulator(dtype)
    # The sum is kept in the accumulator's dtype and rounded once, at the end.
    total = jnp.zeros((), wide)
    for n, name in enumerate(BRANCHES):
        total += results[f"{name}_out"].astype(wide) * _gate(gates, results, n, wide)[..., None]
    return total.astype(dtype)


def split(gates: Array, saved: Named, dout: Array) -> tuple[dict[str, tuple[Array, Array, Array]], Array]:
    """Each branch's output, log-sum-exp and cotangent of the output, and the gradient of the gates."""
    wide = accumulator(dout.dtype)
    results, dgates = {}, []
    for n, name in enumerate(BRANCHES):
        sees = _sees(saved, name)
        out, lse = saved[f"{name}_out"], saved[f"{name}_lse"]
        # A row that sees nothing passes no gradient on, even if its cotangent is NaN.
        cotangent = jnp.where(sees[..., None], dout, 0).astype(wide)
        gated = (cotangent * _gate(gates, saved, n, wide)[..., None]).astype(dout.dtype)
        results[name] = out, lse, gated
        dgates.append((cotangent * out.astype(wide)).sum(-1))
    return results, jnp.stack(dgates, -1)


SOFTMAX = {"compressed": compressed, "sliding": sliding}
"""The branches that are softmax attention."""


def combined_gradients(
    dq: Array, dk: Array, dv: Array, softmax: dict[str, AttentionGrads], dgates: Array
) -> Named:
    """The gradients of all float arrays. Those of the selected branch have the accumulator's dtype."""
    others, near = softmax["compressed"], softmax["sliding"]
    wide = lambda x: x.astype(dq.dtype)
    sums = {"q": dq + wide(others.q) + wide(near.q), "k": dk + wide(near.k), "v": dv + wide(near.v)}
    return sums | {"compressed_k": others.k, "compressed_v": others.v, "gates": dgates}


def _gate(gates: Array, results: Named, n: int, dtype: Any) -> Array:
    return jnp.where(_sees(results, BRANCHES[n]), gates[..., n].astype(dtype), 0)


def _sees(results: Named, name: str) -> Array:
    """Returns whether a row of a branch sees anything, `[B, T, H]`."""
    return jnp.swapaxes(results[f"{name}_lse"] > -jnp.inf, 1, 2)
