"""Processes that measure on one device take turns, and their results are joined."""

import pytest

from benchmarks import linear, prepare, processes, runner


@pytest.fixture
def is_free(monkeypatch, tmp_path):
    """Whether another process could have the device."""
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setenv(processes.VARIABLE, str(tmp_path / "turn"))
    processes._file.cache_clear()

    def look() -> bool:
        with open(tmp_path / "turn", "w") as other:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    yield look
    processes._file().close()
    processes._file.cache_clear()


def test_who_compiles_lets_others_run(is_free):
    assert is_free()
    with processes.held():
        assert not is_free()
        with processes.released():
            assert is_free()
        assert not is_free()
        with pytest.raises(ValueError), processes.released():
            raise ValueError
        assert not is_free()
    assert is_free()


def test_alone_there_are_no_turns(monkeypatch):
    monkeypatch.delenv(processes.VARIABLE, raising=False)
    with processes.held(), processes.released():
        assert not processes.are_shared()


def test_each_member_has_one_process(monkeypatch, tmp_path):
    commands = []
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # is set
    monkeypatch.setattr(
        processes, "run_apart", lambda given, write: commands.extend(given) or [0] * len(given)
    )
    assert runner.main(linear.FAMILY, ["--quick", "--apart", "--problems", "GLA|KDA", "--samples", "3"]) == 0
    chosen = [command[-3] for command in commands]
    assert chosen == [
        r"^(GLA\ B2\ T48\ H2\ D8\ float32|GLA\ step\ B2\ H2\ D8\ float32)$",
        r"^(KDA\ B2\ T48\ H2\ D8\ float32)$",
    ]
    assert all("--apart" not in command and "--samples" in command for command in commands)


def test_results_are_joined_in_the_order_of_the_problems():
    first, second = linear.PROBLEMS["anchors"][:2]

    def part(*problems):
        rows = [prepare.Row(p.name, "forward", "default", ratio=2.0, numbers={"bytes": 3}) for p in problems]
        return {"schema": 1, "rows": [row.to_json() for row in rows], "seconds": 1.0}

    result = runner.joined(linear.FAMILY, [first, second], [part(second), part(first)], 3.0)
    assert [row["problem"] for row in result["rows"]] == [first.name, second.name]
    assert result["summary"]["lowest ratio, forward"]["value"] == 2.0 and result["seconds"] == 3.0
    assert result["rows"][0]["bytes"] == 3
