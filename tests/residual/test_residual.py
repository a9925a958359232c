"""The norm of a sum on XLA and by its Triton kernels, interpreted: against the reference, and how it composes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from tests.agreement import assert_agrees, platforms
from tests.attention.dense import quick
from tests.residual.cases import Case, CASES, exact, make, results
from tests.tolerances import assert_close

platform = platforms()


@pytest.mark.few(3)
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_reference(name, platform):
    case = CASES[name]
    inputs, cotangents = make(case)
    found = results(ejx.ResidualRMSNorm(platform=platform), inputs, cotangents)
    assert found["out"].dtype == found["sum"].dtype == inputs["x"].dtype
    assert all(found[f"d{n}"].dtype == x.dtype for n, x in inputs.items())
    assert_agrees(case, found, exact(inputs, cotangents))


def test_the_reference_is_the_formula():
    inputs, cotangents = make(Case((3, 8)))
    x, branch, weight = (np.asarray(inputs[n], np.float64) for n in ("x", "branch", "weight"))
    total = x + branch
    normed = total / np.sqrt((total**2).mean(-1, keepdims=True) + 1e-6) * weight
    found = exact(inputs, cotangents)
    np.testing.assert_allclose(found["out"], normed)
    np.testing.assert_allclose(found["sum"], total)


@pytest.mark.few(1)
def test_composes(platform):
    """vmap of rows and of the weight; a residual stream through several of them, with checkpoint and scan."""
    inputs, (dout, dsum) = make(Case((3, 4, 6)))
    op, (x, branch, w) = ejx.ResidualRMSNorm(platform=platform), inputs.values()

    def loss(x, branch, w, dout, dsum):
        out, total = op(x, branch, w)
        return (out * dout).sum() + (total * dsum).sum()

    grad = jax.grad(loss, (0, 1, 2))
    wanted = quick(grad)(x, branch, w, dout, dsum)
    mapped = quick(jax.vmap(grad, (0, 0, None, 0, 0)))(x, branch, w, dout, dsum)
    weights = quick(jax.vmap(grad, (None, None, 0, None, None)))(x, branch, jnp.stack([w, -w]), dout, dsum)
    for n in range(3):
        assert_close(mapped[n].sum(0) if n == 2 else mapped[n], wanted[n], kind="gradient")
        assert_close(weights[n][0], wanted[n], kind="gradient")

    def stream(x, scan):
        layer = lambda x, w: (x + jnp.sin(jax.checkpoint(op)(x, None, w)[0]), None)
        return (scan(layer, x, jnp.stack([w, 2 * w]))[0] * dout).sum()

    one_by_one = lambda layer, x, ws: layer(layer(x, ws[0])[0], ws[1])
    found, plain = (
        quick(jax.grad(functools.partial(stream, scan=scan)))(x) for scan in (jax.lax.scan, one_by_one)
    )
    assert_close(found, plain, kind="gradient")


def test_what_an_empty_call_gives(platform):
    op, x, w = ejx.ResidualRMSNorm(platform=platform), jnp.ones((0, 4)), jnp.ones(4)
    assert [part.shape for part in op(x, x, w)] == [(0, 4)] * 2


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(branch=jnp.ones((2, 5, 11))), ["branch", "(2, 5, 11)"]),
        (dict(branch=jnp.ones((2, 5, 12), jnp.bfloat16)), ["branch", "float32", "bfloat16"]),
        (dict(weight=jnp.ones(5)), ["weight", "[12]", "(5,)"]),
        (dict(x=jnp.ones((2, 0))), ["x", "at least one feature"]),
        (dict(x=jnp.ones((2, 5, 12), jnp.int32)), ["x", "int32"]),
    ],
)
def test_wrong_arguments(change, words, unchecked):
    with pytest.raises(ValueError) as caught:
        ejx.ResidualRMSNorm()(**(make(Case())[0] | change))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_wrong_options(unchecked):
    with pytest.raises(ValueError, match="eps"):
        ejx.ResidualRMSNorm(-1.0)
    with pytest.raises(ValueError, match="readers: expected 1 to 3"):
        ejx.ResidualRMSNorm().for_readers(4, jnp.ones((2, 4)))


@pytest.mark.few(2)
@pytest.mark.parametrize("branch", [True, False])
@pytest.mark.parametrize("readers", [1, 2, 3])
def test_each_reader_has_an_array_of_its_own(readers, branch, platform):
    """The gradients are those of the sum of what the readers return."""
    inputs, (dout, dsum) = make(Case((3, 5, 6), dtype="bfloat16"))
    op, given = ejx.ResidualRMSNorm(platform=platform), (inputs["x"], inputs["branch"] if branch else None)
    given = *given, inputs["weight"]
    scales = [jnp.asarray(s, dout.dtype) for s in (1.0, -0.5, 0.25)[:readers]]

    (outs, total), pull = jax.vjp(lambda *given: op.for_readers(readers, *given), *given)
    assert len(outs) == readers
    found = pull((tuple(scale * dout for scale in scales), dsum))
    (out, plain_total), pull = jax.vjp(op, *given)
    # In float32, as the kernel adds them.
    parts = jnp.stack([(scale * dout).astype(jnp.float32) for scale in scales])
    expected = pull((parts.sum(0).astype(dout.dtype), dsum))
    for a in outs:
        np.testing.assert_array_equal(a, out)
    np.testing.assert_array_equal(total, plain_total)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_close(a, np.asarray(b, np.float64), "bfloat16", "gradient")
