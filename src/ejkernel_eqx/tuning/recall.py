"""What a record says of today's candidates."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ..dispatch import Implementation
from ..dispatch.config import from_dict
from ..dispatch.entries import config_of
from ..dispatch.records import Record
from .isolated.events import Previous, Stage
from .result import Measurement, SPILLS, Status


def recall(
    record: Record, implementation: Implementation, stages: Sequence[Stage], heuristic: Any
) -> tuple[tuple[Measurement, ...], Previous | None]:
    """The record's measurements, and its winner (`None`: every configuration was denied).

    `ValueError` if the record's configuration is not one of the implementation. A single candidate that is none any more is left out.
    """
    config = config_of(record, implementation)
    previous = None
    if config is not None:
        previous = Previous(config, dict(record.ms), dict(record.spread), dict(record.errors))
    found: list[Measurement] = []
    for timed in record.timed:
        with_value = _value(timed.part, timed.config, stages, heuristic)
        found += [
            Measurement(timed.part, value, Status.TIMED, ms=timed.ms, spread=timed.spread, known=True)
            for value in with_value
        ]
    for denied in record.denied:
        spills = denied.reason.startswith(SPILLS)
        status = Status.SKIPPED if spills else Status.DENIED
        for value in _value(denied.part, denied.config, stages, heuristic):
            # Spilling is no fault in the heuristic, which may have become so since.
            if not (spills and value == (getattr(heuristic, denied.part) if denied.part else heuristic)):
                found.append(Measurement(denied.part, value, status, denied.reason, known=True))
    return tuple(found), previous


def _value(part: str, data: dict[str, Any], stages: Sequence[Stage], heuristic: Any) -> tuple[Any, ...]:
    """The value that was written as `data`: none, if there is no such part or class any more."""
    if part and not any(stage.part == part for stage in stages):
        return ()
    kind = type(getattr(heuristic, part) if part else heuristic)
    if not dataclasses.is_dataclass(kind):
        return (data[part],) if part in data else ()
    try:
        return (from_dict(data, kind),)
    except ValueError:
        return ()
