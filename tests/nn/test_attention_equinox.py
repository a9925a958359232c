"""`MultiHeadAttention` in the place of `equinox.nn.MultiheadAttention`: with its weights it gives what that gives."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx.nn import MultiHeadAttention
from tests.arrays import normal
from tests.nn.checks import refuses
from tests.tolerances import assert_close

HEADS, QUERIES, KEYS = 3, 5, 7
_OTHER: dict[str, int] = {"key_size": 9, "value_size": 8, "output_size": 11, "qk_size": 4, "vo_size": 6}
_BIASED = dict.fromkeys(("use_query_bias", "use_value_bias", "use_output_bias"), True)
SIZES = {
    "one size": {"query_size": 12},
    "every size": {"query_size": 10, **_OTHER, **_BIASED},
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


@pytest.mark.few(1)
@pytest.mark.parametrize("name", SIZES)
def test_outputs_and_gradients_are_those_of_equinox(enable_x64, name):
    theirs, ours = _pair(name)
    *inputs, mask = _inputs(theirs)
    plain = lambda m, inputs, allowed: m(*inputs, allowed)
    call = lambda m, inputs, allowed: m(inputs[0], kv_input=inputs[1], v_input=inputs[2], mask=allowed)

    @eqx.filter_jit
    def pulled(function, module, allowed):
        y, pull = eqx.filter_vjp(lambda m, inputs: function(m, inputs, allowed), module, inputs)
        return y, *pull(jnp.sin(y))

    for allowed in (None, mask[0], mask):
        expected, expected_layer, expected_inputs = pulled(plain, theirs, allowed)
        actual, layer, found_inputs = pulled(call, ours, allowed)
        assert_close(actual, expected, name=name)
        for got, wanted in zip(found_inputs, expected_inputs, strict=True):
            assert_close(got, wanted, kind="gradient")
        for part, other in {"q": "query", "k": "key", "v": "value", "o": "output"}.items():
            got, wanted = getattr(layer, f"{part}_proj"), getattr(expected_layer, f"{other}_proj")
            assert_close(got.weight, wanted.weight, kind="gradient", scale=1.0)
            assert (got.bias is None) == (wanted.bias is None)
            if got.bias is not None:
                assert_close(got.bias, wanted.bias, kind="gradient", scale=1.0)


@pytest.mark.slow
def test_under_vmap_as_a_batch_and_with_padded_keys(enable_x64):
    theirs, ours = _pair("every size")
    query, key, value, mask = _inputs(theirs, (4,))
    expected = jax.vmap(theirs)(query, key, value, mask)
    call = lambda query, key, value, mask: ours(query, kv_input=key, v_input=value, mask=mask)
    assert_close(eqx.filter_jit(jax.vmap(call))(query, key, value, mask), expected)
    assert_close(call(query, key, value, mask), expected)
    real = jnp.arange(KEYS) < 4
    expected = theirs(query[0], key[0, :4], value[0, :4])
    key, value = (jnp.where(real[:, None], x[0], jnp.nan) for x in (key, value))
    assert_close(ours(query[0], kv_input=key, v_input=value, kv_padding_mask=real), expected)


@pytest.mark.slow
def test_dropout_and_its_flag_come_along():
    theirs, ours = _pair("one size", dropout_p=0.5)
    x = normal(1, (6, 12))
    call = lambda m, **how: m(x, kv_input=x, **how)
    assert not np.array_equal(call(ours, key=jax.random.key(0)), call(ours, inference=True))
    still = MultiHeadAttention.from_equinox(eqx.nn.inference_mode(theirs))
    assert np.array_equal(call(still), call(ours, inference=True))


EVERY = lambda *args, **given: _pair("every size")[1](*args, **given)
ERRORS = {
    "v_input: expected .* received None": lambda q, k, v: EVERY(q, kv_input=k),
    "v_input: expected None without kv_input": lambda q, k, v: EVERY(q, v_input=v),
    "v_input: expected the tokens of kv_input": lambda q, k, v: EVERY(q, kv_input=k, v_input=v[:-1]),
    r"v_input: expected \[..., S, Cv\] with Cv = 8": lambda q, k, v: EVERY(q, kv_input=k, v_input=k),
    "kv_input: expected .* v_embed_dim=7": lambda q, k, v: _pair("value size")[1](jnp.zeros((5, 12))),
}


test_errors = refuses(ERRORS, lambda wrong: wrong(*_inputs(_pair("every size")[0])[:3]))
