"""The tuner's view of a kind of call: how to run it on a platform, a reference to check it against, its cost, and its launches."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._tolerances import TOLERANCES
from ..dispatch import BOTH, Cost, FORWARD, hooks_of, Implementation, Part, Platform, Problem, Workload
from ..launch import executing
from .arguments import accumulator
from .exact import exactly
from .kind import is_float, is_opaque, Kind, like, Named


class Inputs(NamedTuple):
    """The arrays of a call and cotangents of its results."""

    arrays: Any
    cotangents: Mapping[str, Any]


def workload_of(
    kind: Kind,
    implementation: Implementation,
    spec: Any,
    make: Callable[[int], Any],
    *,
    flops: float,
    backward: float = 2.0,
) -> Workload:
    """The work of calls with this spec and arrays from `make(seed)`, with random cotangents unless it makes `Inputs`, which have their own.

    `flops` are those of a forward pass; the backward pass takes `backward` times as many.
    """
    make_inputs = functools.partial(_with_cotangents, kind, spec, make)
    platform, shapes = implementation.load(), jax.eval_shape(lambda: make_inputs(0))
    learned = tuple(_learned(kind, shapes.arrays))
    table = TOLERANCES[jnp.dtype(shapes.cotangents["out"].dtype).name]
    named = {FORWARD: kind.results, BOTH: learned}
    results = kind.wanted(spec) if kind.wanted else kind.results
    run = functools.partial(
        _run_plainly if kind.differentiates(platform) else _run_kernels, kind, platform, spec, results
    )
    moved = bytes_of(shapes.arrays) + bytes_of(shapes.cotangents)
    gradients = bytes_of([getattr(shapes.arrays, name) for name in learned])
    return Workload(
        make_inputs=make_inputs,
        run=run,
        reference=functools.partial(_reference, kind, spec),
        tolerances=dict.fromkeys(results, table["forward"]) | dict.fromkeys(learned, table["gradient"]),
        forward=results,
        # The fields of a configuration that are tuned one after the other, and the results that decide.
        parts=tuple(
            Part(
                field, tuple(name for name in named.get(names, names.split()) if name in {*results, *learned})
            )
            for field, names in hooks_of(platform).PARTS.items()
        ),
        costs={FORWARD: Cost(flops, moved), BOTH: Cost((1.0 + backward) * flops, 2 * moved + gradients)},
        launches=functools.partial(launches_of, run, make_inputs)
        if implementation.platform is Platform.TRITON
        else None,
    )


def _with_cotangents(kind: Kind, spec: Any, make: Callable[[int], Any], seed: int) -> Inputs:
    made = make(seed)
    return made if isinstance(made, Inputs) else Inputs(made, random_cotangents(kind, made, spec, seed))


def step_workload_of(
    kind: Kind,
    implementation: Implementation,
    problem: Problem,
    spec: Any,
    make_inputs: Callable[[int], Any],
    *,
    flops: float,
) -> Workload:
    """The work of steps: one token per row, with as many states in a pool as there are rows."""
    shapes = jax.eval_shape(lambda: make_inputs(0))
    main = getattr(shapes, kind.learned[0])
    out = jax.eval_shape(lambda: kind.by_name(kind.reference(make_inputs(0), spec)))["out"]
    share = problem.dim("B") / problem.dim("slots") if problem.flag("slots") else 1.0
    moved = 2 * share * bytes_of(shapes.state) + bytes_of(shapes._replace(state=None))
    table = {
        name: TOLERANCES[x.dtype.name]["forward"] for name, x in (("out", main), ("state", shapes.state))
    }
    return Workload(
        make_inputs=make_inputs,
        run=functools.partial(_run_step, kind, implementation.load(), spec),
        reference=lambda arrays: kind.by_name(kind.reference(arrays, spec)),
        tolerances=table,
        forward=kind.results,
        costs={FORWARD: Cost(flops, moved + math.prod(out.shape) * main.dtype.itemsize)},
    )


def random_cotangents(kind: Kind, arrays: Any, spec: Any, seed: int) -> Named:
    """Random cotangents in the shapes of the results that are float and the dtype of the first array."""
    results = jax.eval_shape(lambda: kind.by_name(kind.reference(arrays, spec)))
    keys = jax.random.split(jax.random.key(seed + 1, impl="rbg"), len(results))
    dtype = getattr(arrays, kind.learned[0]).dtype
    return {
        name: jax.random.normal(key, results[name].shape, dtype)
        for key, name in zip(keys, kind.results)
        if is_float(results[name])
    }


def random_offsets(problem: Problem, rng: np.random.Generator, count: str) -> Array:
    """Offsets of packed sequences that fill every row, int32 `[B, count + 1]`; `count` is the letter of their number."""
    batch, length = problem.dim("B"), problem.dim("T")
    inner = np.sort(rng.integers(0, length + 1, (batch, problem.dim(count) - 1)), axis=1)
    ends = [np.zeros((batch, 1), int), inner, np.full((batch, 1), length)]
    return jnp.asarray(np.concatenate(ends, axis=1), jnp.int32)


def with_packing(inputs: Inputs, problem: Problem, seed: int, count: str) -> Inputs:
    """These inputs with random packed sequences or about four segments in every row, if the problem has them."""
    rng, tokens = np.random.default_rng(seed), (problem.dim("B"), problem.dim("T"))
    more: dict[str, Array] = {}
    if problem.flag("packed") == "offsets":
        more["offsets"] = random_offsets(problem, rng, count)
    if problem.flag("packed") == "segments":
        begins = rng.random(tokens) < 4 / max(tokens[1], 1)
        starts = np.maximum.accumulate(np.where(begins, np.arange(tokens[1]), -1), axis=1)
        more["starts"] = jnp.asarray(starts, jnp.int32)
    return inputs._replace(arrays=inputs.arrays._replace(**more))


def exact_results(kind: Kind, spec: Any, inputs: Inputs) -> Named:
    """Results and gradients of the reference in float32, or in float64 for float64 operands."""
    main = getattr(inputs.arrays, kind.learned[0])
    wide = accumulator(main.dtype)
    widen = lambda x: x.astype(wide) if jnp.issubdtype(x.dtype, jnp.floating) else x
    return _differentiated(kind, lambda arrays: kind.reference(arrays, spec), jax.tree.map(widen, inputs))


def _learned(kind: Kind, arrays: Any) -> dict[str, Any]:
    return {name: x for name in kind.learned if (x := getattr(arrays, name)) is not None}


def _run_kernels(
    kind: Kind, platform: Any, spec: Any, wanted: Sequence[str], inputs: Inputs, config: Any
) -> Named:
    """Forward and backward by the platform's own functions."""
    arrays, cotangents = inputs
    saved = kind.forward(platform, arrays, spec, config, True)
    results = {name: saved.pop(name) for name in kind.results}
    saved |= {name: results[name] for name in kind.read}
    known = dict(cotangents)
    grads = kind.kept_gradients(arrays, spec, saved, known)
    grads = grads or kind.backward(platform, arrays, spec, config, saved, known)
    gradients = {name: like(x, getattr(arrays, name)) for name, x in grads.items()}
    return {name: results[name] for name in wanted} | gradients


