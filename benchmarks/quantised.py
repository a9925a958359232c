"""Products with quantised weights compared with the same product by floats, and with PyTorch's kernels, where it is installed.

    python -m benchmarks quantised --json quantised.json --plot quantised.png
    python -m benchmarks quantised --problems 'M1 |M16 ' --time-limit 300
    python -m benchmarks quantised --apart --samples 3 --json quantised.json   # a process for each size
    python -m benchmarks quantised --render quantised.json --plot quantised.png --markdown quantised.md

Weights are quantised in the formats of `ejx.quantise`. A problem that is `scaled` quantises the rows too, by `ScaledMatmul`. Others are of
`Matmul`, and of `GroupedMatmul` with groups. `floats` multiplies by the numbers of the weight in the dtype of the rows. `torch._scaled_mm` casts its
rows itself, with a scale per channel of the weight and one of all rows, and so does `ScaledMatmul` beside it. `torch._weight_int4pack_mm` takes the
same codes.

Weights of at least 256 MiB are multiplied in turn, so that none is in the cache. The floor is the time of moving the rows, the results, and the codes
and scales of all groups that have rows, at the speed of a copy in the same run.
"""

import dataclasses
import functools
import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import ejkernel_eqx as ejx
from benchmarks import prepare, problems, runner
from benchmarks.peers import Tensors, TorchPeer
from benchmarks.prepare import Arrays, BASELINE, FORWARD, Inputs, nbytes, Others, Prepared, Row
from ejkernel_eqx.matmul import reference
from ejkernel_eqx.matmul.float8.reference import rounded
from ejkernel_eqx.matmul.spec import GroupedArrays, GroupedSpec
from ejkernel_eqx.quantised.numbers import floats

COPY, FLOATS = "copy", "floats"
COPIED = lambda: 2**20 if jax.default_backend() == "cpu" else 2**30
"""Bytes of the copy."""


@dataclasses.dataclass(frozen=True)
class QuantisedProblem(problems.Problem):
    """`M` rows by a weight `[N, K]` in the format `kind`; with `E` groups `[E, N, K]`, of which `active` have rows, by default all. `scaled`: rows in
    float8, too."""

    M: int
    K: int
    N: int
    kind: str
    E: int = 0
    active: int = 0
    scaled: bool = False

    directions: ClassVar[Any] = (FORWARD,)

    def words(self) -> list[str]:
        words = [f"M{self.M} K{self.K} N{self.N}", f"E{self.E}" * bool(self.E)]
        words += [f"{self.active} of them" * bool(self.active), self.kind]
        return [*words, "by float8" * self.scaled]

    @property
    def flops(self) -> float:
        return 2.0 * self.M * self.K * self.N


PROBLEMS = problems.load("quantised", QuantisedProblem)


def sizes_of(problem: QuantisedProblem) -> np.ndarray:
    """The rows of each group: as equal as can be, in the active groups, which are spread over all."""
    active = problem.active or problem.E
    sizes = np.zeros(problem.E, np.int32)
    sizes[np.arange(active) * problem.E // active] = np.bincount(
        np.arange(problem.M) % active, minlength=active
    )
    return sizes


# One program for each shape, not one for each of its operations.
@functools.partial(jax.jit, static_argnums=0)
def make_inputs(problem: QuantisedProblem, seed: int = 0) -> Inputs:
    """The quantised weight is the state; PyTorch's kernels get its codes, and its scales as floats."""
    p, keys = problem, jax.random.split(jax.random.key(seed), 2)
    shape = (p.E, p.N, p.K) if p.E else (p.N, p.K)
    drawn = jax.random.normal(keys[0], shape, jnp.dtype(p.dtype)) * jnp.asarray(p.K**-0.5, p.dtype)
    weight = ejx.quantise(drawn, p.kind)
    constants = {"codes": weight.codes, "factors": floats(weight.scales, weight.format.scale)}
    if p.E:
        constants["sizes"] = jnp.asarray(sizes_of(p))
    x = jax.random.normal(keys[1], (p.M, p.K), jnp.dtype(p.dtype))
    return Inputs({"x": x}, jnp.zeros((p.M, p.N), x.dtype), constants, weight)


def scale_of(problem: QuantisedProblem, x: Array) -> Array | None:
    """The scale of all rows, where PyTorch's product has one."""
    return jnp.abs(x).max().astype(jnp.float32) / 448 if problem.kind == "fp8" else None


@prepare.reference
def expected_results(problem: QuantisedProblem, inputs: Inputs) -> Arrays:
    """The equation, in float32."""
    x, weight = inputs.learned["x"], inputs.state.astype(jnp.float32)
    if problem.scaled:
        x = rounded(x, scale_of(problem, x))
    if not problem.E:
        return {"out": lax.dot_general(x, weight, (((1,), (1,)), ((), ())))}
    arrays = GroupedArrays(x, inputs.constants["sizes"], weight)
    return {"out": reference.multiply(arrays, GroupedSpec("float32", transpose_rhs=True))["out"]}


