"""`Snapshot`: everything that the selection chain may answer with on one kind of device, collected when a module is built."""

import dataclasses
import enum
import functools
import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from .._errors import UnsupportedError
from .caches import Key, Known, memory_cache, slowness, Table
from .device import device_facts, DeviceFacts, other_device_facts, place_of
from .overlay import current_policy, overlay_entries, Policy
from .persistent import user_table
from .platform import Platform
from .registry import Implementation, kernel_registry, names_of, of_device
from .shipped import borrowed_table, shipped_table
from .transfer import Index, make_index
from .workload import BOTH, FORWARD


class Tier(enum.StrEnum):
    """Holds where a configuration came from, in the order of the tiers."""

    OVERRIDE = "override"
    OVERLAY = "overlay"
    MEMORY = "memory"
    PERSISTENT = "persistent"
    AUTOTUNE = "autotune"
    HEURISTIC = "heuristic"
    ERROR = "error"


_LOOKED_UP = (Tier.MEMORY, Tier.PERSISTENT, Tier.AUTOTUNE)

Pins = Mapping[Key, tuple[Known, Tier]]
"""Choices made for a module itself, each with the tier that it came from."""

TABLES = {
    "tuned": Tier.AUTOTUNE,
    "memory": Tier.MEMORY,
    "user": Tier.PERSISTENT,
    "shipped": Tier.PERSISTENT,
}
"""The tables that answer for exactly a problem, the most trusted one first, and the tier of each."""


