"""The tuner's view of attention: representative work, a reference to check it against, and its cost."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..core import Named
from ..core.arguments import accumulator
from ..core.exact import compiled
from ..core.workload import bytes_of, Inputs, workload_of
from ..dispatch import BOTH, Cost, FORWARD, Implementation, Problem, Workload
from . import reference
from .core import arrays_of, ATTEND, axes_of
from .example import example_problem as example_problem
from .samples import make_inputs, spec_of, visible_scores
from .spec import AttentionSpec, LEARNED


def workload(implementation: Implementation, problem: Problem) -> Workload:
    """The work of one problem on one of attention's platforms."""
    spec, make = spec_of(problem), functools.partial(make_inputs, problem)
    if ATTEND.differentiates(implementation.load()):  # it returns no lse
        make = functools.partial(_without_lse, problem)
    return dataclasses.replace(
        workload_of(ATTEND, implementation, spec, make, flops=0.0),
        reference=functools.partial(compiled, by_row_and_head, spec),
        costs=costs(problem),
    )


def _without_lse(problem: Problem, seed: int) -> Inputs:
    inputs = make_inputs(problem, seed)
    return Inputs(inputs.arrays, {**inputs.cotangents, "lse": jnp.zeros_like(inputs.cotangents["lse"])})


def by_row_and_head(spec: AttentionSpec, inputs: Inputs) -> Named:
    """All results of the reference in float32 (float64 for float64 inputs). They are computed for one batch row and key
    head after the other, so that the scores of a whole call are never in memory at once."""
    arrays, dout, dlse = inputs.arrays, inputs.cotangents["out"], inputs.cotangents["lse"]
    wide, axes = accumulator(arrays.q.dtype), axes_of(arrays)
    batch, queries, heads, _ = arrays.q.shape
    kv_heads, value_dim = arrays.v.shape[2:]

    # The backward computes the scores of a row and head again.
    @jax.checkpoint
    def one(learned: Named, number: Array) -> tuple[Array, Array]:
        row, head = number // kv_heads, number % kv_heads

        def take(name: str, x: Array) -> Array:
            x = lax.dynamic_slice_in_dim(x, row, 1) if x.shape[0] > 1 else x
            of_heads = [n for n, letter in enumerate(axes[name], 1) if letter[0] == "H" and x.shape[n] > 1]
            for axis in of_heads:
                size = x.shape[axis] // kv_heads
                x = lax.dynamic_slice_in_dim(x, head * size, size, axis)
            return x

        named = ATTEND.given_of(arrays._replace(**learned))
        return reference.attend(arrays_of(**{name: take(name, x) for name, x in named.items()}), spec)

    def every(learned: Named) -> Named:
        out, lse = lax.map(functools.partial(one, learned), jnp.arange(batch * kv_heads))
        out = out.reshape(batch, kv_heads, queries, heads // kv_heads, value_dim).swapaxes(1, 2)
        return {
            "out": out.reshape(batch, queries, heads, value_dim),
            "lse": lse.reshape(batch, heads, queries),
        }

    learned = {name: x.astype(wide) for name in LEARNED if (x := getattr(arrays, name)) is not None}
    results, pull = jax.vjp(every, learned)
    results |= pull({"out": dout.astype(wide), "lse": dlse})[0]
    if not spec.return_lse:
        del results["lse"]
    return results


def costs(problem: Problem) -> dict[str, Cost]:
    """Operations of the matrix products over visible pairs; bytes of every array read or written once."""
    heads, dims = problem.dim("H"), problem.dim("D") + problem.dim("V")
    flops = 2.0 * visible_scores(problem) * heads * dims
    arrays, cotangents = jax.eval_shape(lambda: make_inputs(problem, 0))
    lse = 4 * problem.dim("B") * heads * problem.dim("T")
    forward = bytes_of(arrays) + bytes_of(cotangents["out"]) + lse
    gradients = sum(bytes_of(getattr(arrays, name)) for name in LEARNED)
    return {
        FORWARD: Cost(flops, forward),
        # The backward recomputes the scores: five products to the forward's two.
        BOTH: Cost(3.5 * flops, forward + bytes_of(cotangents) + gradients),
    }
