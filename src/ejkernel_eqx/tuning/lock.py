"""Lets one process at a time tune on a device, because several would distort each other's times."""

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any

from .._errors import TuningError
from ..dispatch import device_fingerprint, DeviceFacts
from ..dispatch.files import lock_of
from ..dispatch.persistent import cache_dir

_LOG = logging.getLogger("ejkernel_eqx")
_FIRST, _EVERY = 5.0, 60.0
"""Seconds until the first message to who waits, and between further ones."""


@contextlib.contextmanager
def tuning_lock(device: DeviceFacts, limit: float) -> Iterator[bool]:
    """Held while tuning on a device; yields whether there was a wait. There is no lock if no file can be written. `TuningError` if another
    process holds it for longer than `limit` seconds."""
    import filelock

    path, waited = cache_dir() / device_fingerprint(device) / "tuning.lock", False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = lock_of(path)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            waited = True
            _wait(lock, limit)
    except (OSError, NotImplementedError) as error:
        _LOG.debug("tuning without a lock: %s", error)
        yield waited
        return
    try:
        yield waited
    finally:
        lock.release()


def _wait(lock: Any, limit: float) -> None:
    import filelock

    start, period = time.monotonic(), _FIRST
    while True:
        left = start + limit - time.monotonic()
        try:
            lock.acquire(timeout=max(0.0, min(period, left)), poll_interval=0.1)
            return
        except filelock.Timeout:
            waited = time.monotonic() - start
        if waited >= limit:
            raise TuningError(
                f"Another process has tuned on this device for {waited:.0f} s: it holds {lock.lock_file}. End it, or wait longer with "
                "TuneOptions(lock_timeout=...)."
            )
        _LOG.warning(
            "waiting for another process that tunes on this device, for %.0f of %g s (%s)",
            waited,
            limit,
            lock.lock_file,
        )
        period = _EVERY
