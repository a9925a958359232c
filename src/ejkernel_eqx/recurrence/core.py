"""One call of a recurrence, from resolved arrays to a platform and back: choice and differentiation.

`recur` and `step` are the only ways from an operation of this family to a kernel, and hold its only `custom_vjp`s. A platform
whose kernels JAX differentiates itself (XLA) has `apply` and `step`; an opaque one has `forward`, `backward` and `step`.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from .._jitted import jitted
from .._kernel import Plan
from .._reverse_only import FORWARD_MODE, reverse_only
from ..dispatch import announce, listening, Problem, Selection, withdraw
from ..dispatch.labels import kernel_scope
from ..parallel import given_of, how_split, match_sharding, match_varying, opaque, over_mesh
from . import reference
from .spec import (
    CONSTANT,
    FLOATS,
    heads_of,
    KEY,
    RecurrenceArrays,
    RecurrenceSpec,
    SCALAR,
    STEP_FLOATS,
    StepArrays,
    StepSpec,
    VALUE,
)

OUT_NAME, STATE_NAME, SAVED_NAME = "recurrence_out", "recurrence_state", "recurrence_saved"
"""Names for `jax.checkpoint_policies.save_only_these_names`: the results, and what only the forward kernels can make again."""

Arrays = dict[str, Array]


def recur(plan: Plan, operation: str, arrays: RecurrenceArrays, spec: RecurrenceSpec) -> tuple[Array, Array]:
    """`out [*, T, R, V]` in v's dtype and the final state in the spec's, on the platform that the plan chooses."""
    return jitted(_recur, plan, operation, spec)(arrays)


def _recur(plan: Plan, operation: str, spec: RecurrenceSpec, arrays: RecurrenceArrays) -> tuple[Array, Array]:
    selection = plan.select(problem_of(operation, arrays, spec), quiet=True)
    platform = selection.implementation.load()
    given = given_of(arrays)
    if getattr(platform, "OPAQUE", False):
        given = reverse_only(match_varying(given, given), operation, selection.platform, FORWARD_MODE)
        return _differentiable(plan, selection, spec)(given)

    def transparent(given: Arrays) -> Arrays:
        call = lambda arrays: platform.apply(arrays, spec, selection.config)
        out, state = _over_leading(call, arrays.q.ndim - 3, RecurrenceArrays(**given))
        return {"out": out, "final_state": state}

    with kernel_scope(announce(selection)):
        results = over_mesh(transparent, given, axes_of(arrays, spec))
    return results["out"], results["final_state"]


def step(plan: Plan, operation: str, arrays: StepArrays, spec: StepSpec) -> tuple[Array, Array]:
    """`out [*, B, R, V]` and the new states (the whole pool), on the platform that the plan chooses."""
    return jitted(_step, plan, operation, spec)(arrays)


def _step(plan: Plan, operation: str, spec: StepSpec, arrays: StepArrays) -> tuple[Array, Array]:
    selection = plan.select(step_problem_of(operation, arrays, spec), quiet=True)
    platform = selection.implementation.load()
    given = given_of(arrays)
    if getattr(platform, "OPAQUE", False):
        given = reverse_only(match_varying(given, given), operation, selection.platform, FORWARD_MODE)
        return _opaque_step(plan, selection, spec)(given)

    def transparent(given: Arrays) -> Arrays:
        out, state = platform.step(StepArrays(**given), spec, selection.config)
        return {"out": out, "state": state}

    with kernel_scope(announce(selection)):
        results = over_mesh(transparent, given, _step_axes(arrays, spec))
    return results["out"], results["state"]


def _over_leading(call: Callable[..., Any], lead: int, arrays: RecurrenceArrays) -> tuple[Array, Array]:
    """A function of one batch axis over any number of them, without merging axes that may be sharded."""
    if lead == 0:
        out, state = call(jax.tree.map(lambda x: x[None], arrays))
        return out[0], state[0]
    for _ in range(lead - 1):
        call = jax.vmap(call)
    return call(arrays)


def problem_of(operation: str, arrays: RecurrenceArrays, spec: RecurrenceSpec) -> Problem:
    """The host metadata of a call; shapes are those seen here, so the local ones inside a partitioned body."""
    heads = heads_of(arrays, spec)
    packed = "offsets" if arrays.offsets is not None else "segments" if arrays.starts is not None else None
    dims = {
        "B": math.prod(arrays.q.shape[:-3]),
        "T": arrays.q.shape[-3],
        "D": arrays.q.shape[-1],
        "V": arrays.v.shape[-1],
        "R": heads.out,
        "HS": heads.state,
        "Hq": arrays.q.shape[-2],
        "Hk": arrays.k.shape[-2],
        "Hv": arrays.v.shape[-2],
    }
    lengths = {"B", "T"}
    counts = {"R", "HS", "Hq", "Hk", "Hv"}
    if arrays.g is not None:
        dims["Hg"] = arrays.g.shape[-1] if spec.decay in (CONSTANT, SCALAR) else arrays.g.shape[-2]
        counts.add("Hg")
    if arrays.beta is not None:
        dims["Hb"] = arrays.beta.shape[-1]
        counts.add("Hb")
    if arrays.offsets is not None:
        dims["N"] = arrays.offsets.shape[-1] - 1
        lengths.add("N")
    return Problem.make(
        operation,
        dims=dims,
        dtypes=_dtypes(arrays.q, arrays.g, spec.state_dtype),
        flags={
            "decay": spec.decay,
            "delta": spec.delta,
            "beta": arrays.beta is not None,
            "skip": arrays.skip is not None,
            "initial_state": arrays.initial_state is not None,
            "packed": packed,
            "step": False,
        },
        lengths=lengths,
        counts=counts,
        # It is read once a sequence: what is fastest without one is with one.
        requirements={"initial_state"},
    )


def step_problem_of(operation: str, arrays: StepArrays, spec: StepSpec) -> Problem:
    state_heads = arrays.state.shape[-3]
    dims = {
        "B": math.prod(arrays.q.shape[:-2]),
        "T": 1,
        "D": arrays.q.shape[-1],
        "V": arrays.v.shape[-1],
        "R": max(state_heads, arrays.q.shape[-2]),
        "HS": state_heads,
        "Hq": arrays.q.shape[-2],
        "Hk": arrays.k.shape[-2],
        "Hv": arrays.v.shape[-2],
    }
    if arrays.indices is not None:
        dims["slots"] = arrays.state.shape[-4]
    return Problem.make(
        operation,
        dims=dims,
        dtypes=_dtypes(arrays.q, arrays.g, arrays.state.dtype),
        flags={
            "decay": spec.decay,
            "delta": spec.delta,
            "beta": arrays.beta is not None,
            "skip": arrays.skip is not None,
            "slots": arrays.indices is not None,
            "transposed": spec.transposed,
            "step": True,
        },
        lengths={"B", "slots"},
        counts={"R", "HS", "Hq", "Hk", "Hv"},
    )


def _dtypes(q: Any, g: Any, state: Any) -> dict[str, Any]:
    dtypes = {"qkv": q.dtype, "state": jnp.dtype(state)}
    return dtypes if g is None else dtypes | {"g": g.dtype}


def axes_of(arrays: RecurrenceArrays, spec: RecurrenceSpec) -> dict[str, tuple[str, ...]]:
    """The axes behind the leading ones of every array of a call and of its results."""
    heads = heads_of(arrays, spec)
    h = lambda x: f"H{x.shape[-2]}"
    state = (*(("N",) if arrays.offsets is not None else ()), f"H{heads.state}", "D", "V")
    axes: dict[str, tuple[str, ...]] = {
        "q": ("T", h(arrays.q), "D"),
        "k": ("T", h(arrays.k), "D"),
        "v": ("T", h(arrays.v), "V"),
        "skip": (f"H{heads.state}", "V"),
        "initial_state": state,
        "starts": ("T",),
        "offsets": ("offsets",),
        "out": ("T", f"H{heads.out}", "V"),
        "final_state": state,
    }
    if arrays.g is not None:
        if spec.decay == CONSTANT:
            axes["g"] = (f"H{arrays.g.shape[-1]}",)
        elif spec.decay in (KEY, VALUE):
            axes["g"] = ("T", h(arrays.g), "D" if spec.decay == KEY else "V")
        else:
            axes["g"] = ("T", f"H{arrays.g.shape[-1]}")
    if arrays.beta is not None:
        axes["beta"] = ("T", f"H{arrays.beta.shape[-1]}")
    return axes


def _differentiable(plan: Plan, selection: Selection, spec: RecurrenceSpec) -> Callable[[Arrays], Any]:
    """The call of an opaque platform as a function of its arrays, with the core's own backward."""
    platform, implementation = selection.platform, selection.implementation.load()
    split = how_split(platform, plan.device)

    def choose(given: Arrays) -> tuple[RecurrenceArrays, Selection]:
        """By the shapes of the launch: all leading axes are merged by now."""
        names = RecurrenceArrays._fields
        arrays = RecurrenceArrays(**{n: x for n, x in given.items() if n in names})
        problem = problem_of(selection.problem.operation, arrays, spec)
        return arrays, plan.select(problem, platform=platform)

    def forward(given: Arrays) -> Arrays:
        arrays, chosen = choose(given)
        with kernel_scope(chosen):
            return implementation.forward(arrays, spec, chosen.config)

    def backward(given: Arrays) -> Arrays:
        arrays, chosen = choose(given)
        saved = {n.removeprefix("saved_"): x for n, x in given.items() if n.startswith("saved_")}
        with kernel_scope(chosen):
            grads = implementation.backward(
                arrays, spec, chosen.config, saved, given["dout"], given["dfinal_state"]
            )
        return {f"d{name}": x for name, x in grads.items()}

    def wrapped(
        function: Callable[[Arrays], Arrays], given: Arrays, arrays: RecurrenceArrays, summed: bool = False
    ) -> Arrays:
        axes = axes_of(arrays, spec) | dict(implementation.saved_axes(arrays, spec))
        axes |= {
            f"saved_{name}": letters for name, letters in implementation.saved_axes(arrays, spec).items()
        }
        axes |= {f"d{name}": letters for name, letters in axes.items()}
        return opaque(function, axes, axes, split=split, summed=summed)(given)

    def arrays_of(given: Arrays) -> RecurrenceArrays:
        return RecurrenceArrays(**{n: x for n, x in given.items() if n in RecurrenceArrays._fields})

    undifferentiated: list[Selection] = []

    @jax.custom_vjp
    def call(given: Arrays) -> tuple[Array, Array]:
        with listening(undifferentiated.append):
            results = wrapped(forward, given, arrays_of(given))
        return results["out"], results["final_state"]

    def call_forward(given: Arrays) -> Any:
        for known in undifferentiated:
            withdraw(known)
        results = wrapped(forward, given, arrays_of(given))
        saved = {
            f"saved_{n}": checkpoint_name(x, SAVED_NAME)
            for n, x in results.items()
            if n not in ("out", "final_state")
        }
        out = checkpoint_name(results["out"], OUT_NAME)
        return (out, checkpoint_name(results["final_state"], STATE_NAME)), (given, saved)

    def call_backward(residuals: Any, cotangents: tuple[Array, Array]) -> tuple[dict[str, Array | None]]:
        given, saved = residuals
        dout, dfinal = cotangents
        everything = {**given, **saved, "dout": dout, "dfinal_state": dfinal}
        grads = wrapped(backward, everything, arrays_of(given), summed=True)
        return (
            {
                name: match_sharding(grads[f"d{name}"].astype(x.dtype), x) if name in FLOATS else None
                for name, x in given.items()
            },
        )

    call.defvjp(call_forward, call_backward)
    return call


