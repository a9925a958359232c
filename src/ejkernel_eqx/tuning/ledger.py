"""Collects and shows what becomes known about a problem's candidates during a search."""

import logging
import shutil
import sys
import threading
import time
from typing import Any

from .isolated.events import Begun, Ended, Event, Failed, Finished, Job, Measured, Unsound
from .result import Candidate, Measurement, Status

_LOG = logging.getLogger("ejkernel_eqx")


_COLUMNS, _NAME = 80, 32


def _width() -> int:
    """A bar never takes more than `_COLUMNS`, which is what logs and windows have."""
    return min(_COLUMNS, shutil.get_terminal_size((_COLUMNS, 24)).columns - 1)


def shortened(name: str) -> str:
    """A name that leaves room for the bar beside it: its beginning and its end."""
    if len(name) <= _NAME:
        return name
    kept = _NAME - 3
    return f"{name[: kept - kept // 3]}...{name[-(kept // 3) :]}"


class Ledger:
    """Collects the events of one or several searches of the same job. As a context manager, it shows a progress bar.

    `outcome` is the last event of a search.
    """

    def __init__(self, job: Job):
        self._measurements: dict[tuple[str, str], Measurement] = {m.candidate.key(): m for m in job.known}
        every = [candidate.key() for stage in job.stages for candidate in stage.candidates]
        self._order = {key: n for n, key in enumerate(every)}
        self._running: dict[tuple[str, str], list[tuple[Candidate, float]]] = {}
        self._lock = threading.Lock()
        self._job = job
        self._bar: Any = None
        self.outcome: Finished | Unsound | Failed | None = None

    def __enter__(self) -> "Ledger":
        from tqdm import tqdm

        total = len(self._order.keys() - self._measurements.keys())
        # In a file, every update of a bar would be one more line.
        off = not (self._job.options.progress and sys.stderr.isatty())
        self._bar = tqdm(total=total, desc=shortened(self._job.name), disable=off, ncols=_width())
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """All measurements so far, in the order of the candidates."""
        last = len(self._order)
        order = sorted(self._measurements, key=lambda key: self._order.get(key, last))
        return tuple(self._measurements[key] for key in order)

    def running(self) -> list[tuple[Candidate, float]]:
        """The candidates that have begun but not ended a step, with the seconds since, longest first."""
        now = time.monotonic()
        with self._lock:
            results = [(candidate, now - began) for (candidate, began), *_ in self._running.values()]
        return sorted(results, key=lambda entry: -entry[1])

    def stopped(self) -> None:
        """Marks all running candidates as stopped."""
        with self._lock:
            self._running.clear()
            self.outcome = None

    def deny(self, candidate: Candidate, reason: str) -> None:
        self.take(Measured(Measurement(candidate.part, candidate.value, Status.DENIED, reason)))

    def take(self, event: Event) -> None:
        """Records an event; may be called from any thread."""
        with self._lock:
            if isinstance(event, Begun):
                self._running.setdefault(event.candidate.key(), []).append(
                    (event.candidate, time.monotonic())
                )
            elif isinstance(event, Ended):
                self._end(event.candidate)
            elif isinstance(event, Measured):
                self._enter(event.measurement)
            else:
                self.outcome = event

    def _end(self, candidate: Candidate) -> None:
        runs = self._running.get(candidate.key(), [])
        if runs:
            runs.pop(0)
        if not runs:
            self._running.pop(candidate.key(), None)

    def _enter(self, measurement: Measurement) -> None:
        key = measurement.candidate.key()
        self._running.pop(key, None)
        if key not in self._measurements:
            self._bar.update()
        self._measurements[key] = measurement
        if measurement.status in (Status.DENIED, Status.SKIPPED):
            line = f"{measurement.candidate} {measurement.status.value}: {measurement.reason}"
            _LOG.info("%s: %s", self._job.name, line)
            if not self._bar.disable:
                self._bar.write(f"  {line}", file=sys.stderr)
