"""Finds the tiles of the Triton attention kernels on this device and writes them to the package's shipped table.

    python benchmarks/tune_attention.py --problems 'S4096.* D128' --time-limit 500 --output attention.json

The forward, the key gradient and the query gradient are tuned one after the other, each with the winners before it.
A candidate must agree with float32 mathematics and repeat itself bit for bit before its time counts.
"""

import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import os
import pathlib
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
from jax import Array
from tqdm import tqdm

import ejkernel_eqx as ejx
from benchmarks import attention_problems as problems
from benchmarks import report
from benchmarks.attention_problems import AttentionProblem, Inputs
from benchmarks.measure import input_set_count, JaxWork, time_in_turn
from ejkernel_eqx.attention.triton import TileConfig, TritonConfig
from ejkernel_eqx.dispatch import device_facts, on_selection, Selection, to_dict
from tests.tolerances import TOLERANCES

KERNELS = ("forward", "key_gradient", "query_gradient")
_CHECKED = {"forward": ("out",), "key_gradient": ("k", "v"), "query_gradient": ("q",)}
_MARGIN = 1.01  # a candidate must be this much faster than the one before it: less is noise


class Candidate(NamedTuple):
    tile: TileConfig
    config: TritonConfig
    function: Any


@dataclasses.dataclass
class Winner:
    config: TritonConfig
    error: float = 0.0


def tiles(kernel: str, problem: AttentionProblem) -> Iterator[TileConfig]:
    """Worth a compilation, by what has been good for the width of the heads."""
    wide = problem.D > 128
    sides = (32, 64, 128) if not wide else (16, 32, 64)
    long = (64, 128)
    queries, keys = (sides, long) if kernel == "key_gradient" else (long, sides)
    if wide and kernel != "forward":
        queries, keys = (
            ((16, 32, 64), (32, 64, 128)) if kernel == "key_gradient" else ((32, 64, 128), (16, 32, 64))
        )
    for block_q, block_k, warps, stages in itertools.product(queries, keys, (4, 8), (1, 2, 3, 4)):
        area = block_q * block_k
        too_few_warps = warps == 4 and area * max(problem.D, 64) > 128 * 64 * 128
        idle_warps = warps == 8 and area <= 32 * 64
        too_deep = (stages == 4 and (kernel != "forward" or problem.D > 64)) or (stages == 1 and not wide)
        if not (too_few_warps or idle_warps or too_deep):
            yield TileConfig(block_q, block_k, warps, stages)


def selection_of(problem: AttentionProblem, inputs: Inputs) -> Selection:
    found: list[Selection] = []
    attention = problems.build(problem, "triton")
    with on_selection(found.append):
        jax.eval_shape(
            lambda learned, masking: attention(**learned, **masking), inputs.learned, inputs.masking
        )
    return found[0]


def compile_kernel(
    problem: AttentionProblem, kernel: str, config: TritonConfig, inputs: Inputs
) -> Callable[..., dict[str, Array]]:
    """What has to be computed for the outputs of one kernel. Of the backward, XLA removes the other kernel."""
    attention = problems.build(problem, "triton", config)

    def forward(learned: dict[str, Array], masking: dict[str, Array]) -> Array:
        return attention(**learned, **masking)

    measured = problems.direction_of(forward, kernel != "forward")

    def run(*arguments: Any) -> dict[str, Array]:
        results = measured(*arguments)
        return {name: results[name] for name in _CHECKED[kernel]}

    return jax.jit(run).lower(*inputs).compile()


def compiled(
    problem: AttentionProblem, kernel: str, winner: Winner, inputs: Inputs, jobs: int
) -> Iterator[Candidate | str]:
    """The candidates in their order, the incumbent first; a line of text for each that cannot be compiled."""
    incumbent = getattr(winner.config, kernel)
    wanted = [incumbent, *(tile for tile in tiles(kernel, problem) if tile != incumbent)]

    def one(tile: TileConfig) -> Candidate | str:
        config = dataclasses.replace(winner.config, **{kernel: tile})
        try:
            return Candidate(tile, config, compile_kernel(problem, kernel, config, inputs))
        except problems.FAILURES as error:
            return f"{_short(tile)}: {type(error).__name__} {(str(error).splitlines() or [''])[0][:80]}"

    first = one(wanted[0])  # alone: what is loaded at the first compilation is loaded once
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        yield from tqdm(
            itertools.chain([first], pool.map(one, wanted[1:])),
            total=len(wanted),
            desc=f"{problem.name}, {kernel}",
            mininterval=5,
        )


def check(
    candidate: Candidate, inputs: Inputs, expected: dict[str, Array], bound: float
) -> tuple[float, str | None]:
    """Its error, and why it may not win."""
    try:
        first, second = (jax.block_until_ready(candidate.function(*inputs)) for _ in range(2))
    except problems.FAILURES as error:  # such as more shared memory than there is: said at the launch
        return float("inf"), f"{type(error).__name__} {(str(error).splitlines() or [''])[0][:80]}"
    error = max(float(x) for x in problems.relative_errors(first, expected).values())
    if not error <= bound:
        return error, f"wrong by {error:.2g}"
    same = all(bool(jnp.array_equal(first[name], second[name])) for name in first)
    return error, None if same else "not repeatable"


