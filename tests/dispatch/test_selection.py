"""The seven tiers, each alone and in their order; the policies; the shipped tables."""

import contextvars
import importlib.resources
import json
import logging
import threading

import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx import UnsupportedError
from ejkernel_eqx._kernel import make_plan
from ejkernel_eqx.dispatch import (
    caches,
    device_facts,
    kernel_registry,
    memory_cache,
    overlay_cache,
    Platform,
    policy_override,
    select,
    set_autotuner,
    take_snapshot,
    Tier,
    to_dict,
)
from ejkernel_eqx.dispatch.overlay import current_policy, Policy, POLICY_VARIABLE
from tests.dispatch.toy import FastConfig, OPERATION, problem, SlowConfig


def chosen(p=None, *, tuning=False, **override):
    selection = select(take_snapshot(OPERATION, **override), problem() if p is None else p, tuning=tuning)
    return selection.config, selection.tier


@pytest.fixture
def shipped(monkeypatch):
    """A table as it stands after a module is built: shown to `PERSISTENT_SOURCES`."""
    table = {}
    source = lambda implementation, device: table if implementation.platform is Platform.PALLAS else {}
    monkeypatch.setattr(caches, "PERSISTENT_SOURCES", [source])
    return table


def test_the_tiers_and_their_order(shipped):
    asked = []

    def tuner(p, implementation, device):
        asked.append((p, implementation.platform, device))
        return FastConfig(5)

    assert chosen() == (FastConfig(0), Tier.HEURISTIC)
    set_autotuner(tuner)
    with policy_override("tune"):
        assert chosen(tuning=False) == (FastConfig(0), Tier.HEURISTIC) and not asked
        assert chosen(tuning=True) == (FastConfig(5), Tier.AUTOTUNE)
        assert asked == [(problem(), Platform.PALLAS, device_facts())]
        shipped[problem().key()] = FastConfig(4)
        assert chosen(tuning=True) == (FastConfig(4), Tier.PERSISTENT)
        memory_cache.put(Platform.PALLAS, problem().key(), FastConfig(3))
        assert chosen(tuning=True) == (FastConfig(3), Tier.MEMORY)
        with overlay_cache({OPERATION: FastConfig(2)}):
            assert chosen(tuning=True) == (FastConfig(2), Tier.OVERLAY)
            assert chosen(tuning=True, config=FastConfig(1)) == (FastConfig(1), Tier.OVERRIDE)
    assert len(asked) == 1
    assert [tier for tier, _ in ejx.dispatch.selection.TIERS] == list(Tier)[:-1]


def test_the_last_tier_names_every_platform():
    with pytest.raises(UnsupportedError) as caught:
        chosen(problem(5000))
    device = device_facts()
    assert caught.value.reasons == {
        "triton": f"needs a TPU, the device is {device.kind} ({device.backend.value})",
        "pallas": "takes T up to 100",
        "xla": "takes T up to 1000",
    }
    for platform, reason in caught.value.reasons.items():
        assert f"{platform}: {reason}" in str(caught.value)


def test_the_next_platform_is_asked_when_one_does_not_support_the_problem():
    selection = select(take_snapshot(OPERATION), problem(500))
    assert (selection.platform, selection.config, selection.tier) == (
        Platform.XLA,
        SlowConfig(0),
        Tier.HEURISTIC,
    )
    assert [platform for platform, _ in selection.rejected] == [Platform.TRITON, Platform.PALLAS]
    # An entry of a platform that does not support the problem is no reason to use it.
    memory_cache.put(Platform.PALLAS, problem(500).key(), FastConfig(9))
    assert chosen(problem(500)) == (SlowConfig(0), Tier.HEURISTIC)


def test_an_entry_serves_its_bucket_only():
    memory_cache.put(Platform.PALLAS, problem(64).key(), FastConfig(9))
    assert chosen(problem(33)) == chosen(problem(64)) == (FastConfig(9), Tier.MEMORY)
    assert (
        chosen(problem(65))
        == chosen(problem(32))
        == chosen(problem(64, flag=True))
        == (FastConfig(0), Tier.HEURISTIC)
    )


