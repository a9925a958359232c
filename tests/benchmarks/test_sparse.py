"""The benchmark of block-sparse attention runs, checks before it times, and writes what it says."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import sparse, sparse_problems

_QUICK = ("--quick", "--samples", "2", "--sample-ms", "0.5", "--no-torch")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One run over two problems, and the folder with its files."""
    folder = tmp_path_factory.mktemp("sparse")
    paths = [f"--{name}={folder / name}" for name in ("json", "plot", "markdown")]
    chosen = "^(local|map B)"
    assert sparse.main([*_QUICK, "--problems", chosen, "--commit", "abc", *paths]) == 0
    return json.loads((folder / "json").read_text()), folder


@pytest.mark.slow
def test_every_result_is_checked_and_timed(run):
    rows = run[0]["rows"]
    assert {row["direction"] for row in rows} == set(sparse.DIRECTIONS)
    assert len({row["problem"] for row in rows}) == 2 and len(rows) == 2 * 2 * 2
    for row in rows:
        assert row["reason"] is None and row["ms"] > 0 and row["ratio"] is None
        if row["implementation"] == sparse.DENSE:
            assert row["a_tile"] is row["tflop_per_s"] is None and not row["errors"]
            continue
        assert math.isfinite(row["a_tile"]) and row["tflop_per_s"] > 0 and 0 < row["visible_tiles"] < 1
        both = row["direction"] == "forward+backward"
        assert set(row["errors"]) == ({"q", "k", "v"} if both else {"out"})
        assert all(0 <= error < 1e-5 for error in row["errors"].values())


@pytest.mark.slow
def test_the_report_names_its_origin(run, capsys):
    content, folder = run
    assert content["environment"]["device"] == jax.devices()[0].device_kind
    assert (folder / "plot").read_bytes().startswith(b"\x89PNG")
    assert "| map B2 S300 H4 KV2 D16 50% float32 |" in (folder / "markdown").read_text()
    assert set(content["summary"]) == {f"most time a tile, {way}" for way in sparse.DIRECTIONS}
    assert sparse.main(["--render", str(folder / "json")]) == 0
    assert "most time a tile, forward" in capsys.readouterr().out


def test_a_wrong_result_gets_no_time(monkeypatch):
    true = sparse_problems.ours
    wrong = lambda problem, platform: lambda learned: 1.02 * true(problem, platform)(learned)
    monkeypatch.setattr(sparse_problems, "ours", wrong)
    mine, dense = next(sparse.measure(sparse_problems.TINY[0], sparse.parse(_QUICK)))
    assert mine.reason is not None and mine.reason.startswith("wrong: out is wrong") and mine.ms is None
    assert dense.reason is None and dense.ms is not None and mine.a_tile is None


@pytest.mark.few(2)
@pytest.mark.parametrize("problem", sparse_problems.TINY, ids=lambda p: p.name)
def test_every_form_is_what_its_function_says(problem):
    inputs = sparse_problems.make_inputs(problem)
    expected = sparse_problems.expected_results(problem, inputs)
    for backward in (False, True):
        call = sparse_problems.direction_of(sparse_problems.ours(problem, "xla"), backward)
        found = jax.jit(call)(inputs)
        _, wrong = sparse_problems.errors_of(problem, found, expected)
        assert wrong is None and all(jnp.any(x != 0) for x in found.values())


def test_what_is_visible_is_counted():
    """Pairs and tiles, against the whole mask."""
    for problem in sparse_problems.TINY:
        index = np.arange(problem.S)
        seen = np.broadcast_to(sparse_problems.sees(problem, index[:, None], index), (problem.S,) * 2)
        pairs, tiles = sparse_problems.visible(problem)
        assert pairs == seen.mean()
        padded = np.pad(seen, (0, -problem.S % sparse_problems.BLOCK))
        count = padded.reshape(problem.blocks, sparse_problems.BLOCK, problem.blocks, -1).any((1, 3)).mean()
        assert tiles == count, problem
    for problem in sparse_problems.ANCHORS:
        if problem.share:
            assert abs(sparse_problems.block_map(problem).mean() - problem.share) < 0.01


def test_names():
    every = (*sparse_problems.ANCHORS, *sparse_problems.CPU)
    assert len({problem.name for problem in every}) == len(every)
    assert {problem.form for problem in sparse_problems.ANCHORS} == set(sparse_problems.FORMS)
