"""Representative inputs of a selective scan, generated from a problem's description alone, such that a call with them has that problem."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..core.workload import Inputs, with_packing
from ..dispatch import Problem
from .spec import ScanArrays, ScanSpec, StepArrays

TIME_STEP = 0.02
"""A typical time step of a layer."""


def spec_of(problem: Problem) -> ScanSpec:
    """The static half of a call of this problem."""
    return ScanSpec(bool(problem.flag("softplus")), problem.dtype("state"))


def make_inputs(problem: Problem, seed: int) -> Inputs:
    """New inputs for every seed: random values, documents of various lengths."""
    return with_packing(_random(problem, seed), problem, seed, "S")


@functools.partial(jax.jit, static_argnums=0)
def _random(problem: Problem, seed: Any) -> Inputs:
    draw = _Draw(problem, seed)
    tokens = (problem.dim("B"), problem.dim("T"))
    state = (problem.dim("B"), *((problem.dim("S"),) if problem.flag("packed") == "offsets" else ()))
    state = (*state, problem.dim("I"), problem.dim("N"))
    arrays = ScanArrays(
        **draw.operands(tokens),
        initial_state=draw.normal("state", *state) if problem.flag("initial_state") else None,
    )
    cotangents = {"out": draw.normal("x", *arrays.x.shape), "final_state": draw.normal("state", *state)}
    return Inputs(arrays, cotangents)


def make_step_inputs(problem: Problem, seed: int) -> StepArrays:
    """One token per row; with slots, every row has its own."""
    draw, batch = _Draw(problem, seed), problem.dim("B")
    slots = problem.dim("slots") if problem.flag("slots") else batch
    indices = jax.random.permutation(draw.key(), slots)[:batch].astype(jnp.int32)
    return StepArrays(
        **draw.operands((batch,)),
        state=draw.normal("state", slots, problem.dim("I"), problem.dim("N")),
        indices=indices if problem.flag("slots") else None,
    )


class _Draw:
    """Random arrays with the sizes and dtypes of a problem."""

    def __init__(self, problem: Problem, seed: Any):
        # A generator that compiles and runs fast; its values need not be the same on every kind of device.
        self._keys = iter(jax.random.split(jax.random.key(seed, impl="rbg"), 16))
        self._problem = problem
        is_double = problem.dtype("x") == "float64"
        self._wide: Any = jnp.float64 if is_double else jnp.float32

    def key(self) -> Array:
        return next(self._keys)

    def normal(self, name: str, *shape: int) -> Array:
        """Normal values in the problem's dtype for `name`, or float32."""
        dtypes = dict(self._problem.dtypes)
        return jax.random.normal(self.key(), shape, self._wide).astype(dtypes.get(name, self._wide))

    def operands(self, lead: tuple[int, ...]) -> dict[str, Any]:
        """Operands with time steps around `TIME_STEP` and rates from 1 to N, so that states decay within tens to hundreds of tokens."""
        problem, channels, states = self._problem, self._problem.dim("I"), self._problem.dim("N")
        projection = (*lead, problem.dim("G"), states)
        steps = TIME_STEP * jnp.exp(0.5 * jax.random.normal(self.key(), (*lead, channels), self._wide))
        bias = self.normal("", channels) * 0.5 * TIME_STEP if problem.flag("dt_bias") else None
        if problem.flag("softplus"):
            steps = jnp.log(jnp.expm1(steps))
            bias = None if bias is None else bias / TIME_STEP
        rates = jnp.broadcast_to(jnp.arange(1.0, states + 1, dtype=self._wide), (channels, states))
        return {
            "x": self.normal("x", *lead, channels),
            "dt": steps.astype(problem.dtype("dt")),
            "A": -rates * jnp.exp(0.1 * self.normal("", channels, states)),
            "B": self.normal("B", *projection),
            "C": self.normal("B", *projection),
            "D": self.normal("", channels) if problem.flag("D") else None,
            "z": self.normal("z", *lead, channels) if problem.flag("z") else None,
            "dt_bias": bias,
        }
