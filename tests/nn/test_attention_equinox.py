"""`MultiHeadAttention` in the place of `equinox.nn.MultiheadAttention`: with its weights it gives what that gives."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx.nn import MultiHeadAttention
from tests.tolerances import assert_close

HEADS, QUERIES, KEYS = 3, 5, 7
SIZES = {
    "one size": {"query_size": 12},
    "every size": {
        "query_size": 10,
        "key_size": 9,
        "value_size": 8,
        "output_size": 11,
        "qk_size": 4,
        "vo_size": 6,
        "use_query_bias": True,
        "use_value_bias": True,
        "use_output_bias": True,
    },
    "key bias": {"query_size": 12, "key_size": 5, "use_key_bias": True},
    "value size": {"query_size": 12, "value_size": 7},
}


def _pair(name, **changes):
    theirs = eqx.nn.MultiheadAttention(HEADS, **SIZES[name], **changes, key=jax.random.key(0))
    return theirs, MultiHeadAttention.from_equinox(theirs)


def _inputs(theirs, lead=()):
    keys = jax.random.split(jax.random.key(1), 4)
    shapes = ((QUERIES, theirs.query_size), (KEYS, theirs.key_size), (KEYS, theirs.value_size))
    query, key, value = (jax.random.normal(k, (*lead, *shape)) for k, shape in zip(keys, shapes))
    mask = jax.random.bernoulli(keys[3], 0.6, (*lead, HEADS, QUERIES, KEYS)).at[..., 0].set(True)
    return query, key, value, mask


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("name", SIZES)
def test_outputs_and_gradients_are_those_of_equinox(enable_x64, name):
    theirs, ours = _pair(name)
    query, key, value, mask = _inputs(theirs)
    for given in (None, mask[0], mask):
        plain = lambda m, *inputs, given=given: m(*inputs, given)
        expected, pull = eqx.filter_vjp(plain, theirs, query, key, value)
        call = lambda m, query, key, value, given=given: m(query, kv_input=key, v_input=value, mask=given)
        actual, pull_ours = eqx.filter_vjp(call, ours, query, key, value)
        assert_close(actual, expected, name=name)
        layer, *inputs = pull_ours(jnp.sin(expected))
        expected_layer, *expected_inputs = pull(jnp.sin(expected))
        for got, wanted in zip(inputs, expected_inputs, strict=True):
            assert_close(got, wanted, kind="gradient")
        for part, other in {"q": "query", "k": "key", "v": "value", "o": "output"}.items():
            got, wanted = getattr(layer, f"{part}_proj"), getattr(expected_layer, f"{other}_proj")
            assert_close(got.weight, wanted.weight, kind="gradient", scale=1.0)
            assert (got.bias is None) == (wanted.bias is None)
            if got.bias is not None:
                assert_close(got.bias, wanted.bias, kind="gradient", scale=1.0)


@pytest.mark.slow
def test_under_vmap_and_as_a_batch(enable_x64):
    theirs, ours = _pair("every size")
    query, key, value, mask = _inputs(theirs, (4,))
    expected = jax.vmap(theirs)(query, key, value, mask)
    call = lambda query, key, value, mask: ours(query, kv_input=key, v_input=value, mask=mask)
    assert_close(eqx.filter_jit(jax.vmap(call))(query, key, value, mask), expected)
    assert_close(call(query, key, value, mask), expected)


@pytest.mark.slow
def test_padding_of_keys_is_not_read(enable_x64):
    theirs, ours = _pair("every size")
    query, key, value, _ = _inputs(theirs)
    real = jnp.arange(KEYS) < 4
    expected = theirs(query, key[:4], value[:4])
    key, value = (jnp.where(real[:, None], x, jnp.nan) for x in (key, value))
    assert_close(ours(query, kv_input=key, v_input=value, kv_padding_mask=real), expected)


@pytest.mark.slow
def test_dropout_and_its_flag_come_along():
    theirs, ours = _pair("one size", dropout_p=0.5)
    x = jax.random.normal(jax.random.key(1), (6, 12))
    call = lambda m, **how: m(x, kv_input=x, **how)
    assert not np.array_equal(call(ours, key=jax.random.key(0)), call(ours, inference=True))
    still = MultiHeadAttention.from_equinox(eqx.nn.inference_mode(theirs))
    assert np.array_equal(call(still), call(ours, inference=True))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda q, k, v: _pair("every size")[1](q, kv_input=k), "v_input: expected .* received None"),
        (
            lambda q, k, v: _pair("every size")[1](q, v_input=v),
            "v_input: expected None without kv_input",
        ),
        (
            lambda q, k, v: _pair("every size")[1](q, kv_input=k, v_input=v[:-1]),
            "v_input: expected the tokens of kv_input",
        ),
        (
            lambda q, k, v: _pair("every size")[1](q, kv_input=k, v_input=k),
            r"v_input: expected \[..., S, Cv\] with Cv = 8",
        ),
        (lambda q, k, v: _pair("value size")[1](jnp.zeros((5, 12))), "kv_input: expected .* v_embed_dim=7"),
    ],
)
def test_errors(call, message):
    theirs, _ = _pair("every size")
    with pytest.raises(ValueError, match=message):
        call(*_inputs(theirs)[:3])
