"""What the tuner needs of a selective scan: representative work, the plain mathematics to check it by, and its cost."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from .._exact import exactly
from .._tolerances import TOLERANCES
from ..dispatch import BOTH, Cost, FORWARD, Implementation, Part, Platform, Problem, Workload
from . import reference
from .example import example_problem as example_problem
from .samples import Inputs, make_inputs, make_step_inputs, spec_of
from .spec import FLOATS, ScanSpec, StepArrays

_RESULTS = ("out", "final_state")
_FLOPS = 7.0  # of a state and token: an exponential (counted as two), the decay, the write and the read


def workload(implementation: Implementation, problem: Problem) -> Workload:
    """The work of one problem on one of the platforms of this core."""
    platform = implementation.load()
    if problem.flag("step"):
        return _step_workload(platform, problem)
    spec, opaque = spec_of(problem), getattr(platform, "OPAQUE", False)
    optional = ("D", "z", "dt_bias", "initial_state")
    learned = tuple(name for name in FLOATS if name not in optional or problem.flag(name))
    table = TOLERANCES[problem.dtype("x")]
    fields = getattr(platform, "PARTS", {})
    return Workload(
        make_inputs=functools.partial(make_inputs, problem),
        run=functools.partial(_run_kernels if opaque else _run, platform, spec),
        reference=functools.partial(_reference, spec),
        tolerances=dict.fromkeys(_RESULTS, table["forward"]) | dict.fromkeys(learned, table["gradient"]),
        forward=_RESULTS,
        parts=tuple(
            Part(field, _RESULTS if direction == FORWARD else learned) for field, direction in fields.items()
        ),
        costs=costs(problem),
        launches=functools.partial(_launches, platform, spec, problem)
        if implementation.platform is Platform.TRITON
        else None,
    )


def _run_kernels(
    platform: Any, spec: ScanSpec, inputs: Inputs, config: Any, **execute: Any
) -> dict[str, Array]:
    """Forward and backward by the platform's own functions."""
    arrays, dout, dfinal = inputs
    results = dict(platform.forward(arrays, spec, config, **execute))
    grads = dict(platform.backward(arrays, spec, config, results.pop("saved"), dout, dfinal, **execute))
    for name in ("B", "C"):
        grads[name] = grads[name].sum(1)
    for name, grad in grads.items():
        given = getattr(arrays, name)
        grads[name] = jnp.sum(grad, tuple(range(grad.ndim - given.ndim))).astype(given.dtype)
    return results | grads


def _run(platform: Any, spec: ScanSpec, inputs: Inputs, config: Any) -> dict[str, Array]:
    """Forward and backward of a platform that JAX differentiates."""
    return _differentiated(lambda arrays: platform.apply(arrays, spec, config), inputs)


def _differentiated(call: Any, inputs: Inputs) -> dict[str, Array]:
    arrays, dout, dfinal = inputs
    floats = {name: x for name in FLOATS if (x := getattr(arrays, name)) is not None}
    (out, final), pull = jax.vjp(lambda floats: call(arrays._replace(**floats)), floats)
    (grads,) = pull((dout.astype(out.dtype), dfinal.astype(final.dtype)))
    return {"out": out, "final_state": final, **grads}


def _reference(spec: ScanSpec, inputs: Inputs) -> dict[str, Array]:
    """All results token by token in float32, of float32 and float64 operands in float64."""
    return exactly(_plainly, spec, inputs, inputs.arrays.x.dtype)


def _plainly(spec: ScanSpec, inputs: Inputs) -> dict[str, Array]:
    wide = reference.wide_dtype(inputs.arrays.x)
    floats = {name: x.astype(wide) for name in FLOATS if (x := getattr(inputs.arrays, name)) is not None}
    widened = Inputs(
        inputs.arrays._replace(**floats), inputs.dout.astype(wide), inputs.dfinal_state.astype(wide)
    )
    return _differentiated(lambda arrays: reference.scan(arrays, spec), widened)


def _launches(platform: Any, spec: ScanSpec, problem: Problem, config: Any) -> list[Any]:
    """What forward and backward launch; nothing is run."""
    found: list[Any] = []

    def record(launch: Any, inputs: Mapping[str, Array]) -> dict[str, Array]:
        if not launch.is_empty:
            found.append(launch)
        return {name: jnp.zeros(out.shape, out.dtype) for name, out in launch.outputs.items()}

    jax.eval_shape(lambda: _run_kernels(platform, spec, make_inputs(problem, 0), config, execute=record))
    return found


def _step_workload(platform: Any, problem: Problem) -> Workload:
    spec, table = spec_of(problem), TOLERANCES[problem.dtype("x")]["forward"]
    moved = jax.eval_shape(lambda: make_step_inputs(problem, 0))
    share = problem.dim("B") / problem.dim("slots") if problem.flag("slots") else 1.0
    cells = problem.dim("B") * problem.dim("I") * problem.dim("N")
    bytes_ = 2 * share * _bytes(moved.state) + _bytes(moved._replace(state=None)) + _bytes(moved.x)
    return Workload(
        make_inputs=functools.partial(make_step_inputs, problem),
        run=functools.partial(_run_step, platform, spec),
        reference=functools.partial(_step_reference, spec),
        tolerances={"out": table, "state": TOLERANCES[problem.dtype("state")]["forward"]},
        forward=("out", "state"),
        costs={FORWARD: Cost(_FLOPS * cells, bytes_)},
    )


def _run_step(platform: Any, spec: ScanSpec, arrays: StepArrays, config: Any) -> dict[str, Array]:
    out, state = platform.step(arrays, spec, config)
    return {"out": out, "state": state}


def _step_reference(spec: ScanSpec, arrays: StepArrays) -> dict[str, Array]:
    out, state = reference.step(arrays, spec)
    return {"out": out, "state": state}


def costs(problem: Problem) -> dict[str, Cost]:
    """Operations on states; every array read or written once."""
    flops = _FLOPS * math.prod(problem.dim(name) for name in ("B", "T", "I", "N"))
    inputs = jax.eval_shape(lambda: make_inputs(problem, 0))
    given, results = _bytes(inputs.arrays), _bytes((inputs.dout, inputs.dfinal_state))
    gradients = sum(_bytes(getattr(inputs.arrays, name)) for name in FLOATS)
    return {
        FORWARD: Cost(flops, given + results),
        BOTH: Cost(3.0 * flops, 2 * given + 2 * results + gradients),
    }


def _bytes(tree: Any) -> float:
    return float(sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree)))
