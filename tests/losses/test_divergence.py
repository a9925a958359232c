"""Divergences from a teacher in every form, against formulas in float64, and how they compose."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.losses.xla import XlaConfig
from tests.attention.dense import quick
from tests.nn.checks import refuses
from tests.tolerances import assert_close

N, E, V, F = 13, 8, 11, 6
FORMS = ("logits", "log_probs", "top_k", "features")
MASK = np.arange(N) % 4 != 1


def make(dtype: str = "float32") -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {"x": (N, E), "weight": (V, E), "bias": (V,), "token_weights": (N,)}
    inputs = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    inputs["x"][~MASK], inputs["token_weights"] = np.nan, rng.uniform(0, 2, N)
    return {name: jnp.asarray(x, dtype) for name, x in inputs.items()}


def teacher_of(form: str, temperature: float, dtype: str = "float32") -> tuple[ejx.Teacher, Any]:
    """A teacher, with NaN where there is nothing to learn, and its probabilities in float64."""
    rng = np.random.default_rng(1)
    x, weight, bias = rng.standard_normal((N, F)), rng.standard_normal((V, F)) / 2, rng.standard_normal(V)
    cast = lambda x: jnp.asarray(x, dtype)
    x, weight, bias = (np.asarray(cast(x), np.float64) for x in (x, weight, bias))
    logits = 3 * np.tanh((x @ weight.T + bias) / 3)
    logits = np.asarray(cast(logits), np.float64) if form == "logits" else logits
    exps = np.exp(logits / temperature)
    p = exps / exps.sum(-1, keepdims=True)
    hide = lambda x: cast(np.where(MASK[:, None], x, np.nan))
    if form == "logits":
        return ejx.Teacher.from_logits(hide(logits)), p
    if form == "log_probs":
        plain = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        return ejx.Teacher.from_logits(hide(np.log(plain))), p
    if form == "features":
        return ejx.Teacher.from_features(hide(x), cast(weight), cast(bias), logits_soft_cap=3.0), p
    words = np.argsort(-p, -1)[:, :4]
    log_probs = np.log(np.take_along_axis(p, words, -1))
    few = np.zeros_like(p)
    np.put_along_axis(few, words, np.take_along_axis(p, words, -1), -1)
    outside = np.full((N, 2), [-1, V])  # are left out
    words, log_probs = np.concatenate([words, outside], -1), np.concatenate([log_probs, np.zeros((N, 2))], -1)
    return ejx.Teacher.from_top_k(jnp.asarray(words), hide(log_probs)), few


def formula(x, weight, bias, token_weights, p, divergence, beta, temperature, cap, reduction) -> Any:
    logits = jnp.where(MASK[:, None], x, 0) @ weight.T + bias[None]
    logits = logits if cap is None else cap * jnp.tanh(logits / cap)
    q = jax.nn.softmax(logits / temperature)

    def kl(a, b):
        return jnp.sum(
            jnp.where(a > 0, a * (jnp.log(jnp.where(a > 0, a, 1)) - jnp.log(jnp.where(a > 0, b, 1))), 0), -1
        )

    m = beta * p + (1 - beta) * q
    losses = {
        "forward_kl": lambda: kl(p, q),
        "reverse_kl": lambda: kl(q, p),
        "jensen_shannon": lambda: beta * kl(p, m) + (1 - beta) * kl(q, m),
    }[divergence]()
    weights = jnp.where(MASK, token_weights, 0)
    losses = weights * losses
    total = losses if reduction == "none" else losses.sum()
    return total / weights.sum() if reduction == "mean" else total


def with_gradients(function, inputs) -> Any:
    @quick
    def both(inputs):
        out, pull = jax.vjp(lambda inputs: function(**inputs), inputs)
        return out, pull(jnp.cos(out))[0]

    return both(inputs)


CASES = [
    (divergence, form)
    for divergence in ("forward_kl", "reverse_kl", "jensen_shannon")
    for form in FORMS
    if (divergence, form) != ("reverse_kl", "top_k")
]


def agree(inputs, dtype, divergence, form, reduction, chunk) -> None:
    options = {"divergence": divergence, "temperature": 1.7, "beta": 0.3, "reduction": reduction}
    teacher, p = teacher_of(form, 1.7, dtype)
    op = ejx.LinearDivergence(**options, logits_soft_cap=2.0, config=XlaConfig(chunk))
    call = lambda x, weight, bias, token_weights: op(
        x, weight, teacher, bias, token_weights, mask=jnp.asarray(MASK)
    )
    out, grads = with_gradients(call, inputs)
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(np.asarray(x, np.float64)) for name, x in inputs.items()}
        reference = lambda **inputs: formula(**inputs, p=jnp.asarray(p), cap=2.0, **options)
        expected, wanted = with_gradients(reference, wide)
        expected, wanted = np.asarray(expected), {name: np.asarray(x) for name, x in wanted.items()}
    assert out.dtype == ("float64" if dtype == "float64" else "float32")
    assert_close(out, expected, dtype)
    for name, x in grads.items():
        assert x.dtype == dtype
        assert_close(x, wanted[name], dtype, "gradient", name=name)


@pytest.mark.few(3)
@pytest.mark.parametrize("reduction, chunk", [("mean", 4), ("none", 64), ("sum", 64)])
@pytest.mark.parametrize("divergence, form", CASES)
def test_agrees_with_the_formula(divergence, form, reduction, chunk):
    agree(make(), "float32", divergence, form, reduction, chunk)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_dtypes(dtype, enable_x64):
    agree(make(dtype), dtype, "jensen_shannon", "features", "mean", 4)


@pytest.mark.slow
def test_the_ends_of_a_mixture():
    """Over its share, the Jensen-Shannon divergence becomes the forward one as that of the teacher vanishes."""
    inputs, (teacher, _) = make(), teacher_of("features", 1.0)
    call = lambda op: op(inputs["x"], inputs["weight"], teacher, mask=MASK)
    few = call(ejx.LinearDivergence("jensen_shannon", beta=1e-3)) / 1e-3
    np.testing.assert_allclose(few, call(ejx.LinearDivergence()), rtol=2e-2)
    most = call(ejx.LinearDivergence("jensen_shannon", beta=1 - 1e-3)) / 1e-3
    np.testing.assert_allclose(most, call(ejx.LinearDivergence("reverse_kl")), rtol=2e-2)


@pytest.mark.slow
def test_composes():
    """vmap over students and over tokens, scan, checkpoint; no gradient reaches the teacher."""
    inputs, (teacher, _) = make(), teacher_of("features", 1.0)
    op = ejx.LinearDivergence(config=XlaConfig(4))
    loss = lambda weight, x=inputs["x"], teacher=teacher: op(x, weight, teacher, mask=jnp.asarray(MASK))
    weights = jnp.stack([inputs["weight"], 2 * inputs["weight"]])
    each = jnp.stack([quick(jax.grad(loss))(w) for w in weights])
    assert_close(quick(jax.vmap(jax.grad(loss)))(weights), each, kind="gradient")
    summed = lambda weights: jax.lax.scan(lambda s, w: (s + jax.checkpoint(loss)(w), None), 0.0, weights)[0]
    assert_close(quick(jax.grad(summed))(weights), each, kind="gradient")
    rows = lambda x: jnp.stack([x, x[::-1]])
    hidden = jnp.where(jnp.asarray(MASK)[:, None], inputs["x"], 0.0)
    on_rows = lambda w: jax.vmap(lambda x, t: op(x, w, t))(rows(hidden), jax.tree.map(lambda x: x, two)).sum()
    plain = ejx.Teacher.from_logits(jnp.zeros((N, V)))
    two = ejx.Teacher.from_logits(jnp.zeros((2, N, V)))
    one = quick(jax.grad(lambda w: op(hidden, w, plain)))(inputs["weight"])
    assert_close(quick(jax.grad(on_rows))(inputs["weight"]), 2 * one, kind="gradient")
    of_teacher = jax.grad(lambda t: loss(inputs["weight"], teacher=t))(teacher)
    assert not any(x.any() for x in jax.tree.leaves(of_teacher))


def test_neither_sides_logits_are_held_whole():
    x, t, w = jnp.ones((256, 8)), jnp.ones((256, 4)), jnp.ones((96, 8))
    op = ejx.LinearDivergence(config=XlaConfig(32))
    teacher = ejx.Teacher.from_features(t, jnp.ones((96, 4)))
    text = jax.jit(jax.grad(lambda x, w: op(x, w, teacher), (0, 1))).lower(x, w).compile().as_text()
    sizes = [
        np.prod([int(n) for n in dims.split(",")]) for dims in re.findall(r"f32\[([\d,]+)\]", text or "")
    ]
    assert max(sizes) < 256 * 96 / 4 and any(size == 32 * 96 for size in sizes)


def test_all_tokens_ignored():
    inputs, (teacher, _) = make(), teacher_of("logits", 1.0)
    call = lambda w: ejx.LinearDivergence()(inputs["x"], w, teacher, mask=np.zeros(N, bool))
    loss, grad = jax.value_and_grad(call)(inputs["weight"])
    assert loss == 0 and not grad.any()


X, W = jnp.ones((2, 3, 4)), jnp.ones((5, 4))
FLAT = ejx.Teacher.from_logits(jnp.zeros((2, 3, 5)))
FEW = ejx.Teacher.from_top_k(jnp.zeros((2, 3, 1), int), jnp.zeros((2, 3, 1)))
WRONG: dict[str, Any] = {
    "divergence: .*forward_kl.*'kl'": lambda: ejx.LinearDivergence("kl"),
    "beta: .*between|beta: .*more than 0 and less than 1": lambda: ejx.LinearDivergence(
        "jensen_shannon", beta=1.0
    ),
    "teacher: .*ejx.Teacher, received": lambda: ejx.linear_divergence(X, W, jnp.zeros((2, 3, 5))),  # pyright: ignore[reportArgumentType]
    "teacher: .*reverse_kl, received the top k": lambda: ejx.linear_divergence(
        X, W, FEW, divergence="reverse_kl"
    ),
    r"teacher: .*\[2, 3, 6\].*\(2, 3, 5\)": lambda: ejx.linear_divergence(X, jnp.ones((6, 4)), FLAT),
    r"mask: .*\(2, 3\).*\(2,\)": lambda: ejx.linear_divergence(X, W, FLAT, mask=np.ones(2, bool)),
    "mask: .*booleans": lambda: ejx.linear_divergence(X, W, FLAT, mask=np.ones((2, 3))),
    r"indices: .*\(3, 2\).*\(3, 1\)": lambda: ejx.Teacher.from_top_k(
        jnp.zeros((3, 1), int), jnp.zeros((3, 2))
    ),
    r"weight: .*\[V, 4\].*\(5, 3\)": lambda: ejx.Teacher.from_features(X, jnp.ones((5, 3))),
    "logits_soft_cap": lambda: ejx.Teacher.from_features(X, W, logits_soft_cap=0.0),
}


test_wrong_arguments = refuses(WRONG)
