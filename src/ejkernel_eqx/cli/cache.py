"""`cache list|show|export|import|clear`: manages tuned configurations of this device and others."""

import argparse
import dataclasses
import hashlib
import itertools
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ..dispatch import Problem
from ..dispatch.persistent import cache_dir, PersistentCache, user_caches
from ..dispatch.records import Record
from ..tuning.report.data import describe, entry_of_record
from . import exchange
from .output import count, FAILED, number, OK, Outcome, pairs, percent, progress, section, table, UsageError

_SHORT = 10

_LIST_HELP = """example:
  python -m ejkernel_eqx cache list --operation flash_attention
"""
_SHOW_HELP = """KEY is a key from the first column of `cache list`, an unambiguous prefix of one, or a record's full key.
"""
_EXPORT_HELP = """The file holds records of all devices, so that another machine can import those of its device.

example:
  python -m ejkernel_eqx cache export tuned.json --device nvidia_h200
"""
_IMPORT_HELP = """Every record is checked. An existing record is replaced only by a newer one.

example:
  python -m ejkernel_eqx cache import tuned.json
"""
_CLEAR_HELP = """Without a filter, all tuned configurations of all devices are removed.

example:
  python -m ejkernel_eqx cache clear --operation flash_attention --yes
"""


@dataclasses.dataclass(frozen=True)
class Row:
    """A record and its file."""

    cache: PersistentCache
    record: Record

    @property
    def device(self) -> str:
        return self.cache.path.parent.name

    @property
    def digest(self) -> str:
        # The device is part of the hash, since records of several devices may have the same key.
        return hashlib.sha256(f"{self.device}/{self.record.key}".encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        return {
            "digest": self.digest,
            "device": self.device,
            "core": self.cache.path.stem,
            **self.record.to_dict(),
        }


def add_commands(add: Callable[..., argparse.ArgumentParser]) -> None:
    _add_filters(add("list", run_list, "list tuned problems", _LIST_HELP))
    show = add("show", run_show, "show the details of one tuned problem", _SHOW_HELP)
    show.add_argument("key", metavar="KEY", help="a key from the first column of `cache list`")
    export = add("export", run_export, "write records to a file", _EXPORT_HELP)
    export.add_argument("file", metavar="FILE", help="the JSON file to write")
    _add_filters(export)
    take = add("import", run_import, "merge the records of a file", _IMPORT_HELP)
    take.add_argument("file", metavar="FILE", help="a JSON file written by `cache export`")
    clear = add("clear", run_clear, "remove tuned configurations", _CLEAR_HELP)
    _add_filters(clear)
    clear.add_argument("--yes", action="store_true", help="do not ask for confirmation")


def _add_filters(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--operation", metavar="OP", help="only this operation")
    parser.add_argument(
        "--device", metavar="NAME", help="only devices whose folder starts with NAME, such as nvidia_h200"
    )


def rows(operation: str | None = None, device: str | None = None) -> list[Row]:
    """The records in the cache folder that pass the filters."""
    every = [Row(cache, record) for cache in user_caches() for record in cache.records()]
    of_operation = [row for row in every if not operation or row.record.operation == operation]
    kept = [row for row in of_operation if row.device.startswith(device or "")]
    order = operator.attrgetter("device", "record.operation", "record.platform", "record.problem")
    return sorted(kept, key=order)


def run_list(options: argparse.Namespace) -> Outcome:
    chosen = rows(options.operation, options.device)
    document = {"folder": str(cache_dir()), "records": [row.to_dict() for row in chosen]}
    filters = [("--operation", options.operation), ("--device", options.device)]
    asked = " ".join(f"{name} {value}" for name, value in filters if value)
    return Outcome(document, lambda: _list_text(chosen, asked))


def _list_text(chosen: Sequence[Row], asked: str) -> str:
    if not chosen:
        return f"no tuned configurations in {cache_dir()}{f' for {asked}' if asked else ''}"
    header = ("key", "operation", "platform", "problem", "config", "ms", "tuned")
    tables = []
    for device, of_device in itertools.groupby(chosen, key=operator.attrgetter("device")):
        tables.append(section(device, table(header, list(map(_list_row, of_device)), right=("ms",))))
    return "\n\n".join(tables)


def _list_row(row: Row) -> tuple[str, ...]:
    record = row.record
    shown = str(Problem.from_dict(record.exact)).removeprefix(f"{record.operation} ")
    ms = " / ".join(number(value) for value in record.ms.values()) or "-"
    config = describe(record.config) if record.config is not None else "all rejected"
    return row.digest[:_SHORT], record.operation, record.platform, shown, config, ms, record.date[:10]


def run_show(options: argparse.Namespace) -> Outcome:
    every = rows()
    matches = [row for row in every if options.key == row.record.key or row.digest.startswith(options.key)]
    if len(matches) != 1:
        received = f"received {options.key!r}, which matches {len(matches) or 'none'} of {len(every)}"
        which = f": {', '.join(row.digest for row in matches[:5])}" if matches else ""
        raise UsageError(f"KEY: expected the prefix of exactly one key, {received}{which}; see `cache list`.")
    document = {**matches[0].to_dict(), "key": matches[0].record.key, "file": str(matches[0].cache.path)}
    return Outcome(document, lambda: _show_text(matches[0]))


def _show_text(row: Row) -> str:
    record, entry = row.record, entry_of_record(row.record)
    listed = lambda entries: ", ".join(f"{name} {text}" for name, text in entries)
    spreads = ((d, f"{number(ms)} (spread {percent(record.spread.get(d))})") for d, ms in record.ms.items())
    facts = {
        "problem": str(entry.problem),
        "platform": record.platform,
        "device": row.device,
        "config": describe(record.config) if record.config is not None else "every candidate was rejected",
        "ms": listed(spreads),
        "error": listed((name, f"{error:.2g}") for name, error in record.errors.items()),
        "software": listed(record.software.items()),
        "version": f"{record.version} of the kernels",
        "tuned": record.date,
        "file": str(row.cache.path),
        "key": row.digest,
    }
    timed = [
        (c.part, describe(c.config), number(c.ms), percent(c.spread), "winner" if c.is_winner else c.reason)
        for c in entry.ranked()
        if c.ms is not None
    ]
    denied = [(d.part, describe(d.config), d.reason) for d in record.denied]
    parts = [
        pairs(facts, 9),
        section("timed", table(("part", "config", "ms", "spread", ""), timed, right=("ms", "spread"))),
    ]
    if denied:
        parts.append(section("rejected", table(("part", "config", "reason"), denied)))
    return "\n\n".join(parts)


def run_export(options: argparse.Namespace) -> Outcome:
    matches = rows(options.operation, options.device)
    exchange.write(options.file, [(row.cache, row.record) for row in matches])
    document = {"file": options.file, "records": len(matches)}
    return Outcome(document, lambda: f"{count(len(matches), 'record')} written to {options.file}")


def run_import(options: argparse.Namespace) -> Outcome:
    counts, refused = exchange.take(options.file, cache_dir())
    named = [{"record": name, "reason": reason} for name, reason in refused]
    head = "{new} new, {replaced} replaced by newer ones, {kept} kept, ".format(**counts)
    head += f"{len(refused)} rejected"

    def text() -> str:
        return f"{head}\n\n{table(('record', 'reason'), refused)}" if refused else head

    return Outcome({"file": options.file, **counts, "refused": named}, text, FAILED if refused else OK)


def run_clear(options: argparse.Namespace) -> Outcome:
    matches = rows(options.operation, options.device)
    if matches and not options.yes:
        _confirm(count(len(matches), "record"), as_json=options.json)
    # Each file is rewritten once, however many of its records go.
    by_path = {row.cache.path: row.cache for row in matches}
    for path, cache in by_path.items():
        keys = [row.record.key for row in matches if row.cache.path == path]
        cache.remove(keys)
        # Removal in memory alone is no success, so the file is read back.
        exchange.check_written(cache, keys, there=False)
    document = {"removed": len(matches), "folder": str(cache_dir())}
    return Outcome(document, lambda: f"{count(len(matches), 'record')} removed from {cache_dir()}")


def _confirm(number_of: str, as_json: bool) -> None:
    # Nobody answers a question on a pipe, and `--json` promises one document only.
    if as_json or not sys.stdin.isatty():
        raise UsageError(
            f"clear would remove {number_of}: expected --yes, as standard input is not interactive; pass --yes to confirm."
        )
    progress(f"remove {number_of} from {cache_dir()}? [y/N]")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError("nothing was removed.")
