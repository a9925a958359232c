"""One call of a selective scan, from resolved arrays to a platform and back: choice and differentiation.

`scan` and `step` are the only ways from the operation to a kernel, and hold its only `custom_vjp`s. A platform whose kernels JAX
differentiates itself (XLA) has `apply(arrays, spec, config)` and `step(arrays, spec, config)`, with any leading axes. An opaque one has, with
exactly one leading axis, `forward(arrays, spec, config, *, save, execute)`, which gives `out`, `final_state` and where asked to `save` the
`saved` states; `backward(arrays, spec, config, saved, dout, dfinal_state, *, execute)`, which gives a gradient by name
for every float array, those of `B` and `C` in `parts_of` parts behind the leading axis; and `step`.
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
from .spec import FLOATS, ScanArrays, ScanSpec, SHARED, STEP_FLOATS, StepArrays

OUT_NAME, STATE_NAME, SAVED_NAME = "selective_scan_out", "selective_scan_state", "selective_scan_saved"
"""Names for `jax.checkpoint_policies.save_only_these_names`: the results, and what only the forward kernels can make again."""

Arrays = dict[str, Array]


def scan(plan: Plan, operation: str, arrays: ScanArrays, spec: ScanSpec) -> tuple[Array, Array]:
    """`out [*, T, I]` in x's dtype and the final state in the spec's, on the platform that the plan chooses."""
    return jitted(_scan, plan, operation, spec)(arrays)


def _scan(plan: Plan, operation: str, spec: ScanSpec, arrays: ScanArrays) -> tuple[Array, Array]:
    selection = plan.select(problem_of(operation, arrays, spec), quiet=True)
    platform = selection.implementation.load()
    given = given_of(arrays)
    if getattr(platform, "OPAQUE", False):
        given = reverse_only(match_varying(given, given), operation, selection.platform, FORWARD_MODE)
        return _differentiable(plan, selection, spec)(given)

    def transparent(given: Arrays) -> Arrays:
        out, state = platform.apply(ScanArrays(**given), spec, selection.config)
        return {"out": out, "final_state": state}

    with kernel_scope(announce(selection)):
        results = over_mesh(transparent, given, _scan_axes(arrays))
    return results["out"], results["final_state"]


def step(plan: Plan, operation: str, arrays: StepArrays, spec: ScanSpec) -> tuple[Array, Array]:
    """`out [*, B, I]` and the new states (the whole pool), on the platform that the plan chooses."""
    return jitted(_step, plan, operation, spec)(arrays)


def _step(plan: Plan, operation: str, spec: ScanSpec, arrays: StepArrays) -> tuple[Array, Array]:
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
        results = over_mesh(transparent, given, _step_axes(arrays))
    return results["out"], results["state"]


def problem_of(operation: str, arrays: ScanArrays, spec: ScanSpec) -> Problem:
    """The host metadata of a call; shapes are those seen here, so the local ones inside a partitioned body."""
    packed = "offsets" if arrays.offsets is not None else "segments" if arrays.starts is not None else None
    dims = {"B": math.prod(arrays.x.shape[:-2]), "T": arrays.x.shape[-2], **_sizes(arrays)}
    lengths = {"B", "T"}
    if arrays.offsets is not None:
        dims["S"] = arrays.offsets.shape[-1] - 1
        lengths.add("S")
    return Problem.make(
        operation,
        dims=dims,
        dtypes=_dtypes(arrays, spec.state_dtype),
        flags={
            **_flags(arrays, spec),
            "initial_state": arrays.initial_state is not None,
            "packed": packed,
            "step": False,
        },
        lengths=lengths,
        counts={"I"},
    )


def step_problem_of(operation: str, arrays: StepArrays, spec: ScanSpec) -> Problem:
    dims = {"B": math.prod(arrays.x.shape[:-1]), "T": 1, **_sizes(arrays)}
    if arrays.indices is not None:
        dims["slots"] = arrays.state.shape[-3]
    return Problem.make(
        operation,
        dims=dims,
        dtypes=_dtypes(arrays, arrays.state.dtype),
        flags={**_flags(arrays, spec), "slots": arrays.indices is not None, "step": True},
        lengths={"B", "slots"},
        counts={"I"},
    )


def _sizes(arrays: ScanArrays | StepArrays) -> dict[str, int]:
    return {"I": arrays.A.shape[-2], "N": arrays.A.shape[-1], "G": arrays.B.shape[-2]}


def _dtypes(arrays: ScanArrays | StepArrays, state: Any) -> dict[str, Any]:
    dtypes = {"x": arrays.x.dtype, "dt": arrays.dt.dtype, "B": arrays.B.dtype, "state": jnp.dtype(state)}
    return dtypes if arrays.z is None else dtypes | {"z": arrays.z.dtype}


def _flags(arrays: ScanArrays | StepArrays, spec: ScanSpec) -> dict[str, bool]:
    return {
        "softplus": spec.softplus,
        "D": arrays.D is not None,
        "z": arrays.z is not None,
        "dt_bias": arrays.dt_bias is not None,
    }


def axes_of(arrays: ScanArrays | StepArrays, rows: str = "T") -> dict[str, tuple[str, ...]]:
    """The axes behind the leading ones of every array that the two kinds of call share. Channels do not mix: they may be split as
    heads are."""
    channels, groups = f"H{arrays.x.shape[-1]}", f"H{arrays.B.shape[-2]}"
    over_tokens, projection = (rows, channels), (rows, groups, "N")
    return {
        "x": over_tokens,
        "dt": over_tokens,
        "z": over_tokens,
        "out": over_tokens,
        "A": (channels, "N"),
        "B": projection,
        "C": projection,
        "D": (channels,),
        "dt_bias": (channels,),
    }


def _scan_axes(arrays: ScanArrays) -> dict[str, tuple[str, ...]]:
    axes = axes_of(arrays)
    channels = axes["D"][0]
    state = (*(("S",) if arrays.offsets is not None else ()), channels, "N")
    axes |= {"initial_state": state, "final_state": state, "starts": ("T",), "offsets": ("offsets",)}
    axes |= {"saved": ("chunks", "N", channels)}
    return axes | {f"d{name}": letters for name, letters in axes.items()}


def _step_axes(arrays: StepArrays) -> dict[str, tuple[str, ...]]:
    # Rows with a state each are split over devices as leading axes are; a pool of states is everyone's.
    rows, slots = ("b", "b") if arrays.indices is None else ("B", "slots")
    axes = axes_of(arrays, rows)
    return axes | {"state": (slots, *axes["A"]), "indices": (rows,)}


def _differentiable(plan: Plan, selection: Selection, spec: ScanSpec) -> Callable[[Arrays], Any]:
    """The call of an opaque platform as a function of its arrays, with the core's own backward."""
    platform, implementation = selection.platform, selection.implementation.load()
    split = how_split(platform, plan.device)

    def arrays_of(given: Arrays) -> ScanArrays:
        return ScanArrays(**{name: x for name, x in given.items() if name in ScanArrays._fields})

    def choose(given: Arrays) -> tuple[ScanArrays, Selection]:
        """By the shapes of the launch: all leading axes are merged by now."""
        arrays = arrays_of(given)
        return arrays, plan.select(problem_of(selection.problem.operation, arrays, spec), platform=platform)

    def forward(save: bool, given: Arrays) -> Arrays:
        arrays, chosen = choose(given)
        with kernel_scope(chosen):
            return implementation.forward(arrays, spec, chosen.config, save=save)

    def backward(given: Arrays) -> Arrays:
        arrays, chosen = choose(given)
        with kernel_scope(chosen):
            grads = implementation.backward(
                arrays, spec, chosen.config, given["saved"], given["dout"], given["dfinal_state"]
            )
        # What each block of channels gives to the projections that it shares.
        grads |= {name: jnp.sum(grads[name], axis=1) for name in ("B", "C")}
        return {f"d{name}": x for name, x in grads.items()}

    def wrapped(function: Callable[[Arrays], Arrays], given: Arrays, summed: bool = False) -> Arrays:
        axes = _scan_axes(arrays_of(given))
        return opaque(function, axes, axes, split=split, shared=SHARED, summed=summed)(given)

    undifferentiated: list[Selection] = []

    @jax.custom_vjp
    def call(given: Arrays) -> tuple[Array, Array]:
        with listening(undifferentiated.append):
            results = wrapped(lambda given: forward(False, given), given)
        return results["out"], results["final_state"]

    def call_forward(given: Arrays) -> Any:
        for known in undifferentiated:
            withdraw(known)
        results = wrapped(lambda given: forward(True, given), given)
        out = checkpoint_name(results["out"], OUT_NAME)
        final = checkpoint_name(results["final_state"], STATE_NAME)
        return (out, final), (given, checkpoint_name(results["saved"], SAVED_NAME))

    def call_backward(residuals: Any, cotangents: tuple[Array, Array]) -> tuple[dict[str, Array | None]]:
        given, saved = residuals
        dout, dfinal = cotangents
        everything = {**given, "saved": saved, "dout": dout, "dfinal_state": dfinal}
        grads = wrapped(backward, everything, summed=True)
        return ({name: _like(grads[f"d{name}"], x) if name in FLOATS else None for name, x in given.items()},)

    call.defvjp(call_forward, call_backward)
    return call


