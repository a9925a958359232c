"""Block-sparse attention compared with PyTorch's compiled `flex_attention`, if installed, and with our own dense attention.

    python benchmarks/sparse.py --json sparse.json --plot sparse.png
    python benchmarks/sparse.py --problems 'causal|map' --time-limit 300
    python benchmarks/sparse.py --quick                             # tiny problems, anywhere
    python benchmarks/sparse.py --render sparse.json --plot sparse.png --markdown sparse.md

Every result of ours is first compared with dense attention in float32, at full size. The peer receives the same data and is timed as a CUDA graph
where it can be; its mask of blocks is made beforehand. `a tile`: the time over that of dense attention on the same platform, divided by the
visible share of tiles of 128 by 128; 1 if hidden tiles cost nothing and visible ones as much as in dense attention.
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

from benchmarks import command, linear_peers
from benchmarks import sparse_peers as peers
from benchmarks import sparse_problems as problems
from benchmarks.linear_plot import plot as plot_ratios
from benchmarks.measure import launch_floor
from benchmarks.prepare import (
    Attempt,
    DIRECTIONS,
    fastest,
    finite,
    input_sets,
    measure_rows,
    PeerRow,
    prepare,
    Prepared,
    ratio,
    worst,
)
from benchmarks.sparse_problems import Arrays, Inputs, SparseProblem

OURS = ("default", "triton", "xla")
DENSE = "dense"
_SAME_MATHEMATICS = 0.1  # peers may round differently


@dataclasses.dataclass
class Row(PeerRow):
    """One implementation of one problem in one direction. `reason` is set if there is no time; `ratio` is the time of the peer divided by this
    one's, `a_tile` this one's over that of dense attention for as many tiles."""

    visible_tiles: float | None = None
    tflop_per_s: float | None = None
    a_tile: float | None = None

    @property
    def speed(self) -> str:
        a_tile = f", {self.a_tile:.2f} of dense attention's time a tile" if self.a_tile else ""
        return f"{self.ms:.3f} ms{self.over_peer}{a_tile}"


# The implementations: from the problem, its input sets and the direction to `Prepared`.
Implementation = Callable[[SparseProblem, Sequence[Inputs], str], Prepared]


def ours(platform: str | None) -> Implementation:
    def make_ready(problem: SparseProblem, sets: Sequence[Inputs], direction: str) -> Prepared:
        forward = problems.ours(problem, platform)
        return prepare(problems.direction_of(forward, direction != "forward"), sets)

    return make_ready


def dense(platform: str | None) -> Implementation:
    """Computes what is hidden as well, so its results are not those of the problem."""

    def make_ready(problem: SparseProblem, sets: Sequence[Inputs], direction: str) -> Prepared:
        forward = problems.dense(problem, platform)
        made = prepare(problems.direction_of(forward, direction != "forward"), sets)
        return made._replace(results={})

    return make_ready


def in_torch(peer: linear_peers.Peer) -> Implementation:
    def make_ready(problem: SparseProblem, sets: Sequence[Any], direction: str) -> Prepared:
        return linear_peers.prepare(peer, sets, direction != "forward")

    return make_ready


def implementations(
    problem: SparseProblem, options: argparse.Namespace
) -> Iterator[tuple[str, bool, Implementation]]:
    """The name of each implementation, whether it is a peer, and how to prepare it."""
    for platform in options.platforms:
        yield platform, False, ours(None if platform == "default" else platform)
    # On the platform whose kernels run lists.
    yield DENSE, True, dense("xla" if jax.default_backend() == "cpu" else "triton")
    if options.torch:
        for peer in peers.peers_of(problem):
            yield peer.name, True, in_torch(peer)


# Measuring


def measure(problem: SparseProblem, options: argparse.Namespace) -> Iterator[list[Row]]:
    """The rows of a problem, by direction."""
    sets = input_sets(functools.partial(problems.make_inputs, problem))
    expected, floor = problems.expected_results(problem, sets[0]), launch_floor(sets[0])
    share = problems.visible(problem)[1]
    for direction in DIRECTIONS:
        attempts = (
            Attempt(
                Row(problem.name, direction, name, is_peer, visible_tiles=1.0 if name == DENSE else share),
                functools.partial(make_ready, problem, sets, direction),
            )
            for name, is_peer, make_ready in implementations(problem, options)
        )
        rows = measure_rows(attempts, functools.partial(_check, problem, expected), options, floor)
        peer = fastest(row for row in rows if row.is_peer and row.implementation != DENSE)
        whole = fastest(row for row in rows if row.implementation == DENSE)
        work = problems.flops(problem, direction != "forward")
        for row in rows:
            if row.implementation == DENSE or not row.ms:
                continue
            row.ratio, row.tflop_per_s = ratio(peer, row), work / row.ms / 1e9
            row.a_tile = row.ms / (share * whole) if whole else None
        yield rows


def _check(problem: SparseProblem, expected: Arrays, row: Row, results: Arrays) -> str | None:
    """The error in the results, if any."""
    errors, wrong = problems.errors_of(problem, results, expected)
    row.errors = finite(errors)
    allowed = row.is_peer and all(error <= _SAME_MATHEMATICS for error in errors.values())
    return None if allowed else wrong


def unmeasured(problem: SparseProblem, reason: str) -> list[Row]:
    return [Row(problem.name, way, "default", False, reason=reason) for way in DIRECTIONS]


def summarise(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """The lowest ratio and the most time a tile of ours, in each direction."""
    summary: dict[str, dict[str, Any]] = {}
    for direction in DIRECTIONS:
        mine = [row for row in rows if row.direction == direction and not row.is_peer]
        if lowest := worst(mine):
            summary[f"lowest ratio, {direction}"] = lowest
        if known := [row for row in mine if row.a_tile is not None]:
            slowest = max(known, key=lambda row: row.a_tile or 0.0)
            summary[f"most time a tile, {direction}"] = {"value": slowest.a_tile, "problem": slowest.problem}
    return summary


# Showing


HEADER = ("problem", "implementation", "platform", "ms", "spread", "TFLOP/s", "a tile", "ratio", "error")


TABLES = command.Tables(
    HEADER,
    DIRECTIONS,
    "a tile: time over dense attention's for as many tiles; ratio: speed over the peer's",
    "Speed of block-sparse attention over PyTorch's flex_attention",
)


def plot(content: Mapping[str, Any], path: str) -> None:
    plot_ratios(content, path, "Block-sparse attention")


# The command


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command.parser(__doc__)
    command.add_platforms(parser, OURS, "default")
    command.add_torch(parser)
    return command.parse(parser, arguments)


def choose(options: argparse.Namespace) -> list[SparseProblem]:
    """The problems in order of importance, so that a time limit omits the least important ones."""
    on_cpu = jax.default_backend() == "cpu"
    chosen = problems.TINY if options.quick else problems.CPU if on_cpu else problems.ANCHORS
    return command.matching(chosen, options)


def about(options: argparse.Namespace, chosen: Sequence[SparseProblem]) -> dict[str, Any]:
    missing = [name for name in linear_peers.missing() if name == "torch"]
    return {"missing": missing if jax.default_backend() != "cpu" else []}


def sum_up(rows: Sequence[Row], chosen: Sequence[SparseProblem]) -> dict[str, Any]:
    return {"summary": summarise(rows)}


BENCHMARK = command.Benchmark(
    "sparse", about, measure, unmeasured, sum_up, TABLES.text, TABLES.markdown, plot
)


def main(arguments: Sequence[str] | None = None) -> int:
    return command.main(BENCHMARK, parse(arguments), choose)


if __name__ == "__main__":
    # Leaves memory for PyTorch on the same GPU; a pool allocated at the start keeps allocations out of the times.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")
    raise SystemExit(main())
