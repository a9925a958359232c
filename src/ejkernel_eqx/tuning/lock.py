"""Lets one process at a time tune on a device, because several would distort each other's times."""

import contextlib
import logging
from collections.abc import Iterator

from ..dispatch import device_fingerprint, DeviceFacts
from ..dispatch.persistent import cache_dir

_LOG = logging.getLogger("ejkernel_eqx")


@contextlib.contextmanager
def tuning_lock(device: DeviceFacts) -> Iterator[bool]:
    """Held while tuning on a device; yields whether there was a wait. There is no lock if no file can be written."""
    import filelock

    path = cache_dir() / device_fingerprint(device) / "tuning.lock"
    lock, waited = filelock.FileLock(path), False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            _LOG.info("waiting for another process that tunes on this device (%s)", path)
            waited = True
            lock.acquire()
    except (OSError, NotImplementedError) as error:
        _LOG.debug("tuning without a lock: %s", error)
        yield waited
        return
    try:
        yield waited
    finally:
        lock.release()