def _like(grad: Array, x: Array) -> Array:
    """A gradient in its array's dtype and shape: what a shared array got from each leading axis is summed, in float32."""
    grad = jnp.sum(grad, tuple(range(grad.ndim - x.ndim)))
    return match_sharding(grad.astype(x.dtype), x)


def _opaque_step(plan: Plan, selection: Selection, spec: ScanSpec) -> Callable[[Arrays], Any]:
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
        return out.astype(arrays.x.dtype), state

    @jax.custom_vjp
    def call(given: Arrays) -> tuple[Array, Array]:
        axes = _step_axes(StepArrays(**given))
        results: Arrays = opaque(launch, axes, axes, split=split, shared=SHARED)(given)
        return results["out"], results["state"]

    def call_forward(given: Arrays) -> Any:
        return call(given), given

    def call_backward(given: Arrays, cotangents: tuple[Array, Array]) -> tuple[dict[str, Array | None]]:
        floats = {name: x for name, x in given.items() if name in STEP_FLOATS}
        others = {name: x for name, x in given.items() if name not in STEP_FLOATS}
        _, pull = jax.vjp(lambda floats: plain(floats, others), floats)
        (grads,) = pull(cotangents)
        return ({name: grads.get(name) for name in given},)

    call.defvjp(call_forward, call_backward)
    return call
