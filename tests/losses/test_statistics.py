"""What one pass says of each token, and the cross entropy of logits at hand, against formulas in float64."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from tests.agreement import platforms
from tests.attention.dense import INTERPRET, quick
from tests.losses.cases import Case, config_of, exact, make, results, XlaConfig
from tests.nn.checks import refuses
from tests.tolerances import assert_close

platform = platforms()
CASE = Case((3, 7), ignored=5, bias=True, weighted=True)
OPTIONS: dict[str, Any] = {
    "plain": {},
    "everything": dict(logits_soft_cap=2.0, temperature=0.7, label_smoothing=0.2, z_loss=0.1),
}


def of_logits(x, weight, labels, bias, token_weights, **options) -> Any:
    real = (labels >= 0)[..., None]
    logits = jnp.where(real, x, 0) @ weight.T + bias[None, None]
    return ejx.cross_entropy(
        jnp.where(real, logits, jnp.nan), labels, token_weights, return_statistics=True, **options
    )


def linear(x, weight, labels, bias, token_weights, platform: Any = "xla", **options) -> Any:
    operation = ejx.LinearCrossEntropy(**options, platform=platform, config=config_of(platform, 4))
    return operation(x, labels, weight, bias, token_weights, return_statistics=True)


def formula(x, weight, labels, bias, token_weights, reduction="mean", **options) -> Any:
    """As one writes it down: probabilities first, then logarithms."""
    cap, smooth = options.get("logits_soft_cap"), options.get("label_smoothing", 0)
    real = labels >= 0
    logits = jnp.where(real[..., None], x, 0) @ weight.T + bias[None, None]
    logits = (logits if cap is None else cap * jnp.tanh(logits / cap)) / options.get("temperature", 1)
    powers = jnp.exp(logits)
    p, lse = powers / powers.sum(-1, keepdims=True), jnp.log(powers.sum(-1))
    log_probs = jnp.log(jnp.take_along_axis(p, jnp.where(real, labels, 0)[..., None], -1))[..., 0]
    target = (1 - smooth) * jax.nn.one_hot(labels, p.shape[-1], dtype=p.dtype) + smooth / p.shape[-1]
    losses = -(target * jnp.log(p)).sum(-1) + options.get("z_loss", 0) * lse**2
    losses = jnp.where(real, token_weights * losses, 0)
    loss = losses if reduction == "none" else losses.sum()
    loss = loss / jnp.where(real, token_weights, 0).sum() if reduction == "mean" else loss
    each = (jnp.where(real, x, 0) for x in (log_probs, -(p * jnp.log(p)).sum(-1), lse))
    return loss, (*each, real & (logits.argmax(-1) == labels))


def everything(function, inputs, labels) -> dict[str, Any]:
    """Results, and the gradients of a function of all of them."""

    @quick
    def both(inputs):
        def scalar(inputs):
            loss, each = function(labels=labels, **inputs)
            log_probs, entropy, lse, top = each
            total = jnp.sum(loss**2) + jnp.sum(jnp.sin(entropy) - jnp.cos(2 * log_probs) + lse**2 / 9)
            return total, {"loss": loss, "log_probs": log_probs, "entropy": entropy, "lse": lse, "top": top}

        return jax.grad(scalar, has_aux=True)(inputs)

    grads, named = both(inputs)
    return named | grads


interpreted = functools.partial(linear, platform=INTERPRET)


@pytest.mark.few(3)
@pytest.mark.parametrize("function", [linear, of_logits, interpreted])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", OPTIONS)
def test_agrees_with_the_formula(name, reduction, function):
    inputs, labels, _ = make(CASE)
    options = OPTIONS[name] | {"reduction": reduction}
    actual = everything(functools.partial(function, **options), inputs, labels)
    with jax.enable_x64(True):
        wide = {key: jnp.asarray(np.asarray(x, np.float64)) for key, x in inputs.items()}
        expected = everything(functools.partial(formula, **options), wide, labels)
        expected = {key: np.asarray(x) for key, x in expected.items()}
    assert (np.asarray(actual.pop("top")) == expected.pop("top")).all()
    for key, x in actual.items():
        assert_close(x, expected[key], kind="gradient" if key in inputs else "forward", name=key)


def test_a_loss_with_statistics_takes_no_more_products():
    """Unless they have gradients, too."""
    x, w = jnp.ones((64, 8)), jnp.ones((96, 8))
    op = ejx.LinearCrossEntropy(config=XlaConfig(32))
    both = lambda x, w: op(x, jnp.zeros(64, jnp.int32), w, return_statistics=True)
    more = lambda x, w: (lambda loss, each: loss + each.entropy.sum())(*both(x, w))
    count = lambda f, **options: str(jax.make_jaxpr(jax.grad(f, (0, 1), **options))(x, w)).count(
        "dot_general["
    )
    assert count(both, has_aux=True) == 3 and count(more) == 6


def test_words_that_are_masked(platform):
    """Minus infinity as a bias: a probability of 0, without NaN in entropy and gradients."""
    x, w, labels = jnp.ones((2, 4)), jnp.ones((6, 4)), jnp.array([0, 1])
    bias = jnp.array([0.0, 0.0, -jnp.inf, -jnp.inf, 0.0, 0.0])
    op = ejx.LinearCrossEntropy("none", platform=platform)

    def both(w):
        loss, each = op(x, labels, w, bias, return_statistics=True)
        return loss, -each.log_probs, each.entropy

    values, pull = jax.vjp(both, w)
    for value in values:
        assert_close(value, np.full(2, np.log(4.0), np.float32))
    (grads,) = pull((jnp.ones(2),) * 3)
    assert np.isfinite(grads).all() and not grads[2:4].any()
    logits = jnp.where(jnp.isinf(bias), -jnp.inf, 1.0)[None]
    entropy = lambda logits: ejx.cross_entropy(logits, labels[:1], return_statistics=True)[1].entropy.sum()
    value, grad = jax.value_and_grad(entropy)(logits)
    assert_close(value, np.float32(np.log(4.0)))
    assert_close(grad, jnp.zeros((1, 6)), scale=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_logits_of_other_dtypes(dtype, enable_x64):
    """The loss and its gradient by the formula of a projection by one."""
    options: dict[str, Any] = dict(logits_soft_cap=2.0, label_smoothing=0.2, z_loss=0.1)
    case = Case((5,), vocabulary=8, dtype=dtype, ignored=1, options=options)
    inputs, labels, dout = make(case)
    inputs["weight"] = jnp.eye(8, dtype=dtype)
    call = lambda x, weight, labels: ejx.cross_entropy(x, labels, **options)
    actual, expected = results(call, inputs, labels, dout), exact(case, inputs, labels, dout)
    assert actual["x"].dtype == dtype
    assert actual["out"].dtype == ("float64" if dtype == "float64" else "float32")
    assert_close(actual["out"], expected["out"], dtype)
    assert_close(actual["x"], expected["x"], dtype, "gradient")


@pytest.mark.slow
def test_logits_compose():
    """vmap, forward mode and second derivatives, as of any function of JAX's."""
    logits, labels = jax.random.normal(jax.random.key(0), (3, 5, 7)), jnp.arange(15).reshape(3, 5) % 8 - 1
    loss = lambda x, y: ejx.cross_entropy(x, y, z_loss=0.1)
    each = quick(jax.vmap(loss))(logits, labels)
    assert_close(each, jnp.stack([loss(x, y) for x, y in zip(logits, labels)]))
    one = lambda x: loss(x, labels[0])
    forward, reverse = (quick(f(one))(logits[0]) for f in (jax.jacfwd, jax.jacrev))
    assert_close(forward, reverse, kind="gradient")
    hessian = quick(jax.jacfwd(jax.grad(one)))(logits[0])
    assert_close(hessian, jnp.transpose(hessian, (2, 3, 0, 1)), kind="gradient")


