"""Grouped matmuls compared with PyTorch's `_grouped_mm`, if installed, and `lax.ragged_dot`.

    python benchmarks/moe.py --json moe.json --plot moe.png
    python benchmarks/moe.py --problems 'E64' --time-limit 300
    python benchmarks/moe.py --quick                                # tiny problems
    python benchmarks/moe.py --render moe.json --plot moe.png --markdown moe.md

Every result of ours is first compared with the float32 reference on this device and at full size; speeds are reported only if the results
agree. The output and the gradient of each side are measured apart. Peers receive the same data in the same run; PyTorch is timed as CUDA
graphs, without Python's launch overhead. Gates, gathered rows and right sides in 8 bits have no peer.
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

from benchmarks import command, comparison
from benchmarks import moe_problems as problems
from benchmarks.comparison import Implementation
from benchmarks.linear_plot import plot as plot_bars
from benchmarks.measure import torch_work
from benchmarks.moe_problems import Arrays, DIRECTIONS, Inputs, LEFT, MoeProblem
from benchmarks.prepare import fastest, input_sets, nbytes, PeerRow, prepare, Prepared, ratio


@dataclasses.dataclass
class Row(PeerRow):
    """One implementation of one problem in one direction. `reason` is set if there is no time; `ratio` is the time of the fastest peer
    divided by this one's. `bytes`: the minimum that must be read and written."""

    bytes: int | None = None
    flops: float | None = None
    tflop_per_s: float | None = None
    tb_per_s: float | None = None

    @property
    def speed(self) -> str:
        return f"{self.ms:.3f} ms, {self.tflop_per_s:.1f} TFLOP/s{self.over_peer}"


def prepared(forward: problems.Forward, sets: Sequence[Inputs], direction: str) -> Prepared:
    return prepare(problems.direction_of(forward, direction), sets)


def in_torch(sets: Sequence[Inputs], direction: str) -> Prepared:
    """PyTorch's grouped product, of the transposed sides for the gradients."""
    import torch

    jax.block_until_ready(sets)

    def tensors(inputs: Inputs) -> tuple[Any, ...]:
        given = (inputs.learned["lhs"], inputs.learned["rhs"], inputs.cotangent)
        ends = torch.from_dlpack(inputs.constants["group_sizes"]).cumsum(0).to(torch.int32)
        return (*(torch.from_dlpack(x).clone() for x in given), ends)

    def run(lhs: Any, rhs: Any, dout: Any, ends: Any) -> Any:
        if direction == "forward":
            return torch._grouped_mm(lhs, rhs, offs=ends)
        if direction == LEFT:
            return torch._grouped_mm(dout, rhs.transpose(-2, -1), offs=ends)
        return torch._grouped_mm(lhs.transpose(-2, -1), dout, offs=ends)

    torch_sets = [tensors(inputs) for inputs in sets]
    found = run(*torch_sets[0])
    torch.cuda.synchronize()
    name = {"forward": "out", LEFT: "lhs"}.get(direction, "rhs")
    results = {name: jax.numpy.from_dlpack(found.contiguous())}
    return Prepared(results, lambda runs: torch_work(run, torch_sets, runs))


def implementations(problem: MoeProblem, options: argparse.Namespace) -> Iterator[Implementation]:
    for name, platform in comparison.platforms(options):
        forward = problems.ours(problem, platform)
        yield Implementation(name, False, functools.partial(prepared, forward))
    if problem.is_plain:
        yield Implementation("lax.ragged_dot", True, functools.partial(prepared, problems.ragged_dot))
        if options.torch:
            yield Implementation("torch._grouped_mm", True, in_torch)


# Measuring


def least_bytes(problem: MoeProblem, inputs: Inputs, direction: str) -> int:
    """The bytes of reading every input once and writing every result once."""
    left, out = nbytes(inputs.learned["lhs"]), nbytes(inputs.cotangent)
    right = nbytes([x for name, x in inputs.learned.items() if name != "lhs"])
    right += nbytes([x for name, x in inputs.constants.items() if name.startswith(("rhs", "up"))])
    # A gradient of a gated product reads the other sides too.
    again = 0 if direction == "forward" or not problem.gated else {LEFT: left}.get(direction, right)
    return left + right + out + again


def measure(problem: MoeProblem, options: argparse.Namespace) -> Iterator[list[Row]]:
    """The rows of a problem, by direction."""
    sets = input_sets(functools.partial(problems.make_inputs, problem))
    expected = problems.expected_results(problem, sets[0])

    def check(row: Row, results: Arrays) -> str | None:
        return comparison.check_errors(row, problems.errors_of(problem, row.direction, results, expected))

    for direction, rows in comparison.compared(
        Row,
        problem.name,
        problem.directions,
        lambda _: implementations(problem, options),
        sets,
        check,
        options,
    ):
        least = least_bytes(problem, sets[0], direction)
        peer = fastest(row for row in rows if row.is_peer)
        for row in rows:
            row.bytes, row.flops = least, problem.flops
            row.tb_per_s = least / row.ms / 1e9 if row.ms else None
            row.tflop_per_s = problem.flops / row.ms / 1e9 if row.ms else None
            row.ratio = ratio(peer, row)
        yield rows


def summarise(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """The lowest ratio of ours in each direction, the largest temporary memory over inputs and results, and what skewed groups cost."""
    summary = comparison.summary(rows, DIRECTIONS, (comparison.MEMORY,))
    even = {(row.problem, row.direction, row.implementation): row.ms for row in rows if row.ms}
    for row in rows:
        other = even.get((row.problem.replace(" skewed", ""), row.direction, row.implementation))
        if " skewed" in row.problem and row.ms and other and not row.is_peer:
            key = f"time over that of even groups, {row.direction}"
            found = {"value": row.ms / other, "problem": row.problem}
            summary[key] = max(summary.get(key, found), found, key=lambda entry: entry["value"])
    return summary


# Showing


HEADER = (
    "problem",
    "implementation",
    "platform",
    "ms",
    "spread",
    "TFLOP/s",
    "TB/s",
    "temporary",
    "ratio",
    "error",
)


TABLES = command.Tables(
    HEADER,
    DIRECTIONS,
    "temporary: memory over inputs and results; ratio: speed over the fastest peer's",
    "Speed of grouped matmuls over their peers",
)


def plot(content: Mapping[str, Any], path: str) -> None:
    plot_bars(content, path, "Grouped matmuls")


# The command

COMPARISON = comparison.Comparison(
    "moe",
    __doc__,
    comparison.Problems(problems.TINY, problems.CPU, problems.ANCHORS),
    measure,
    Row,
    comparison.Output(summarise, TABLES, plot),
)
parse, main = COMPARISON.parse, COMPARISON.main


if __name__ == "__main__":
    COMPARISON.script()
