"""Turns of processes that share a device: the one that runs something there holds a lock, and lets go of it while it compiles.

The lock is the file that `BENCHMARK_TURNS` names; without one, a process has the device for itself, and nothing happens here.
"""

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import IO

try:
    import fcntl
except ImportError:  # Windows, where no benchmark shares a device
    fcntl = None

VARIABLE = "BENCHMARK_TURNS"


def are_shared() -> bool:
    return fcntl is not None and VARIABLE in os.environ


@functools.cache
def _file() -> IO[str]:
    return open(os.environ[VARIABLE], "w", encoding="utf-8")


def held() -> contextlib.AbstractContextManager[None]:
    """Has the device for itself."""
    return _locked(True)


def released() -> contextlib.AbstractContextManager[None]:
    """Lets others have the device; within `held`."""
    return _locked(False)


@contextlib.contextmanager
def _locked(hold: bool) -> Iterator[None]:
    if not are_shared():
        yield
        return
    _lock(hold)
    try:
        yield
    finally:
        _lock(not hold)


def _lock(hold: bool) -> None:
    assert fcntl is not None
    fcntl.flock(_file(), fcntl.LOCK_EX if hold else fcntl.LOCK_UN)
