"""Platform `xla`: softmax attention's own for two branches, gathered blocks for the third."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from ..attention import xla as attention
from ..attention.cotangents import row_terms
from ..attention.spec import AttentionArrays
from ..core import Named
from ..dispatch import BOTH, Problem
from ..launch.fields import Checked, Count
from . import branches, gathered, inverted, selection
from .problems import of_branch
from .spec import NativeArrays, NativeSpec

_BYTES = 2**25  # of gathered keys and values at a time


@dataclasses.dataclass(frozen=True)
class XlaConfig(Checked):
    """`queries`: how many of them gather their blocks at a time; tiles of the other two branches."""

    queries: Count
    compressed: attention.XlaConfig
    sliding: attention.XlaConfig


config_type = XlaConfig
unsupported = attention.unsupported
PARTS = {"queries": BOTH, "compressed": BOTH, "sliding": BOTH}


def default_config(problem: Problem, device: Any) -> XlaConfig:
    each = 4 * problem.dim("B") * problem.dim("K") * problem.dim("n") * int(str(problem.flag("block")))
    # The gathered keys and values of one chunk of queries stay within a fixed size.
    rows = _BYTES // max(1, each * (problem.dim("D") + problem.dim("V")))
    own = [attention.default_config(of_branch(problem, name), device) for name in branches.SOFTMAX]
    # A power of two, so that the configurations around it are whole numbers too.
    return XlaConfig(1 << max(min(rows, 256).bit_length() - 1, 0), *own)


def candidates(problem: Problem, device: Any) -> list[XlaConfig]:
    """Configurations worth timing, the heuristic first."""
    best = default_config(problem, device)
    sizes = [max(1, best.queries * m // 4) for m in (4, 2, 1, 8, 16)]
    return list(dict.fromkeys(dataclasses.replace(best, queries=size) for size in sizes))


def forward(arrays: NativeArrays, spec: NativeSpec, config: XlaConfig, *, save: bool = True) -> Named:
    """The output, the blocks that were chosen, and what the backward needs."""
    found, indices = {}, arrays.indices
    for name, branch in branches.SOFTMAX.items():
        results = attention.forward(*branch(arrays, spec), getattr(config, name))
        found[f"{name}_out"], found[f"{name}_lse"] = results
    if indices is None:
        # The choice needs the normalised weights, so the compressed branch comes first.
        indices = selection.select(arrays, spec, found["compressed_lse"])
    chosen = arrays._replace(indices=indices)
    found["selected_out"], found["selected_lse"] = gathered.forward(chosen, spec, config.queries)
    out = branches.combine(arrays.gates, found, arrays.q.dtype)
    return {"out": out, "indices": indices} | (found if save else {})


def backward(
    arrays: NativeArrays, spec: NativeSpec, config: XlaConfig, saved: Named, cotangents: Named
) -> Named:
    """The gradients of all float arrays."""
    results, dgates = branches.split(arrays.gates, saved, cotangents["out"])
    grads = {}
    for name, branch in branches.SOFTMAX.items():
        call, tiles = branch(arrays, spec), getattr(config, name)
        grads[name] = attention.backward(*call, tiles, *results[name], jnp.zeros_like(results[name][1]))
    out, lse, dout = results["selected"]
    delta, _ = row_terms(AttentionArrays(arrays.q, arrays.k, arrays.v), out, lse, dout, None)
    # The backward takes the forward's blocks: choosing again might round to others.
    chosen = arrays._replace(indices=saved["indices"])
    dq = gathered.query_gradient(chosen, spec, config.queries, lse, delta, dout)
    dk, dv = inverted.key_gradient(chosen, spec, _BYTES, lse, delta, dout)
    return branches.combined_gradients(dq, dk, dv, grads, dgates)
