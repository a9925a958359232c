"""Several processes share one GPU: what one of them no longer needs is there for the others."""

import contextlib
import gc
import os
import pathlib
import tempfile

import pytest

from ejkernel_eqx.dispatch import device_facts, kernel_registry

# JAX's own allocator keeps what a process has once had. With several processes, memory goes back to the device at once: slower, which
# tests that take the time do not want, so they run in one process (`-n 0`). This is read when the first backend starts, after all imports.
if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
    os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")


_CASES = 4
_HERE = pathlib.Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before `few` is looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test of this folder is `few(4)`: all of them take half an hour on 16 processors, most of it compiling."""
    for item in items:
        if _HERE in item.path.parents and hasattr(item, "callspec") and not item.get_closest_marker("few"):
            item.add_marker(pytest.mark.few(_CASES))


@pytest.fixture(scope="module", autouse=True)
def _usable(request):
    """A module that names the operation whose Triton kernels it tests, `NEEDS`, is skipped where they cannot run."""
    operation = getattr(request.module, "NEEDS", None)
    reason = operation and kernel_registry.get(operation, "triton").unusable(device_facts())
    if reason is not None:
        pytest.skip(f"platform triton is not usable here: {reason}")


@pytest.fixture
def most_of_the_memory():
    """The test takes tens of gigabytes: only one such test at a time, over all processes."""
    path = pathlib.Path(tempfile.gettempdir(), f"ejkernel_eqx-gpu-{os.getuid()}.lock")
    with path.open("w") as file, _locked(file):
        yield
        gc.collect()


@contextlib.contextmanager
def _locked(file):
    import fcntl  # not on Windows

    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)
