"""Native sparse attention compared with flash-linear-attention's `parallel_nsa`, if installed, and with our own dense attention; and decoding.

    python benchmarks/native_sparse.py --json native_sparse.json --plot native_sparse.png
    python benchmarks/native_sparse.py --problems 'train.*T65536' --directions forward+backward --no-torch
    python benchmarks/native_sparse.py --problems 'train.*T8192' --no-dense --compile-peers 12
    python benchmarks/native_sparse.py --quick                               # tiny problems, anywhere
    python benchmarks/native_sparse.py --render native_sparse.json --markdown native_sparse.md

Every result of ours is first compared with platform `xla` in float32, for the blocks that ours has chosen. "fla" chooses its own, by a score that
differs in details, and has no window without flash-attn, so its results are not compared: what it leaves out is in its favour. "dense" is causal
`FlashAttention`. `ratio`: speed over that of "fla"; `over dense`: speed over that of "dense". Decoding reads, of each sequence, all compressed keys,
the chosen blocks and the window once; `TB/s` is that over the time. "by branch" is decoding with kernels for each branch;
`--platforms "default,by branch" --problems 'pages|decode'` has both in one run.

"fla" searches its configurations once a process, whatever the length: problems with few tokens run first, where the search takes seconds. With
`--compile-peers` several processes compile them before.
"""

import argparse
import contextlib
import dataclasses
import functools
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import ejkernel_eqx as ejx
from benchmarks import command, linear_peers, native_sparse_peers
from benchmarks.linear_plot import plot as plot_ratios
from benchmarks.linear_problems import Inputs
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
    UNTUNED,
    worst,
)
from ejkernel_eqx._tolerances import TOLERANCES
from ejkernel_eqx.dispatch import on_selection, Selection
from ejkernel_eqx.tuning.check import all_errors

BY_BRANCH = "by branch"
OURS = ("default", "triton", "xla", BY_BRANCH)
DENSE = "dense"
Arrays = dict[str, Array]
TRAIN, DECODE, PAGES = "train", "decode", "pages"


@dataclasses.dataclass(frozen=True)
class NativeProblem:
    """`B` rows of `T` tokens; or one query of each of `B` sequences over `T` keys, dense or in pages."""

    kind: str
    B: int
    T: int
    H: int = 64
    K: int = 4
    D: int = 128
    block: int = 64
    count: int = 16
    window: int = 512
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        sizes = f"{self.kind} B{self.B} T{self.T} H{self.H} K{self.K} D{self.D}"
        return sizes if self.dtype == "bfloat16" else f"{sizes} {self.dtype}"

    @property
    def directions(self) -> tuple[str, ...]:
        return DIRECTIONS if self.kind == TRAIN else DIRECTIONS[:1]

    @property
    def bytes(self) -> float | None:
        """What a decode must read."""
        if self.kind == TRAIN:
            return None
        keys = self.T // self.block + min(self.T, self.count * self.block) + min(self.T, self.window)
        return 2.0 * self.B * self.K * self.D * keys * jnp.dtype(self.dtype).itemsize

    def operation(self, platform: Any, **more: Any) -> Any:
        of = ejx.PagedNativeSparseAttention if self.kind == PAGES else ejx.NativeSparseAttention
        return of(self.block, self.count, self.window, platform=platform, **more)


@dataclasses.dataclass
class Row(PeerRow):
    """One implementation of one problem in one direction. `reason` is set if there is no time."""

    tb_per_s: float | None = None
    over_dense: float | None = None

    @property
    def speed(self) -> str:
        more = f", {self.tb_per_s:.2f} TB/s" if self.tb_per_s else ""
        more += f", {self.over_dense:.2f} of dense attention's speed" if self.over_dense else ""
        return f"{self.ms:.3f} ms{self.over_peer}{more}"


def make_inputs(p: NativeProblem, seed: int) -> Inputs:
    keys, dtype = jax.random.split(jax.random.key(seed), 5), jnp.dtype(p.dtype)
    queries = p.T if p.kind == TRAIN else 1
    random = lambda key, *shape: jax.random.normal(key, (p.B, *shape), dtype)
    learned = {
        "q": random(keys[0], queries, p.H, p.D),
        "k": random(keys[1], p.T, p.K, p.D),
        "v": random(keys[2], p.T, p.K, p.D),
        "gates": jax.nn.sigmoid(random(keys[3], queries, p.H, 3)),
    }
    if p.kind != TRAIN:
        count = p.T // p.block
        means = lambda x: x[:, : count * p.block].reshape(p.B, count, p.block, p.K, p.D).mean(2).astype(dtype)
        learned |= {"compressed_k": means(learned["k"]), "compressed_v": means(learned["v"])}
    return Inputs(learned, None, random(keys[4], queries, p.H, p.D))


# The implementations: functions of the learned arrays, by name.


