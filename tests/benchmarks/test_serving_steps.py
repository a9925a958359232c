"""The benchmark of serving steps runs and writes what it measures."""

import json

import pytest

from benchmarks import serving_steps


@pytest.mark.slow
def test_steps_are_timed(tmp_path, capsys):
    path = tmp_path / "serving.json"
    assert serving_steps.main(["--quick", "--no-starts", "--commit", "abc", "--json", str(path)]) == 0
    content = json.loads(path.read_text())
    (row,) = content["rows"]
    assert row["batch"] == 4 and row["programs"] <= content["bars"]["programs"] == 3
    assert (
        row["ratio"] == pytest.approx(row["step_ms"] / row["device_ms"])
        and row["step_ms_without_overlap"] > 0
    )
    assert content["starts"] == [] and "ms a step" in capsys.readouterr().out


@pytest.mark.slow
def test_a_start_says_when_it_is_ready(capsys):
    assert serving_steps.main(["--quick", "--start"]) == 0
    assert tuple(capsys.readouterr().out.splitlines()) == serving_steps.PHASES
