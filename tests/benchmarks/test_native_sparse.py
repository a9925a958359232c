"""The benchmark of native sparse attention runs, checks before it times, and says how it compares with what is beside it."""

import pytest

from benchmarks import native_sparse, runner


def test_both_ways_of_decoding_are_in_one_run():
    options = runner.parse(native_sparse.FAMILY, ["--quick", "--platforms", "default,by branch"])
    for problem in native_sparse.PROBLEMS["tiny"]:
        names = [one.name for one in native_sparse.FAMILY.implementations(problem, options, "forward")]
        assert (native_sparse.BY_BRANCH in names) == (problem.kind != native_sparse.TRAIN)


@pytest.mark.parametrize("problem", native_sparse.PROBLEMS["tiny"][1:], ids=lambda p: p.kind)
def test_by_branch(monkeypatch, problem):
    """The default configuration but for its step."""
    pytest.importorskip("triton")
    from ejkernel_eqx.native_sparse.triton.steps import BY_BRANCH

    ours = native_sparse.ours
    monkeypatch.setattr(native_sparse, "ours", lambda p, _: ours(p, "triton-interpret"))
    config = native_sparse.config_by_branch(problem)
    assert (config.step if problem.kind == native_sparse.PAGES else config.few.step) == BY_BRANCH
