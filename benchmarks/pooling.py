"""Pooling compared with flash-linear-attention, PyTorch and a plain formula in JAX, and with the speed of a copy on the same device.

    python -m benchmarks pooling --json pooling.json --plot pooling.png
    python -m benchmarks pooling --problems chunks --time-limit 300
    python -m benchmarks pooling --render pooling.json --plot pooling.png --markdown pooling.md

The reference is the formula. Peers are timed as CUDA graphs where they can be. The copy reads and writes the tokens; speeds are bytes that must be
moved over time.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import ejkernel_eqx as ejx
from benchmarks import peers, runner
from benchmarks.peers import Tensors, TorchPeer
from benchmarks.prepare import (
    Arrays,
    BASELINE,
    BOTH,
    FORWARD,
    Implementation,
    Inputs,
    nbytes,
    PEER,
    prepare,
    Prepared,
    Row,
)

COPY = "copy"


@dataclasses.dataclass(frozen=True)
class PoolProblem:
    """`B` rows of `T` tokens of `H` heads of `D` channels. `L`: tokens of a chunk, 0 for none; `N`: packed sequences, which have one row."""

    form: str
    B: int
    T: int
    H: int
    D: int
    L: int = 0
    N: int = 0
    reduction: str = "mean"
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        words = [self.form, f"B{self.B}", f"T{self.T}", f"H{self.H}", f"D{self.D}"]
        words += [f"L{self.L}"] if self.L else []
        words += [f"N{self.N}"] if self.N else []
        words += [self.reduction] if self.reduction != "mean" else []
        return " ".join(words if self.dtype == "bfloat16" else [*words, self.dtype])

    @property
    def channels(self) -> int:
        return self.H * self.D

    @property
    def lead(self) -> tuple[int, ...]:
        return () if self.N else (self.B,)


def tables(problem: PoolProblem) -> dict[str, np.ndarray]:
    """Arguments of a call about its tokens: lengths vary, and the longest sequence has a quarter of all tokens."""
    rng = np.random.default_rng(0)
    if problem.form == "masked rows":
        lengths = rng.integers(problem.T // 2, problem.T + 1, problem.B)
        return {"mask": np.arange(problem.T) < lengths[:, None]}
    if problem.N:
        cuts = np.sort(rng.integers(problem.T // 4, problem.T + 1, problem.N - 1))
        return {"cu_seqlens": np.array([0, *cuts, problem.T], np.int32)}
    return {}


def num_chunks(problem: PoolProblem) -> int:
    """The chunks of packed sequences, exactly."""
    lengths = np.diff(tables(problem)["cu_seqlens"])
    return int((-(-lengths // problem.L)).sum())


def make_inputs(problem: PoolProblem, seed: int = 0) -> Inputs:
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), 2)
    normal = lambda key, shape: jax.random.normal(key, shape, jnp.dtype(problem.dtype))
    x = normal(keys[0], (*problem.lead, problem.T, problem.channels))
    if problem.reduction == "max":
        x = _distinct(x)
    shape = jax.eval_shape(ours(problem, "xla"), x).shape
    return Inputs({"x": x}, normal(keys[1], shape), {})


@jax.jit
def _distinct(x: Array) -> Array:
    """Tokens in the order of `x`, none equal to another in a channel: of equal ones, the first alone has the gradient, or each a share."""
    rank = jnp.argsort(jnp.argsort(x, axis=-2), axis=-2)
    bits = {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    return lax.bitcast_convert_type(
        lax.bitcast_convert_type(jnp.ones_like(x), bits) + rank.astype(bits), x.dtype
    )


def ours(problem: PoolProblem, platform: Any) -> Callable[[Array], Array]:
    """Our operation as a function of the tokens."""
    most = num_chunks(problem) if problem.L and problem.N else None
    operation = ejx.MeanPooling(problem.reduction, problem.L or None, max_chunks=most, platform=platform)
    arguments = {name: jnp.asarray(table) for name, table in tables(problem).items()}
    return lambda x: operation(x, **arguments)


def plain(problem: PoolProblem) -> Callable[[Array], Array]:
    """The formula as one writes it in `jax.numpy`, in float32."""

    def run(x: Array) -> Array:
        wide, arguments, length = x.astype(jnp.float32), tables(problem), problem.T
        largest = problem.reduction == "max"
        if problem.N:
            segment, count = _segments(problem)
            if largest:
                out = jax.ops.segment_max(wide, segment, count)
            else:
                size = np.maximum(np.bincount(segment, minlength=count), 1)
                out = jax.ops.segment_sum(wide, segment, count) / size.astype(np.float32)[:, None]
        elif problem.L:
            cut = wide.reshape(problem.B, length // problem.L, problem.L, problem.channels)
            out = cut.max(2) if largest else cut.mean(2)
        else:
            real = arguments.get("mask", np.ones((problem.B, length), bool))[..., None]
            if largest:
                out = jnp.where(real, wide, -jnp.inf).max(1)
            else:
                out = jnp.where(real, wide, 0).sum(1) / real.sum(1).astype(np.float32)
        return out.astype(x.dtype)

    return run


def _segments(problem: PoolProblem) -> tuple[np.ndarray, int]:
    """The segment of each token, and how many there are."""
    offsets = tables(problem)["cu_seqlens"]
    sizes = np.diff(offsets)
    if problem.L:
        chunks = [np.minimum(problem.L, size - np.arange(0, size, problem.L)) for size in sizes]
        sizes = np.concatenate(chunks)
    return np.repeat(np.arange(len(sizes)), sizes), len(sizes)


def directed(forward: Callable[[Array], Array], direction: str) -> Callable[[Inputs], Arrays]:
    """The measured function: the result, and with the backward pass the gradient of the tokens too."""

    def run(inputs: Inputs) -> Arrays:
        if direction == FORWARD:
            return {"out": forward(inputs.learned["x"])}
        out, pull = jax.vjp(forward, inputs.learned["x"])
        return {"out": out, "x": pull(inputs.cotangent)[0]}

    return run


@functools.partial(jax.jit, static_argnums=0)
def expected_results(problem: PoolProblem, inputs: Inputs) -> Arrays:
    """The result and the gradient in float32."""
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)
    return directed(plain(problem), BOTH)(wide)


# Peers


def _tables(problem: PoolProblem) -> Callable[[], dict[str, Any]]:
    """The tables on the device, made once."""

    @functools.cache
    def made() -> dict[str, Any]:
        import torch

        return {name: torch.from_numpy(table).cuda() for name, table in tables(problem).items()}

    return made


def _fla(problem: PoolProblem) -> Callable[[Tensors], Any]:
    arguments = _tables(problem)

    def run(tensors: Tensors) -> Any:
        from fla.ops.utils.pooling import mean_pooling

        x = tensors["x"].view(problem.B, problem.T, problem.H, problem.D)
        out = mean_pooling(x, problem.L, arguments().get("cu_seqlens"))
        return out.view(*problem.lead, -1, problem.channels)

    return run


def _torch(problem: PoolProblem) -> Callable[[Tensors], Any]:
    arguments, largest = _tables(problem), problem.reduction == "max"

    def run(tensors: Tensors) -> Any:
        x = tensors["x"]
        if problem.L:
            cut = x.view(problem.B, -1, problem.L, problem.channels)
            return cut.max(2).values if largest else cut.mean(2)
        mask = arguments().get("mask")
        if mask is None:
            return x.max(1).values if largest else x.mean(1)
        mask = mask[..., None]
        if largest:
            return x.masked_fill(~mask, float("-inf")).max(1).values
        return (x * mask).sum(1) / mask.sum(1).to(x.dtype)

    return run


def _segment_reduce(problem: PoolProblem) -> Callable[[Tensors], Any]:
    arguments = _tables(problem)

    def run(tensors: Tensors) -> Any:
        import torch

        offsets = arguments()["cu_seqlens"].long()
        return torch.segment_reduce(tensors["x"], problem.reduction, offsets=offsets, axis=0)

    return run


def torch_peers(problem: PoolProblem) -> Iterator[TorchPeer]:
    """The installed peers that support the problem."""
    known = []
    if problem.L and problem.reduction == "mean":
        known.append(TorchPeer("fla", "fla", _fla(problem)))
    if not problem.N:
        known.append(TorchPeer("torch", "torch", _torch(problem)))
    elif not problem.L:
        known.append(TorchPeer("torch", "torch", _segment_reduce(problem)))
    return peers.installed(*known)


def implementations(
    problem: PoolProblem, options: argparse.Namespace, direction: str
) -> Iterator[Implementation]:
    def in_jax(forward: Callable[[Array], Array], sets: Sequence[Inputs], direction: str) -> Prepared:
        return prepare(directed(forward, direction), sets)

    def copy(sets: Sequence[Inputs], direction: str) -> Prepared:
        return prepare(lambda inputs: {"x": -inputs.learned["x"]}, sets)

    yield from runner.ours(options, lambda platform, *given: in_jax(ours(problem, platform), *given))
    yield Implementation(COPY, copy, BASELINE, is_checked=False)
    yield Implementation("jax.numpy", functools.partial(in_jax, plain(problem)), PEER)


def complete(problem: PoolProblem, inputs: Inputs, direction: str, rows: list[Row]) -> None:
    """Bytes are those of reading the tokens and writing the results once; of the backward, of the same the other way."""
    copies = [row for row in rows if row.role == BASELINE]
    runner.rate(rows, bytes=nbytes(inputs[:2]) * (1 if direction == FORWARD else 2))
    runner.rate(copies, bytes=2 * nbytes(inputs.learned))
    speed = next((row.numbers["tb_per_s"] for row in copies), None)
    for row in rows:
        mine = row.numbers["tb_per_s"]
        row.numbers["of_copy"] = mine / speed if mine and speed and row.role != BASELINE else None


TABLES = runner.Tables(
    (
        "problem",
        "implementation",
        "platform",
        "ms",
        "spread",
        "TB/s",
        "of copy",
        "temporary",
        "ratio",
        "error",
    ),
    "temporary: memory over bytes to move; ratio: speed over the fastest peer's",
    "Speed of pooling",
    digits=4,
)

P = PoolProblem
ANCHORS = (
    P("chunks", 4, 4096, 16, 128, L=64),
    P("masked rows", 64, 512, 8, 128),
    P("chunks of sequences", 1, 16384, 16, 128, L=64, N=16),
    P("sequences", 1, 16384, 16, 128, N=16),
    P("chunks", 4, 4096, 16, 128, L=64, reduction="max"),
    P("rows", 4, 16384, 16, 128),
    P("chunks", 4, 4096, 16, 128, L=16),
    P("masked rows", 64, 512, 8, 128, reduction="max"),
)
CPU = (
    P("chunks", 2, 2048, 4, 64, L=64, dtype="float32"),
    P("masked rows", 16, 256, 4, 64, dtype="float32"),
    P("sequences", 1, 4096, 4, 64, N=16, dtype="float32"),
    P("chunks of sequences", 1, 4096, 4, 64, L=64, N=16, dtype="float32"),
)
TINY = tuple(
    P(p.form, min(p.B, 2), 64, 2, 8, p.L and 8, p.N and 3, p.reduction, "float32") for p in ANCHORS[:6]
)

FAMILY = runner.Family(
    "pooling",
    __doc__,
    TINY,
    CPU,
    ANCHORS,
    make_inputs,
    implementations,
    expected_results,
    TABLES,
    "Pooling",
    peers=torch_peers,
    complete=complete,
    extremes=(runner.Extreme("lowest share of a copy's speed", runner.entry("of_copy"), min),),
    packages=("torch", "fla"),
)
