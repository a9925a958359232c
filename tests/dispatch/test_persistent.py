"""The user's tables: where they are, what they are keyed by, when they answer, and that a call leaves them alone."""

import builtins
import dataclasses
import json
import logging
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

import jax.numpy as jnp
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx import Backend, DeviceFacts, dispatch, Platform, Problem
from tests.dispatch.toy import FastConfig, OPERATION, problem

TOY = ejx.kernel_registry.get(OPERATION, "pallas")


SEVEN = FastConfig(7)


def record(config: Any = SEVEN, p: Problem | None = None, **changed: Any) -> dispatch.Record:
    p = p or problem()
    fields: dict[str, Any] = dict(
        operation=OPERATION,
        platform="pallas",
        version=TOY.version,
        problem=p.key(),
        exact=p.to_dict(),
        software=dispatch.software(),
        config=None if config is None else dispatch.to_dict(config),
        ms={"forward": 0.5},
        date="2026-11-21T10:00:00+00:00",
    )
    return dispatch.Record(**{**fields, **changed})


def chosen(p: Problem | None = None):
    return dispatch.select(dispatch.take_snapshot(OPERATION), p or problem())


def write(*records: dispatch.Record) -> None:
    dispatch.user_cache(dispatch.device_facts(), TOY.core).update(records)


