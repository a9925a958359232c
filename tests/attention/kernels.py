"""What every platform's kernels must compute for a case, in float64."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tests.attention.cases import Case, make, poison
from tests.attention.dense import exact
from tests.attention.inner import (
    AttentionArrays,
    AttentionGrads,
    AttentionSpec,
    philox,
    reference,
    visibility,
)
from tests.tolerances import assert_close, errors, TOLERANCES

DIFFERENTIABLE = ("q", "k", "v", "bias", "alibi_slopes", "sinks", "log_forget")


class Result(NamedTuple):
    out: Any
    lse: Any
    grads: Any


def cotangents(case: Case, seed: int = 1) -> tuple[Array, Array]:
    """For the output and for the log-sum-exp."""
    rng = np.random.default_rng(seed)
    dout = rng.standard_normal((case.B, case.T, case.H, case.V))
    dlse = rng.standard_normal((case.B, case.H, case.T))
    return jnp.asarray(dout, case.dtype), jnp.asarray(dlse, _wide(case.dtype))


def _wide(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


@functools.partial(jax.jit, static_argnums=3)
def _run_reference(arrays: AttentionArrays, dout: Array, dlse: Array, spec: AttentionSpec) -> Result:
    given = {n: getattr(arrays, n) for n in DIFFERENTIABLE if getattr(arrays, n) is not None}
    (out, lse), vjp = jax.vjp(lambda given: reference.attend(arrays._replace(**given), spec), given)
    grads = dict.fromkeys(DIFFERENTIABLE) | vjp((dout, dlse))[0]
    return Result(out, lse, AttentionGrads(**grads))


def run_reference(arrays: AttentionArrays, dout: Array, dlse: Array, spec: AttentionSpec) -> Result:
    """The package's own formula, in float64 whatever the problem's dtype."""
    host = jax.tree.map(np.asarray, (arrays, dout, dlse))
    with jax.enable_x64(True):
        double = [
            jnp.asarray(x.astype(dtype), dtype)
            for x in jax.tree.leaves(host)
            for dtype in [np.dtype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype]
        ]
        tree = jax.tree.unflatten(jax.tree.structure(host), double)
        return jax.tree.map(np.asarray, _run_reference(*tree, spec))


def assert_gradient_close(
    actual: Array, exact: np.ndarray, part: np.ndarray | None, dtype: str, name: str
) -> None:
    """As `assert_close`, measuring by the larger of `exact` and its cancelling `part`."""
    if part is None or not part.any():
        return assert_close(actual, exact, dtype, "gradient", name=name)
    for kind, size in (("rms", lambda x: np.sqrt(np.mean(x**2))), ("peak", lambda x: np.abs(x).max())):
        measured = getattr(errors(actual, exact, max(size(exact), size(part))), kind)
        allowed = getattr(TOLERANCES[dtype]["gradient"], kind)
        assert measured <= allowed, f"{name} ({dtype}): {kind} error {measured:.3g}, allowed {allowed:.3g}"


def oracle(case: Case, arrays: AttentionArrays, dout, dlse):
    """`out`, `lse [B, H, T]` and gradients, in float64; and the part of the gradients that goes through `delta = rowsum(dout * out)`, for 16-bit
    problems.

    A backward is given `out` as it was stored, in 16 bits, so this part is as uncertain as that. Where it is larger than the gradient itself
    (a query with few keys), it is what the error has to be measured by.
    """
    spec, rows = case.spec, arrays.rows
    positions = (np.arange(case.T) + spec.offset)[None] if rows is None else np.asarray(rows.position)
    keep: Any = True
    if case.dropout:
        assert arrays.seeds is not None
        keep = philox.philox_keep(
            arrays.seeds[:, :, None, None],
            jnp.asarray(positions)[:, None, :, None],
            jnp.arange(case.S),
            case.dropout,
        )
    given = {name: getattr(arrays, name) for name in DIFFERENTIABLE if getattr(arrays, name) is not None}
    options: dict[str, Any] = dict(
        scale=spec.scale, cap=case.soft_cap, positions=positions, keep=keep, rate=case.dropout, by_row=True
    )
    seen = visibility(arrays, spec)
    (out, lse), grads = exact(given, dout, np.swapaxes(dlse, 1, 2), seen, **options)
    part: dict = {}
    if arrays.q.dtype.itemsize == 2:
        delta = (np.asarray(dout, np.float64) * out).sum(-1)
        part = exact(given, np.zeros_like(np.asarray(dout, np.float32)), delta, seen, **options)[1]
    return out, np.swapaxes(lse, 1, 2), grads, part


def check_kernels(case: Case, run: Callable[..., Any]) -> None:
    """Output, log-sum-exp and all gradients of `run(arrays, dout, dlse, spec)`; the same from poisoned arrays, bit for bit."""
    arrays, spec = make(case)
    dout, dlse = cotangents(case)
    out, lse, grads = run(arrays, dout, dlse, spec)
    expected, expected_lse, exact_grads, part = oracle(case, arrays, dout, dlse)
    assert out.dtype == arrays.q.dtype and lse.dtype == _wide(case.dtype)
    assert_close(out, expected, case.dtype, name="out")
    assert_close(lse, expected_lse, _wide(case.dtype), name="lse")
    for name in DIFFERENTIABLE:
        gradient, array = getattr(grads, name), getattr(arrays, name)
        if array is None:
            assert gradient is None
            continue
        assert gradient.dtype == array.dtype
        assert_gradient_close(gradient, exact_grads[name], part.get(name), case.dtype, f"gradient of {name}")
    poisoned = run(poison(case, arrays), dout, dlse, spec)
    assert_same((out, lse, grads), poisoned)


def assert_same(first: Any, second: Any) -> None:
    """Bit for bit."""
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