@dataclasses.dataclass(frozen=True, eq=False)
class Snapshot:
    """Everything that the tiers of an operation may answer with, as of when a module was built.

    `requested` is the platform requested by name. `overlay` maps an operation's name or a problem key to a configuration.
    The tables: `memory` of this process, `user` from the user's files, `shipped` with the package for this kind of device, `borrowed` from
    another kind. `pinned` holds the choices made for the module itself. Tuned ones are `tuned` and take precedence over all tables; the
    others match what is chosen anyway.
    """

    operation: str
    implementations: tuple[Implementation, ...]
    device: DeviceFacts
    policy: Policy
    requested: Platform | None = None
    override: Any | None = None
    overlay: tuple[tuple[str, Any], ...] = ()
    memory: Table = dataclasses.field(default_factory=dict)
    user: Table = dataclasses.field(default_factory=dict)
    shipped: Table = dataclasses.field(default_factory=dict)
    borrowed: Table = dataclasses.field(default_factory=dict)
    tuned: Table = dataclasses.field(default_factory=dict)
    pinned: Pins = dataclasses.field(default_factory=dict)

    def __repr__(self) -> str:
        known = sum(map(len, (self.memory, self.user, self.shipped, self.borrowed, self.tuned)))
        return f"Snapshot({self.operation} on {self.device.kind}: {known} known, {len(self.pinned)} pinned)"

    def with_pins(self, pinned: Pins) -> "Snapshot":
        """The same snapshot with other choices made for the module itself."""
        tuned = {key: known for key, (known, tier) in pinned.items() if tier is Tier.AUTOTUNE}
        return dataclasses.replace(self, pinned=dict(pinned), tuned=tuned)

    @property
    def request(self) -> tuple[Any, ...]:
        """Returns what was requested, independent of tables and device; plans with equal requests and pins are equal."""
        if self.override is not None:
            return (self.operation, self.implementations, self.override)
        return (self.operation, self.implementations, self.overlay, self.policy is Policy.HEURISTIC)

    @functools.cached_property
    def asked(self) -> tuple[tuple[str, Implementation], ...]:
        """The implementations that apply on the device, in order, by name: one per platform, if any of its implementations is usable."""
        known = of_device(self.implementations, self.device)
        return tuple(zip(names_of(known), known, strict=True))

    @functools.cached_property
    def pins(self) -> frozenset[Any]:
        """The pins that a table or the tuner answers exactly, without provenance."""
        if self.override is not None:
            return frozenset()
        looked_up = [(key, known) for key, (known, tier) in self.pinned.items() if tier in _LOOKED_UP]
        return frozenset([(*key, known.config) for key, known in looked_up if key in self._all])

    @functools.cached_property
    def answers(self) -> str:
        """A digest of what decides a choice besides the request, without provenance; the same in every process."""
        tables = () if self.override is not None else (self._all.items(), self.borrowed.items())
        known = [
            sorted([(platform.value, key, repr(known.config)) for (platform, key), known in table])
            for table in tables
        ]
        return hashlib.sha256(repr((self.device, known, self._order())).encode()).hexdigest()[:16]

    def _order(self) -> list[tuple[str, str, str]]:
        """Returns which platforms are slower than which others, and for what, according to tables: everything that decides by times."""
        slower = []
        for table in (self._all, self.borrowed):
            by_key: dict[str, list[tuple[Platform, Known]]] = {}
            for (platform, key), known in table.items():
                by_key.setdefault(key, []).append((platform, known))
            for key, known in by_key.items():
                for (one, first), (other, second) in itertools.permutations(known, 2):
                    directions = [d for d in (BOTH, FORWARD) if slowness(first, second, d)]
                    slower += [(key, f"{one.value} {direction}", other.value) for direction in directions]
        return sorted(slower)

    def known_exactly(self, platform: Platform, key: str) -> tuple[Known, Tier] | None:
        """Returns what is known about exactly this problem, and from which tier."""
        tables = [(getattr(self, name), tier) for name, tier in TABLES.items()]
        return next(
            ((table[platform, key], tier) for table, tier in tables if (platform, key) in table), None
        )

    @functools.cached_property
    def _all(self) -> Table:
        """All exact answers, the most trusted one for each problem."""
        return {**self.shipped, **self.user, **self.memory, **self.tuned}

    @functools.cached_property
    def near(self) -> list[Index]:
        """Returns what is known on this device, then on the most similar other one, for guesses at nearby shapes."""
        return [make_index(table) for table in (self._all, self.borrowed) if table]

    def __getstate__(self) -> dict[str, Any]:
        """The state without cached values, because hashes of strings differ between processes."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


_latest: dict[Any, Snapshot] = {}


def _shared(new: Snapshot) -> Snapshot:
    """The latest snapshot of the operation on the device if nothing has changed since, so that its cached values are shared."""
    place = (new.operation, new.requested, place_of(new.device))
    old = _latest.get(place)
    if old is not None and all(
        getattr(old, field.name) == getattr(new, field.name) for field in dataclasses.fields(Snapshot)
    ):
        return old
    _latest[place] = new
    return new


def take_snapshot(
    operation: str, *, platform: "str | Platform | None" = None, config: Any | None = None
) -> Snapshot:
    """Collects everything that the tiers know now for an operation on the default device.

    `platform` fixes the platform (which is never replaced); `config` fixes the configuration and implies its platform. With several
    processes the user's files are not read, since they may differ between machines.
    """
    device = device_facts()
    implementations = _candidates(operation, (device,), platform, config)
    return _take(operation, device, implementations, platform is not None, config)


def take_snapshots(
    operation: str, *, platform: "str | Platform | None" = None, config: Any | None = None
) -> tuple[Snapshot, ...]:
    """Works as `take_snapshot`, for one device of every kind in this process, the default device first.

    A platform requested by name must be usable on one of them, and applies to all.
    """
    here = device_facts()
    devices = (here, *other_device_facts(here))
    implementations = _candidates(operation, devices, platform, config)
    requested = platform is not None
    return tuple(_take(operation, device, implementations, requested, config) for device in devices)


def _take(
    operation: str,
    device: DeviceFacts,
    implementations: tuple[Implementation, ...],
    requested: bool,
    config: Any | None,
) -> Snapshot:
    policy = current_policy()
    asked = of_device(implementations, device) if policy is not Policy.HEURISTIC and config is None else ()
    alone = asked and jax.process_count() == 1
    return _shared(
        Snapshot(
            operation=operation,
            implementations=implementations,
            device=device,
            policy=policy,
            requested=implementations[0].platform if requested else None,
            override=config,
            overlay=_relevant_overlay(operation),
            memory=memory_cache.table(operation, {i.platform for i in asked}),
            user=_joined([user_table(i, device) for i in asked if alone]),
            shipped=_joined([shipped_table(i, device) for i in asked]),
            borrowed=_joined([borrowed_table(i, device) for i in asked]),
        )
    )


def _joined(tables: Iterable[Table]) -> Table:
    return {key: known for table in tables for key, known in table.items()}


def _relevant_overlay(operation: str) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (key, config)
        for key, config in overlay_entries()
        if key == operation or f'"operation":"{operation}"' in key
    )


def _candidates(
    operation: str, devices: Sequence[DeviceFacts], platform: Any, config: Any
) -> tuple[Implementation, ...]:
    if platform is not None:
        return _explicit(operation, devices, platform, config)
    known = [i for i in kernel_registry.ordered(operation) if i.priority >= 0]
    if config is None:
        return tuple(known)
    usable = [i for i in known if any(i.unusable(device) is None for device in devices)]
    matching = [i for i in usable if isinstance(config, i.hooks.config_type)]
    if not matching:
        kinds = sorted({i.hooks.config_type.__name__ for i in usable})
        raise ValueError(
            f"config: expected an instance of {' or '.join(kinds)} for {operation} on {devices[0].kind}, received {config!r}."
        )
    return tuple(i for i in matching if i.platform is matching[0].platform)


def _explicit(
    operation: str, devices: Sequence[DeviceFacts], platform: Any, config: Any
) -> tuple[Implementation, ...]:
    """All implementations of the platform; the device decides which of several applies."""
    wanted = sorted(
        kernel_registry.of_platform(operation, platform), key=kernel_registry.ordered(operation).index
    )
    usable = [i for i in wanted if any(i.unusable(device) is None for device in devices)]
    if not usable:
        reasons = (i.unusable(devices[0]) or "" for i in wanted)
        raise UnsupportedError(operation, dict(zip(names_of(wanted), reasons)))
    if config is None:
        return tuple(wanted)
    matching = tuple(i for i in usable if isinstance(config, i.hooks.config_type))
    if not matching:
        kinds = " or ".join(dict.fromkeys(i.hooks.config_type.__name__ for i in usable))
        raise ValueError(
            f"config: expected an instance of {kinds} for platform {usable[0].platform.value!r} of {operation}, received {config!r}."
        )
    return matching
