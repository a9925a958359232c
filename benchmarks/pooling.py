"""Pooling compared with flash-linear-attention, PyTorch and a plain formula in JAX, and with the speed of a copy on the same device.

    python benchmarks/pooling.py --json pooling.json --plot pooling.png
    python benchmarks/pooling.py --problems chunks --time-limit 300
    python benchmarks/pooling.py --quick                            # tiny problems, anywhere
    python benchmarks/pooling.py --render pooling.json --plot pooling.png --markdown pooling.md

Every result of ours is first compared with the formula in float32, at full size. Peers receive the same data and are timed as CUDA graphs where
they can be. The copy reads and writes the tokens; speeds are bytes that must be moved over time.
"""

import argparse
import dataclasses
import functools
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax

from benchmarks import command, linear_peers, report
from benchmarks import pooling_peers as peers
from benchmarks import pooling_problems as problems
from benchmarks.measure import launch_floor
from benchmarks.pooling_problems import Arrays, Inputs, PoolProblem
from benchmarks.prepare import (
    Attempt,
    DIRECTIONS,
    fastest,
    finite,
    input_sets,
    measure_rows,
    nbytes,
    PeerRow,
    prepare,
    Prepared,
    ratio,
    worst,
)

OURS = ("default", "triton", "xla")
COPY = "copy"
_SAME_MATHEMATICS = 0.1  # peers may round differently


@dataclasses.dataclass
class Row(PeerRow):
    """One implementation of one problem in one direction. `reason` is set if there is no time; `ratio` is the time of the fastest peer
    divided by this one's, `of_copy` its speed in bytes over that of the copy. `bytes`: the minimum that must be read and written."""

    bytes: int | None = None
    tb_per_s: float | None = None
    of_copy: float | None = None

    @property
    def speed(self) -> str:
        return f"{self.ms:.4f} ms{self.over_peer}" + (
            f", {self.of_copy:.2f} of a copy's" if self.of_copy else ""
        )


# The implementations: from the problem, its input sets and the direction to `Prepared`.
Implementation = Callable[[PoolProblem, Sequence[Inputs], str], Prepared]


def ours(platform: str | None) -> Implementation:
    def make_ready(problem: PoolProblem, sets: Sequence[Inputs], direction: str) -> Prepared:
        forward = problems.ours(problem, platform)
        return prepare(problems.direction_of(forward, direction != "forward"), sets)

    return make_ready


def in_numpy(problem: PoolProblem, sets: Sequence[Inputs], direction: str) -> Prepared:
    """The formula in `jax.numpy`."""
    return prepare(problems.direction_of(problems.plain(problem), direction != "forward"), sets)


def copy(problem: PoolProblem, sets: Sequence[Inputs], direction: str) -> Prepared:
    """Reads and writes the tokens."""
    made = prepare(lambda inputs: {"x": -inputs.learned["x"]}, sets)
    return made._replace(results={})


def in_torch(peer: linear_peers.Peer) -> Implementation:
    def make_ready(problem: PoolProblem, sets: Sequence[Any], direction: str) -> Prepared:
        return linear_peers.prepare(peer, sets, direction != "forward")

    return make_ready


def implementations(
    problem: PoolProblem, options: argparse.Namespace
) -> Iterator[tuple[str, bool, Implementation]]:
    """The name of each implementation, whether it is a peer, and how to prepare it."""
    for platform in options.platforms:
        yield platform, False, ours(None if platform == "default" else platform)
    yield COPY, True, copy
    yield "jax.numpy", True, in_numpy
    if options.torch:
        for peer in peers.peers_of(problem):
            yield peer.name, True, in_torch(peer)


# Measuring


def least_bytes(inputs: Inputs, direction: str) -> int:
    """The bytes of reading the tokens and writing the results once; of the backward, of the same the other way."""
    once = nbytes(inputs)
    return 2 * once if direction == "forward+backward" else once


def measure(problem: PoolProblem, options: argparse.Namespace) -> Iterator[list[Row]]:
    """The rows of a problem, by direction."""
    sets = input_sets(functools.partial(problems.make_inputs, problem))
    expected, floor = problems.expected_results(problem, sets[0]), launch_floor(sets[0])
    for direction in DIRECTIONS:
        least = least_bytes(sets[0], direction)
        attempts = (
            Attempt(
                Row(problem.name, direction, name, is_peer, bytes=_bytes(name, sets[0], least)),
                functools.partial(make_ready, problem, sets, direction),
            )
            for name, is_peer, make_ready in implementations(problem, options)
        )
        rows = measure_rows(attempts, functools.partial(_check, problem, expected), options, floor)
        peer = fastest(row for row in rows if row.is_peer and row.implementation != COPY)
        for row in rows:
            row.tb_per_s = row.bytes / row.ms / 1e9 if row.ms else None
        speed = next((row.tb_per_s for row in rows if row.implementation == COPY), None)
        for row in rows:
            if row.implementation != COPY:
                row.ratio = ratio(peer, row)
                row.of_copy = row.tb_per_s / speed if row.tb_per_s and speed else None
        yield rows


