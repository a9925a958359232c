"""`explain`: what was chosen, where it came from, how close it is to the device's bound, and why the others were not."""

import dataclasses
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp

from .._errors import UnsupportedError
from .._kernel import choices_of, Inputs, Plan
from ..dispatch import (
    Backend,
    BOTH,
    Cost,
    device_facts,
    DeviceFacts,
    FORWARD,
    Implementation,
    kernel_registry,
    names_of,
    Platform,
    Problem,
    select,
    Selection,
    take_snapshot,
)
from ..dispatch.known import slow_words, slowness
from ..dispatch.labels import label_of
from .explanation import Choice, Explanation
from .replace import map_plans, plans_of
from .roofline import device_peaks, matrix_dtype, Roofline, roofline

ExampleProblem = Callable[[str, dict[str, int], str, dict[str, Any]], Problem]
_DTYPE = "bfloat16"


def explain(target: Any, *args: Any, **kwargs: Any) -> Explanation:
    """Shows the platform and configuration of each kernel of `target`, where they come from, how fast they are, and why other platforms
    were not chosen.

    Measured times come from the table that holds the configuration. Beside them are the arithmetic and memory traffic of the call, and
    the lower bound on its time on this device. Nothing is timed or computed here.

    **Arguments:**

    - `target`: a module, a model that contains modules, a function, or the name of an operation.
    - `args`, `kwargs`: the arguments of a call (arrays or `jax.ShapeDtypeStruct`s; they may contain models). The call is then traced
        with shapes only, and every choice is shown in order, with the path of its kernel in the model. Without arguments, the order of
        each kernel's platforms is shown, and its tuned configurations. With the name of an operation, pass sizes by capital letters,
        `dtype` (default bfloat16), `platform` and the operation's flags: `ejx.explain("flash_attention", B=4, T=4096, H=16, D=128,
        dtype="bfloat16", causal=True)`. With only the name, all its platforms are shown.

    **Returns:**

    An `Explanation`: print it, read its `choices`, or call `to_dict()`. Times are in milliseconds.

    Raises `ValueError` for an unknown operation, size or flag, and `UnsupportedError` if no platform can run the call. Errors of the call
    itself are passed on.
    """
    if isinstance(target, str):
        return _of_operation(target, args, kwargs)
    if args or kwargs:
        found = placed_selections(target, Inputs(args, kwargs))
        return _explanation(
            device_facts(), [_of_selection(path, selection) for path, selection in found], _NO_LAUNCH
        )
    rows = [row for path, plan in plans_of(target).items() for row in _of_plan(path, plan)]
    return _explanation(device_facts(), rows, _nothing_in(target))


_NO_LAUNCH = (
    "the call was traced and launches none; operations of JAX itself (jnp, jax.nn, eqx.nn) are not shown, and neither are programs that "
    "were traced before, such as compiled or exported ones"
)


def _nothing_in(target: Any) -> str:
    """The reason why a target without arguments shows no kernels, and what to pass."""
    if callable(target) and not isinstance(target, eqx.Module):
        name = getattr(target, "__name__", type(target).__name__)
        name = "function" if name == "<lambda>" else name
        return (
            f"a function has none until it is called; pass its arguments too, arrays or jax.ShapeDtypeStructs: ejx.explain({name}, x), "
            "or pass the module that it calls"
        )
    return (
        f"this {type(target).__name__} contains no module of this package (modules captured by a function or held in a static field "
        "are not part of the pytree); pass the arguments of a call too, ejx.explain(model, x), to see what the call launches"
    )


def _placed(tree: Any, root: str = "") -> Any:
    """The tree with the path of every kernel in its plan."""
    return map_plans(lambda path, plan: dataclasses.replace(plan, path=root + path), tree)


