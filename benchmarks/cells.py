"""Recurrent cells (LSTM, GRU, RNN) compared with cuDNN, by PyTorch and by JAX.

    python benchmarks/cells.py --json cells.json --plot cells.png
    python benchmarks/cells.py --problems 'LSTM B64' --platforms default,xla
    python benchmarks/cells.py --quick                             # tiny problems
    python benchmarks/cells.py --render cells.json --plot cells.png --markdown cells.md

Every result of ours is first compared with a float32 `lax.scan` of the formulas, on this device and at full size; speeds are reported only if
the results agree. Each time includes the projection of the inputs. Peers receive the same data; PyTorch's layers are timed as CUDA graphs,
without Python's launch overhead, and keep their parameters in cuDNN's layout. Without a GPU, the peer is the `lax.scan`.
"""

import argparse
import functools
import pathlib
import sys
from collections.abc import Iterator, Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax

from benchmarks import cells_peers as peers
from benchmarks import cells_problems as problems
from benchmarks import comparison, linear
from benchmarks.cells_problems import Arrays, CellProblem, Inputs
from benchmarks.comparison import Implementation
from benchmarks.linear import Row
from benchmarks.linear_plot import plot
from benchmarks.prepare import DIRECTIONS, input_sets, nbytes, prepare, Prepared


def prepared(forward: problems.Forward, sets: Sequence[Inputs], direction: str) -> Prepared:
    return prepare(problems.direction_of(forward, direction != "forward"), sets)


def implementations(problem: CellProblem, options: argparse.Namespace) -> Iterator[Implementation]:
    in_jax = lambda forward: functools.partial(prepared, forward)
    for name, platform in comparison.platforms(options):
        yield Implementation(name, False, in_jax(problems.ours(problem, platform)))
    if jax.default_backend() == "cpu":
        yield Implementation("lax.scan", True, in_jax(problems.plain(problem)))
        return
    if options.torch:
        make = functools.partial(peers.torch_layer, problem)
        yield Implementation("PyTorch", True, lambda sets, direction: make(sets, direction != "forward"))
    if problem.cell == "LSTM":
        yield Implementation("jax.experimental.rnn, float32", True, in_jax(peers.jax_cudnn(problem)))


def least_bytes(inputs: Inputs, direction: str) -> int:
    """The bytes of reading every input once and writing every result once."""
    learned, out = nbytes(inputs.learned), nbytes(inputs.cotangent)
    return (2 * learned if direction == "forward+backward" else learned) + out


def measure(problem: CellProblem, options: argparse.Namespace) -> Iterator[list[Row]]:
    """The rows of a problem, by direction."""
    sets = input_sets(functools.partial(problems.make_inputs, problem))
    expected = problems.expected_results(problem, sets[0])

    def check(row: Row, results: Arrays) -> str | None:
        found = problems.errors_of(problem, row.direction, results, expected)
        return comparison.check_errors(row, found, comparison.SAME_MATHEMATICS)

    for direction, rows in comparison.compared(
        Row, problem.name, DIRECTIONS, lambda _: implementations(problem, options), sets, check, options
    ):
        linear.complete(rows, least_bytes(sets[0], direction))
        yield rows


TABLES = linear.TABLES._replace(picture="Speed of recurrent cells over their peers")


# The command

COMPARISON = comparison.Comparison(
    "cells",
    __doc__,
    comparison.Problems(problems.TINY, problems.CPU, problems.ANCHORS),
    measure,
    Row,
    comparison.Output(linear.summarise, TABLES, functools.partial(plot, title="Recurrent cells")),
    platforms="default,xla",
)
parse, main = COMPARISON.parse, COMPARISON.main


if __name__ == "__main__":
    COMPARISON.script()
