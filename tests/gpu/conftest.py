"""Several processes share one GPU: what one of them no longer needs is there for the others."""

import contextlib
import functools
import gc
import os
import pathlib
import subprocess
import tempfile

import pytest

from ejkernel_eqx.dispatch import device_facts, kernel_registry

# JAX's own allocator keeps what a process has once had. With several processes, memory goes back to the device at once: slower, which
# tests that take the time do not want, so they run in one process (`-n 0`). This is read when the first backend starts, after all imports.
_SHARED = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1
if _SHARED:
    os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")


_CASES = 4
# Gigabytes that many processes with small tests take together: most of it is kept by the driver for each.
_OTHERS = 25
_HERE = pathlib.Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before `few` is looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test of this folder is `few(4)`: all of them take half an hour on 16 processors, most of it compiling. The dearest tests, which compile
    many configurations, come first, so that none of them is left at the end."""
    here = {path for path in {item.path for item in items} if _HERE in path.parents}
    for item in items:
        if item.path in here and hasattr(item, "callspec") and not item.get_closest_marker("few"):
            item.add_marker(pytest.mark.few(_CASES))
    items.sort(key=lambda item: not ("every_candidate" in item.name and item.path in here))


@pytest.fixture(scope="module", autouse=True)
def _usable(request):
    """A module that names the operation whose Triton kernels it tests, `NEEDS`, is skipped where they cannot run."""
    operation = getattr(request.module, "NEEDS", None)
    reason = operation and kernel_registry.get(operation, "triton").unusable(device_facts())
    if reason is not None:
        pytest.skip(f"platform triton is not usable here: {reason}")


@pytest.fixture(autouse=True)
def _memory(request):
    """A test marked `memory(n)` takes up to n gigabytes: only one such test at a time, over all processes, and only where it leaves enough for
    the other processes."""
    marker = request.node.get_closest_marker("memory")
    if marker is None:
        yield
        return
    (needed,) = marker.args
    if _SHARED and _total_memory() < needed + _OTHERS:
        pytest.skip(f"takes {needed} GB, too much beside other tests on this card; run it with `-n 0`")
    path = pathlib.Path(tempfile.gettempdir(), f"ejkernel_eqx-gpu-{os.getuid()}.lock")
    with path.open("w") as file, _locked(file):
        yield
        gc.collect()


@functools.cache
def _total_memory() -> float:
    """Gigabytes of the first GPU. The driver is asked: JAX does not know where it keeps no memory for itself."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    return (
        int(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]) * 2**20 / 1e9
    )


@contextlib.contextmanager
def _locked(file):
    import fcntl  # not on Windows

    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)
