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
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks import command, comparison, turns
from benchmarks import linear_peers as peers
from benchmarks import linear_problems as problems
from benchmarks.comparison import Implementation
from benchmarks.linear_plot import plot
from benchmarks.linear_problems import Arrays, Inputs, LinearProblem
from benchmarks.measure import StateWork
from benchmarks.prepare import (
    compiled,
    DIRECTIONS,
    fastest,
    input_sets,
    nbytes,
    PeerRow,
    prepare,
    Prepared,
    ratio,
)

STEP = "step"


@dataclasses.dataclass
class Row(PeerRow):
    """One implementation of one problem in one direction. `reason` is set if there is no time; `ratio` is the time of the fastest peer
    divided by this one's. `bytes`: the minimum that must be read and written."""

    bytes: int | None = None
    tb_per_s: float | None = None

    @property
    def speed(self) -> str:
        return f"{self.ms:.3f} ms{self.over_peer}"


# The implementations


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


def ours(problem: LinearProblem, platform: str | None, sets: Sequence[Inputs], direction: str) -> Prepared:
    function = problems.ours(problem, platform)
    if not problem.is_step:
        return _prepare(function, sets, direction)

    def step(learned: Arrays, state: Array) -> tuple[Array, Arrays]:
        out, state = function(learned, state)
        return state, {"out": out}

    return _prepare_step(step, sets)


def over_time(problem: LinearProblem, sets: Sequence[Inputs], direction: str) -> Prepared:
    """`lax.scan` over the tokens."""
    return _prepare(problems.plain(problem), sets, direction)


def in_place(sets: Sequence[Inputs], direction: str) -> Prepared:
    """Only reads and writes the state."""
    prepared = _prepare_step(lambda learned, state: (0.999 * state, {}), sets)
    return prepared._replace(results={})


def implementations(problem: LinearProblem, options: argparse.Namespace) -> Iterator[Implementation]:
    for name, platform in comparison.platforms(options):
        yield Implementation(name, False, functools.partial(ours, problem, platform))
    if problem.is_step:
        yield Implementation("in place", True, in_place)
    elif jax.default_backend() == "cpu":
        yield Implementation("lax.scan", True, functools.partial(over_time, problem))
    elif options.torch:
        yield from peers.implementations(peers.peers_of(problem))


# Measuring


def least_bytes(inputs: Inputs, direction: str) -> int:
    """The bytes of reading every input once and writing every result once."""
    learned, out = nbytes(inputs.learned), nbytes(inputs.cotangent)
    if direction == "forward+backward":
        return 2 * learned + out
    return learned + out + 2 * nbytes(inputs.state)


def measure(problem: LinearProblem, options: argparse.Namespace) -> Iterator[list[Row]]:
    """The rows of a problem, by direction. In turns with other processes that measure on the device."""
    if options.torch:
        peers.load(peers.peers_of(problem))
    make = jax.jit(functools.partial(problems.make_inputs, problem)).lower(0).compile()
    with turns.held():
        yield from _measure(problem, input_sets(make), options)


def _measure(
    problem: LinearProblem, sets: Sequence[Inputs], options: argparse.Namespace
) -> Iterator[list[Row]]:
    expected = problems.expected_results(problem, sets[0])

    def check(row: Row, results: Arrays) -> str | None:
        found = problems.errors_of(problem, row.direction, results, expected)
        return comparison.check_errors(row, found, comparison.SAME_MATHEMATICS)

    ways = directions_of(problem)
    for direction, rows in comparison.compared(
        Row, problem.name, ways, lambda _: implementations(problem, options), sets, check, options
    ):
        complete(rows, least_bytes(sets[0], direction))
        yield rows


def complete(rows: Sequence[Row], least: int) -> None:
    """Adds what follows from the times of a direction that moves `least` bytes."""
    peer = fastest(row for row in rows if row.is_peer)
    for row in rows:
        row.bytes = least
        row.tb_per_s = least / row.ms / 1e9 if row.ms else None
        row.ratio = ratio(peer, row)


def directions_of(problem: LinearProblem) -> tuple[str, ...]:
    return (STEP,) if problem.is_step else DIRECTIONS


def summarise(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """The lowest ratio of ours in each direction, and the largest temporary memory over inputs and results."""
    return comparison.summary(rows, (*DIRECTIONS, STEP), (comparison.MEMORY,))


# Showing


HEADER = ("problem", "implementation", "platform", "ms", "spread", "TB/s", "temporary", "ratio", "error")


TABLES = command.Tables(
    HEADER,
    (*DIRECTIONS, STEP),
    "temporary: memory over inputs and results; ratio: speed over the fastest peer's",
    "Speed of the linear-time family over its peers",
)


# The command

COMPARISON = comparison.Comparison(
    "linear",
    __doc__,
    comparison.Problems(problems.TINY, problems.CPU, problems.ANCHORS + problems.LONG + problems.STEPS),
    measure,
    Row,
    comparison.Output(summarise, TABLES, plot),
    directions=directions_of,
    peers=peers.PACKAGES,
)
parse, main = COMPARISON.parse, COMPARISON.main


if __name__ == "__main__":
    COMPARISON.script()
