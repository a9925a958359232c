"""The gated RMS norm on XLA and by its Triton kernels, interpreted: against the reference, and how it composes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from tests.agreement import assert_agrees, platforms
from tests.attention.dense import INTERPRET, quick
from tests.normalization.cases import Case, CASES, exact, make, results
from tests.tolerances import assert_close

platform = platforms()


@pytest.mark.few(3)
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_reference(name, platform):
    case = CASES[name]
    inputs, dout = make(case)
    found = results(case.operation(platform), inputs, dout)
    assert found["out"].dtype == inputs["x"].dtype
    assert all(found[n].dtype == x.dtype and found[n].shape == x.shape for n, x in inputs.items())
    assert_agrees(case, found, exact(case, inputs, dout))


@pytest.mark.parametrize("before", [False, True])
def test_the_reference_is_the_formula(before):
    case = Case((3, 8), "sigmoid", before, group_size=4)
    inputs, dout = make(case)
    x, z, w = (np.asarray(inputs[n], np.float64) for n in ("x", "z", "weight"))
    gate = 1 / (1 + np.exp(-z))
    rows = (x if before else x * gate).reshape(3, 2, 4)
    normed = (rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 1e-6)).reshape(3, 8) * w
    np.testing.assert_allclose(exact(case, inputs, dout)["out"], normed * gate if before else normed)


@pytest.mark.few(1)
def test_composes(platform):
    """jit, vmap of rows, cotangents of any layout."""
    case = Case((3, 4, 6), norm_before_gate=True)
    inputs, dout = make(case)
    op, (x, z, w) = case.operation(platform), inputs.values()

    def loss(x, z, w):
        return (jnp.swapaxes(op(x, z, w), -1, -2) * jnp.swapaxes(dout, -1, -2)[: x.shape[0]]).sum()

    wanted = quick(jax.grad(loss, (0, 1, 2)))(x, z, w)
    rows = lambda x, z, w, d: jax.grad(lambda *a: (op(*a) * d).sum(), (0, 1, 2))(x, z, w)
    mapped = quick(jax.vmap(rows, (0, 0, None, 0)))(x, z, w, dout)
    for n, (one, many) in enumerate(zip(wanted, mapped)):
        assert_close(many.sum(0) if n == 2 else many, one, kind="gradient")


def test_what_an_empty_call_gives(platform):
    op, x, w = ejx.GatedRMSNorm(platform=platform), jnp.ones((0, 4)), jnp.ones(4)
    assert op(x, x, w).shape == (0, 4)
    assert not jax.grad(lambda w: op(x, x, w).sum())(w).any()


def test_float64(enable_x64):
    case = Case(dtype="float64")
    inputs, dout = make(case)
    inputs = {name: x.astype(jnp.float64) for name, x in inputs.items()}
    assert_agrees(case, results(case.operation("xla"), inputs, dout), exact(case, inputs, dout))
    with pytest.raises(ejx.UnsupportedError, match="not float64"):
        case.operation(INTERPRET)(**inputs)


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(z=jnp.ones((2, 5, 11))), ["z", "(2, 5, 11)"]),
        (dict(weight=jnp.ones(5)), ["weight", "(12,) or (4,)", "(5,)"]),
        (dict(x=jnp.ones((2, 5, 13))), ["x", "divisible by group_size=4", "(2, 5, 13)"]),
        (dict(x=jnp.ones((2, 5, 12), jnp.int32)), ["x", "int32"]),
    ],
)
def test_wrong_arguments(change, words, unchecked):
    with pytest.raises(ValueError) as caught:
        ejx.GatedRMSNorm(group_size=4)(**(make(Case())[0] | change))
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("options", [dict(activation="gelu"), dict(group_size=0), dict(eps=-1.0)])
def test_wrong_options(options, unchecked):
    with pytest.raises(ValueError, match=next(iter(options))):
        ejx.GatedRMSNorm(**options)
