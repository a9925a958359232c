"""The file of records: many writers, killed writers, broken files, folders that cannot be written."""

import dataclasses
import json
import logging
import os
import pathlib
import signal
import subprocess
import sys
import threading

import filelock
import pytest

import ejkernel_eqx
from ejkernel_eqx import PersistentCache
from ejkernel_eqx.dispatch import cache_file, Denied, Record, Timed

PACKAGE = pathlib.Path(ejkernel_eqx.__file__).parent

# Only what a writer needs is imported: no JAX, no device.
WRITER = f"""
import os, sys, time, types
for name, path in (("ejkernel_eqx", {str(PACKAGE)!r}), ("ejkernel_eqx.dispatch", {str(PACKAGE / "dispatch")!r})):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
from ejkernel_eqx.dispatch.cache_file import PersistentCache
from ejkernel_eqx.dispatch.records import Record
assert "jax" not in sys.modules
path, name, count, padding, pause = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
cache = PersistentCache(path)
print("ready", flush=True)
sys.stdin.readline()

for n in range(count):
    if n == pause:
        os.fsync = lambda _: (print("half", flush=True), time.sleep(60))  # in the middle of a write
    cache.put(Record("op", "xla", 1, f"{{name}} {{n}}", {{}}, {{}}, {{"padding": "x" * padding}}))
    print(n, flush=True)
"""


def record(problem="p", **changed) -> Record:
    fields = dict(
        operation="op",
        platform="xla",
        version=1,
        problem=problem,
        exact={"dims": {"T": 3}},
        software={"jaxlib": "1"},
        config={"block": 3},
        ms={"forward": 0.5},
        spread={"forward": 0.01},
        samples=5,
        errors={"out": 1e-7},
        timed=(
            Timed("", {"block": 3}, 0.5, 0.01),
            Timed("forward", {"block": 4}, 0.6, 0.02),
        ),
        denied=(Denied("", {"block": 5}, "wrong"),),
        date="2026-11-21T00:00:00+00:00",
    )
    return Record(**{**fields, **changed})  # type: ignore[arg-type]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "device" / "core.json"


@pytest.fixture
def warnings_of(caplog):
    """The warnings so far."""
    caplog.set_level(logging.WARNING, "ejkernel_eqx")
    return lambda: [entry.getMessage() for entry in caplog.records]


def start(path, name, count, padding=0, pause=-1):
    """A process that puts `count` records one by one once it is told to `go`; it stops in the middle of writing number `pause`."""
    arguments = [sys.executable, "-c", WRITER, str(path), name, str(count), str(padding), str(pause)]
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def go(process):
    assert process.stdout.readline() == "ready\n"
    process.stdin.write("\n")
    process.stdin.flush()


def reread(path) -> PersistentCache:
    """As another process would: nothing of what this one has read."""
    cache_file._read.clear()
    return PersistentCache(path)


def test_what_is_put_is_read_back(path):
    cache = PersistentCache(path, {"device": {"kind": "toy"}})
    assert not len(cache) and cache.get(record().key) is None and not path.parent.exists()
    cache.put(record())
    cache.update([record("q"), record(config=None, ms={}, errors={}, timed=())])
    for known in (cache, reread(path)):
        assert known.get(record().key) == record(config=None, ms={}, errors={}, timed=())
        assert known.get(record("q").key) == record("q") and record("q").key in known
        assert len(known) == 2 and {r.problem for r in known.records()} == {"p", "q"}
        assert known.header() == {"device": {"kind": "toy"}}
    assert not list(path.parent.glob(".core.json*"))
    # What another process writes is seen; a state of the file is parsed once.
    assert cache.content() is PersistentCache(path).content()
    text = path.read_text()
    cache.remove([record().key, "unknown"])
    assert [r.problem for r in reread(path).records()] == ["q"]
    cache.clear()
    assert not len(cache) and record("q").key not in cache and not path.exists()
    path.write_text(text)
    assert len(cache) == 2


