"""`tune`, `bench` and `report` on tiny problems."""

import dataclasses
import json

import pytest

from ejkernel_eqx.attention import reference
from ejkernel_eqx.attention.example import example_problem as attention_problem
from ejkernel_eqx.cli import output
from ejkernel_eqx.cli.bench import _measurable
from ejkernel_eqx.dispatch import BOTH, device_facts, FORWARD, kernel_registry
from ejkernel_eqx.dispatch.persistent import user_cache
from ejkernel_eqx.tuning.check import all_errors
from ejkernel_eqx.tuning.options import tuning_options
from tests.cli.kernels import OPERATION, Square

TINY = ("--shape", "N=64", "--dtype", "float32")
QUICK = ("--samples", "2", "--sample-ms", "0.5")


@pytest.fixture(autouse=True)
def short_samples():
    with tuning_options(samples=2, sample_ms=0.5):
        yield


def test_tune_list_show(run, run_json, folder):
    code, document = run_json(
        "tune", OPERATION, *TINY, "--max-candidates", "2", "--import", "tests.cli.kernels"
    )
    assert code == output.OK
    (result,) = document["results"]
    assert result["platform"] == "xla" and result["problem"]["dims"] == {"N": 64} and not result["cached"]
    heuristic, other = sorted(result["candidates"], key=lambda c: c["config"]["chunks"])
    assert (heuristic["config"], other["config"]) == ({"chunks": 1}, {"chunks": 2})
    assert (heuristic["is_heuristic"], other["is_heuristic"]) == (True, False)
    assert [c["config"] for c in (heuristic, other) if c["is_winner"]] == [result["config"]]
    assert set(result["ms"]) == set(result["heuristic_ms"]) == {FORWARD, BOTH}
    (record,) = user_cache(device_facts(), OPERATION).records()
    assert record.config == result["config"] and record.ms == result["ms"]
    _, listed = run_json("cache", "list")
    _, shown = run_json("cache", "show", listed["records"][0]["digest"])
    assert shown["config"] == result["config"] and len(shown["timed"]) == 2

    # What is known is not timed again, unless there is more to try or it is wished.
    code, out, err = run("tune", OPERATION, *TINY, "--max-candidates", "2")
    assert (
        code == output.OK and "nothing was timed" in out and "winner" in out and f"tuning {OPERATION}" in err
    )
    _, document = run_json("tune", OPERATION, *TINY, "--max-candidates", "3")
    assert not document["results"][0]["cached"] and len(document["results"][0]["candidates"]) == 3


def test_several_shapes_and_flags(run_json):
    shapes = ("--shape", "N=64", "--shape", "N=128", "--shape", "N=64")
    flags = (
        "--flag",
        "odd",
        "--flag",
        "window=1023,0",
        "--flag",
        "scale=0.5",
        "--flag",
        "left=none",
        "--flag",
        "n=3",
    )
    options = (
        "--dtype",
        "float32",
        "--max-candidates",
        "1",
        "--no-isolate",
        "--force",
        "--budget",
        "5",
        "--platform",
        "xla",
    )
    code, document = run_json("tune", OPERATION, *shapes, *flags, *options)
    assert code == output.OK
    assert [r["problem"]["dims"]["N"] for r in document["results"]] == [64, 128]
    wanted = {"odd": True, "window": "1023,0", "scale": 0.5, "left": None, "n": 3}
    assert all(r["problem"]["flags"] == wanted for r in document["results"])


def test_a_platform_that_tunes_itself_is_left_alone(run, run_json, monkeypatch):
    known = kernel_registry.get(OPERATION, "cuda")
    monkeypatch.setitem(
        kernel_registry._table[OPERATION], known.platform, dataclasses.replace(known, priority=99)
    )
    code, document = run_json("tune", OPERATION, *TINY)
    assert code == output.OK
    note = "cuda is used here, which has nothing to tune; --platform xla tunes another"
    assert document["results"][0]["note"] == note and note in run("tune", OPERATION, *TINY)[1]
    code, out, _ = run("tune", OPERATION, *TINY, "--platform", "cuda")  # asked for by name
    assert code == output.FAILED and "has no workload" in out


