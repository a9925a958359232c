"""`tune OP`: finds the fastest correct configuration for problems given by their sizes."""

import argparse
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from .._errors import EjkernelError, TuningError
from ..dispatch import (
    BOTH,
    current_policy,
    device_facts,
    FORWARD,
    Implementation,
    kernel_registry,
    Policy,
    Problem,
)
from ..tuning.options import current_options, TuneOptions
from ..tuning.report.data import describe, Entry, entry_of_result
from ..tuning.result import TuningResult
from ..tuning.summary import Summary
from ..tuning.tuner import tune_problem
from . import problems
from .output import FAILED, number, OK, Outcome, percent, progress, ratio, section, table
from .problems import positive

Found = TuningResult | EjkernelError | str
"""A string gives the reason why there was nothing to tune."""

HELP = """Every candidate is checked against a float32 reference, forward and backward, before it is timed. Results are written into the
cache, where modules that are built later find them.

examples:
  python -m ejkernel_eqx tune flash_attention --shape B=4,T=4096,H=16,D=128 --flag causal
  python -m ejkernel_eqx tune flash_attention --shape T=2048,H=8,D=64 --shape T=8192,H=8,D=64 --flag window=1023,0 --budget 120
  python -m ejkernel_eqx tune my_operation --shape N=4096 --import my_package.kernels
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    problems.add_arguments(parser)
    add, usual = parser.add_argument, TuneOptions()
    add("--platform", metavar="NAME", help="tune this platform; default: the one that the library chooses")
    budget = "seconds for each problem, default %(default)g"
    add("--budget", type=positive(float), default=usual.time_budget, metavar="S", help=budget)
    most = "candidates for each part of the configuration, default %(default)s"
    add("--max-candidates", type=positive(int), default=usual.max_candidates, metavar="N", help=most)
    add("--force", action="store_true", help="tune known problems again")
    no_isolate = "run candidates in this process: faster, but a crash ends the command"
    add("--no-isolate", action="store_true", help=no_isolate)


def run(options: argparse.Namespace) -> Outcome:
    policy = current_policy()
    if policy is Policy.HEURISTIC:
        raise TuningError(
            f"the policy {policy.value!r} forbids tuning; unset EJKERNEL_EQX_POLICY, or set it to 'cached', 'tune' or 'force'."
        )
    every = problems.make_problems(options)
    tune_options = dataclasses.replace(
        current_options(),
        time_budget=options.budget,
        max_candidates=options.max_candidates,
        isolate=False if options.no_isolate else None,
    )
    force = options.force or policy is Policy.FORCE
    start = time.monotonic()
    outcomes = [_tune(problem, options.platform, tune_options, force) for problem in every]
    summary = _summary(outcomes, time.monotonic() - start)
    document = {"results": list(map(_to_dict, every, outcomes)), "summary": summary.to_dict()}

    def text() -> str:
        return "\n\n".join([*map(_text, every, outcomes), section("summary", "\n".join(summary.lines()))])

    return Outcome(document, text, FAILED if summary.failed else OK)


def _summary(outcomes: Sequence[Found], seconds: float) -> Summary:
    """The summary, without problems that have nothing to tune."""
    results = [outcome for outcome in outcomes if isinstance(outcome, TuningResult)]
    failed = sum(isinstance(outcome, EjkernelError) for outcome in outcomes)
    only = sum(result.cached and not result.measurements for result in results)
    return Summary.of(results, problems=len(results) + failed, only=only, failed=failed, seconds=seconds)


def _tune(problem: Problem, platform: str | None, options: TuneOptions, force: bool) -> Found:
    """The result for one problem; one that cannot be tuned does not stop the others."""
    try:
        implementation = problems.chosen_implementation(problem, platform)
        if implementation.workload is None and platform is None:
            return _nothing_to_tune(implementation)
        progress(f"tuning {problem} on {implementation.platform.value}")
        return tune_problem(problem, implementation, device_facts(), options=options, force=force)
    except EjkernelError as error:
        return error


def _nothing_to_tune(chosen: Implementation) -> str:
    others = [
        i.platform.value
        for i, reason in kernel_registry.list_implementations(chosen.operation)
        if reason is None and i.priority >= 0 and i.workload is not None
    ]
    advice = f"; use --platform {others[0]} to tune another" if others else ""
    return f"the platform used here, {chosen.platform.value}, has nothing to tune{advice}"


def _to_dict(problem: Problem, outcome: Found) -> dict[str, Any]:
    if isinstance(outcome, EjkernelError):
        return {"problem": problem.to_dict(), "error": str(outcome)}
    if isinstance(outcome, str):
        return {"problem": problem.to_dict(), "note": outcome}
    entry = entry_of_result(outcome)
    return {
        "problem": problem.to_dict(),
        **{name: getattr(entry.record, name) for name in ("platform", "config", "ms", "errors")},
        "heuristic_ms": entry.heuristic_ms,
        "seconds": outcome.seconds,
        "cached": outcome.cached,
        "candidates": [dataclasses.asdict(candidate) for candidate in entry.ranked()],
    }


def _text(problem: Problem, outcome: Found) -> str:
    if not isinstance(outcome, TuningResult):
        return section(str(problem), f"FAILED: {outcome}" if isinstance(outcome, EjkernelError) else outcome)
    entry = entry_of_result(outcome)
    source = "already known, not timed again" if outcome.cached else f"tuned in {outcome.seconds:.1f} s"
    lines = [_candidates(entry)] if entry.candidates else ["there is only one configuration"]
    lines.append(f"winner: {describe(entry.record.config)}")
    for direction in (d for d in (FORWARD, BOTH) if d in entry.record.ms):
        before = entry.heuristic_ms.get(direction)
        compared = f" (heuristic {number(before)} ms, so {ratio(entry.speed_up(direction))} as fast)"
        lines.append(f"{direction}: {number(entry.record.ms[direction])} ms{compared if before else ''}")
    return section(f"{entry.title} ({source})", "\n".join(lines))


def _candidates(entry: Entry) -> str:
    rows = [
        (
            candidate.part,
            describe(candidate.config),
            number(candidate.ms),
            percent(candidate.spread if candidate.ms is not None else None),
            ratio(entry.to_heuristic(candidate)),
            ", ".join([candidate.status, *candidate.marks]),
            candidate.reason,
        )
        for candidate in entry.ranked()
    ]
    header = ("part", "config", "ms", "spread", "to heuristic", "status", "reason")
    return table(header, rows, right=("ms", "spread", "to heuristic"))
