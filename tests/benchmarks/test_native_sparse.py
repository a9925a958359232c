"""The benchmark of native sparse attention runs, checks before it times, and says how it compares with what is beside it."""

import pytest

from benchmarks import native_sparse

_QUICK = ("--quick", "--samples", "2", "--sample-ms", "0.5", "--platforms", "default")


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
    from ejkernel_eqx.native_sparse.triton.steps import BY_BRANCH

    ours = native_sparse.ours
    monkeypatch.setattr(native_sparse, "ours", lambda p, _: ours(p, "triton-interpret"))
    config = native_sparse.config_by_branch(problem)
    assert (config.step if problem.kind == native_sparse.PAGES else config.few.step) == BY_BRANCH
