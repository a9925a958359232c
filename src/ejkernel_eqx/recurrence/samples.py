"""Representative inputs of a recurrence, generated from a problem's description alone, such that a call with them has that problem."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._broadcast import like
from ..core.arguments import accumulator
from ..core.workload import Inputs
from ..dispatch import Problem
from .spec import CONSTANT, KEY, NONE, RecurrenceArrays, RecurrenceSpec, SCALAR, StepArrays, StepSpec, VALUE

KEY_SIMILARITY = 0.3
"""The common part of the keys of a delta rule, which are similar in trained networks."""


def spec_of(problem: Problem) -> RecurrenceSpec:
    """The static half of a call of this problem."""
    return RecurrenceSpec(
        scale=problem.dim("D") ** -0.5,
        decay=str(problem.flag("decay")),
        delta=bool(problem.flag("delta")),
        state_dtype=problem.dtype("state"),
    )


def step_spec_of(problem: Problem) -> StepSpec:
    return StepSpec(
        scale=problem.dim("D") ** -0.5,
        decay=str(problem.flag("decay")),
        delta=bool(problem.flag("delta")),
        transposed=bool(problem.flag("transposed")),
    )


def make_inputs(problem: Problem, seed: int) -> Inputs:
    """New inputs for every seed: random values, documents of various lengths."""
    inputs = _random(problem, seed)
    rng = np.random.default_rng(seed)
    arrays = inputs.arrays
    if problem.flag("packed") == "offsets":
        arrays = arrays._replace(offsets=jnp.asarray(_offsets(problem, rng), jnp.int32))
    if problem.flag("packed") == "segments":
        arrays = arrays._replace(starts=jnp.asarray(_starts(problem, rng), jnp.int32))
    return inputs._replace(arrays=arrays)


def _offsets(problem: Problem, rng: np.random.Generator) -> np.ndarray:
    """Offsets that fill every row with sequences."""
    batch, length, count = problem.dim("B"), problem.dim("T"), problem.dim("N")
    inner = np.sort(rng.integers(0, length + 1, (batch, count - 1)), axis=1)
    return np.concatenate([np.zeros((batch, 1), int), inner, np.full((batch, 1), length)], axis=1)


def _starts(problem: Problem, rng: np.random.Generator) -> np.ndarray:
    """About four segments per row."""
    batch, length = problem.dim("B"), problem.dim("T")
    begins = rng.random((batch, length)) < 4 / max(length, 1)
    return np.maximum.accumulate(np.where(begins, np.arange(length), -1), axis=1)


@functools.partial(jax.jit, static_argnums=0)
def _random(problem: Problem, seed: Any) -> Inputs:
    # A generator that compiles and runs fast; its values need not be the same on every kind of device.
    keys = iter(jax.random.split(jax.random.key(seed, impl="rbg"), 10))
    size, dtype = dict(problem.dims), jnp.dtype(problem.dtype("qkv"))
    wide = accumulator(dtype)
    batch, length, delta = size["B"], size["T"], bool(problem.flag("delta"))

    def normal(*shape: int, dtype: Any = dtype) -> Array:
        return jax.random.normal(next(keys), shape, wide).astype(dtype)

    q = _rows(normal(batch, length, size["Hq"], size["D"], dtype=wide), delta).astype(dtype)
    k = normal(batch, length, size["Hk"], size["D"], dtype=wide)
    k = _rows(k + KEY_SIMILARITY * normal(1, 1, 1, size["D"], dtype=wide) if delta else k, delta).astype(
        dtype
    )
    v = normal(batch, length, size["Hv"], size["V"])
    state = (*((size["N"],) if "N" in size else ()), size["HS"], size["D"], size["V"])
    scale = 1.0 if delta else math.sqrt(size["D"])
    arrays = RecurrenceArrays(
        q,
        k,
        v,
        g=_decay(next(keys), problem, (batch, length)),
        beta=jax.nn.sigmoid(normal(batch, length, size["Hb"])) if problem.flag("beta") else None,
        skip=normal(batch, size["HS"], size["V"]) if problem.flag("skip") else None,
        initial_state=normal(batch, *state, dtype=problem.dtype("state"))
        if problem.flag("initial_state")
        else None,
    )
    dout = normal(batch, length, size["R"], size["V"])
    dfinal = normal(batch, *state, dtype=wide) / scale
    return Inputs(arrays, {"out": dout, "final_state": dfinal.astype(problem.dtype("state"))})


def _rows(x: Array, normalised: bool) -> Array:
    """Rows, optionally normalised to length one, as are the queries and keys of delta rules."""
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True) if normalised else x


def _decay(key: Array, problem: Problem, tokens: tuple[int, ...]) -> Array | None:
    """Log-decays as layers produce them: some channels or heads forget within a few tokens, others within thousands."""
    kind, size = problem.flag("decay"), dict(problem.dims)
    if kind == NONE:
        return None
    heads = size.get("Hg", size["HS"])
    shape = {
        CONSTANT: (tokens[0], heads),
        SCALAR: (*tokens, heads),
        KEY: (*tokens, heads, size["D"]),
        VALUE: (*tokens, heads, size["V"]),
    }[str(kind)]
    # One rate per head (or channel), from 1/4 to 1/4096 per token, with variation between tokens.
    rates = 2.0 ** -jnp.linspace(2.0, 12.0, shape[-1] if kind in (KEY, VALUE) else heads)
    if kind == CONSTANT:
        return jnp.broadcast_to(-rates, shape).astype(problem.dtype("g"))
    noise = jax.random.exponential(key, shape, jnp.float32)
    return (-like(rates, noise) * noise).astype(problem.dtype("g"))


def make_step_inputs(problem: Problem, seed: int) -> StepArrays:
    """One token per row; with slots, every row has its own."""
    keys = iter(jax.random.split(jax.random.key(seed), 10))
    size, dtype = dict(problem.dims), jnp.dtype(problem.dtype("qkv"))
    batch, delta = size["B"], bool(problem.flag("delta"))
    slots = size.get("slots", batch)
    normal = lambda *shape: jax.random.normal(next(keys), shape, jnp.float32)
    channels = ("V", "D") if problem.flag("transposed") else ("D", "V")
    state = normal(slots, size["HS"], *(size[name] for name in channels))
    indices = None
    if problem.flag("slots"):
        indices = jax.random.permutation(next(keys), slots)[:batch].astype(jnp.int32)
    return StepArrays(
        q=_rows(normal(batch, size["Hq"], size["D"]), delta).astype(dtype),
        k=_rows(normal(batch, size["Hk"], size["D"]), delta).astype(dtype),
        v=normal(batch, size["Hv"], size["V"]).astype(dtype),
        state=state.astype(problem.dtype("state")),
        g=_decay(next(keys), problem, (batch,)),
        beta=jax.nn.sigmoid(normal(batch, size.get("Hb", size["HS"]))).astype(dtype)
        if problem.flag("beta")
        else None,
        skip=normal(size["HS"], size["V"]).astype(dtype) if problem.flag("skip") else None,
        indices=indices,
    )
