"""The linear-time family compared with flash-linear-attention and mamba_ssm, if installed, and its decoding steps.

    python benchmarks/linear.py --json linear.json --plot linear.png
    python benchmarks/linear.py --problems 'KDA|gated' --time-limit 300
    python benchmarks/linear.py --quick                             # tiny problems
    python benchmarks/linear.py --render linear.json --plot linear.png --markdown linear.md

Every result of ours is first compared with the float32 recurrence, token by token, on this device and at full size; speeds are reported
only if the results agree. Peers receive the same data and are timed as CUDA graphs, without Python's launch overhead. Steps update their
state in place and are compared with an XLA pass that reads and writes a state of that size in place; without a GPU, the peer is a
`lax.scan` over time.
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
import jax.numpy as jnp
from jax import Array

from benchmarks import command
from benchmarks import linear_peers as peers
from benchmarks import linear_problems as problems
from benchmarks.linear_plot import plot
from benchmarks.linear_problems import Arrays, Inputs, LinearProblem
from benchmarks.measure import launch_floor, StateWork
from benchmarks.prepare import (
    Attempt,
    compiled,
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

STEP = "step"
OURS = ("default", "triton", "xla")
_SAME_MATHEMATICS = 0.1  # peers may round differently


@dataclasses.dataclass
class Row(PeerRow):
    """One implementation of one problem in one direction. `reason` is set if there is no time; `ratio` is the time of the fastest peer
    divided by this one's. `bytes`: the minimum that must be read and written."""

    bytes: int | None = None
    tb_per_s: float | None = None

    @property
    def speed(self) -> str:
        return f"{self.ms:.3f} ms{self.over_peer}"


# The implementations: from the problem, its input sets and the direction to `Prepared`.
Implementation = Callable[[LinearProblem, Sequence[Inputs], str], Prepared]


def _prepare(forward: Callable[..., Any], sets: Sequence[Inputs], direction: str) -> Prepared:
    """Prepares a function of many tokens."""
    return prepare(problems.direction_of(forward, direction != "forward"), sets)


def _prepare_step(
    function: Callable[[Arrays, Array], tuple[Array, Arrays]], sets: Sequence[Inputs]
) -> Prepared:
    """Prepares `(learned, state) -> (state, results)`, which updates its state in place."""
    state = sets[0].state
    assert state is not None, "a step starts from a state"

    def several(runs: int, learned: Arrays, state: Array) -> tuple[Array, list[Arrays]]:
        results = []
        for _ in range(runs):
            state, found = function(learned, state)
            state = jax.lax.optimization_barrier(state)
            results.append(found)
        return state, results

    @functools.cache
    def program(runs: int) -> Any:
        function = jax.jit(functools.partial(several, runs), donate_argnums=1)
        return function.lower(sets[0].learned, state).compile()

    once, selection, temporary = compiled(program)
    new, (results,) = once(sets[0].learned, jnp.copy(state))
    return Prepared(
        {**results, "state": new},
        lambda runs: StateWork(program(runs), jnp.copy(state), [inputs.learned for inputs in sets]),
        selection,
        temporary,
    )


def ours(platform: str | None) -> Implementation:
    def make_ready(problem: LinearProblem, sets: Sequence[Inputs], direction: str) -> Prepared:
        function = problems.ours(problem, platform)
        if not problem.is_step:
            return _prepare(function, sets, direction)

        def step(learned: Arrays, state: Array) -> tuple[Array, Arrays]:
            out, state = function(learned, state)
            return state, {"out": out}

        return _prepare_step(step, sets)

    return make_ready


def over_time(problem: LinearProblem, sets: Sequence[Inputs], direction: str) -> Prepared:
    """`lax.scan` over the tokens."""
    return _prepare(problems.plain(problem), sets, direction)


def in_place(problem: LinearProblem, sets: Sequence[Inputs], direction: str) -> Prepared:
    """Only reads and writes the state."""
    prepared = _prepare_step(lambda learned, state: (0.999 * state, {}), sets)
    return prepared._replace(results={})


def in_torch(peer: peers.Peer) -> Implementation:
    def make_ready(problem: LinearProblem, sets: Sequence[Inputs], direction: str) -> Prepared:
        return peers.prepare(peer, sets, direction != "forward")

    return make_ready


def implementations(
    problem: LinearProblem, options: argparse.Namespace
) -> Iterator[tuple[str, bool, Implementation]]:
    """The name of each implementation, whether it is a peer, and how to prepare it."""
    for platform in options.platforms:
        yield platform, False, ours(None if platform == "default" else platform)
    if problem.is_step:
        yield "in place", True, in_place
    elif jax.default_backend() == "cpu":
        yield "lax.scan", True, over_time
    elif options.torch:
        for peer in peers.peers_of(problem):
            yield peer.name, True, in_torch(peer)


