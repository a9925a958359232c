"""`explain`: what was chosen, where it came from, and why not the others."""

import dataclasses
from typing import Any

import jax

from ._errors import UnsupportedError
from ._inputs import Inputs
from ._kernel import Kernel, selections_of
from .dispatch import device_facts, kernel_registry, Selection


@dataclasses.dataclass(frozen=True)
class Choice:
    """One row of an explanation."""

    path: str
    operation: str
    problem: str
    platform: str
    config: str
    tier: str
    notes: tuple[str, ...]
    rejected: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Rows of choices; `str()` of it is a readable table."""

    device: str
    choices: tuple[Choice, ...]

    def __str__(self) -> str:
        lines = [f"device: {self.device}"]
        for choice in self.choices:
            lines.append(f"{choice.path or choice.operation}: {choice.problem or choice.operation}")
            lines.append(f"  platform  {choice.platform}")
            lines.extend([f"  config    {choice.config}   (from: {choice.tier})"] if choice.config else [])
            lines.extend(f"  note      {note}" for note in choice.notes)
            lines.extend(f"  not {platform}: {reason}" for platform, reason in choice.rejected)
        return "\n".join(lines)


def explain(target: Any, *args: Any, **kwargs: Any) -> Explanation:
    """What each kernel of `target` runs on, with which configuration, from which tier, and why not on the others.

    **Arguments:**

    - `target`: a module, a model holding modules anywhere, or the name of an operation.
    - `args`, `kwargs`: arguments of the module's call (arrays or `jax.ShapeDtypeStruct`s). With them the call is traced with shapes only and
        every choice it makes is shown, in order; without them, the order in which each kernel's platforms are asked.

    **Returns:**

    An `Explanation`: print it, or read its `choices`.
    """
    device = device_facts()
    shown = f"{device.kind} ({device.backend.value}, {device.runtime})"
    if isinstance(target, str):
        return Explanation(shown, tuple(_of_operation(target)))
    if not args and not kwargs:
        return Explanation(shown, tuple(_of_kernel(path, kernel) for path, kernel in kernels_of(target)))
    return Explanation(
        shown, tuple(_of_selection(selection) for selection in selections_of(target, Inputs(args, kwargs)))
    )


def kernels_of(tree: Any) -> list[tuple[str, Kernel]]:
    """Every kernel in a pytree, with its path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: isinstance(node, Kernel))
    return [(jax.tree_util.keystr(path), node) for path, node in leaves if isinstance(node, Kernel)]


def _notes(implementation: Any) -> tuple[str, ...]:
    note = getattr(implementation.load(), "NOTE", None)
    return (note,) if note else ()


def _of_operation(operation: str) -> list[Choice]:
    rows = []
    for implementation, reason in kernel_registry.list_implementations(operation, device_facts()):
        state = "usable" if reason is None else "unusable"
        notes = _notes(implementation) if reason is None else ()
        rejected = () if reason is None else ((implementation.platform.value, reason),)
        rows.append(
            Choice("", operation, "", f"{implementation.platform.value} ({state})", "", "", notes, rejected)
        )
    return rows


def _of_kernel(path: str, kernel: Kernel) -> Choice:
    plan = kernel.plan
    usable = [i for i in plan.snapshot.implementations if i.unusable(plan.device) is None]
    unusable = [
        (i.platform.value, i.unusable(plan.device) or "")
        for i in plan.snapshot.implementations
        if i not in usable
    ]
    order = " then ".join(i.platform.value for i in usable)
    if not usable:
        raise UnsupportedError(plan.operation, dict(unusable))
    config = (
        repr(plan.snapshot.override)
        if plan.snapshot.override is not None
        else "; ".join(repr(c) for _, _, c in plan.pinned)
    )
    tier = "override" if plan.snapshot.override is not None else "; ".join(plan.tiers)
    return Choice(path, plan.operation, "", order, config, tier, (), tuple(unusable))


def _of_selection(selection: Selection) -> Choice:
    rejected = tuple((platform.value, reason) for platform, reason in selection.rejected)
    operation = selection.problem.operation
    shown = str(selection.problem)
    notes = _notes(selection.implementation)
    return Choice(
        "",
        operation,
        shown,
        selection.platform.value,
        repr(selection.config),
        selection.tier.value,
        notes,
        rejected,
    )
