"""The matmul of rows on XLA and by its Triton kernel, interpreted: against the reference, and how it composes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.matmul.dense.triton.compiled import RowsTile, TritonConfig
from tests.agreement import assert_agrees, platforms
from tests.attention.dense import quick
from tests.matmul.dense.cases import call, Case, CASES, exact, make, operation, results
from tests.tolerances import assert_close

platform = platforms()


@pytest.mark.few(3)
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_reference(name, platform):
    case = CASES[name]
    given, cotangents = make(case)
    found = results(operation(case, platform=platform), case, given, cotangents)
    assert all(found[n].dtype == case.dtype for n in ("out", "out_1", "out_2") if n in found)
    assert all(found[f"d{n}"].dtype == x.dtype for n, x in given.items())
    assert_agrees(case, found, exact(case, given, cotangents))


def test_the_reference_is_the_formula():
    case = Case((3, 8), (4, 4), activation="silu", gated=True, norm=True, bias=True, residual=True)
    given, cotangents = make(case)
    x, w, u, b, c, n, r = (
        np.asarray(given[name], np.float64)
        for name in ("x", "right", "right_1", "bias", "bias_1", "norm", "residual")
    )
    h = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * n
    z = h @ w.T + b
    np.testing.assert_allclose(
        exact(case, given, cotangents)["out"], z / (1 + np.exp(-z)) * (h @ u.T + c) + r
    )


@pytest.mark.parametrize("block_m", [1, 2, 16])
def test_few_rows_with_and_without_tensor_cores(block_m):
    """Rows, features and columns that fill no tile, and several tiles of rows."""
    case = Case(({1: 1, 2: 5, 16: 43}[block_m], 100), (37, 20, 5), norm=True, bias=True)
    given, cotangents = make(case)
    config = TritonConfig(RowsTile(block_m, 16, 32, 4, 1), False, "ieee", False)
    op = operation(case, platform="triton-interpret", config=config)
    wanted = exact(case, given, cotangents)
    for name, out in zip(("out", "out_1", "out_2"), call(op, case, given)):
        assert_close(out, wanted[name])


def test_composes(platform):
    """vmap of rows and of weights, with a loop inside; rows that hold NaN beside others."""
    case = Case((2, 3, 16), (16,), norm=True, residual=True)
    given, _ = make(case)
    op, (x, w, n, r) = operation(case, platform=platform), given.values()
    one = lambda x, w, r: op(x, w, norm=n, residual=r)
    wanted = quick(one)(x, w, r)
    assert_close(quick(jax.vmap(one, (0, None, 0)))(x, w, r), wanted)
    both = quick(jax.vmap(one, (None, 0, None)))(x, jnp.stack([w, -w]), r)
    assert_close(both[0], wanted)
    assert_close(both[1], 2 * r - wanted)

    def stream(x):
        return jax.lax.scan(lambda x, w: (op(x, w, norm=n, residual=x), None), x, jnp.stack([w, 2 * w]))[0]

    first = op(x, w, norm=n, residual=x)
    assert_close(quick(stream)(x), op(first, 2 * w, norm=n, residual=first))
    poisoned = op(x.at[0, 1].set(jnp.nan), w, norm=n, residual=r)
    assert bool(jnp.isnan(poisoned[0, 1]).all())
    keep = np.array([[True, False, True], [True, True, True]])
    assert_close(poisoned[keep], wanted[keep])


def test_many_rows(platform):
    """More than a tile, also of mapped rows."""
    case = Case((130, 24), (20,), norm=True)
    given, cotangents = make(case)
    op, wanted = operation(case, platform=platform), exact(case, given, cotangents)["out"]
    assert_close(call(op, case, given)[0], wanted)
    one = lambda x: op(x, given["right"], norm=given["norm"])
    assert_close(quick(jax.vmap(one))(given["x"][:, None])[:, 0], wanted)


def test_the_default_of_many_rows_is_xla():
    w = jnp.ones((4, 8))
    plans = {rows: ejx.Matmul()._plan_for((rows,)).snapshot.requested for rows in (64, 65)}
    assert [getattr(plan, "value", plan) for plan in plans.values()] == [None, "xla"]
    np.testing.assert_array_equal(ejx.Matmul()(jnp.ones((65, 8)), w), 8.0)


def test_what_an_empty_call_gives(platform):
    op = ejx.Matmul(platform=platform)
    out, more = op.together(jnp.ones((0, 4)), jnp.ones((3, 4)), jnp.ones((2, 4)))
    assert op(jnp.ones((2, 0, 4)), jnp.ones((3, 4))).shape == (2, 0, 3)
    assert (out.shape, more.shape) == ((0, 3), (0, 2))


X, W = jnp.ones((5, 8)), jnp.ones((4, 8))


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: ejx.Matmul()(X), ["weights", "one", "received 0"]),
        (lambda: ejx.Matmul(gated=True)(X, W), ["weights", "two", "received 1"]),
        (lambda: ejx.Matmul(gated=True)(X, W, W[:3]), ["equal shape", "(3, 8)"]),
        (lambda: ejx.Matmul()(X, W.T), ["weights[0]", "[N, 8]", "(8, 4)"]),
        (lambda: ejx.Matmul()(X, W.astype(jnp.bfloat16)), ["weights[0]", "float32", "bfloat16"]),
        (lambda: ejx.Matmul()(X, W[:0]), ["weights[0]", "at least one row"]),
        (lambda: ejx.Matmul()(X, W, biases=[None, None]), ["biases", "expected 1", "received 2"]),
        (lambda: ejx.Matmul()(X, W, biases=[jnp.ones(3)]), ["biases[0]", "(3,)"]),
        (lambda: ejx.Matmul()(X, W, norm=jnp.ones(4)), ["norm", "(4,)"]),
        (lambda: ejx.Matmul()(X, W, residual=X), ["residual", "(5, 8)"]),
        (lambda: ejx.Matmul()(X, W, W), ["weights", "one", "received 2", "together"]),
        (lambda: ejx.Matmul().together(X), ["weights", "one to 3", "received 0"]),
        (lambda: ejx.Matmul(gated=True).together(X, W, W), ["weights", "gated=True"]),
        (lambda: ejx.Matmul()(X, W, residual=jnp.ones((5, 4), jnp.bfloat16)), ["residual", "bfloat16"]),
        (lambda: ejx.Matmul("swish"), ["activation", "swish"]),
        (lambda: ejx.Matmul(limit=7.0), ["limit", "gated=False"]),
        (lambda: ejx.Matmul()(X, W, norm=True, norm_eps=-1.0), ["norm_eps", "-1.0"]),
        (lambda: ejx.Matmul()(X[:, :0], W[:, :0]), ["x", "at least one feature"]),
    ],
)
def test_errors(make, words):
    with pytest.raises(ValueError) as error:
        make()
    assert all(word in str(error.value) for word in words), str(error.value)
