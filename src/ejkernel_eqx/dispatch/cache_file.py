"""`PersistentCache`: one JSON file of records, safe to share between processes. Neither JAX nor a device is needed here."""

import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from .files import lock_of, read_regular, remove_leftovers, replacing
from .records import is_shallow, Record

_LOG = logging.getLogger("ejkernel_eqx")
SCHEMA = 2
FORMAT = "ejkernel_eqx tuning records"
MOST_BYTES = 1 << 23
"""A larger table is not read, and none is written. The largest shipped one has half a megabyte."""

_Stamp = tuple[int, int, int] | None  # None if there is no file


class BrokenTable(Exception):
    """The file is unrecognised or damaged; the message says how."""


@dataclasses.dataclass(frozen=True, eq=False)
class Content:
    """The content of a file when it was read. The same object is returned until the file changes."""

    header: Mapping[str, Any]
    records: tuple[Record, ...]
    index: Mapping[str, Record]


def make_content(header: Mapping[str, Any], records: Iterable[Record]) -> Content:
    """Later records replace earlier ones of the same key."""
    index = {record.key: record for record in records}
    return Content(types.MappingProxyType(dict(header)), tuple(index.values()), types.MappingProxyType(index))


_EMPTY = make_content({}, ())
_HEADER_BYTES = 1 << 16
_FRAME = ("format", "schema", "entries")
_read: dict[str, tuple[_Stamp, Content]] = {}
_unread: set[str] = set()  # files that exist, but whose content `_read` does not hold
_warned: set[tuple[str, str]] = set()


def warn_once(path: "str | os.PathLike[str]", kind: str, message: str, *args: Any) -> None:
    """Logs a warning of each kind once per file and process."""
    if (os.fspath(path), kind) not in _warned:
        _warned.add((os.fspath(path), kind))
        _LOG.warning(message, *args)


