"""The command that runs all the rest: each part ends alone, and says how."""

import argparse
import json
import pathlib
import sys

import pytest

from benchmarks import __main__ as names
from benchmarks import everything, report, runner, tune


def _python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """Parts of a moment, on a machine without a GPU."""

    def parts(options: argparse.Namespace, gpu: bool) -> dict[str, everything.Part]:
        written = str(options.output / "good.json")
        write = f"import pathlib; pathlib.Path({written!r}).write_text('{{}}'); print('it went well')"
        return {
            "tests": everything.Part([_python("")], skipped=None if gpu else "needs a GPU"),
            "good": everything.Part([_python("pass"), _python(write)], ["good.json"]),
            "bad": everything.Part(
                [_python("raise SystemExit('no such thing')"), _python("print(1)")], ["bad.json"]
            ),
            "none": everything.Part([_python("raise SystemExit(5)")], ends_well=(0, 5)),
        }

    monkeypatch.setattr(everything, "parts", parts)
    monkeypatch.setattr(everything, "environment", report.environment)
    return tmp_path / "out"


def test_one_part_fails_alone(fake, capsys):
    assert everything.main(["--output", str(fake), "--commit", "abc"]) == 1
    content = json.loads((fake / "everything.json").read_text())
    assert content["environment"]["commit"] == "abc" and content["environment"]["device"]
    found = content["parts"]
    assert [*found] == ["tests", "good", "bad", "none"]
    assert found["tests"]["exit_code"] is None and found["tests"]["reason"] == "skipped: needs a GPU"
    assert found["good"]["exit_code"] == 0 and found["good"]["files"] == ["good.json"]
    assert found["good"]["said"] == ["", "it went well"] and found["good"]["seconds"] > 0
    assert found["bad"]["exit_code"] == 1 and found["bad"]["files"] == []
    assert found["bad"]["said"] == ["no such thing", "1"]  # the second command ran all the same
    assert found["none"]["exit_code"] == 0 and not found["none"]["failed"]
    said = capsys.readouterr().out
    assert "4/4] none: done" in said and "bad: exit code 1 after" in said and "no such thing" in said
    assert "it went well" in (fake / "everything.log").read_text()
    assert {path.name for path in fake.iterdir()} == {"everything.json", "everything.log", "good.json"}


def test_other_parts_stay_in_the_folder(fake):
    for name in ("none", "tests"):
        assert everything.main(["--output", str(fake), "--parts", name, "--commit", name]) == 0
    found = json.loads((fake / "everything.json").read_text())["parts"]
    assert {name: part["commit"] for name, part in found.items()} == {"none": "none", "tests": "tests"}


def test_no_time_is_left(fake, capsys):
    assert everything.main(["--output", str(fake), "--parts", "good,bad", "--time-limit", "0"]) == 1
    found = json.loads((fake / "everything.json").read_text())["parts"]
    assert found["good"]["reason"] == "no time left for 2 of 2 commands" and found["good"]["failed"]
    assert "good, 0 s at most" in capsys.readouterr().out


def test_what_overruns_is_stopped(monkeypatch, tmp_path):
    """With its children, whatever they do about it; what was to come after it is not begun."""
    monkeypatch.setattr(everything, "GRACE", 0.5)
    deaf = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {deaf!r}])"
    part = everything.Part([_python(parent), _python("print('after')")])
    result = everything.run_part(part, tmp_path / "log", 1.0, {})
    assert result["failed"] and result["reason"].startswith("stopped after")
    assert result["exit_code"] not in (None, 0) and len(result["said"]) == 1
    assert "after" not in (tmp_path / "log").read_text().splitlines()


def test_what_ends_well_in_its_last_moment_is_done(monkeypatch, tmp_path):
    ended = {"a": everything.Ended(0, True, "wrote it"), "b": everything.Ended(-2, True, "")}
    monkeypatch.setattr(everything, "run_command", lambda command, *given: ended[command[0]])
    assert not everything.run_part(everything.Part([["a"]]), tmp_path, 1.0, {})["failed"]
    both = everything.run_part(everything.Part([["a"], ["b"]]), tmp_path, 1.0, {})
    assert both["failed"] and both["exit_code"] == -2 and both["said"] == ["wrote it", ""]


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("more", [[], ["--quick", "--commit", "abc"]], ids=["full", "quick"])
def test_every_part_has_its_command(gpu, more, tmp_path):
    options = everything.parse(["--output", str(tmp_path), *more])
    parts = everything.parts(options, gpu)
    assert [*parts] == options.parts and parts["tests"].skipped == (None if gpu else "needs a GPU")
    assert {f"tune-{family}" for family in tune.FAMILIES} < set(parts)
    anywhere = {name for name, part in parts.items() if part.skipped is None}
    if not gpu:
        assert anywhere == (set(parts) - {"tests"} if more else set(names.FAMILIES))
    for name, part in parts.items():
        for command in part.commands:
            if name == "tests":
                assert (report.ROOT / command[-1]).is_file()
                continue
            limit = ["--time-limit", "10"] if part.is_limited else []
            script, *rest = command[3:]
            if script in names.FAMILIES:
                given = runner.parse(names.family(script), [*rest, *limit])
            else:
                given = names.module(script).parse([*rest, *limit])
            assert given.quick == bool(more) and given.commit == options.commit
            assert pathlib.Path(given.json) == tmp_path / part.files[0]


def test_only_parts_that_there_are(capsys):
    with pytest.raises(SystemExit):
        everything.parse(["--output", "out", "--parts", "decode,nothing"])
    assert "received nothing" in capsys.readouterr().err
