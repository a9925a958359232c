"""`bench OP`: checks every usable platform with the configuration that it uses here, then times it."""

import argparse
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from .._errors import UnsupportedError
from ..dispatch import (
    BOTH,
    device_facts,
    FORWARD,
    Implementation,
    kernel_registry,
    lookup,
    Problem,
    Record,
    select,
    Selection,
    Snapshot,
    store,
    take_snapshot,
    to_dict,
)
from ..tuning.bench import Bench, failure
from ..tuning.check import all_errors
from ..tuning.measure import JaxWork, time_in_turn, time_runs, Timing
from ..tuning.report.data import describe
from ..tuning.result import record_for
from ..tuning.roofline import device_peaks, matrix_dtype, roofline
from ..tuning.threads import attempted
from . import problems
from .output import FAILED, number, OK, Outcome, percent, progress, ratio, section, table
from .problems import positive

HELP = """A platform whose results differ from the reference is reported as wrong and not timed, and the exit code is 1.

With --keep, the times are written into the cache, and modules that are built later use the fastest platform with known times. The time of a
platform is kept if it is tuned for exactly this problem, or has nothing to tune.

examples:
  python -m ejkernel_eqx bench flash_attention --shape B=4,T=4096,H=16,D=128 --flag causal
  python -m ejkernel_eqx bench flash_attention --shape B=16,T=1024,H=32,D=64 --keep
"""

UNSTEADY = 0.2
"""The spread, (largest - smallest) / median, above which a warning is printed."""
TIMED, WRONG, BROKEN, UNSUPPORTED = "timed", "wrong", "failed", "unsupported"


@dataclasses.dataclass
class Contender:
    """One platform: its configuration for the problem, whether the results are correct, and how fast it is.

    `settled`: whether it is tuned for exactly this problem, or has nothing to tune.
    """

    platform: str
    state: str
    reason: str = ""
    config: Any = None
    origin: str = ""
    work: Bench | None = None
    implementation: Implementation | None = None
    settled: bool = False
    errors: Mapping[str, float] = dataclasses.field(default_factory=dict)
    timings: dict[str, Timing] = dataclasses.field(default_factory=dict)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    problems.add_arguments(parser)
    add = parser.add_argument
    only = "only this platform; may be repeated; default: all platforms that the library chooses from"
    add("--platform", action="append", default=[], metavar="NAME", help=only)
    add("--samples", type=positive(int), default=5, metavar="N", help="default %(default)s")
    duration = "duration of a sample, default %(default)g"
    add("--sample-ms", type=positive(float), default=30.0, metavar="MS", help=duration)
    keep = "write the times into the cache, so that the fastest platform is used"
    add("--keep", action="store_true", help=keep)


def run(options: argparse.Namespace) -> Outcome:
    every = problems.make_problems(options)
    known = problems.implementations(options.operation, options.platform)
    contenders = [bench(problem, known, options.samples, options.sample_ms) for problem in every]
    results = [
        {
            "problem": problem.to_dict(),
            "platforms": [_to_dict(problem, one, several) for one in several],
            "warnings": _unsteady(several),
            **(_kept(problem, several) if options.keep else {}),
        }
        for problem, several in zip(every, contenders)
    ]
    states = {contender.state for several in contenders for contender in several}
    # Unsupported platforms are no failure, unless no platform at all was timed.
    failed = TIMED not in states or states & {WRONG, BROKEN}
    text = functools.partial(_text, [str(problem) for problem in every], results)
    return Outcome({"device": device_facts().kind, "results": results}, text, FAILED if failed else OK)


def bench(
    problem: Problem, known: Sequence[Implementation], samples: int, sample_ms: float
) -> list[Contender]:
    """One contender per implementation. Samples are taken in turn, so that drifting clocks affect all of them equally."""
    contenders = [_contender(problem, implementation) for implementation in known]
    for contender in contenders:
        if contender.work is not None:
            progress(f"checking {problem} on {contender.platform}")
            _check(contender, contender.work)
    for direction in (FORWARD, BOTH):
        right = [(c, c.work) for c in contenders if c.state == TIMED and c.work is not None]
        timed = {c.platform: (c, work) for c, work in right if direction in work.directions}
        if timed:
            progress(f"timing {problem}, {direction}")
        for name, timing in _time(timed, direction, samples, sample_ms).items():
            timed[name][0].timings[direction] = timing
    return contenders


def _time(
    timed: Mapping[str, tuple[Contender, Bench]], direction: str, samples: int, sample_ms: float
) -> dict[str, Timing]:
    def take(runs: Mapping[str, int]) -> dict[str, Timing]:
        works = {
            name: JaxWork(work.program(c.config, work.directions[direction], runs[name]), work.input_sets)
            for name, (c, work) in timed.items()
        }
        return time_in_turn(works, samples, sample_ms)

    return time_runs(take, timed, lambda name: timed[name][1].floor())


def _contender(problem: Problem, implementation: Implementation) -> Contender:
    platform = implementation.platform.value
    try:
        snapshot = take_snapshot(problem.operation, platform=platform)
        selection = select(snapshot, problem)
    except UnsupportedError as error:
        return Contender(platform, UNSUPPORTED, "; ".join(error.reasons.values()))
    workload = _measurable(implementation).make_workload(problem)
    if workload is None:
        return Contender(platform, UNSUPPORTED, "has no workload to measure")
    return Contender(
        platform,
        TIMED,
        config=selection.config,
        origin=selection.origin or selection.tier.value,
        work=Bench(f"{problem} on {platform}", workload),
        implementation=implementation,
        settled=_is_settled(snapshot, selection),
    )