def scaled_mm() -> TorchPeer:
    """PyTorch's float8 product."""

    def run(x: Tensors) -> Any:
        import torch

        scale = x["x"].abs().amax().float() / 448
        rows = (x["x"] / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        weight = x["codes"].view(torch.float8_e4m3fn).t()
        scales = scale.expand(rows.shape[0], 1).contiguous(), x["factors"].reshape(1, -1)
        return torch._scaled_mm(rows, weight, *scales, out_dtype=x["x"].dtype)

    return TorchPeer("torch._scaled_mm", "torch", run)


def int4pack_mm(group_size: int) -> TorchPeer:
    """PyTorch's product by weights in 4 bits."""

    def packed(x: Tensors) -> Tensors:
        import torch

        high_first = ((x["codes"] & 15) << 4) | (x["codes"] >> 4)
        scales = x["factors"].t().contiguous().bfloat16()
        return {
            "weight": torch._convert_weight_to_int4pack(high_first, 8),
            "scales": torch.stack((scales, torch.zeros_like(scales)), -1).contiguous(),
        }

    def run(x: Tensors) -> Any:
        import torch

        return torch._weight_int4pack_mm(x["x"], x["weight"], group_size, x["scales"])

    return TorchPeer("torch._weight_int4pack_mm", "torch", run, constants=packed)


@functools.cache
def _copy() -> Prepared:
    """That of all problems. Its numbers have 32 bits: XLA moves single bytes at half the speed."""
    return prepare.ready(lambda x: {"x": ~x}, [jnp.zeros(COPIED() // 4, jnp.uint32)])


class Quantised(runner.Family):
    name, title, description, lists = "quantised", "Products with quantised weights", __doc__, PROBLEMS
    in_turn, rotated = True, 2**28
    extremes = (runner.Extreme("most time over the floor", runner.entry("over_floor"), max),)

    def ours(self, problem: QuantisedProblem, platform: Any) -> Callable[..., Array]:
        if problem.scaled:
            op = ejx.ScaledMatmul(platform=platform)
            return lambda x, weight, *sizes: op(x, weight, *sizes, x_scale=scale_of(problem, x))
        if problem.E:
            return ejx.GroupedMatmul(transpose_rhs=True, platform=platform)
        return ejx.Matmul(platform=platform)

    def directed(self, problem: QuantisedProblem, forward: Any, direction: str) -> Callable[[Inputs], Arrays]:
        def run(inputs: Inputs) -> Arrays:
            sizes = [inputs.constants["sizes"]] if problem.E else []
            return {"out": forward(inputs.learned["x"], inputs.state, *sizes)}

        return run

    def beside(self, problem: QuantisedProblem, options: Namespace, direction: str) -> Others:
        def product(sets: Sequence[Inputs], direction: str) -> Prepared:
            with_floats = [s._replace(state=s.state.astype(s.learned["x"].dtype)) for s in sets]
            grouped = ejx.GroupedMatmul(transpose_rhs=True)
            dense = lambda x, weight: lax.dot_general(x, weight, (((1,), (1,)), ((), ())))
            run = self.directed(problem, grouped if problem.E else dense, direction)
            return prepare.ready(run, with_floats, self.in_turn)

        yield prepare.Implementation(COPY, lambda *_: _copy(), BASELINE, is_checked=False)
        yield prepare.Implementation(FLOATS, product, prepare.PEER)

    def peers(self, problem: QuantisedProblem) -> Sequence[TorchPeer]:
        if problem.E:
            return ()
        if problem.scaled:
            return (scaled_mm(),) if problem.kind == "fp8" else ()
        return (int4pack_mm(128),) if problem.kind == "int4" else ()

    def apart(self, problem: QuantisedProblem) -> str:
        return f"M{problem.M} N{problem.N}"

    def complete(self, problem: QuantisedProblem, inputs: Inputs, direction: str, rows: list[Row]) -> None:
        share = (problem.active or problem.E) / problem.E if problem.E else 1.0
        moved = nbytes((inputs.learned, inputs.cotangent)) + math.ceil(share * nbytes(inputs.state))
        runner.rate([row for row in rows if row.role != BASELINE], bytes=moved, flops=problem.flops)
        for copies in (row for row in rows if row.role == BASELINE):
            runner.rate([copies], bytes=2 * COPIED())
            for row in rows:
                known = row.ms and copies.ms and row.role != BASELINE
                floor = moved / copies.numbers["bytes"] * copies.ms if known else None
                row.numbers |= {"floor_ms": floor, "over_floor": row.ms / floor if known and floor else None}


FAMILY = Quantised(make_inputs=make_inputs, expected=expected_results)