# Measuring


def least_bytes(inputs: Inputs, direction: str) -> int:
    """The bytes of reading every input once and writing every result once."""
    learned, out = nbytes(inputs.learned), nbytes(inputs.cotangent)
    if direction == "forward+backward":
        return 2 * learned + out
    return learned + out + 2 * nbytes(inputs.state)


def measure(problem: LinearProblem, options: argparse.Namespace) -> Iterator[list[Row]]:
    """The rows of a problem, by direction."""
    sets = input_sets(functools.partial(problems.make_inputs, problem))
    expected, floor = problems.expected_results(problem, sets[0]), launch_floor(sets[0])
    for direction in directions_of(problem):
        least = least_bytes(sets[0], direction)
        attempts = (
            Attempt(
                Row(problem.name, direction, name, is_peer, bytes=least),
                functools.partial(make_ready, problem, sets, direction),
            )
            for name, is_peer, make_ready in implementations(problem, options)
        )
        rows = measure_rows(attempts, functools.partial(_check, problem, expected), options, floor)
        peer = fastest(row for row in rows if row.is_peer)
        for row in rows:
            row.tb_per_s = least / row.ms / 1e9 if row.ms else None
            row.ratio = ratio(peer, row)
        yield rows


def _check(problem: LinearProblem, expected: Mapping[str, Arrays], row: Row, results: Arrays) -> str | None:
    """The error in the results, if any."""
    errors, wrong = problems.errors_of(problem, row.direction, results, expected)
    row.errors = finite(errors)
    allowed = row.is_peer and all(error <= _SAME_MATHEMATICS for error in errors.values())
    return None if allowed else wrong


def directions_of(problem: LinearProblem) -> tuple[str, ...]:
    return (STEP,) if problem.is_step else DIRECTIONS


def unmeasured(problem: LinearProblem, reason: str) -> list[Row]:
    return [Row(problem.name, way, "default", False, reason=reason) for way in directions_of(problem)]


def summarise(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """The lowest ratio of ours in each direction, and the largest temporary memory over inputs and results."""
    summary: dict[str, dict[str, Any]] = {}
    for direction in (*DIRECTIONS, STEP):
        mine = [row for row in rows if row.direction == direction and not row.is_peer]
        if lowest := worst(mine):
            summary[f"lowest ratio, {direction}"] = lowest
        if known := [row for row in mine if row.temporary_bytes is not None and row.bytes]:
            most = max(known, key=_memory)
            summary[f"most temporary memory, {direction}"] = {"value": _memory(most), "problem": most.problem}
    return summary


def _memory(row: Row) -> float:
    """Temporary memory divided by that of inputs and results."""
    return (row.temporary_bytes or 0) / (row.bytes or 1)


# Showing


HEADER = ("problem", "implementation", "platform", "ms", "spread", "TB/s", "temporary", "ratio", "error")


TABLES = command.Tables(
    HEADER,
    (*DIRECTIONS, STEP),
    "temporary: memory over inputs and results; ratio: speed over the fastest peer's",
    "Speed of the linear-time family over its peers",
)


# The command


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command.parser(__doc__)
    command.add_platforms(parser, OURS, "default")
    command.add_torch(parser)
    return command.parse(parser, arguments)


def choose(options: argparse.Namespace) -> list[LinearProblem]:
    """The problems in order of importance, so that a time limit omits the least important ones."""
    on_cpu = jax.default_backend() == "cpu"
    chosen = problems.TINY if options.quick else problems.CPU if on_cpu else problems.ANCHORS + problems.STEPS
    return command.matching(chosen, options)


def about(options: argparse.Namespace, chosen: Sequence[LinearProblem]) -> dict[str, Any]:
    missing = peers.missing() if jax.default_backend() != "cpu" else []
    for package in missing:
        print(f"peer omitted: {package} is not installed")
    return {"missing": missing}


def sum_up(rows: Sequence[Row], chosen: Sequence[LinearProblem]) -> dict[str, Any]:
    return {"summary": summarise(rows)}


BENCHMARK = command.Benchmark(
    "linear", about, measure, unmeasured, sum_up, TABLES.text, TABLES.markdown, plot
)


def main(arguments: Sequence[str] | None = None) -> int:
    return command.main(BENCHMARK, parse(arguments), choose)


if __name__ == "__main__":
    # Leaves memory for PyTorch on the same GPU; a pool allocated at the start keeps allocations out of the times.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")
    raise SystemExit(main())