def _is_settled(snapshot: Snapshot, selection: Selection) -> bool:
    problem, hooks = selection.problem, selection.implementation.hooks
    known = snapshot.known_exactly(selection.platform, problem.key())
    is_known = known is not None and known[0].config == selection.config
    # A single candidate leaves nothing to tune: it is final without a record.
    return is_known or set(hooks.candidates(problem, snapshot.device)) == {selection.config}


def record_of(problem: Problem, contender: Contender, known: Record | None = None) -> Record:
    """The record to store for a timed platform; `known` is the existing record."""
    assert contender.implementation is not None
    timings = contender.timings
    record = record_for(
        problem,
        contender.implementation,
        config=to_dict(contender.config),
        ms={direction: timing.ms for direction, timing in timings.items()},
        spread={direction: timing.spread for direction, timing in timings.items()},
        samples=min(len(timing.samples) for timing in timings.values()),
        errors=dict(contender.errors),
    )
    # The tuner's times and rejections stay only with the configuration that they led to.
    if known is None or known.config != record.config:
        return record
    return dataclasses.replace(record, timed=known.timed, denied=known.denied)


def _kept(problem: Problem, contenders: Sequence[Contender]) -> dict[str, Any]:
    """Writes the times into the cache. Returns the platforms that were written and the platform now chosen."""
    device, kept = device_facts(), []
    for contender in contenders:
        implementation = contender.implementation
        # A configuration that is only a guess for this problem must not decide between platforms.
        if contender.state == TIMED and contender.settled and implementation is not None:
            record = record_of(problem, contender, lookup(implementation, problem, device))
            store(implementation, record, device)
            kept.append(contender.platform)
    # The snapshot follows all stores, so that the choice shown is that of modules built later.
    taken = select(take_snapshot(problem.operation), problem)
    return {"kept": kept, "taken": taken.platform.value, "why": dict(taken.rejected)}


def _measurable(implementation: Implementation) -> Implementation:
    """Adds the workload of another implementation of the same core if it has none (a vendor's library tunes itself)."""
    core = [i for i in kernel_registry.ordered(implementation.operation) if i.core == implementation.core]
    shared = next((i.workload for i in core if i.workload is not None), None)
    return implementation if implementation.workload else dataclasses.replace(implementation, workload=shared)


def _check(contender: Contender, work: Bench) -> None:
    """Sets the state; wrong results are never timed. Unlike the tuner's candidates, results need not be bitwise repeatable."""
    run = lambda: jax.block_until_ready(work.program(contender.config, work.names)(work.inputs(0)))
    results = attempted(run)
    if isinstance(results, Exception):  # the others are still timed
        contender.state, contender.reason = BROKEN, failure(results)[1]
        return
    contender.errors, reason = all_errors(results, work.expected(0), work.workload.tolerances)
    if reason is not None:
        contender.state, contender.reason = WRONG, reason


def _to_dict(problem: Problem, contender: Contender, others: Sequence[Contender]) -> dict[str, Any]:
    peaks = device_peaks(device_facts(), matrix_dtype(problem))
    timings = {}
    for direction, timing in contender.timings.items():
        cost = contender.work.workload.costs.get(direction) if contender.work else None
        # The platform is one of the others itself, so there is always a best time.
        best = min(other.timings[direction].ms for other in others if direction in other.timings)
        timings[direction] = {
            "ms": timing.ms,
            "spread": timing.spread,
            "tflops": cost.flops / timing.ms / 1e9 if cost else None,
            "gb_per_s": cost.bytes / timing.ms / 1e6 if cost else None,
            "roofline": roofline(cost, peaks, timing.ms).fraction if cost else None,
            "to_best": timing.ms / best,
        }
    return {
        "platform": contender.platform,
        "state": contender.state,
        "reason": contender.reason,
        "config": to_dict(contender.config) if contender.config is not None else None,
        "origin": contender.origin,
        "errors": contender.errors,
        "timings": timings,
    }


def _text(titles: Sequence[str], results: Sequence[Mapping[str, Any]]) -> str:
    return "\n\n".join(
        section(title, "\n".join([_table_of(result["platforms"]), *result["warnings"], *_taken(result)]))
        for title, result in zip(titles, results)
    )


def _unsteady(contenders: Sequence[Contender]) -> list[str]:
    """A warning if times vary too much to decide between platforms."""
    unsteady = [
        f"{contender.platform} {direction} {percent(timing.spread)}"
        for contender in contenders
        for direction, timing in contender.timings.items()
        if timing.spread > UNSTEADY
    ]
    if not unsteady:
        return []
    return [
        f"warning: spread above {UNSTEADY:.0%} ({', '.join(unsteady)}): these times are not reliable; stop other work on the device, or take more "
        "(--samples 15) and longer samples (--sample-ms 200)"
    ]


def _taken(result: Mapping[str, Any]) -> list[str]:
    if "kept" not in result:
        return []
    kept = ", ".join(result["kept"]) or "none; tune the platforms first"
    why = [f"not {platform}: {reason}" for platform, reason in result["why"].items()]
    return [f"times kept: {kept}", f"used from now on: {result['taken']}", *why]


_NUMERIC = ("ms", "spread", "TFLOP/s", "GB/s", "of roofline", "to best")


def _table_of(platforms: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for row in platforms:
        if row["state"] != TIMED:
            rows.append((row["platform"], row["state"], *("" for _ in _NUMERIC), row["reason"]))
        for direction, timing in row["timings"].items():
            times = number(timing["ms"]), percent(timing["spread"])
            speeds = number(timing["tflops"], 3), number(timing["gb_per_s"], 3)
            shares = percent(timing["roofline"]), ratio(timing["to_best"])
            config = f"{describe(row['config'])} ({row['origin']})"
            rows.append((row["platform"], direction, *times, *speeds, *shares, config))
    return table(("platform", "direction", *_NUMERIC, "config or reason"), rows, right=_NUMERIC)