def _opaque_step(plan: Plan, selection: Selection, spec: StepSpec) -> Callable[[Arrays], Any]:
    """A step on an opaque platform; its gradient is that of the plain mathematics."""
    platform, implementation = selection.platform, selection.implementation.load()
    split = how_split(platform, plan.device)

    def launch(given: Arrays) -> Arrays:
        arrays = StepArrays(**given)
        chosen = plan.select(step_problem_of(selection.problem.operation, arrays, spec), platform=platform)
        with kernel_scope(chosen):
            out, state = implementation.step(arrays, spec, chosen.config)
        return {"out": out, "state": state}

    def plain(floats: Arrays, others: Arrays) -> tuple[Array, Array]:
        arrays = StepArrays(**floats, **others)
        out, state = reference.step(arrays, spec)
        return out.astype(arrays.v.dtype), state

    @jax.custom_vjp
    def call(given: Arrays) -> tuple[Array, Array]:
        axes = _step_axes(StepArrays(**given), spec)
        results: Arrays = opaque(launch, axes, axes, split=split)(given)
        return results["out"], results["state"]

    def call_forward(given: Arrays) -> Any:
        return call(given), given

    def call_backward(given: Arrays, cotangents: tuple[Array, Array]) -> tuple[dict[str, Array | None]]:
        floats = {n: x for n, x in given.items() if n in STEP_FLOATS}
        others = {n: x for n, x in given.items() if n not in STEP_FLOATS}
        _, pull = jax.vjp(lambda floats: plain(floats, others), floats)
        (grads,) = pull(cotangents)
        return ({name: grads.get(name) for name in given},)

    call.defvjp(call_forward, call_backward)
    return call


