"""`bench --keep`: times that decide which platform is taken."""

import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx import Platform
from ejkernel_eqx.tuning import Timing
from tests.cli.kernels import example_problem, OPERATION, Wrong
from tests.cli.parts import bench, BOTH, device_facts, FORWARD, memory_cache, output, user_cache

TINY = ("--shape", "N=64", "--dtype", "float32")
PROBLEM = example_problem(OPERATION, {"N": 64}, "float32", {})


@pytest.fixture(autouse=True)
def timed(monkeypatch):
    """By platform; the vendor's takes the fewest, unless a test says otherwise."""
    ms = {"xla": 2.0, "pallas": 3.0, "cuda": 1.0}

    def time(works, direction, samples, sample_ms):
        factor = {FORWARD: 1.0, BOTH: 3.0}[direction]
        return {name: Timing(factor * ms[name], 0.0, (ms[name],) * samples, 1) for name in works}

    monkeypatch.setattr(bench, "_time", time)
    memory_cache.clear()
    yield ms
    memory_cache.clear()


def taken() -> str:
    return ejx.explain(OPERATION, N=64, dtype="float32").choices[0].platform


def test_the_fastest_is_taken_then(run, run_json, monkeypatch):
    monkeypatch.setattr(Wrong, "FACTOR", 2.0)
    # Nothing is kept of what has choices and is not tuned, which may be faster yet.
    code, document = run_json("bench", OPERATION, *TINY, "--keep")
    assert code == output.OK and document["results"][0]["kept"] == [] and taken() == "xla"
    assert "times kept: none; tune the platforms first" in run("bench", OPERATION, *TINY, "--keep")[1]
    for platform in ("xla", "cuda"):
        config = ejx.kernel_registry.get(OPERATION, platform).hooks.config_type(2)
        memory_cache.put(Platform(platform), PROBLEM.key(), config)
    assert "kept" not in run_json("bench", OPERATION, *TINY)[1]["results"][0] and taken() == "xla"
    code, out, _ = run("bench", OPERATION, *TINY, "--keep", "--samples", "3")
    assert code == output.OK and "times kept: xla, cuda" in out
    assert "used from now on: cuda" in out and "measured 2.00 times as slow as cuda" in out
    assert taken() == "cuda"
    memory_cache.clear()  # another process
    assert taken() == "cuda"
    records = {r.platform: r for r in user_cache(device_facts(), OPERATION).records()} | {
        r.platform: r for r in user_cache(device_facts(), "tests.cli.square").records()
    }
    assert set(records) == {"xla", "cuda"}
    assert records["xla"].ms == {FORWARD: 2.0, BOTH: 6.0} and records["xla"].samples == 3
    assert records["xla"].exact == PROBLEM.to_dict() and records["xla"].config == {"chunks": 2}


def test_what_the_tuner_found_out_stays(run, run_json, timed):
    run_json("tune", OPERATION, *TINY, "--platform", "xla", "--max-candidates", "2")
    (before,) = user_cache(device_facts(), OPERATION).records()
    assert len(before.timed) == 2
    timed["xla"] = 0.5
    _, document = run_json("bench", OPERATION, *TINY, "--keep", "--platform", "xla")
    (after,) = user_cache(device_facts(), OPERATION).records()
    assert document["results"][0]["kept"] == ["xla"]
    assert (after.config, after.timed, after.denied) == (before.config, before.timed, before.denied)
    assert after.ms == {FORWARD: 0.5, BOTH: 1.5} != before.ms


def test_what_has_nothing_to_tune_is_kept_as_it_is(run_json, monkeypatch):
    vendor = ejx.kernel_registry.get(OPERATION, "cuda").load()
    monkeypatch.setattr(
        vendor, "candidates", staticmethod(lambda problem, device: [vendor.default_config(None, None)])
    )
    _, document = run_json("bench", OPERATION, *TINY, "--keep")
    assert document["results"][0]["kept"] == ["cuda"]


def test_what_is_wrong_is_not_kept(run_json):
    """`pallas` forgets a factor."""
    memory_cache.put(
        ejx.kernel_registry.get(OPERATION, "pallas").platform, PROBLEM.key(), Wrong.config_type(2)
    )
    code, document = run_json("bench", OPERATION, *TINY, "--keep")
    assert code == output.FAILED and document["results"][0]["kept"] == []
