"""The work that the tuner measures for latent attention: that of attention with keys of which one part is shared by all heads."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from jax import Array

from ..attention import workload as attention
from ..attention.samples import make_inputs as attention_inputs
from ..attention.samples import spec_of
from ..attention.spec import AttentionSpec
from ..core.exact import compiled
from ..core.workload import Inputs, workload_of
from ..dispatch import FORWARD, Implementation, Problem, Workload
from .core import ATTEND
from .spec import LatentArrays


def workload(implementation: Implementation, problem: Problem) -> Workload:
    """The work of one problem on one of the platforms."""
    spec, make = spec_of(problem), functools.partial(make_inputs, problem)
    flops = attention.costs(problem)[FORWARD].flops
    made = workload_of(ATTEND, implementation, spec, make, flops=flops, backward=2.5)
    return dataclasses.replace(made, reference=functools.partial(compiled, _reference, spec))


def make_inputs(problem: Problem, seed: int) -> Inputs:
    """New inputs for every seed: those of attention, with the rotary keys of one head."""
    inputs, own = attention_inputs(problem, seed), problem.dim("D") - problem.dim("Dr")
    given: dict[str, Any] = inputs.arrays._asdict()
    # The rotary part of the first head serves all heads.
    k = given.pop("k")
    return Inputs(LatentArrays(k=k[..., :own], k_rope=k[..., 0, own:], **given), inputs.cotangents)


def _reference(spec: AttentionSpec, inputs: Inputs) -> dict[str, Array]:
    """Results of the reference, in float32 or wider."""
    results = attention.by_row_and_head(spec, Inputs(inputs.arrays.whole, inputs.cotangents))
    dk, own = results.pop("k"), inputs.arrays.k.shape[-1]
    # The shared part has a copy in every head, so its gradient is their sum.
    return results | {"k": dk[..., :own], "k_rope": dk[..., own:].sum(-2)}


def example_problem(operation: str, dims: Mapping[str, int], dtype: str, flags: Mapping[str, Any]) -> Problem:
    """The problem of self-attention, causal by default: `dims` and `flags` are those of attention, with `Dr` of the `D` channels of a key shared by
    all heads (default a third of them)."""
    dims = dict(dims)
    rope = dims.pop("Dr", None)
    if "deterministic" in flags:
        raise ValueError(
            "flags: expected no deterministic, received it; latent attention has no platform that is not."
        )
    problem = attention.example_problem(operation, dims, dtype, flags)
    if problem.dim("K") != problem.dim("H"):
        raise ValueError(
            f"dims: expected as many key heads as heads, received K={problem.dim('K')}, H={problem.dim('H')}."
        )
    rope = problem.dim("D") // 3 if rope is None else rope
    if not 0 < rope < problem.dim("D"):
        raise ValueError(f"dims: expected Dr from 1 to D - 1 = {problem.dim('D') - 1}, received {rope}.")
    return dataclasses.replace(problem, dims=tuple(sorted((*problem.dims, ("Dr", rope)))))
