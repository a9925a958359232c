"""Compiles, checks and times candidates, and records the outcome of each."""

import functools
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from ..launch import collector_paused
from . import measure
from .bench import Bench, device_works, failure, Names, Refusal
from .filters import refusal
from .isolated.events import Begun, Ended, Event, Job, Measured
from .isolated.settings import applied, thread_settings, undisturbed
from .measure import Timing
from .result import Candidate, Measurement, part_of, Status
from .threads import attempted, in_threads

BUDGET = "time budget"
K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
R = TypeVar("R")


class UnsoundDevice(Exception):
    """The device is no longer usable for this process."""


class _TimingFailed(Exception):
    """A candidate raised while it was timed; the cause is its exception."""

    def __init__(self, candidate: Candidate):
        super().__init__(str(candidate))
        self.candidate = candidate


class Trial(NamedTuple):
    """A whole configuration that is run for a candidate, and the results that are computed."""

    candidate: Candidate
    config: Any
    names: Names


class _Watched:
    """Work that announces its beginning, so that the candidate is known if the process dies."""

    def __init__(self, work: measure.JaxWork, candidate: Candidate, emit: Callable[[Event], None]):
        self.work, self.candidate, self.emit = work, candidate, emit

    def sample(self, launches: int) -> float:
        self.emit(Begun(self.candidate, "time"))
        seconds = attempted(lambda: self.work.sample(launches))
        if isinstance(seconds, Exception):
            raise _TimingFailed(self.candidate) from seconds
        self.emit(Ended(self.candidate))
        return seconds


class Trials:
    """Compiles, checks and times candidates. Failed candidates are recorded, omitted from results, and never tried again."""

    def __init__(self, job: Job, emit: Callable[[Event], None]):
        workload = job.implementation.make_workload(job.problem)
        assert workload is not None, job.name
        self.job, self.emit, self.bench = job, emit, Bench(job.name, workload)
        self.known: dict[tuple[str, str], Measurement] = {m.candidate.key(): m for m in job.known}

    def settle(self, candidate: Candidate, status: Status, reason: str = "", **found: Any) -> None:
        measurement = Measurement(candidate.part, candidate.value, status, reason, **found)
        self.known[candidate.key()] = measurement
        self.emit(Measured(measurement))

    def usable(self, candidate: Candidate) -> bool:
        """Tells whether the candidate was checked and timed, now or before."""
        measurement = self.known.get(candidate.key())
        return measurement is not None and measurement.usable and measurement.ms is not None

    def is_heuristic(self, candidate: Candidate) -> bool:
        return candidate.value == part_of(self.job.heuristic, candidate.part)

    def compile(self, trials: Sequence[Trial], deadline: float) -> list[Trial]:
        """The trials that compile. After the deadline only compilations in progress and the heuristic are finished."""

        def one(trial: Trial) -> Refusal | None:
            if time.monotonic() > deadline and not self.is_heuristic(trial.candidate):
                return Status.SKIPPED, BUDGET
            return self._compile(trial)

        compiled = []
        for trial, refused in zip(trials, self._in_threads(one, trials), strict=True):
            if refused is None:
                compiled.append(trial)
            else:
                self.settle(trial.candidate, *refused)
        return compiled

    def _in_threads(self, function: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Runs the first item alone, since the first compilation loads shared libraries."""
        settings = thread_settings()

        def one(item: T) -> R:
            with applied(settings), undisturbed():
                return function(item)

        with collector_paused:
            first = [function(item) for item in items[:1]]
            return first + in_threads(one, items[1:], self.job.options.workers)

    def _compile(self, trial: Trial) -> Refusal | None:
        candidate = trial.candidate
        self.emit(Begun(candidate, "compile"))

        def compiled() -> Refusal | None:
            refused = refusal(candidate, trial.config, self.job, self.bench.workload)
            if refused is None:
                self.bench.program(trial.config, trial.names)
            return refused

        refused = attempted(compiled)
        self.emit(Ended(candidate))
        return failure(refused) if isinstance(refused, Exception) else refused

    def check(self, trials: Iterable[Trial], seeds: Iterable[int] = (0,)) -> dict[str, float] | None:
        """The largest error of each result over the programs of one candidate and input seeds; `None` if it must not be used."""
        largest: dict[str, float] = {}
        seeds = tuple(seeds)
        for seed in seeds:  # failures here are not the candidate's fault
            self.bench.expected(seed)
        for trial in trials:
            candidate = trial.candidate
            self.emit(Begun(candidate, "run"))
            for seed in seeds:
                verified = attempted(functools.partial(self._verify, trial, seed))
                if isinstance(verified, Exception):
                    self._fail(candidate, verified)
                    return None
                errors, reason = verified
                for name, error in errors.items():
                    largest[name] = max(error, largest.get(name, 0.0))
                if reason is not None:
                    self.settle(candidate, Status.DENIED, reason, errors=tuple(errors.items()))
                    return None
            self.emit(Ended(candidate))
        return largest

    def _verify(self, trial: Trial, seed: int) -> tuple[dict[str, float], str | None]:
        return self.bench.verify(self.bench.program(trial.config, trial.names), seed)

    def _fail(self, candidate: Candidate, error: BaseException | None) -> None:
        status, reason = failure(error)
        self.settle(candidate, status, reason)
        if not device_works():
            raise UnsoundDevice(f"{candidate}: {reason}")

    def time(self, trials: Mapping[K, Trial], samples: int, sample_ms: int | float) -> dict[K, Timing]:
        """Timings measured in turn. Work as short as its launch is run several times per launch."""

        def taken(runs: Mapping[K, int]) -> dict[K, Timing]:
            works = self._works(trials, runs)
            while works:
                try:
                    return measure.time_in_turn(works, samples, sample_ms)
                except _TimingFailed as error:
                    self._fail(error.candidate, error.__cause__)
                    works = {key: work for key, work in works.items() if work.candidate != error.candidate}
            return {}

        return measure.time_runs(taken, trials, lambda _: self.bench.floor())

    def _works(self, trials: Mapping[K, Trial], runs: Mapping[K, int]) -> dict[K, _Watched]:
        def one(key: K) -> _Watched | Exception:
            trial = trials[key]
            self.emit(Begun(trial.candidate, "compile"))
            program = attempted(lambda: self.bench.program(trial.config, trial.names, runs[key]))
            if isinstance(program, Exception):
                return program
            self.emit(Ended(trial.candidate))
            return _Watched(measure.JaxWork(program, self.bench.input_sets), trial.candidate, self.emit)

        works = {}
        for key, work in zip(runs, self._in_threads(one, list(runs)), strict=True):
            if isinstance(work, _Watched):
                works[key] = work
            else:
                self._fail(trials[key].candidate, work)
        return works
