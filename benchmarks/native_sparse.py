"""Native sparse attention compared with flash-linear-attention's `parallel_nsa`, if installed, and with our own dense attention; and decoding.

    python -m benchmarks native-sparse --json native_sparse.json --plot native_sparse.png
    python -m benchmarks native-sparse --problems 'train.*T65536' --directions forward+backward --no-torch
    python -m benchmarks native-sparse --problems 'train.*T8192' --compile-peers 12
    python -m benchmarks native-sparse --render native_sparse.json --markdown native_sparse.md

The reference is platform `xla`, for the blocks that ours has chosen. "fla" chooses its own, by a score that differs in details, and has no window
without flash-attn, so its results are not compared: what it leaves out is in its favour. "dense" is causal `FlashAttention`. `ratio`: speed over that
of "fla"; `over dense`: speed over that of "dense". Decoding reads, of each sequence, all compressed keys, the chosen blocks and the window once;
`TB/s` is that over the time. "by branch" is decoding with kernels for each branch; `--platforms "default,by branch" --problems 'pages|decode'` has
both in one run.

"fla" searches its configurations once a process, whatever the length: problems with few tokens run first, where the search takes seconds. With
`--compile-peers` several processes compile them before.
"""

import dataclasses
import functools
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import ejkernel_eqx as ejx
from benchmarks import prepare, problems, runner
from benchmarks.peers import is_missing, Tensors, TorchPeer
from benchmarks.prepare import Arrays, BASELINE, DIRECTIONS, Inputs, Others, Row, UNTUNED
from benchmarks.runner import Errors

BY_BRANCH = "by branch"
PLATFORMS = ("default", "triton", "xla", BY_BRANCH)
DENSE = "dense"
TRAIN, DECODE, PAGES = "train", "decode", "pages"


@dataclasses.dataclass(frozen=True)
class NativeProblem(problems.Problem):
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

    def words(self) -> list[str]:
        return [f"{self.kind} B{self.B} T{self.T} H{self.H} K{self.K} D{self.D}"]

    @property
    def directions(self) -> tuple[str, ...]:
        return DIRECTIONS if self.kind == TRAIN else DIRECTIONS[:1]

    @property
    def bytes(self) -> float | None:
        """Bytes that a decode must read."""
        if self.kind == TRAIN:
            return None
        keys = self.T // self.block + min(self.T, self.count * self.block) + min(self.T, self.window)
        return 2.0 * self.B * self.K * self.D * keys * jnp.dtype(self.dtype).itemsize

    def operation(self, platform: Any, **more: Any) -> Any:
        of = ejx.PagedNativeSparseAttention if self.kind == PAGES else ejx.NativeSparseAttention
        return of(self.block, self.count, self.window, platform=platform, **more)


PROBLEMS = problems.load("native-sparse", NativeProblem)


def make_inputs(p: NativeProblem, seed: int = 0) -> Inputs:
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
    return Inputs(learned, random(keys[4], queries, p.H, p.D), {})


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

    shapes = jax.eval_shape(lambda: make_inputs(p, 0)).learned
    config: Any = prepare.selection_of(ours(p, "triton"), shapes).config
    if p.kind == PAGES:
        return dataclasses.replace(config, step=off)
    return dataclasses.replace(config, few=dataclasses.replace(config.few, step=off))


@functools.lru_cache(maxsize=2)
def _blocks(p: NativeProblem, platform: str) -> Array:
    call = ours(p, None if platform == "default" else platform, return_indices=True)
    return jax.jit(call)(make_inputs(p, 0).learned)[1]


class NativeSparse(runner.Family):
    name, title, description, lists = "native-sparse", "Native sparse attention", __doc__, PROBLEMS
    packages, known_platforms, with_out = ("torch", "fla"), PLATFORMS, True
    extremes = (
        runner.Extreme("lowest over dense", runner.entry("over_dense"), min, runner.of_kind(TRAIN)),
        runner.Extreme("lowest TB/s", runner.entry("tb_per_s"), min),
    )

    def ours(self, problem: NativeProblem, platform: Any, **more: Any) -> Callable[..., Any]:
        call = ours(problem, platform, **more)
        return lambda learned, constants: call(learned)

    def is_measured(self, problem: NativeProblem, platform: str) -> bool:
        return platform != BY_BRANCH or problem.kind != TRAIN

    def beside(self, problem: NativeProblem, options: Namespace, direction: str) -> Others:
        op = ejx.FlashAttention(causal=True)
        if problem.kind != PAGES:
            dense = lambda x, constants: op(x["q"], x["k"], x["v"])
            yield self.in_jax(problem, DENSE, dense, BASELINE, is_checked=False)

    def peers(self, problem: NativeProblem) -> Iterator[TorchPeer]:
        """`parallel_nsa`, with a window only if flash-attn is installed, which it needs for one."""
        p, window = problem, 0 if is_missing("flash_attn") else problem.window

        def run(x: Tensors) -> Any:
            from fla.ops.nsa import parallel_nsa

            gates = dict(zip(("g_cmp", "g_slc", "g_swa"), x["gates"].unbind(-1)))
            sizes = {"block_counts": p.count, "block_size": p.block, "window_size": window}
            return parallel_nsa(x["q"], x["k"], x["v"], **gates, **sizes)

        if p.kind == TRAIN:
            yield TorchPeer("fla" if window else "fla without window", "fla", run, is_checked=False)

    def errors(self, problem: NativeProblem, row: Row, results: Arrays, expected: Arrays) -> Errors:
        """Compares with `xla` in float32 for the blocks that this implementation has chosen."""
        platform = row.implementation if row.implementation in PLATFORMS else "default"
        wide = prepare.wide(make_inputs(problem))
        call = self.ours(problem, "xla", block_indices=_blocks(problem, platform))
        program = jax.jit(self.directed(problem, call, row.direction)).lower(wide).compile(UNTUNED)
        return runner.errors_of(problem.dtype, results, program(wide))

    def complete(self, problem: NativeProblem, inputs: Any, direction: str, rows: list[Row]) -> None:
        p, whole = problem, prepare.fastest(rows, BASELINE)
        for row in rows:
            is_ours = row.role != BASELINE and row.ms is not None
            row.numbers["over_dense"] = prepare.ratio(whole, row) if is_ours else None
            row.numbers["tb_per_s"] = p.bytes / row.ms / 1e9 if is_ours and row.ms and p.bytes else None


FAMILY = NativeSparse(make_inputs=make_inputs, expected=lambda problem, inputs: {})
