"""The benchmark of native sparse attention runs, checks before it times, and says how it compares with what is beside it."""

import json

import pytest

from benchmarks import native_sparse

_QUICK = ("--quick", "--samples", "2", "--sample-ms", "0.5", "--platforms", "default")


@pytest.mark.slow
def test_every_result_is_checked_and_timed(tmp_path, capsys):
    paths = [f"--{name}={tmp_path / name}" for name in ("json", "markdown")]
    assert native_sparse.main([*_QUICK, "--commit", "abc", *paths]) == 0
    content = json.loads((tmp_path / "json").read_text())
    # Beside pages there is no dense attention.
    assert len(content["rows"]) == 2 * 2 + 2 + 1
    for row in content["rows"]:
        assert row["reason"] is None and row["ms"] > 0
        if row["implementation"] == native_sparse.DENSE:
            assert not row["errors"] and row["over_dense"] is None
            continue
        assert row["errors"] and all(error < 1e-4 for error in row["errors"].values())
        assert bool(row["tb_per_s"]) == (native_sparse.TRAIN not in row["problem"])
        assert bool(row["over_dense"]) == (native_sparse.PAGES not in row["problem"])
    assert {"lowest over dense, forward", "lowest over dense, forward+backward", "lowest TB/s"} == set(
        content["summary"]
    )
    assert "| decode B2 T48 H4 K2 D16 float32 |" in (tmp_path / "markdown").read_text()
    assert native_sparse.main(["--render", str(tmp_path / "json")]) == 0
    assert "over dense" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("problem", native_sparse.TINY, ids=lambda p: p.kind)
def test_a_wrong_result_gets_no_time(monkeypatch, problem):
    true = native_sparse.expected_results
    wrong = lambda *given: {name: 1.02 * x for name, x in true(*given).items()}
    monkeypatch.setattr(native_sparse, "expected_results", wrong)
    mine, *_ = next(native_sparse.measure(problem, native_sparse.parse(_QUICK)))
    assert mine.reason is not None and mine.reason.startswith("wrong: out is wrong") and mine.ms is None


@pytest.mark.slow
def test_both_ways_of_decoding_are_in_one_run():
    options = native_sparse.parse([*_QUICK[:-1], "default,by branch"])
    for problem in native_sparse.TINY:
        names = [row.implementation for row in next(native_sparse.measure(problem, options))]
        assert (native_sparse.BY_BRANCH in names) == (problem.kind != native_sparse.TRAIN)


@pytest.mark.parametrize("problem", native_sparse.TINY[1:], ids=lambda p: p.kind)
def test_by_branch(monkeypatch, problem):
    """The default configuration but for its step."""
    pytest.importorskip("triton")
    from ejkernel_eqx.attention.native_sparse.triton.steps import BY_BRANCH

    ours = native_sparse.ours
    monkeypatch.setattr(native_sparse, "ours", lambda p, _: ours(p, "triton-interpret"))
    config = native_sparse.config_by_branch(problem)
    assert (config.step if problem.kind == native_sparse.PAGES else config.few.step) == BY_BRANCH
