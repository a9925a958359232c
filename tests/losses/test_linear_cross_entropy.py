"""The cross entropy of a projection against the reference, and how it composes."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from tests.agreement import platforms
from tests.attention.dense import quick
from tests.losses.cases import Case, CASES, exact, make, results, XlaConfig
from tests.tolerances import assert_close

platform = platforms()


@pytest.mark.few(7)
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_formula(name, platform):
    case = CASES[name]
    inputs, labels, dout = make(case)
    found = results(case.operation(platform), inputs, labels, dout)
    expected = exact(case, inputs, labels, dout)
    assert found["out"].dtype == jnp.float32 and set(found) == set(expected)
    assert all(found[name].dtype == x.dtype for name, x in inputs.items())
    for name, x in found.items():
        assert_close(x, expected[name], case.dtype, "forward" if name == "out" else "gradient", name=name)


def test_a_label_that_is_ignored():
    """As a negative one; in the mean as well."""
    inputs, labels, _ = make(Case((12,), ignored=0))
    x, w = inputs["x"], inputs["weight"]
    wanted = ejx.LinearCrossEntropy()(x, np.where(labels == labels[0], -1, labels), w)
    assert ejx.LinearCrossEntropy(ignore_index=int(labels[0]))(x, labels, w) == wanted
    far = np.where(labels == labels[0], 1000, labels)
    assert ejx.LinearCrossEntropy(ignore_index=1000)(x, far, w) == wanted
    with pytest.raises(ValueError, match="labels: expected ids below the vocabulary of 11, received 1000"):
        ejx.LinearCrossEntropy()(x, far, w)
    assert np.isnan(quick(ejx.LinearCrossEntropy())(x, far, w))


@pytest.mark.few(2)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_composes(reduction, platform):
    """vmap of every argument, also with one weight for all; scan, checkpoint."""
    case = Case((3, 6), options={"reduction": reduction}, bias=True, ignored=2)
    inputs, labels, _ = make(case)
    op, labels = case.operation(platform), jnp.asarray(labels)
    x, w, b = inputs["x"], inputs["weight"], inputs["bias"]

    def loss(x, w, b, labels):
        return jnp.sum(op(x, labels, w, b) * 1.5)

    def agree(found, *each):
        for x, *wanted in zip(found, *each, strict=True):
            assert_close(x, jnp.stack(wanted), kind="gradient")

    grad = jax.grad(loss, (0, 1, 2))
    one = [quick(grad)(x[i], w, b, labels[i]) for i in range(3)]
    agree(quick(jax.vmap(grad, (0, None, None, 0)))(x, w, b, labels), *one)
    many = quick(jax.vmap(grad, (None, 0, 0, None)))(x, jnp.stack([w, 2 * w]), jnp.stack([b, b]), labels)
    agree(many, *(quick(grad)(x, scale * w, b, labels) for scale in (1, 2)))
    total = lambda w: jax.vmap(loss, (0, None, None, 0))(x, w, b, labels).sum()

    def scanned(w):
        step = lambda total, part: (total + jax.checkpoint(loss)(part[0], w, b, part[1]), None)
        return jax.lax.scan(step, 0.0, (x, labels))[0]

    for function in (total, scanned):
        assert_close(quick(jax.grad(function))(w), sum(g[1] for g in one), kind="gradient")


def test_float64(enable_x64):
    case = CASES["everything"]
    inputs, labels, dout = make(case)
    inputs = {name: x.astype(jnp.float64) for name, x in inputs.items()}
    found = results(case.operation(), inputs, labels, dout.astype(jnp.float64))
    for name, x in exact(case, inputs, labels, dout).items():
        assert_close(found[name], x, "float64", "gradient", name=name)


@pytest.mark.parametrize(
    "options", [{"reduction": "none"}, {"label_smoothing": 0.1, "z_loss": 0.1, "logits_soft_cap": 3.0}]
)
def test_logits_are_never_held_whole(options):
    """No array of the compiled program has all of them, forward and backward."""
    x, w = jnp.ones((4, 64, 8)), jnp.ones((96, 8))
    op = ejx.LinearCrossEntropy(**options, config=XlaConfig(32))
    loss = lambda x, w: op(x, jnp.zeros((4, 64), jnp.int32), w).sum()
    text = jax.jit(jax.grad(loss, (0, 1))).lower(x, w).compile().as_text()
    assert text is not None
    sizes = [np.prod([int(n) for n in dims.split(",")]) for dims in re.findall(r"f32\[([\d,]+)\]", text)]
    assert max(sizes) < 256 * 96 / 4 and any(size == 32 * 96 for size in sizes)


def test_gradients_without_a_second_look_at_the_logits():
    """Three products of matrices for a mean; a loss alone takes one."""
    x, w = jnp.ones((64, 8)), jnp.ones((96, 8))
    op = ejx.LinearCrossEntropy(config=XlaConfig(32))
    loss = lambda x, w: op(x, jnp.zeros(64, jnp.int32), w)
    count = lambda f: str(jax.make_jaxpr(f)(x, w)).count("dot_general[")
    assert count(loss) == 1 and count(jax.grad(loss, (0, 1))) == 3


def test_what_an_empty_call_gives():
    w = jnp.ones((5, 4))
    assert ejx.LinearCrossEntropy()(jnp.ones((0, 4)), jnp.zeros(0, int), w) == 0
    assert ejx.LinearCrossEntropy("none")(jnp.ones((2, 0, 4)), jnp.zeros((2, 0), int), w).shape == (2, 0)


def test_forward_mode_is_refused():
    x, w = jnp.ones((3, 4)), jnp.ones((5, 4))
    with pytest.raises(ejx.UnsupportedError, match="logits"):
        jax.jvp(lambda x: ejx.linear_cross_entropy(x, jnp.zeros(3, jnp.int32), w), (x,), (x,))


WRONG_ARGUMENTS = {
    "features": (dict(weight=jnp.ones((11, 7))), r"weight: .*\[V, 8\].*\(11, 7\)"),
    "vocabulary": (dict(weight=jnp.ones((0, 8))), "weight: .*at least one row"),
    "bias": (dict(bias=jnp.ones(5)), r"bias: .*\(5,\)"),
    "labels": (dict(labels=jnp.zeros((2, 8), int)), r"labels: .*\(2, 9\).*\(2, 8\)"),
    "float labels": (dict(labels=jnp.zeros((2, 9))), "labels: .*integers"),
    "weights": (dict(token_weights=jnp.ones(9)), r"token_weights: .*\(2, 9\).*\(9,\)"),
    "integers": (dict(x=jnp.ones((2, 9, 8), jnp.int32)), "x: .*int32"),
}


@pytest.mark.parametrize("name", WRONG_ARGUMENTS)
def test_wrong_arguments(name, unchecked):
    change, message = WRONG_ARGUMENTS[name]
    inputs, labels, _ = make(Case())
    arguments: Any = {"labels": labels} | inputs | change
    with pytest.raises(ValueError, match=message):
        ejx.LinearCrossEntropy()(**arguments)


WRONG = dict(reduction="max", logits_soft_cap=0.0, label_smoothing=1.5, z_loss=-1.0, ignore_index=0.5)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options(name, unchecked):
    options: Any = {name: WRONG[name]}
    with pytest.raises(ValueError, match=name):
        ejx.LinearCrossEntropy(**options)
