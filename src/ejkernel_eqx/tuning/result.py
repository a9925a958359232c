"""What tuning one problem found."""

import dataclasses
import datetime
import enum
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..dispatch import DeviceFacts, Implementation, Platform, Problem, stable_json, to_dict
from ..dispatch.persistent import made_with
from ..dispatch.records import Denied, Record, Timed

SPILLS = "spills "
"""How the reason begins of a candidate that is skipped for its spills: the one skipping that every further look repeats."""


class Status(enum.StrEnum):
    TIMED = "timed"
    """Checked, and timed with full samples."""
    PASSED = "passed"
    """Checked, and too slow in short samples to be timed with full ones; its time is what these show."""
    DENIED = "denied"
    """May not be used; the reason is remembered."""
    SKIPPED = "skipped"
    """Not tried, or not to the end, for a reason that says nothing against it."""


class Candidate(NamedTuple):
    """A value for one part (a field) of the configuration; `part` is empty for a whole configuration."""

    part: str
    value: Any

    def to_dict(self) -> dict[str, Any]:
        """The value's fields; a plain value under the name of its field."""
        return to_dict(self.value) if dataclasses.is_dataclass(self.value) else {self.part: self.value}

    def key(self) -> tuple[str, str]:
        """Equal for equal candidates, also if one of them has been to a file and back."""
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
    """What is known of one candidate: `config` is the part's value, or the whole configuration where `part` is empty.

    `errors` are relative RMS errors by result. `known`: taken from the record, not found now.
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


def _nothing() -> Mapping[str, float]:
    return types.MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class TuningResult:
    """The configuration that won for a problem, and every measurement on the way.

    `ms` and `heuristic_ms` are medians by direction (`FORWARD`, `BOTH`), taken in turn; `spread` that of the winner; `errors` its
    relative RMS errors by result. `cached`: nothing was timed, all of it was known.
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
    spread: Mapping[str, float] = dataclasses.field(default_factory=_nothing)
    errors: Mapping[str, float] = dataclasses.field(default_factory=_nothing)
    samples: int = 0

    @property
    def operation(self) -> str:
        return self.problem.operation

    @property
    def platform(self) -> Platform:
        return self.implementation.platform

    def to_record(self, device: DeviceFacts) -> Record:
        """The entry for a table; it holds for the device whose folder it is put into."""
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
    """What was found now of a problem, by these kernels and this software."""
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
