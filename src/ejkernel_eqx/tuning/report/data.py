"""The contents of a report for one tuned problem, whether it was tuned in this process or read from a table."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from ...dispatch import Cost, device_facts, Implementation, kernel_registry, Problem, to_dict
from ...dispatch.records import Record
from ..result import Status, TuningResult
from ..search import MARGIN
from .roofline import device_peaks, matrix_dtype, Peaks

LOST = "within the noise: not faster than the winner when whole configurations were timed in turn"
"""Why a candidate that was faster than the winner by itself did not win."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One configuration of one part (empty: the whole). `ms` is `None` if it was not timed, for the reason in `reason`."""

    part: str
    config: Mapping[str, Any]
    status: str
    ms: float | None = None
    spread: float = 0.0
    reason: str = ""
    is_heuristic: bool = False
    is_winner: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        return ("winner",) * self.is_winner + ("heuristic",) * self.is_heuristic


@dataclasses.dataclass(frozen=True)
class Entry:
    """One problem on one platform. `ms` and `heuristic_ms` are by direction; `costs` is empty if unknown."""

    problem: Problem
    platform: str
    config: Mapping[str, Any] | None
    candidates: tuple[Candidate, ...]
    ms: Mapping[str, float]
    heuristic_ms: Mapping[str, float]
    errors: Mapping[str, float]
    costs: Mapping[str, Cost]
    peaks: Peaks | None = None
    date: str = ""
    software: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.problem} on {self.platform}"

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(candidate.part for candidate in self.candidates))

    def ranked(self) -> list[Candidate]:
        """The candidates by part, the fastest first and those without a time last."""

        def rank(candidate: Candidate) -> tuple[int, bool, float]:
            return self.parts.index(candidate.part), candidate.ms is None, candidate.ms or 0.0

        return sorted(self.candidates, key=rank)

    def heuristic_of(self, part: str) -> Candidate | None:
        """The heuristic's choice for a part, if it was timed."""
        found = (c for c in self.candidates if c.part == part and c.is_heuristic and c.ms is not None)
        return next(found, None)

    def to_heuristic(self, candidate: Candidate) -> float | None:
        """The time of a candidate divided by that of the heuristic's choice for its part."""
        base = self.heuristic_of(candidate.part)
        return candidate.ms / base.ms if base is not None and base.ms and candidate.ms else None

    def speed_up(self, direction: str) -> float | None:
        """The time of the heuristic divided by that of the winner."""
        before, after = self.heuristic_ms.get(direction), self.ms.get(direction)
        return before / after if before and after else None


def _part_of(config: Any, part: str) -> Mapping[str, Any] | None:
    """A part of a configuration (or of its dict) in the form of tables; the empty part is the whole."""
    if config is None:
        return None
    whole = to_dict(config) if dataclasses.is_dataclass(config) else config
    value = whole.get(part) if part else whole
    return value if isinstance(value, Mapping) else {part: value}


def describe(config: Any) -> str:
    """A configuration, or its dict, on one line: `block_q=64 num_warps=4 forward(block_q=64)`."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        config = to_dict(config)
    if not isinstance(config, Mapping):
        return "none" if config is None else str(config)
    parts = [
        f"{name}({describe(value)})" if isinstance(value, Mapping) else f"{name}={value}"
        for name, value in config.items()
    ]
    return " ".join(parts) or "(no fields)"


def entry_of_result(result: TuningResult) -> Entry:
    """The entry for a result of this process."""
    found = [
        Candidate(m.part, m.candidate.to_dict(), m.status.value, m.ms, m.spread, m.reason)
        for m in result.measurements
    ]
    record = result.to_record(device_facts())
    return _entry(record, result.implementation, result.heuristic, found, result.heuristic_ms)


def entry_of_record(record: Record) -> Entry:
    """The entry for a record of a table. For an operation that is not registered here, heuristic and cost are unknown."""
    implementation, problem = _registered(record), Problem.from_dict(record.exact)
    heuristic = implementation.hooks.default_config(problem, device_facts()) if implementation else None
    timed = [Candidate(t.part, t.config, Status.TIMED.value, t.ms, t.spread) for t in record.timed]
    denied = [Candidate(d.part, d.config, Status.DENIED.value, reason=d.reason) for d in record.denied]
    return _entry(record, implementation, heuristic, timed + denied, {})


def _entry(
    record: Record,
    implementation: Implementation | None,
    heuristic: Any,
    candidates: Iterable[Candidate],
    heuristic_ms: Mapping[str, float],
) -> Entry:
    problem = Problem.from_dict(record.exact)
    workload = implementation.make_workload(problem) if implementation else None

    def marked(candidate: Candidate) -> Candidate:
        is_heuristic, is_winner = (
            candidate.config == _part_of(config, candidate.part) for config in (heuristic, record.config)
        )
        return dataclasses.replace(candidate, is_heuristic=is_heuristic, is_winner=is_winner)

    return Entry(
        problem,
        record.platform,
        record.config,
        _with_reasons(list(map(marked, candidates))),
        record.ms,
        heuristic_ms,
        record.errors,
        workload.costs if workload else {},
        device_peaks(device_facts(), matrix_dtype(problem)),
        record.date,
        record.software,
    )


def _with_reasons(candidates: list[Candidate]) -> tuple[Candidate, ...]:
    """The candidates; those that were faster than the winner by themselves say why they did not win."""
    winners = {c.part: c.ms for c in candidates if c.is_winner and c.ms is not None}
    denied = [c.reason for c in candidates if not c.part and c.status == Status.DENIED.value]

    def why(candidate: Candidate) -> str:
        limit = winners.get(candidate.part)
        if candidate.reason or candidate.ms is None or limit is None or candidate.ms * MARGIN >= limit:
            return candidate.reason
        return f"denied as a part of the whole: {denied[0]}" if candidate.part and denied else LOST

    return tuple(dataclasses.replace(candidate, reason=why(candidate)) for candidate in candidates)


def _registered(record: Record) -> Implementation | None:
    """The implementation of the record, if it can be used here."""
    if record.operation not in kernel_registry.list_operations():
        return None
    known = kernel_registry.list_implementations(record.operation)
    return next((i for i, reason in known if i.platform.value == record.platform and reason is None), None)
