"""The environment of processes that tests start: compiling takes as little time there as here."""

import os
import pathlib

_DEVICES = "--xla_force_host_platform_device_count="


def environment(devices: int = 1) -> dict[str, str]:
    """This process's, with so many devices of the CPU. What one process compiles, those after it read; each worker starts one at a time, so
    none reads what another is writing."""
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(_DEVICES)]
    worker = os.environ.get("PYTEST_XDIST_WORKER", "alone")
    return os.environ | {
        "XLA_FLAGS": " ".join([*flags, f"{_DEVICES}{devices}"]),
        "JAX_COMPILATION_CACHE_DIR": str(pathlib.Path(os.environ["EJKERNEL_EQX_TESTS_PROGRAMS"]) / worker),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
