"""Filters that reject candidates before they run."""

import logging
from typing import Any

from ..launch import compile_ahead, CompileReport, target_for
from .bench import Refusal
from .isolated.events import Job
from .result import Candidate, SPILLS, Status
from .threads import attempted

MOST_SPILLS = 256
"""Bytes that a thread may spill: a few can cost less than another tile would (measured); many never paid off."""

_LOG = logging.getLogger("ejkernel_eqx")


def refusal(candidate: Candidate, config: Any, job: Job, workload: Any) -> Refusal | None:
    """The reason why a candidate, with its whole configuration, is not tried, and its status; `None` if it may be tried.

    Its Triton launches are compiled for the device's architecture. None may take more shared memory than is available, and many
    register spills mean a slow kernel. Launches that the heuristic also makes do not count against a candidate.
    """
    reason = job.implementation.config_unsupported(config, job.problem, job.device)
    if reason is not None:
        return Status.DENIED, reason
    target = job.options.target if job.options.target is not None else target_for(job.device)
    is_heuristic = config == job.heuristic
    if workload.launches is None or target is None or (is_heuristic and candidate.part):
        return None

    def compiled() -> list[tuple[str, CompileReport]]:
        common = () if is_heuristic else workload.launches(job.heuristic) or ()
        launches = [launch for launch in workload.launches(config) or () if launch not in common]
        return [(launch.label, compile_ahead(launch, target)) for launch in launches]

    reports = attempted(compiled)
    if isinstance(reports, Exception):  # the actual compilation, which comes next, decides
        _LOG.debug("%s could not be compiled ahead of time: %s", config, reports)
        return None
    for label, report in reports:
        if report.shared > report.shared_limit:
            return Status.DENIED, (
                f"{label} takes {report.shared} bytes of shared memory, {report.target} has {report.shared_limit}"
            )
        if not report.fits:
            return Status.DENIED, f"{label} does not fit {report.target}"
    spills = max((report.spills for _, report in reports), default=0)
    if spills > MOST_SPILLS and not is_heuristic:
        return Status.SKIPPED, f"{SPILLS}{spills} bytes"
    return None
