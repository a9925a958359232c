"""Attention over pages: decoding relative to memory bandwidth, latents and prefills relative to arithmetic, and installed peers.

    python benchmarks/decode.py --json decode.json --plot decode.png --markdown decode.md
    python benchmarks/decode.py --problems 'N64 S4096|prefill' --time-limit 300
    python benchmarks/decode.py --quick                             # tiny problems
    python benchmarks/decode.py --render decode.json --plot decode.png --markdown decode.md

Every result is first compared with a float32 reference, on this device and at full size; speeds are reported only if the results agree
(within ten percent for peers, which use arithmetic of their own). Bytes are those of visible keys and values, queries, results and tables,
regardless of what else an implementation moves; the memory bandwidth is that of a copy in the same run.
Our implementations, peers and baselines (our FlashAttention on dense keys, and our 16-bit pages for 8-bit ones)
are timed in turn; on a GPU, with inputs that do not fit the cache.
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
from benchmarks import decode_peers as peers
from benchmarks import decode_problems as problems
from benchmarks.decode_peers import Peer
from benchmarks.decode_plot import plot
from benchmarks.decode_problems import BARS, DecodeProblem, Inputs, KINDS
from benchmarks.decode_tables import card_line, markdown, text_tables
from benchmarks.measure import JaxWork, launch_floor, time_in_turn, Work
from benchmarks.prepare import (
    Attempt,
    compiled,
    FAILURES,
    fastest,
    finite,
    input_sets,
    measure_rows,
    Measured,
    Prepared,
    ratio,
    selected_platform,
    worst,
)

OURS = ("default", "triton", "xla")
MINE, PEER, BASELINE = "ours", "peer", "baseline"
_SAME_MATHEMATICS = 0.1  # peers may round differently, and may raise errors
_RAISED = {MINE: FAILURES, BASELINE: FAILURES, PEER: (Exception,)}


@dataclasses.dataclass
class Row(Measured):
    """One implementation of one problem. `reason` is set if there is no time; `of_card`: fraction of the speed of a copy; `ratio` and
    `over_baseline` are the times of the fastest peer and of the baseline, divided by this one's."""

    problem: str
    kind: str
    role: str
    implementation: str
    bytes: int
    flops: float
    error: float | None = None
    tb_per_s: float | None = None
    of_card: float | None = None
    tflops: float | None = None
    over_baseline: float | None = None

    @property
    def label(self) -> str:
        return f"{self.problem}, {self.implementation}"

    @property
    def is_ours(self) -> bool:
        return self.role == MINE

    @property
    def speed(self) -> str:
        over = f", {self.ratio:.2f} of the fastest peer's speed" if self.ratio else ""
        return f"{self.ms:.4f} ms, {self.tb_per_s:.2f} TB/s, {self.tflops:.1f} TFLOP/s{over}"


def prepare(run: Callable[[Any], Array], sets: Sequence[Any]) -> Prepared:
    """Compiles `run` and computes the first of the sets."""

    @functools.cache
    def program(runs: int) -> Any:
        if runs == 1:
            return jax.jit(run).lower(sets[0]).compile()
        return jax.jit(in_turn(run, runs)).lower(tuple(sets)).compile()

    def make(runs: int) -> Work:
        return JaxWork(program(runs), [(x,) for x in sets] if runs == 1 else [(tuple(sets),)])

    once, selection, temporary = compiled(program)
    return Prepared({"out": once(sets[0])}, make, selection, temporary)


def in_turn(run: Callable[[Any], Array], runs: int) -> Callable[[Sequence[Any]], list[Array]]:
    """A function that runs this many times, with one set of inputs after another, so that none of them are in the cache even in short runs.

    As in the tuner's `repeated`, barriers separate and order the runs, and all results are returned.
    """

    def several(sets: Sequence[Any]) -> list[Array]:
        kept: list[Array] = []
        for n in range(runs):
            inputs = sets[n % len(sets)]
            if kept:
                inputs, kept[-1] = jax.lax.optimization_barrier((inputs, kept[-1]))
            kept.append(run(inputs))
        return kept

    return several


def implementations(problem: DecodeProblem, options: argparse.Namespace) -> Iterator[tuple[str, Peer]]:
    """The role of each implementation, and how to run it."""
    resolved = None
    for name in options.platforms:
        platform = None if name == "default" else name
        if name != resolved:  # the same platform gives the same program
            yield MINE, Peer(name, lambda inputs: inputs, problems.ours(problem, platform))
        if name == "default":
            resolved = default_platform(problem)
    if options.peers:
        for peer in peers.peers_of(problem, jax.default_backend() == "gpu"):
            yield BASELINE if peer.is_baseline else PEER, peer


def default_platform(problem: DecodeProblem) -> str:
    inputs = jax.eval_shape(lambda: problems.make_inputs(problem))
    return selected_platform(problems.ours(problem, None), inputs)


# Measuring