def _bytes(name: str, inputs: Inputs, least: int) -> int:
    return 2 * nbytes(inputs.learned) if name == COPY else least


def _check(problem: PoolProblem, expected: Arrays, row: Row, results: Arrays) -> str | None:
    """The error in the results, if any."""
    errors, wrong = problems.errors_of(problem, results, expected)
    row.errors = finite(errors)
    allowed = row.is_peer and all(error <= _SAME_MATHEMATICS for error in errors.values())
    return None if allowed else wrong


def unmeasured(problem: PoolProblem, reason: str) -> list[Row]:
    return [Row(problem.name, way, "default", False, reason=reason) for way in DIRECTIONS]


def summarise(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """The lowest ratio and the lowest share of the copy's speed of ours, in each direction."""
    summary: dict[str, dict[str, Any]] = {}
    for direction in DIRECTIONS:
        mine = [row for row in rows if row.direction == direction and not row.is_peer]
        if lowest := worst(mine):
            summary[f"lowest ratio, {direction}"] = lowest
        if known := [row for row in mine if row.of_copy is not None]:
            slowest = min(known, key=lambda row: row.of_copy or 0.0)
            summary[f"lowest share of a copy's speed, {direction}"] = {
                "value": slowest.of_copy,
                "problem": slowest.problem,
            }
    return summary


# Showing


HEADER = ("problem", "implementation", "platform", "ms", "spread", "TB/s", "of copy", "temporary", "ratio", "error")  # fmt: skip


TABLES = command.Tables(
    HEADER,
    DIRECTIONS,
    "temporary: memory over bytes to move; ratio: speed over the fastest peer's",
    "Speed of pooling",
    digits=4,
)


def plot(content: Mapping[str, Any], path: str) -> None:
    """Writes the PNG: bars of the speed of each implementation. Requires matplotlib."""
    plt = report.pyplot()
    rows = [row for row in content["rows"] if row["ms"] is not None]
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    figure, axes = plt.subplots(
        1, len(DIRECTIONS), figsize=(12, 1.5 + 0.15 * len(rows)), squeeze=False, layout="constrained"
    )
    for axis, direction in zip(axes[0], DIRECTIONS):
        mine = [row for row in rows if row["direction"] == direction]
        places = list(dict.fromkeys(row["problem"] for row in mine))
        for i, name in enumerate(names):
            found = [row for row in mine if row["implementation"] == name]
            at = [places.index(row["problem"]) + 0.85 * (i / len(names) - 0.5) for row in found]
            axis.barh(at, [row["tb_per_s"] for row in found], 0.8 / len(names), align="edge", label=name)
        axis.set_yticks(range(len(places)), places, fontsize=7)
        axis.invert_yaxis()
        axis.set_xlabel("TB/s")
        axis.set_title(direction, fontsize=9)
    axes[0, 0].legend(fontsize=7)
    figure.suptitle(f"Pooling on {content['environment']['device']}")
    report.write_plot(figure, path)


# The command


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command.parser(__doc__)
    command.add_platforms(parser, OURS, "default")
    command.add_torch(parser)
    return command.parse(parser, arguments)


def choose(options: argparse.Namespace) -> list[PoolProblem]:
    """The problems in order of importance, so that a time limit omits the least important ones."""
    on_cpu = jax.default_backend() == "cpu"
    chosen = problems.TINY if options.quick else problems.CPU if on_cpu else problems.ANCHORS
    return command.matching(chosen, options)


def about(options: argparse.Namespace, chosen: Sequence[PoolProblem]) -> dict[str, Any]:
    needed = ("torch", "fla") if jax.default_backend() != "cpu" else ()
    missing = [package for package in linear_peers.missing() if package in needed]
    for package in missing:
        print(f"peer omitted: {package} is not installed")
    return {"missing": missing}


def sum_up(rows: Sequence[Row], chosen: Sequence[PoolProblem]) -> dict[str, Any]:
    return {"summary": summarise(rows)}


BENCHMARK = command.Benchmark(
    "pooling", about, measure, unmeasured, sum_up, TABLES.text, TABLES.markdown, plot
)


def main(arguments: Sequence[str] | None = None) -> int:
    return command.main(BENCHMARK, parse(arguments), choose)


if __name__ == "__main__":
    # Leaves memory for PyTorch on the same GPU; a pool allocated at the start keeps allocations out of the times.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")
    raise SystemExit(main())
