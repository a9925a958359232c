"""The benchmark of gaps between launches: it runs, reads a trace, and counts launches."""

import json

import pytest

from benchmarks import decode_gaps
from benchmarks.overlap import gpu_spans, hidden


def test_layers_are_timed_and_checked(tmp_path, capsys):
    path = tmp_path / "gaps.json"
    assert decode_gaps.main(["--quick", "--commit", "abc", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["way"] for row in rows] == ["xla", "xla, in place"]
    for row in rows:
        assert row["us_per_layer"] > 0 and row["error"] < 2e-6 and row["reason"] is None
        assert row["launches"] > 0 and row["call_alone_us"] > 0
    assert "us a layer" in capsys.readouterr().out


@pytest.mark.slow
def test_what_is_wrong_is_not_timed(monkeypatch, capsys):
    expected = decode_gaps.expected_result
    monkeypatch.setattr(decode_gaps, "expected_result", lambda problem: 1.1 * expected(problem))
    assert decode_gaps.main(["--quick", "--commit", "abc"]) == 1
    assert "wrong: relative RMS error" in capsys.readouterr().out


def test_what_a_gpu_ran():
    names = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "/device:GPU:0"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 7, "args": {"name": "Stream #14(Compute)"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 8, "args": {"name": "XLA Ops"}},
    ]
    ran = [("merge", 7, 9.0, 2.0), ("decode", 7, 1.0, 4.0), ("an operation", 8, 0.0, 12.0)]
    events = [
        {"ph": "X", "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur} for name, tid, ts, dur in ran
    ]
    assert gpu_spans(names + events) == [("decode", 1.0, 5.0), ("merge", 9.0, 11.0)]
    assert hidden(names + events) is None


@pytest.mark.parametrize(
    "text, count", [("", 0), ("a {\n  b = f32[] fusion(x)\n}\nENTRY c {\n  d = f32[] copy(x)\n}", 1)]
)
def test_launches_are_those_of_the_entry(text, count):
    assert decode_gaps.count_launches(text) == count