def _run_plainly(
    kind: Kind, platform: Any, spec: Any, wanted: Sequence[str], inputs: Inputs, config: Any
) -> Named:
    """Forward and backward of a platform that JAX differentiates."""
    return _differentiated(kind, lambda arrays: kind.plainly(platform, arrays, spec, config), inputs)


def _differentiated(kind: Kind, function: Callable[[Any], Any], inputs: Inputs) -> Named:
    arrays, cotangents = inputs

    def call(learned: Named) -> Named:
        results = kind.by_name(function(arrays._replace(**learned)))
        return {name: x for name, x in results.items() if is_float(x)}

    results, pull = jax.vjp(call, _learned(kind, arrays))
    (grads,) = pull({name: cotangents[name].astype(x.dtype) for name, x in results.items()})
    return results | grads


def _reference(kind: Kind, spec: Any, inputs: Inputs) -> Named:
    return exactly(_of_kind(kind), spec, inputs, getattr(inputs.arrays, kind.learned[0]).dtype)


@functools.cache
def _of_kind(kind: Kind) -> Callable[[Any, Inputs], Named]:
    """One function per kind, so that it is compiled once."""
    return functools.partial(exact_results, kind)


def _run_step(kind: Kind, platform: Any, spec: Any, arrays: Any, config: Any) -> Named:
    if not is_opaque(platform):
        return kind.by_name(platform.step(arrays, spec, config))
    # It requires exactly one leading axis.
    lead = {
        name: x[None] for name, x in arrays._asdict().items() if x is not None and name not in kind.shared
    }
    results = kind.by_name(platform.step(arrays._replace(**lead), spec, config))
    return {name: x[0] for name, x in results.items()}


def launches_of(run: Callable[..., Any], make_inputs: Callable[[int], Any], config: Any) -> list[Any]:
    """The launches of `run(inputs, config)`; nothing is run."""
    found: list[Any] = []

    def record(launch: Any, arrays: Mapping[str, Array]) -> Named:
        if not launch.is_empty:
            found.append(launch)
        return {name: jnp.zeros(out.shape, out.dtype) for name, out in launch.outputs.items()}

    with executing(record):
        jax.eval_shape(lambda: run(make_inputs(0), config))
    return found


def bytes_of(tree: Any) -> float:
    return float(sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree)))
