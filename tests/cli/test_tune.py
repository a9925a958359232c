"""`tune`, `bench` and `report` on tiny problems."""

import dataclasses
import json

import pytest
import tqdm

import ejkernel_eqx as ejx
from tests.cli.kernels import OPERATION, Square
from tests.cli.parts import (
    bench,
    BOTH,
    device_facts,
    FORWARD,
    ledger,
    output,
    user_cache,
)

TINY = ("--shape", "N=64", "--dtype", "float32")
QUICK = ("--samples", "2", "--sample-ms", "0.5")


@pytest.fixture(autouse=True)
def short_samples():
    with ejx.tuning_options(samples=2, sample_ms=0.5):
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
    assert code == output.OK and "already known, not timed again" in out and "winner" in out
    assert f"tuning {OPERATION}" in err
    _, document = run_json("tune", OPERATION, *TINY, "--max-candidates", "3")
    assert not document["results"][0]["cached"] and len(document["results"][0]["candidates"]) == 3


def test_several_shapes_and_flags(run_json):
    shapes = ("--shape", "N=64", "--shape", "N=128", "--shape", "N=64")
    named = ("odd", "window=1023,0", "scale=0.5", "left=none", "n=3")
    flags = [word for flag in named for word in ("--flag", flag)]
    options = "--dtype float32 --max-candidates 1 --no-isolate --force --budget 5 --platform xla".split()
    code, document = run_json("tune", OPERATION, *shapes, *flags, *options)
    assert code == output.OK
    assert [r["problem"]["dims"]["N"] for r in document["results"]] == [64, 128]
    wanted = {"odd": True, "window": "1023,0", "scale": 0.5, "left": None, "n": 3}
    assert all(r["problem"]["flags"] == wanted for r in document["results"])


def test_a_platform_that_tunes_itself_is_left_alone(run, run_json, monkeypatch):
    known = ejx.kernel_registry.get(OPERATION, "cuda")
    monkeypatch.setitem(
        ejx.kernel_registry._table[OPERATION], known.platform, dataclasses.replace(known, priority=99)
    )
    code, document = run_json("tune", OPERATION, *TINY)
    assert code == output.OK
    note = "the platform used here, cuda, has nothing to tune; use --platform xla to tune another"
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
    assert code == output.OK and states.pop("xla") == "timed"
    assert states == dict.fromkeys(("cuda", "pallas", "triton"), "unsupported")
    assert dict(document["results"][0]["problem"]["flags"])["window"] == [7, 0]


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


def test_a_summary_comes_last(run, run_json, folder):
    shapes = ("--shape", "N=64", "--shape", "N=128")
    options = ("--dtype", "float32", "--max-candidates", "2", "--no-isolate")
    code, out, _ = run("tune", OPERATION, *shapes, *options)
    summary = out[out.index("\nsummary\n") :]
    assert code == output.OK and "2 distinct problems: 2 tuned, 0 known from tables, 0 failed, in " in summary
    assert f"kept in {folder}" in summary
    assert (
        "times as fast as the heuristic: " in summary or "the heuristic was the fastest of 2 tuned" in summary
    )
    _, document = run_json("tune", OPERATION, *shapes, *options)
    counts = {name: document["summary"][name] for name in ("problems", "tuned", "known", "failed")}
    assert counts == {"problems": 2, "tuned": 0, "known": 2, "failed": 0}
    code, document = run_json("tune", OPERATION, *TINY, "--platform", "cuda")
    assert code == output.FAILED and document["summary"]["failed"] == 1


def test_times_that_are_not_steady_are_warned_of(run, monkeypatch):
    real = bench.time_in_turn
    unsteady = lambda *args: {name: t._replace(spread=0.35) for name, t in real(*args).items()}
    monkeypatch.setattr(bench, "time_in_turn", unsteady)
    command = ("bench", OPERATION, *TINY, *QUICK, "--platform", "xla")
    _, out, _ = run(*command)
    assert "warning: spread above 20% (xla forward 35.0%, xla forward+backward 35.0%)" in out
    monkeypatch.setattr(bench, "UNSTEADY", 0.36)
    assert "warning" not in run(*command)[1]


@pytest.mark.parametrize("columns", [60, 300])
def test_a_bar_of_progress_fits(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    name = "flash_attention B4 T4096 H16 K4 D128 bfloat16 causal window (1023, 0) on triton"
    with tqdm.tqdm(total=12, initial=5, desc=ledger.shortened(name), ncols=ledger._width()):
        pass
    *_, line = capsys.readouterr().err.strip().splitlines()
    assert len(line) <= min(columns, 80) and "5/12" in line and line.startswith("flash_attention")
    assert ledger.shortened("short") == "short" and len(ledger.shortened(name)) <= 32
