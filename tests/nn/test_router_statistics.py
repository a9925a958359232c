"""The losses of routers, the bias that balances them, their statistics and noise: by their published formulas in NumPy."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx import nn
from ejkernel_eqx.nn.moe.routing import Choice, choose
from ejkernel_eqx.nn.moe.statistics import statistics_of
from tests.attention.dense import quick
from tests.nn.experts import build, EMBED, inputs
from tests.tolerances import assert_close

LOGITS = jnp.asarray(2 * np.random.default_rng(0).standard_normal((3, 20, 5), np.float32))  # of three layers
REAL = jnp.asarray(np.random.default_rng(1).random(20) < 0.7)


def balance(logits, real, top_k):
    """As `load_balancing_loss_func` of `transformers`: the layers' tokens one after the other."""
    logits = np.asarray(logits, np.float64).reshape(-1, logits.shape[-1])
    weights = np.tile(np.asarray(real, np.float64), len(logits) // len(real))[:, None]
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    ranks = np.argsort(np.argsort(-probabilities))
    fractions = ((ranks < top_k) * weights).sum(0) / weights.sum()
    return 5 * np.sum(fractions * (probabilities * weights).sum(0) / weights.sum())


def z_loss(logits, real):
    weights = np.tile(np.asarray(real, np.float64), len(logits))
    z = np.log(np.exp(np.asarray(logits, np.float64)).sum(-1)).reshape(-1)
    return np.sum(z**2 * weights) / weights.sum()


@quick
def statistics(logits, real=None):
    return statistics_of(choose(logits, Choice(5, 2)), "softmax", real)


@pytest.mark.few(1)
@pytest.mark.parametrize("real", [None, REAL], ids=["all", "padded"])
def test_losses_of_several_layers(real):
    """In one, in a sequence, and stacked."""
    layers = [statistics(logits, real) for logits in LOGITS]
    stacked = quick(jax.vmap(lambda logits: statistics(logits, real)))(LOGITS)
    mask = np.ones(20, bool) if real is None else real
    for given in (layers, stacked, [stacked]):
        assert_close(nn.load_balancing_loss(given), balance(LOGITS, mask, 2))
        assert_close(nn.router_z_loss(given), z_loss(LOGITS, mask))
    assert_close(nn.load_balancing_loss(layers[1]), balance(LOGITS[1], mask, 2))


@pytest.mark.slow
def test_gradients_of_the_losses():
    """Of the balance through the probabilities alone."""
    counts = np.bincount(np.asarray(choose(LOGITS[0], Choice(5, 2)).indices).ravel(), minlength=5) / 20
    with jax.enable_x64(True):
        logits = LOGITS[0].astype(jnp.float64)
        wanted = jax.grad(lambda z: 5 * jnp.sum(counts[None] * jax.nn.softmax(z)) / 20)(logits)
        wanted_z = jax.grad(lambda z: jnp.mean(jax.nn.logsumexp(z, -1) ** 2))(logits)
    found = jax.grad(lambda z: nn.load_balancing_loss(statistics(z)))(LOGITS[0])
    assert_close(found, wanted, kind="gradient")
    assert_close(jax.grad(lambda z: nn.router_z_loss(statistics(z)))(LOGITS[0]), wanted_z, kind="gradient")


@pytest.mark.slow
@pytest.mark.parametrize("real", [None, REAL], ids=["all", "padded"])
def test_the_loss_of_transformers(real):
    torch = pytest.importorskip("torch")
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    logits = tuple(torch.from_numpy(np.array(x)) for x in LOGITS)
    mask = None if real is None else torch.from_numpy(np.array(real))[None].int()
    wanted = mixtral.load_balancing_loss_func(logits, 5, 2, mask)
    assert_close(nn.load_balancing_loss([statistics(x, real) for x in LOGITS]), wanted.numpy())


def test_of_a_layer():
    layer, x = build("deepseek_v3"), inputs(2, 9)
    both = lambda x, real: (layer(x, padding_mask=real, return_statistics=True), layer.route(x))
    call = eqx.filter_jit(both)
    (_, found), routing = call(x, jnp.ones((2, 9), bool))
    counts = np.bincount(np.asarray(routing.indices).ravel(), minlength=8)
    np.testing.assert_array_equal(found.tokens_per_expert, counts)
    scores = 1 / (1 + np.exp(-np.asarray(routing.logits, np.float64)))
    assert_close(found.probability_sums, (scores / scores.sum(-1, keepdims=True)).sum((0, 1)))
    assert_close(found.fractions, counts / 18)
    assert_close(found.imbalance, counts.max() / counts.mean())
    (_, empty), _ = call(x, jnp.zeros((2, 9), bool))
    assert not np.asarray(empty.tokens_per_expert).any() and float(nn.load_balancing_loss(empty)) == 0


def test_the_correction_bias_balances():
    """Tokens that all prefer the same experts are spread over all of them, without a gradient."""
    layer = nn.MixtureOfExperts(
        EMBED, 8, num_experts=6, top_k=2, scoring="sigmoid", use_correction_bias=True, key=jax.random.key(2)
    )
    x = inputs(256) + 2 * layer.gate.weight[:1]
    where = lambda m: m.gate.e_score_correction_bias

    @eqx.filter_jit
    def step(layer):
        statistics = statistics_of(layer.route(x), "sigmoid", None)
        bias = nn.update_correction_bias(where(layer), statistics.tokens_per_expert, 0.02)
        return eqx.tree_at(where, layer, bias), statistics

    _, before = step(layer)
    for _ in range(30):
        layer, after = step(layer)
    assert float(before.imbalance) > 2 and float(after.imbalance) < 1.4, (before.imbalance, after.imbalance)
    new = nn.update_correction_bias(np.zeros(3, np.float32), np.array([1, 4, 1]), 0.5)
    np.testing.assert_array_equal(new, [0.5, -0.5, 0.5])
    np.testing.assert_array_equal(nn.update_correction_bias(np.ones(2, np.float32), np.array([3, 3])), 1)


def test_jitter():
    x, key = jnp.ones((4000, 2), jnp.bfloat16), jax.random.key(0)
    noisy = np.asarray(nn.router_jitter(x, 0.25, key=key), np.float64)
    assert 0.75 <= noisy.min() < 0.76 and 1.24 < noisy.max() <= 1.25 and abs(noisy.mean() - 1) < 0.01
    np.testing.assert_array_equal(nn.router_jitter(x, 0.0, key=key), x)
    scale = nn.router_jitter(jnp.ones((4000, 2)), 0.25, key=key)
    gradient = jax.grad(lambda x: nn.router_jitter(x, 0.25, key=key).astype(jnp.float32).sum())(x)
    assert_close(gradient, scale, kind="gradient")


@pytest.mark.parametrize("dtype, amount", [("bfloat16", 0.001), ("float16", 0.01), ("float32", 0.001)])
def test_jitter_has_the_mean_and_at_least_the_width_of_its_noise(dtype, amount):
    """Also where the noise is less than the distance between numbers of the dtype, and on both sides of a power of 2."""
    x = jnp.tile(jnp.asarray([1.0, -1.7, 3.3], dtype), (20000, 1))
    noisy = np.asarray(nn.router_jitter(x, amount, key=jax.random.key(1)), np.float64)
    exact = np.asarray(x[0], np.float64)
    deviation = noisy.std(0) / np.abs(exact)
    assert np.all(deviation > 0.99 * amount / 3**0.5), deviation
    assert np.all(np.abs(noisy.mean(0) - exact) < 4 * noisy.std(0) / 20000**0.5), noisy.mean(0) - exact
    if jnp.finfo(dtype).eps < amount / 5:
        assert np.all(deviation < 1.01 * amount / 3**0.5), deviation


SHIFTS = (0.0, -45.0, -110.0, -1e4, 30.0)


@pytest.mark.parametrize("name", ["sigmoid", pytest.param("softmax", marks=pytest.mark.slow)])
def test_scores_that_are_all_tiny(name):
    """Weights, probabilities and their gradients at logits far below and above 0, of one token beside others, against float64."""
    shifted = np.asarray(LOGITS[0], np.float64)[:5] + np.asarray(SHIFTS)[:, None]
    # A correction, as a limit of groups, can choose experts whose softmax is tiny.
    bias, cotangent = jnp.asarray([0, 0, 0, 9, 9.5]), np.random.default_rng(2).standard_normal((5, 2))
    shifted[0, 3:] -= 120

    def everything(logits):
        routing = choose(logits, Choice(5, 2, name), bias.astype(logits.dtype))
        weighted = jnp.sum(routing.weights * cotangent.astype(logits.dtype))
        loss = nn.load_balancing_loss(statistics_of(routing, name, None))
        return weighted + loss, (routing.weights, routing.indices, loss)

    share = lambda z: jnp.exp(z - jax.nn.logsumexp(z, axis=-1, keepdims=True))

    def reference(logits):
        log_scores = logits if name != "sigmoid" else -jnp.logaddexp(0.0, -logits)
        counts = np.bincount(indices.ravel()) / 5
        weights = share(jnp.take_along_axis(log_scores, indices, -1))
        loss = jnp.sum(counts[None] * share(log_scores))
        return jnp.sum(weights * cotangent) + loss, (weights, loss)

    run = lambda function: jax.jit(jax.value_and_grad(function, has_aux=True))
    (_, (weights, indices, loss)), gradient = run(everything)(jnp.asarray(shifted, jnp.float32))
    indices = np.asarray(indices)
    with jax.enable_x64(True):
        logits = jnp.asarray(np.asarray(shifted, np.float32), jnp.float64)
        (_, (wanted, wanted_loss)), wanted_gradient = run(reference)(logits)
    np.testing.assert_array_equal(indices, np.tile([4, 3], (5, 1)))
    for row in range(5):
        assert_close(weights[row], wanted[row], name=f"weights at {SHIFTS[row]}")
        assert_close(gradient[row], wanted_gradient[row], kind="gradient", name=f"gradient at {SHIFTS[row]}")
    assert_close(loss, wanted_loss)
