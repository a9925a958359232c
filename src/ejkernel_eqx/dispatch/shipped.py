"""The tables that come with the package, `data/<device>/<core>.json`: those of this device and of the most similar device."""

import functools
import importlib.resources
import types
from collections.abc import Mapping
from importlib.resources.abc import Traversable

from .cache_file import BrokenTable, Content, parse, warn_once
from .device import DeviceFacts
from .known import fitting, Table
from .persistent import software
from .platform import Backend
from .records import Record
from .registry import Implementation


def shipped_table(implementation: Implementation, device: DeviceFacts) -> Table:
    """Returns what was measured on this kind of device, with any software; empty if there is no table."""
    content = _tables(implementation.core).get(device.slug)
    if content is None:
        return {}
    return _of_content(implementation, content, f"shipped for {device.kind}")


def borrowed_table(implementation: Implementation, device: DeviceFacts) -> Table:
    """Returns what was measured on the most similar known device; empty if this device has its own table or no similar one exists."""
    tables = {} if device.backend is Backend.CPU else _tables(implementation.core)
    if not tables or device.slug in tables:
        return {}
    kin = nearest_device(
        device, {slug: DeviceFacts.from_dict(t.header["device"]) for slug, t in tables.items()}
    )
    if kin is None:
        return {}
    kind = tables[kin].header["device"]["kind"]
    return _of_content(implementation, tables[kin], f"from {kind}")


def nearest_device(device: DeviceFacts, known: Mapping[str, DeviceFacts]) -> str | None:
    """The name of the most similar device: of the same backend, vendor and generation, the nearest in size."""

    def distance(name: str) -> tuple[int, str]:
        return abs(known[name].num_multiprocessors - device.num_multiprocessors), name

    kin = [
        name
        for name, other in known.items()
        if (other.backend, other.vendor) == (device.backend, device.vendor)
        and other.capability[0] == device.capability[0] != 0
    ]
    return min(kin, key=distance, default=None)


@functools.lru_cache(maxsize=256)
def _of_content(implementation: Implementation, content: Content, source: str) -> Table:
    ours = software()

    def origin(record: Record) -> str:
        if record.software == ours:
            return source
        return f"{source}, with {', '.join(' '.join(item) for item in sorted(record.software.items()))}"

    # Among several records of one problem, that of this software comes last and thus decides.
    records = sorted(content.records, key=lambda record: (record.software == ours, record.date))
    return fitting(implementation, records, f"the table {source}", origin)


@functools.cache
def _tables(core: str) -> Mapping[str, Content]:
    """The shipped tables of a core, by device folder."""
    folder = importlib.resources.files("ejkernel_eqx").joinpath("data")
    tables = {}
    for device in folder.iterdir() if folder.is_dir() else ():
        file = device.joinpath(f"{core}.json")
        content = _parse(file) if file.is_file() else None
        if content is not None:
            tables[device.name] = content
    return types.MappingProxyType(tables)


def _parse(file: Traversable) -> Content | None:
    try:
        return parse(file.read_text(encoding="utf-8"), str(file))
    except BrokenTable as error:
        warn_once(str(file), "broken", "%s %s; it is ignored", file, error)
        return None