def ours(p: NativeProblem, platform: Any, **more: Any) -> Callable[..., Any]:
    """Extra results are returned too; `more` are arguments of the call."""
    op: Any = (
        p.operation("triton", config=config_by_branch(p)) if platform == BY_BRANCH else p.operation(platform)
    )
    if p.kind == TRAIN:
        return lambda x: op(**x, **more)
    if p.kind == DECODE:  # the length of a cache is data
        return lambda x: op(**x, q_offset=jnp.asarray(np.full(p.B, p.T - 1)), **more)
    size, count = p.block, p.B * (p.T // p.block)
    table = np.random.default_rng(0).permutation(count).reshape(p.B, -1)

    def decode(x: Arrays) -> Any:
        """Rows are pages in the order of memory, so a table in random order names other keys: those of the check too."""
        cut = lambda x, size: x.reshape(count, size, p.K, p.D)
        cache = ejx.PagedKVCache(cut(x["k"], size), cut(x["v"], size))
        small = ejx.PagedKVCache(cut(x["compressed_k"], 1), cut(x["compressed_v"], 1))
        cache = cache.bind(jnp.asarray(table), jnp.asarray(np.full(p.B, p.T)))
        return op(x["q"][:, 0], x["gates"][:, 0], cache, small, **more)

    return decode


def config_by_branch(p: NativeProblem) -> Any:
    """The default configuration on Triton with kernels for each branch."""
    from ejkernel_eqx.native_sparse.triton.steps import BY_BRANCH as off

    found: list[Selection] = []
    with on_selection(found.append):
        jax.eval_shape(ours(p, "triton"), jax.eval_shape(lambda: make_inputs(p, 0)).learned)
    config: Any = found[0].config
    if p.kind == PAGES:
        return dataclasses.replace(config, step=off)
    return dataclasses.replace(config, few=dataclasses.replace(config.few, step=off))


def dense(p: NativeProblem) -> Callable[[Arrays], Array]:
    op = ejx.FlashAttention(causal=True)
    return lambda x: op(x["q"], x["k"], x["v"])


def computed(call: Callable[[Arrays], Any], p: NativeProblem, direction: str) -> Callable[[Inputs], Arrays]:
    def run(inputs: Inputs) -> Arrays:
        if direction == "forward":
            return {"out": call(inputs.learned)}
        out, pull = jax.vjp(call, inputs.learned)
        return {"out": out} | pull(inputs.cotangent)[0]

    return run


def fla(p: NativeProblem) -> linear_peers.Peer:
    window = p.window if native_sparse_peers.has_window() else 0
    run = lambda x: native_sparse_peers.attend(x, p.block, p.count, window)
    return linear_peers.Peer("fla" if window else "fla without window", "fla", run)


def in_torch(peer: linear_peers.Peer, sets: Sequence[Inputs], direction: str) -> Prepared:
    with _said(f"{peer.name}, {direction}: searched"):
        return linear_peers.prepare(peer, sets, direction != "forward")._replace(results={})


def expected_results(p: NativeProblem, blocks: Array, inputs: Inputs, direction: str) -> Arrays:
    """Those of `xla` in float32 for these blocks."""
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)
    call = computed(ours(p, "xla", block_indices=blocks), p, direction)
    return jax.jit(call).lower(wide).compile(UNTUNED)(wide)


# Measuring


def measure(p: NativeProblem, options: argparse.Namespace) -> Iterator[list[Row]]:
    """The rows of a problem, by direction."""
    sets = input_sets(functools.partial(make_inputs, p))
    floor = launch_floor(sets[0])
    for direction in (way for way in p.directions if way in options.directions):
        attempts = []
        for name in options.platforms:
            if name == BY_BRANCH and p.kind == TRAIN:
                continue
            make = functools.partial(_prepared, p, direction, name, sets)
            attempts.append(Attempt(Row(p.name, direction, name, False), make))
        if p.kind != PAGES and options.dense:
            beside = functools.partial(_prepared, p, direction, DENSE, sets)
            make = lambda beside=beside: beside()._replace(results={})
            attempts.append(Attempt(Row(p.name, direction, DENSE, True), make))
        if options.torch and p.kind == TRAIN and not {"torch", "fla"} & set(linear_peers.missing()):
            peer = fla(p)
            make = functools.partial(in_torch, peer, sets, direction)
            attempts.append(Attempt(Row(p.name, direction, peer.name, True), make))
        rows = measure_rows(attempts, functools.partial(_check, p, sets[0]), options, floor)
        peer = fastest(row for row in rows if row.is_peer and row.implementation != DENSE)
        whole = fastest(row for row in rows if row.implementation == DENSE)
        for row in rows:
            if row.is_peer or not row.ms:
                continue
            row.ratio, row.over_dense = ratio(peer, row), whole / row.ms if whole else None
            row.tb_per_s = p.bytes / row.ms / 1e9 if p.bytes else None
        yield rows


def _prepared(p: NativeProblem, direction: str, name: str, sets: Sequence[Inputs]) -> Prepared:
    """Says how long compiling took, which may be a minute."""
    call = dense(p) if name == DENSE else ours(p, None if name == "default" else name)
    with _said(f"{p.name}, {direction}, {name}: compiled"):
        return prepare(computed(call, p, direction), sets)


