"""`Snapshot`: all that the selection chain may answer with, collected once, when a module is built."""

import dataclasses
import enum
import functools
from collections.abc import Iterable
from typing import Any

import jax

from .._errors import UnsupportedError
from .caches import Entry, Known, memory_cache
from .device import device_facts, DeviceFacts
from .overlay import current_policy, overlay_entries, Policy
from .persistent import user_entries
from .platform import Platform
from .registry import Implementation, kernel_registry
from .shipped import borrowed_entries, shipped_entries
from .transfer import Index, make_index


class Tier(enum.StrEnum):
    """Where a configuration came from, in the order in which the tiers are asked."""

    OVERRIDE = "override"
    OVERLAY = "overlay"
    MEMORY = "memory"
    PERSISTENT = "persistent"
    AUTOTUNE = "autotune"
    HEURISTIC = "heuristic"
    ERROR = "error"


Table = dict[tuple[Platform, str], Known]


@dataclasses.dataclass(frozen=True, eq=False)
class Snapshot:
    """All that the tiers of one operation may answer with, as it stood when a module was built.

    `requested` is the platform that was asked for by name. `overlay` maps an operation's name or a problem key to a configuration.
    The tables are tuples of (platform, problem key, `Known`): `memory` of this process, `user` of the user's files, `shipped` with
    the package for this kind of device, `borrowed` from another kind; `tuned` holds what was tuned for the module itself.
    """

    operation: str
    implementations: tuple[Implementation, ...]
    device: DeviceFacts
    policy: Policy
    requested: Platform | None = None
    override: Any | None = None
    overlay: tuple[tuple[str, Any], ...] = ()
    memory: tuple[Entry, ...] = ()
    user: tuple[Entry, ...] = ()
    shipped: tuple[Entry, ...] = ()
    borrowed: tuple[Entry, ...] = ()
    tuned: tuple[Entry, ...] = ()

    @functools.cached_property
    def identity(self) -> tuple[Any, ...]:
        """What decides the choice, without provenance: plans of equal identities share one compilation."""
        if self.override is not None:
            return (self.operation, self.implementations, self.device, self.override)
        known = _bare(self._all.items())
        borrowed = _bare(((platform, key), known) for platform, key, known in self.borrowed)
        return (self.operation, self.implementations, self.device, self.overlay, known, borrowed)

    @functools.cached_property
    def tuned_table(self) -> Table:
        return _table(self.tuned)

    @functools.cached_property
    def memory_table(self) -> Table:
        return _table(self.memory)

    @functools.cached_property
    def user_table(self) -> Table:
        return _table(self.user)

    @functools.cached_property
    def shipped_table(self) -> Table:
        return _table(self.shipped)

    @functools.cached_property
    def _all(self) -> Table:
        """Every exact answer, the most trusted of each problem."""
        return self.shipped_table | self.user_table | self.memory_table | self.tuned_table

    @functools.cached_property
    def near(self) -> Index:
        """What is known on this device, to guess from."""
        return make_index((platform, key, known) for (platform, key), known in self._all.items())

    @functools.cached_property
    def near_borrowed(self) -> Index:
        """What is known on the nearest other device, to guess from."""
        return make_index(self.borrowed)

    def __getstate__(self) -> dict[str, Any]:
        """Without what is cached: hashes of strings differ from process to process."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def _table(entries: Iterable[Entry]) -> Table:
    return {(platform, key): known for platform, key, known in entries}


def _bare(entries: Iterable[tuple[tuple[Platform, str], Known]]) -> frozenset[Any]:
    return frozenset((platform, key, known.config) for (platform, key), known in entries)


_latest: dict[tuple[str, Platform | None], Snapshot] = {}


def _shared(new: Snapshot) -> Snapshot:
    """The latest snapshot of the operation if nothing has changed since, so that what it has worked out is worked out once."""
    place = (new.operation, new.requested)
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
    """Collects, for an operation on the default device, what every tier knows now.

    `platform` pins the platform (never replaced); `config` pins the configuration and implies its platform. With several processes
    the user's files are not read: they may differ from machine to machine.
    """
    device = device_facts()
    policy = current_policy()
    implementations = _candidates(operation, device, platform, config)
    asked = implementations if policy is not Policy.HEURISTIC and config is None else ()
    alone = asked and jax.process_count() == 1
    return _shared(
        Snapshot(
            operation=operation,
            implementations=implementations,
            device=device,
            policy=policy,
            requested=implementations[0].platform if platform is not None else None,
            override=config,
            overlay=_relevant_overlay(operation),
            memory=memory_cache.entries(operation, {i.platform for i in asked}),
            user=tuple(entry for i in asked if alone for entry in user_entries(i, device)),
            shipped=tuple(entry for i in asked for entry in shipped_entries(i, device)),
            borrowed=tuple(entry for i in asked for entry in borrowed_entries(i, device)),
        )
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
