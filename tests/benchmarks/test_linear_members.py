"""Processes that measure on one device take turns, and their results are joined."""

import dataclasses
import re

import pytest

from benchmarks import linear, linear_members, linear_problems, turns


@pytest.fixture
def is_free(monkeypatch, tmp_path):
    """Whether another process could have the device."""
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setenv(turns.VARIABLE, str(tmp_path / "turn"))
    turns._file.cache_clear()

    def look() -> bool:
        with open(tmp_path / "turn", "w") as other:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    yield look
    turns._file().close()
    turns._file.cache_clear()


def test_who_compiles_lets_others_run(is_free):
    assert is_free()
    with turns.held():
        assert not is_free()
        with turns.released():
            assert is_free()
        assert not is_free()
        with pytest.raises(ValueError), turns.released():
            raise ValueError
        assert not is_free()
    assert is_free()


def test_alone_there_are_no_turns(monkeypatch):
    monkeypatch.delenv(turns.VARIABLE, raising=False)
    with turns.held(), turns.released():
        assert not turns.are_shared()


def test_each_problem_of_many_tokens_has_one_process():
    for problem in linear_problems.ANCHORS + linear_problems.LONG + linear_problems.STEPS:
        found = [
            member
            for member in linear_problems.MEMBERS
            if re.search(linear_members.chosen(member, "T4096|step"), problem.name)
        ]
        assert found == ([problem.member] if problem.T == 4096 else [])


def test_results_are_joined_in_the_order_of_the_problems():
    first, second = linear_problems.ANCHORS[:2]

    def part(*problems):
        rows = [linear.Row(problem.name, "forward", "default", False, ratio=2.0) for problem in problems]
        return {"schema": 1, "rows": [dataclasses.asdict(row) for row in rows], "seconds": 1.0}

    found = linear_members.joined([part(second), part(first)], 3.0)
    assert [row["problem"] for row in found["rows"]] == [first.name, second.name]
    assert found["summary"]["lowest ratio, forward"]["value"] == 2.0 and found["seconds"] == 3.0
