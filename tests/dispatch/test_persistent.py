"""The user's tables: where they are, what they are keyed by, when they answer, and that a call leaves them alone."""

import dataclasses
import logging
import os
import pathlib
import sys
from typing import Any

import ejkernel_eqx as ejx
from ejkernel_eqx import Backend, DeviceFacts, dispatch, Platform, Problem
from tests.dispatch import toy
from tests.dispatch.toy import chosen, FastConfig, H200, OPERATION, problem

TOY = ejx.kernel_registry.get(OPERATION, "pallas")


SEVEN = FastConfig(7)


def record(config: Any = SEVEN, p: Problem | None = None, **changed: Any) -> dispatch.Record:
    return toy.record(config, p or problem(), **changed)


HERE = dispatch.device_facts()


def table() -> ejx.PersistentCache:
    return dispatch.user_cache(HERE, TOY.core)


def write(*records: dispatch.Record) -> None:
    table().update(records)


def test_where_the_tables_are(monkeypatch, tmp_path):
    path = dispatch.user_cache(HERE, "core").path
    assert path == tmp_path / "cache" / ejx.device_fingerprint() / "core.json"
    assert dispatch.user_cache(HERE, "../x/y").path.parent == path.parent
    monkeypatch.setenv("EJKERNEL_EQX_CACHE_DIR", "~/tables")
    assert dispatch.cache_dir() == pathlib.Path.home() / "tables"
    monkeypatch.delenv("EJKERNEL_EQX_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    if sys.platform == "linux":
        assert dispatch.cache_dir() == tmp_path / "xdg" / "ejkernel_eqx"
    assert not (tmp_path / "xdg").exists()


def test_what_is_stored_is_known_to_this_process_and_to_the_next():
    assert dispatch.lookup(TOY, problem(), HERE) is None
    dispatch.store(TOY, record(), HERE)
    assert (chosen().config, chosen().tier) == (SEVEN, dispatch.Tier.MEMORY)
    dispatch.memory_cache.clear()
    assert dispatch.lookup(TOY, problem(33), HERE) == record()  # the same bucket
    assert dispatch.lookup(TOY, problem(32), HERE) is None
    selection = chosen()
    assert (selection.config, selection.tier) == (SEVEN, dispatch.Tier.PERSISTENT)
    assert (selection.origin, selection.ms) == ("tuned 2026-11-21", (("forward", 0.5),))
    with ejx.policy_override("heuristic"):
        assert chosen().tier is dispatch.Tier.HEURISTIC
    dispatch.store(TOY, record(FastConfig(8)), HERE)
    dispatch.memory_cache.clear()
    assert chosen().config == FastConfig(8)


def test_entries_of_other_software_and_versions_do_not_answer(caplog, monkeypatch):
    older = record(FastConfig(1), problem(32), version=TOY.version - 1)
    write(record(software={**dispatch.software(), "jaxlib": "0.0.1"}), older)
    with caplog.at_level(logging.WARNING, "ejkernel_eqx"):
        assert chosen().tier is chosen(problem(32)).tier is dispatch.Tier.HEURISTIC
    assert not caplog.records and dispatch.lookup(TOY, problem(), HERE) is None
    monkeypatch.setattr(TOY.load(), "VERSION", TOY.version - 1, raising=False)
    dispatch.persistent._fitting.cache_clear()
    assert chosen(problem(32)).config == FastConfig(1)


def test_entries_that_do_not_fit_are_ignored_with_one_warning(caplog):
    unfit = [
        record(p=problem(1), config=None, version=TOY.version + 1),
        dataclasses.replace(record(p=problem(2)), config={"block": 1, "warps": 4}),
        dataclasses.replace(record(p=problem(4)), config={"block": "big"}),
        dataclasses.replace(record(p=problem(8)), config={}),
    ]
    write(*unfit, record())
    with caplog.at_level(logging.WARNING, "ejkernel_eqx"):
        assert chosen().config == FastConfig(7)
        assert all(chosen(problem(t)).tier is dispatch.Tier.HEURISTIC for t in (1, 2, 4, 8))
        write(record(FastConfig(9)))
        assert chosen().config == FastConfig(9)
    (warning,) = caplog.messages
    assert f"4 entries of {OPERATION} on pallas do not fit this package and are ignored" in warning
    assert len(table()) == 5  # ignored, not removed


def test_a_denied_entry_says_why():
    reasons = {1: "dq is wrong by 0.3", 2: "crashed"}
    denied = tuple(dispatch.Denied("", {"block": block}, reason) for block, reason in reasons.items())
    write(record(None, denied=denied, ms={}))
    selection = chosen()
    assert selection.platform is Platform.XLA
    said = "every configuration was denied, tuned 2026-11-21: dq is wrong by 0.3 (and 1 more)"
    assert selection.rejected[-1] == (Platform.PALLAS, said)


def test_records_of_what_is_not_installed_are_no_error():
    absent = dispatch.Implementation(
        OPERATION, Platform.CUDA, Backend.ANY, 50, TOY.core, "no_such_module_of_kernels"
    )
    write(record(platform="cuda"), record())
    assert dispatch.persistent.user_table(absent, HERE) == {}
    assert chosen().config == FastConfig(7)


# The key

BASE = Problem.make(
    "op",
    dims={"B": 2, "T": 1000, "D": 64},
    dtypes={"q": "bfloat16", "bias": "float32"},
    flags={"causal": True, "window": "9,0", "cap": 30.0, "mask": None},
    lengths={"B", "T"},
)


def place(p: Problem = BASE, device: DeviceFacts = H200, **changed: Any) -> tuple[str, str]:
    """Where a record is found: the folder, and the key inside it."""
    made = record(p=p, operation=p.operation, software={"jaxlib": "1", "triton": "2", "jax-triton": "3"})
    return ejx.device_fingerprint(device), dataclasses.replace(made, **changed).key


def _changes() -> dict[str, tuple[str, str]]:
    body = BASE.to_dict()
    remake = lambda **new: Problem.from_dict({**body, **new})
    changes = {"operation": place(remake(operation="other"))}
    others = {"dims": lambda x: 4 * x, "dtypes": lambda x: "float16", "flags": lambda x: "other"}
    for group, other in others.items():
        for name, value in body[group].items():
            changes[f"{group} {name}"] = place(remake(**{group: {**body[group], name: other(value)}}))
            without = {n: v for n, v in body[group].items() if n != name}
            changes[f"{group} without {name}"] = place(remake(**{group: without}))
    changes["lengths"] = place(remake(lengths=["B"]))
    changes |= {"platform": place(platform="xla"), "version": place(version=99)}
    for package in ("jaxlib", "triton", "jax-triton"):
        versions = {"jaxlib": "1", "triton": "2", "jax-triton": "3", package: "9"}
        changes[package] = place(software=versions)
    others = dict(kind="NVIDIA H100", compute_capability="9.1", num_multiprocessors=66, shared_memory=1)
    for field, value in others.items():
        changes[f"device {field}"] = place(device=dataclasses.replace(H200, **{field: value}))
    return changes


def test_whatever_decides_is_in_the_key():
    changes = _changes()
    assert len({place(), *changes.values()}) == len(changes) + 1


# When files are touched


def test_construction_reads_a_table_once_and_writes_nothing(tmp_path, monkeypatch):
    write(record())
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    chosen()
    read = []
    file, original = dispatch.cache_file, dispatch.cache_file.read_regular
    monkeypatch.setattr(file, "read_regular", lambda *args: read.append(args) or original(*args))
    for _ in range(20):
        assert chosen().config == FastConfig(7)
    assert read == []
    write(record(FastConfig(8)))
    os.utime(table().path, ns=(1, 1))  # as if another process had written it
    assert chosen().config == FastConfig(8) and chosen().config == FastConfig(8) and len(read) == 1
    assert {path.name for path in before} == {path.name for path in tmp_path.rglob("*")}
