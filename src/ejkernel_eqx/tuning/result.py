"""The result of tuning one problem."""

import dataclasses
import datetime
import enum
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..dispatch import DeviceFacts, Implementation, Platform, Problem, stable_json, to_dict
from ..dispatch.persistent import made_with
from ..dispatch.records import Denied, Record, Timed

SPILLS = "spills "
"""The beginning of the reason for skipping a candidate because of spills, the only reason for skipping that always recurs."""


class Status(enum.StrEnum):
    TIMED = "timed"
    """Checked, and timed with full samples."""
    PASSED = "passed"
    """Checked, but too slow in short samples to be timed with full ones; its time is from the short samples."""
    DENIED = "denied"
    """Must not be used; the reason is stored."""
    SKIPPED = "skipped"
    """Not tried, or not completely, for a reason that does not count against it."""


class Candidate(NamedTuple):
    """A value for one part (a field) of the configuration; `part` is empty for a whole configuration."""

    part: str
    value: Any

    def to_dict(self) -> dict[str, Any]:
        """The value's fields; a plain value under the name of its field."""
        return to_dict(self.value) if dataclasses.is_dataclass(self.value) else {self.part: self.value}

    def key(self) -> tuple[str, str]:
        """Equal for equal candidates, even if one of them was read from a file."""
        return self.part, stable_json(self.to_dict())

    def __str__(self) -> str:
        fields = ", ".join(f"{name} {value}" for name, value in self.to_dict().items())
        return f"{self.part}: {fields}" if self.part and dataclasses.is_dataclass(self.value) else fields


def part_of(config: Any, part: str) -> Any:
    """The value of a part of a configuration; the empty part is the whole."""
    return getattr(config, part) if part else config


def with_part(config: Any, part: str, value: Any) -> Any:
    """The configuration with another value for a part."""
    return dataclasses.replace(config, **{part: value}) if part else value


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Knowledge about a candidate. `config` is the part's value, or the whole configuration if `part` is empty.

    `errors` are relative RMS errors by result. `known`: taken from the record instead of measured now.
    """

    part: str
    config: Any
    status: Status
    reason: str = ""
    ms: float | None = None
    spread: float = 0.0
    errors: tuple[tuple[str, float], ...] = ()
    known: bool = False

    @property
    def candidate(self) -> Candidate:
        return Candidate(self.part, self.config)

    @property
    def usable(self) -> bool:
        return self.status in (Status.TIMED, Status.PASSED)


@dataclasses.dataclass(frozen=True)
class TuningResult:
    """The winning configuration for a problem, and all measurements.

    `ms` and `heuristic_ms` are medians by direction (`FORWARD`, `BOTH`), measured in turn; `spread` and `errors` (relative RMS errors by
    result) are those of the winner. `cached`: nothing was timed because everything was known.
    """

    problem: Problem
    implementation: Implementation
    config: Any
    heuristic: Any
    ms: Mapping[str, float]
    heuristic_ms: Mapping[str, float]
    measurements: tuple[Measurement, ...]
    seconds: float
    cached: bool
    spread: Mapping[str, float] = dataclasses.field(default_factory=dict)
    errors: Mapping[str, float] = dataclasses.field(default_factory=dict)
    samples: int = 0

    @property
    def operation(self) -> str:
        return self.problem.operation

    @property
    def platform(self) -> Platform:
        return self.implementation.platform

    def to_record(self, device: DeviceFacts) -> Record:
        """The entry for a table; it applies to the device in whose folder it is stored."""
        return record_for(
            self.problem,
            self.implementation,
            config=to_dict(self.config) if self.config is not None else None,
            ms=dict(self.ms),
            spread=dict(self.spread),
            samples=self.samples,
            errors=dict(self.errors),
            timed=tuple(
                Timed(m.part, m.candidate.to_dict(), m.ms, m.spread)
                for m in self.measurements
                if m.usable and m.ms is not None
            ),
            denied=tuple(
                Denied(m.part, m.candidate.to_dict(), m.reason)
                for m in self.measurements
                if m.status is Status.DENIED or m.reason.startswith(SPILLS)
            ),
        )

    def __str__(self) -> str:
        times = ", ".join(
            f"{direction} {ms:.4g} ms"
            + (f" (heuristic {self.heuristic_ms[direction]:.4g})" if direction in self.heuristic_ms else "")
            for direction, ms in self.ms.items()
        )
        return f"{self.problem} on {self.platform.value}: {self.config}" + (f"; {times}" if times else "")


def record_for(problem: Problem, implementation: Implementation, **found: Any) -> Record:
    """A record of what was found now for a problem, with these kernels and this software."""
    return Record(
        operation=problem.operation,
        platform=implementation.platform.value,
        version=implementation.version,
        problem=problem.key(),
        exact=problem.to_dict(),
        software=made_with(implementation),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **found,
    )