@pytest.mark.slow
def test_eight_processes_at_once_lose_nothing(path):
    processes = [start(path, f"writer {n}", 20) for n in range(8)]
    for process in processes:
        go(process)
    for process in processes:
        process.communicate(timeout=60)
        assert process.returncode == 0
    expected = {f"writer {writer} {n}" for writer in range(8) for n in range(20)}
    assert {r.problem for r in PersistentCache(path).records()} == expected
    assert not list(path.parent.glob("*.broken*"))


def test_threads_lose_nothing_either(path):
    threads = [
        threading.Thread(target=lambda n=n: [PersistentCache(path).put(record(f"{n} {m}")) for m in range(5)])
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reread(path)) == 20


@pytest.mark.parametrize("whole", [0, 1, 3])
def test_a_writer_that_is_killed_in_the_middle_leaves_the_old_file(path, whole, warnings_of):
    process = start(path, "killed", 10, pause=whole)
    go(process)
    assert process.stdout is not None
    said = [process.stdout.readline().strip() for _ in range(whole + 1)]
    assert said == [*map(str, range(whole)), "half"]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert path.exists() == (whole > 0)
    assert {r.problem for r in PersistentCache(path).records()} == {f"killed {n}" for n in range(whole)}
    # What it left lying about, its lock among it, is in nobody's way.
    PersistentCache(path, lock_timeout=5.0).put(record())
    assert len(reread(path)) == whole + 1 and not warnings_of()
    assert {entry.name for entry in path.parent.iterdir()} <= {"core.json", "core.json.lock"}


def refused(*_, **__):
    raise PermissionError(13, "Permission denied")


@pytest.fixture(params=["full", "read-only", "locked", "no folder"])
def unwritable(request, path, monkeypatch):
    """A table with one record that then cannot be written, and one whose folder cannot be made."""
    PersistentCache(path).put(record())
    original, why = os.open, request.param

    def read_only(name, flags, *args, **kwargs):
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and str(path.parent) in str(name)
        return refused() if writes else original(name, flags, *args, **kwargs)

    with monkeypatch.context() as patch, filelock.FileLock(f"{path}.lock") as lock:
        if why != "locked":
            lock.release()
        if why == "full":
            patch.setattr(os, "fsync", refused)
        if why == "read-only":
            patch.setattr(os, "open", read_only)
        yield path / "device" / "core.json" if why == "no folder" else path


def test_what_cannot_be_written_is_known_to_this_process(unwritable, warnings_of):
    """One warning says so, and what the file holds stays."""
    before = unwritable.read_bytes() if unwritable.is_file() else None
    cache = PersistentCache(unwritable, lock_timeout=0.05)
    old = {r.problem for r in cache.records()}
    assert old == ({"p"} if before else set()) and not warnings_of()
    cache.update([record("q"), record("r")])
    cache.put(record("s"))
    (message,) = warnings_of()
    assert "core.json cannot be written" in message and "; tuning results" in message
    assert {r.problem for r in PersistentCache(unwritable).records()} == old | set("qrs")
    assert before == (unwritable.read_bytes() if before else None)
    assert {r.problem for r in reread(unwritable).records()} == old


