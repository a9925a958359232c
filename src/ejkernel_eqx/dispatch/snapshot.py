"""Collects a `Snapshot` when a module is built: everything that the selection chain may answer with on one kind of device."""

import dataclasses
from typing import Any

import jax

from .._errors import UnsupportedError
from .device import device_facts, DeviceFacts, other_device_facts, place_of
from .known import joined, memory_cache
from .overlay import current_policy, overlay_entries, Policy
from .persistent import user_table
from .platform import Platform
from .registry import Implementation, kernel_registry, names_of, of_device
from .selection import Snapshot
from .shipped import borrowed_table, shipped_table

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
    return _take(operation, (device_facts(),), platform, config)[0]


def take_snapshots(
    operation: str, *, platform: "str | Platform | None" = None, config: Any | None = None
) -> tuple[Snapshot, ...]:
    """Works as `take_snapshot`, for one device of every kind in this process, the default device first.

    A platform requested by name must be usable on one of them, and applies to all.
    """
    here = device_facts()
    return _take(operation, (here, *other_device_facts(here)), platform, config)


def _take(
    operation: str, devices: tuple[DeviceFacts, ...], platform: "str | Platform | None", config: Any | None
) -> tuple[Snapshot, ...]:
    implementations, policy = _candidates(operation, devices, platform, config), current_policy()
    overlay, reads_tables = _relevant_overlay(operation), policy is not Policy.HEURISTIC and config is None
    snapshots = []
    for device in devices:
        known = of_device(implementations, device) if reads_tables else ()
        snapshot = Snapshot(
            operation=operation,
            implementations=implementations,
            device=device,
            policy=policy,
            requested=None if platform is None else implementations[0].platform,
            override=config,
            overlay=overlay,
            memory=memory_cache.table(operation, {i.platform for i in known}),
            user=joined([user_table(i, device) for i in known if jax.process_count() == 1]),
            shipped=joined([shipped_table(i, device) for i in known]),
            borrowed=joined([borrowed_table(i, device) for i in known]),
        )
        snapshots.append(_shared(snapshot))
    return tuple(snapshots)


def _relevant_overlay(operation: str) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (key, config)
        for key, config in overlay_entries()
        if key == operation or f'"operation":"{operation}"' in key
    )


def _candidates(
    operation: str, devices: tuple[DeviceFacts, ...], platform: Any, config: Any
) -> tuple[Implementation, ...]:
    """The implementations that a request leaves. Of a platform asked for by name all, since the device decides which of them applies."""
    known = kernel_registry.ordered(operation)
    if platform is None:
        known = [i for i in known if i.priority >= 0]
        if config is None:
            return tuple(known)
    else:
        asked = kernel_registry.of_platform(operation, platform)
        known = [i for i in known if i.platform is asked[0].platform]
    usable = [i for i in known if None in [i.unusable(device) for device in devices]]
    if platform is not None and not usable:
        reasons = (i.unusable(devices[0]) or "" for i in known)
        raise UnsupportedError(operation, dict(zip(names_of(known), reasons)))
    if config is None:
        return tuple(known)
    matching = [i for i in usable if isinstance(config, i.hooks.config_type)]
    if not matching:
        kinds = " or ".join(sorted({i.hooks.config_type.__name__ for i in usable}))
        where = f"{operation} on {devices[0].kind}"
        if platform is not None:
            where = f"platform {usable[0].platform.value!r} of {operation}"
        raise ValueError(f"config: expected an instance of {kinds} for {where}, received {config!r}.")
    return tuple(i for i in matching if i.platform is matching[0].platform)
