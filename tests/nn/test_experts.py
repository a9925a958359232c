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


def expected_of(layer, x):
    """The result and gradients of the reference, in float64."""
    _, indices = chosen(layer, x)
    with jax.enable_x64(True):
        run = lambda layer, x, indices: value_and_gradients(lambda *both: reference(*both, indices), layer, x)
        found = eqx.filter_jit(run)(*wide((layer, x)), jnp.asarray(indices))
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
        least = (
            max(float(np.sqrt(np.mean(np.square(wanted)))), 1e-1)
            if "gate" in name and "_proj" not in name
            else None
        )
        assert_close(found, wanted, dtype, "gradient", least, name=name)


CASES = [(name, dtype) for name in LAYERS for dtype in ("float32", "bfloat16", "float16")]
_DEFAULT = {("deepseek_v3", "float32")}


@pytest.mark.parametrize(
    ("name", "dtype"), [pytest.param(*c, marks=() if c in _DEFAULT else pytest.mark.slow) for c in CASES]
)
def test_results_and_gradients(name, dtype):
    layer, x = build(name, dtype=dtype), inputs(17, dtype=dtype)
    found = run(layer, x)
    assert found[0].dtype == dtype
    agree(found, expected_of(layer, x), dtype)


@pytest.mark.slow
@pytest.mark.usefixtures("enable_x64")
@pytest.mark.parametrize("name", LAYERS)
def test_in_float64(name):
    layer, x = build(name, dtype="float64"), inputs(9, dtype="float64")
    agree(run(layer, x), expected_of(layer, x))


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
    layer = eqx.tree_at(
        lambda layer: layer.gate.e_score_correction_bias, layer, replace_fn=lambda bias: bias - 3
    )
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
    spoiled = eqx.tree_at(
        lambda m: (m.experts.gate_proj, m.experts.up_proj, m.experts.down_proj),
        layer,
        replace_fn=lambda w: w.at[unused].set(jnp.nan),
    )
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
    assert not np.asarray(y[~real]).any()
    jax.tree.map(
        np.testing.assert_array_equal,
        (statistics.tokens_per_expert, statistics.num_tokens),
        (own.tokens_per_expert, 9),
    )
    assert_close(statistics.probability_sums, own.probability_sums)
    assert_close(statistics.z_square_sum, own.z_square_sum)

    jax.tree.map(
        functools.partial(assert_close, kind="gradient"),
        *(eqx.filter(t[0], eqx.is_array) for t in (gradients, wanted)),
    )
    assert_close(gradients[1][real], wanted[1], kind="gradient")
    assert not np.asarray(gradients[1][~real]).any()


@pytest.mark.slow
def test_leading_axes_and_transformations():
    layer, x = build("deepseek_v3"), inputs(2, 3, 4)
    y = quick(lambda x: layer(x))(x)
    assert_close(quick(lambda x: layer(x))(x.reshape(-1, EMBED)).reshape(x.shape), y)
    assert_close(quick(lambda x: layer(x))(x[0, 0, 0]), y[0, 0, 0])
    assert_close(quick(jax.vmap(lambda x: layer(x)))(x), y)
    assert_close(quick(lambda x: jax.lax.scan(lambda c, x: (c, layer(x)), 0, x)[1])(x), y)
    remat = lambda x: jnp.sum(jnp.sin(jax.checkpoint(lambda x: layer(x))(x)))
    assert_close(
        quick(jax.grad(remat))(x), quick(jax.grad(lambda x: jnp.sum(jnp.sin(layer(x)))))(x), kind="gradient"
    )
    assert layer(x[:0]).shape == (0, 3, 4, EMBED)


@pytest.mark.slow
def test_layers_side_by_side():
    """`vmap` over the weights, as of an ensemble, with gradients."""
    make = lambda key: nn.MixtureOfExperts(EMBED, HIDDEN, num_experts=4, top_k=2, key=key)
    layers = eqx.filter_vmap(make)(jax.random.split(jax.random.key(0), 3))
    x = inputs(3, 5)
    loss = lambda layer, x: jnp.sum(jnp.sin(layer(x)))
    found = eqx.filter_jit(eqx.filter_vmap(eqx.filter_grad(loss)))(layers, x)
    for i in range(3):
        one = jax.tree.map(lambda a, i=i: a[i] if eqx.is_array(a) else a, layers)
        alone = eqx.filter_grad(loss)(one, x[i])
        mine = jax.tree.map(lambda a, i=i: a[i] if eqx.is_array(a) else a, found)
        jax.tree.map(
            functools.partial(assert_close, kind="gradient"),
            eqx.filter(mine, eqx.is_array),
            eqx.filter(alone, eqx.is_array),
        )


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
@settings(max_examples=12, deadline=None)
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


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 0}, "num_experts: expected a positive integer, received 0"),
        ({"top_k": 6}, "top_k: expected at most 5.*received 6"),
        ({"scoring": "hash"}, "scoring: expected one of softmax, sigmoid, top_k_softmax, received 'hash'"),
        ({"num_groups": 2}, "num_groups: expected a divisor of num_experts=5, received 2"),
        ({"num_groups": 5, "top_k_groups": 6}, "top_k_groups: expected at most num_groups=5, received 6"),
        (
            {"num_groups": 5, "top_k_groups": 2},
            "num_groups: expected groups of two experts or more.*received 5",
        ),
        ({"group_score": "mean"}, "group_score: expected one of top2, max, received 'mean'"),
        ({"activation": "swish"}, "activation: expected one of silu.*received 'swish'"),
        ({"shared_gate": True}, "shared_gate: expected False without shared_dim, received True"),
        ({"normalize": 1}, "normalize: expected True or False, received 1"),
    ],
)
def test_wrong_options(change, message):
    options = {"num_experts": 5, "top_k": 2} | change
    with pytest.raises(ValueError, match=message):
        nn.MixtureOfExperts(EMBED, HIDDEN, **options, key=jax.random.key(0))


@pytest.mark.usefixtures("unchecked")
def test_wrong_inputs():
    layer, x = build("mixtral"), inputs(2, 3)
    for call, message in (
        (lambda: layer(x[..., :-1]), r"x: expected \[\.\.\., E\] with E = 12, received shape \(2, 3, 11\)"),
        (lambda: layer(x.astype(jnp.int32)), r"x: expected floats \[\.\.\., E\], received int32"),
        (lambda: layer([1.0]), "x: expected an array of floats"),
        (
            lambda: layer(x, padding_mask=jnp.ones(3, bool)),
            r"padding_mask: expected shape \(2, 3\).*received \(3,\)",
        ),
        (lambda: layer(x, padding_mask=jnp.ones((2, 3))), "padding_mask: expected booleans"),
        (lambda: layer(x, return_statistics=1), "return_statistics: expected True or False"),
        (
            lambda: nn.update_correction_bias(jnp.zeros(3), jnp.zeros(4, jnp.int32)),
            r"tokens_per_expert: expected the shape of bias, \(3,\)",
        ),
        (
            lambda: nn.router_jitter(x, 2.0, key=jax.random.key(0)),
            "amount: expected a number from 0 to 1, received 2.0",
        ),
        (lambda: nn.load_balancing_loss([]), "statistics: expected RouterStatistics"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
