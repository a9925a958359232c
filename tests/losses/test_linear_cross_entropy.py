"""The cross entropy of a projection against the reference, and how it composes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.losses.xla import XlaConfig
from tests.attention.dense import quick
from tests.losses.cases import Case, CASES, exact, make, results
from tests.tolerances import assert_close


def assert_agrees(case: Case, found, expected) -> None:
    assert set(found) == set(expected)
    for name, x in found.items():
        assert_close(x, expected[name], case.dtype, "forward" if name == "out" else "gradient", name=name)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_reference(name):
    case = CASES[name]
    inputs, labels, dout = make(case)
    found = results(case.operation(), inputs, labels, dout)
    assert found["out"].dtype == jnp.float32
    assert all(found[n].dtype == x.dtype and found[n].shape == x.shape for n, x in inputs.items())
    assert_agrees(case, found, exact(case, inputs, labels, dout))


def test_the_reference_is_the_formula():
    """Token by token, with everything that changes it."""
    case = CASES["everything"]
    inputs, labels, dout = make(case)
    x, w, b, weights = (np.asarray(inputs[n], np.float64) for n in ("x", "weight", "bias", "token_weights"))
    total = count = 0.0
    for row, label, weight in zip(x.reshape(-1, 8), labels.reshape(-1), weights.reshape(-1)):
        if label < 0:
            continue
        logits = 2 * np.tanh((w @ row + b) / 2)
        lse = np.log(np.exp(logits).sum())
        loss = lse - 0.8 * logits[label] - 0.2 * logits.mean() + 0.1 * lse**2
        total, count = total + weight * loss, count + weight
    np.testing.assert_allclose(exact(case, inputs, labels, dout)["out"], total / count)


def test_it_is_what_optax_computes():
    inputs, labels, _ = make(Case((4, 5)))
    plain = lambda x, w: optax.softmax_cross_entropy_with_integer_labels(x @ w.T, labels).mean()
    both = lambda f: quick(jax.value_and_grad(f, (0, 1)))(inputs["x"], inputs["weight"])
    found = both(lambda x, w: ejx.linear_cross_entropy(x, labels, w, config=XlaConfig(8)))
    for x, expected in zip(jax.tree.leaves(found), jax.tree.leaves(both(plain)), strict=True):
        assert_close(x, expected, kind="gradient")


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


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_composes(reduction):
    """vmap of every argument, also with one weight for all; scan, checkpoint."""
    case = Case((3, 6), options=(("reduction", reduction),), bias=True, ignored=2)
    inputs, labels, _ = make(case)
    op, labels = case.operation(), jnp.asarray(labels)
    x, w, b = inputs["x"], inputs["weight"], inputs["bias"]

    def loss(x, w, b, labels):
        return jnp.sum(op(x, labels, w, b) * 1.5)

    grad = jax.grad(loss, (0, 1, 2))
    one = [quick(grad)(x[i], w, b, labels[i]) for i in range(3)]
    each = quick(jax.vmap(grad, (0, None, None, 0)))(x, w, b, labels)
    total = lambda x, w, b: jax.vmap(loss, (0, None, None, 0))(x, w, b, labels).sum()
    summed = quick(jax.grad(total, (0, 1, 2)))(x, w, b)
    for n in range(3):
        rows = jnp.stack([gradients[n] for gradients in one])
        assert_close(each[n], rows, kind="gradient")
        assert_close(summed[n], rows.sum(0) if n else rows, kind="gradient")
    many = quick(jax.vmap(grad, (None, 0, 0, None)))(x, jnp.stack([w, 2 * w]), jnp.stack([b, b]), labels)
    wanted = [quick(grad)(x, scale * w, b, labels) for scale in (1, 2)]
    for n in range(3):
        assert_close(many[n], jnp.stack([gradients[n] for gradients in wanted]), kind="gradient")

    def scanned(w):
        step = lambda total, part: (total + jax.checkpoint(loss)(part[0], w, b, part[1]), None)
        return jax.lax.scan(step, 0.0, (x, labels))[0]

    assert_close(quick(jax.grad(scanned))(w), sum(g[1] for g in one), kind="gradient")


def test_float64(enable_x64):
    case = CASES["everything"]
    inputs, labels, dout = make(case)
    inputs = {name: x.astype(jnp.float64) for name, x in inputs.items()}
    found = results(case.operation(), inputs, labels, dout.astype(jnp.float64))
    for name, x in exact(case, inputs, labels, dout).items():
        assert_close(found[name], x, "float64", "gradient", name=name)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_logits_are_never_held_whole(reduction):
    """No array of the compiled program has all of them, forward and backward."""
    x, w = jnp.ones((4, 64, 8)), jnp.ones((96, 8))
    op = ejx.LinearCrossEntropy(reduction, config=XlaConfig(32))
    loss = lambda x, w: op(x, jnp.zeros((4, 64), jnp.int32), w).sum()
    text = jax.jit(jax.grad(loss, (0, 1))).lower(x, w).compile().as_text()
    assert text is not None
    sizes = [np.prod([int(n) for n in dims.split(",")]) for dims in re.findall(r"f32\[([\d,]+)\]", text)]
    assert max(sizes) < 256 * 96 / 4 and any(size == 32 * 96 for size in sizes)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 0.1, "logits_soft_cap": 3.0}])
def test_nothing_of_the_size_of_logits_is_kept_outside_the_loop(options):
    x, w, b = jnp.ones((64, 8)), jnp.ones((96, 8)), jnp.ones(96)
    op = ejx.LinearCrossEntropy(config=XlaConfig(32), **options)
    loss = lambda x, w, b: op(x, jnp.zeros(64, jnp.int32), w, b)

    def sizes(jaxpr):
        for eqn in jaxpr.eqns:
            yield from (v.aval.size for v in eqn.outvars)
            if eqn.primitive.name != "scan":
                for inner in eqn.params.values():
                    yield from sizes(inner.jaxpr) if hasattr(inner, "jaxpr") else ()

    found = list(sizes(jax.make_jaxpr(jax.value_and_grad(loss, (0, 1, 2)))(x, w, b).jaxpr))
    assert len(found) > 20 and max(found) < 32 * 96


def test_gradients_without_a_second_look_at_the_logits():
    """Three products of matrices for a mean; a loss alone takes one."""
    x, w = jnp.ones((64, 8)), jnp.ones((96, 8))
    op = ejx.LinearCrossEntropy(config=XlaConfig(32))
    loss = lambda x, w: op(x, jnp.zeros(64, jnp.int32), w)
    count = lambda f: str(jax.make_jaxpr(f)(x, w)).count("dot_general[")
    assert count(loss) == 1 and count(jax.grad(loss, (0, 1))) == 3


def test_what_an_empty_call_gives():
    op, w = ejx.LinearCrossEntropy(), jnp.ones((5, 4))
    assert op(jnp.ones((0, 4)), jnp.zeros(0, int), w) == 0
    assert ejx.LinearCrossEntropy("none")(jnp.ones((2, 0, 4)), jnp.zeros((2, 0), int), w).shape == (2, 0)


def test_forward_mode_is_refused():
    x, w = jnp.ones((3, 4)), jnp.ones((5, 4))
    with pytest.raises(ejx.UnsupportedError, match="logits"):
        jax.jvp(lambda x: ejx.linear_cross_entropy(x, jnp.zeros(3, jnp.int32), w), (x,), (x,))


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(weight=jnp.ones((11, 7))), ["weight", "[V, 8]", "(11, 7)"]),
        (dict(weight=jnp.ones((0, 8))), ["weight", "at least one row"]),
        (dict(bias=jnp.ones(5)), ["bias", "(5,)"]),
        (dict(labels=jnp.zeros((2, 8), int)), ["labels", "(2, 9)", "(2, 8)"]),
        (dict(labels=jnp.zeros((2, 9))), ["labels", "integers"]),
        (dict(token_weights=jnp.ones(9)), ["token_weights", "(2, 9)", "(9,)"]),
        (dict(x=jnp.ones((2, 9, 8), jnp.int32)), ["x", "int32"]),
    ],
)
def test_wrong_arguments(change, words, unchecked):
    inputs, labels, _ = make(Case())
    with pytest.raises(ValueError) as caught:
        ejx.LinearCrossEntropy()(**({"labels": labels} | inputs | change))
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        dict(reduction="max"),
        dict(logits_soft_cap=0.0),
        dict(label_smoothing=1.5),
        dict(z_loss=-1.0),
        dict(ignore_index=0.5),
    ],
)
def test_wrong_options(options, unchecked):
    with pytest.raises(ValueError, match=next(iter(options))):
        ejx.LinearCrossEntropy(**options)