def test_platform_and_config_pin_the_platform():
    assert chosen(platform="xla") == (SlowConfig(0), Tier.HEURISTIC)
    assert chosen(config=SlowConfig(7)) == (SlowConfig(7), Tier.OVERRIDE)
    with pytest.raises(UnsupportedError, match="'pallas': takes T up to 100"):
        chosen(problem(500), platform="pallas")
    with pytest.raises(UnsupportedError, match="'pallas': takes T up to 100"):
        chosen(problem(500), config=FastConfig(1))
    with pytest.raises(UnsupportedError, match="'triton': needs a TPU"):
        take_snapshot(OPERATION, platform="triton")
    with pytest.raises(
        ValueError,
        match=r"config: expected an instance of FastConfig for platform 'pallas' of tests.toy, received SlowConfig",
    ):
        take_snapshot(OPERATION, platform="pallas", config=SlowConfig(1))
    with pytest.raises(
        ValueError,
        match=r"config: expected an instance of FastConfig or SlowConfig for tests.toy on .*, received 3",
    ):
        take_snapshot(OPERATION, config=3)


def test_overlays_nest_and_a_problem_beats_its_operation():
    with overlay_cache({OPERATION: FastConfig(1), problem(64).key(): FastConfig(2)}):
        assert chosen(problem(64)) == (FastConfig(2), Tier.OVERLAY)
        assert chosen(problem(8)) == (FastConfig(1), Tier.OVERLAY)
        with overlay_cache({OPERATION: FastConfig(3)}):
            assert chosen(problem(8))[0] == FastConfig(3)
            assert chosen(problem(64))[0] == FastConfig(2)
        with overlay_cache({problem(8).key(): FastConfig(4)}):
            assert chosen(problem(8))[0] == FastConfig(4)
            assert chosen(problem(16))[0] == FastConfig(1)
        # A configuration of another platform's class, or of another operation, says nothing here.
        assert chosen(problem(500)) == (SlowConfig(0), Tier.HEURISTIC)
        assert chosen(problem(8))[0] == FastConfig(1)
    with overlay_cache({"flash_attention": FastConfig(1)}):
        assert chosen() == (FastConfig(0), Tier.HEURISTIC)


def test_leaving_an_overlay_changes_nothing_that_was_built():
    with overlay_cache({OPERATION: FastConfig(1)}):
        inside = make_plan(OPERATION)
    outside = make_plan(OPERATION)
    assert inside.select(problem()).config == FastConfig(1)
    assert outside.select(problem()).config == FastConfig(0) and inside != outside
    with overlay_cache({OPERATION: FastConfig(2)}):
        assert inside.select(problem()).config == FastConfig(1)
        assert outside.select(problem()).config == FastConfig(0)


def test_an_overlay_is_left_when_its_body_raises():
    with pytest.raises(KeyError), overlay_cache({OPERATION: FastConfig(1)}):
        raise KeyError
    assert chosen() == (FastConfig(0), Tier.HEURISTIC)


def test_overlays_and_policies_belong_to_their_context():
    found = {}

    def build(name):
        found[name] = chosen()[0], current_policy()

    with overlay_cache({OPERATION: FastConfig(1)}), policy_override("heuristic"):
        context = contextvars.copy_context()
        threads = [
            threading.Thread(target=contextvars.Context().run, args=(build, "plain")),
            threading.Thread(target=context.run, args=(build, "copied")),
        ]
        for thread in threads:
            thread.start()
            thread.join()
    assert found == {"plain": (FastConfig(0), Policy.CACHED), "copied": (FastConfig(1), Policy.HEURISTIC)}


def test_policies(shipped):
    set_autotuner(lambda p, implementation, device: FastConfig(5))
    shipped[problem().key()] = FastConfig(4)
    memory_cache.put(Platform.PALLAS, problem(8).key(), FastConfig(3))
    new = problem(16)
    expected = {
        "heuristic": ((FastConfig(0), Tier.HEURISTIC),) * 3,
        "cached": (
            (FastConfig(4), Tier.PERSISTENT),
            (FastConfig(3), Tier.MEMORY),
            (FastConfig(0), Tier.HEURISTIC),
        ),
        "tune": (
            (FastConfig(4), Tier.PERSISTENT),
            (FastConfig(3), Tier.MEMORY),
            (FastConfig(5), Tier.AUTOTUNE),
        ),
        "force": ((FastConfig(5), Tier.AUTOTUNE),) * 3,
    }
    for policy, answers in expected.items():
        with policy_override(policy):
            assert tuple(chosen(p, tuning=True) for p in (problem(), problem(8), new)) == answers, policy
            # A call never tunes; tables serve it under every policy that reads them.
            known = (shipped[problem().key()], FastConfig(3), FastConfig(0))
            plain = tuple(chosen(p)[0] for p in (problem(), problem(8), new))
            assert plain == (known if policy != "heuristic" else (FastConfig(0),) * 3), policy
    set_autotuner(lambda p, implementation, device: None)
    with policy_override("force"):
        assert chosen(new, tuning=True) == (FastConfig(0), Tier.HEURISTIC)
    set_autotuner(None)
    with policy_override("force"):
        assert chosen(tuning=True) == (FastConfig(4), Tier.PERSISTENT)


