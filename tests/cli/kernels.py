"""Kernels of somebody else, as `--import` brings them: one that is right, one that forgets a factor in its backward, one that is not ours to tune."""

import dataclasses

import jax
import jax.numpy as jnp

import ejkernel_eqx as ejx
from ejkernel_eqx import Cost, Platform, Problem
from tests.cli.parts import BOTH, FORWARD, TOLERANCES, Workload

OPERATION = "tests.cli.square"


@dataclasses.dataclass(frozen=True)
class SquareConfig:
    chunks: int


def example_problem(operation, dims, dtype, flags):
    if set(dims) != {"N"}:
        raise ValueError(f"dims: expected N, received {sorted(dims)}.")
    return Problem.make(operation, dims=dims, dtypes={"x": dtype}, flags=dict(flags), lengths={"N"})


def workload(implementation, problem):
    size, kernel = problem.dim("N"), implementation.load()
    elements = float(size)

    def make_inputs(seed):
        return tuple(jax.random.normal(key, (size,)) for key in jax.random.split(jax.random.key(seed)))

    def run(inputs, config):
        x, weight = inputs
        return {"out": x * x, "x": kernel.FACTOR * x * weight}

    return Workload(
        make_inputs=make_inputs,
        run=run,
        reference=lambda inputs: {"out": jnp.square(inputs[0]), "x": 2 * inputs[0] * inputs[1]},
        tolerances={"out": TOLERANCES["float32"]["forward"], "x": TOLERANCES["float32"]["gradient"]},
        forward=("out",),
        costs={FORWARD: Cost(elements, 8 * elements), BOTH: Cost(3 * elements, 16 * elements)},
    )


@ejx.kernel_registry.register(OPERATION, Platform.XLA, priority=10, workload=workload)
class Square:
    config_type = SquareConfig
    FACTOR = 2.0

    @staticmethod
    def unsupported(problem, device):
        return "takes N up to 1000" if problem.dim("N") > 1000 else None

    @staticmethod
    def default_config(problem, device):
        return SquareConfig(1)

    @staticmethod
    def candidates(problem, device):
        return [SquareConfig(1), SquareConfig(2), SquareConfig(3)]


@ejx.kernel_registry.register(OPERATION, Platform.PALLAS, priority=5, workload=workload)
class Wrong(Square):
    FACTOR = 1.0


@ejx.kernel_registry.register(OPERATION, Platform.CUDA, priority=1)
class Vendor(Square):
    """Tunes itself, so that it has no workload of its own."""
