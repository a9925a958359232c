"""Representative inputs of a recurrence, generated from a problem's description alone, such that a call with them has that problem."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from .._broadcast import like
from ..core.arguments import accumulator
from ..core.workload import Inputs, with_packing
from ..dispatch import Problem
from .spec import CONSTANT, KEY, NONE, RecurrenceArrays, RecurrenceSpec, SCALAR, StepArrays, VALUE

KEY_SIMILARITY = 0.3
"""The common part of the keys of a delta rule, which are similar in trained networks."""
_DECAYS = {CONSTANT: "Hg", SCALAR: "Hg", KEY: "Hg D", VALUE: "Hg V"}


def spec_of(problem: Problem) -> RecurrenceSpec:
    """The static half of a call or of a step of this problem."""
    delta, transposed = bool(problem.flag("delta")), bool(problem.flag("transposed"))
    scale, decay = problem.dim("D") ** -0.5, str(problem.flag("decay"))
    return RecurrenceSpec(scale, decay, delta, problem.dtype("state"), transposed)


def make_inputs(problem: Problem, seed: int) -> Inputs:
    """New inputs for every seed: random values, documents of various lengths."""
    return with_packing(_random(problem, seed), problem, seed, "N")


@functools.partial(jax.jit, static_argnums=0)
def _random(problem: Problem, seed: Any) -> Inputs:
    draw, batch, tokens = _Draw(problem, seed), problem.dim("B"), (problem.dim("B"), problem.dim("T"))
    lead = (batch, *((problem.dim("N"),) if problem.flag("packed") == "offsets" else ()))
    operands, kept = draw.operands(tokens, (batch,)), problem.dtype("state")
    initial = draw.normal("HS D V", lead).astype(kept) if problem.flag("initial_state") else None
    arrays = RecurrenceArrays(**operands, initial_state=initial)
    dout = draw.normal("R V", tokens).astype(arrays.v.dtype)
    dfinal = draw.normal("HS D V", lead) / (1.0 if problem.flag("delta") else math.sqrt(problem.dim("D")))
    return Inputs(arrays, {"out": dout, "final_state": dfinal.astype(kept)})


def make_step_inputs(problem: Problem, seed: int) -> StepArrays:
    """One token per row; with slots, every row has its own."""
    draw, batch = _Draw(problem, seed), problem.dim("B")
    slots = draw.size.get("slots", batch)
    state = draw.normal("HS V D" if problem.flag("transposed") else "HS D V", (slots,))
    indices = jax.random.permutation(next(draw.keys), slots)[:batch].astype(jnp.int32)
    return StepArrays(
        **draw.operands((batch,), ()),
        state=state.astype(problem.dtype("state")),
        indices=indices if problem.flag("slots") else None,
    )


class _Draw:
    """Random arrays with the sizes and dtypes of a problem."""

    def __init__(self, problem: Problem, seed: Any):
        # A generator that compiles and runs fast; its values need not be the same on every kind of device.
        self.keys = iter(jax.random.split(jax.random.key(seed, impl="rbg"), 12))
        heads = dict.fromkeys(("Hg", "Hb"), problem.dim("HS"))
        self.problem, self.size = problem, heads | dict(problem.dims)
        self.wide = accumulator(problem.dtype("qkv"))

    def normal(self, axes: str, lead: tuple[int, ...]) -> Array:
        shape = (*lead, *(self.size[name] for name in axes.split()))
        return jax.random.normal(next(self.keys), shape, self.wide)

    def operands(self, over_tokens: tuple[int, ...], lead: tuple[int, ...]) -> dict[str, Array | None]:
        flag, dtype = self.problem.flag, self.problem.dtype("qkv")
        q, k, v = (self.normal(axes, over_tokens) for axes in ("Hq D", "Hk D", "Hv V"))
        if flag("delta"):
            # Queries and keys of a delta rule have length one.
            k = k + KEY_SIMILARITY * like(self.normal("D", ()), k)
            q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
        beta = jax.nn.sigmoid(self.normal("Hb", over_tokens)) if flag("beta") else None
        skip = self.normal("HS V", lead) if flag("skip") else None
        named = {"q": q, "k": k, "v": v, "beta": beta, "skip": skip}
        operands = {name: None if x is None else x.astype(dtype) for name, x in named.items()}
        return operands | {"g": self._decay(over_tokens)}

    def _decay(self, over_tokens: tuple[int, ...]) -> Array | None:
        """Log-decays as layers produce them: some channels or heads forget within a few tokens, others within thousands."""
        kind = str(self.problem.flag("decay"))
        if kind == NONE:
            return None
        axes = [self.size[name] for name in _DECAYS[kind].split()]
        shape = (*(over_tokens[:1] if kind == CONSTANT else over_tokens), *axes)
        # One rate per head (or channel), from 1/4 to 1/4096 per token, with variation between tokens.
        rates = 2.0 ** -jnp.linspace(2.0, 12.0, axes[-1])
        noise = jnp.ones(shape) if kind == CONSTANT else jax.random.exponential(next(self.keys), shape)
        return (-like(rates, noise) * noise).astype(self.problem.dtype("g"))
