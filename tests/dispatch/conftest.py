import pytest

from ejkernel_eqx.dispatch import caches, memory_cache, set_autotuner
from ejkernel_eqx.dispatch.overlay import POLICY_VARIABLE


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    """No table, no tuner, no policy, whatever this process or machine has."""
    before = dict(memory_cache.items())
    memory_cache.clear()
    monkeypatch.setattr(caches, "PERSISTENT_SOURCES", [])
    monkeypatch.delenv(POLICY_VARIABLE, raising=False)
    yield
    set_autotuner(None)
    memory_cache.clear()
    for (platform, key), config in before.items():
        memory_cache.put(platform, key, config)
