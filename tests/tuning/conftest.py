import pytest

import ejkernel_eqx as ejx
from tests.memory import nothing_in_memory
from tests.tuning.scaling import SLOW_VARIABLE


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch, tmp_path):
    """A folder of its own for tables, and nothing known or recorded."""
    monkeypatch.setenv("EJKERNEL_EQX_CACHE_DIR", str(tmp_path / "cache"))
    with nothing_in_memory():
        yield
    ejx.clear_invocations()


@pytest.fixture
def second_wins(monkeypatch):
    """Of `scaling`, the second configuration is the faster one."""
    monkeypatch.setenv(SLOW_VARIABLE, "1")
