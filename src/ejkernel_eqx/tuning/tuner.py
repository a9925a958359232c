"""`tune_problem`: one problem on one platform, from the candidates to the record in the user's table."""

import dataclasses
import logging
import time
from collections.abc import Sequence
from typing import Any

import jax

from .._errors import TuningError
from ..dispatch import (
    current_policy,
    device_facts,
    DeviceFacts,
    from_json,
    Implementation,
    Known,
    memory_cache,
    Platform,
    Policy,
    Problem,
    to_json,
    tuning_allowed,
    Workload,
)
from ..dispatch.known import known_of
from ..dispatch.persistent import lookup, store
from .bench import MEMORY
from .here import search_here
from .isolated.events import Finished, Job, Stage, Unsound
from .isolated.isolation import not_isolatable, search_isolated, SetUpFailed
from .ledger import Ledger
from .lock import tuning_lock
from .options import current_options, TuneOptions
from .recall import recall
from .result import Measurement, part_of, Status, TuningResult
from .tracing import refuse_trace

_LOG = logging.getLogger("ejkernel_eqx")
_COMPILED_OUTSIDE_XLA = (Platform.TRITON, Platform.PALLAS, Platform.CUDA)
_results: list[TuningResult] = []
_said: set[str] = set()


def tune_problem(
    problem: Problem,
    implementation: Implementation,
    device: DeviceFacts | None = None,
    *,
    configs: Sequence[Any] | None = None,
    options: TuneOptions | None = None,
    force: bool = False,
) -> TuningResult:
    """Finds the best configuration of an implementation for a problem by running it on this device.

    Every candidate is checked before it is timed: forward results and gradients against the reference, and two runs for bitwise
    equality. A candidate that fails is denied, and the reason is stored. Measurements in the user's table are not repeated.

    **Arguments:**

    - `problem`, `implementation`: what to tune. `device` holds the facts of JAX's default device, on which everything runs.
    - `configs`: candidates to use instead of the implementation's own. The heuristic and any previous winner compete with them.
    - `options`: the effort; by default `current_options()`.
    - `force`: repeat all measurements, even known ones.

    **Returns:**

    A `TuningResult`, which is also stored in the user's table.

    **Raises:** `TuningError` inside a staged trace, for an implementation without a workload, if no candidate may be
    used, if one takes too long in this process, and if another process tunes for too long. `ValueError` for `configs`
    of another class.
    """
    refuse_trace("tuning")
    device, options = device or device_facts(), options or current_options()
    heuristic, stages = _stages(problem, implementation, device, configs, options)
    if all(len(stage.options) < 2 for stage in stages):
        return TuningResult(problem, implementation, heuristic, heuristic, {}, {}, (), 0.0, cached=True)

    job = Job(problem, implementation, device, heuristic, stages, (), None, options, options.time_budget)
    job = job if force else _recalled(job)
    result = _cached(job)
    if result is None:
        with tuning_lock(device, options.lock_timeout) as waited:
            if waited and not force:
                job = _recalled(job)
            result = _cached(job) or _tune(job)
    _results.append(result)
    return result


def has_choice(
    problem: Problem,
    implementation: Implementation,
    configs: Sequence[Any] | None = None,
    options: TuneOptions | None = None,
) -> bool:
    """Tells whether there is more than one configuration to try for a problem on this device."""
    _, stages = _stages(problem, implementation, device_facts(), configs, options or current_options())
    return any(len(stage.options) > 1 for stage in stages)


def _stages(
    problem: Problem,
    implementation: Implementation,
    device: DeviceFacts,
    configs: Sequence[Any] | None,
    options: TuneOptions,
) -> tuple[Any, tuple[Stage, ...]]:
    """The heuristic, and the values to try of each part of the configuration."""
    workload = _workload_of(problem, implementation, device)
    heuristic, *_ = tried = _tried(problem, implementation, device, configs)
    parts = [(part.field, part.results) for part in workload.parts] or [("", ())]
    values = [tuple(dict.fromkeys(part_of(config, part) for config in tried)) for part, _ in parts]
    return heuristic, tuple(
        Stage(*part, options=several[: options.max_candidates]) for part, several in zip(parts, values)
    )


def _workload_of(problem: Problem, implementation: Implementation, device: DeviceFacts) -> Workload:
    name = f"{problem} on {implementation.platform.value}"
    reason = implementation.unsupported(problem, device)
    if reason is not None:
        raise TuningError(f"{name} cannot be tuned here: {reason}.")
    workload = implementation.make_workload(problem)
    if workload is None:
        raise TuningError(f"{name} has no workload to tune with; register it with workload=.")
    return workload


def _tried(
    problem: Problem, implementation: Implementation, device: DeviceFacts, configs: Sequence[Any] | None
) -> list[Any]:
    """The configurations to try, the heuristic first."""
    hooks = implementation.hooks
    tried = list(hooks.candidates(problem, device) if configs is None else configs)
    for config in tried:
        if not isinstance(config, hooks.config_type):
            raise ValueError(
                f"configs: expected instances of {hooks.config_type.__name__} for {implementation.platform.value!r}, received {config!r}."
            )
    tried = list(dict.fromkeys((hooks.default_config(problem, device), *tried)))
    if len(tried) > 1:  # else nothing is stored
        for config in tried:
            _check_storable(config)
    return tried


