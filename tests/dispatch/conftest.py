import pytest

from ejkernel_eqx.dispatch import memory_cache, selection, set_autotuner, snapshot
from ejkernel_eqx.dispatch.overlay import POLICY_VARIABLE
from ejkernel_eqx.dispatch.persistent import CACHE_DIR


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch, tmp_path):
    """No table, no tuner, no policy, whatever this process or machine has; a folder of its own for what is written."""
    before, tuner = dict(memory_cache.items()), selection._autotuner
    memory_cache.clear()
    set_autotuner(None)
    monkeypatch.setenv(CACHE_DIR.name, str(tmp_path / "cache"))
    monkeypatch.delenv(POLICY_VARIABLE, raising=False)
    for source in ("shipped_entries", "borrowed_entries"):
        monkeypatch.setattr(snapshot, source, lambda implementation, device: ())
    yield
    set_autotuner(tuner)
    memory_cache.clear()
    for (platform, key), known in before.items():
        memory_cache.put(platform, key, known)
