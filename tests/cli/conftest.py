import json

import pytest

from tests.cli.parts import CACHE_DIR, main, memory_cache, POLICY_VARIABLE


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A cache folder of the test's own, and nothing known beforehand or left behind."""
    before = dict(memory_cache.items())
    monkeypatch.setenv(CACHE_DIR.name, str(tmp_path / "cache"))
    monkeypatch.delenv(POLICY_VARIABLE, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    yield tmp_path / "cache"
    memory_cache.clear()
    for (platform, key), known in before.items():
        memory_cache.put(platform, key, known)


@pytest.fixture
def run(capsys):
    """Runs a command: its exit code and what it printed, on standard output and on standard error."""

    def call(*arguments):
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def run_json(run):
    """Runs a command with `--json`: its exit code and its document, the only thing on standard output."""

    def call(*arguments):
        code, out, _ = run(*arguments, "--json")
        return code, json.loads(out)

    return call
