"""The benchmark of the layer runs, checks before it times, and says how much it takes over its grouped matmuls."""

import json

import pytest

from benchmarks import moe_layer

_QUICK = ("--quick", "--samples", "2", "--sample-ms", "0.5", "--no-torch")


@pytest.mark.slow
def test_every_result_is_checked_and_timed(tmp_path, capsys):
    paths = [f"--{name}={tmp_path / name}" for name in ("json", "markdown")]
    assert moe_layer.main([*_QUICK, "--commit", "abc", *paths]) == 0
    content = json.loads((tmp_path / "json").read_text())
    assert len(content["rows"]) == 2 * sum(len(problem.directions) for problem in moe_layer.TINY)
    for row in content["rows"]:
        assert row["reason"] is None and row["ms"] > 0 and row["tflop_per_s"] > 0
        alone = row["implementation"] == moe_layer.ALONE
        assert alone == (row["over_alone"] is None) == (not row["errors"])
        assert all(error < 1e-4 for error in row["errors"].values())
    assert "most time over that of its matmuls, forward+backward" in content["summary"]
    assert "| T12 E8 F16 N4 top 2 float32 |" in (tmp_path / "markdown").read_text()
    assert moe_layer.main(["--render", str(tmp_path / "json")]) == 0
    assert "over matmuls" in capsys.readouterr().out


@pytest.mark.slow
def test_a_wrong_result_gets_no_time(monkeypatch):
    true = moe_layer._results
    wrong = lambda call, direction, inputs: {n: 1.02 * x for n, x in true(call, direction, inputs).items()}
    problem, options = moe_layer.TINY[1], moe_layer.parse(_QUICK)
    expected = moe_layer.expected_results(problem, moe_layer.make_inputs(problem))
    monkeypatch.setattr(moe_layer, "expected_results", lambda problem, inputs: expected)
    monkeypatch.setattr(moe_layer, "_results", wrong)
    mine, _ = next(moe_layer.measure(problem, options))
    assert mine.reason is not None and mine.reason.startswith("wrong: out is wrong") and mine.ms is None