def placed_selections(function: Any, call: Inputs) -> list[tuple[str, Selection]]:
    """The distinct choices of a call, in order, each with the path of its kernel; the path is empty if unknown.

    Traces with shapes only. Paths begin with `args[0]...` for kernels in positional arguments, and with the name for keyword arguments.
    """
    args = tuple(_placed(arg, f"args[{i}]") for i, arg in enumerate(call.args))
    placed = Inputs(args, {name: _placed(value, name) for name, value in call.kwargs.items()})
    try:
        return _traced(_placed(function), placed)
    except (ValueError, TypeError):
        # A call that compares or stacks its modules needs them to be equal, which they are only without paths. If the
        # call itself is wrong, the second trace raises its error.
        pass
    return _traced(function, call)


def _traced(function: Any, call: Inputs) -> list[tuple[str, Selection]]:
    distinct: dict[Any, tuple[str, Selection]] = {}
    for choice in choices_of(function, call):
        distinct.setdefault((choice.path, choice.problem, choice.platform), (choice.path, choice))
    return list(distinct.values())


def _explanation(device: DeviceFacts, choices: Sequence[Choice], if_none: str = "") -> Explanation:
    dtypes = dict.fromkeys(choice.dtype for choice in choices if choice.dtype)
    every = [(dtype, device_peaks(device, dtype)) for dtype in dtypes]
    peaks = tuple((dtype, known) for dtype, known in every if known is not None)
    return Explanation(_shown(device), tuple(choices), peaks, "" if choices else if_none)


def _shown(device: DeviceFacts) -> str:
    return f"{device.kind} ({device.backend.value}, {device.runtime})"


def _said(*notes: str) -> tuple[str, ...]:
    """The notes that say something."""
    return tuple(filter(None, notes))


def _of_operation(operation: str, args: tuple[Any, ...], words: Mapping[str, Any]) -> Explanation:
    if args:
        raise ValueError(
            f"explain: expected sizes and flags by name after an operation's name, received {len(args)} positional arguments; "
            f"write explain({operation!r}, B=4, T=4096, ..., dtype='bfloat16')."
        )
    device = device_facts()
    if not words:
        known = kernel_registry.list_implementations(operation, device)
        names = names_of([implementation for implementation, _ in known])
        return _explanation(device, [_of_implementation(*row) for row in zip(names, *zip(*known))])
    flags = dict(words)
    platform, dtype = flags.pop("platform", None), flags.pop("dtype", _DTYPE)
    dims = {name: flags.pop(name) for name in words if name.isupper()}
    problem = example_problem_of(operation)(operation, dims, _dtype_name(dtype), flags)
    known = take_snapshot(operation, platform=platform)
    both, alone = (select(known, problem, direction=direction) for direction in (BOTH, FORWARD))
    notes = {both: "where gradients are computed, too", alone: "forward alone"}
    if alone.platform is both.platform:
        return _explanation(device, [_of_selection("", both)])
    rows = [(_of_selection("", selection), note) for selection, note in notes.items()]
    return _explanation(device, [dataclasses.replace(row, notes=(n, *row.notes)) for row, n in rows])


def _dtype_name(dtype: Any) -> str:
    try:
        return jnp.dtype(dtype).name
    except TypeError:
        raise ValueError(
            f"dtype: expected a dtype or its name, such as 'bfloat16', received {dtype!r}."
        ) from None


def example_problem_of(operation: str) -> ExampleProblem:
    """The function `example_problem(operation, dims, dtype, flags)` next to an operation's workload.

    `ValueError` if no implementation of the operation has one.
    """
    for implementation in kernel_registry.ordered(operation):
        workload = implementation.workload
        if isinstance(workload, str):
            module = importlib.import_module(workload.partition(":")[0])
        else:
            module = sys.modules.get(getattr(workload, "__module__", None) or "")
        make = getattr(module, "example_problem", None)
        if make is not None:
            return make
    raise ValueError(
        f"operation: expected one that sizes and flags can describe (with a function example_problem(operation, dims, dtype, flags) next to "
        f"its workload), received {operation!r}, which has none; ejx.explain(module, *args) shows a call of any module."
    )


def _of_implementation(name: str, implementation: Implementation, reason: str | None) -> Choice:
    operation = implementation.operation
    if reason is None:
        return Choice(
            operation=operation, platform=f"{name} (usable)", notes=_said(implementation.hooks.NOTE)
        )
    return Choice(operation=operation, platform=f"{name} (unusable)", rejected=((name, reason),))