def tune_kernel(
    problem: AttentionProblem,
    kernel: str,
    winner: Winner,
    sets: Sequence[Inputs],
    options: argparse.Namespace,
) -> Winner:
    expected = problems.expected_results(problem, sets[0])
    bound = TOLERANCES[problem.dtype]["forward" if kernel == "forward" else "gradient"].rms
    passed: dict[TileConfig, tuple[Candidate, float]] = {}
    for candidate in compiled(problem, kernel, winner, sets[0], options.jobs):
        if isinstance(candidate, str):
            tqdm.write(f"  {candidate}")
            continue
        error, reason = check(candidate, sets[0], expected, bound)
        if reason is None:
            passed[candidate.tile] = (candidate, error)
        else:
            tqdm.write(f"  {_short(candidate.tile)}: denied, {reason}")
    if not passed:
        return winner
    works = {str(_short(tile)): JaxWork(candidate.function, sets) for tile, (candidate, _) in passed.items()}
    coarse = time_in_turn(works, samples=2, sample_ms=10)
    best = sorted(coarse, key=lambda name: coarse[name].ms)[:4]
    incumbent = _short(getattr(winner.config, kernel))
    finalists = dict.fromkeys([*(name for name in (incumbent,) if name in works), *best])
    fine = time_in_turn({name: works[name] for name in finalists}, samples=5)
    for name in finalists:
        print(f"  {kernel} {name}: {fine[name].ms:.4f} ms, spread {100 * fine[name].spread:.1f}%")
    chosen = min(fine, key=lambda name: fine[name].ms * (1 if name == incumbent else _MARGIN))
    candidate, error = next(entry for tile, entry in passed.items() if _short(tile) == chosen)
    return Winner(candidate.config, max(winner.error, error))


def _short(tile: TileConfig) -> str:
    return f"{tile.block_q}x{tile.block_k}, {tile.num_warps} warps, {tile.num_stages} stages"


def tune(problem: AttentionProblem, options: argparse.Namespace) -> dict[str, Any]:
    """The table's entry for a problem."""
    sets = [problems.make_inputs(problem, seed) for seed in range(input_set_count(problem.input_bytes()))]
    selection = selection_of(problem, sets[0])
    winner = Winner(selection.config)
    for kernel in options.kernels:
        winner = tune_kernel(problem, kernel, winner, sets, options)
    works = {}
    for name, config in (("before", selection.config), ("after", winner.config)):
        attention = problems.build(problem, "triton", config)
        both = problems.direction_of(lambda x, masking, f=attention: f(**x, **masking), True)
        works[name] = JaxWork(jax.jit(both).lower(*sets[0]).compile(), sets)
    times = time_in_turn(works)
    print(
        f"{problem.name}: forward+backward {times['before'].ms:.3f} ms before, {times['after'].ms:.3f} ms after"
    )
    return {
        "operation": selection.problem.operation,
        "platform": "triton",
        "problem": selection.problem.key(),
        "config": to_dict(winner.config),
        "ms": times["after"].ms,
        "error": winner.error,
        "versions": {name: version for name, version in report.versions().items() if name != "torch"},
    }


def merge(path: pathlib.Path, entries: Sequence[dict[str, Any]]) -> None:
    """Into the table at `path`, replacing entries of the same problems."""
    table = {"schema": 1, "device": device_facts().kind, "entries": []}
    if path.is_file():
        table |= json.loads(path.read_text(encoding="utf-8"))

    def key(entry: dict[str, Any]) -> tuple[str, ...]:
        return tuple(entry[name] for name in ("operation", "platform", "problem"))

    merged = {key(entry): entry for entry in (*table["entries"], *entries)}
    report.write_json(path, table | {"entries": [merged[k] for k in sorted(merged)]})


def main(arguments: Sequence[str] | None = None) -> int:
    facts = device_facts()
    shipped = report.ROOT / "src" / "ejkernel_eqx" / "data" / facts.slug / "attention.json"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", default="", metavar="REGEX", help="only problems whose name matches")
    parser.add_argument("--kernels", default=",".join(KERNELS), help="by comma (default: %(default)s)")
    parser.add_argument("--time-limit", type=float, default=float("inf"), metavar="SECONDS")
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1), help="compilations at once")
    parser.add_argument("--output", type=pathlib.Path, default=shipped, metavar="PATH", help="merged into")
    options = parser.parse_args(arguments)
    options.kernels = options.kernels.split(",")
    if unknown := set(options.kernels) - set(KERNELS):
        parser.error(
            f"--kernels: expected some of {', '.join(KERNELS)}, received {', '.join(sorted(unknown))}"
        )
    if jax.default_backend() != "gpu":
        print(f"tuning needs a GPU, the device is {facts.kind}", file=sys.stderr)
        return 2
    every = problems.ANCHORS + problems.FEATURES + problems.GRID
    chosen = [problem for problem in every if re.search(options.problems, problem.name)]
    start, longest = time.monotonic(), 0.0
    for n, problem in enumerate(chosen):
        began = time.monotonic()
        # A problem that is begun is finished: none is begun that would run past the limit.
        if began - start + longest > options.time_limit:
            print(f"time limit: {len(chosen) - n} of {len(chosen)} problems left out")
            break
        print(f"[{began - start:.0f} s, {n + 1}/{len(chosen)}] {problem.name}", flush=True)
        try:
            merge(options.output, [tune(problem, options)])
        except ejx.UnsupportedError as error:
            print(f"  {error}")
            continue
        longest = max(longest, time.monotonic() - began)
    print(f"wrote {options.output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
