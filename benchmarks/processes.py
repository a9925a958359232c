"""Processes that share a device take turns on it; and peers in Triton, which compile and tune themselves, do both apart and in less time.

The process that runs something on the device holds a lock, and releases it while it compiles. The lock is the file that `BENCHMARK_TURNS` names;
without one, a process has the device for itself.
"""

import contextlib
import functools
import gc
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, IO

try:
    import fcntl
except ImportError:  # Windows, where no benchmark shares a device
    fcntl = None
try:
    from triton.errors import TritonError
except ImportError:  # Triton has no wheels for this machine
    TritonError = RuntimeError

VARIABLE = "BENCHMARK_TURNS"
FAILURES = (RuntimeError, ValueError, TypeError, AssertionError, MemoryError, TritonError)
"""Errors that an implementation or a candidate of any library may raise for a problem that it does not support."""
_MANY = 12
_EVERY = 1.0  # seconds


# Turns


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


# Several processes for one command


def run_apart(
    commands: Sequence[Sequence[str]], write: Callable[[list[dict[str, Any]], float], None]
) -> list[int]:
    """Runs commands of benchmarks at once, which take turns on the device; `write(parts, seconds)` receives what they have written so far.
    Returns their exit codes."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        environment = {
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false", VARIABLE: str(folder / "turn"), **os.environ
        }  # fmt: skip
        workers = [
            subprocess.Popen([*command, "--json", str(folder / f"{n}.json")], env=environment)
            for n, command in enumerate(commands)
        ]
        running = True
        while running:
            time.sleep(_EVERY)
            running = any(worker.poll() is None for worker in workers)
            known = (json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json")))
            if parts := [part for part in known if part.get("rows")]:
                write(parts, time.monotonic() - start)
    return [worker.returncode for worker in workers]


def compile_apart(command: Sequence[str], count: int, environment: dict[str, str]) -> None:
    """Runs a command in so many processes, each of which compiles its share of what peers tune (`compile_only`) into Triton's cache on disk."""
    start = time.monotonic()
    shares = [
        subprocess.Popen(
            [*command, f"--process={n}", f"--processes={count}"], env={**os.environ, **environment}
        )
        for n in range(count)
    ]
    failed = [n for n, share in enumerate(shares) if share.wait()]
    said = f", but for the shares {failed}" if failed else ""
    print(f"compiled the peers' kernels in {time.monotonic() - start:.0f} s{said}", flush=True)


def this_command(*arguments: str) -> list[str]:
    """The command line of a benchmark, for another process."""
    return [sys.executable, "-m", "benchmarks", *arguments]


# Peers in Triton


def compile_only(process: int, processes: int) -> None:
    """Makes this process's Triton compile every `processes`-th configuration, and launch nothing."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    turns, launch = itertools.count(), JITFunction.run
    tuning = False

    def is_mine() -> bool:
        return next(turns) % processes == process

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        if tuning or is_mine():
            launch(self, *args, **{**kwargs, "warmup": True})

    def tune(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal tuning
        self.nargs = dict(zip(self.arg_names, args))
        self.best_config = self.configs[0]  # some ask for it after the launch
        for config in self.prune_configs(kwargs):
            if is_mine():
                tuning = True
                try:
                    self.fn.run(*args, **kwargs, **config.all_kwargs())
                except FAILURES:  # a configuration that does not fit, which tuning skips too
                    pass
                finally:
                    tuning = False

    JITFunction.run, Autotuner.run = run, tune  # type: ignore[method-assign]


@functools.cache
def tune_briefly() -> None:
    """Makes peers take short samples when they tune themselves and, of a dozen configurations and more, only try those of two or four warps
    and two or three stages."""
    import triton.testing
    from triton.runtime.autotuner import Autotuner

    prune, bench = Autotuner.prune_configs, triton.testing.do_bench

    def fewer(self: Any, kwargs: Any) -> Any:
        every = prune(self, kwargs)
        usual = [c for c in every if c.num_warps in (2, 4) and c.num_stages in (2, 3)]
        return usual or every if len(every) >= _MANY else every

    def briefly(function: Any, *args: Any, warmup: int = 0, rep: int = 0, **kwargs: Any) -> Any:
        return bench(function, *args, warmup=1, rep=5, **kwargs)

    Autotuner.prune_configs = fewer  # type: ignore[method-assign]
    triton.testing.do_bench = briefly


class Later:
    """Tuning that is put off: until `tune`, the first configuration that runs is taken, and afterwards each kernel is tuned when it is called.

    So a program can be compiled while others use the device, and be tuned when it has the device for itself.
    """

    def __init__(self, warmup: int = 5, rep: int = 25):
        """Milliseconds of each configuration that are not timed, and that are."""
        import triton.testing

        self._bench, self._sample = triton.testing.do_bench, {"warmup": warmup, "rep": rep}
        self._timed = False
        triton.testing.do_bench = self._take  # tuners keep what they find there

    def _take(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        if self._timed:
            return self._bench(function, *args, **{**kwargs, **self._sample})
        function()
        return [0.0, 0.0, 0.0]

    def tune(self) -> None:
        from triton.runtime.autotuner import Autotuner

        self._timed = True
        for tuner in gc.get_objects():
            if issubclass(type(tuner), Autotuner):  # isinstance() asks proxies of other packages, too
                tuner.cache.clear()
