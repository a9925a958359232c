"""Tunes the problems of the benchmarks on this device and writes the winners as a table to ship with the package.

    python -m benchmarks tune --time-limit 500 --json tuned.json            # run again to continue
    python -m benchmarks tune --problems 'S4096 .* D128' --budget 30
    python -m benchmarks tune --family recurrence     # also: selective_scan, cells, convolution, matmul, normalization, pooling, attention, paged
    python -m benchmarks tune --quick --platform xla --output table.json     # tiny problems, on any machine
    python -m benchmarks tune --render tuned.json --plot tuned.png           # show an earlier run
    python -m benchmarks platform-times --time-limit 500                     # run again to continue

It also reports how far the heuristics are from the tuned configurations. `platform-times` tunes nothing: it times the platforms that can run a
problem, in turn, with the configuration in the table for exactly this problem or with their only one, and writes the times into the same table, by
which the fastest is chosen.
"""

import argparse
import dataclasses
import json
import pathlib
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks import report
from benchmarks.prepare import FAILURES, reason_of
from benchmarks.problems import FAMILIES, Family, TuneProblem
from ejkernel_eqx import dispatch
from ejkernel_eqx.cli.bench import bench, Contender, record_of, TIMED
from ejkernel_eqx.dispatch import BOTH, device_facts, Implementation, kernel_registry, Platform, Problem
from ejkernel_eqx.dispatch.cache_file import parse as parse_table
from ejkernel_eqx.dispatch.cache_file import render
from ejkernel_eqx.dispatch.persistent import software
from ejkernel_eqx.dispatch.records import Record, record_key
from ejkernel_eqx.tuning import Status, tune_problem, TuneOptions, TuningResult

BAR = 1.10
"""The target for the time of the heuristics relative to the tuned configurations."""


def twins(record: Record, implementation: Implementation, family: Family) -> list[Record]:
    """The record for every operation that runs the same kernels on this problem, with only the winner."""

    runs = lambda other: (other.platform, other.target, other.workload)
    results = []
    for operation in kernel_registry.list_operations():
        same = any(runs(other) == runs(implementation) for other in kernel_registry.ordered(operation))
        exact = {**record.exact, "operation": operation}
        if same and (operation == record.operation or family.also(operation, Problem.from_dict(exact))):
            named = {"operation": operation, "problem": Problem.from_dict(exact).key(), "exact": exact}
            results.append(dataclasses.replace(record, **named, timed=(), denied=()))
    return results


class Table:
    """The table to ship: read, extended, and rewritten after every problem."""

    def __init__(self, path: pathlib.Path):
        self.path, self.records = path, {}
        if path.is_file():
            known = parse_table(path.read_text(encoding="utf-8"), str(path)).records
            self.records = {record.key: record for record in known}

    def knows(self, problem: Problem, implementation: Implementation) -> bool:
        names = (implementation.operation, implementation.platform.value, implementation.version)
        return record_key(*names, problem.key(), software()) in self.records

    def add(self, records: Sequence[Record], environment: Mapping[str, Any]) -> None:
        """Replaces the records of the same problems, for any software versions."""
        new = {(r.operation, r.platform, r.problem) for r in records}
        kept = [r for r in self.records.values() if (r.operation, r.platform, r.problem) not in new]
        self.records = {record.key: record for record in (*kept, *records)}
        header = {"device": device_facts().to_dict()}
        header |= {name: environment[name] for name in ("driver", "versions", "commit", "date")}
        report.write_atomic(self.path, render(header, self.records.values()))