def _step_axes(arrays: StepArrays, spec: StepSpec) -> dict[str, tuple[str, ...]]:
    h = lambda x: f"H{x.shape[-2]}"
    state_heads = arrays.state.shape[-3]
    out_heads = max(state_heads, arrays.q.shape[-2])
    channels = ("V", "D") if spec.transposed else ("D", "V")
    # Rows with a state each are split over devices as leading axes are; a pool of states is everyone's.
    rows, slots = ("b", "b") if arrays.indices is None else ("B", "slots")
    axes: dict[str, tuple[str, ...]] = {
        "q": (rows, h(arrays.q), "D"),
        "k": (rows, h(arrays.k), "D"),
        "v": (rows, h(arrays.v), "V"),
        "state": (slots, f"H{state_heads}", *channels),
        "skip": (f"H{state_heads}", "V"),
        "indices": (rows,),
        "out": (rows, f"H{out_heads}", "V"),
    }
    if arrays.g is not None:
        channel = {KEY: ("D",), VALUE: ("V",)}.get(spec.decay)
        axes["g"] = (rows, h(arrays.g), *channel) if channel else (rows, f"H{arrays.g.shape[-1]}")
    if arrays.beta is not None:
        axes["beta"] = (rows, f"H{arrays.beta.shape[-1]}")
    return axes
