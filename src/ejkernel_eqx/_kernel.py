"""`Kernel`, the base module of every operation; `Plan`, its static field; and `Inputs`, the arguments of a call."""

import copy
import dataclasses
import functools
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast, ClassVar, NamedTuple, TypeVar

import equinox as eqx
import jax
import wadler_lindig

from ._signatures import Module
from .dispatch import (
    BOTH,
    DeviceFacts,
    Known,
    Place,
    place_of,
    place_of_calls,
    Platform,
    Problem,
    select,
    Selection,
    Snapshot,
    take_snapshots,
    Tier,
    traced_anew,
    tuning_allowed,
)
from .dispatch.known import Key
from .dispatch.labels import choices_in
from .dispatch.selection import Pins

K = TypeVar("K", bound="Kernel")
O = TypeVar("O")
_LOG = logging.getLogger("ejkernel_eqx")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """The decisions made when a module was built: an ordered list of platforms and their known configurations. It has
    them for every kind of device in the process. `snapshot` is of the default device at that time, `elsewhere` of the
    others.

    Plans are hashable and static. Two plans are equal if their requests and the tuning results pinned for them are
    equal. Tables and the device are not compared. So modules that were built before and after tuning, or under another
    default device, can be stacked. Optimiser states still match. For equal plans JAX reuses the program compiled first.
    A plan that replaces one that would choose differently therefore gets another `edition`, a digest of everything it
    knows.

    While a call is traced, `select` chooses as a pure function of the plan, the target device, and the local problem.
    """

    snapshot: Snapshot
    elsewhere: tuple[Snapshot, ...] = ()
    edition: str = ""
    path: str = ""
    """That of its kernel in a model whose choices `explain` places. Plans at different paths share no trace."""

    @property
    def _identity(self) -> tuple[Any, ...]:
        pins: frozenset[Any] = frozenset()
        pins = pins.union(*[known.pins for known in self._snapshots])
        return self.snapshot.request, pins, self.edition, self.path

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self._identity)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Plan) and self._identity == other._identity)

    def __repr__(self) -> str:
        given = self.snapshot.override
        words = [self.operation, f"on {self.snapshot.requested.value}" if self.snapshot.requested else ""]
        words.append("" if given is None else f"with {given!r}")
        pins = sum(len(known.pinned) for known in self._snapshots)
        words.append(f"pinned {pins}" if pins else "")
        words.append(f"edition {self.edition}" if self.edition else "")
        return f"Plan({', '.join(word for word in words if word)})"

    def __pdoc__(self, **_: Any) -> wadler_lindig.AbstractDoc:
        """Works as `repr`, so that printing a model shows it for each of its kernels."""
        return wadler_lindig.TextDoc(repr(self))

    def __getstate__(self) -> dict[str, Any]:
        """The state without cached values, because hashes of strings differ between processes."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @property
    def _snapshots(self) -> tuple[Snapshot, ...]:
        return (self.snapshot, *self.elsewhere)

    @property
    def request(self) -> tuple[Any, ...]:
        """The request, without what is known."""
        return self.snapshot.request

    @property
    def answers(self) -> str:
        """A digest of what determines choices besides the request, on every device."""
        return "-".join(sorted([known.answers for known in self._snapshots]))

    @property
    def here(self) -> Snapshot:
        """Returns what is known about the device that a call made here is compiled for."""
        place = place_of_calls()
        for known in self._snapshots:
            if (known.device.backend, known.device.kind) == place:
                return known
        return _nearest(self._snapshots, place)

    @property
    def device(self) -> DeviceFacts:
        """The device that a call made here is compiled for."""
        return self.here.device

    @property
    def devices(self) -> tuple[DeviceFacts, ...]:
        """One device of every kind that the plan has an answer for."""
        return tuple(known.device for known in self._snapshots)

    @property
    def operation(self) -> str:
        return self.snapshot.operation

    @property
    def platforms(self) -> tuple[Platform, ...]:
        """The platforms in the order in which they are considered."""
        return tuple(dict.fromkeys(i.platform for i in self.snapshot.implementations))

    @property
    def is_simulated(self) -> bool:
        """Returns whether calls run in JAX's simulation of a TPU, which has effects; `jax.checkpoint` takes none under differentiation."""
        return self.snapshot.requested is Platform.PALLAS_INTERPRET

    @property
    def pinned(self) -> Pins:
        """The choices fixed by `tune_for=` or by tuning on this device, by platform and problem key."""
        return self.here.pinned

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Returns where each of the pinned choices came from."""
        return tuple(tier for _, tier in self.pinned.values())

    def select(self, problem: Problem, platform: Platform | None = None, direction: str = BOTH) -> Selection:
        """The platform and configuration for a problem; `UnsupportedError` with every reason if there is none.

        `platform` restricts the choice to a platform that was chosen before, possibly for the devices of a mesh that is no longer active.
        `direction`: by whose times platforms are compared.
        """
        known = self.here if platform is None else self._usable(platform)
        choice = select(known, problem, platform=platform, direction=direction)
        return dataclasses.replace(choice, path=self.path) if self.path else choice

    def _usable(self, platform: Platform) -> Snapshot:
        here = self.here
        for known in (here, *self._snapshots):
            if any(
                i.platform is platform and i.unusable(known.device) is None for i in known.implementations
            ):
                return known
        return here

    def pin(self, problem: Problem, tuning: bool = True) -> "Plan":
        """This plan with the choice for `problem` fixed now, tuned if the policy requests it and a tuner is registered."""
        answers: dict[Key, tuple[Known, Tier]] = {}
        chosen = select(self.here, problem, tuning=tuning, answers=answers).platform
        # Answers of tables for platforms that were passed over need not be pinned.
        new = {
            key: answer for key, answer in answers.items() if key[0] is chosen or answer[1] is Tier.AUTOTUNE
        }
        return self.with_pins({**self.pinned, **new})

    def with_pins(self, pinned: Pins) -> "Plan":
        """This plan with these choices fixed for the device that a call made here is compiled for."""
        here = self.here
        return self.changed(lambda known: known.with_pins(pinned) if known is here else known)

    def changed(self, change: Callable[[Snapshot], Snapshot]) -> "Plan":
        """This plan with `change` applied to the snapshot of every device."""
        first, *others = map(change, self._snapshots)
        return dataclasses.replace(self, snapshot=first, elsewhere=tuple(others))

    def renewed(self) -> "Plan":
        """A plan with the same request (platform, configuration) and everything known now, without pins."""
        return make_plan(self.operation, platform=self.snapshot.requested, config=self.snapshot.override)

    def as_edition(self) -> "Plan":
        """This plan, equal only to plans that know the same."""
        return dataclasses.replace(self, edition=hashlib.sha256(self.answers.encode()).hexdigest()[:8])


_warned: set[tuple[Place, Place]] = set()


def _nearest(snapshots: Sequence[Snapshot], place: Place) -> Snapshot:
    """The snapshot to use for an unknown device, if the plan comes from another machine. Warns once."""
    nearest = next((known for known in snapshots if known.device.backend is place[0]), snapshots[0])
    if (place, place_of(nearest.device)) not in _warned:
        _warned.add((place, place_of(nearest.device)))
        _LOG.warning(
            "a kernel that was built for %s is called on %s and keeps the choices made for the former; call ejx.replan(model) to renew them.",
            " and ".join(known.device.kind for known in snapshots),
            place[1],
        )
    return nearest


def make_plan(operation: str, *, platform: "str | Platform | None" = None, config: Any | None = None) -> Plan:
    """The plan of an operation from everything known now, for every kind of device in this process."""
    here, *others = take_snapshots(operation, platform=platform, config=config)
    return Plan(here, tuple(others))


class Kernel(Module):
    """Base class of every operation: an `eqx.Module` whose static `plan` holds the choice of platform and configuration.

    A subclass is final. It names its `operation`, and creates its `plan` in `__init__` by `make_plan`. It passes the
    plan to its family's call. That call asks `plan.select(problem)` and computes within the scope of the choice
    (`dispatch.labels.kernel_scope`), where `explain` and `tune` find it.
    """

    operation: ClassVar[str]
    plan: eqx.AbstractVar[Plan]


class Inputs(NamedTuple):
    """Positional and keyword arguments of a module's call: arrays or `jax.ShapeDtypeStruct`s."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def inputs(*args: Any, **kwargs: Any) -> Inputs:
    """The arguments of a call for `tune_for=`, such as `ejx.inputs(q, k, v, bias=bias)`: arrays or `jax.ShapeDtypeStruct`s."""
    return Inputs(args, kwargs)


