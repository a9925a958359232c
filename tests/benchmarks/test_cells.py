"""The benchmark of recurrent cells runs, checks before it times, and writes what it says."""

import json

import jax
import jax.numpy as jnp
import pytest

from benchmarks import cells, cells_peers, cells_problems

_QUICK = ("--quick", "--samples", "2", "--sample-ms", "0.5", "--no-torch")


@pytest.mark.slow
def test_every_result_is_checked_and_timed(tmp_path, capsys):
    paths = [f"--{name}={tmp_path / name}" for name in ("json", "plot", "markdown")]
    assert cells.main([*_QUICK, "--problems", "GRU", "--commit", "abc", *paths]) == 0
    content = json.loads((tmp_path / "json").read_text())
    rows = content["rows"]
    assert {row["direction"] for row in rows} == {*cells.DIRECTIONS}
    assert [row["implementation"] for row in rows] == ["default", "xla", "lax.scan"] * 2
    for row in rows:
        assert row["reason"] is None and row["ms"] > 0 and row["ratio"] > 0 and row["bytes"] > 0
        parameters = {"x", *cells_peers.PARAMETERS}
        assert set(row["errors"]) == (parameters if row["direction"] == "forward+backward" else {"out"})
        assert all(0 <= error < 1e-4 for error in row["errors"].values())
    assert (tmp_path / "plot").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "markdown").read_text()
    assert "| GRU B2 T6 H8 I5 float32 |" in page and "Speed of recurrent cells" in page
    assert cells.main(["--render", str(tmp_path / "json")]) == 0
    assert "lowest ratio, forward+backward" in capsys.readouterr().out


def test_a_wrong_result_gets_no_time(monkeypatch):
    true = cells_problems.ours
    monkeypatch.setattr(
        cells_problems, "ours", lambda problem, platform: lambda x: 1.02 * true(problem, platform)(x)
    )
    options = cells.parse([*_QUICK, "--platforms", "xla"])
    mine, peer = next(iter(cells.measure(cells_problems.TINY[2], options)))
    assert mine.reason is not None and mine.reason.startswith("wrong: out is wrong") and mine.ms is None
    assert peer.reason is None and peer.ms is not None


def test_problems():
    names = [problem.name for problem in (*cells_problems.ANCHORS, *cells_problems.CPU)]
    assert len(set(names)) == len(names)
    # cuDNN's LSTM through JAX takes its parameters in one array, which it would refuse at another size.
    from jax.experimental import rnn

    problem = cells_problems.TINY[0]
    learned = cells_problems.make_inputs(problem).learned
    size = sum(learned[name].size for name in cells_peers.PARAMETERS)
    assert size == rnn.get_num_params_in_lstm(problem.I, problem.H, 1, False)
    flat = jnp.concatenate([learned[name].reshape(-1) for name in cells_peers.PARAMETERS])
    parts = rnn.unpack_lstm_weights(flat, problem.I, problem.H, 1, False)
    for name, found in zip(cells_peers.PARAMETERS, parts, strict=True):
        assert jnp.array_equal(jax.tree.leaves(found)[0], learned[name])
