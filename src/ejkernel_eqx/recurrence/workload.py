"""What the tuner needs of a recurrence: representative work, the plain mathematics to check it by, and its cost."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from .._exact import exactly
from .._tolerances import Tolerance, TOLERANCES
from ..dispatch import BOTH, Cost, FORWARD, Implementation, Part, Platform, Problem, Workload
from . import reference
from .example import example_problem as example_problem
from .samples import Inputs, make_inputs, make_step_inputs, spec_of, step_spec_of
from .spec import FLOATS, RecurrenceSpec, StepArrays, StepSpec

_RESULTS = ("out", "final_state")
_COST_CHUNK = 64  # the operations are counted in chunks of so many tokens


def workload(implementation: Implementation, problem: Problem) -> Workload:
    """The work of one problem on one of the platforms of this core."""
    platform = implementation.load()
    if problem.flag("step"):
        return _step_workload(platform, problem)
    spec, opaque = spec_of(problem), getattr(platform, "OPAQUE", False)
    learned = tuple(
        name
        for name in FLOATS
        if name in "qkv" or problem.flag("decay" if name == "g" else name) not in (False, "none")
    )
    table = TOLERANCES[problem.dtype("qkv")]
    tolerances: Mapping[str, Tolerance] = dict.fromkeys(_RESULTS, table["forward"]) | dict.fromkeys(
        learned, table["gradient"]
    )
    fields = getattr(platform, "PARTS", {})
    return Workload(
        make_inputs=functools.partial(make_inputs, problem),
        run=functools.partial(_run_kernels if opaque else _run, platform, spec),
        reference=functools.partial(_reference, spec),
        tolerances=tolerances,
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
    platform: Any, spec: RecurrenceSpec, inputs: Inputs, config: Any, **execute: Any
) -> dict[str, Array]:
    """Forward and backward by the platform's own functions."""
    arrays, dout, dfinal = inputs
    results = dict(platform.forward(arrays, spec, config, **execute))
    out, final = results.pop("out"), results.pop("final_state")
    grads = platform.backward(arrays, spec, config, results, dout, dfinal, **execute)
    return {"out": out, "final_state": final, **grads}


def _run(platform: Any, spec: RecurrenceSpec, inputs: Inputs, config: Any) -> dict[str, Array]:
    """Forward and backward of a platform that JAX differentiates."""
    return _differentiated(lambda arrays: platform.apply(arrays, spec, config), inputs)


def _differentiated(call: Any, inputs: Inputs) -> dict[str, Array]:
    arrays, dout, dfinal = inputs
    floats = {name: x for name in FLOATS if (x := getattr(arrays, name)) is not None}
    (out, final), pull = jax.vjp(lambda floats: call(arrays._replace(**floats)), floats)
    (grads,) = pull((dout.astype(out.dtype), dfinal.astype(final.dtype)))
    return {"out": out, "final_state": final, **grads}


def _reference(spec: RecurrenceSpec, inputs: Inputs) -> dict[str, Array]:
    """All results token by token in float32, of float32 and float64 operands in float64."""
    return exactly(_plainly, spec, inputs, inputs.arrays.q.dtype)


def _plainly(spec: RecurrenceSpec, inputs: Inputs) -> dict[str, Array]:
    wide = jnp.float64 if inputs.arrays.q.dtype == jnp.float64 else jnp.float32
    floats = {name: x.astype(wide) for name in FLOATS if (x := getattr(inputs.arrays, name)) is not None}
    widened = Inputs(
        inputs.arrays._replace(**floats), inputs.dout.astype(wide), inputs.dfinal_state.astype(wide)
    )
    return _differentiated(lambda arrays: reference.recur(arrays, spec), widened)


def _launches(platform: Any, spec: RecurrenceSpec, problem: Problem, config: Any) -> list[Any]:
    """What forward and backward launch; nothing is run."""
    found: list[Any] = []

    def everything() -> dict[str, Array]:
        return _run_kernels(platform, spec, make_inputs(problem, 0), config, execute=_recorder(found))

    jax.eval_shape(everything)
    return found


def _recorder(found: list[Any]) -> Any:
    def record(launch: Any, inputs: Mapping[str, Array]) -> dict[str, Array]:
        if not launch.is_empty:
            found.append(launch)
        return {name: jnp.zeros(out.shape, out.dtype) for name, out in launch.outputs.items()}

    return record


def _step_workload(platform: Any, problem: Problem) -> Workload:
    spec = step_spec_of(problem)
    table = TOLERANCES[problem.dtype("qkv")]["forward"]
    moved = jax.eval_shape(lambda: make_step_inputs(problem, 0))
    state = _bytes(moved.state) * (problem.dim("B") / problem.dim("slots") if problem.flag("slots") else 1.0)
    cells = problem.dim("B") * problem.dim("HS") * problem.dim("D") * problem.dim("V")
    results = 2 * problem.dim("B") * problem.dim("R") * problem.dim("V")
    cost = Cost(6.0 * cells, 2 * state + _bytes(moved._replace(state=None)) + results)
    return Workload(
        make_inputs=functools.partial(make_step_inputs, problem),
        run=functools.partial(_run_step, platform, spec),
        reference=functools.partial(_step_reference, spec),
        tolerances={"out": table, "state": TOLERANCES[problem.dtype("state")]["forward"]},
        forward=("out", "state"),
        costs={FORWARD: cost},
    )


def _run_step(platform: Any, spec: StepSpec, arrays: StepArrays, config: Any) -> dict[str, Array]:
    if getattr(platform, "OPAQUE", False):  # it takes exactly one leading axis
        out, state = platform.step(jax.tree.map(lambda x: x[None], arrays), spec, config)
        return {"out": out[0], "state": state[0]}
    out, state = platform.step(arrays, spec, config)
    return {"out": out, "state": state}


def _step_reference(spec: StepSpec, arrays: StepArrays) -> dict[str, Array]:
    out, state = reference.step(arrays, spec)
    return {"out": out, "state": state}


def costs(problem: Problem) -> dict[str, Cost]:
    """Operations of the matrix products in chunks of 64 tokens; every array read or written once."""
    tokens = problem.dim("B") * problem.dim("T")
    dim, values, heads = problem.dim("D"), problem.dim("V"), problem.dim("HS")
    inner = min(_COST_CHUNK, problem.dim("T"))
    # Scores and their use, the state and its use; a delta rule also has its own scores, their inverse's use and a second use of the state.
    products = inner * (dim + values) + 4 * dim * values
    if problem.flag("delta"):
        products += 2 * inner * (dim + values) + 2 * dim * values
    flops = float(tokens * heads * products)
    inputs = jax.eval_shape(lambda: make_inputs(problem, 0))
    given, results = _bytes(inputs.arrays), _bytes((inputs.dout, inputs.dfinal_state))
    gradients = sum(_bytes(getattr(inputs.arrays, name)) for name in FLOATS)
    return {
        FORWARD: Cost(flops, given + results),
        BOTH: Cost(3.5 * flops, 2 * given + 2 * results + gradients),
    }


def _bytes(tree: Any) -> float:
    return float(sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree)))
