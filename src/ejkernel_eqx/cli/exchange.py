"""The file format that transfers tuned records between machines."""

import datetime
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..dispatch import Implementation, kernel_registry, Problem
from ..dispatch.cache_file import parse
from ..dispatch.config import from_dict
from ..dispatch.files import replacing
from ..dispatch.persistent import PersistentCache
from ..dispatch.records import Record
from .output import UsageError

FORMAT = "ejkernel_eqx exported tuning records"
SCHEMA = 1
_NAME = re.compile(r"\w[\w.-]*", re.ASCII)


def write(path: str, records: Sequence[tuple[PersistentCache, Record]]) -> None:
    """Writes records with their device and core; the file is replaced atomically."""
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
    # Only a wrong path is an error of the command line; a full disk stays an `OSError`.
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise UsageError(
            f"FILE: expected a file name in an existing folder, received {path!r} ({error.strerror})."
        ) from error


def take(path: str, folder: pathlib.Path) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Merges a file's records into the tables below `folder`. Returns how many were new, replaced older ones, or were already known, and
    the reason for each rejected record. Raises `UsageError` if `cache export` did not write the file."""
    counts = {"new": 0, "replaced": 0, "kept": 0}
    refused: list[tuple[str, str]] = []
    # A bad table or entry is reported and skipped; the rest of the file is still taken.
    for n, table in enumerate(_read(path)):
        try:
            device, core = _place_of(table)
        except ValueError as error:
            refused.append((f"table {n}", str(error)))
            continue
        cache = PersistentCache(folder / device / f"{core}.json", table.get("header"))
        added: list[Record] = []
        for i, entry in enumerate(table["entries"]):
            try:
                record = _checked_record(entry)
            except ValueError as error:
                refused.append((f"{device}/{core} entry {i}", str(error)))
                continue
            known = cache.get(record.key)
            # A record of the same date stays, so that a second import of a file changes nothing.
            fate = "new" if known is None else "kept" if known.date >= record.date else "replaced"
            counts[fate] += 1
            if fate != "kept":
                added.append(record)
        if added:
            cache.update(added)
            check_written(cache, [record.key for record in added], there=True)
    return counts, refused


def check_written(cache: PersistentCache, keys: Sequence[str], there: bool) -> None:
    """Raises `OSError` unless the file itself (not only this process) holds all of these keys, or none if `there` is false."""
    held = parse(cache.text(), str(cache.path)).index if cache.path.exists() else {}
    if any((key in held) is not there for key in keys):
        raise OSError(f"{cache.path} could not be written; see the warning above.")


def _read(path: str) -> list[Any]:
    expected = f"FILE: expected a file written by `cache export`, received {path!r}, which"
    try:
        content = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{expected} cannot be read ({error.strerror}).") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{expected} is not JSON ({error}); it may be truncated: export it again."
        ) from error
    if (
        not isinstance(content, dict)
        or content.get("format") != FORMAT
        or not isinstance(content.get("tables"), list)
    ):
        raise UsageError(f"{expected} is another kind of file; run `cache export` on the other machine.")
    if content.get("schema") != SCHEMA:
        raise UsageError(
            f"{expected} has schema {content.get('schema')!r}, this version reads {SCHEMA}; use the same version of ejkernel_eqx on both machines."
        )
    return content["tables"]


def _place_of(table: Any) -> tuple[str, str]:
    """The device and the core of a table; `ValueError` if it is not a valid table."""
    is_table = isinstance(table, Mapping) and isinstance(table.get("entries"), list)
    place = (str(table.get("device")), str(table.get("core"))) if is_table else ("", "")
    # Both names become parts of a path: they hold no separator and do not begin with a dot.
    if not all(_NAME.fullmatch(name) for name in place):
        raise ValueError(f"is not a table with a device, a core and entries: {place!r}")
    if not isinstance(table.get("header", {}), Mapping):
        raise ValueError("has a header that is not an object")
    return place


def _checked_record(entry: Any) -> Record:
    """The record; `ValueError` if it is invalid or, for an operation that is known here, belongs to other kernels."""
    record = Record.from_dict(entry)
    try:
        problem = Problem.from_dict(record.exact)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its problem cannot be read: {error!r}") from None
    if problem.key() != record.problem or problem.operation != record.operation:
        raise ValueError("its key does not match its problem")
    # Records of operations that are not registered here cannot be checked further, and pass.
    known = kernel_registry.list_operations()
    same = kernel_registry.ordered(record.operation) if record.operation in known else ()
    refused = []
    for implementation in (i for i in same if i.platform.value == record.platform):
        try:
            _check_fits(record, implementation)
            return record
        except ModuleNotFoundError:
            continue  # a requirement is not installed here, but the record may be for another machine
        except ValueError as error:
            refused.append(error)
    if refused:
        raise refused[0]
    return record


def _check_fits(record: Record, implementation: Implementation) -> None:
    if implementation.version != record.version:
        raise ValueError(
            f"is of version {record.version} of the kernels, this package has {implementation.version}"
        )
    if record.config is not None:
        from_dict(record.config, implementation.hooks.config_type)
