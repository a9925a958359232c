"""The choices of a tuned model as JSON, which its file carries to other machines with devices of the same kind."""

import json
import logging
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from .._kernel import Plan
from ..dispatch import (
    Denied,
    device_facts,
    device_fingerprint,
    DeviceFacts,
    Implementation,
    Known,
    Platform,
    Record,
    Snapshot,
    Tier,
    to_dict,
)
from ..dispatch.known import known_of
from ..dispatch.persistent import made_with
from .replace import map_plans, plans_of

_LOG = logging.getLogger("ejkernel_eqx")
_LOOKED_UP = (Tier.AUTOTUNE, Tier.MEMORY, Tier.PERSISTENT)
_FROM_FILE = ", from a file"
Json = dict[str, Any]


class _Entry(NamedTuple):
    """A choice in a file: for the kernels at these paths of the model."""

    paths: tuple[str, ...]
    record: Record


def choices_of_model(model: Any) -> list[Json]:
    """Lists the tuned choices of a model by device, each a `Record` with the paths that it holds for."""
    tables: dict[str, Json] = {}
    results: dict[tuple[str, str], Json] = {}
    for path, plan in plans_of(model).items():
        for known in (plan.snapshot, *plan.elsewhere):
            fingerprint = device_fingerprint(known.device)
            for record in _records(known):
                empty = {"device": known.device.to_dict(), "entries": []}
                place = fingerprint, json.dumps(record.to_dict(), sort_keys=True)
                if place not in results:
                    results[place] = {"paths": [], "record": record.to_dict()}
                    tables.setdefault(fingerprint, empty)["entries"].append(results[place])
                results[place]["paths"].append(path)
    if not tables:
        _LOG.warning(
            "configs: no kernel of the model was tuned (ejx.tune, tune_for=), so that there is nothing to save of that kind"
        )
    return list(tables.values())


def _records(snapshot: Snapshot) -> Iterator[Record]:
    """The choices made for the kernel itself; what was given (`config=`, an overlay) belongs to who builds it."""
    if snapshot.override is not None:
        return
    for (platform, key), (known, tier) in snapshot.pinned.items():
        implementation = _implementation(snapshot, platform)
        if tier in _LOOKED_UP and implementation is not None:
            yield Record(
                operation=snapshot.operation,
                platform=platform.value,
                version=implementation.version,
                problem=key,
                exact={"dims": dict(known.sizes)},
                software=made_with(implementation),
                config=None if known.config is None else to_dict(known.config),
                ms=dict(known.ms),
                denied=(Denied("", {}, known.denied),) if known.denied else (),
                date=known.origin.removesuffix(_FROM_FILE),
            )


def with_choices(model: Any, tables: Any, name: str) -> Any:
    """The model with the choices that a file `name` has for devices of this process in place, decided before any table. What does not fit is
    left out, with one warning; a file for other devices alone is said to be one."""
    refused: list[str] = []
    by_device = dict(_read(tables, refused))
    here = device_fingerprint(device_facts())
    if here not in by_device and by_device:
        kinds = " and ".join(sorted({device.kind for device, _ in by_device.values()}))
        _LOG.warning(
            "%s: its choices were tuned for %s, the default device here is %s: there the model runs as one that was not tuned; "
            "ejx.tune(model, ...) tunes it.",
            name,
            kinds,
            device_facts().kind,
        )
    plans = plans_of(model)
    missing = {path for _, entries in by_device.values() for entry in entries for path in entry.paths} - set(
        plans
    )
    refused.extend(f"there is no kernel at {path!r} of the model" for path in sorted(missing))

    def renewed(path: str, plan: Plan) -> Plan:
        def with_its_own(known: Snapshot) -> Snapshot:
            _, entries = by_device.get(device_fingerprint(known.device), (None, ()))
            ours = [entry.record for entry in entries if path in entry.paths]
            return _with_pins(known, ours, path, refused)

        return plan.changed(with_its_own)

    model = map_plans(renewed, model)
    if refused:
        _LOG.warning(
            "%s: %d of its tuned choices are not used; the first: %s", name, len(refused), refused[0]
        )
    return model


def _with_pins(snapshot: Snapshot, records: list[Record], path: str, refused: list[str]) -> Snapshot:
    if snapshot.override is not None or not records:  # `config=` was given: nothing else decides
        return snapshot
    pins = {}
    for record in records:
        try:
            platform, known = _known(snapshot, record)
            pins[platform, record.problem] = known, Tier.AUTOTUNE
        except ValueError as error:
            refused.append(f"{path or 'the model'}: {error}")
    return snapshot.with_pins(pins) if pins else snapshot


def _known(snapshot: Snapshot, record: Record) -> tuple[Platform, Known]:
    """Reads a record as a choice of a kernel; `ValueError` with the reason if it does not fit."""
    if record.operation != snapshot.operation:
        raise ValueError(f"is a kernel of {snapshot.operation}, the choice is one of {record.operation}")
    if f'"operation":"{record.operation}"' not in record.problem:
        raise ValueError(f"its problem is none of {record.operation}: {record.problem!r}")
    implementation = _implementation(snapshot, record.platform)
    if implementation is None:
        raise ValueError(f"the kernel does not run on {record.platform!r} here")
    reason = implementation.unusable(snapshot.device)
    if reason is not None:
        raise ValueError(f"{record.platform} {reason}")
    source = record.software.get("source")
    if record.version != implementation.version or source != made_with(implementation).get("source"):
        raise ValueError(
            f"is of version {record.version} of the kernels, this package has {implementation.version}; tune again"
        )
    origin = f"{record.date}{_FROM_FILE}"
    if record.config is None and record.denied:
        return implementation.platform, Known(None, (), origin, record.denied[0].reason)
    return implementation.platform, known_of(record, implementation, origin)


def _implementation(snapshot: Snapshot, platform: str) -> Implementation | None:
    return next((i for _, i in snapshot.asked if i.platform == platform), None)


def _read(tables: Any, refused: list[str]) -> Iterator[tuple[str, tuple[DeviceFacts, tuple[_Entry, ...]]]]:
    """The tables of a header by device; what is damaged is named in `refused`."""
    if not isinstance(tables, list):
        refused.append(f"expected a list of tables, received {type(tables).__name__}")
        return
    for table in tables:
        try:
            device = DeviceFacts.from_dict(table["device"])
            entries = table["entries"]
            fingerprint = device_fingerprint(device)
            if not isinstance(entries, list):
                raise ValueError("its entries are no list")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            refused.append(f"a table cannot be read: {error!r}")
            continue
        yield fingerprint, (device, tuple(_entries(entries, refused)))


def _entries(entries: list[Any], refused: list[str]) -> Iterator[_Entry]:
    for entry in entries:
        try:
            is_entry = isinstance(entry, Mapping) and entry.keys() == {"paths", "record"}
            if not is_entry or not all(isinstance(path, str) for path in entry["paths"]):
                raise ValueError(f"expected paths and a record, received {reprlib.repr(entry)}")
            yield _Entry(tuple(entry["paths"]), Record.from_dict(entry["record"]))
        except (TypeError, ValueError) as error:
            refused.append(str(error))
