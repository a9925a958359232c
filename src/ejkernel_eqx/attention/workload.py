"""The tuner's view of attention: representative work, a reference to check it against, and its cost."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..core.arguments import accumulator
from ..core.exact import compiled
from ..core.workload import bytes_of, Inputs, workload_of
from ..dispatch import BOTH, Cost, FORWARD, Implementation, Problem, Workload
from . import reference
from .core import ATTEND
from .example import example_problem as example_problem
from .samples import make_inputs, spec_of, visible_scores
from .spec import AttentionArrays, AttentionSpec, LEARNED


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


def by_row_and_head(spec: AttentionSpec, inputs: Inputs) -> dict[str, Array]:
    """All results of the reference in float32 (float64 for float64 inputs), one batch row and key head after the other, so that the
    scores of a whole call are never in memory at once."""
    arrays, dout, dlse = inputs.arrays, inputs.cotangents["out"], inputs.cotangents["lse"]
    wide = accumulator(arrays.q.dtype)
    batch, heads, kv_heads = arrays.q.shape[0], arrays.q.shape[2], arrays.k.shape[2]
    learned = {name: x.astype(wide) for name in LEARNED if (x := getattr(arrays, name)) is not None}
    fixed = {name: x for name, x in arrays._asdict().items() if name not in learned and x is not None}
    cotangents = (dout.astype(wide), dlse)
    shared = {name: x for name, x in learned.items() if x.shape[0] == 1 != batch}

    def one(pair: tuple[Array, Array]) -> dict[str, Array]:
        take = functools.partial(_take, batch_row=pair[1], kv_head=pair[0], heads=(heads, kv_heads))
        mine = {name: take(x, _HEAD_AXIS[name]) for name, x in learned.items()}
        rest = {
            name: jax.tree.map(functools.partial(take, axis=_HEAD_AXIS[name]), x) for name, x in fixed.items()
        }

        def attend(mine: dict[str, Array]) -> tuple[Array, Array]:
            return reference.attend(AttentionArrays(**mine, **rest), spec)

        (out, lse), pull = jax.vjp(attend, mine)
        grads = pull((take(cotangents[0], 2), take(cotangents[1], 1)))[0]
        return {"out": out, "lse": lse, **grads}

    def of_head(kv_head: Array) -> dict[str, Array]:
        """Results of all batch rows, `[B, 1, ...]`; those of arrays that the rows share are summed: `[1, ...]`."""

        def step(total: dict[str, Array], row: Array) -> tuple[dict[str, Array], dict[str, Array]]:
            results = one((kv_head, row))
            return {name: total[name] + results.pop(name) for name in total}, results

        shapes = jax.eval_shape(one, (kv_head, jnp.int32(0)))
        total = {name: jnp.zeros(shapes[name].shape, wide) for name in shared}
        total, rows = lax.scan(step, total, jnp.arange(batch))
        return {name: x[:, 0] for name, x in rows.items()} | total

    by_head = lax.map(of_head, jnp.arange(kv_heads))
    shapes = {name: x.shape for name, x in learned.items()} | {"out": dout.shape, "lse": dlse.shape}
    joined = {name: _join(x, _HEAD_AXIS[name], shapes[name]) for name, x in by_head.items()}
    if not spec.return_lse:
        del joined["lse"]
    return joined


_HEAD_AXIS: dict[str, int | None] = {
    **dict.fromkeys(("q", "k", "v", "out"), 2),
    **dict.fromkeys(("bias", "mask", "alibi_slopes", "sinks", "seeds", "blocks", "heads", "lse"), 1),
    **dict.fromkeys(("q_segments", "kv_segments", "rows"), None),
}


def _take(x: Array, axis: int | None, *, batch_row: Array, kv_head: Array, heads: tuple[int, int]) -> Array:
    """The part of an array for one batch row and the heads that read one key head."""
    x = lax.dynamic_slice_in_dim(x, batch_row, 1) if x.shape[0] > 1 else x
    if axis is None or x.shape[axis] == 1:
        return x
    size = x.shape[axis] // heads[1]
    return lax.dynamic_slice_in_dim(x, kv_head * size, size, axis)


def _join(x: Array, axis: int | None, shape: tuple[int, ...]) -> Array:
    """`[K, B or 1, ...]` to an array with all heads; results of arrays that the heads share are summed."""
    assert axis is not None
    if shape[axis] == 1:
        return x.sum(0).reshape(shape)
    return jnp.moveaxis(x, 0, axis).reshape(shape)


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
