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
import importlib.util
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax

from benchmarks import cells_peers as peers
from benchmarks import cells_problems as problems
from benchmarks import command, linear
from benchmarks.cells_problems import Arrays, CellProblem, Inputs
from benchmarks.linear import Row
from benchmarks.linear_plot import plot
from benchmarks.measure import launch_floor
from benchmarks.prepare import (
    Attempt,
    DIRECTIONS,
    fastest,
    finite,
    input_sets,
    measure_rows,
    nbytes,
    prepare,
    Prepared,
    ratio,
)

OURS = ("default", "triton", "xla")
_SAME_MATHEMATICS = 0.1  # peers may round differently

Implementation = Callable[[Sequence[Inputs], str], Prepared]
"""From the input sets and the direction to what is timed."""


def in_jax(forward: problems.Forward) -> Implementation:
    return lambda sets, direction: prepare(problems.direction_of(forward, direction != "forward"), sets)


def implementations(
    problem: CellProblem, options: argparse.Namespace
) -> Iterator[tuple[str, bool, Implementation]]:
    """The name of each implementation, whether it is a peer, and how to prepare it."""
    for platform in options.platforms:
        yield platform, False, in_jax(problems.ours(problem, None if platform == "default" else platform))
    if jax.default_backend() == "cpu":
        yield "lax.scan", True, in_jax(problems.plain(problem))
        return
    if options.torch:
        make = functools.partial(peers.torch_layer, problem)
        yield "PyTorch", True, lambda sets, direction: make(sets, direction != "forward")
    if problem.cell == "LSTM":
        yield "jax.experimental.rnn, float32", True, in_jax(peers.jax_cudnn(problem))


def least_bytes(inputs: Inputs, direction: str) -> int:
    """The bytes of reading every input once and writing every result once."""
    learned, out = nbytes(inputs.learned), nbytes(inputs.cotangent)
    return (2 * learned if direction == "forward+backward" else learned) + out


def measure(problem: CellProblem, options: argparse.Namespace) -> Iterator[list[Row]]:
    """The rows of a problem, by direction."""
    sets = input_sets(functools.partial(problems.make_inputs, problem))
    expected, floor = problems.expected_results(problem, sets[0]), launch_floor(sets[0])
    for direction in DIRECTIONS:
        least = least_bytes(sets[0], direction)
        attempts = (
            Attempt(
                Row(problem.name, direction, name, is_peer, bytes=least),
                functools.partial(make_ready, sets, direction),
            )
            for name, is_peer, make_ready in implementations(problem, options)
        )
        rows = measure_rows(attempts, functools.partial(_check, problem, expected), options, floor)
        peer = fastest(row for row in rows if row.is_peer)
        for row in rows:
            row.tb_per_s = least / row.ms / 1e9 if row.ms else None
            row.ratio = ratio(peer, row)
        yield rows


def _check(problem: CellProblem, expected: Mapping[str, Arrays], row: Row, results: Arrays) -> str | None:
    """The error in the results, if any."""
    errors, wrong = problems.errors_of(problem, row.direction, results, expected)
    row.errors = finite(errors)
    allowed = row.is_peer and all(error <= _SAME_MATHEMATICS for error in errors.values())
    return None if allowed else wrong


def unmeasured(problem: CellProblem, reason: str) -> list[Row]:
    return [Row(problem.name, way, "default", False, reason=reason) for way in DIRECTIONS]


TABLES = linear.TABLES._replace(picture="Speed of recurrent cells over their peers")


# The command


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command.parser(__doc__)
    command.add_platforms(parser, OURS, "default,xla")
    command.add_torch(parser)
    return command.parse(parser, arguments)


def choose(options: argparse.Namespace) -> list[CellProblem]:
    """The problems in order of importance, so that a time limit omits the least important ones."""
    on_cpu = jax.default_backend() == "cpu"
    chosen = problems.TINY if options.quick else problems.CPU if on_cpu else problems.ANCHORS
    return command.matching(chosen, options)


def about(options: argparse.Namespace, chosen: Sequence[CellProblem]) -> dict[str, Any]:
    is_missing = jax.default_backend() != "cpu" and importlib.util.find_spec("torch") is None
    if is_missing:
        print("peer omitted: torch is not installed")
    return {"missing": ["torch"] if is_missing else []}


def sum_up(rows: Sequence[Row], chosen: Sequence[CellProblem]) -> dict[str, Any]:
    return {"summary": linear.summarise(rows)}


BENCHMARK = command.Benchmark(
    "cells",
    about,
    measure,
    unmeasured,
    sum_up,
    TABLES.text,
    TABLES.markdown,
    functools.partial(plot, title="Recurrent cells"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    return command.main(BENCHMARK, parse(arguments), choose)


if __name__ == "__main__":
    # Leaves memory for PyTorch on the same GPU; a pool allocated at the start keeps allocations out of the times.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")
    raise SystemExit(main())