def test_where_the_tables_are(monkeypatch, tmp_path):
    path = dispatch.user_cache(dispatch.device_facts(), "core").path
    assert path == tmp_path / "cache" / ejx.device_fingerprint() / "core.json"
    assert dispatch.user_cache(dispatch.device_facts(), "../x/y").path.parent == path.parent
    monkeypatch.setenv("EJKERNEL_EQX_CACHE_DIR", "~/tables")
    assert dispatch.cache_dir() == pathlib.Path.home() / "tables"
    monkeypatch.delenv("EJKERNEL_EQX_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    if sys.platform == "linux":
        assert dispatch.cache_dir() == tmp_path / "xdg" / "ejkernel_eqx"
    assert not (tmp_path / "xdg").exists()


def test_every_table_of_a_device():
    other = DeviceFacts(Backend.GPU, "Toy GPU")
    for device, core in ((dispatch.device_facts(), "a"), (dispatch.device_facts(), "b"), (other, "a")):
        dispatch.user_cache(device, core).put(record())
    assert [cache.path.stem for cache in dispatch.user_caches(dispatch.device_facts())] == ["a", "b"]
    assert len(dispatch.user_caches()) == 3
    header = dispatch.user_caches(other)[0].header()
    assert DeviceFacts.from_dict(header["device"]) == other


def test_what_is_stored_is_known_to_this_process_and_to_the_next():
    assert dispatch.lookup(TOY, problem(), dispatch.device_facts()) is None
    dispatch.store(TOY, record(), dispatch.device_facts())
    selection = chosen()
    assert (selection.config, selection.tier, selection.origin) == (
        FastConfig(7),
        dispatch.Tier.MEMORY,
        "tuned 2026-11-21",
    )
    dispatch.memory_cache.clear()
    assert dispatch.lookup(TOY, problem(33), dispatch.device_facts()) == record()  # the same bucket
    assert dispatch.lookup(TOY, problem(32), dispatch.device_facts()) is None
    selection = chosen()
    assert (selection.config, selection.tier, selection.origin, selection.ms) == (
        FastConfig(7),
        dispatch.Tier.PERSISTENT,
        "tuned 2026-11-21",
        (("forward", 0.5),),
    )
    with ejx.policy_override("heuristic"):
        assert chosen().tier is dispatch.Tier.HEURISTIC
    dispatch.store(TOY, record(FastConfig(8)), dispatch.device_facts())
    dispatch.memory_cache.clear()
    assert chosen().config == FastConfig(8)


def test_entries_of_other_software_and_versions_do_not_answer(caplog, monkeypatch):
    write(
        record(software={**dispatch.software(), "jaxlib": "0.0.1"}),
        record(FastConfig(1), problem(32), version=TOY.version - 1),
    )
    with caplog.at_level(logging.WARNING, "ejkernel_eqx"):
        assert chosen().tier is chosen(problem(32)).tier is dispatch.Tier.HEURISTIC
    assert not caplog.records and dispatch.lookup(TOY, problem(), dispatch.device_facts()) is None
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
    (warning,) = caplog.records
    assert (
        f"4 entries of {OPERATION} on pallas do not fit this package and are ignored" in warning.getMessage()
    )
    assert len(dispatch.user_cache(dispatch.device_facts(), TOY.core)) == 5  # ignored, not removed


def test_a_denied_entry_says_why():
    denied = (
        dispatch.Denied("", {"block": 1}, "dq is wrong by 0.3"),
        dispatch.Denied("", {"block": 2}, "crashed"),
    )
    write(record(None, denied=denied, ms={}))
    selection = chosen()
    assert selection.platform is Platform.XLA
    assert selection.rejected[-1] == (
        Platform.PALLAS,
        "every configuration was denied, tuned 2026-11-21: dq is wrong by 0.3 (and 1 more)",
    )
    with pytest.raises(ejx.UnsupportedError, match=r"dq is wrong by 0\.3"):
        dispatch.select(dispatch.take_snapshot(OPERATION, platform="pallas"), problem())


def test_records_of_what_is_not_installed_are_no_error():
    absent = dispatch.Implementation(
        OPERATION, Platform.CUDA, Backend.ANY, 50, TOY.core, "no_such_module_of_kernels"
    )
    write(record(platform="cuda"), record())
    assert dispatch.persistent.user_entries(absent, dispatch.device_facts()) == ()
    assert chosen().config == FastConfig(7)


# The key

DEVICE = DeviceFacts(Backend.GPU, "NVIDIA H200", "nvidia", "9.0", 132, 232_448)
BASE = Problem.make(
    "op",
    dims={"B": 2, "T": 1000, "D": 64},
    dtypes={"q": "bfloat16", "bias": "float32"},
    flags={"causal": True, "window": "9,0", "cap": 30.0, "mask": None},
    lengths={"B", "T"},
)


def place(p: Problem = BASE, device: DeviceFacts = DEVICE, **changed: Any) -> tuple[str, str]:
    """Where a record is found: the folder, and the key inside it."""
    made = record(p=p, operation=p.operation, software={"jaxlib": "1", "triton": "2", "jax-triton": "3"})
    return ejx.device_fingerprint(device), dataclasses.replace(made, **changed).key


def _changes() -> dict[str, tuple[str, str]]:
    body = BASE.to_dict()
    remake = lambda **new: Problem.from_dict({**body, **new})
    changes = {"operation": place(remake(operation="other"))}
    for group, other in (
        ("dims", lambda x: 4 * x),
        ("dtypes", lambda x: "float16"),
        ("flags", lambda x: "other"),
    ):
        for name, value in body[group].items():
            changes[f"{group} {name}"] = place(remake(**{group: {**body[group], name: other(value)}}))
            without = {n: v for n, v in body[group].items() if n != name}
            changes[f"{group} without {name}"] = place(remake(**{group: without}))
    changes["lengths"] = place(remake(lengths=["B"]))
    changes |= {"platform": place(platform="xla"), "version": place(version=99)}
    for package in ("jaxlib", "triton", "jax-triton"):
        versions = {"jaxlib": "1", "triton": "2", "jax-triton": "3", package: "9"}
        changes[package] = place(software=versions)
    for field, value in (
        ("kind", "NVIDIA H100"),
        ("compute_capability", "9.1"),
        ("num_multiprocessors", 66),
        ("shared_memory", 1),
    ):
        changes[f"device {field}"] = place(device=dataclasses.replace(DEVICE, **{field: value}))
    return changes


CHANGES = _changes()


def test_no_two_changes_share_a_key():
    assert len({place(), *CHANGES.values()}) == len(CHANGES) + 1


@pytest.mark.slow
def test_the_key_is_the_same_bytes_in_another_process():
    program = (
        "import json, sys\n"
        "from ejkernel_eqx.dispatch import *\n"
        "device, p, software = json.loads(sys.argv[1])\n"
        "device, p = DeviceFacts.from_dict(device), Problem.from_dict(p)\n"
        "key = Record(p.operation, 'pallas', 1, p.key(), p.to_dict(), software, None).key\n"
        "print(device_fingerprint(device)); print(key)\n"
    )
    versions = {"triton": "2", "jaxlib": "1", "jax-triton": "3"}
    given = json.dumps([DEVICE.to_dict(), BASE.to_dict(), versions])
    source = str(pathlib.Path(ejx.__file__).parents[1])
    expected = "\n".join(place(version=1)) + "\n"
    for seed in ("1", "12345"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": source, "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(
            [sys.executable, "-c", program, given],
            capture_output=True,
            text=True,
            env=environment,
            check=True,
        )
        assert done.stdout == expected


# When files are touched


def test_a_call_touches_no_file_and_looks_at_no_clock(monkeypatch):
    write(record())
    module: Any = ejx.FlashAttention(causal=True)
    x = jnp.ones((1, 8, 2, 16))
    plan = dispatch.take_snapshot(OPERATION)
    dispatch.set_autotuner(lambda *_: pytest.fail("a call must not tune"))
    module(x, x, x)  # what JAX and the kernels do once, they have done
    ours = os.path.dirname(ejx.__file__)

    def forbid(owner, name):
        original = getattr(owner, name)

        def watched(*args, **kwargs):
            caller = sys._getframe(1).f_code.co_filename
            assert not caller.startswith(ours), f"{caller} calls {name}"
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    for owner, names in (
        (builtins, ("open",)),
        (os, ("stat", "open", "replace", "rename", "mkdir")),
        (pathlib.Path, ("read_text", "open", "mkdir", "is_file", "glob")),
        (time, ("perf_counter", "monotonic", "time", "perf_counter_ns")),
    ):
        for name in names:
            forbid(owner, name)
    module(x, x, x)
    module(x[:, :4], x, x)  # another trace
    for t in (1, 60, 500):
        dispatch.select(plan, problem(t))
    with pytest.raises(AssertionError, match="calls stat"):
        dispatch.take_snapshot(OPERATION)


def test_construction_reads_a_table_once_and_writes_nothing(tmp_path, monkeypatch):
    write(record())
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    chosen()
    read = []
    original = dispatch.cache_file.read_regular
    monkeypatch.setattr(
        dispatch.cache_file, "read_regular", lambda *args: read.append(args) or original(*args)
    )
    for _ in range(20):
        assert chosen().config == FastConfig(7)
    assert read == []
    write(record(FastConfig(8)))
    os.utime(
        dispatch.user_cache(dispatch.device_facts(), TOY.core).path, ns=(1, 1)
    )  # as if another process had written it
    assert chosen().config == FastConfig(8) and chosen().config == FastConfig(8) and len(read) == 1
    assert {path.name for path in before} == {path.name for path in tmp_path.rglob("*")}
