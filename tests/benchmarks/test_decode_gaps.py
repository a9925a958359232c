"""The benchmark of gaps between launches: it runs, reads a trace, and counts launches."""

import json

import pytest

from benchmarks import decode_gaps


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


@pytest.mark.parametrize(
    "text, count", [("", 0), ("a {\n  b = f32[] fusion(x)\n}\nENTRY c {\n  d = f32[] copy(x)\n}", 1)]
)
def test_launches_are_those_of_the_entry(text, count):
    assert decode_gaps.count_launches(text) == count
