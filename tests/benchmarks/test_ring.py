"""The benchmark of ring attention runs whole, and reads overlap out of a trace."""

import json

import pytest

from benchmarks import ring


@pytest.mark.slow
def test_every_form_is_checked_timed_and_judged(tmp_path, capsys):
    options = ["--quick", "--devices", "4", "--commit", "abc", "--profile", str(tmp_path / "trace")]
    assert ring.main([*options, "--json", str(tmp_path / "json")]) == 0
    content = json.loads((tmp_path / "json").read_text())
    rows = {(row["variant"], row["tokens"]): row for row in content["rows"]}
    assert set(rows) == {(name, 256) for name in ring.VARIANTS} | {("zigzag", 1024)}
    for row in rows.values():
        assert "reason" not in row and row["error"] < 1e-5 and row["ms"] > 0 and row["memory_bytes"] > 0, row
    assert rows["zigzag", 256]["speedup"] > 0 and rows["flash", 256]["speedup"] == 1
    speed, memory = content["goals"]
    assert speed["found"] > 0 and speed["met"] is None and memory["found"] < 1.2
    assert list((tmp_path / "trace").rglob("*.trace.json.gz"))
    assert "times as fast as one device" in capsys.readouterr().out


@pytest.mark.slow
def test_a_wrong_result_gets_no_time(monkeypatch, capsys):
    true = ring.operation

    def operation(name, platform):
        call = true(name, platform)
        return (lambda q, k, v: 1.1 * call(q, k, v)) if name == "contiguous" else call

    monkeypatch.setattr(ring, "operation", operation)
    assert ring.main(["--quick", "--devices", "2", "--variants", "flash,contiguous"]) == 1
    assert "contiguous: wrong: relative error" in capsys.readouterr().out


def test_goals_are_judged_on_two_gpus():
    options = ring.parse(["--devices", "2"])
    rows = [
        {"variant": name, "tokens": tokens, "speedup": speedup, "memory_bytes": memory}
        for name, tokens, speedup, memory in (
            *(("flash", 131072, 1.0, 100), ("zigzag", 131072, 1.9, 60), ("contiguous", 131072, 1.4, 60)),
            *(("flash", 32768, 1.0, 30), ("all_to_all", 32768, 1.6, 20), ("zigzag", 262144, 0.0, 120)),
        )
    ]
    long, short, memory = ring.goals(rows, options, on_gpus=True)
    assert long["met"] is True and long["by"] == "zigzag" and long["found"] == 1.9
    assert short["met"] is False and short["by"] == "all_to_all"
    assert memory["met"] is False and memory["found"] == 1.2


def test_goals_of_eight_gpus():
    options = ring.parse(["--devices", "8"])
    assert options.tokens == [65536, 131072]
    rows = [
        {"variant": name, "tokens": tokens, "speedup": speedup, "memory_bytes": memory}
        for name, tokens, speedup, memory in (
            *(("flash", 65536, 1.0, 100), ("flash", 131072, 1.0, 200)),
            *(("zigzag", 131072, 7.1, 30), ("zigzag", 524288, 0.0, 105)),
        )
    ]
    speed, memory = ring.goals(rows, options, on_gpus=True)
    assert speed["met"] is True and speed["wanted"] == pytest.approx(0.88 * 8)
    assert memory["met"] is True and memory["goal"].startswith("524288 tokens on 8 devices")