def test_nothing_to_compute():
    x, labels = jnp.ones((2, 0, 4)), jnp.zeros((2, 0), int)
    loss, each = ejx.LinearCrossEntropy()(x, labels, jnp.ones((5, 4)), return_statistics=True)
    assert loss == 0 and {value.shape for value in each} == {(2, 0)}
    assert ejx.cross_entropy(x, labels) == 0


WRONG: dict[str, Any] = {
    "logits: .*at least one word": lambda: ejx.cross_entropy(jnp.ones((3, 0)), jnp.zeros(3, int)),
    r"labels: .*\(3,\).*\(2,\)": lambda: ejx.cross_entropy(jnp.ones((3, 4)), jnp.zeros(2, int)),
    "labels: .*vocabulary of 4, received 4": lambda: ejx.cross_entropy(jnp.ones((1, 4)), np.array([4])),
    r"token_weights: .*\(3,\).*\(4,\)": lambda: ejx.cross_entropy(
        jnp.ones((3, 4)), jnp.zeros(3, int), jnp.ones(4)
    ),
    "temperature: .*more than 0": lambda: ejx.cross_entropy(
        jnp.ones((3, 4)), jnp.zeros(3, int), temperature=0.0
    ),
    "return_statistics: .*True or False": lambda: ejx.linear_cross_entropy(
        jnp.ones((3, 4)),
        jnp.zeros(3, int),
        jnp.ones((5, 4)),
        return_statistics=1,  # pyright: ignore[reportCallIssue, reportArgumentType]
    ),
    "vocab_axis: .*name of a mesh axis": lambda: ejx.LinearCrossEntropy(vocab_axis=0),  # pyright: ignore[reportArgumentType]
}


test_wrong_arguments = refuses(WRONG)
