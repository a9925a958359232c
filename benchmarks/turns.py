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


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Has the device for itself."""
    if not are_shared():
        yield
        return
    _lock(True)
    try:
        yield
    finally:
        _lock(False)


@contextlib.contextmanager
def released() -> Iterator[None]:
    """Lets others have the device; within `held`."""
    if not are_shared():
        yield
        return
    _lock(False)
    try:
        yield
    finally:
        _lock(True)


def _lock(hold: bool) -> None:
    assert fcntl is not None
    fcntl.flock(_file(), fcntl.LOCK_EX if hold else fcntl.LOCK_UN)
