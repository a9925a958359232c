"""One entry of a table of tuned configurations, as stored in a file. Standard library only."""

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any

Json = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Timed:
    """A configuration that was checked and timed. `part` is the field of the configuration that was varied, empty for the whole;
    `config` is that part (or the whole) as a dict; `ms` is the median and `spread` its relative spread."""

    part: str
    config: Json
    ms: float
    spread: float = 0.0


@dataclasses.dataclass(frozen=True)
class Denied:
    """A configuration that must not be used, and why."""

    part: str
    config: Json
    reason: str


@dataclasses.dataclass(frozen=True)
class Record:
    """What is known about one problem on one platform, with everything it depends on.

    `problem` is the `Problem.key()` and `exact` the `Problem.to_dict()` of the timed problem. `config` is the winner as a dict, or `None` if
    all configurations were denied. `ms` and `spread` are by direction, `errors` (relative RMS) by the name of the result.
    """

    operation: str
    platform: str
    version: int
    problem: str
    exact: Json
    software: dict[str, str]
    config: Json | None
    ms: dict[str, float] = dataclasses.field(default_factory=dict)
    spread: dict[str, float] = dataclasses.field(default_factory=dict)
    samples: int = 0
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    timed: tuple[Timed, ...] = ()
    denied: tuple[Denied, ...] = ()
    date: str = ""

    @functools.cached_property
    def key(self) -> str:
        """A string that is the same in every process, and unique to the problem, platform, kernel version and software."""
        return record_key(self.operation, self.platform, self.version, self.problem, self.software)

    def to_dict(self) -> Json:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> "Record":
        """The inverse of `to_dict`; `ValueError` for anything else."""
        _check(data, cls, _RECORD)
        timed = tuple(_part(Timed, entry, _TIMED) for entry in data.get("timed", ()))
        denied = tuple(_part(Denied, entry, _DENIED) for entry in data.get("denied", ()))
        return cls(**{**data, "platform": str(data["platform"]), "timed": timed, "denied": denied})


def record_key(operation: str, platform: str, version: int, problem: str, software: Mapping[str, str]) -> str:
    """Canonical JSON of what a record depends on. The device is not included, since each has its own folder."""
    body = {
        "operation": operation,
        "platform": str(platform),
        "version": version,
        "problem": problem,
        "software": dict(software),
    }
    return json.dumps(body, sort_keys=True, separators=(",", ":"))


_NUMBER = (int, float)
_TIMED = {"part": str, "config": dict, "ms": _NUMBER, "spread": _NUMBER}
_DENIED = {"part": str, "config": dict, "reason": str}
_RECORD = {
    "operation": str,
    "platform": str,
    "version": int,
    "problem": str,
    "exact": dict,
    "software": dict,
    "config": (dict, type(None)),
    "ms": dict,
    "spread": dict,
    "samples": int,
    "errors": dict,
    "timed": (list, tuple),
    "denied": (list, tuple),
    "date": str,
}
_NUMBERS = ("ms", "spread", "errors")


def _part(cls: Any, data: Any, kinds: Mapping[str, Any]) -> Any:
    _check(data, cls, kinds)
    return cls(**data)


def _check(data: Any, cls: Any, kinds: Mapping[str, Any]) -> None:
    if not isinstance(data, dict):
        raise ValueError(f"{cls.__name__}: expected an object, received {type(data).__name__}.")
    absent = dataclasses.MISSING
    fields = dataclasses.fields(cls)
    required = {f.name for f in fields if f.default is absent and f.default_factory is absent}
    unknown, missing = sorted(data.keys() - kinds.keys()), sorted(required - data.keys())
    if unknown or missing:
        raise ValueError(f"{cls.__name__}: received unknown fields {unknown} and missing {missing}.")
    for name, value in data.items():
        if not isinstance(value, kinds[name]) or isinstance(value, bool):
            raise ValueError(f"{cls.__name__}.{name}: received {value!r}.")
        if cls is Record and name in _NUMBERS and not all(isinstance(x, _NUMBER) for x in value.values()):
            raise ValueError(f"{cls.__name__}.{name}: expected numbers, received {value!r}.")
