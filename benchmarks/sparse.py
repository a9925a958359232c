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
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax

from benchmarks import command, comparison, linear_peers
from benchmarks import sparse_peers as peers
from benchmarks import sparse_problems as problems
from benchmarks.comparison import Implementation
from benchmarks.linear_plot import plot as plot_ratios
from benchmarks.prepare import DIRECTIONS, fastest, input_sets, PeerRow, prepare, Prepared, ratio
from benchmarks.sparse_problems import Arrays, Inputs, SparseProblem

DENSE = "dense"


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


# The implementations


def prepared(forward: Any, sets: Sequence[Inputs], direction: str) -> Prepared:
    return prepare(problems.direction_of(forward, direction != "forward"), sets)


def dense(problem: SparseProblem, platform: str, sets: Sequence[Inputs], direction: str) -> Prepared:
    """Computes what is hidden as well, so its results are not those of the problem."""
    return prepared(problems.dense(problem, platform), sets, direction)._replace(results={})


def implementations(problem: SparseProblem, options: argparse.Namespace) -> Iterator[Implementation]:
    for name, platform in comparison.platforms(options):
        make = lambda sets, way, p=platform: prepared(problems.ours(problem, p), sets, way)
        yield Implementation(name, False, make)
    # On the platform whose kernels run lists.
    platform = "xla" if jax.default_backend() == "cpu" else "triton"
    yield Implementation(DENSE, True, functools.partial(dense, problem, platform))
    if options.torch:
        yield from linear_peers.implementations(peers.peers_of(problem))


# Measuring


def measure(problem: SparseProblem, options: argparse.Namespace) -> Iterator[list[Row]]:
    """The rows of a problem, by direction."""
    sets = input_sets(functools.partial(problems.make_inputs, problem))
    expected = problems.expected_results(problem, sets[0])
    share = problems.visible(problem)[1]

    def check(row: Row, results: Arrays) -> str | None:
        found = problems.errors_of(problem, results, expected)
        return comparison.check_errors(row, found, comparison.SAME_MATHEMATICS)

    for direction, rows in comparison.compared(
        Row, problem.name, DIRECTIONS, lambda _: implementations(problem, options), sets, check, options
    ):
        peer = fastest(row for row in rows if row.is_peer and row.implementation != DENSE)
        whole = fastest(row for row in rows if row.implementation == DENSE)
        work = problems.flops(problem, direction != "forward")
        for row in rows:
            row.visible_tiles = 1.0 if row.implementation == DENSE else share
            if row.implementation == DENSE or not row.ms:
                continue
            row.ratio, row.tflop_per_s = ratio(peer, row), work / row.ms / 1e9
            row.a_tile = row.ms / (share * whole) if whole else None
        yield rows


def summarise(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """The lowest ratio and the most time a tile of ours, in each direction."""
    most = comparison.Extreme("most time a tile", lambda row: row.a_tile, max)
    return comparison.summary(rows, extremes=(most,))


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

COMPARISON = comparison.Comparison(
    "sparse",
    __doc__,
    comparison.Problems(problems.TINY, problems.CPU, problems.ANCHORS),
    measure,
    Row,
    comparison.Output(summarise, TABLES, plot),
)
parse, main = COMPARISON.parse, COMPARISON.main


if __name__ == "__main__":
    COMPARISON.script()
