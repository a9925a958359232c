"""The file by which tuned records pass from one machine to another."""

import contextlib
import dataclasses
import datetime
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .._files import replacing
from ..dispatch import Implementation, kernel_registry, Problem
from ..dispatch.cache_file import parse
from ..dispatch.config import from_dict
from ..dispatch.persistent import PersistentCache
from ..dispatch.records import Record
from .output import UsageError

FORMAT = "ejkernel_eqx exported tuning records"
SCHEMA = 1
_NAME = re.compile(r"\w[\w.-]*", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Taken:
    """How many records were new, replaced older ones, or were here already; and why each of the others was refused."""

    new: int
    replaced: int
    kept: int
    refused: tuple[tuple[str, str], ...]


def write(path: str, records: Sequence[tuple[PersistentCache, Record]]) -> None:
    """Writes records with the device and core that they belong to; the file is replaced whole."""
    tables: dict[pathlib.Path, dict[str, Any]] = {}
    for cache, record in records:
        empty = {
            "device": cache.path.parent.name,
            "core": cache.path.stem,
            "header": dict(cache.header()),
            "entries": [],
        }
        tables.setdefault(cache.path, empty)["entries"].append(record.to_dict())
    content = {
        "format": FORMAT,
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "tables": list(tables.values()),
    }
    try:
        with replacing(path) as file:
            file.write((json.dumps(content, indent=1) + "\n").encode())
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise UsageError(
            f"FILE: expected a file name in a folder that exists, received {path!r} ({error.strerror})."
        ) from error


def take(path: str, folder: pathlib.Path) -> Taken:
    """Merges a file's records into the tables below `folder`. `UsageError` if the file is none of ours."""
    new = replaced = kept = 0
    refused: list[tuple[str, str]] = []
    for n, table in enumerate(_read(path)):
        place, records = _checked_table(n, table, refused)
        if place is None:
            continue
        cache = PersistentCache(folder / place[0] / f"{place[1]}.json", table.get("header"))
        added: list[Record] = []
        for record in records:
            known = cache.get(record.key)
            if known is not None and known.date >= record.date:
                kept += 1
                continue
            new, replaced = new + (known is None), replaced + (known is not None)
            added.append(record)
        if added:
            cache.update(added)
            check_written(cache, [record.key for record in added], there=True)
    return Taken(new, replaced, kept, tuple(refused))


def check_written(cache: PersistentCache, keys: Sequence[str], there: bool) -> None:
    """`OSError` unless the file itself (not only this process) now has all of these keys, or none of them."""
    held = parse(cache.path.read_text(encoding="utf-8"), str(cache.path)).index if cache.path.exists() else {}
    if any((key in held) is not there for key in keys):
        raise OSError(f"{cache.path} could not be written; see the warning above.")


def _read(path: str) -> list[Any]:
    expected = f"FILE: expected a file written by `cache export`, received {path!r}, which"
    try:
        content = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{expected} cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise UsageError(
            f"{expected} is not JSON ({error}); it may have been cut off: export it again."
        ) from error
    if (
        not isinstance(content, dict)
        or content.get("format") != FORMAT
        or not isinstance(content.get("tables"), list)
    ):
        raise UsageError(f"{expected} is something else; on the other machine run `cache export`.")
    if content.get("schema") != SCHEMA:
        raise UsageError(
            f"{expected} has schema {content.get('schema')!r}, this version reads {SCHEMA}; use the same version of ejkernel_eqx on both machines."
        )
    return content["tables"]


def _checked_table(
    n: int, table: Any, refused: list[tuple[str, str]]
) -> tuple[tuple[str, str] | None, list[Record]]:
    """Where a table belongs (device and core) and its valid records; what is not valid is added to `refused`."""
    is_table = isinstance(table, Mapping) and isinstance(table.get("entries"), list)
    place = (str(table.get("device")), str(table.get("core"))) if is_table else ("", "")
    if not is_table or not all(_NAME.fullmatch(name) for name in place):
        refused.append((f"table {n}", f"is no table with entries, of a device and a core: {place!r}"))
        return None, []
    if not isinstance(table.get("header", {}), Mapping):
        refused.append((f"table {n}", "has a header that is not an object"))
        return None, []
    records = []
    for i, entry in enumerate(table["entries"]):
        try:
            records.append(_checked_record(entry))
        except ValueError as error:
            refused.append((f"{place[0]}/{place[1]} entry {i}", str(error)))
    return place, records


def _checked_record(entry: Any) -> Record:
    """`ValueError` unless it is a record of a problem and, where its operation is known here, of these very kernels."""
    record = Record.from_dict(entry)
    try:
        problem = Problem.from_dict(record.exact)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its problem cannot be read: {error!r}") from None
    if problem.key() != record.problem or problem.operation != record.operation:
        raise ValueError("its key is not that of its problem")
    for implementation in _importable(record.operation, record.platform):
        if implementation.version != record.version:
            raise ValueError(
                f"is of version {record.version} of the kernels, this package has {implementation.version}"
            )
        if record.config is not None:
            from_dict(record.config, implementation.hooks.config_type)
    return record


def _importable(operation: str, platform: str) -> list[Implementation]:
    """The implementation that a record is of, if it is registered and what it needs is installed: it may be for another machine."""
    if operation not in kernel_registry.list_operations():
        return []
    found = []
    for implementation in kernel_registry.ordered(operation):
        with contextlib.suppress(ModuleNotFoundError):
            implementation.load()
            found.append(implementation)
    return [implementation for implementation in found if implementation.platform.value == platform]
