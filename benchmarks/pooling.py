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
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))


from benchmarks import command, comparison, linear_peers, report, turns
from benchmarks import pooling_peers as peers
from benchmarks import pooling_problems as problems
from benchmarks.comparison import Implementation
from benchmarks.pooling_problems import Arrays, Inputs, PoolProblem
from benchmarks.prepare import DIRECTIONS, fastest, input_sets, nbytes, PeerRow, prepare, Prepared, ratio

COPY = "copy"


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


# The implementations


def prepared(forward: Any, sets: Sequence[Inputs], direction: str) -> Prepared:
    return prepare(problems.direction_of(forward, direction != "forward"), sets)


def copy(sets: Sequence[Inputs], direction: str) -> Prepared:
    """Reads and writes the tokens."""
    made = prepare(lambda inputs: {"x": -inputs.learned["x"]}, sets)
    return made._replace(results={})


def implementations(problem: PoolProblem, options: argparse.Namespace) -> Iterator[Implementation]:
    for name, platform in comparison.platforms(options):
        make = lambda sets, way, p=platform: prepared(problems.ours(problem, p), sets, way)
        yield Implementation(name, False, make)
    yield Implementation(COPY, True, copy)
    yield Implementation("jax.numpy", True, functools.partial(prepared, problems.plain(problem)))
    if options.torch:
        yield from linear_peers.implementations(peers.peers_of(problem))


# Measuring


def least_bytes(inputs: Inputs, direction: str) -> int:
    """The bytes of reading the tokens and writing the results once; of the backward, of the same the other way."""
    once = nbytes(inputs)
    return 2 * once if direction == "forward+backward" else once


def measure(problem: PoolProblem, options: argparse.Namespace) -> Iterator[list[Row]]:
    """The rows of a problem, by direction. In turns with other processes that measure on the device."""
    with turns.held():
        yield from _measure(problem, options)


def _measure(problem: PoolProblem, options: argparse.Namespace) -> Iterator[list[Row]]:
    sets = input_sets(functools.partial(problems.make_inputs, problem))
    expected = problems.expected_results(problem, sets[0])

    def check(row: Row, results: Arrays) -> str | None:
        found = problems.errors_of(problem, results, expected)
        return comparison.check_errors(row, found, comparison.SAME_MATHEMATICS)

    for direction, rows in comparison.compared(
        Row, problem.name, DIRECTIONS, lambda _: implementations(problem, options), sets, check, options
    ):
        least = least_bytes(sets[0], direction)
        for row in rows:
            row.bytes = 2 * nbytes(sets[0].learned) if row.implementation == COPY else least
            row.tb_per_s = row.bytes / row.ms / 1e9 if row.ms else None
        peer = fastest(row for row in rows if row.is_peer and row.implementation != COPY)
        speed = next((row.tb_per_s for row in rows if row.implementation == COPY), None)
        for row in rows:
            if row.implementation != COPY:
                row.ratio = ratio(peer, row)
                row.of_copy = row.tb_per_s / speed if row.tb_per_s and speed else None
        yield rows


def summarise(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """The lowest ratio and the lowest share of the copy's speed of ours, in each direction."""
    least = comparison.Extreme("lowest share of a copy's speed", lambda row: row.of_copy, min)
    return comparison.summary(rows, extremes=(least,))


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

COMPARISON = comparison.Comparison(
    "pooling",
    __doc__,
    comparison.Problems(problems.TINY, problems.CPU, problems.ANCHORS),
    measure,
    Row,
    comparison.Output(summarise, TABLES, plot),
    peers=("torch", "fla"),
)
parse, main = COMPARISON.parse, COMPARISON.main


if __name__ == "__main__":
    COMPARISON.script()
