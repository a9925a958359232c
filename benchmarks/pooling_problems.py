"""The problems of pooling that are measured: sizes, inputs, plain formulas and float32 results."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import ejkernel_eqx as ejx
from ejkernel_eqx._tolerances import Tolerance, TOLERANCES
from ejkernel_eqx.tuning.check import all_errors

Arrays = dict[str, Array]
FORMS = ("rows", "masked rows", "chunks", "sequences", "chunks of sequences")


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


class Inputs(NamedTuple):
    """The tokens, as what has a gradient, and the cotangent of the result."""

    learned: Arrays
    cotangent: Array


def tables(problem: PoolProblem) -> dict[str, np.ndarray]:
    """What a call is told about its tokens: lengths vary, and the longest sequence has a quarter of all tokens."""
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
    return Inputs({"x": x}, normal(keys[1], shape))


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
    given = {name: jnp.asarray(table) for name, table in tables(problem).items()}
    return lambda x: operation(x, **given)


def plain(problem: PoolProblem) -> Callable[[Array], Array]:
    """The formula as one writes it in `jax.numpy`, in float32."""

    def run(x: Array) -> Array:
        wide, given, length = x.astype(jnp.float32), tables(problem), problem.T
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
            real = given.get("mask", np.ones((problem.B, length), bool))[..., None]
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


def direction_of(forward: Callable[[Array], Array], backward: bool) -> Callable[[Inputs], Arrays]:
    """The measured function: the result or, with `backward`, the result and the gradient of the tokens."""

    def run(inputs: Inputs) -> Arrays:
        if not backward:
            return {"out": forward(inputs.learned["x"])}
        out, pull = jax.vjp(forward, inputs.learned["x"])
        return {"out": out, "x": pull(inputs.cotangent)[0]}

    return run


@functools.partial(jax.jit, static_argnums=0)
def expected_results(problem: PoolProblem, inputs: Inputs) -> Arrays:
    """The result and the gradient in float32."""
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)
    return direction_of(plain(problem), True)(wide)


def errors_of(
    problem: PoolProblem, results: Mapping[str, Any], expected: Arrays
) -> tuple[dict[str, float], str | None]:
    """The relative RMS error of each result, and the reason if one is wrong."""
    table = TOLERANCES[problem.dtype]
    allowed: dict[str, Tolerance] = {
        name: table["forward" if name == "out" else "gradient"] for name in results
    }
    return all_errors(results, {name: expected[name] for name in results}, allowed)


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
