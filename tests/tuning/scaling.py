"""An operation of no use, `y = factor * x`, whose configurations do the same work; one of them can be made slow.

Small and quick to tune: what it is for is everything around the tuner.
"""

import dataclasses
import os
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

import ejkernel_eqx as ejx
from ejkernel_eqx import Plan, Problem, TuneOptions
from tests.arrays import normal
from tests.tuning.parts import kernel_scope, make_plan, TOLERANCES, Workload

OPERATION = "tests.scaling"
QUICK = TuneOptions(max_candidates=2, samples=2, sample_ms=1.0, isolate=False, progress=False)
SLOW_VARIABLE = "TESTS_SLOW_BLOCK"
"""The environment variable that says which block is slow in this process."""


@dataclasses.dataclass(frozen=True)
class ScaleConfig:
    block: int


def problem_of(x: Any) -> Problem:
    dims = {"N": x.shape[-1]}
    return Problem.make(OPERATION, dims=dims, dtypes={"x": x.dtype}, flags={}, lengths={"N"})


def scaled(x: Array, config: ScaleConfig) -> Array:
    if str(config.block) != os.environ.get(SLOW_VARIABLE):
        return 2 * x
    # Long work whose result is added in a way that changes nothing and that no compiler can see through.
    waste = jax.lax.fori_loop(0, 2000, lambda _, y: jnp.sin(y) + 1e-3, jnp.full((4096,), 0.5))
    return 2 * x + jnp.where(jnp.max(waste) > 9.0, 1, 0).astype(x.dtype)


def workload(implementation: Any, problem: Problem) -> Workload:
    size, dtype = problem.dim("N"), problem.dtype("x")
    return Workload(
        make_inputs=lambda seed: normal(seed, (size,), dtype),
        run=lambda x, config: {"y": scaled(x, config)},
        reference=lambda x: {"y": 2 * x},
        tolerances={"y": TOLERANCES[dtype]["forward"]},
        forward=("y",),
    )


@ejx.kernel_registry.register(OPERATION, "xla", "any", priority=10, workload=workload)
class OnXla:
    config_type = ScaleConfig

    @staticmethod
    def unsupported(problem, device):
        return None

    @staticmethod
    def default_config(problem, device):
        return ScaleConfig(1)

    @staticmethod
    def candidates(problem, device):
        return [ScaleConfig(1), ScaleConfig(2)]


class Scale(ejx.Kernel):
    """Doubles its input. `inner`, another kernel, is called before."""

    operation: ClassVar[str] = OPERATION

    inner: Any
    plan: Plan = eqx.field(static=True)

    def __init__(self, inner: Any = None, *, config: ScaleConfig | None = None):
        self.inner = inner
        self.plan = make_plan(self.operation, config=config)

    def __call__(self, x: Any, *, key: Any = None) -> Array:
        x = x if self.inner is None else self.inner(x)
        chosen = self.plan.select(dataclasses.replace(problem_of(x), operation=self.operation))
        with kernel_scope(chosen):
            return scaled(x, chosen.config)


HALF_BROKEN = "tests.half_broken"


def broken_workload(implementation: Any, problem: Problem) -> Workload:
    right = workload(implementation, problem)
    return dataclasses.replace(right, run=lambda x, config: {"y": jnp.zeros_like(x)})


ejx.kernel_registry.register(HALF_BROKEN, "pallas", "any", priority=20, workload=broken_workload)(OnXla)
ejx.kernel_registry.register(HALF_BROKEN, "xla", "any", priority=10, workload=workload)(OnXla)


class HalfBroken(Scale):
    """As `Scale`, with another platform before XLA that is always wrong."""

    operation: ClassVar[str] = HALF_BROKEN

    def __init__(self) -> None:
        super().__init__()
