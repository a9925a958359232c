"""One entry of a table of tuned configurations, as stored in a file. Standard library only."""

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Mapping
from typing import Any

from .config import required_fields, stable_json

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
    """Holds what is known about one problem on one platform, with everything it depends on.

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

    @functools.cached_property
    def line(self) -> str:
        """The record as JSON in one line."""
        return json.dumps(self.to_dict())

    def to_dict(self) -> Json:
        """As JSON, whose values are shared with the record, not copied."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return values | {
            name: tuple(dict(vars(part)) for part in values[name]) for name in ("timed", "denied")
        }

    @classmethod
    def from_dict(cls, data: Any) -> "Record":
        """The inverse of `to_dict`; `ValueError` for anything else."""
        if not is_shallow(data):
            raise ValueError(f"Record: expected values nested at most {_DEEPEST} deep, received deeper ones.")
        _check(data, cls)
        _check_values(data)
        timed = tuple([_part(Timed, entry) for entry in data.get("timed", ())])
        denied = tuple([_part(Denied, entry) for entry in data.get("denied", ())])
        return cls(**{**data, "platform": str(data["platform"]), "timed": timed, "denied": denied})


def record_key(operation: str, platform: str, version: int, problem: str, software: Mapping[str, str]) -> str:
    """Canonical JSON of what a record depends on. The device is not included, since each has its own folder."""
    body = {"operation": operation, "platform": str(platform), "version": version, "problem": problem}
    return stable_json(body | {"software": dict(software)})


def is_shallow(value: Any) -> bool:
    """Returns whether a value of JSON is nested at most as deep as tables are, so that it can be written again: Python reads deeper ones than it
    writes."""
    level = [value]
    for _ in range(_DEEPEST + 1):
        parts = [x.values() if type(x) is dict else x for x in level if type(x) in _CONTAINERS]
        level = [child for part in parts for child in part if type(child) in _CONTAINERS]
        if not level:
            return True
    return False


_CONTAINERS = frozenset({dict, list, tuple})
_DEEPEST = 32
_IN_JSON = {float: (int, float), tuple: (list, tuple)}
_NUMBERS = ("ms", "spread", "errors")


def _check_values(data: Json) -> None:
    """Returns what is computed with when a table is read."""
    sizes = data["exact"].get("dims", {})
    if not isinstance(sizes, dict) or not all(isinstance(size, int) for size in sizes.values()):
        raise ValueError(f"Record.exact: expected sizes by letter as dims, received {sizes!r}.")
    if not all(isinstance(version, str) for version in data["software"].values()):
        raise ValueError(f"Record.software: expected versions, received {data['software']!r}.")
    if not all(0 < ms < 1e12 for ms in data.get("ms", {}).values()):
        raise ValueError(f"Record.ms: expected times above zero, received {data['ms']!r}.")


def _part(cls: Any, data: Any) -> Any:
    _check(data, cls)
    return cls(**data)


@functools.cache
def _kinds_of(cls: type) -> dict[str, tuple[type, ...]]:
    """The classes that each field of a dataclass may have in JSON."""
    kinds = {}
    for name, hint in typing.get_type_hints(cls).items():
        members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        classes = [typing.get_origin(member) or member for member in members]
        kinds[name] = tuple([kind for cls in classes for kind in _IN_JSON.get(cls, (cls,))])
    return kinds


def _check(data: Any, cls: Any) -> None:
    if not isinstance(data, dict):
        raise ValueError(f"{cls.__name__}: expected an object, received {type(data).__name__}.")
    kinds = _kinds_of(cls)
    unknown, missing = sorted(data.keys() - kinds.keys()), sorted(required_fields(cls) - data.keys())
    if unknown or missing:
        raise ValueError(f"{cls.__name__}: received unknown fields {unknown} and missing {missing}.")
    for name, value in data.items():
        if not isinstance(value, kinds[name]) or isinstance(value, bool):
            raise ValueError(f"{cls.__name__}.{name}: received {value!r}.")
        if cls is Record and name in _NUMBERS and not all(isinstance(x, int | float) for x in value.values()):
            raise ValueError(f"{cls.__name__}.{name}: expected numbers, received {value!r}.")
