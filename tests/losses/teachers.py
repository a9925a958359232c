"""Students and teachers of every form, and formulas in float64 that divergences are compared with."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import ejkernel_eqx as ejx
from tests.attention.dense import quick
from tests.tolerances import assert_close


class Size(NamedTuple):
    N: int = 13
    E: int = 8
    V: int = 11
    F: int = 6

    @property
    def mask(self) -> np.ndarray:
        return np.arange(self.N) % 4 != 1


SMALL = Size()
DIVERGENCES = ("forward_kl", "reverse_kl", "jensen_shannon")
FORMS = ("logits", "log_probs", "some words", "top_k", "features")
CASES = [
    (divergence, form)
    for divergence in DIVERGENCES
    for form in FORMS
    if divergence != "reverse_kl" or form not in ("some words", "top_k")
]


def make(dtype: str = "float32", size: Size = SMALL) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    n, e, v, _ = size
    shapes = {"x": (n, e), "weight": (v, e), "bias": (v,), "token_weights": (n,)}
    inputs = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    inputs["weight"] *= (SMALL.E / e) ** 0.5
    inputs["x"][~size.mask], inputs["token_weights"] = np.nan, rng.uniform(0, 2, n)
    wide = "float64" if dtype == "float64" else "float32"
    return {name: jnp.asarray(x, wide if name == "token_weights" else dtype) for name, x in inputs.items()}


def teacher_of(
    form: str, temperature: float, dtype: str = "float32", size: Size = SMALL
) -> tuple[ejx.Teacher, Any]:
    """A teacher, with NaN where there is nothing to learn, and its probabilities in float64."""
    rng = np.random.default_rng(1)
    n, _, v, f = size
    x, weight = rng.standard_normal((n, f)), rng.standard_normal((v, f)) / 2 * (SMALL.F / f) ** 0.5
    bias = rng.standard_normal(v)
    cast = lambda x: jnp.asarray(x, dtype)
    x, weight, bias = (np.asarray(cast(x), np.float64) for x in (x, weight, bias))
    logits = 3 * np.tanh((x @ weight.T + bias) / 3)
    logits = np.asarray(cast(logits), np.float64) if form in ("logits", "some words") else logits
    if form == "some words":
        logits[:, 1::3] = -np.inf
    exps = np.exp(logits / temperature)
    p = exps / exps.sum(-1, keepdims=True)
    hide = lambda x: cast(np.where(size.mask[:, None], x, np.nan))
    if form in ("logits", "some words"):
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
    outside = np.full((n, 2), [-1, v])  # are left out
    words, log_probs = np.concatenate([words, outside], -1), np.concatenate([log_probs, np.zeros((n, 2))], -1)
    return ejx.Teacher.from_top_k(jnp.asarray(words), hide(log_probs)), few


def formula(x, weight, bias, token_weights, p, mask, divergence, beta, temperature, cap, reduction) -> Any:
    logits = jnp.where(mask[:, None], x, 0) @ weight.T + bias[None]
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
    weights = jnp.where(mask, token_weights, 0)
    losses = weights * losses
    total = losses if reduction == "none" else losses.sum()
    return total / weights.sum() if reduction == "mean" else total


def with_gradients(function, inputs) -> Any:
    @quick
    def both(inputs):
        out, pull = jax.vjp(lambda inputs: function(**inputs), inputs)
        dout = jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)
        return {"out": out} | pull(dout)[0]

    return both(inputs)


class Compared(NamedTuple):
    """A call of a divergence with all options."""

    divergence: str
    form: str
    reduction: str
    dtype: str = "float32"
    size: Size = SMALL

    @property
    def options(self) -> dict[str, Any]:
        return {"divergence": self.divergence, "temperature": 1.7, "beta": 0.3, "reduction": self.reduction}

    def results(self, platform: Any, config: Any) -> dict[str, Any]:
        """The loss, and gradients under the names of their inputs."""
        teacher, _ = teacher_of(self.form, 1.7, self.dtype, self.size)
        op = ejx.LinearDivergence(**self.options, logits_soft_cap=2.0, platform=platform, config=config)
        mask = jnp.asarray(self.size.mask)
        call = lambda x, weight, bias, token_weights: op(x, weight, teacher, bias, token_weights, mask=mask)
        return with_gradients(call, make(self.dtype, self.size))

    def exact(self) -> dict[str, Any]:
        """The same by the formula in float64."""
        _, p = teacher_of(self.form, 1.7, self.dtype, self.size)
        with jax.enable_x64(True):
            inputs = make(self.dtype, self.size)
            wide = {name: jnp.asarray(np.asarray(x, np.float64)) for name, x in inputs.items()}
            reference = lambda **inputs: formula(
                **inputs, p=jnp.asarray(p), mask=self.size.mask, cap=2.0, **self.options
            )
            return {name: np.asarray(x) for name, x in with_gradients(reference, wide).items()}

    def assert_agrees(self, found: dict[str, Any], expected: dict[str, Any]) -> None:
        assert found["out"].dtype == ("float64" if self.dtype == "float64" else "float32")
        for name, x in found.items():
            assert x.dtype == self.dtype or name in ("out", "token_weights")
            assert_close(x, expected[name], self.dtype, "forward" if name == "out" else "gradient", name=name)