SCHEMA = cache_file.SCHEMA
TABLE = {"format": cache_file.FORMAT, "schema": SCHEMA, "entries": []}
BROKEN = {
    "empty": ("", "is empty"),
    "cut": (json.dumps(TABLE)[:-5], "is not valid JSON"),
    "deep": ("[" * 100_000, "is not valid JSON"),
    "too large": (" " * (cache_file.MOST_BYTES + 1), "is larger than 8 MB"),
    "no text": (b"\xff\xfe\x00", "is not text"),
    "foreign list": ("[1, 2]", "is not a table of ejkernel_eqx"),
    "foreign object": ('{"schema": 2, "entries": []}', "is not a table of ejkernel_eqx"),
    "no entries": (json.dumps(TABLE | {"entries": 3}), "is not a table of ejkernel_eqx"),
    "newer": (json.dumps(TABLE | {"schema": SCHEMA + 1}), f"has schema {SCHEMA + 1}, this version reads"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_set_aside_and_named(path, name, warnings_of):
    content, why = BROKEN[name]
    content = content if isinstance(content, bytes) else content.encode()
    path.parent.mkdir()
    path.write_bytes(content)
    cache = PersistentCache(path)
    assert cache.records() == () and not path.exists()
    aside = path.with_name("core.json.broken-1")
    assert aside.read_bytes() == content
    (message,) = warnings_of()
    assert message.startswith(f"{path} {why}") and message.endswith(f"; it was renamed to {aside}")
    # The next one gets a name of its own, and is met while writing.
    path.write_bytes(content)
    cache.put(record())
    assert path.with_name("core.json.broken-2").read_bytes() == content and len(warnings_of()) == 2
    assert reread(path).records() == (record(),) and aside.read_bytes() == content


def test_entries_that_are_no_records_are_left_out(path, warnings_of):
    good = record().to_dict()
    wrong = [
        {"problem": 3},
        {"speed": 3},
        {"version": True},
        {"ms": {"forward": "fast"}},
        {"ms": {"forward": 0}},
        {"ms": {"forward": float("nan")}},
        {"timed": [{"part": ""}]},
        {"software": {"jaxlib": ["1"]}},
        {"exact": {"dims": {"T": "3"}}},
        {"exact": {"dims": [3]}},
    ]
    bad = [3, *(good | change for change in wrong), {k: v for k, v in good.items() if k != "config"}]
    path.parent.mkdir()
    path.write_text(json.dumps(TABLE | {"entries": [*bad, good]}))
    PersistentCache(path).put(record("q"))
    (message,) = warnings_of()
    assert (
        "12 of 13 entries are not records and are ignored; the first: Record: expected an object" in message
    )
    assert path.exists() and {r.problem for r in reread(path).records()} == {"p", "q"}


def test_values_that_are_nested_deeply_do_not_stop_writers(path):
    """Python reads JSON that it cannot write again."""
    deep = '{"a":' * 900 + "1" + "}" * 900
    places = {"config": "DEEP", "exact": "DEEP", "timed": [{"part": "", "config": "DEEP", "ms": 1}]}
    entries = [record("deep").to_dict() | {place: value} for place, value in places.items()]
    table = TABLE | {"device": 1, "more": "DEEP", "entries": [record("old").to_dict(), *entries]}
    path.parent.mkdir()
    path.write_text(json.dumps(table).replace('"DEEP"', deep))
    PersistentCache(path).put(record("new"))
    assert {r.problem for r in reread(path).records()} == {"old", "new"}
    assert PersistentCache(path).header() == {"device": 1}


def test_a_table_stays_below_its_bound(path, warnings_of):
    """The newest records are kept."""
    padding = "x" * (cache_file.MOST_BYTES // 8)
    cache = PersistentCache(path)
    for n in range(9):
        cache.put(record(f"{n}", config={"padding": padding}, date=f"2026-11-{n + 10}"))
    assert path.stat().st_size < cache_file.MOST_BYTES
    assert "would be larger than 8 MB" in warnings_of()[0]
    held = {r.problem for r in reread(path).records()}
    assert "8" in held and "0" not in held and len(warnings_of()) == 1


@pytest.mark.skipif(os.name != "posix", reason="POSIX links and pipes")
def test_planted_links_are_not_followed(path, tmp_path, warnings_of):
    """Neither under names that temporary files once had, nor under that of the lock."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    path.parent.mkdir()
    path.with_name("core.json.tmp").symlink_to(victim)
    PersistentCache(path).put(record())
    assert victim.read_text() == "mine" and len(reread(path)) == 1
    path.with_name("core.json.lock").unlink()
    path.with_name("core.json.lock").symlink_to(victim)
    PersistentCache(path).put(record("q"))
    assert victim.read_text() == "mine" and len(reread(path)) == 1
    assert "core.json cannot be written" in warnings_of()[0]


@pytest.mark.skipif(os.name != "posix", reason="POSIX links and pipes")
@pytest.mark.parametrize("pipe", ["core.json", "core.json.lock", "core.json.tmp"])
def test_pipes_are_not_waited_for(path, pipe, warnings_of):
    path.parent.mkdir()
    os.mkfifo(path.with_name(pipe))
    cache = PersistentCache(path)
    assert cache.records() == ()
    cache.put(record())
    assert cache.records() == (record(),)
    assert path.with_name(pipe).is_fifo()
    assert any("Not a regular file" in message for message in warnings_of()) is (pipe != "core.json.tmp")


@pytest.mark.skipif(os.name != "posix", reason="POSIX links and pipes")
def test_only_leftovers_are_removed(path):
    path.parent.mkdir()
    leftover = ".core.json.0123456789ab"
    names = [f"{leftover}.tmp", ".core.json.mine.tmp", ".other.json.0123456789ab.tmp", leftover]
    for name in names:
        path.with_name(name).write_text("")
    PersistentCache(path).put(record())
    assert {entry.name for entry in path.parent.iterdir()} == {*names[1:], "core.json", "core.json.lock"}


def test_a_broken_file_that_cannot_be_moved_is_ignored(path, monkeypatch, warnings_of):
    path.parent.mkdir()
    path.write_text("{")

    monkeypatch.setattr(os, "rename", refused)
    for _ in range(3):
        assert PersistentCache(path).records() == ()
    (message,) = warnings_of()
    assert f"{path} is not valid JSON" in message and "it is ignored" in message and path.read_text() == "{"


def test_a_file_that_is_replaced_while_it_is_judged_is_not_moved(path, monkeypatch, warnings_of):
    """Between the look at a broken file and the lock, another process may have written a good one."""
    PersistentCache(path).put(record())
    good = path.read_text()
    path.write_text("")
    look_again = PersistentCache._look_again

    def replaced(self, why):
        path.write_text(good)
        return look_again(self, why)

    monkeypatch.setattr(PersistentCache, "_look_again", replaced)
    assert PersistentCache(path).records() == (record(),) and not warnings_of()
    assert [p for p in path.parent.iterdir() if "broken" in p.name] == []


def test_what_was_found_is_not_in_the_key_of_a_record():
    asked = {"operation", "platform", "version", "problem", "software"}
    found = {field.name for field in dataclasses.fields(Record)} - asked
    other = record(
        exact={}, config=None, ms={}, spread={}, samples=0, errors={}, timed=(), denied=(), date=""
    )
    assert all(getattr(other, name) != getattr(record(), name) for name in found)
    assert other.key == record().key and set(json.loads(record().key)) == asked


def test_what_could_not_be_read_is_not_replaced(path, monkeypatch, warnings_of):
    """Too many open files, for example, when a module is built: what the file holds is still there when something is written."""
    PersistentCache(path).put(record("old"))
    cache = reread(path)

    with monkeypatch.context() as patch:
        patch.setattr(cache_file, "read_regular", refused)
        assert not cache.records()
        cache.put(record("while it lasts"))
        assert "cannot be written" in warnings_of()[-1] and cache.get(record("while it lasts").key)
    cache.put(record("new"))
    assert {"old", "new"} <= {r.problem for r in reread(path).records()}


def test_a_broken_file_that_was_ignored_is_set_aside_before_it_is_written(path, warnings_of):
    path.parent.mkdir(parents=True, exist_ok=True)
    newer = json.dumps({"format": cache_file.FORMAT, "schema": SCHEMA + 1, "entries": []})
    path.write_text(newer)
    cache = PersistentCache(path, lock_timeout=0.05)
    with filelock.FileLock(f"{path}.lock"):
        assert not cache.records() and "but could not be renamed" in warnings_of()[-1]
    cache.put(record())
    assert path.with_name(f"{path.name}.broken-1").read_text() == newer
    assert len(reread(path)) == 1


def test_a_link_stays_a_link(path, tmp_path):
    PersistentCache(path).put(record("a"))
    link = tmp_path / "link.json"
    link.symlink_to(path)
    PersistentCache(link).put(record("b"))
    assert link.is_symlink() and len(reread(path)) == 2
