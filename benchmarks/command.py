"""The command line of a benchmark that compares implementations: its options, the run over its problems, and its output."""

import argparse
import dataclasses
import json
import os
import pathlib
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from benchmarks import report
from benchmarks.measure import torch_with_cuda
from benchmarks.prepare import reason_of, Row

UNMEASURED = "not measured: "


class Benchmark(NamedTuple):
    """The specifics of a benchmark.

    - `name`: in the JSON, and in the markers of a Markdown page.
    - `about(options, chosen)`: entries of the JSON before any rows, besides the environment. It may print lines and set options.
    - `measure(problem, options)`: the rows of a problem, part by part.
    - `unmeasured(problem, reason)`: the rows of a problem whose inputs could not be made.
    - `sum_up(rows, chosen)`: entries of the JSON about all rows so far.
    - `text(content)`, `markdown(content, picture)`, `plot(content, path)`: the output of a run.
    """

    name: str
    about: Callable[[argparse.Namespace, Sequence[Any]], dict[str, Any]]
    measure: Callable[[Any, argparse.Namespace], Iterable[list[Any]]]
    unmeasured: Callable[[Any, str], list[Any]]
    sum_up: Callable[[Sequence[Any], Sequence[Any]], dict[str, Any]]
    text: Callable[[Mapping[str, Any]], str]
    markdown: Callable[[Mapping[str, Any], str | None], str]
    plot: Callable[[Mapping[str, Any], str], None]


# Options