def as_inputs(value: Any) -> Inputs:
    """`Inputs` from what `tune_for=` accepts: `inputs(...)` or a tuple of positional arguments."""
    if isinstance(value, Inputs):
        return value
    if isinstance(value, tuple):
        return Inputs(value, {})
    raise ValueError(
        f"tune_for: expected a tuple of the call's arguments or ejx.inputs(...), received {type(value).__name__}."
    )


def settle(kernel: "Kernel", call: Inputs) -> Plan:
    """The kernel's plan with its choices for every problem of this call fixed now, tuned as by `Plan.pin` except inside `no_tuning`.
    Traces the call with shapes only."""
    plan = kernel.plan
    for problem in dict.fromkeys(selection.problem for selection in selections_of(cast(Any, kernel), call)):
        plan = plan.pin(problem, tuning_allowed())
    return plan


def selections_of(function: Callable[..., Any], call: Inputs) -> list[Selection]:
    """The distinct choices of a call, in order. Traces with shapes only; computes nothing."""
    distinct: dict[tuple[Problem, Platform], Selection] = {}
    for selection in choices_of(function, call):
        distinct.setdefault((selection.problem, selection.platform), selection)
    return list(distinct.values())


def choices_of(function: Callable[..., Any], call: Inputs) -> Iterator[Selection]:
    """All choices of a call, in order, read from its traced program."""
    with traced_anew():
        program, _, _ = eqx.filter_make_jaxpr(function)(*call.args, **call.kwargs)
    return choices_in(program)


def kernels_of(tree: Any) -> list[Kernel]:
    """The operations in a module or a pytree, in order."""
    is_kernel = lambda node: isinstance(node, Kernel)
    return [node for node in jax.tree.leaves(tree, is_leaf=is_kernel) if is_kernel(node)]


def with_plan(kernel: K, plan: Plan) -> K:
    """A copy of the kernel with another plan; the original is unchanged."""
    return replaced(kernel, plan=plan)


def replaced(operation: O, **fields: Any) -> O:
    """The operation, or what is called like one, with other values of these fields. Its `__init__`, which chooses a platform, does not run."""
    new = copy.copy(operation)
    for name, value in fields.items():
        object.__setattr__(new, name, value)
    return new
