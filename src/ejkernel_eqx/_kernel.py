"""`Kernel`, the module under every operation, and `Plan`, the one static field that carries its choices."""

import contextlib
import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, cast, ClassVar, TypeVar

import equinox as eqx
import jax

from ._inputs import Inputs
from .dispatch import (
    announce,
    DeviceFacts,
    Known,
    on_selection,
    Platform,
    Problem,
    select,
    Selection,
    Snapshot,
    take_snapshot,
    Tier,
    tuning_allowed,
)

K = TypeVar("K", bound="Kernel")


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What was decided when a module was built: an ordered list of platforms and their known configurations.

    Hashable and static. Two plans that choose alike are equal (where a configuration came from takes no part), so their
    modules share one compilation and can be stacked. While a call is traced `select` picks, as a pure function
    of the plan and the local problem; nothing outside the plan is read. `pinned` holds the choices made for `tune_for=`, as
    (platform, problem key, `Known`), and `tiers` where each came from. A pin that was tuned decides before any table; the others say
    what the plan would choose anyway.
    """

    snapshot: Snapshot
    pinned: tuple[tuple[Platform, str, Known], ...] = ()
    tiers: tuple[Tier, ...] = ()

    @functools.cached_property
    def _tables(self) -> Snapshot:
        """The snapshot with what was tuned for this plan."""
        tuned = tuple(pin for pin, tier in zip(self.pinned, self.tiers, strict=True) if tier is Tier.AUTOTUNE)
        return dataclasses.replace(self.snapshot, tuned=tuned) if tuned else self.snapshot

    @property
    def _identity(self) -> tuple[Any, ...]:
        return self._tables.identity

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self._identity)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Plan) and self._identity == other._identity)

    def __getstate__(self) -> dict[str, Any]:
        """Without what is cached: hashes of strings differ from process to process."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

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

    def select(self, problem: Problem, platform: Platform | None = None, quiet: bool = False) -> Selection:
        """The platform and configuration for one problem; `UnsupportedError` naming every reason if there is none.

        `platform` asks for the configuration of that platform alone; `quiet` tells no listener.
        """
        selection = select(self._tables, problem, platform=platform)
        return selection if quiet else announce(selection)

    def pin(self, problem: Problem, tuning: bool = True) -> "Plan":
        """This plan with the choice for `problem` made now: tuned, where the policy asks for it and a tuner is there."""
        denied: list[tuple[Platform, str, Known]] = []
        chosen = select(self._tables, problem, tuning=tuning, denials=denied)
        pinned = (chosen.platform, problem.key(), Known(chosen.config, chosen.ms, chosen.origin))
        return dataclasses.replace(
            self,
            pinned=(*self.pinned, *denied, pinned),
            tiers=(*self.tiers, *(Tier.AUTOTUNE for _ in denied), chosen.tier),
        )

    def renewed(self) -> "Plan":
        """The same request (platform, configuration), with everything that is known now; the pins are dropped."""
        return make_plan(self.operation, platform=self.snapshot.requested, config=self.snapshot.override)


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
    """The kernel's plan with its choice for every problem of this call made now: tuned as `Plan.pin` says, but inside
    `no_tuning`. Traces the call with shapes only."""
    plan = kernel.plan
    for problem in dict.fromkeys(selection.problem for selection in selections_of(cast(Any, kernel), call)):
        plan = plan.pin(problem, tuning_allowed())
    return plan


# Part of the key of every cache of traces: a function that JAX has traced before would make no choice.
_asking = jax.make_user_context(0)
_questions = itertools.count(1)


@contextlib.contextmanager
def hearing(listener: Callable[[Selection], None], withdrawn: Callable[[Selection], None]) -> Iterator[None]:
    """As `on_selection`, with every function traced anew: no choice stays unheard because JAX knows a trace."""
    with on_selection(listener, withdrawn), _asking(next(_questions)):
        yield


def selections_of(function: Callable[..., Any], call: Inputs) -> list[Selection]:
    """The distinct choices that a call makes, in order. Traces with shapes only; computes nothing."""
    found: list[Selection] = []

    def forget(selection: Selection) -> None:
        found[:] = [other for other in found if other is not selection]

    with hearing(found.append, forget):
        eqx.filter_eval_shape(function, *call.args, **call.kwargs)
    distinct: dict[tuple[Problem, Platform], Selection] = {}
    for selection in found:
        distinct.setdefault((selection.problem, selection.platform), selection)
    return list(distinct.values())


def with_plan(kernel: K, plan: Plan) -> K:
    """A copy of the kernel with another plan; the original is untouched."""
    new = copy.copy(kernel)
    object.__setattr__(new, "plan", plan)
    return new
