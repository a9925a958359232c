"""Pooling compared with flash-linear-attention, PyTorch and a plain formula in JAX, and with the speed of a copy on the same device.

    python -m benchmarks pooling --json pooling.json --plot pooling.png
    python -m benchmarks pooling --problems chunks --time-limit 300
    python -m benchmarks pooling --render pooling.json --plot pooling.png --markdown pooling.md

The reference is the formula. Peers are timed as CUDA graphs where they can be. The copy reads and writes the tokens; speeds are bytes that must be
moved over time.
"""

import dataclasses
import functools
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import ejkernel_eqx as ejx
from benchmarks import prepare, problems, runner
from benchmarks.peers import Tensors, TorchPeer
from benchmarks.prepare import Arrays, BASELINE, BOTH, FORWARD, Inputs, nbytes, Others, Prepared, Row

COPY = "copy"


@dataclasses.dataclass(frozen=True)
class PoolProblem(problems.Problem):
    """`B` rows of `T` tokens of `H` heads of `D` channels. `L`: tokens of a chunk, 0 for none; `N`: packed sequences, which have one row."""

    form: str
    B: int
    T: int
    H: int
    D: int
    L: int = 0
    N: int = 0
    reduction: str = "mean"

    def words(self) -> list[str]:
        words = [self.form, f"B{self.B}", f"T{self.T}", f"H{self.H}", f"D{self.D}"]
        words += [f"{name}{size}" for name, size in (("L", self.L), ("N", self.N)) if size]
        return [*words, "" if self.reduction == "mean" else self.reduction]

    @property
    def channels(self) -> int:
        return self.H * self.D

    @property
    def lead(self) -> tuple[int, ...]:
        return () if self.N else (self.B,)


PROBLEMS = problems.load("pooling", PoolProblem)


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
    shape = jax.eval_shape(ours(problem, "xla"), {"x": x}).shape
    return Inputs({"x": x}, normal(keys[1], shape), {})


@jax.jit
def _distinct(x: Array) -> Array:
    """Tokens in the order of `x`, none equal to another in a channel: of equal ones, the first alone has the gradient, or each a share."""
    rank = jnp.argsort(jnp.argsort(x, axis=-2), axis=-2)
    bits = {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    return lax.bitcast_convert_type(
        lax.bitcast_convert_type(jnp.ones_like(x), bits) + rank.astype(bits), x.dtype
    )


def ours(problem: PoolProblem, platform: Any) -> Callable[..., Array]:
    """Our operation as a function of the tokens."""
    most = num_chunks(problem) if problem.L and problem.N else None
    operation = ejx.MeanPooling(problem.reduction, problem.L or None, max_chunks=most, platform=platform)
    arguments = {name: jnp.asarray(table) for name, table in tables(problem).items()}
    return lambda learned, constants=None: operation(learned["x"], **arguments)


def plain(problem: PoolProblem) -> Callable[[Arrays, Arrays], Array]:
    """The formula as one writes it in `jax.numpy`, in float32."""

    def run(learned: Arrays, constants: Arrays) -> Array:
        x, arguments, length = learned["x"], tables(problem), problem.T
        wide = x.astype(jnp.float32)
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


@prepare.reference
def expected_results(problem: PoolProblem, inputs: Inputs) -> Arrays:
    """The result and the gradient."""
    return prepare.directed(plain(problem), BOTH, True)(inputs)


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


class Pooling(runner.Family):
    name, title, description, lists = "pooling", "Pooling", __doc__, PROBLEMS
    packages, with_out = ("torch", "fla"), True
    extremes = (runner.Extreme("lowest share of a copy's speed", runner.entry("of_copy"), min),)

    def peers(self, problem: PoolProblem) -> Iterator[TorchPeer]:
        if problem.L and problem.reduction == "mean":
            yield TorchPeer("fla", "fla", _fla(problem))
        if not problem.N:
            yield TorchPeer("torch", "torch", _torch(problem))
        elif not problem.L:
            yield TorchPeer("torch", "torch", _segment_reduce(problem))

    def beside(self, problem: PoolProblem, options: Namespace, direction: str) -> Others:
        def copy(sets: Any, direction: str) -> Prepared:
            return prepare.ready(lambda inputs: {"x": -inputs.learned["x"]}, sets)

        yield prepare.Implementation(COPY, copy, BASELINE, is_checked=False)
        yield self.in_jax(problem, "jax.numpy", plain(problem))

    def complete(self, problem: PoolProblem, inputs: Inputs, direction: str, rows: list[Row]) -> None:
        """Bytes are those of reading the tokens and writing the results once; of the backward, of the same the other way."""
        copies = [row for row in rows if row.role == BASELINE]
        runner.rate(rows, bytes=nbytes(inputs[:2]) * (1 if direction == FORWARD else 2))
        runner.rate(copies, bytes=2 * nbytes(inputs.learned))
        speed = next((row.numbers["tb_per_s"] for row in copies), None)
        for row in rows:
            mine = row.numbers["tb_per_s"]
            row.numbers["of_copy"] = mine / speed if mine and speed and row.role != BASELINE else None


FAMILY = Pooling(make_inputs=make_inputs, expected=expected_results, ours=ours)