def _check_storable(config: Any) -> None:
    try:
        same = from_json(to_json(config), type(config)) == config
        reason = "it differs after a round trip"
    except (TypeError, ValueError, NameError) as error:
        same, reason = False, str(error)
    if not same:
        raise ValueError(
            "configs: expected fields that can be stored in a file (bool, int, float, str, None, tuples of them, frozen dataclasses), received "
            f"{config!r}: {reason}."
        )


def _recalled(job: Job) -> Job:
    """The job with what the user's table knows about it. Its winner competes even if it is not a candidate, so that the record never gets
    worse."""
    record = lookup(job.implementation, job.problem, job.device)
    try:
        return job if record is None else recall(job, record)
    except ValueError as error:
        _LOG.warning("the record of %s is ignored: %s", job.name, error)
        return job


def _cached(job: Job) -> TuningResult | None:
    """The result, if there is nothing left to measure."""
    known = {measurement.candidate.key(): measurement for measurement in job.known}
    measurements = [known.get(candidate.key()) for stage in job.stages for candidate in stage.candidates]
    if None in measurements or (job.previous is None and any(m and m.usable for m in measurements)):
        return None
    if job.previous is None:
        raise _nothing_left(job, job.known)
    return _result(job, job.previous, job.known, seconds=0.0, cached=True)


def _result(job: Job, end: Finished, measurements: tuple[Measurement, ...], **how: Any) -> TuningResult:
    asked = {"problem": job.problem, "implementation": job.implementation, "heuristic": job.heuristic}
    return TuningResult(**asked, **vars(end), measurements=measurements, **how)


def _tune(job: Job) -> TuningResult:
    start = time.monotonic()
    with Ledger(job) as ledger:
        _search(job, ledger)
    outcome = ledger.outcome
    if isinstance(outcome, Unsound):
        raise TuningError(
            f"{job.name}: a candidate has left the device unusable for this process ({outcome.reason}); restart it and tune "
            "with isolate=True."
        )
    assert isinstance(outcome, Finished)
    seconds, samples = time.monotonic() - start, job.options.samples
    result = _result(job, outcome, ledger.measurements, seconds=seconds, cached=False, samples=samples)
    won = outcome.config is not None
    if won or all(measurement.status is Status.DENIED for measurement in result.measurements):
        store(job.implementation, result.to_record(job.device), job.device)
    if not won:
        raise _nothing_left(job, result.measurements)
    _LOG.info("tuned %s in %.0f s", result, result.seconds)
    return result


def _nothing_left(job: Job, measurements: Sequence[Measurement]) -> TuningError:
    reasons = [f"  {m.candidate}: {m.reason or m.status.value}" for m in measurements if not m.usable]
    message = "\n".join([f"{job.name}: no candidate may be used.", *reasons])
    if any(measurement.reason == MEMORY for measurement in measurements):
        message += (
            "\nThis process may hold most of the device's memory: set XLA_PYTHON_CLIENT_PREALLOCATE=false before it starts, or "
            "tune with isolate=False."
        )
    return TuningError(message)


def _search(job: Job, ledger: Ledger) -> None:
    """Searches in another process if that is requested and possible, else in this one."""
    wanted = job.options.isolate
    if wanted or (wanted is None and job.implementation.platform in _COMPILED_OUTSIDE_XLA):
        reason = not_isolatable(job)
        try:
            if reason is None:
                return search_isolated(job, ledger)
        except SetUpFailed as error:
            reason = str(error)
        if wanted:
            raise TuningError(f"{job.name} cannot be tuned in another process (isolate=True): {reason}")
        operation = job.implementation.operation
        _say_once(f"{operation} is tuned in this process, which a crash of a candidate would end: {reason}")
    ledger.stopped()
    search_here(dataclasses.replace(job, known=ledger.measurements), ledger)


def _say_once(message: str, level: int = logging.INFO) -> None:
    if message not in _said:
        _said.add(message)
        _LOG.log(level, "%s", message)


def tuned_results() -> tuple[TuningResult, ...]:
    """All results of `tune_problem` in this process, in order."""
    return tuple(_results)


def autotune_tier(problem: Problem, implementation: Implementation, device: DeviceFacts) -> Any | None:
    """The autotune tier of the selection chain: a tuned configuration, or `None` if there is no workload.

    `TuningError` inside a staged trace. With several processes it never tunes, since they could end up with different configurations;
    only `ejx.tune` does, which they call together.
    """
    if not tuning_allowed() or implementation.make_workload(problem) is None:
        return None
    if jax.process_count() > 1:
        several = "single modules are not tuned with several processes; call ejx.tune in all of them"
        _say_once(several, logging.WARNING)
        return None
    return answer(problem, implementation, device, force=current_policy() is Policy.FORCE)


def answer(
    problem: Problem, implementation: Implementation, device: DeviceFacts | None = None, **how: Any
) -> Known:
    """Tunes, and returns the result in the form of tables, also if all configurations were denied."""
    place = implementation.platform, problem.key()
    try:
        result = tune_problem(problem, implementation, device, **how)
    except TuningError:
        denied = memory_cache.known(*place)
        if denied is None or denied.config is not None:
            raise
        return denied
    known = memory_cache.known(*place)
    if known is None or known.config != result.config:
        record = lookup(implementation, problem, device or device_facts()) if result.measurements else None
        known = Known(result.config, origin="the only candidate")
        if record is not None:
            known = known_of(record, implementation, "tuned before")
        memory_cache.put(*place, known)
    return known
