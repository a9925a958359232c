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

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import ejkernel_eqx as ejx
from benchmarks import peers, runner
from benchmarks.peers import is_missing, Tensors, TorchPeer
from benchmarks.prepare import (
    Arrays,
    BASELINE,
    DIRECTIONS,
    fastest,
    FORWARD,
    Implementation,
    Inputs,
    prepare,
    Prepared,
    ratio,
    Row,
    selection_of,
    UNTUNED,
)

BY_BRANCH = "by branch"
PLATFORMS = ("default", "triton", "xla", BY_BRANCH)
DENSE = "dense"
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
        """Bytes that a decode must read."""
        if self.kind == TRAIN:
            return None
        keys = self.T // self.block + min(self.T, self.count * self.block) + min(self.T, self.window)
        return 2.0 * self.B * self.K * self.D * keys * jnp.dtype(self.dtype).itemsize

    def operation(self, platform: Any, **more: Any) -> Any:
        of = ejx.PagedNativeSparseAttention if self.kind == PAGES else ejx.NativeSparseAttention
        return of(self.block, self.count, self.window, platform=platform, **more)


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
    config: Any = selection_of(ours(p, "triton"), shapes).config
    if p.kind == PAGES:
        return dataclasses.replace(config, step=off)
    return dataclasses.replace(config, few=dataclasses.replace(config.few, step=off))


def dense(p: NativeProblem) -> Callable[[Arrays], Array]:
    op = ejx.FlashAttention(causal=True)
    return lambda x: op(x["q"], x["k"], x["v"])


def computed(call: Callable[[Arrays], Any], direction: str) -> Callable[[Inputs], Arrays]:
    def run(inputs: Inputs) -> Arrays:
        if direction == FORWARD:
            return {"out": call(inputs.learned)}
        out, pull = jax.vjp(call, inputs.learned)
        return {"out": out} | pull(inputs.cotangent)[0]

    return run


def torch_peers(p: NativeProblem) -> Iterator[TorchPeer]:
    """`parallel_nsa`, with a window only if flash-attn is installed, which it needs for one."""
    window = 0 if is_missing("flash_attn") else p.window

    def run(x: Tensors) -> Any:
        from fla.ops.nsa import parallel_nsa

        gates = dict(zip(("g_cmp", "g_slc", "g_swa"), x["gates"].unbind(-1)))
        sizes = {"block_counts": p.count, "block_size": p.block, "window_size": window}
        return parallel_nsa(x["q"], x["k"], x["v"], **gates, **sizes)

    if p.kind == TRAIN:
        name = "fla" if window else "fla without window"
        yield from peers.installed(TorchPeer(name, "fla", run, is_checked=False))


def implementations(
    p: NativeProblem, options: argparse.Namespace, direction: str
) -> Iterator[Implementation]:
    def ready(platform: Any, sets: Sequence[Inputs], direction: str) -> Prepared:
        return prepare(computed(dense(p) if platform == DENSE else ours(p, platform), direction), sets)

    for one in runner.ours(options, ready):
        if one.name != BY_BRANCH or p.kind != TRAIN:
            yield one
    if p.kind != PAGES:
        yield Implementation(DENSE, functools.partial(ready, DENSE), BASELINE, is_checked=False)


@functools.lru_cache(maxsize=2)
def _blocks(p: NativeProblem, platform: str) -> Array:
    call = ours(p, None if platform == "default" else platform, return_indices=True)
    return jax.jit(call)(make_inputs(p, 0).learned)[1]


def expected_results(p: NativeProblem, blocks: Array, inputs: Inputs, direction: str) -> Arrays:
    """The results of `xla` in float32 for these blocks."""
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)
    call = computed(ours(p, "xla", block_indices=blocks), direction)
    return jax.jit(call).lower(wide).compile(UNTUNED)(wide)


def errors(
    p: NativeProblem, inputs: Inputs, row: Row, results: Arrays, expected: Mapping[str, Array]
) -> runner.Errors:
    platform = row.implementation if row.implementation in PLATFORMS else "default"
    expected = expected_results(p, _blocks(p, platform), inputs, row.direction)
    return runner.errors_of(p.dtype, results, expected)


def complete(p: NativeProblem, inputs: Inputs, direction: str, rows: list[Row]) -> None:
    whole = fastest(rows, BASELINE)
    for row in rows:
        is_ours = row.role != BASELINE and row.ms is not None
        row.numbers["over_dense"] = ratio(whole, row) if is_ours else None
        row.numbers["tb_per_s"] = p.bytes / row.ms / 1e9 if is_ours and row.ms and p.bytes else None


# The problems

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

FAMILY = runner.Family(
    "native-sparse",
    __doc__,
    TINY,
    CPU,
    ANCHORS,
    make_inputs,
    implementations,
    lambda problem, inputs: {},
    runner.Tables(
        ("problem", "implementation", "ms", "spread", "TB/s", "over dense", "ratio", "error"),
        "over dense: speed over causal FlashAttention; ratio: speed over flash-linear-attention's parallel_nsa",
        "Speed of native sparse attention",
    ),
    "Native sparse attention",
    peers=torch_peers,
    errors=errors,
    complete=complete,
    extremes=(
        runner.Extreme("lowest over dense", runner.entry("over_dense"), min, TRAIN),
        runner.Extreme("lowest TB/s", runner.entry("tb_per_s"), min),
    ),
    packages=("torch", "fla"),
    known_platforms=PLATFORMS,
)
