"""Searching in another process, which protects this one from crashes of candidates."""

import contextlib
import dataclasses
import io
import logging
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from types import FunctionType, ModuleType
from typing import Any

from ..._errors import TuningError
from ..ledger import Ledger
from ..threads import attempted
from .events import Failed, Job, Unsound
from .settings import process_settings

_LOG = logging.getLogger("ejkernel_eqx")
WORKER = "ejkernel_eqx.tuning.isolated.worker"
START_LIMIT = 600.0
"""Seconds for steps outside candidates: imports, inputs and reference."""
_FAREWELL = 5.0
"""Seconds to wait for the remaining output of a dead process."""
_LAST_WORDS = 2000


class SetUpFailed(TuningError):
    """The search could not be run in another process; this process is unaffected."""


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | FunctionType) and obj.__module__ == "__main__":
            raise pickle.PicklingError(
                f"{obj.__qualname__} is defined in __main__, which another process cannot import"
            )
        return NotImplemented


def not_isolatable(job: Job) -> str | None:
    """The reason why another process cannot run this search, determined without starting one; `None` if it can."""
    if not sys.executable:
        return "there is no Python interpreter to start"
    error = attempted(lambda: _pickled(job))  # pickling errors are not uniform
    return f"{type(error).__name__}: {error}" if isinstance(error, Exception) else None


def _pickled(job: Job) -> bytes:
    """The pickled job, with modules replaced by their names."""
    implementation, stream = job.implementation, io.BytesIO()
    if isinstance(implementation.target, ModuleType):
        implementation = dataclasses.replace(implementation, target=implementation.target.__name__)
    _Pickler(stream).dump(dataclasses.replace(job, implementation=implementation))
    return stream.getvalue()


def search_isolated(job: Job, ledger: Ledger) -> None:
    """Runs the search in other processes, starting a new one whenever one dies, until it finishes.

    A candidate that kills its process or takes too long is denied. `SetUpFailed` if no candidate is to blame.
    """
    end = time.monotonic() + job.seconds
    one_by_one = False
    while True:
        options = dataclasses.replace(job.options, jobs=1) if one_by_one else job.options
        left = max(0.0, end - time.monotonic())
        ledger.stopped()
        rest = dataclasses.replace(job, known=ledger.measurements, seconds=left, options=options)
        with _Child(rest) as child:
            late = child.follow(ledger, job.options.candidate_timeout)
            if isinstance(ledger.outcome, Failed):
                raise SetUpFailed(f"The search in another process failed: {ledger.outcome.reason}")
            if ledger.outcome is not None and not isinstance(ledger.outcome, Unsound):
                return
            if ledger.outcome is None:
                one_by_one = _blame(ledger, child, late, job.options.candidate_timeout)


def _blame(ledger: Ledger, child: "_Child", late: bool, limit: float) -> bool:
    """Denies the candidate that ended the process; `True` if it may be one of several, which must then run one by one."""
    running = ledger.running()
    if not running:
        ending = f"did not begin within {START_LIMIT:g} s" if late else child.death()
        raise TuningError(
            f"The tuning process {ending}, outside any candidate. {child.last_words()}".rstrip()
        )
    if late:
        for candidate, seconds in running:
            if seconds > limit:
                ledger.deny(candidate, f"did not finish within {limit:g} s")
        return False
    if len(running) > 1:
        return True
    ledger.deny(running[0][0], child.death())
    return False


class _Child:
    """A searching process and its output."""

    def __init__(self, job: Job):
        self._stderr = tempfile.TemporaryFile()
        # -P: the working directory precedes the package only if it does so here.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=_environment(),
            process_group=0,  # its own process group, so that children of candidates end with it
        )
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is already dead, which `follow` will notice
            # The pipe stays open; its end tells the process that this one is gone.
            pickle.dump((process_settings(), _pickled(job)), self._process.stdin)
            self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            while True:
                self._events.put(pickle.load(self._process.stdout))
        except Exception as error:  # of any kind: usually it was killed while writing
            if not isinstance(error, EOFError | OSError):
                _LOG.debug("unreadable output of the tuning process: %s", error)
        finally:
            self._events.put(None)

    def follow(self, ledger: Ledger, limit: float) -> bool:
        """Records the process's events until it has finished or died (`False`), or something takes too long (`True`)."""
        silent_since = time.monotonic()
        while ledger.outcome is None:
            try:
                event = self._events.get(timeout=min(1.0, limit / 4))
            except queue.Empty:
                if self._process.poll() is not None:  # its children hold the pipe open
                    return False
                running = ledger.running()
                if running[0][1] > limit if running else time.monotonic() - silent_since > START_LIMIT:
                    return True
                continue
            if event is None:
                try:
                    self._process.wait(_FAREWELL)
                except subprocess.TimeoutExpired:  # it is alive, but cannot be heard any more
                    self._process.kill()
                    self._process.wait()
                return False
            ledger.take(event)
            silent_since = time.monotonic()
        return False

    def death(self) -> str:
        code = self._process.returncode
        if code is not None and code < 0:
            return f"killed its process: {signal.Signals(-code).name}"
        return f"ended its process with code {code}"

    def last_words(self) -> str:
        self._stderr.seek(0, io.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - _LAST_WORDS))
        text = self._stderr.read().decode(errors="replace").strip()
        return f"Its last words:\n{text}" if text else ""

    def __enter__(self) -> "_Child":
        return self

    def __exit__(self, *_: object) -> None:
        if os.name == "posix":  # its candidates' children hold its pipes open
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        self._reader.join(_FAREWELL)
        if self._reader.is_alive():  # a child of the candidate has left the group and holds the pipe open
            return
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


def _environment() -> dict[str, str]:
    """This process's environment with its import path and platforms, and without preallocation of device memory, which this process uses
    too."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    platforms = process_settings()["jax_platforms"]
    if platforms:
        environment["JAX_PLATFORMS"] = platforms
    return environment