def test_the_policy_of_the_environment(monkeypatch):
    assert current_policy() is Policy.CACHED
    monkeypatch.setenv(POLICY_VARIABLE, "heuristic")
    memory_cache.put(Platform.PALLAS, problem().key(), FastConfig(3))
    assert current_policy() is Policy.HEURISTIC and chosen() == (FastConfig(0), Tier.HEURISTIC)
    with policy_override("cached"):
        assert chosen() == (FastConfig(3), Tier.MEMORY)
    monkeypatch.setenv(POLICY_VARIABLE, "always")
    expected = "environment variable EJKERNEL_EQX_POLICY: expected one of 'heuristic', 'cached', 'tune', 'force', received 'always'"
    with pytest.raises(ValueError, match=expected):
        take_snapshot(OPERATION)
    with (
        pytest.raises(ValueError, match=r"^policy: expected one of 'heuristic', .* received 'sometimes'"),
        policy_override("sometimes"),
    ):
        pass


def entry(config, p=None, **changed):
    return {
        "operation": OPERATION,
        "platform": "pallas",
        "problem": (p or problem()).key(),
        "config": config,
        **changed,
    }


@pytest.fixture
def ship(monkeypatch, tmp_path):
    """Writes the shipped table of this machine's device, for the operation's core."""
    monkeypatch.setattr(importlib.resources, "files", lambda package: tmp_path)
    monkeypatch.setattr(caches, "PERSISTENT_SOURCES", [caches.shipped_entries])
    forget = (caches._shipped, caches._shipped_table)

    def write(*entries, schema=caches.SCHEMA):
        folder = tmp_path / "data" / device_facts().slug
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{OPERATION}.json").write_text(json.dumps({"schema": schema, "entries": entries}))
        for cached in forget:
            cached.cache_clear()

    yield write
    for cached in forget:
        cached.cache_clear()


def test_shipped_table(ship):
    ship(
        entry(to_dict(FastConfig(6))),
        entry(to_dict(SlowConfig(7)), platform="xla"),
        entry(to_dict(FastConfig(8)), operation="another"),
    )
    assert chosen(problem(60)) == (FastConfig(6), Tier.PERSISTENT)
    assert chosen(platform="xla") == (SlowConfig(7), Tier.PERSISTENT)
    assert chosen(problem(20)) == (FastConfig(0), Tier.HEURISTIC)
    memory_cache.put(Platform.PALLAS, problem().key(), FastConfig(3))
    assert chosen() == (FastConfig(3), Tier.MEMORY)


def test_no_shipped_table_is_no_error(ship):
    assert chosen() == (FastConfig(0), Tier.HEURISTIC)


def test_a_table_of_another_schema_is_ignored_aloud(ship, caplog):
    ship(entry(to_dict(FastConfig(6))), schema=caches.SCHEMA + 1)
    with caplog.at_level(logging.WARNING, "ejkernel_eqx"):
        assert chosen() == (FastConfig(0), Tier.HEURISTIC)
    assert "has schema 2, this version reads 1: ignored" in caplog.text


def test_an_entry_of_another_version_is_ignored_aloud(ship, caplog):
    ship(entry({"block": 6, "warps": 4}), entry(to_dict(FastConfig(6)), problem(8)))
    with caplog.at_level(logging.WARNING, "ejkernel_eqx"):
        assert chosen() == (FastConfig(0), Tier.HEURISTIC)
    assert "unknown ['warps']" in caplog.text
    assert chosen(problem(8)) == (FastConfig(6), Tier.PERSISTENT)


def test_the_first_source_that_knows_decides(monkeypatch):
    tables = (
        {problem().key(): FastConfig(1)},
        {problem().key(): FastConfig(2), problem(8).key(): FastConfig(3)},
    )
    sources = [lambda implementation, device, table=table: table for table in tables]
    monkeypatch.setattr(caches, "PERSISTENT_SOURCES", sources)
    implementation = kernel_registry.get(OPERATION, "pallas")
    known = caches.persistent_entries(implementation, device_facts())
    assert known == {problem().key(): FastConfig(1), problem(8).key(): FastConfig(3)}
