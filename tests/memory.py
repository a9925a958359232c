"""The configurations that this process remembers."""

import contextlib
from collections.abc import Iterator

from ejkernel_eqx.dispatch import memory_cache


@contextlib.contextmanager
def nothing_in_memory() -> Iterator[None]:
    """What this process knows is put aside for a while."""
    before = dict(memory_cache.items())
    memory_cache.clear()
    yield
    memory_cache.clear()
    for (platform, key), known in before.items():
        memory_cache.put(platform, key, known)
