"""Functions `f(score, head, query, key) -> score` of a user, traced by JAX, and the forms of them that every platform has by other names."""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from .._jitted import while_alive
from .masks.functions import interpreted

ScoreMod = Callable[[Any, Any, Any, Any], Any]


def check_score_mod(function: Any) -> None:
    """`ValueError` unless the function makes one float of one score and closes over known values."""
    if not callable(function):
        raise ValueError(
            f"score_mod: expected a function of (score, head, query, key), received {type(function).__name__}."
        )
    jaxpr, result = _traced(function)
    leaves = jax.tree.leaves(result)
    if len(leaves) != 1 or leaves[0].shape != () or leaves[0].dtype != jnp.float32:
        found = ", ".join(f"{x.dtype} {x.shape}" for x in leaves) or "nothing"
        raise ValueError(
            f"score_mod: expected one float32 for a float32 score, received {found}; cast numbers with .astype(score.dtype)."
        )
    if any(isinstance(x, Tracer) for x in jaxpr.consts):
        raise ValueError(
            "score_mod: expected a function that closes over known values, received one that closes over a traced array; pass what changes or "
            "has a gradient as bias= or alibi_slopes=."
        )


def _traced(function: ScoreMod) -> tuple[Any, Any]:
    score, number = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    return jax.make_jaxpr(function, return_shape=True)(score, number, number, number)


def modified(function: ScoreMod, scores: Array, heads: Array, queries: Array, keys: Array) -> Array:
    """The function of every score; heads, positions of queries, and keys broadcast with the scores."""
    return jnp.vectorize(function)(scores, heads, queries, keys).astype(scores.dtype)


def modified_and_slope(
    function: ScoreMod, scores: Array, heads: Array, queries: Array, keys: Array
) -> tuple[Array, Array]:
    """Works as `modified`, and its derivative by the score."""
    of_scores = lambda scores: modified(function, scores, heads, queries, keys)
    return jax.jvp(of_scores, (scores,), (jnp.ones_like(scores),))


class KnownForm(NamedTuple):
    """A function that is a soft cap, `cap * tanh(score / cap)`, plus ALiBi, `slope[head] * (key - query)`."""

    cap: float | None
    slopes: np.ndarray | None  # float32 [H]


@while_alive
def known_form(function: ScoreMod, heads: int) -> KnownForm | None:
    """The form, if the function has it for every head."""
    jaxpr = _traced(function)[0]
    caps, slopes = set(), []
    for head in range(heads):
        with jax.ensure_compile_time_eval():
            (found,) = _results(jaxpr, (_Sum(s=1.0), head, _Sum(q=1.0), _Sum(k=1.0)))
        if not isinstance(found, _Sum) or found.q != -found.k or found.one != 0:
            return None
        if found.tanh == 0 and found.s == 1:
            caps.add(None)
        elif found.s == 0 and found.tanh > 0 and math.isclose(found.tanh * found.inner, 1, rel_tol=1e-6):
            caps.add(found.tanh)
        else:
            return None
        slopes.append(found.k)
    if len(caps) != 1:
        return None
    return KnownForm(caps.pop(), np.array(slopes, np.float32) if any(slopes) else None)


class _Sum(NamedTuple):
    """`s * score + q * query + k * key + one + tanh * tanh(inner * score)`."""

    s: float = 0.0
    q: float = 0.0
    k: float = 0.0
    one: float = 0.0
    tanh: float = 0.0
    inner: float = 0.0

    def times(self, factor: float) -> "_Sum":
        s, q, k, one, tanh = (factor * x for x in self[:5])
        return _Sum(s, q, k, one, tanh, self.inner)


class _Other:
    """Any other function of the score or of the positions."""


def _results(closed: Any, arguments: Iterable[Any]) -> list[Any]:
    return interpreted(closed.jaxpr, closed.consts, arguments, _apply, lambda number: number)


def _apply(equation: Any, given: list[Any]) -> list[Any]:
    inner = equation.params.get("jaxpr")
    if equation.primitive.name in ("jit", "pjit") and hasattr(inner, "consts"):
        return _results(inner, given)
    if not any(isinstance(x, _Sum | _Other) for x in given):
        exact = [jnp.asarray(x, at.aval.dtype) for x, at in zip(given, equation.invars, strict=True)]
        results = equation.primitive.bind(*exact, **equation.params)
        return list(results) if equation.primitive.multiple_results else [results]
    found = None
    if not any(isinstance(x, _Other) for x in given):
        found = _combined(equation.primitive.name, given)
    return [_Other()] * len(equation.outvars) if found is None else [found]


def _combined(name: str, given: list[Any]) -> _Sum | None:
    if name in ("convert_element_type", "squeeze", "reshape", "broadcast_in_dim", "copy"):
        return given[0]
    if name == "neg":
        return given[0].times(-1.0)
    if name == "tanh":
        x = given[0]
        alone = x == _Sum(s=x.s)
        return _Sum(tanh=1.0, inner=x.s) if alone and x.s else None
    if name not in ("add", "sub", "mul", "div"):
        return None
    a, b = (x if isinstance(x, _Sum) else _number(x) for x in given)
    if a is None or b is None:
        return None
    if name in ("add", "sub"):
        both = zip(a[:5], b.times(-1.0 if name == "sub" else 1.0)[:5], strict=True)
        return None if a.tanh and b.tanh else _Sum(*(x + y for x, y in both), inner=a.inner or b.inner)
    if name == "mul" and a == _Sum(one=a.one):
        a, b = b, a
    if b != _Sum(one=b.one) or (name == "div" and b.one == 0):
        return None
    return a.times(b.one if name == "mul" else 1.0 / b.one)


def _number(x: Any) -> _Sum | None:
    return _Sum(one=float(x)) if np.ndim(x) == 0 or np.size(x) == 1 else None
