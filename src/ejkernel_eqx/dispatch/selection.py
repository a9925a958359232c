"""The selection chain: seven tiers, one ordered function, first answer wins.

Everything a tier reads is collected once in a `Snapshot`, when a module is built; choosing is then a pure function of the
snapshot and a problem, and is what happens while a call is traced.
"""

import contextlib
import dataclasses
import enum
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from .._errors import UnsupportedError
from .caches import memory_cache, persistent_entries
from .device import device_facts, DeviceFacts
from .overlay import current_policy, overlay_entries, Policy
from .platform import Platform
from .problem import Problem
from .registry import Implementation, kernel_registry


class Tier(enum.StrEnum):
    """Where a configuration came from, in the order in which the tiers are asked."""

    OVERRIDE = "override"
    OVERLAY = "overlay"
    MEMORY = "memory"
    PERSISTENT = "persistent"
    AUTOTUNE = "autotune"
    HEURISTIC = "heuristic"
    ERROR = "error"


Entry = tuple[Platform, str, Any]
Autotuner = Callable[[Problem, Implementation, DeviceFacts], Any | None]


@dataclasses.dataclass(frozen=True, eq=False)
class Snapshot:
    """All that the tiers of one operation may answer with, as it stood when a module was built.

    `overlay` maps an operation's name or a problem key to a configuration; `memory` and `persistent` map (platform,
    problem key) to one.
    """

    operation: str
    implementations: tuple[Implementation, ...]
    device: DeviceFacts
    policy: Policy
    override: Any | None = None
    overlay: tuple[tuple[str, Any], ...] = ()
    memory: tuple[Entry, ...] = ()
    persistent: tuple[Entry, ...] = ()

    def identity(self, pinned: tuple[Entry, ...] = ()) -> tuple[Any, ...]:
        """What decides the choice, without provenance: plans of equal identities share one compilation."""
        if self.override is not None:
            return (self.operation, self.implementations, self.device, self.override)
        known = {
            (platform, key): config for platform, key, config in (*self.persistent, *self.memory, *pinned)
        }
        table = frozenset((platform, key, config) for (platform, key), config in known.items())
        return (self.operation, self.implementations, self.device, self.overlay, table)

    @functools.cached_property
    def memory_table(self) -> dict[tuple[Platform, str], Any]:
        return {(platform, key): config for platform, key, config in self.memory}

    @functools.cached_property
    def persistent_table(self) -> dict[tuple[Platform, str], Any]:
        return {(platform, key): config for platform, key, config in self.persistent}


@dataclasses.dataclass(frozen=True)
class Selection:
    """What was chosen for one problem, and why the platforms before it were not."""

    problem: Problem
    implementation: Implementation
    config: Any
    tier: Tier
    rejected: tuple[tuple[Platform, str], ...]

    @property
    def platform(self) -> Platform:
        return self.implementation.platform


def take_snapshot(
    operation: str, *, platform: "str | Platform | None" = None, config: Any | None = None
) -> Snapshot:
    """Collects, for an operation on the default device, what every tier knows now.

    `platform` pins the platform (never replaced); `config` pins the configuration and implies its platform.
    """
    device = device_facts()
    policy = current_policy()
    implementations = _candidates(operation, device, platform, config)
    tables = policy is not Policy.HEURISTIC
    known = {i.platform for i in implementations}
    return Snapshot(
        operation=operation,
        implementations=implementations,
        device=device,
        policy=policy,
        override=config,
        overlay=_relevant_overlay(operation),
        memory=tuple(
            (p, k, c) for (p, k), c in memory_cache.items() if tables and p in known and f'"{operation}"' in k
        ),
        persistent=tuple(
            (i.platform, k, c)
            for i in implementations
            if tables
            for k, c in persistent_entries(i, device).items()
        ),
    )


def _relevant_overlay(operation: str) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (key, config)
        for key, config in overlay_entries()
        if key == operation or f'"operation":"{operation}"' in key
    )


def _candidates(
    operation: str, device: DeviceFacts, platform: Any, config: Any
) -> tuple[Implementation, ...]:
    if platform is not None:
        return (_explicit(operation, device, platform, config),)
    known = kernel_registry.ordered(operation)
    if config is not None:
        usable = [i for i in known if i.priority >= 0 and i.unusable(device) is None]
        matching = [i for i in usable if isinstance(config, i.load().config_type)]
        if not matching:
            kinds = sorted({i.load().config_type.__name__ for i in usable})
            raise ValueError(
                f"config: expected an instance of {' or '.join(kinds)} for {operation} on {device.kind}, received {config!r}."
            )
        return tuple(matching[:1])
    return tuple(i for i in known if i.priority >= 0)


