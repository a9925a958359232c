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

from .._files import replacing
from .records import Record

_LOG = logging.getLogger("ejkernel_eqx")
SCHEMA = 2
FORMAT = "ejkernel_eqx tuning records"

_Stamp = tuple[int, int, int] | None  # None: there is no file


class BrokenTable(Exception):
    """The file is not one of ours, or not whole; the message says what it is."""


@dataclasses.dataclass(frozen=True, eq=False)
class Content:
    """What a file held when it was read. The object is the same until the file changes."""

    header: Mapping[str, Any]
    records: tuple[Record, ...]
    index: Mapping[str, Record]


def make_content(header: Mapping[str, Any], records: Iterable[Record]) -> Content:
    """Later records replace earlier ones of the same key."""
    index = {record.key: record for record in records}
    return Content(types.MappingProxyType(dict(header)), tuple(index.values()), types.MappingProxyType(index))


_EMPTY = make_content({}, ())
_read: dict[str, tuple[_Stamp, Content]] = {}
_unread: set[str] = set()  # files that are there, but of which `_read` does not hold the content
_warned: set[tuple[str, str]] = set()


def warn_once(path: "str | os.PathLike[str]", kind: str, message: str, *args: Any) -> None:
    """One warning of a kind for each file, in a process."""
    if (os.fspath(path), kind) not in _warned:
        _warned.add((os.fspath(path), kind))
        _LOG.warning(message, *args)


def parse(text: str, name: str) -> Content:
    """The content of a file. `ValueError` if it is not whole, not ours or of another schema; an entry that is not a record is
    left out with one warning for the file."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BrokenTable("is empty" if not text.strip() else f"is not whole ({error})") from None
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
    return make_content({k: v for k, v in data.items() if k not in ("format", "schema", "entries")}, records)


def render(header: Mapping[str, Any], records: Iterable[Record]) -> str:
    """The text of a file: sorted, one record to a line."""
    head = {"format": FORMAT, "schema": SCHEMA, **header}
    lines = [json.dumps(record.to_dict()) for record in sorted(records, key=lambda record: record.key)]
    entries = "".join(("\n" if n == 0 else ",\n") + line for n, line in enumerate(lines))
    return f'{json.dumps(head)[:-1]}, "entries": [{entries}\n]}}\n'


class PersistentCache:
    """Records in one JSON file. Every process that uses the file may write at any time; none loses what another wrote.

    Writing takes the lock file beside it, merges into what the file holds by then and replaces the file at once, so that a reader, or a
    process that is killed, sees the old file or the new one, whole. A file that is empty, cut, foreign or of another schema is
    moved to `<name>.broken-<n>` and named in a warning. Where nothing can be written one warning says so, and what is put is
    known to this process alone.

    **Arguments:**

    - `path`: the file. It need not exist, nor its folder.
    - `header`: what the file shall say besides its records, JSON: the facts of the device.
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
        """What the file holds now. Parsed once for each state of the file."""
        return self._load(locked=False)

    def header(self) -> Mapping[str, Any]:
        """What the file says besides its records; of a file that is not there, what it would say."""
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
        """Adds records; each replaces the one of its key."""
        added = tuple(records)
        self._change(lambda known: (*known, *added))

    def remove(self, keys: Iterable[str]) -> None:
        """Removes the records of these keys; one that is not there is no mistake."""
        gone = frozenset(keys)
        self._change(lambda known: tuple(record for record in known if record.key not in gone))

    def _change(self, change: Callable[[tuple[Record, ...]], tuple[Record, ...]]) -> None:
        """Changes the file, or where it cannot be written what this process knows of it."""

        def write() -> None:
            before = self._load(locked=True)
            after = make_content({**before.header, **self._header}, change(before.records))
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
            content = parse(self.path.read_text(encoding="utf-8"), name) if stamp else _EMPTY
        except (BrokenTable, UnicodeDecodeError) as error:
            why = str(error) if isinstance(error, BrokenTable) else "is not text"
            return self._set_aside(why) if locked else self._look_again(why)
        except FileNotFoundError:  # removed between the two looks
            stamp = None
            content = _EMPTY
        except OSError as error:
            if locked:  # what cannot be read must not be replaced
                raise
            warn_once(name, "unreadable", "%s cannot be read (%s); it is ignored", name, error)
            return self._know(stamp, _EMPTY, unread=True)
        return self._know(stamp, content)

    def _know(self, stamp: _Stamp, content: Content, unread: bool = False) -> Content:
        name = os.fspath(self.path)
        _read[name] = (stamp, content)
        (_unread.add if unread else _unread.discard)(name)
        return content

    def _look_again(self, why: str) -> Content:
        """A broken file is moved only while it is locked, and only if it is still broken then."""
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
        warn_once(aside, "broken", "%s %s; it is set aside as %s", self.path, why, aside)
        return self._know(None, _EMPTY)

    def _ignore(self, why: str, error: OSError) -> Content:
        warn_once(
            self.path,
            "broken",
            "%s %s; it is ignored, and stays as it cannot be moved (%s)",
            self.path,
            why,
            error,
        )
        return self._know(self._stamp(), _EMPTY, unread=True)

    def _locked_and(self, action: Any) -> bool:
        """Whether `action` was done under the lock; if not, one warning has said why."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._lock(self._lock_timeout):
                action()
        except OSError as error:
            message = "%s cannot be written (%s); what is tuned is known to this process only"
            warn_once(self.path, "unwritable", message, self.path, error)
            return False
        return True

    @contextlib.contextmanager
    def _lock(self, timeout: float) -> Iterator[None]:
        """`OSError` if it cannot be had: `TimeoutError` among them."""
        import filelock

        lock = filelock.FileLock(f"{os.path.realpath(self.path)}.lock", timeout=timeout)
        try:
            lock.acquire(poll_interval=0.005)
        except NotImplementedError as error:  # a file system without locks
            raise OSError(str(error)) from None
        try:
            yield
        finally:
            lock.release()

    def _replace(self, text: str) -> None:
        """Whole or not at all, also when the machine stops: the lock is held, so one name serves all that write."""
        with replacing(self.path, ".tmp") as file:
            file.write(text.encode())
