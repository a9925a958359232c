"""Times the platforms that can run a problem, in turn, and writes the times into the shipped table, by which the fastest is chosen.

    python benchmarks/platform_times.py --time-limit 500                      # run again to continue
    python benchmarks/platform_times.py --problems 'D64' --force
    python benchmarks/platform_times.py --quick --platform xla --platform triton-interpret --output table.json

Nothing is tuned: a platform is timed with the configuration in the table for exactly this problem, or with its only one.
"""

import argparse
import pathlib
import re
import sys
import time
from collections.abc import Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from benchmarks import report
from benchmarks.prepare import FAILURES, reason_of
from benchmarks.tune import Table, twins
from benchmarks.tune_problems import FAMILIES, Family, TuneProblem
from ejkernel_eqx.cli.bench import bench, Contender, record_of, TIMED
from ejkernel_eqx.dispatch import BOTH, device_facts, kernel_registry, Platform, Problem


def asked_of(problem: TuneProblem) -> Problem:
    """The problem for the platforms: the same for all, taken from the one that runs anything."""
    return problem.make(kernel_registry.get(problem.operation, Platform.XLA))


def is_known(asked: Problem, table: Table, platforms: Sequence[str]) -> bool:
    """Whether a single run has timed all of them."""
    found = [
        r
        for r in table.records.values()
        if (r.operation, r.problem) == (asked.operation, asked.key()) and r.platform in platforms
    ]
    return len(found) == len(platforms) and len({r.date[:10] for r in found}) == 1


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
    found = bench(asked, known, options.samples, options.sample_ms)
    wrong = [f"{c.platform}: {c.state}, {c.reason}" for c in found if c.state != TIMED]
    untuned = [f"{c.platform} is not tuned" for c in found if c.state == TIMED and not c.settled]
    return "; ".join(wrong + untuned) or found


def keep(asked: Problem, found: Sequence[Contender], table: Table, family: Family, environment: dict) -> None:
    for contender in found:
        assert contender.implementation is not None
        place = asked.operation, contender.platform, asked.key()
        known = {(r.operation, r.platform, r.problem): r for r in table.records.values()}.get(place)
        record = record_of(asked, contender, known)
        table.add(twins(record, contender.implementation, family), environment)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--family", choices=sorted(FAMILIES), default="attention", help="default: %(default)s"
    )
    parser.add_argument("--platform", action="append", metavar="NAME", help="default: cuda and triton")
    parser.add_argument("--problems", default="", metavar="REGEX", help="part of a problem's name")
    parser.add_argument("--quick", action="store_true", help="tiny problems")
    parser.add_argument("--force", action="store_true", help="also measure known problems")
    parser.add_argument("--samples", type=int, default=9)
    parser.add_argument("--sample-ms", type=float, default=50.0)
    parser.add_argument("--time-limit", type=float, default=float("inf"), metavar="S")
    parser.add_argument("--output", type=pathlib.Path, metavar="PATH", help="default: the shipped table")
    parser.add_argument("--commit", help="version of the code if git does not know it")
    options = parser.parse_args(arguments)
    options.platform = options.platform or ["cuda", "triton"]
    folder = report.ROOT / "src" / "ejkernel_eqx" / "data" / device_facts().slug
    options.output = options.output or folder / f"{options.family}.json"
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    family, environment, table = (
        FAMILIES[options.family],
        report.environment(options.commit),
        Table(options.output),
    )
    every = family.tiny() if options.quick else family.problems()
    start, longest, rows = time.monotonic(), 0.0, []
    for problem in every:
        asked, began = asked_of(problem), time.monotonic()
        if not re.search(options.problems, problem.name) or (
            is_known(asked, table, options.platform) and not options.force
        ):
            continue
        if began - start + longest > options.time_limit:
            print("time limit: the rest is omitted; run again to continue")
            break
        try:
            found = measured(asked, table, options)
        except FAILURES as error:
            found = reason_of(error)
        if isinstance(found, str):
            print(f"{problem.name}: omitted, {found}", flush=True)
            continue
        keep(asked, found, table, family, environment)
        longest = max(longest, time.monotonic() - began)
        by_time = sorted(found, key=lambda c: (c.timings.get(BOTH) or next(iter(c.timings.values()))).ms)
        for contender in found:
            for direction, timing in contender.timings.items():
                rows.append(
                    (
                        problem.name,
                        direction,
                        contender.platform,
                        report.number(timing.ms, 4),
                        contender is by_time[0],
                    )
                )
        print(f"{problem.name}: {by_time[0].platform}", flush=True)
    header = ("problem", "direction", "platform", "ms", "fastest")
    print(report.table(header, [(*row[:4], "fastest" if row[4] else "") for row in rows]))
    print(f"table: {options.output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