@contextlib.contextmanager
def _said(what: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    print(f"{what} in {time.monotonic() - start:.0f} s", flush=True)


@functools.lru_cache(maxsize=2)
def _blocks(p: NativeProblem, platform: str) -> Array:
    call = ours(p, None if platform == "default" else platform, return_indices=True)
    return jax.jit(call)(make_inputs(p, 0).learned)[1]


def _check(p: NativeProblem, inputs: Inputs, row: Row, results: Arrays) -> str | None:
    """The error in the results, if any; those beside ours are not compared."""
    if row.is_peer:
        return None
    with _said(f"{row.label}: checked"):
        blocks = _blocks(p, row.implementation)
        expected = expected_results(p, blocks, make_inputs(p, 0), row.direction)
        allowed = {name: TOLERANCES[p.dtype]["forward" if name == "out" else "gradient"] for name in results}
        errors, wrong = all_errors(results, expected, allowed)
    row.errors = finite(errors)
    return wrong


def unmeasured(p: NativeProblem, reason: str) -> list[Row]:
    return [Row(p.name, way, "default", False, reason=reason) for way in p.directions]


def summarise(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """The lowest ratio and the lowest speed over dense attention in each direction, and the lowest speed of decoding."""
    summary: dict[str, dict[str, Any]] = {}
    mine = [row for row in rows if row.implementation == "default"]
    for direction in DIRECTIONS:
        own = [row for row in mine if row.direction == direction]
        if lowest := worst(own):
            summary[f"lowest ratio, {direction}"] = lowest
        trained = [row for row in own if row.over_dense and row.problem.startswith(TRAIN)]
        if trained:
            least = min(trained, key=lambda row: row.over_dense or 0)
            summary[f"lowest over dense, {direction}"] = {"value": least.over_dense, "problem": least.problem}
    if decodes := [row for row in mine if row.tb_per_s]:
        slowest = min(decodes, key=lambda row: row.tb_per_s or 0)
        summary["lowest TB/s"] = {"value": slowest.tb_per_s, "problem": slowest.problem}
    return summary


# The command

HEADER = ("problem", "implementation", "ms", "spread", "TB/s", "over dense", "ratio", "error")
TABLES = command.Tables(
    HEADER,
    DIRECTIONS,
    "over dense: speed over causal FlashAttention; ratio: speed over flash-linear-attention's parallel_nsa",
    "Speed of native sparse attention",
)
P = NativeProblem
ANCHORS = (
    P(PAGES, 8, 65536),
    P(PAGES, 64, 65536),
    P(TRAIN, 1, 8192),
    P(TRAIN, 1, 65536),
    P(DECODE, 8, 65536),
    P(TRAIN, 1, 32768),
    P(TRAIN, 1, 16384),
    P(DECODE, 1, 65536),
)
_SMALL: Any = {"H": 4, "K": 2, "D": 16, "block": 8, "count": 4, "window": 16, "dtype": "float32"}
CPU = (P(TRAIN, 1, 256, **_SMALL), P(DECODE, 2, 256, **_SMALL), P(PAGES, 2, 256, **_SMALL))
TINY = tuple(dataclasses.replace(p, T=48) for p in CPU)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command.parser(__doc__)
    command.add_platforms(parser, OURS, "default")
    command.add_torch(parser)
    add = parser.add_argument
    add("--directions", default=",".join(DIRECTIONS), help="comma-separated (default: %(default)s)")
    add("--no-dense", dest="dense", action="store_false", help="omit dense attention")
    words = "compile flash-linear-attention's kernels in so many processes first"
    add("--compile-peers", type=int, default=0, metavar="PROCESSES", help=words)
    options = command.parse(parser, arguments)
    options.directions = options.directions.split(",")
    return options


def choose(options: argparse.Namespace) -> list[NativeProblem]:
    """The problems in order of importance, so that a time limit omits the least important ones."""
    on_cpu = jax.default_backend() == "cpu"
    return command.matching(TINY if options.quick else CPU if on_cpu else ANCHORS, options)


def about(options: argparse.Namespace, chosen: Sequence[NativeProblem]) -> dict[str, Any]:
    missing = [name for name in linear_peers.missing() if name in ("torch", "fla")]
    trained = [p for p in chosen if p.kind == TRAIN]
    if options.compile_peers and options.torch and trained and not missing:
        p, window = trained[0], trained[0].window if native_sparse_peers.has_window() else 0
        native_sparse_peers.compile_ahead(options.compile_peers, (p.H, p.K, p.D, p.block, p.count, window))
    return {"missing": missing if jax.default_backend() != "cpu" else []}


def sum_up(rows: Sequence[Row], chosen: Sequence[NativeProblem]) -> dict[str, Any]:
    return {"summary": summarise(rows)}


def plot(content: Mapping[str, Any], path: str) -> None:
    plot_ratios(content, path, "Native sparse attention")


BENCHMARK = command.Benchmark(
    "native_sparse", about, measure, unmeasured, sum_up, TABLES.text, TABLES.markdown, plot
)


def main(arguments: Sequence[str] | None = None) -> int:
    return command.main(BENCHMARK, parse(arguments), choose)


if __name__ == "__main__":
    # Leaves memory for PyTorch on the same GPU; a pool allocated at the start keeps allocations out of the times.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")
    raise SystemExit(main())
