"""The contents of a report for one tuned problem, whether it was tuned in this process or read from a table."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ...dispatch import Cost, device_facts, kernel_registry, Problem, to_dict
from ...dispatch.records import Record
from ..result import Status, TuningResult
from ..roofline import device_peaks, matrix_dtype, Peaks
from ..search import MARGIN

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
    """One problem on one platform: its record, and what it is compared with. `costs` is empty if unknown."""

    record: Record
    problem: Problem
    candidates: tuple[Candidate, ...]
    heuristic_ms: Mapping[str, float]
    costs: Mapping[str, Cost]
    peaks: Peaks | None

    @property
    def title(self) -> str:
        return f"{self.problem} on {self.record.platform}"

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(candidate.part for candidate in self.candidates))

    def ranked(self) -> list[Candidate]:
        """The candidates by part, the fastest first and those without a time last."""
        return sorted(self.candidates, key=lambda c: (self.parts.index(c.part), c.ms is None, c.ms or 0.0))

    def timed(self, part: str, mark: str) -> Candidate | None:
        """The `"heuristic"` or `"winner"` of a part, if it was timed."""
        return next((c for c in self.candidates if c.part == part and mark in c.marks and c.ms), None)

    def to_heuristic(self, candidate: Candidate) -> float | None:
        """The time of a candidate divided by that of the heuristic's choice for its part."""
        base = self.timed(candidate.part, "heuristic")
        return candidate.ms / base.ms if base and base.ms and candidate.ms else None

    def speed_up(self, direction: str) -> float | None:
        """The time of the heuristic divided by that of the winner."""
        before, after = self.heuristic_ms.get(direction), self.record.ms.get(direction)
        return before / after if before and after else None


def describe(config: Any) -> str:
    """A configuration, or its dict, on one line: `block_q=64 num_warps=4 forward(block_q=64)`."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        config = to_dict(config)
    if not isinstance(config, Mapping):
        return "none" if config is None else str(config)
    inner = lambda name, x: f"{name}({describe(x)})" if isinstance(x, Mapping) else f"{name}={x}"
    return " ".join(inner(*item) for item in config.items()) or "(no fields)"


def entry_of_result(result: TuningResult) -> Entry:
    """The entry for a result of this process."""
    of = lambda m: Candidate(m.part, m.candidate.to_dict(), m.status.value, m.ms, m.spread, m.reason)
    candidates = list(map(of, result.measurements))
    known = result.to_record(device_facts()), result.implementation, result.heuristic
    return _entry(*known, candidates, result.heuristic_ms)


def entry_of_record(record: Record) -> Entry:
    """The entry for a record of a table. For an operation that is not registered here, heuristic and cost are unknown."""
    known = record.operation in kernel_registry.list_operations()
    usable = kernel_registry.list_implementations(record.operation) if known else ()
    same = [i for i, reason in usable if i.platform.value == record.platform and reason is None]
    problem = Problem.from_dict(record.exact)
    heuristic = same[0].hooks.default_config(problem, device_facts()) if same else None
    timed = [Candidate(t.part, t.config, Status.TIMED.value, t.ms, t.spread) for t in record.timed]
    denied = [Candidate(d.part, d.config, Status.DENIED.value, reason=d.reason) for d in record.denied]
    return _entry(record, same[0] if same else None, heuristic, timed + denied, {})


def _entry(
    record: Record, implementation: Any, heuristic: Any, candidates: list[Candidate], ms: Mapping[str, float]
) -> Entry:
    """The entry, with the times of the heuristic. A candidate that was faster than the winner by itself says why it did not win."""
    problem, configs = Problem.from_dict(record.exact), (heuristic, record.config)
    workload = implementation.make_workload(problem) if implementation else None
    marked = []
    for c in candidates:
        is_heuristic, is_winner = (c.config == _part_of(config, c.part) for config in configs)
        marked.append(dataclasses.replace(c, is_heuristic=is_heuristic, is_winner=is_winner))
    winners = {c.part: c.ms for c in marked if c.is_winner and c.ms is not None}
    denied = [c.reason for c in marked if not c.part and c.status == Status.DENIED.value]
    for n, c in enumerate(marked):
        if not c.reason and c.ms is not None and c.ms * MARGIN < winners.get(c.part, 0.0):
            why = f"denied as a part of the whole: {denied[0]}" if c.part and denied else LOST
            marked[n] = dataclasses.replace(c, reason=why)
    peaks = device_peaks(device_facts(), matrix_dtype(problem))
    return Entry(record, problem, tuple(marked), ms, workload.costs if workload else {}, peaks)


def _part_of(config: Any, part: str) -> Mapping[str, Any] | None:
    """A part of a configuration (or of its dict) in the form of tables; the empty part is the whole."""
    if config is None:
        return None
    whole = to_dict(config) if dataclasses.is_dataclass(config) else config
    value = whole.get(part) if part else whole
    return value if isinstance(value, Mapping) else {part: value}
