"""The environment of processes that tests start: compiling takes as little time there as here."""

import os
import pathlib

_DEVICES = "--xla_force_host_platform_device_count="


def environment(devices: int = 1) -> dict[str, str]:
    """This process's, with so many devices of the CPU."""
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(_DEVICES)]
    return os.environ | {"XLA_FLAGS": " ".join([*flags, f"{_DEVICES}{devices}"])}


def programs() -> dict[str, str]:
    """Variables with which a process reads what those before it have compiled. A folder for each worker, which starts one process at a time:
    none reads what another is writing."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "alone")
    return {
        "JAX_COMPILATION_CACHE_DIR": str(pathlib.Path(os.environ["EJKERNEL_EQX_TESTS_PROGRAMS"]) / worker),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
