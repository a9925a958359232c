"""Tables of known configurations: in memory, and those shipped with the package."""

import functools
import importlib.resources
import json
import logging
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .config import from_dict
from .device import DeviceFacts
from .platform import Platform
from .registry import Implementation

_LOG = logging.getLogger("ejkernel_eqx")
SCHEMA = 1
Key = tuple[Platform, str]


class ConfigCache:
    """Configurations found in this process, by platform and `Problem.key()`."""

    def __init__(self) -> None:
        self._entries: dict[Key, Any] = {}

    def put(self, platform: Platform, problem_key: str, config: Any) -> None:
        self._entries[(platform, problem_key)] = config

    def get(self, platform: Platform, problem_key: str) -> Any | None:
        return self._entries.get((platform, problem_key))

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def items(self) -> Iterator[tuple[Key, Any]]:
        return iter(tuple(self._entries.items()))

    def clear(self) -> None:
        self._entries.clear()


memory_cache = ConfigCache()


def persistent_entries(implementation: Implementation, device: DeviceFacts) -> dict[str, Any]:
    """Problem key -> configuration from every persistent source, the first source to know a problem deciding."""
    merged: dict[str, Any] = {}
    for source in reversed(PERSISTENT_SOURCES):
        merged.update(source(implementation, device))
    return merged


def shipped_entries(implementation: Implementation, device: DeviceFacts) -> Mapping[str, Any]:
    """Problem key -> configuration, from the table measured on this kind of device; empty where there is none."""
    return _shipped(implementation, device.slug)


@functools.lru_cache(maxsize=256)
def _shipped(implementation: Implementation, slug: str) -> Mapping[str, Any]:
    entries: dict[str, Any] = {}
    for row in _shipped_table(slug, implementation.core):
        if (row["operation"], row["platform"]) == (implementation.operation, implementation.platform.value):
            try:
                entries[row["problem"]] = from_dict(row["config"], implementation.load().config_type)
            except ValueError as error:
                _LOG.warning("shipped entry for %s ignored: %s", row["problem"], error)
    return types.MappingProxyType(entries)


@functools.cache
def _shipped_table(slug: str, core: str) -> tuple[Mapping[str, Any], ...]:
    file = importlib.resources.files("ejkernel_eqx").joinpath("data", slug, f"{core}.json")
    if not file.is_file():
        return ()
    content = json.loads(file.read_text())
    if content.get("schema") != SCHEMA:
        _LOG.warning("%s has schema %s, this version reads %s: ignored", file, content.get("schema"), SCHEMA)
        return ()
    return tuple(content["entries"])


PERSISTENT_SOURCES: list[Callable[[Implementation, DeviceFacts], Mapping[str, Any]]] = [shipped_entries]
"""Where known configurations are read from when a module is built, the most trusted first."""
