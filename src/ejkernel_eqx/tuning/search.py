"""The search over the candidates of one problem: part by part, coarse then fine, and finally against the heuristic.

It reports everything it finds as events, and may run in this process or in another one. Nothing here writes or logs.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..dispatch import BOTH, no_tuning
from .isolated.events import Event, Finished, Job, Stage, Unsound
from .isolated.settings import undisturbed
from .result import Candidate, part_of, Status, with_part
from .trials import Trial, Trials, UnsoundDevice

MARGIN = 1.01
"""A candidate must be faster than the heuristic by this margin; less is noise."""
FINALISTS = 4
"""The number of candidates per stage, besides the heuristic, that are timed with full samples."""


def search(job: Job, emit: Callable[[Event], None]) -> None:
    """Runs the search and emits its events, `Finished` or `Unsound` last."""
    try:
        # Tuning requested while making inputs would wait for the lock that is held.
        with undisturbed(), no_tuning():
            emit(_Search(job, emit).run())
    except UnsoundDevice as error:
        emit(Unsound(str(error)))


class _Search:
    def __init__(self, job: Job, emit: Callable[[Event], None]):
        self.job, self.trials = job, Trials(job, emit)
        self.end = time.monotonic() + job.seconds

    def run(self) -> Finished:
        best, ranking = self.job.heuristic, []
        for n, stage in enumerate(self.job.stages):
            # Each stage gets its share of the remaining time, after which it starts no new candidates.
            now = time.monotonic()
            share = max(0.0, self.end - now) / (len(self.job.stages) - n)
            self._measure(stage, best, now + share)
            ranking = self._ranking(stage)
            if not ranking:
                return Finished(None)
            if stage.part:
                best = with_part(best, stage.part, ranking[0])
                ranking = [best]
                self.trials.bench.forget()
        previous = self.job.previous
        if previous is not None and ranking[0] == previous.config and previous.ms:
            return previous
        return self._decide(ranking)

    def _measure(self, stage: Stage, best: Any, deadline: float) -> None:
        """Checks and times the new candidates of a stage: all in short samples, the best and the heuristic in full ones."""
        trials, options = self.trials, self.job.options
        names = stage.results or trials.bench.names
        unknown = (candidate for candidate in stage.candidates if candidate.key() not in trials.known)
        fresh = [Trial(candidate, with_part(best, *candidate), names) for candidate in unknown]
        errors = {trial: trials.check([trial]) for trial in trials.compile(fresh, deadline)}
        passed = {trial: trial for trial, result in errors.items() if result is not None}
        coarse = trials.time(passed, 2, options.sample_ms / 3)
        order = sorted(coarse, key=lambda trial: coarse[trial].ms)
        late = [trial for trial in order[FINALISTS:] if trials.is_heuristic(trial.candidate)]
        finalists = {trial: trial for trial in (*order[:FINALISTS], *late)}
        fine = trials.time(finalists, options.samples, options.sample_ms)
        # The device may have become slower or faster since the short samples; candidates that were slower there stay behind.
        drifts = [fine[trial].ms / coarse[trial].ms for trial in order[:FINALISTS] if trial in fine]
        drift = max(drifts, default=1.0)
        for trial in (one for one in order if one in fine or one not in finalists):  # the others raised
            status = Status.TIMED if trial in fine else Status.PASSED
            ms, spread = (
                fine[trial][:2] if trial in fine else (coarse[trial].ms * drift, coarse[trial].spread)
            )
            result = tuple((errors[trial] or {}).items())
            trials.settle(trial.candidate, status, ms=ms, spread=spread, errors=result)

    def _ranking(self, stage: Stage) -> list[Any]:
        """The usable values of a stage, best first; the heuristic's yields only to values that are faster by the margin."""
        trials = self.trials

        def time_of(candidate: Candidate) -> float:
            ms = trials.known[candidate.key()].ms or 0.0
            return ms if trials.is_heuristic(candidate) else ms * MARGIN

        return [candidate.value for candidate in sorted(filter(trials.usable, stage.candidates), key=time_of)]

    def _decide(self, ranking: Sequence[Any]) -> Finished:
        """Checks the best one on all results and other inputs, then times it and the heuristic in turn.

        Where one that was slower by itself wins, the next best ones take part, too.
        """
        job, trials = self.job, self.trials
        contenders: dict[Any, dict[str, float]] = {}
        waiting = list(ranking)
        self._admit_next(waiting, contenders)
        if job.previous is not None:
            self._admit(job.previous.config, contenders)
        parts = [stage.part for stage in job.stages]
        if all(trials.usable(Candidate(part, part_of(job.heuristic, part))) for part in parts):
            self._admit(job.heuristic, contenders)
        while True:
            end = self._compare(contenders)
            waiting = [
                config
                for config in waiting
                if config not in contenders and self._was_faster(config, end.config)
            ]
            if len(contenders) > FINALISTS or not self._admit_next(waiting, contenders):
                return end

    def _was_faster(self, config: Any, winner: Any) -> bool:
        """Tells whether a configuration was faster than the winner when each was timed by itself."""
        known = [self.trials.known.get(Candidate("", one).key()) for one in (config, winner)]
        one, other = (measurement.ms if measurement else None for measurement in known)
        return one is not None and other is not None and one * MARGIN < other

    def _compare(self, contenders: Mapping[Any, Mapping[str, float]]) -> Finished:
        """The fastest of them, timed in turn; the heuristic yields only to what is faster by the margin."""
        job, trials = self.job, self.trials
        directions = trials.bench.directions
        programs = {
            (config, direction): Trial(Candidate("", config), config, names)
            for config in contenders
            for direction, names in directions.items()
        }
        timings = trials.time(programs, job.options.samples, job.options.sample_ms)
        decisive = BOTH if BOTH in directions else next(iter(directions))
        finished = [config for config in contenders if all((config, d) in timings for d in directions)]
        if not finished:
            return Finished(None)

        def time_of(config: Any) -> float:
            return timings[config, decisive].ms * (1.0 if config == job.heuristic else MARGIN)

        winner = min(finished, key=time_of)
        ms = {config: {d: timings[config, d].ms for d in directions} for config in finished}
        spread = {d: timings[winner, d].spread for d in directions}
        return Finished(winner, ms[winner], spread, ms.get(job.heuristic, {}), contenders[winner])

    def _admit_next(self, waiting: list[Any], contenders: dict[Any, dict[str, float]]) -> bool:
        """Adds the first one that may be used; returns whether there is one."""
        while waiting:
            if self._admit(waiting.pop(0), contenders):
                return True
        return False

    def _admit(self, config: Any, contenders: dict[Any, dict[str, float]]) -> bool:
        """Adds a configuration to the contenders if it is correct in every direction and for two seeds."""
        candidate, trials = Candidate("", config), self.trials
        if config in contenders:
            return True
        known = trials.known.get(candidate.key())
        if known is not None and not known.usable:
            return False
        programs = [Trial(candidate, config, names) for names in trials.bench.directions.values()]
        if len(trials.compile(programs, float("inf"))) < len(programs):
            return False
        errors = trials.check(programs, seeds=(0, 1))
        if errors is not None:
            contenders[config] = errors
        return errors is not None
