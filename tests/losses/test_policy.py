"""Losses of fine-tuning, preferences and policy gradients against their papers' formulas, one number at a time in NumPy."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from tests.attention.dense import quick
from tests.nn.checks import refuses
from tests.tolerances import assert_close

RNG = np.random.default_rng(0)
POLICY, OLD, REFERENCE = (-RNG.uniform(0.1, 2, (4, 6)) for _ in range(3))
MASK = np.arange(6) < np.array([[6], [3], [1], [0]])
ADVANTAGES = np.array([1.5, -0.5, -1.0, 2.0])


def gradient(function, x, *, of=1e-6) -> np.ndarray:
    """By differences, in float64."""
    result = np.zeros_like(x)
    for at in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[at] = of
        result[at] = (function(x + step) - function(x - step)) / (2 * of)
    return result


def agree(actual, formula, x) -> None:
    """A loss of `x` and its gradient."""
    value, grad = quick(jax.value_and_grad(actual))(jnp.asarray(x, jnp.float32))
    assert_close(value, np.float64(formula(x)))
    assert_close(grad, gradient(formula, x), kind="gradient")


def grpo(policy, *, old, clip=(0.2, 0.2), kl=0.0, aggregation="sequence") -> float:
    sums, counts = [], []
    for row in range(4):
        tokens = []
        for t in range(6):
            if MASK[row, t]:
                ratio, advantage = math.exp(policy[row, t] - old[row, t]), ADVANTAGES[row]
                kept = min(max(ratio, 1 - clip[0]), 1 + clip[1])
                other = math.exp(REFERENCE[row, t] - policy[row, t])
                k3 = other - (REFERENCE[row, t] - policy[row, t]) - 1
                tokens.append(-min(ratio * advantage, kept * advantage) + kl * k3)
        sums.append(sum(tokens))
        counts.append(len(tokens))
    if aggregation == "token":
        return sum(sums) / sum(counts)
    return sum(s / max(n, 1) for s, n in zip(sums, counts)) / 4


hidden = lambda x: jnp.asarray(np.where(MASK, x, np.nan), jnp.float32)
CALLS: dict[str, Any] = {
    "clipped": dict(clip=(0.2, 0.2)),
    "clipped higher": dict(clip=(0.1, 0.5)),
    "with KL": dict(kl=0.3),
    "over tokens": dict(kl=0.3, aggregation="token"),
}


@pytest.mark.parametrize("name", CALLS)
def test_grpo(name):
    options = CALLS[name]
    clip, kl = options.get("clip", (0.2, 0.2)), options.get("kl", 0.0)

    def actual(policy):
        policy = jnp.where(MASK, policy, jnp.nan)
        reference = hidden(REFERENCE) if kl else None
        return ejx.grpo_loss(
            policy,
            jnp.asarray(ADVANTAGES, jnp.float32),
            MASK,
            old_log_probs=hidden(OLD),
            reference_log_probs=reference,
            clip=clip[0] if clip[0] == clip[1] else clip,
            kl_weight=kl,
            aggregation=options.get("aggregation", "sequence"),
        )

    agree(actual, functools.partial(grpo, old=OLD, **options), POLICY)


def test_the_first_step_of_grpo():
    """Without older log-probabilities the ratio is one, and its gradient that of the log-probability."""
    loss, grad = jax.value_and_grad(lambda policy: ejx.grpo_loss(policy, jnp.asarray(ADVANTAGES), MASK))(
        jnp.asarray(POLICY, jnp.float32)
    )
    lengths = np.maximum(MASK.sum(-1, keepdims=True), 1)
    assert_close(grad, -ADVANTAGES[:, None] * MASK / lengths / 4, kind="gradient")
    assert_close(loss, np.float32(-ADVANTAGES[:3].sum() / 4), scale=1.0)


def test_group_advantages():
    rewards = np.array([[1.0, 0.0, 0.0, 1.0], [2.0, 2.0, 2.0, 2.0]])
    each = [(r - np.mean(r)) / (np.std(r, ddof=1) + 1e-4) for r in rewards]
    assert_close(ejx.group_advantages(jnp.asarray(rewards, jnp.float32)), np.stack(each))
    plain = ejx.group_advantages(jnp.asarray(rewards, jnp.float32), normalize=False)
    assert_close(plain, rewards - rewards.mean(-1, keepdims=True))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_dpo(smoothing):
    """Both kinds of answers, and their references, in one array of the rows of four."""
    both = np.stack([POLICY[:, 0], POLICY[:, 1]])

    def formula(both):
        total = 0.0
        for i in range(4):
            h = 0.3 * ((both[0, i] - REFERENCE[i, 0]) - (both[1, i] - REFERENCE[i, 1]))
            log_sigmoid = lambda h: -math.log(1 + math.exp(-h))
            total -= (1 - smoothing) * log_sigmoid(h) + smoothing * log_sigmoid(-h)
        return total / 4

    reference = jnp.asarray(REFERENCE, jnp.float32)
    actual = lambda both: ejx.dpo_loss(
        both[0], both[1], reference[:, 0], reference[:, 1], beta=0.3, label_smoothing=smoothing
    )
    agree(actual, formula, both)


def test_sft():
    weights = np.where(MASK, np.abs(OLD), 0)
    actual = lambda x: ejx.sft_loss(jnp.where(MASK, x, jnp.nan), jnp.asarray(weights, jnp.float32))
    agree(actual, lambda x: -np.sum(weights * x) / np.sum(weights), POLICY)
    x, w, labels = (
        jnp.asarray(POLICY, jnp.float32),
        jnp.ones((9, 6)) * jnp.arange(9.0)[:, None],
        jnp.arange(4),
    )
    _, each = ejx.LinearCrossEntropy("none")(x, labels, w, return_statistics=True)
    own = jnp.asarray(weights[:, 0], jnp.float32)
    assert_close(ejx.sft_loss(each.log_probs, own), ejx.LinearCrossEntropy()(x, labels, w, None, own))
    assert ejx.sft_loss(each.log_probs, jnp.zeros(4)) == 0


@pytest.mark.slow
def test_no_gradient_reaches_other_models():
    x = jnp.asarray(POLICY, jnp.float32)
    grpo_loss = lambda old, reference, advantages: ejx.grpo_loss(
        x, advantages, MASK, old_log_probs=old, reference_log_probs=reference, kl_weight=1.0
    )
    grads = jax.grad(grpo_loss, (0, 1, 2))(x + 0.1, x - 0.1, x[:, 0])
    dpo = jax.grad(lambda a, b: ejx.dpo_loss(x[0], x[1], a, b), (0, 1))(x[2], x[3])
    assert not any(g.any() for g in (*grads, *dpo))


ONES, ROWS = jnp.ones((2, 3)), jnp.ones(2)
ALL = np.ones((2, 3), bool)
WRONG: dict[str, Any] = {
    r"advantages: .*\(2,\).*\(3,\)": lambda: ejx.grpo_loss(ONES, jnp.ones(3), ALL),
    r"log_probs: .*\(2, 3\).*\(2, 4\)": lambda: ejx.grpo_loss(jnp.ones((2, 4)), ROWS, ALL),
    "mask: .*booleans": lambda: ejx.grpo_loss(ONES, ROWS, ONES),  # pyright: ignore[reportArgumentType]
    "clip: .*from 0 to 1": lambda: ejx.grpo_loss(ONES, ROWS, ALL, clip=2.0),
    "reference_log_probs: .*kl_weight=0.1": lambda: ejx.grpo_loss(ONES, ROWS, ALL, kl_weight=0.1),
    "aggregation: .*'mean'": lambda: ejx.grpo_loss(ONES, ROWS, ALL, aggregation="mean"),
    r"rewards: .*at least 2.*\(2, 1\)": lambda: ejx.group_advantages(jnp.ones((2, 1))),
    r"rejected: .*\(2,\).*\(2, 3\)": lambda: ejx.dpo_loss(ROWS, ONES, ROWS, ROWS),
    "label_smoothing: .*0.5": lambda: ejx.dpo_loss(ROWS, ROWS, ROWS, ROWS, label_smoothing=0.7),
    r"token_weights: .*\(2, 3\).*\(2,\)": lambda: ejx.sft_loss(ONES, ROWS),
}


test_wrong_arguments = refuses(WRONG)