def test_a_wrong_platform_is_told_and_not_timed(run, run_json):
    code, document = run_json("bench", OPERATION, *TINY, *QUICK)
    assert code == output.FAILED
    right, wrong, vendor = document["results"][0]["platforms"]
    assert [row["platform"] for row in (right, wrong, vendor)] == ["xla", "pallas", "cuda"]
    assert [row["state"] for row in (right, wrong, vendor)] == ["timed", "wrong", "timed"]
    assert set(vendor["timings"]) == {FORWARD, BOTH}
    assert wrong["timings"] == {} and "x is wrong: relative RMS error 0.5" in wrong["reason"]
    assert set(right["timings"]) == {FORWARD, BOTH} and set(right["errors"]) == {"out", "x"}
    for direction, flops, size in ((FORWARD, 64, 8 * 64), (BOTH, 3 * 64, 16 * 64)):
        timing = right["timings"][direction]
        assert timing["ms"] > 0 and timing["roofline"] is None
        assert min(timing["to_best"], vendor["timings"][direction]["to_best"]) == 1.0
        assert timing["tflops"] == pytest.approx(flops / timing["ms"] / 1e9)
        assert timing["gb_per_s"] == pytest.approx(size / timing["ms"] / 1e6)
    code, out, err = run("bench", OPERATION, *TINY, *QUICK, "--platform", "xla")
    assert code == output.OK and "pallas" not in out and "chunks=1 (heuristic)" in out and "checking" in err


def test_a_platform_that_raises_does_not_stop_the_others(run_json, monkeypatch):
    monkeypatch.setattr("tests.cli.kernels.Wrong.FACTOR", None)
    code, document = run_json("bench", OPERATION, *TINY, *QUICK)
    right, broken, _ = document["results"][0]["platforms"]
    assert code == output.FAILED and right["state"] == "timed" and set(right["timings"]) == {FORWARD, BOTH}
    assert broken["state"] == "failed" and "raises TypeError" in broken["reason"]


def test_nothing_to_bench_is_a_failure(run):
    code, out, _ = run("bench", OPERATION, "--shape", "N=2000", "--dtype", "float32")
    assert code == output.FAILED and out.count("takes N up to 1000") == 3


def test_bench_uses_what_was_tuned(run_json, monkeypatch):
    monkeypatch.setattr(Square, "default_config", staticmethod(lambda problem, device: Square.config_type(3)))
    run_json("tune", OPERATION, *TINY, "--platform", "xla", "--max-candidates", "1")
    run_json("tune", OPERATION, *TINY, "--platform", "xla", "--max-candidates", "2")
    _, document = run_json("bench", OPERATION, *TINY, *QUICK, "--platform", "xla")
    (row,) = document["results"][0]["platforms"]
    (record,) = user_cache(device_facts(), OPERATION).records()
    assert row["config"] == record.config and row["origin"].startswith("tuned 20")


def test_attention(run_json):
    """The library's own operation, with an option of its own."""
    shape = ("--shape", "B=1,T=32,H=2,D=16", "--flag", "window=7,0", "--dtype", "float32")
    code, document = run_json("bench", "flash_attention", *shape, *QUICK)
    states = {row["platform"]: row["state"] for row in document["results"][0]["platforms"]}
    assert code == output.OK and states == {"cuda": "unsupported", "triton": "unsupported", "xla": "timed"}
    assert dict(document["results"][0]["problem"]["flags"])["window"] == [7, 0]


@pytest.mark.slow
def test_the_vendors_attention_is_measured_as_ours_is(monkeypatch):
    known = kernel_registry.get("flash_attention", "cuda")
    monkeypatch.setattr(known.load(), "attend", lambda arrays, spec: reference.attend(arrays, spec)[0])
    problem = attention_problem("flash_attention", {"T": 32, "H": 2, "D": 16}, "float32", {})
    work = _measurable(known).make_workload(problem)
    assert known.workload is None and work is not None and work.parts == ()
    inputs = work.make_inputs(0)
    errors, reason = all_errors(work.run(inputs, None), work.reference(inputs), work.tolerances)
    assert reason is None and set(errors) == {"out", "q", "k", "v"}


def test_report(run, run_json, tmp_path):
    code, out, err = run("report", tmp_path / "page.html")
    assert (code, out) == (output.USAGE, "") and "tune first" in err
    run_json("tune", OPERATION, *TINY, "--max-candidates", "1")
    run_json("tune", OPERATION, *TINY, "--max-candidates", "2")
    code, document = run_json("report", tmp_path / "page.html")
    assert code == output.OK and document == {"file": str(tmp_path / "page.html"), "problems": 1}
    page = (tmp_path / "page.html").read_text()
    assert page.startswith("<!doctype html>") and OPERATION in page and json.dumps("en") in page


def test_the_policy_heuristic_forbids_it(run, monkeypatch):
    monkeypatch.setenv("EJKERNEL_EQX_POLICY", "heuristic")
    code, _, err = run("tune", OPERATION, *TINY)
    assert code == output.FAILED and "policy 'heuristic' forbids tuning" in err