def measure_card(options: argparse.Namespace) -> dict[str, float]:
    """TB/s of a copy (read and written) and of a sum (read) of an array that does not fit the cache."""
    count = 2**20 if options.quick else 2**26 if jax.default_backend() == "cpu" else 2**28
    x = jnp.arange(count, dtype=jnp.int32)
    functions = {"copy": lambda x: x ^ 1, "read": lambda x: jnp.sum(x)}
    works = {name: JaxWork(jax.jit(f).lower(x).compile(), [(x,)]) for name, f in functions.items()}
    timings = time_in_turn(works, options.samples, options.sample_ms)
    moved = {"copy": 2 * x.nbytes, "read": x.nbytes}
    return {name: moved[name] / timing.ms / 1e9 for name, timing in timings.items()}


def measure(problem: DecodeProblem, card: Mapping[str, float], options: argparse.Namespace) -> list[Row]:
    """The rows of a problem."""
    sets = input_sets(functools.partial(problems.make_inputs, problem))
    expected, floor = problems.expected_results(problem, sets[0]), launch_floor(sets[0])

    def ready(peer: Peer) -> Prepared:
        return prepare(peer.run, _converted(peer, sets))

    attempts = (
        Attempt(_row(problem, role, peer.name), functools.partial(ready, peer), _RAISED[role])
        for role, peer in implementations(problem, options)
    )
    rows = measure_rows(attempts, functools.partial(_check, problem, expected), options, floor)
    for row in rows:
        if row.ms:
            row.tb_per_s, row.tflops = row.bytes / row.ms / 1e9, row.flops / row.ms / 1e9
            row.of_card = row.tb_per_s / card["copy"]
    peer, baseline = (fastest(row for row in rows if row.role == role) for role in (PEER, BASELINE))
    for row in rows:
        if row.role == MINE:
            row.ratio, row.over_baseline = ratio(peer, row), ratio(baseline, row)
    return rows


def _row(problem: DecodeProblem, role: str, implementation: str, reason: str | None = None) -> Row:
    sizes = problem.bytes(), problem.flops()
    return Row(problem.name, problem.kind, role, implementation, *sizes, reason=reason)


def unmeasured(problem: DecodeProblem, reason: str) -> list[Row]:
    return [_row(problem, MINE, "default", reason)]


def _converted(peer: Peer, sets: Sequence[Inputs]) -> list[Any]:
    convert = jax.jit(peer.convert)
    return [jax.block_until_ready(convert(inputs)) for inputs in sets]


def _check(
    problem: DecodeProblem, expected: dict[str, Array], row: Row, results: dict[str, Array]
) -> str | None:
    """The error in the result, if any."""
    error, wrong = problems.error_of(problem, results["out"], dict(expected))
    row.error = finite({"out": error})["out"]
    return None if row.role == PEER and error <= _SAME_MATHEMATICS else wrong


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """The worst problem for each target, by our fastest implementation, and the lowest ratio for each kind of problem."""
    best: dict[str, Row] = {}
    for row in rows:
        known = best.get(row.problem)
        if row.role == MINE and row.ms and (known is None or row.ms < (known.ms or 0)):
            best[row.problem] = row
    bars = []
    for bar in BARS:
        mine = [best[p.name] for p in bar.problems if p.name in best]
        known = [(getattr(row, bar.field), row.problem) for row in mine]
        known = [(value, problem) for value, problem in known if value is not None]
        if known:
            value, problem = max(known) if bar.at_most else min(known)
            met = value <= bar.bound if bar.at_most else value >= bar.bound
            bars.append({"what": bar.what, "bound": bar.bound, "at_most": bar.at_most, "met": met})
            bars[-1] |= {"value": value, "problem": problem, "measured": len(known), "of": len(bar.problems)}
    lowest = {}
    for kind in KINDS:
        if found := worst(row for row in best.values() if row.kind == kind):
            lowest[kind] = found
    return {"bars": bars, "lowest ratio": lowest}


# The command


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command.parser(__doc__)
    command.add_platforms(parser, OURS, "default,xla")
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="ours alone")
    return command.parse(parser, arguments)


def choose(options: argparse.Namespace) -> list[DecodeProblem]:
    """The problems in order of importance, so that a time limit omits the least important ones."""
    full = problems.CPU if jax.default_backend() == "cpu" else problems.EVERY
    chosen = problems.TINY if options.quick else full
    return command.matching(chosen, options)


def about(options: argparse.Namespace, chosen: Sequence[DecodeProblem]) -> dict[str, Any]:
    """Also measures the bandwidth of the device, with which the problems are compared."""
    found: dict[str, Any] = {
        "missing": peers.missing() if options.peers and jax.default_backend() == "gpu" else []
    }
    found["card"] = options.card = measure_card(options)
    found["sizes"] = {problem.name: dataclasses.asdict(problem) for problem in chosen}
    print(card_line(found))
    for package in found["missing"]:
        print(f"peer omitted: {package} is not installed")
    return found


def sum_up(rows: Sequence[Row], chosen: Sequence[DecodeProblem]) -> dict[str, Any]:
    return {"summary": summarise(rows)}


BENCHMARK = command.Benchmark(
    "decode",
    about,
    lambda problem, options: [measure(problem, options.card, options)],
    unmeasured,
    sum_up,
    text_tables,
    markdown,
    plot,
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.render:
        return command.render(BENCHMARK, options)
    return command.run(BENCHMARK, choose(options), options)


if __name__ == "__main__":
    # Peers and XLA's temporaries need memory too; a pool allocated at the start keeps allocations out of the times.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.8")
    raise SystemExit(main())
