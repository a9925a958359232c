"""Candidates side by side."""

import json

import pytest

from benchmarks import sweep


def run(tmp_path, *more):
    path = tmp_path / "sweep.json"
    code = sweep.main(["--quick", "--candidates", "2", "--samples", "2", "--json", str(path), *more])
    return code, json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_every_candidate_is_checked_and_timed(tmp_path, capsys):
    code, content = run(tmp_path, "--problems", "GLA", "--plot", str(tmp_path / "sweep.png"))
    rows = content["rows"]
    assert code == 0 and (tmp_path / "sweep.png").stat().st_size > 1000
    assert [row["direction"] for row in rows] == ["forward"] * 2 + ["forward+backward"] * 2
    assert rows[0]["config"] != rows[1]["config"] and rows[0]["ratio"] == 1.0
    assert rows[0]["implementation"].startswith("heuristic chunk_size=")
    for row in rows:
        assert (
            row["ms"] > 0 and row["platform"] == "xla" and row["errors"] and row["config_from"] == "overlay"
        )
    assert sweep.main(["--render", str(tmp_path / "sweep.json")]) == 0
    assert rows[1]["implementation"] in capsys.readouterr().out


@pytest.mark.slow
def test_baselines_stand_beside_prefills(tmp_path):
    pytest.importorskip("triton")
    code, content = run(tmp_path, "--problems", "prefill")
    assert code == 0
    assert [row["is_candidate"] for row in content["rows"]] == [True, False]
    assert (
        content["rows"][1]["implementation"].startswith("FlashAttention") and content["rows"][1]["ratio"] > 0
    )


def test_names_say_what_differs():
    from ejkernel_eqx.paged.xla import XlaConfig

    configs = [XlaConfig(block_k=32), XlaConfig(block_k=64)]
    assert sweep.names(configs) == ["heuristic block_k=32", "block_k=64"]
    assert sweep.names(configs[:1]) == ["heuristic"]
