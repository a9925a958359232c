"""Applies a record to the current candidates."""

import dataclasses
from typing import Any

from ..dispatch import Denied, from_dict, Record, Timed
from ..dispatch.known import config_of
from .isolated.events import Finished, Job
from .result import Measurement, part_of, SPILLS, Status


def recall(job: Job, record: Record) -> Job:
    """The job with the record's measurements and winner (`None` if all configurations were denied).

    `ValueError` if the record's configuration does not belong to the implementation. Entries that are no longer candidates are omitted.
    """
    config, previous = config_of(record, job.implementation), None
    if config is not None:
        heuristic_ms = record.ms if config == job.heuristic else {}
        previous = Finished(config, record.ms, record.spread, heuristic_ms, record.errors)
    results: list[Measurement] = []
    for timed in record.timed:
        for value in _value(job, timed):
            results.append(
                Measurement(timed.part, value, Status.TIMED, ms=timed.ms, spread=timed.spread, known=True)
            )
    for denied in record.denied:
        spills = denied.reason.startswith(SPILLS)
        status = Status.SKIPPED if spills else Status.DENIED
        for value in _value(job, denied):
            # Spilling is accepted for the heuristic, which this candidate may have become since.
            if not (spills and value == part_of(job.heuristic, denied.part)):
                results.append(Measurement(denied.part, value, status, denied.reason, known=True))
    return dataclasses.replace(job, known=tuple(results), previous=previous)


def _value(job: Job, entry: Timed | Denied) -> tuple[Any, ...]:
    """The value that an entry describes; empty if its part or class no longer exists."""
    part, data = entry.part, entry.config
    if part and not any(stage.part == part for stage in job.stages):
        return ()
    kind = type(part_of(job.heuristic, part))
    if not dataclasses.is_dataclass(kind):
        return (data[part],) if part in data else ()
    try:
        return (from_dict(data, kind),)
    except ValueError:
        return ()
