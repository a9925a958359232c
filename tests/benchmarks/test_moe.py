"""The benchmark of grouped matmuls runs, checks before it times, and writes what it says."""

import json
import math

import numpy as np
import pytest

from benchmarks import moe, moe_problems

_QUICK = ("--quick", "--samples", "2", "--sample-ms", "0.5", "--no-torch")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moe")
    paths = [f"--{name}={folder / name}" for name in ("json", "plot", "markdown")]
    assert moe.main([*_QUICK, "--commit", "abc", *paths]) == 0
    return json.loads((folder / "json").read_text()), folder


@pytest.mark.slow
def test_every_result_is_checked_and_timed(run, capsys):
    content, folder = run
    rows = content["rows"]
    plain = [p for p in moe_problems.TINY if p.is_plain]
    ours, peers = ([row for row in rows if row["is_peer"] == is_peer] for is_peer in (False, True))
    assert len(ours) == sum(len(p.directions) for p in moe_problems.TINY)
    assert {(row["problem"], row["direction"]) for row in peers} == {
        (p.name, d) for p in plain for d in p.directions
    }
    for row in rows:
        assert row["reason"] is None and row["ms"] > 0 and row["bytes"] > 0
        assert (
            row["tflop_per_s"] > 0 and row["tb_per_s"] > 0 and all(e < 1e-4 for e in row["errors"].values())
        )
        assert row["ratio"] is None or math.isfinite(row["ratio"])
    for row in ours:
        expected = {"forward": {"out"}, "d_lhs": {"lhs"}}.get(row["direction"])
        gated = " gated" in row["problem"]
        assert set(row["errors"]) == (expected or ({"rhs", "up"} if gated else {"rhs"}))
        assert row["platform"] == "xla" and row["config"]
    assert set(content["summary"]) >= {
        f"{what}, {d}" for d in moe.DIRECTIONS for what in ("lowest ratio", "time over that of even groups")
    }
    assert (folder / "plot").read_bytes().startswith(b"\x89PNG")
    assert "| M24 K8 N16 E3 float32 |" in (folder / "markdown").read_text()
    assert moe.main(["--render", str(folder / "json"), "--plot", str(folder / "again.png")]) == 0
    assert "lowest ratio, d_rhs" in capsys.readouterr().out and (folder / "again.png").is_file()


def test_a_wrong_result_gets_no_time(monkeypatch):
    true = moe_problems.ours
    wrong = lambda problem, platform: lambda *given: 1.02 * true(problem, platform)(*given)
    monkeypatch.setattr(moe_problems, "ours", wrong)
    mine, peer = next(moe.measure(moe_problems.TINY[0], moe.parse(_QUICK)))
    assert mine.reason is not None and mine.reason.startswith("wrong: out is wrong") and mine.ms is None
    assert peer.reason is None and peer.ms is not None and mine.ratio is None


def test_names_and_sizes():
    every = (*moe_problems.ANCHORS, *moe_problems.CPU, *moe_problems.TINY)
    names = [problem.name for problem in every]
    assert len(set(names)) == len(names)
    for problem in every:
        sizes = moe_problems.group_sizes(problem, np.random.default_rng(0))
        assert sizes.sum() == problem.M and (not problem.skewed or sizes[0] == problem.M // 2)
