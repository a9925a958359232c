"""The benchmark of pooling runs, checks before it times, and writes what it says."""

import json
import math

import jax
import jax.numpy as jnp
import pytest

from benchmarks import pooling, pooling_problems

_QUICK = ("--quick", "--samples", "2", "--sample-ms", "0.5", "--no-torch")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One run over two problems, and the folder with its files."""
    folder = tmp_path_factory.mktemp("pooling")
    paths = [f"--{name}={folder / name}" for name in ("json", "plot", "markdown")]
    chosen = "^(chunks of|masked)"
    assert pooling.main([*_QUICK, "--problems", chosen, "--commit", "abc", *paths]) == 0
    return json.loads((folder / "json").read_text()), folder


@pytest.mark.slow
def test_every_result_is_checked_and_timed(run):
    content, _ = run
    rows = content["rows"]
    assert {row["direction"] for row in rows} == set(pooling.DIRECTIONS)
    assert len({row["problem"] for row in rows}) == 2 and len(rows) == 2 * 2 * 3
    for row in rows:
        assert row["reason"] is None and row["ms"] > 0 and len(row["samples_ms"]) == 2
        assert row["tb_per_s"] > 0 and row["bytes"] > 0
        if row["implementation"] == pooling.COPY:
            assert row["ratio"] is row["of_copy"] is None and not row["errors"]
            continue
        assert math.isfinite(row["ratio"]) and row["of_copy"] > 0
        both = row["direction"] == "forward+backward"
        assert set(row["errors"]) == ({"out", "x"} if both else {"out"})
        assert all(0 <= error < 1e-5 for error in row["errors"].values())
    ours = [row for row in rows if not row["is_peer"]]
    assert len(ours) == 4 and all(row["platform"] == "xla" and row["config_from"] for row in ours)


@pytest.mark.slow
def test_the_report_names_its_origin(run, capsys):
    content, folder = run
    assert content["environment"]["device"] == jax.devices()[0].device_kind
    assert (folder / "plot").read_bytes().startswith(b"\x89PNG")
    assert "| masked rows B2 T64 H2 D8 float32 |" in (folder / "markdown").read_text()
    assert set(content["summary"]) == {
        f"lowest {what}, {d}" for what in ("ratio", "share of a copy's speed") for d in pooling.DIRECTIONS
    }
    assert pooling.main(["--render", str(folder / "json"), "--plot", str(folder / "again.png")]) == 0
    assert "lowest ratio, forward" in capsys.readouterr().out and (folder / "again.png").is_file()


def test_a_wrong_result_gets_no_time(monkeypatch):
    true = pooling_problems.ours
    monkeypatch.setattr(
        pooling_problems,
        "ours",
        lambda problem, platform: lambda x: 1.02 * true(problem, platform)(x),
    )
    mine, copy, peer = next(pooling.measure(pooling_problems.TINY[0], pooling.parse(_QUICK)))
    assert mine.reason is not None and mine.reason.startswith("wrong: out is wrong") and mine.ms is None
    assert peer.reason is None and peer.ms is not None and mine.ratio is None and copy.ms is not None


@pytest.mark.few(2)
@pytest.mark.parametrize("problem", pooling_problems.TINY, ids=lambda p: p.name)
def test_every_form_is_what_its_formula_says(problem):
    inputs = pooling_problems.make_inputs(problem)
    found = jax.jit(pooling_problems.direction_of(pooling_problems.ours(problem, "xla"), True))(inputs)
    expected = pooling_problems.expected_results(problem, inputs)
    _, wrong = pooling_problems.errors_of(problem, found, expected)
    assert wrong is None and jnp.any(found["x"] != 0)


def test_names_and_sizes():
    every = (*pooling_problems.ANCHORS, *pooling_problems.CPU)
    assert len({problem.name for problem in every}) == len(every)
    assert {problem.form for problem in every} == set(pooling_problems.FORMS)
    for problem in every:
        assert problem.L == 0 or problem.T % problem.L == 0
        assert bool(problem.N) == ("sequences" in problem.form) and (problem.B == 1 or not problem.N)


def test_no_platform_and_no_problem(capsys):
    with pytest.raises(SystemExit):
        pooling.parse(["--platforms", "cuda"])
    assert pooling.main(["--quick", "--problems", "nothing"]) == 2
    assert "no problem matches 'nothing'" in capsys.readouterr().err
