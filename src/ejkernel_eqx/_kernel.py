"""`Kernel`, the module under every operation, and `Plan`, the one static field that carries its choices."""

import copy
import dataclasses
from typing import Any, ClassVar, TypeVar

import equinox as eqx

from ._inputs import Inputs
from .dispatch import DeviceFacts, on_selection, Platform, Problem, select, Selection, Snapshot, take_snapshot

K = TypeVar("K", bound="Kernel")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What was decided when a module was built: an ordered list of platforms and their known configurations.

    Hashable and static. Two plans that choose alike are equal (where a configuration came from takes no part), so their
    modules share one compilation and can be stacked. While a call is traced `select` picks, as a pure function
    of the plan and the local problem; nothing outside the plan is read. `pinned` holds the choices made for `tune_for=`.
    """

    snapshot: Snapshot
    pinned: tuple[tuple[str, Platform, Any], ...] = ()
    tiers: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    @property
    def operation(self) -> str:
        return self.snapshot.operation

    @property
    def platforms(self) -> tuple[Platform, ...]:
        """The platforms in the order in which they are asked."""
        return tuple(i.platform for i in self.snapshot.implementations)

    @property
    def device(self) -> DeviceFacts:
        return self.snapshot.device

    def select(self, problem: Problem) -> Selection:
        """The platform and configuration for one problem; `UnsupportedError` naming every reason if there is none."""
        selection = select(self.snapshot, problem)
        for key, platform, config in self.pinned:
            if platform is selection.platform and key == problem.key():
                return dataclasses.replace(selection, config=config)
        return selection

    def pin(self, problem: Problem) -> "Plan":
        """This plan with the choice for `problem` made now (tuned, if the policy allows and a tuner is there)."""
        selection = select(self.snapshot, problem, tuning=True)
        pinned = (*self.pinned, (problem.key(), selection.platform, selection.config))
        return dataclasses.replace(self, pinned=pinned, tiers=(*self.tiers, selection.tier.value))


def make_plan(operation: str, *, platform: "str | Platform | None" = None, config: Any | None = None) -> Plan:
    """The plan of an operation on the default device, from everything known now."""
    return Plan(take_snapshot(operation, platform=platform, config=config))


class Kernel(eqx.Module):
    """Base of every operation: an `eqx.Module` whose static `plan` carries the platform and the configuration.

    A subclass is final, names its `operation`, makes its `plan` in `__init__` (`make_plan`) and asks it in `__call__`
    (`self.plan.select(problem)`).
    """

    operation: ClassVar[str]
    plan: eqx.AbstractVar[Plan]


def settle(kernel: "Kernel", call: Inputs) -> Plan:
    """The kernel's plan with its choice for every problem of this call made now. Traces with shapes only; computes nothing."""
    plan = kernel.plan
    found: list[Selection] = []
    with on_selection(found.append):
        eqx.filter_eval_shape(kernel, *call.args, **call.kwargs)
    for problem in dict.fromkeys(selection.problem for selection in found):
        plan = plan.pin(problem)
    return plan


def with_plan(kernel: K, plan: Plan) -> K:
    """A copy of the kernel with another plan; the original is untouched."""
    new = copy.copy(kernel)
    object.__setattr__(new, "plan", plan)
    return new
