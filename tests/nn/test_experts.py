# pyright: reportArgumentType=false, reportCallIssue=false
"""`nn.MixtureOfExperts`: what it computes, its gradients, and that a token costs the experts it goes to and no more."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ejkernel_eqx import nn
from tests.attention.dense import quick
from tests.nn.checks import refuses
from tests.nn.experts import build, chosen, EMBED, HIDDEN, inputs, LAYERS, reference
from tests.tolerances import assert_close


def wide(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float64) if eqx.is_inexact_array(x) else x, tree)


def value_and_gradients(function, layer, x):
    def loss(both):
        y = function(*both)
        loss = jnp.sum(jnp.sin(2 * y.astype(jnp.float64 if y.dtype == jnp.float64 else jnp.float32)))
        return loss, y

    (_, y), gradients = eqx.filter_value_and_grad(loss, has_aux=True)((layer, x))
    return y, gradients


_reference = eqx.filter_jit(
    lambda layer, x, indices: value_and_gradients(lambda *both: reference(*both, indices), layer, x)
)


def expected_of(layer, x):
    """The result and gradients of the reference, in float64."""
    _, indices = chosen(layer, x)
    with jax.enable_x64(True):
        found = _reference(*wide((layer, x)), jnp.asarray(indices))
        return jax.tree.map(np.asarray, eqx.filter(found, eqx.is_array))


run = eqx.filter_jit(lambda layer, x: value_and_gradients(lambda layer, x: layer(x), layer, x))


def agree(found, expected, dtype=None):
    y, gradients = eqx.filter(found, eqx.is_array)
    assert_close(y, expected[0], dtype)
    both = zip(jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(expected[1]), strict=True)
    for (path, found), wanted in both:
        name = jax.tree_util.keystr(path)
        if "correction" in name:
            assert not np.asarray(found).any()
            continue
        # With one expert a token, or one that hardly hesitates, the router's gradient is a difference of numbers that are nearly equal.
        is_router = "gate" in name and "_proj" not in name
        least = max(float(np.sqrt(np.mean(np.square(wanted)))), 1e-1) if is_router else None
        assert_close(found, wanted, dtype, "gradient", least, name=name)


# Every layer in float64, some in others too.
CASES = [(name, "float64") for name in LAYERS]
CASES += [("deepseek_v3", "float32"), ("gpt_oss", "float32"), ("qwen2", "bfloat16"), ("gpt_oss", "bfloat16")]
CASES += [("deepseek_v3", "float16")]
_DEFAULT = {("deepseek_v3", "float32")}


@pytest.mark.parametrize(
    ("name", "dtype"), [pytest.param(*c, marks=() if c in _DEFAULT else pytest.mark.slow) for c in CASES]
)
def test_results_and_gradients(name, dtype):
    with jax.enable_x64(dtype == "float64"):
        layer, x = build(name, dtype=dtype), inputs(17, dtype=dtype)
        found = run(layer, x)
        assert found[0].dtype == dtype
        agree(found, expected_of(layer, x), dtype)


@pytest.mark.parametrize(
    ("name", "options"),
    [("deepseek_v3", {"normalize": False}), pytest.param("gpt_oss", {}, marks=pytest.mark.slow)],
)
def test_the_choice_of_experts(name, options):
    """The correction decides which experts are chosen, and not how much each of them weighs."""
    layer, x = build(name, **options), inputs(3, 7)
    logits, indices = chosen(layer, x.reshape(-1, EMBED))
    routing = layer.route(x)
    assert_close(routing.logits.reshape(logits.shape), logits)
    np.testing.assert_array_equal(routing.indices.reshape(indices.shape), indices)
    assert routing.weights.dtype == jnp.float32
    taken = np.take_along_axis(logits, indices, -1)
    if options:
        expected = 2.5 / (1 + np.exp(-taken))
    else:
        expected = np.exp(taken) / np.exp(taken).sum(-1, keepdims=True)
    assert_close(routing.weights.reshape(indices.shape), expected)


def test_experts_of_other_groups_whose_corrected_scores_are_all_negative():
    """No expert of another group is chosen, though 0, which `transformers` puts in the place of its score, would be the largest."""
    layer, x = build("deepseek_v3"), inputs(40)
    where = lambda layer: layer.gate.e_score_correction_bias
    layer = eqx.tree_at(where, layer, replace_fn=lambda bias: bias - 3)
    routing, (_, indices) = layer.route(x), chosen(layer, x)
    np.testing.assert_array_equal(routing.indices, indices)
    assert np.all([len(set(row // 2)) <= 2 for row in np.asarray(routing.indices)])


@pytest.mark.slow
def test_experts_that_no_token_goes_to_are_not_touched():
    """NaN in their weights would otherwise show in the result, or in the gradients of others."""
    layer = build("mixtral")
    x = jnp.broadcast_to(inputs(1), (4, EMBED))  # all go to the same two
    used = np.unique(layer.route(x).indices)
    assert used.size == 2
    unused = np.setdiff1d(np.arange(5), used)
    where = lambda m: (m.experts.gate_proj, m.experts.up_proj, m.experts.down_proj)
    spoiled = eqx.tree_at(where, layer, replace_fn=lambda w: w.at[unused].set(jnp.nan))
    found = run(spoiled, x)
    agree(found, expected_of(layer, x))
    assert not np.asarray(found[1][0].experts.gate_proj[unused]).any()


@pytest.mark.slow
def test_padding_goes_nowhere():
    layer, x = build("gpt_oss"), inputs(2, 6)
    real = jnp.array([[True] * 6, [False, False, True, True, False, True]])
    spoiled = jnp.where(real[..., None], x, jnp.nan)

    def loss(both, mask):
        y, statistics = both[0](both[1], padding_mask=mask, return_statistics=True)
        balance = nn.load_balancing_loss(statistics) + nn.router_z_loss(statistics)
        return jnp.sum(jnp.sin(y)) + balance, (y, statistics)

    both = eqx.filter_jit(eqx.filter_value_and_grad(loss, has_aux=True))
    (_, (y, statistics)), gradients = both((layer, spoiled), real)
    (_, (alone, own)), wanted = both((layer, x[real]), None)
    assert_close(y[real], alone)
    np.testing.assert_array_equal(statistics.tokens_per_expert, own.tokens_per_expert)
    assert int(statistics.num_tokens) == 9
    assert_close(statistics.probability_sums, own.probability_sums)
    assert_close(statistics.z_square_sum, own.z_square_sum)
    close = functools.partial(assert_close, kind="gradient")
    jax.tree.map(close, *(jax.tree.leaves(each[0]) for each in (gradients, wanted)))
    close(gradients[1][real], wanted[1])
    assert not np.asarray(y[~real]).any() and not np.asarray(gradients[1][~real]).any()


@pytest.mark.slow
def test_leading_axes_and_transformations():
    layer, x = build("deepseek_v3"), inputs(2, 3, 4)
    loss = lambda call: jax.grad(lambda x: jnp.sum(jnp.sin(call(x))))
    call = lambda x: layer(x)

    @quick
    def everything(x):
        scanned = jax.lax.scan(lambda c, x: (c, layer(x)), 0, x)[1]
        apart = call(x.reshape(-1, EMBED)).reshape(x.shape), jax.vmap(call)(x), scanned
        return call(x), apart, call(x[0, 0, 0]), loss(call)(x), loss(jax.checkpoint(call))(x)

    y, apart, one, gradient, again = everything(x)
    for other in apart:
        assert_close(other, y)
    assert_close(one, y[0, 0, 0])
    assert_close(again, gradient, kind="gradient")
    assert layer(x[:0]).shape == (0, 3, 4, EMBED)


@pytest.mark.slow
def test_layers_side_by_side():
    """`vmap` over the weights, as of an ensemble, with gradients."""
    make = lambda key: nn.MixtureOfExperts(EMBED, HIDDEN, num_experts=4, top_k=2, key=key)
    layers, x = eqx.filter_vmap(make)(jax.random.split(jax.random.key(0), 2)), inputs(2, 5)
    gradient = eqx.filter_grad(lambda layer, x: jnp.sum(jnp.sin(layer(x))))
    found, alone = eqx.filter_jit(eqx.filter_vmap(gradient))(layers, x), eqx.filter_jit(gradient)
    for i in range(2):
        layer, own = jax.tree.map(lambda a, i=i: a[i] if eqx.is_array(a) else a, (layers, found))
        expected = jax.tree.leaves(alone(layer, x[i]))
        jax.tree.map(functools.partial(assert_close, kind="gradient"), jax.tree.leaves(own), expected)


@pytest.mark.slow
def test_a_compute_dtype_of_its_own():
    layer = build("qwen2", compute_dtype="bfloat16")
    x = inputs(8)
    y = layer(x)
    assert y.dtype == jnp.bfloat16
    expected = expected_of(layer, x.astype(jnp.bfloat16))[0]
    assert_close(y, expected, "bfloat16")
    assert layer.route(x).logits.dtype == jnp.float32


@pytest.mark.slow
@settings(max_examples=4, deadline=None)
@given(st.data())
def test_any_sizes(data):
    groups = data.draw(st.integers(1, 3))
    experts = groups * data.draw(st.integers(2, 4))
    allowed = data.draw(st.integers(1, groups))
    options = {
        "num_experts": experts,
        "num_groups": groups,
        "top_k_groups": allowed,
        "top_k": data.draw(st.integers(1, allowed * (experts // groups))),
        "scoring": data.draw(st.sampled_from(["softmax", "sigmoid", "top_k_softmax"]))
        if groups == 1
        else "sigmoid",
        "normalize": data.draw(st.booleans()),
        "use_correction_bias": data.draw(st.booleans()) and groups > 1,
        "use_bias": data.draw(st.booleans()),
        "activation": data.draw(st.sampled_from(["silu", "relu", "clamped_swiglu"])),
        "shared_dim": data.draw(st.sampled_from([None, 4])),
    }
    layer, x = build("mixtral", **options), inputs(data.draw(st.integers(1, 40)))
    agree(run(layer, x), expected_of(layer, x))


WRONG = {
    "num_experts: expected a positive integer, received 0": {"num_experts": 0},
    "top_k: expected at most 5.*received 6": {"top_k": 6},
    "scoring: expected one of softmax, sigmoid, top_k_softmax, received 'hash'": {"scoring": "hash"},
    "num_groups: expected a divisor of num_experts=5, received 2": {"num_groups": 2},
    "top_k_groups: expected at most num_groups=5, received 6": {"num_groups": 5, "top_k_groups": 6},
    "num_groups: expected groups of two experts or more.*received 5": {"num_groups": 5, "top_k_groups": 2},
    "group_score: expected one of top2, max, received 'mean'": {"group_score": "mean"},
    "activation: expected one of silu.*received 'swish'": {"activation": "swish"},
    "shared_gate: expected False without shared_dim, received True": {"shared_gate": True},
    "normalize: expected True or False, received 1": {"normalize": 1},
}


_make = functools.partial(nn.MixtureOfExperts, EMBED, HIDDEN, key=jax.random.key(0))
test_wrong_options = refuses(WRONG, lambda wrong: _make(**{"num_experts": 5, "top_k": 2} | wrong))
_COUNTS, _KEY = (jnp.zeros(3), jnp.zeros(4, jnp.int32)), jax.random.key(0)
_SHORT = jnp.ones(3, bool)
WRONG_CALLS = {
    r"x: expected \[\.\.\., E\] with E = 12, received shape \(2, 3, 11\)": lambda f, x: f(x[..., :-1]),
    r"x: expected floats \[\.\.\., E\], received int32": lambda f, x: f(x.astype(jnp.int32)),
    "x: expected an array of floats": lambda f, x: f([1.0]),
    r"padding_mask: expected shape \(2, 3\).*received \(3,\)": lambda f, x: f(x, padding_mask=_SHORT),
    "padding_mask: expected booleans": lambda f, x: f(x, padding_mask=jnp.ones((2, 3))),
    "return_statistics: expected True or False": lambda f, x: f(x, return_statistics=1),
    r"expected the shape of bias, \(3,\)": lambda f, x: nn.update_correction_bias(*_COUNTS),
    "amount: expected a number from 0 to 1, received 2.0": lambda f, x: nn.router_jitter(x, 2.0, key=_KEY),
    "statistics: expected RouterStatistics": lambda f, x: nn.load_balancing_loss([]),
}


test_wrong_inputs = refuses(WRONG_CALLS, lambda wrong: wrong(build("mixtral"), inputs(2, 3)))
