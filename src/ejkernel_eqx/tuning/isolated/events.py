"""The input of a search and the events it emits: plain data, so that both can pass between processes."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ...dispatch import DeviceFacts, Implementation, Problem
from ..options import TuneOptions
from ..result import Candidate, Measurement


@dataclasses.dataclass(frozen=True)
class Stage:
    """One part (a field) of the configuration, or the whole (if `part` is empty), and the values to try, the heuristic's first.

    `results` are those that depend on the part; empty for all.
    """

    part: str
    results: tuple[str, ...]
    options: tuple[Any, ...]

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return tuple(Candidate(self.part, value) for value in self.options)


@dataclasses.dataclass(frozen=True)
class Finished:
    """The search has finished. `config` is `None` if no candidate may be used."""

    config: Any | None
    ms: Mapping[str, float] = dataclasses.field(default_factory=dict)
    spread: Mapping[str, float] = dataclasses.field(default_factory=dict)
    heuristic_ms: Mapping[str, float] = dataclasses.field(default_factory=dict)
    errors: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Job:
    """Everything that a search needs. `known` holds previous measurements, `previous` the outcome of the previous search, and `seconds` the
    remaining time budget."""

    problem: Problem
    implementation: Implementation
    device: DeviceFacts
    heuristic: Any
    stages: tuple[Stage, ...]
    known: tuple[Measurement, ...]
    previous: Finished | None
    options: TuneOptions
    seconds: float

    @property
    def name(self) -> str:
        return f"{self.problem} on {self.implementation.platform.value}"


@dataclasses.dataclass(frozen=True)
class Begun:
    """A candidate begins to be compiled, run or timed. If the process dies, the candidate is to blame."""

    candidate: Candidate
    phase: str


@dataclasses.dataclass(frozen=True)
class Ended:
    """The candidate has survived what it began."""

    candidate: Candidate


@dataclasses.dataclass(frozen=True)
class Measured:
    """A candidate is decided."""

    measurement: Measurement


@dataclasses.dataclass(frozen=True)
class Unsound:
    """A candidate has left the device unusable for its process, so the search cannot continue there."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Failed:
    """The search failed, through no fault of a candidate."""

    reason: str


Event = Begun | Ended | Measured | Finished | Unsound | Failed