def _of_plan(path: str, plan: Plan) -> list[Choice]:
    """A row for every problem with a tuned configuration, or one row with the order of platforms if there are none."""
    here = plan.device
    reasons = {name: i.unusable(here) for name, i in plan.here.asked}
    order = " then ".join(platform for platform, reason in reasons.items() if reason is None)
    unusable = tuple((platform, reason) for platform, reason in reasons.items() if reason is not None)
    if not order:
        raise UnsupportedError(plan.operation, dict(unusable))
    passed = {(platform, key): reason for platform, key, reason in _passed_over(plan)}
    rows = [
        Choice(
            path,
            plan.operation,
            str(Problem.make(**json.loads(key), lengths=set())),  # the lengths are those of its bucket
            platform.value,
            repr(known.config),
            tier.value,
            (f"for other problems: {order}",),
            unusable + tuple((other.value, reason) for (other, of), reason in passed.items() if of == key),
            key=key,
            origin=known.origin,
            ms=known.ms,
        )
        for (platform, key), (known, tier) in plan.pinned.items()
        if (platform, key) not in passed
    ]
    override = plan.snapshot.override
    config, tier = ("", "") if override is None else (repr(override), "override")
    rows = rows or [Choice(path, plan.operation, "", order, config, tier, rejected=unusable)]
    # Every process also has a CPU, which is not worth a line.
    others = [other.kind for other in plan.devices if other != here and other.backend is not Backend.CPU]
    more = (f"if {' or '.join(others)} is the default device, the choice is made for it",) if others else ()
    return [dataclasses.replace(row, device=_shown(here), notes=row.notes + more) for row in rows]


def _passed_over(plan: Plan) -> Iterator[tuple[Platform, str, str]]:
    """The tuned platforms that another one was preferred to, and why."""
    for (platform, key), (known, _) in plan.pinned.items():
        others = [(other, it) for (other, at), (it, _) in plan.pinned.items() if at == key]
        slower = ((other, slowness(known, it)) for other, it in others)
        found = next(((other, times) for other, times in slower if times), None)
        if known.denied:
            yield platform, key, known.denied
        elif found:
            yield platform, key, slow_words(*found)


def _device_of(selection: Selection) -> DeviceFacts:
    """The device that a choice was made for."""
    return selection.device or device_facts()


def _of_selection(path: str, selection: Selection) -> Choice:
    device, problem, hooks = _device_of(selection), selection.problem, selection.implementation.hooks
    remark = hooks.remark(selection.config, problem, device)
    return Choice(
        path,
        problem.operation,
        str(problem),
        selection.platform.value,
        repr(selection.config),
        selection.tier.value,
        _said(hooks.NOTE, remark, *selection.remarks),
        tuple((str(name), reason) for name, reason in selection.rejected),
        key=problem.key(),
        label=label_of(selection),
        origin=selection.origin,
        ms=selection.ms,
        dtype=matrix_dtype(problem),
        rooflines=_rooflines(selection, device),
        device=_shown(device),
    )


def _rooflines(selection: Selection, device: DeviceFacts) -> tuple[tuple[str, Roofline], ...]:
    """The rooflines by direction; with the measured time only if it is for exactly these lengths."""
    peaks = device_peaks(device, matrix_dtype(selection.problem))
    costs = _costs(selection, device)
    sizes = json.loads(selection.problem.key())["dims"]
    ms = dict(selection.ms) if sizes == dict(selection.problem.dims) else {}
    return tuple((direction, roofline(cost, peaks, ms.get(direction))) for direction, cost in costs.items())


def _costs(selection: Selection, device: DeviceFacts) -> Mapping[str, Cost]:
    """The cost of the problem. It does not depend on the platform, so a platform without a workload uses that of another."""
    known = kernel_registry.ordered(selection.problem.operation)
    others = (i for i in known if i != selection.implementation and i.unusable(device) is None)
    for implementation in (selection.implementation, *others):
        workload = implementation.make_workload(selection.problem)
        if workload is not None and workload.costs:
            return workload.costs
    return {}
