import pytest

from ejkernel_eqx import dispatch


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch, tmp_path):
    """No table, no tuner, no policy, whatever this process or machine has; a folder of its own for what is written."""
    before, tuner = dict(dispatch.memory_cache.items()), dispatch.selection._autotuner
    dispatch.memory_cache.clear()
    dispatch.set_autotuner(None)
    monkeypatch.setenv(dispatch.persistent.CACHE_DIR.name, str(tmp_path / "cache"))
    monkeypatch.delenv(dispatch.overlay.POLICY_VARIABLE, raising=False)
    for source in ("shipped_table", "borrowed_table"):
        monkeypatch.setattr(dispatch.snapshot, source, lambda implementation, device: {})
    yield
    dispatch.set_autotuner(tuner)
    dispatch.memory_cache.clear()
    for (platform, key), known in before.items():
        dispatch.memory_cache.put(platform, key, known)
