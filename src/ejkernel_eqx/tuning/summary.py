"""Summarises a request to tune in a few lines."""

import dataclasses
import logging
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from ..dispatch import BOTH, device_facts, FORWARD, user_cache
from .result import TuningResult

_LOG = logging.getLogger("ejkernel_eqx")
_SHOWN = 3


@dataclasses.dataclass(frozen=True)
class Summary:
    """Counts of distinct problems by what became of them, the best speed-ups over the heuristic, and where all is kept.

    `only`: problems with one configuration, which is not timed and is in no table.
    """

    problems: int
    tuned: int
    known: int
    only: int
    failed: int
    seconds: float
    speed_ups: tuple[tuple[str, float], ...] = ()
    kept: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, results: Iterable[TuningResult], *, problems: int, only: int, failed: int, seconds: float
    ) -> "Summary":
        """Sums up results; a problem with a choice that neither has a result nor failed was known."""
        new = [result for result in results if not result.cached]
        faster = [(f"{result.problem} on {result.platform.value}", speed_up(result)) for result in new]
        best = sorted(((name, times) for name, times in faster if times > 1.0), key=lambda entry: -entry[1])
        known = problems - len(new) - only - failed
        return cls(problems, len(new), known, only, failed, seconds, tuple(best), _kept(new))

    def lines(self) -> list[str]:
        what = "problem" if self.problems == 1 else "problems"
        counts = f"{self.tuned} tuned, {self.known} known from tables, {self.failed} failed"
        counts += f", {self.only} with only one configuration" if self.only else ""
        lines = [f"{self.problems} distinct {what}: {counts}, in {self.seconds:.1f} s"]
        lines.extend(
            f"{times:.2f} times as fast as the heuristic: {name}" for name, times in self.speed_ups[:_SHOWN]
        )
        more = len(self.speed_ups) - _SHOWN
        lines.extend([f"and {more} more that are faster than the heuristic"] if more > 0 else [])
        slower = self.tuned - len(self.speed_ups)
        lines.extend([f"the heuristic was the fastest of {slower} tuned"] if slower > 0 else [])
        lines.extend(self.kept)
        return lines

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"speed_ups": dict(self.speed_ups), "kept": list(self.kept)}

    def tell(self, name: str, shown: bool) -> None:
        """Logs it. If the log is not shown and progress is `shown`, prints it there."""
        first, *others = self.lines()
        text = "\n".join([f"{name}: {first}", *(f"  {line}" for line in others)])
        if _LOG.isEnabledFor(logging.INFO):
            _LOG.info("%s", text)
        elif shown and self.problems:
            print(text, file=sys.stderr, flush=True)


def speed_up(result: TuningResult) -> float:
    """Computes the speed over the heuristic's, forward and backward together where both are known; 1 where nothing was compared."""
    for direction in (BOTH, FORWARD):
        if direction in result.ms and direction in result.heuristic_ms:
            return result.heuristic_ms[direction] / result.ms[direction]
    return 1.0


def _kept(results: Sequence[TuningResult]) -> tuple[str, ...]:
    """Says where the results lie, or that nothing can be written there."""
    device = device_facts()
    lines: dict[str, None] = {}
    for result in results:
        path = user_cache(device, result.implementation.core).path
        where = (
            f"kept in {path}" if path.exists() else f"known to this process only: {path} cannot be written"
        )
        lines[where] = None
    return tuple(lines)
