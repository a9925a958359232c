"""Of equal scores the first is taken, by routers, samplers and sparse attention; NumPy's stable sort says which. Both zeros are equal."""

import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.models.sampling import draw, greedy, Sampling, SamplingArrays
from ejkernel_eqx.nn.moe.routing import Choice, choose
from tests.attention.dense import INTERPRET, normal, quick
from tests.nn.checks import needs_triton


def _few_values(*shape):
    """Of five values, both zeros among them."""
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.integers(-2, 2, shape) * np.where(rng.random(shape) < 0.5, -1.0, 1.0), jnp.float32)


def _ranks(scores):
    """From the best on, of equal ones the first."""
    return np.argsort(-np.asarray(scores), axis=-1, kind="stable")


CHOICES = {
    "softmax": Choice(13, 4),
    "sigmoid": Choice(13, 4, "sigmoid"),
    "logits": Choice(13, 4, "top_k_softmax"),
    "groups": Choice(12, 5, "top_k_softmax", num_groups=4, top_k_groups=2),
}


@pytest.mark.parametrize("name", CHOICES)
def test_experts(name):
    how = CHOICES[name]
    logits = _few_values(60, how.num_experts)
    allowed = np.ones(logits.shape, bool)
    if how.is_limited:
        best = np.sort(np.asarray(logits).reshape(60, 4, 3), axis=-1)[..., -2:].sum(-1)
        groups = _ranks(best)[:, : how.top_k_groups]
        allowed = (np.arange(12) // 3 == groups[..., None]).any(1)
    found = quick(lambda logits: choose(logits, how).indices)(logits)
    np.testing.assert_array_equal(found, _ranks(np.where(allowed, logits, -np.inf))[:, : how.top_k])


def test_a_bias_that_makes_scores_equal():
    """It is added before experts are ranked: 0.5 + 0.25 twice, and 0.5 + 0 twice."""
    bias = jnp.array([0.0, 0.25, 0.0, 0.25])
    assert choose(jnp.zeros((1, 4)), Choice(4, 3, "sigmoid"), bias).indices.tolist() == [[1, 3, 0]]


def test_tokens():
    """Greedy, and drawn from the one that is likeliest by `top_k=1`."""
    logits = _few_values(40, 21)
    pairs = [(Sampling(temperature, top_k=1, seed=5), 3) for temperature in [0.0, 1.0] * 20]
    rows = SamplingArrays.of(pairs, 40)
    expected = _ranks(logits)[:, 0]
    for found in (quick(greedy)(logits), quick(draw)(logits, rows)):
        np.testing.assert_array_equal(found, expected)
    pair = np.asarray([[1.0, 3.0, -0.0, 0.0, 3.0, 0.0]] * 64, np.float32)
    rows = SamplingArrays.of([(Sampling(4.0, top_k=3), place) for place in range(64)], 64)
    assert set(np.asarray(quick(draw)(jnp.asarray(pair), rows)).tolist()) == {0, 1, 4}


@pytest.mark.parametrize("platform", ["xla", INTERPRET])
def test_blocks(platform):
    """A query's own block and the first one, then those of the largest scores: of equal keys, all scores are equal."""
    needs_triton(platform)
    op = ejx.NativeSparseAttention(block_size=4, num_blocks=4, sliding_window=5, platform=platform)
    q, k, v, gates = normal(0, 30, 4, 16), jnp.ones((30, 2, 16)), normal(1, 30, 2, 16), normal(2, 30, 4, 3)
    _, found = quick(lambda *args: op(*args, return_indices=True))(q, k, v, gates)
    for place, chosen in enumerate(np.asarray(found)):
        own = place // 4
        expected = [own, *[block for block in range(4) if block < own]][:4]
        assert (chosen == expected + [-1] * (4 - len(expected))).all()
