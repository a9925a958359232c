"""Arrays over the scores that lack some of a call's leading or mapped axes: exact, and no larger than they are."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.attention.dense import causal, check, lse_of, normal, qkv, quick

# Leading axes of a call, and of its bias and its mask.
SHARED = {
    "by the last": ((2, 3), (2, 1), None),
    "by the first": ((2, 3), (1, 3), None),
    "by all": ((2, 3), (1, 1), (1, 1)),
    "by both ends": ((2, 3, 2), (1, 3, 1), None),
    "by another than the mask": ((2, 3), (1, 3), (2, 1)),
    "by the middle, the mask by the last": ((2, 3, 2), (2, 1, 2), (2, 3, 1)),
    "by axes of which one is short": ((2, 1, 3), (2, 1, 1), (1, 1, 3)),
}


def arrays_of(lead, bias, mask, t: int, s: int) -> tuple[dict[str, Any], Any]:
    arrays = qkv(*lead, t=t, s=s, heads=2, kv_heads=1, d=16) | {"bias": normal(5, *bias, 2, t, s)}
    seen = True if mask is None else np.random.default_rng(0).random((*mask, 1, t, s)) < 0.7
    return arrays, seen


def options_of(seen: Any) -> dict[str, Any]:
    return {} if seen is True else dict(mask=jnp.asarray(seen))


@pytest.mark.few(2)
@pytest.mark.parametrize("name", SHARED)
def test_a_bias_of_some_leading_axes(flash, name):
    arrays, seen = arrays_of(*SHARED[name], t=9, s=18)
    check(lse_of(flash(causal=True), **options_of(seen)), arrays, causal(9, 18) & seen)


def largest(jaxpr: Any) -> int:
    """The size of the largest array that a program makes or is given."""
    return max((math.prod(aval.shape) for aval in _avals(jaxpr)), default=0)


def _avals(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield from (v.aval for v in (*equation.invars, *equation.outvars) if hasattr(v.aval, "shape"))
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda value: _inner(value) is not None
        ):
            if _inner(value) is not None:
                yield from _avals(_inner(value))


def _inner(value: Any) -> Any:
    inner = getattr(value, "jaxpr", value)
    return inner if hasattr(inner, "eqns") else None


@pytest.mark.few(2)
@pytest.mark.parametrize("name", SHARED)
def test_no_array_is_as_large_as_the_scores(flash, name):
    (lead, bias, mask), t = SHARED[name], 48
    arrays, seen = arrays_of(lead, bias, mask, t, t)
    call = lambda a: jnp.sum(flash(causal=True)(**a, **options_of(seen)) ** 2)
    assert largest(jax.make_jaxpr(quick(jax.grad(call)))(arrays).jaxpr) < math.prod(lead) * 2 * t * t


def mapped(function: Callable[..., Any], bias: int | None = None) -> Callable[..., Any]:
    return jax.vmap(function, in_axes=({"q": 0, "k": 0, "v": 0, "bias": bias},))


def scanned(function: Callable[..., Any]) -> Callable[..., Any]:
    def over_rows(a):
        rest = {name: x for name, x in a.items() if name != "bias"}
        return jax.lax.scan(lambda _, x: (None, function(x | {"bias": a["bias"]})), None, rest)[1]

    return over_rows


# Transformations of a call of one row, and the leading axes of the bias given to them.
MAPPED: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "vmap of vmap": (lambda f: mapped(mapped(f)), ()),
    "vmap of vmap over the bias": (lambda f: mapped(mapped(f, 0)), (3,)),
    "vmap over the bias of vmap": (lambda f: mapped(mapped(f), 0), (2,)),
    "vmap of scan": (lambda f: mapped(scanned(f)), ()),
    "scan of vmap": (lambda f: scanned(mapped(f)), ()),
    "checkpoint of vmap": (lambda f: jax.checkpoint(mapped(mapped(f))), ()),
}


def transformed(flash: Any, name: str, t: int) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A call whose `bias` broadcasts, and its arrays."""
    transform, own = MAPPED[name]
    arrays, _ = arrays_of((2, 3), (2, 1) if own == (2,) else own, None, t, t)

    def one(a: dict[str, Any]) -> Any:
        bias = a["bias"]
        bias = bias[None] if a["q"].ndim > 3 == bias.ndim else bias
        return lse_of(flash(causal=True))(**a | {"bias": bias})

    call = transform(one)
    return lambda **a: call(a | {"bias": a["bias"].reshape((*own, 2, t, t))}), arrays


@pytest.mark.few(2)
@pytest.mark.parametrize("name", MAPPED)
def test_a_bias_that_examples_share(flash, name):
    call, arrays = transformed(flash, name, t=18)
    check(call, arrays, causal(18, 18))


@pytest.mark.few(2)
@pytest.mark.parametrize("name", MAPPED)
def test_no_gradient_is_as_large_as_the_scores(flash, name):
    call, arrays = transformed(flash, name, t=48)
    gradient = jax.grad(lambda a: sum(jnp.sum(x**2) for x in call(**a)))
    assert largest(jax.make_jaxpr(quick(gradient))(arrays).jaxpr) < 6 * 2 * 48 * 48
