"""Divergences from a teacher in every form, against formulas in float64, and how they compose."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.losses.xla import XlaConfig
from tests.agreement import platforms
from tests.attention.dense import INTERPRET, quick
from tests.losses.cases import config_of
from tests.losses.teachers import CASES, Compared, DIVERGENCES, make, Size, SMALL, teacher_of
from tests.nn.checks import refuses
from tests.tolerances import assert_close

N, V, MASK = SMALL.N, SMALL.V, SMALL.mask
platform = platforms()


def agree(case: Compared, platform: str, chunk: int) -> None:
    case.assert_agrees(case.results(platform, config_of(platform, chunk)), case.exact())


@pytest.mark.few(5)
@pytest.mark.parametrize("reduction, chunk", [("mean", 4), ("none", 64), ("sum", 64)])
@pytest.mark.parametrize("divergence, form", CASES)
def test_agrees_with_the_formula(divergence, form, reduction, chunk, platform):
    if form == "top_k" and platform != "xla":
        pytest.skip("XLA's alone")
    agree(Compared(divergence, form, reduction), platform, chunk)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_other_dtypes(divergence, dtype, platform):
    agree(Compared(divergence, "features", "mean", dtype), platform, 4)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_several_tiles(divergence):
    """Of rows that end inside one."""
    pytest.importorskip("triton")
    agree(Compared(divergence, "features", "none", "bfloat16", Size(V=301)), INTERPRET, 7)


@pytest.mark.slow
def test_float64(enable_x64):
    agree(Compared("jensen_shannon", "features", "mean", "float64"), "xla", 4)


def test_what_triton_does_not_take():
    pytest.importorskip("triton")
    with pytest.raises(ejx.UnsupportedError, match="not of the top k"):
        Compared("forward_kl", "top_k", "mean").results(INTERPRET, None)


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
def test_composes(platform):
    """vmap over students and over tokens, scan, checkpoint; no gradient reaches the teacher."""
    inputs, (teacher, _) = make(), teacher_of("features", 1.0)
    op = ejx.LinearDivergence(platform=platform, config=config_of(platform, 4))
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