def _explicit(operation: str, device: DeviceFacts, platform: Any, config: Any) -> Implementation:
    wanted = kernel_registry.get(operation, platform)
    reason = wanted.unusable(device)
    if reason is not None:
        raise UnsupportedError(operation, {wanted.platform.value: reason})
    config_type = wanted.load().config_type
    if config is not None and not isinstance(config, config_type):
        raise ValueError(
            f"config: expected an instance of {config_type.__name__} for platform {wanted.platform.value!r} of {operation}, received {config!r}."
        )
    return wanted


def select(snapshot: Snapshot, problem: Problem, *, tuning: bool = False) -> Selection:
    """The first platform that supports the problem, with its configuration.

    Pure unless `tuning`, which lets the autotune tier run, under the policy `FORCE` before any table. `UnsupportedError` with every
    platform's reason if none supports it.
    """
    rejected: list[tuple[Platform, str]] = []
    for implementation in snapshot.implementations:
        reason = implementation.unsupported(problem, snapshot.device)
        if reason is None:
            config, tier = _first_answer(snapshot, implementation, problem, tuning)
            return Selection(problem, implementation, config, tier, tuple(rejected))
        rejected.append((implementation.platform, reason))
    raise UnsupportedError(problem.operation, {platform.value: reason for platform, reason in rejected})


def _first_answer(
    snapshot: Snapshot, implementation: Implementation, problem: Problem, tuning: bool
) -> tuple[Any, Tier]:
    passed_over = set() if tuning else {Tier.AUTOTUNE}
    if tuning and snapshot.policy is Policy.FORCE and _autotuner is not None:
        passed_over = {Tier.MEMORY, Tier.PERSISTENT}
    for tier, ask in TIERS:
        config = None if tier in passed_over else ask(snapshot, implementation, problem)
        if config is not None:
            return config, tier
    raise UnsupportedError(
        problem.operation, {implementation.platform.value: "has no configuration for this problem"}
    )


def _override(snapshot: Snapshot, implementation: Implementation, problem: Problem) -> Any | None:
    return snapshot.override


def _overlay(snapshot: Snapshot, implementation: Implementation, problem: Problem) -> Any | None:
    config_type = implementation.load().config_type
    for wanted in (problem.key(), problem.operation) if snapshot.overlay else ():
        for key, config in snapshot.overlay:
            if key == wanted and isinstance(config, config_type):
                return config
    return None


def _memory(snapshot: Snapshot, implementation: Implementation, problem: Problem) -> Any | None:
    return snapshot.memory_table.get((implementation.platform, problem.key())) if snapshot.memory else None


def _persistent(snapshot: Snapshot, implementation: Implementation, problem: Problem) -> Any | None:
    return (
        snapshot.persistent_table.get((implementation.platform, problem.key()))
        if snapshot.persistent
        else None
    )


def _autotune(snapshot: Snapshot, implementation: Implementation, problem: Problem) -> Any | None:
    if _autotuner is None or snapshot.policy not in (Policy.TUNE, Policy.FORCE):
        return None
    return _autotuner(problem, implementation, snapshot.device)


def _heuristic(snapshot: Snapshot, implementation: Implementation, problem: Problem) -> Any | None:
    return implementation.load().default_config(problem, snapshot.device)


TIERS: tuple[tuple[Tier, Callable[[Snapshot, Implementation, Problem], Any | None]], ...] = (
    (Tier.OVERRIDE, _override),
    (Tier.OVERLAY, _overlay),
    (Tier.MEMORY, _memory),
    (Tier.PERSISTENT, _persistent),
    (Tier.AUTOTUNE, _autotune),
    (Tier.HEURISTIC, _heuristic),
)
"""The seventh tier is the error raised when none of these answers."""

_autotuner: Autotuner | None = None


def set_autotuner(autotuner: Autotuner | None) -> None:
    """Names the function behind the autotune tier: (problem, implementation, device) -> configuration or `None`."""
    global _autotuner
    _autotuner = autotuner


_LISTENERS: ContextVar[tuple[Callable[[Selection], None], ...]] = ContextVar(
    "ejkernel_eqx_listeners", default=()
)


def announce(selection: Selection) -> Selection:
    """Tells every listener of a choice that is about to be used, and returns it."""
    for listen in _LISTENERS.get():
        listen(selection)
    return selection


@contextlib.contextmanager
def on_selection(listener: Callable[[Selection], None]) -> Iterator[None]:
    """While it is open, `listener` is told of every choice made, with the tier that answered."""
    token = _LISTENERS.set((*_LISTENERS.get(), listener))
    try:
        yield
    finally:
        _LISTENERS.reset(token)