def parse(text: str, name: str) -> Content:
    """The content of a file. Raises `BrokenTable` if it is damaged, unrecognised or of another schema; entries that are not records are
    skipped with one warning per file."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BrokenTable("is empty" if not text.strip() else f"is not valid JSON ({error})") from None
    if (
        not isinstance(data, dict)
        or data.get("format") != FORMAT
        or not isinstance(data.get("entries"), list)
    ):
        raise BrokenTable("is not a table of ejkernel_eqx")
    if data.get("schema") != SCHEMA:
        raise BrokenTable(f"has schema {data.get('schema')}, this version reads {SCHEMA}")
    records, refused = [], []
    for entry in data["entries"]:
        try:
            records.append(Record.from_dict(entry))
        except ValueError as error:
            refused.append(str(error))
    if refused:
        message = "%s: %d of %d entries are not records and are ignored; the first: %s"
        warn_once(name, "entries", message, name, len(refused), len(data["entries"]), refused[0])
    return make_content({k: v for k, v in data.items() if k not in _FRAME and is_shallow(v)}, records)


def _bounded(records: tuple[Record, ...], name: str) -> tuple[Record, ...]:
    """The records or, if they would make the file too large, the newest that fill half of it, with one warning."""
    if sum(len(record.line) + 2 for record in records) < MOST_BYTES - _HEADER_BYTES:
        return records
    left, kept = MOST_BYTES // 2, []
    for record in sorted(reversed(records), key=lambda record: record.date, reverse=True):
        if len(record.line) <= left:
            left -= len(record.line)
            kept.append(record)
    message = "%s would be larger than %d MB; the oldest %d of its %d records are left out"
    warn_once(name, "full", message, name, MOST_BYTES >> 20, len(records) - len(kept), len(records))
    return tuple(kept)


def render(header: Mapping[str, Any], records: Iterable[Record]) -> str:
    """The text of a file: sorted, one record to a line."""
    head = {"format": FORMAT, "schema": SCHEMA, **header}
    lines = [record.line for record in sorted(records, key=lambda record: record.key)]
    entries = "".join(("\n" if n == 0 else ",\n") + line for n, line in enumerate(lines))
    return f'{json.dumps(head)[:-1]}, "entries": [{entries}\n]}}\n'


class PersistentCache:
    """Records in one JSON file. Every process that uses the file may write at any time, without losing what others wrote.

    A write takes the lock file next to it, merges with the current content and replaces the file atomically. Readers
    see either the old or the new file, even if a process is killed. Unrecognised files (empty, truncated, too large,
    foreign or of another schema) are renamed to `<name>.broken-<n>` and reported in a warning. What is not a regular
    file is neither read nor replaced. If the file cannot be written, one warning says so, and new records are known to
    this process only. A file that would be larger than 8 MB loses its oldest records.

    **Arguments:**

    - `path`: the file. Neither it nor its folder need exist.
    - `header`: JSON content of the file besides its records: the facts of the device.
    - `lock_timeout`: seconds to wait for another process before giving up writing.
    """

    def __init__(
        self,
        path: "str | os.PathLike[str]",
        header: Mapping[str, Any] | None = None,
        lock_timeout: float = 10.0,
    ) -> None:
        self.path = pathlib.Path(path)
        self._header = dict(header or {})
        self._lock_timeout = lock_timeout

    def __repr__(self) -> str:
        return f"PersistentCache({str(self.path)!r})"

    def content(self) -> Content:
        """The current content of the file, parsed once for each of its states."""
        return self._load(locked=False)

    def header(self) -> Mapping[str, Any]:
        """The content of the file besides its records; if the file does not exist, what would be written."""
        return {**self._header, **self.content().header}

    def get(self, key: str) -> Record | None:
        return self.content().index.get(key)

    def records(self) -> tuple[Record, ...]:
        return self.content().records

    def __contains__(self, key: str) -> bool:
        return key in self.content().index

    def __len__(self) -> int:
        return len(self.content().records)

    def put(self, record: Record) -> None:
        self.update((record,))

    def update(self, records: Iterable[Record]) -> None:
        """Adds records; each replaces an existing one with the same key."""
        added = tuple(records)
        self._change(lambda known: (*known, *added))

    def remove(self, keys: Iterable[str]) -> None:
        """Removes the records with these keys; missing keys are ignored."""
        gone = frozenset(keys)
        self._change(lambda known: tuple(record for record in known if record.key not in gone))

    def _change(self, change: Callable[[tuple[Record, ...]], tuple[Record, ...]]) -> None:
        """Changes the file or, if it cannot be written, this process's copy of it."""

        def write() -> None:
            before = self._load(locked=True)
            after = make_content({**before.header, **self._header}, change(before.records))
            kept = _bounded(after.records, os.fspath(self.path))
            after = after if kept is after.records else make_content(after.header, kept)
            self._replace(render(after.header, after.records))
            self._know(self._stamp(), after)

        if not self._locked_and(write):
            before = self.content()
            changed = make_content(before.header, change(before.records))
            _read[os.fspath(self.path)] = (self._stamp(), changed)

    def clear(self) -> None:
        """Removes the file."""
        if not self._locked_and(lambda: self.path.unlink(missing_ok=True)):
            _read[os.fspath(self.path)] = (self._stamp(), _EMPTY)

    def _stamp(self) -> _Stamp:
        try:
            status = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            warn_once(self.path, "unreadable", "%s cannot be read (%s); it is ignored", self.path, error)
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _load(self, locked: bool) -> Content:
        name, stamp = os.fspath(self.path), self._stamp()
        known, content = _read.get(name, (None, _EMPTY))
        if known == stamp and not (locked and name in _unread):
            return content
        try:
            content = parse(self.text(), name) if stamp else _EMPTY
        except (BrokenTable, UnicodeDecodeError) as error:
            why = str(error) if isinstance(error, BrokenTable) else "is not text"
            return self._set_aside(why) if locked else self._look_again(why)
        except FileNotFoundError:  # removed in the meantime
            stamp = None
            content = _EMPTY
        except OSError as error:
            if locked:  # a file that cannot be read must not be replaced
                raise
            warn_once(name, "unreadable", "%s cannot be read (%s); it is ignored", name, error)
            return self._know(stamp, _EMPTY, unread=True)
        return self._know(stamp, content)

    def text(self) -> str:
        """The text of the file itself. Raises `BrokenTable` if it is too large."""
        data = read_regular(self.path, MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise BrokenTable(f"is larger than {MOST_BYTES >> 20} MB")
        return data.decode()

    def _know(self, stamp: _Stamp, content: Content, unread: bool = False) -> Content:
        name = os.fspath(self.path)
        _read[name] = (stamp, content)
        (_unread.add if unread else _unread.discard)(name)
        return content

    def _look_again(self, why: str) -> Content:
        """Moves a broken file, but only under the lock and if it is still broken then."""
        try:
            with self._lock(min(1.0, self._lock_timeout)):
                return self._load(locked=True)
        except OSError as error:
            return self._ignore(why, error)

    def _set_aside(self, why: str) -> Content:
        n = 1
        while (aside := self.path.with_name(f"{self.path.name}.broken-{n}")).exists():
            n += 1
        try:
            os.rename(self.path, aside)
        except OSError as error:
            return self._ignore(why, error)
        warn_once(aside, "broken", "%s %s; it was renamed to %s", self.path, why, aside)
        return self._know(None, _EMPTY)

    def _ignore(self, why: str, error: OSError) -> Content:
        warn_once(
            self.path, "broken", "%s %s; it is ignored, but could not be renamed (%s)", self.path, why, error
        )
        return self._know(self._stamp(), _EMPTY, unread=True)

    def _locked_and(self, action: Any) -> bool:
        """Returns whether `action` was done under the lock; if not, a warning has been logged once."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._lock(self._lock_timeout):
                action()
        except OSError as error:
            message = "%s cannot be written (%s); tuning results are known to this process only"
            warn_once(self.path, "unwritable", message, self.path, error)
            return False
        return True

    @contextlib.contextmanager
    def _lock(self, timeout: float) -> Iterator[None]:
        """Holds the lock; `OSError` (including `TimeoutError`) if it cannot be acquired."""
        lock = lock_of(f"{os.path.realpath(self.path)}.lock")
        try:
            lock.acquire(timeout=timeout, poll_interval=0.005)
        except NotImplementedError as error:  # a file system without locks
            raise OSError(str(error)) from None
        try:
            yield
        finally:
            lock.release()

    def _replace(self, text: str) -> None:
        """Replaces the file atomically, even if the machine stops. The lock is held, so what other writers left is of no use."""
        remove_leftovers(self.path)
        with replacing(self.path) as file:
            file.write(text.encode())