def row_of(problem: TuneProblem, result: TuningResult, environment: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of a problem in the report."""
    counts = {status.value: sum(m.status is status for m in result.measurements) for status in Status}
    return {
        "problem": problem.name,
        "key": result.problem.key(),
        "platform": result.platform.value,
        "heuristic": dispatch.to_dict(result.heuristic),
        "tuned": dispatch.to_dict(result.config),
        "ms": dict(result.ms),
        "heuristic_ms": dict(result.heuristic_ms),
        "ratio": {
            name: ms / result.ms[name] for name, ms in result.heuristic_ms.items() if name in result.ms
        },
        "errors": dict(result.errors),
        "seconds": result.seconds,
        "candidates": counts,
        "denied": [f"{m.candidate}: {m.reason}" for m in result.measurements if m.status is Status.DENIED],
        **{name: environment[name] for name in ("device", "versions", "commit", "date")},
    }


def known_rows(path: pathlib.Path | None) -> dict[str, dict[str, Any]]:
    if path is None or not path.is_file():
        return {}
    return {row["problem"]: row for row in json.loads(path.read_text(encoding="utf-8"))["rows"]}


def text_table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        {"problem": row["problem"], "direction": way, "ms": ms, "ratio": row["ratio"].get(way)}
        for row in rows
        for way, ms in row["ms"].items()
    ]
    return report.table_of("tune", lines)


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The number of problems whose heuristics meet the target, and the worst one."""
    ratios = {row["problem"]: max(row["ratio"].values()) for row in rows if row["ratio"]}
    worst = max(ratios, key=lambda name: ratios[name], default=None)
    return {
        "bar": BAR,
        "problems": len(ratios),
        "within": sum(ratio <= BAR for ratio in ratios.values()),
        "worst": None if worst is None else {"problem": worst, "ratio": ratios[worst]},
    }


def plot(rows: Sequence[Mapping[str, Any]], path: pathlib.Path, title: str) -> None:
    """Plots how far the heuristics are from the tuned configurations, by problem."""
    bars = [
        {"problem": row["problem"], "implementation": direction, "ratio": ratio}
        for row in rows
        for direction, ratio in row["ratio"].items()
    ]
    what = "time of the heuristic over time of the tuned configuration; the line is the bar"
    panel = report.Panel(what, bars, "ratio", at=BAR, inches=0.14, limits=(0.9, 1.2))
    report.plot([panel], title, path, format=None)


def render_report(path: pathlib.Path, picture: pathlib.Path | None) -> int:
    """Shows an earlier run."""
    content = json.loads(path.read_text(encoding="utf-8"))
    print(text_table(content["rows"]))
    print(json.dumps(content["summary"]))
    if picture is not None:
        versions = content["environment"]["versions"]
        title = f"{content['environment']['device']}, Triton {versions['triton']}"
        plot(content["rows"], picture, title)
    return 0


def parse(arguments: Sequence[str] | None, name: str = "tune") -> argparse.Namespace:
    made = report.parser(name, __doc__)
    made.add_argument("--family", choices=sorted(FAMILIES), default="attention", help="default: %(default)s")
    options = made.parse_args(arguments)
    folder = report.ROOT / "src" / "ejkernel_eqx" / "data" / device_facts().slug
    options.output = options.output or folder / f"{options.family}.json"
    return options


def chosen_problems(options: argparse.Namespace) -> list[TuneProblem]:
    family = FAMILIES[options.family]
    every = family.tiny() if options.quick else family.problems()
    return [problem for problem in every if re.search(options.problems, problem.name)]


def in_time(options: argparse.Namespace, is_known: Callable[[TuneProblem], bool]) -> Iterator[TuneProblem]:
    """The chosen problems that are not known yet. One that is started is finished, so none is started that would exceed the limit if it took as
    long as the longest."""
    chosen, start, longest = chosen_problems(options), time.monotonic(), 0.0
    for n, problem in enumerate(chosen):
        if is_known(problem) and not options.force:
            continue
        began = time.monotonic()
        if began - start + longest > options.time_limit:
            print(f"time limit: {len(chosen) - n} of {len(chosen)} problems omitted; run again to continue")
            return
        print(f"[{began - start:.0f} s, {n + 1}/{len(chosen)}] {problem.name}", flush=True)
        yield problem
        longest = max(longest, time.monotonic() - began)


def main(arguments: Sequence[str] | None = None, name: str = "tune") -> int:
    if name == "platform-times":
        return main_times(arguments)
    options = parse(arguments)
    if options.render is not None:
        return render_report(options.render, options.plot)
    family, chosen, platform = FAMILIES[options.family], chosen_problems(options), options.platform
    implementation_of = lambda problem: kernel_registry.get(problem.operation, Platform(platform))
    for problem in {problem.operation: problem for problem in chosen}.values():
        reason = implementation_of(problem).unusable(device_facts())
        if reason is not None:
            print(f"{platform} {reason}", file=sys.stderr)
            return 2
    environment = report.environment(options.commit)
    table, rows = Table(options.output), known_rows(options.json)
    failed: dict[str, str] = {}
    sampling = (options.budget, options.candidates, options.samples, options.sample_ms)
    effort = TuneOptions(*sampling, isolate=False if options.in_process else None, jobs=options.jobs)

    def is_done(problem: TuneProblem) -> bool:
        implementation = implementation_of(problem)
        done = table.knows(problem.make(implementation), implementation)
        return done and (options.json is None or problem.name in rows)

    for problem in in_time(options, is_done):
        implementation = implementation_of(problem)
        try:
            asked = problem.make(implementation)
            result = tune_problem(asked, implementation, options=effort, force=options.force)
        except FAILURES as error:  # also if the inputs of a search could not be made
            failed[problem.name] = reason_of(error)
            print(f"  not tuned: {failed[problem.name]}", flush=True)
        else:
            table.add(twins(result.to_record(device_facts()), implementation, family), environment)
            rows[problem.name] = row_of(problem, result, environment)
            print(f"  {dispatch.stable_json(result.config)}", flush=True)
        if options.json is not None:
            known = [*rows.values()]
            content = {"environment": environment, "summary": summary(known), "rows": known}
            report.write_json(options.json, content | ({"failed": failed} if failed else {}))
    shown = [rows[problem.name] for problem in chosen if problem.name in rows]
    print(text_table(shown))
    known = summary(shown)
    if options.plot is not None:
        plot(shown, options.plot, environment["device"])
    within = f"{known['within']} of {known['problems']}"
    print(f"heuristics within {BAR:.2f}x of the tuned: {within}; table: {options.output}")
    return 0


# Times of platforms


def is_known(asked: Problem, table: Table, platforms: Sequence[str]) -> bool:
    """Tells whether a single run has timed all of them."""
    same = lambda r: (r.operation, r.problem) == (asked.operation, asked.key())
    results = [r for r in table.records.values() if same(r) and r.platform in platforms]
    return len(results) == len(platforms) and len({r.date[:10] for r in results}) == 1


def measured(asked: Problem, table: Table, options: argparse.Namespace) -> list[Contender] | str:
    """The platforms with a time to keep, or why there is nothing to compare."""
    known = [kernel_registry.get(asked.operation, platform) for platform in options.platform]
    refused = {i.platform.value: i.unsupported(asked, device_facts()) for i in known}
    if any(refused.values()):
        return "; ".join(f"{platform} {reason}" for platform, reason in refused.items() if reason)
    for record in table.records.values():
        same = (record.operation, record.problem) == (asked.operation, asked.key())
        # For one key, only sizes can change what the kernels do.
        if same and record.exact["dims"] != asked.to_dict()["dims"] and record.platform in options.platform:
            return f"the table has {record.platform} for another problem of this key"
    results = bench(asked, known, options.samples, options.sample_ms)
    wrong = [f"{c.platform}: {c.state}, {c.reason}" for c in results if c.state != TIMED]
    untuned = [f"{c.platform} is not tuned" for c in results if c.state == TIMED and not c.settled]
    return "; ".join(wrong + untuned) or results


def keep_times(
    asked: Problem, contenders: Sequence[Contender], table: Table, family: Family, environment: dict
) -> None:
    for contender in contenders:
        assert contender.implementation is not None
        place = asked.operation, contender.platform, asked.key()
        known = {(r.operation, r.platform, r.problem): r for r in table.records.values()}.get(place)
        record = record_of(asked, contender, known)
        table.add(twins(record, contender.implementation, family), environment)


def main_times(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments, "platform-times")
    options.platform = options.platform or ["cuda", "triton"]
    family, environment = FAMILIES[options.family], report.environment(options.commit)
    table, rows = Table(options.output), []
    # The same for all platforms, taken from the one that runs anything.
    asked_of = lambda problem: problem.make(kernel_registry.get(problem.operation, Platform.XLA))
    for problem in in_time(options, lambda problem: is_known(asked_of(problem), table, options.platform)):
        asked = asked_of(problem)
        try:
            contenders = measured(asked, table, options)
        except FAILURES as error:
            contenders = reason_of(error)
        if isinstance(contenders, str):
            print(f"{problem.name}: omitted, {contenders}", flush=True)
            continue
        keep_times(asked, contenders, table, family, environment)
        best = min(contenders, key=lambda c: (c.timings.get(BOTH) or next(iter(c.timings.values()))).ms)
        for one in contenders:
            for direction, timing in one.timings.items():
                row = {"problem": problem.name, "direction": direction, "platform": one.platform}
                row |= {"ms": report.number(timing.ms, 4), "fastest": "fastest" if one is best else ""}
                rows.append(row)
        print(f"{problem.name}: {best.platform}", flush=True)
    print(report.table_of("platform-times", rows))
    report.save(options, rows=rows)
    print(f"table: {options.output}")
    return 0
