"""The user's own tables: one file per device and core, in one folder."""

import functools
import importlib.metadata
import os
import pathlib
import re

from .cache_file import Content
from .cache_file import PersistentCache as PersistentCache
from .device import device_fingerprint, DeviceFacts
from .environment import declare
from .known import fitting, known_of, memory_cache, Table
from .problem import Problem
from .records import Record as Record
from .records import record_key as record_key
from .registry import Implementation

CACHE_DIR = declare(
    "EJKERNEL_EQX_CACHE_DIR",
    "folder for tables of tuned configurations",
    lambda text: pathlib.Path(text).expanduser(),
    None,
)
_PACKAGES = ("jaxlib", "triton", "jax-triton")


def cache_dir() -> pathlib.Path:
    """The folder of the user's tables: `EJKERNEL_EQX_CACHE_DIR`, or else the operating system's cache folder. It need not exist."""
    return CACHE_DIR.read() or _default_folder(os.environ.get("HOME"), os.environ.get("XDG_CACHE_HOME"))


@functools.lru_cache(maxsize=8)
def _default_folder(*decided_by: str | None) -> pathlib.Path:
    import platformdirs

    return pathlib.Path(platformdirs.user_cache_dir("ejkernel_eqx"))


def user_cache(device: DeviceFacts, core: str) -> PersistentCache:
    """The user's table for a device and a core (a family of kernels)."""
    return _user_cache(cache_dir(), device, core)


@functools.lru_cache(maxsize=256)
def _user_cache(folder: pathlib.Path, device: DeviceFacts, core: str) -> PersistentCache:
    file = re.sub(r"[^\w.-]", "_", core)
    path = folder / device_fingerprint(device) / f"{file}.json"
    return PersistentCache(path, {"device": device.to_dict()})


def user_caches(device: DeviceFacts | None = None) -> list[PersistentCache]:
    """The user's tables for a device, by default for all devices."""
    folder = device_fingerprint(device) if device else "*"
    return [PersistentCache(path) for path in sorted(cache_dir().glob(f"{folder}/*.json"))]


def software() -> dict[str, str]:
    """Versions of the software that compiles kernels; packages that are not installed are omitted."""
    return dict(_versions())


@functools.cache
def _versions() -> tuple[tuple[str, str], ...]:
    found = []
    for package in _PACKAGES:
        try:
            found.append((package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return tuple(found)


def made_with(implementation: Implementation) -> dict[str, str]:
    """`software()` and, if an implementation has one, its `SOURCE` (a digest of its kernels' source)."""
    try:
        source = implementation.hooks.SOURCE
    except ModuleNotFoundError:  # its platform is not installed, so it cannot be chosen anyway
        source = None
    return software() | ({"source": source} if source else {})


def lookup(implementation: Implementation, problem: Problem, device: DeviceFacts) -> Record | None:
    """The user's own record of a problem, for this version of the kernels and this software."""
    key = record_key(
        implementation.operation,
        implementation.platform.value,
        implementation.version,
        problem.key(),
        made_with(implementation),
    )
    return user_cache(device, implementation.core).get(key)


def store(implementation: Implementation, record: Record, device: DeviceFacts) -> None:
    """Adds a record to this process's memory and to the user's table."""
    known = known_of(record, implementation, _origin(record))
    memory_cache.put(implementation.platform, record.problem, known)
    user_cache(device, implementation.core).put(record)


def _origin(record: Record) -> str:
    return f"tuned {record.date[:10]}".rstrip()


def user_table(implementation: Implementation, device: DeviceFacts) -> Table:
    """Returns what the user's table says for an implementation, this software and this device. Reread only when the file has changed."""
    cache = user_cache(device, implementation.core)
    content = cache.content()
    return _fitting(implementation, content, str(cache.path)) if content.records else {}


@functools.lru_cache(maxsize=256)
def _fitting(implementation: Implementation, content: Content, name: str) -> Table:
    software_now = made_with(implementation)
    ours = (record for record in content.records if record.software == software_now)
    return fitting(implementation, ours, name, _origin)
