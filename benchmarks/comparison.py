"""What benchmarks share that compare ours, on several platforms, with peers: problem by problem, and each in its directions.

A benchmark has its problems, its implementations, and what a row is compared by; how these are measured, summed up and shown is here.
"""

import argparse
import dataclasses
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

import jax
from jax import Array

from benchmarks import command
from benchmarks.measure import launch_floor
from benchmarks.prepare import Attempt, DIRECTIONS, finite, measure_rows, PeerRow, Prepared

OURS = ("default", "triton", "xla")
SAME_MATHEMATICS = 0.1
"""The most that a peer, which may round differently, may be off."""


class Implementation(NamedTuple):
    """What is compared, and how it is prepared for input sets and a direction."""

    name: str
    is_peer: bool
    make_ready: Callable[[Sequence[Any], str], Prepared]


def platforms(options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """The chosen platforms of ours: their names, and what `platform=` is."""
    for name in options.platforms:
        yield name, None if name == "default" else name


# Measuring


class MakeRow(Protocol):
    """Makes the row of an implementation: a subclass of `PeerRow`, or what adds to one."""

    def __call__(self, problem: str, direction: str, implementation: str, is_peer: bool, /) -> Any: ...


def compared(
    make_row: MakeRow,
    name: str,
    directions: Sequence[str],
    implementations: Callable[[str], Iterable[Implementation]],
    sets: Sequence[Any],
    check: Callable[[Any, dict[str, Array]], str | None],
    options: argparse.Namespace,
) -> Iterator[tuple[str, list[Any]]]:
    """Each direction of the problem `name`, and the rows of its implementations, checked and timed."""
    floor = launch_floor(sets[0])
    for direction in directions:
        attempts = (
            Attempt(make_row(name, direction, found.name, found.is_peer), _bound(found, sets, direction))
            for found in implementations(direction)
        )
        yield direction, measure_rows(attempts, check, options, floor)


def _bound(found: Implementation, sets: Sequence[Any], direction: str) -> Callable[[], Prepared]:
    return lambda: found.make_ready(sets, direction)


def check_errors(
    row: PeerRow, found: tuple[Mapping[str, float], str | None], peer: float | None = None
) -> str | None:
    """What is wrong with a row whose errors, and the first that is too large in words, were found. If `peer` is given, a peer's may be up to it."""
    errors, wrong = found
    row.errors = finite(errors)
    is_near = row.is_peer and peer is not None and all(error <= peer for error in errors.values())
    return None if is_near else wrong


# Summing up


class Extreme(NamedTuple):
    """A number of rows, of which the most or the least is picked."""

    title: str
    number: Callable[[Any], float | None]
    pick: Callable[..., Any]


def memory(row: Any) -> float | None:
    """Temporary memory divided by that of inputs and results."""
    return None if row.temporary_bytes is None or not row.bytes else row.temporary_bytes / row.bytes


def extreme(rows: Iterable[Any], of: Extreme) -> dict[str, Any] | None:
    """The number that is picked, and its problem."""
    known = [(value, row.problem) for row in rows if (value := of.number(row)) is not None]
    value, problem = of.pick(known, key=lambda pair: pair[0], default=(None, None))
    return None if problem is None else {"value": value, "problem": problem}


RATIO = Extreme("lowest ratio", lambda row: row.ratio, min)
MEMORY = Extreme("most temporary memory", memory, max)


def summary(
    rows: Sequence[Any], directions: Sequence[str] = DIRECTIONS, extremes: Sequence[Extreme] = ()
) -> dict[str, dict[str, Any]]:
    """The lowest ratio of ours in each direction, and these extremes."""
    found: dict[str, dict[str, Any]] = {}
    for direction in directions:
        mine = [row for row in rows if row.direction == direction and not row.is_peer]
        for of in (RATIO, *extremes):
            if entry := extreme(mine, of):
                found[f"{of.title}, {direction}"] = entry
    return found


# The command


class Problems(NamedTuple):
    """The problems with `--quick`, on a CPU and on other devices, in order of importance: a time limit omits the last ones."""

    tiny: Sequence[Any]
    cpu: Sequence[Any]
    anchors: Sequence[Any]


class Output(NamedTuple):
    """What is said of all rows, and how they are shown."""

    summarise: Callable[[Sequence[Any]], dict[str, Any]]
    tables: command.Tables
    plot: Callable[[Mapping[str, Any], str], None]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A benchmark and its command line.

    - `name`: in the JSON, and in the markers of a Markdown page; `description`: of the command.
    - `measure(problem, options)`: the rows of a problem, direction by direction.
    - `row`, `directions(problem)`: of the rows of a problem whose inputs could not be made.
    - `peers`: packages of peers, which need CUDA; without them `--no-torch` is no option.
    - `needed`: of these, the packages without which no peer is run.
    - `platforms`: of ours, by default.
    """

    name: str
    description: str | None
    problems: Problems
    measure: Callable[[Any, argparse.Namespace], Iterator[list[Any]]]
    row: MakeRow
    output: Output
    directions: Callable[[Any], Sequence[str]] = lambda problem: getattr(problem, "directions", DIRECTIONS)
    peers: Sequence[str] = ("torch",)
    needed: Sequence[str] = ()
    platforms: str = "default"

    def parse(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        parser = command.parser(self.description)
        command.add_platforms(parser, OURS, self.platforms)
        if self.peers:
            command.add_torch(parser)
        parser.set_defaults(torch=bool(self.peers))
        return command.parse(parser, arguments)

    def choose(self, options: argparse.Namespace) -> list[Any]:
        on_cpu = jax.default_backend() == "cpu"
        tiny, cpu, anchors = self.problems
        return command.matching(tiny if options.quick else cpu if on_cpu else anchors, options)

    def about(self, options: argparse.Namespace, chosen: Sequence[Any]) -> dict[str, Any]:
        """Which packages of peers are missing."""
        on_gpu = jax.default_backend() != "cpu"
        missing = [name for name in self.peers if on_gpu and not is_installed(name)]
        for package in missing:
            print(f"peer omitted: {package} is not installed")
        return {"missing": missing} if self.peers else {}

    def unmeasured(self, problem: Any, reason: str) -> list[Any]:
        rows = [self.row(problem.name, way, "default", False) for way in self.directions(problem)]
        for row in rows:
            row.reason = reason
        return rows

    def main(self, arguments: Sequence[str] | None = None) -> int:
        options = self.parse(arguments)
        options.torch = options.torch and all(map(is_installed, self.needed))
        summarise, tables, plot = self.output
        sum_up = lambda rows, chosen: {"summary": summarise(rows)}
        benchmark = command.Benchmark(
            self.name, self.about, self.measure, self.unmeasured, sum_up, tables.text, tables.markdown, plot
        )
        return command.main(benchmark, options, self.choose)

    def script(self) -> NoReturn:
        """`main` as the whole of a process."""
        # Leaves memory for PyTorch on the same GPU; a pool allocated at the start keeps allocations out of the times.
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6" if self.peers else "0.8")
        raise SystemExit(self.main())


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