def parser(description: str | None, quick: str = "tiny problems") -> argparse.ArgumentParser:
    """A parser with the options of every benchmark."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--quick", action="store_true", help=quick)
    add("--problems", default="", metavar="REGEX", help="only problems whose name matches")
    add("--samples", type=int, default=5, help="samples of each time (default: %(default)s)")
    add("--sample-ms", type=float, default=None, help="length of a sample (default: 30; quick on a CPU 2)")
    limit = "start no problem after this time"
    add("--time-limit", type=float, default=float("inf"), metavar="SECONDS", help=limit)
    add("--commit", help="version of the code (default: from git)")
    add("--render", metavar="JSON", help="show an earlier run instead of measuring")
    for name in ("json", "plot", "markdown"):
        add(f"--{name}", metavar="PATH")
    return made


def add_platforms(made: argparse.ArgumentParser, ours: Sequence[str], default: str) -> None:
    made.add_argument(
        "--platforms", default=default, help=f"comma-separated, of {', '.join(ours)} (default: %(default)s)"
    )
    made.set_defaults(known_platforms=ours)


def parse(made: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    options = made.parse_args(arguments)
    options.platforms = options.platforms.split(",")
    known = options.known_platforms
    if unknown := sorted(set(options.platforms) - set(known)):
        made.error(f"--platforms: expected some of {', '.join(known)}, received {', '.join(unknown)}")
    short = options.quick and jax.default_backend() == "cpu"
    options.sample_ms = options.sample_ms or (2.0 if short else 30.0)
    return options


def add_torch(made: argparse.ArgumentParser) -> None:
    made.add_argument("--no-torch", dest="torch", action="store_false", help="omit the peers in PyTorch")


def matching(problems: Sequence[Any], options: argparse.Namespace) -> list[Any]:
    return [problem for problem in problems if re.search(options.problems, problem.name)]


# The run


def run(benchmark: Benchmark, chosen: Sequence[Any], options: argparse.Namespace) -> int:
    """Measures the problems, writes results after each, and shows all of them. Nonzero if one of ours is wrong or was not measured."""
    start = time.monotonic()
    if not chosen:
        print(f"no problem matches {options.problems!r}", file=sys.stderr)
        return 2
    content: dict[str, Any] = {"schema": 1, "benchmark": benchmark.name}
    content["environment"] = report.environment(options.commit)
    print(report.environment_line(content["environment"]))
    content |= benchmark.about(options, chosen)
    rows: list[Any] = []
    for n, problem in enumerate(chosen):
        if time.monotonic() - start > options.time_limit:
            print(f"time limit: {len(chosen) - n} of {len(chosen)} problems omitted")
            break
        for found in _measured(benchmark, problem, options):
            rows += found
            seconds = time.monotonic() - start
            for row in found:
                print(f"[{seconds:5.0f} s, {n + 1}/{len(chosen)}] {_progress(row)}", flush=True)
            content |= {"rows": [dataclasses.asdict(row) for row in rows], **benchmark.sum_up(rows, chosen)}
            content["seconds"] = seconds
            if options.json:
                report.write_json(options.json, content)
    if not rows:
        print("time limit: nothing measured", file=sys.stderr)
        return 1
    show(benchmark, content, options)
    return _verdict(rows)


def _measured(benchmark: Benchmark, problem: Any, options: argparse.Namespace) -> Iterator[list[Any]]:
    """The rows of a problem. If its inputs or its reference cannot be made, other problems can still be measured."""
    known = set()
    try:
        for rows in benchmark.measure(problem, options):
            known |= {row.label for row in rows}
            yield rows
    except Exception as error:  # of any type, as running out of memory raises several
        traceback.print_exc()
        rows = benchmark.unmeasured(problem, UNMEASURED + reason_of(error))
        yield [row for row in rows if row.label not in known]


def _progress(row: Row) -> str:
    platform = f" ({row.platform})" if row.platform and row.platform != row.implementation else ""
    return f"{row.label}{platform}: {row.reason if row.ms is None else row.speed}"


def _verdict(rows: Sequence[Row]) -> int:
    wrong = [row for row in rows if row.reason and row.reason.startswith("wrong")]
    unmeasured = [row for row in rows if row.reason and row.reason.startswith(UNMEASURED)]
    for row in wrong:
        print(f"WRONG: {row.label}: {row.reason}", file=sys.stderr)
    for row in unmeasured:
        print(f"{row.label}: {row.reason}", file=sys.stderr)
    return 1 if unmeasured or any(row.is_ours for row in wrong) else 0


def main(
    benchmark: Benchmark, options: argparse.Namespace, choose: Callable[[argparse.Namespace], Sequence[Any]]
) -> int:
    """The whole command of a benchmark that may have peers in PyTorch, which need CUDA."""
    if options.render:
        return render(benchmark, options)
    options.torch = options.torch and jax.default_backend() != "cpu" and torch_with_cuda()
    return run(benchmark, choose(options), options)


# Showing


_NAMES = ("problem", "implementation", "platform")
_NUMBERS = {
    "TFLOP/s": "tflop_per_s",
    "TB/s": "tb_per_s",
    "of copy": "of_copy",
    "over matmuls": "over_alone",
    "a tile": "a_tile",
    "over kernel": "over_kernel",
    "of flash": "of_flash",
    "over dense": "over_dense",
    "ratio": "ratio",
}


class Tables(NamedTuple):
    """Rows as a table for each direction.

    - `header`: titles of the columns, names first, the error last.
    - `directions`: in the order shown.
    - `note`: behind the title of each table of the text.
    - `picture`: the description of the plot in Markdown.
    - `digits`: of milliseconds.
    """

    header: Sequence[str]
    directions: Sequence[str]
    note: str
    picture: str
    digits: int = 3

    def cells(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        """The texts of a row; behind the names of one without a time, its reason."""
        if row["reason"] is None:
            return tuple(self._cell(title, row) for title in self.header)
        names = tuple(row[title] or "" for title in self.header if title in _NAMES)
        return (*names, *["–"] * (len(self.header) - len(names) - 1), row["reason"][:60])

    def _cell(self, title: str, row: Mapping[str, Any]) -> str:
        if title in _NAMES:
            return row[title] or ""
        if title == "ms":
            return report.number(row["ms"], self.digits)
        if title == "spread":
            return report.percent(row["spread"])
        if title == "temporary":
            known = row["temporary_bytes"] is not None
            return f"{row['temporary_bytes'] / row['bytes']:.2f}x" if known else "–"
        if title == "error":
            errors = [error for error in row["errors"].values() if error is not None]
            return f"{max(errors):.1e}" if errors else ""
        return report.number(row[_NUMBERS[title]])

    def _each(self, content: Mapping[str, Any]) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
        for direction in self.directions:
            if rows := [self.cells(row) for row in content["rows"] if row["direction"] == direction]:
                yield direction, rows

    def text(self, content: Mapping[str, Any]) -> str:
        tables = self._each(content)
        parts = [f"{way} ({self.note})\n{report.table(self.header, rows)}" for way, rows in tables]
        return "\n\n".join((*parts, report.summary_lines(content["summary"])))

    def markdown(self, content: Mapping[str, Any], picture: str | None) -> str:
        """For the documentation."""
        parts = [report.environment_line(content["environment"])]
        parts += [] if picture is None else [f"![{self.picture}]({picture})"]
        for way, rows in self._each(content):
            parts += [f"{way}:", report.markdown_table(self.header, rows)]
        return "\n\n".join(parts) + "\n"


def render(benchmark: Benchmark, options: argparse.Namespace) -> int:
    """Shows an earlier run."""
    show(benchmark, json.loads(pathlib.Path(options.render).read_text(encoding="utf-8")), options)
    return 0


def show(benchmark: Benchmark, content: Mapping[str, Any], options: argparse.Namespace) -> None:
    print("\n" + benchmark.text(content))
    if options.plot:
        benchmark.plot(content, options.plot)
    if options.markdown:
        folder = pathlib.Path(options.markdown).resolve().parent
        picture = options.plot and os.path.relpath(options.plot, folder)
        report.write_markdown(options.markdown, benchmark.name, benchmark.markdown(content, picture))
    for path in filter(None, (options.json, options.plot, options.markdown)):
        print(f"wrote {path}")
