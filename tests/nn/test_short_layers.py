"""`nn.ShortConvolution` and `nn.GatedRMSNorm`: what they compute, decoding, padding, Equinox's manners."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_eqx as ejx
from tests.attention.dense import normal, quick
from tests.convolution.test_causal import plain
from tests.tolerances import assert_close


@pytest.fixture
def conv():
    return ejx.nn.ShortConvolution(6, 4, use_bias=True, key=jax.random.key(0))


def test_the_convolution_of_published_weights(conv):
    """Its parameters are those of a depthwise `Conv1d`."""
    assert conv.weight.shape == (6, 1, 4) and conv.bias.shape == (6,)
    assert np.abs(np.asarray(conv.weight)).max() <= 0.5 and np.asarray(conv.weight).std() > 0.2
    x = normal(0, 2, 9, 6)
    for row in range(2):
        expected, _ = plain(x[row], conv.weight[:, 0], conv.bias, np.zeros((3, 6)))
        assert_close(conv(x)[row], expected)
    bare = ejx.nn.ShortConvolution(6, 2, activation=None, key=jax.random.key(1))
    assert bare.bias is None
    w = np.asarray(bare.weight[:, 0])
    assert_close(bare(x)[:, 1:], w[:, 1] * np.asarray(x[:, 1:]) + w[:, 0] * np.asarray(x[:, :-1]))


def test_decoding_is_the_whole_pass(conv):
    x = normal(1, 3, 8, 6)
    call = quick(lambda x, state: conv(x, state))
    outs, state = [], conv.init_state(3)
    for start, end in ((0, 4), (4, 5), (5, 6), (6, 8)):
        y, state = call(x[:, start:end], state)
        outs.append(y)
    assert_close(jnp.concatenate(outs, 1), quick(lambda x: conv(x))(x))
    np.testing.assert_array_equal(state, x[:, -3:])
    pool = conv.init_state(5).at[2].set(x[0, 4:7])
    step = quick(lambda x, pool, slots: conv.step(x, pool, state_indices=slots))
    y, pool = step(x[:1, 7], pool, jnp.array([2], jnp.int32))
    assert_close(y[0], outs[-1][0, -1])
    assert not np.asarray(pool[jnp.array([0, 1, 3, 4])]).any()


def test_padding_and_packing(conv):
    x = normal(2, 10, 6)
    alone = lambda x: plain(x, conv.weight[:, 0], conv.bias, np.zeros((3, 6)))
    real = jnp.arange(10) >= 4
    padded = quick(lambda x, ids: conv(x, conv.init_state(), segment_ids=ids))
    y, state = padded(jnp.where(real[:, None], x, jnp.nan), jnp.where(real, 0, -1))
    assert_close(y[4:], alone(x[4:])[0])
    assert not np.asarray(y[:4]).any()
    np.testing.assert_array_equal(state, x[-3:])
    y, states = quick(lambda x: conv(x, conv.init_state(2), cu_seqlens=jnp.array([0, 6, 8])))(x)
    assert_close(y[6:8], alone(x[6:8])[0])
    assert_close(states[1], alone(x[6:8])[1])


def test_the_norm_per_head_and_over_groups():
    x, z = normal(0, 2, 5, 3, 8), normal(1, 2, 5, 3, 8)
    norm = ejx.nn.GatedRMSNorm(8, norm_before_gate=True)
    norm = eqx.tree_at(lambda m: m.weight, norm, normal(2, 8))
    wide = np.asarray(x, np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * np.asarray(norm.weight)
    assert_close(norm(x, z), expected * np.asarray(jax.nn.silu(z)))
    assert_close(norm(x), expected)
    heads = ejx.nn.GatedRMSNorm(24, group_size=8, use_weight=False, activation="sigmoid")
    assert heads.weight is None
    flat = lambda x: x.reshape(2, 5, 24)
    assert_close(heads(flat(x), flat(z)), flat(ejx.GatedRMSNorm("sigmoid")(x, z)))


def test_parameters_in_the_dtype_asked_for():
    conv = ejx.nn.ShortConvolution(4, 3, dtype=jnp.bfloat16, key=jax.random.key(0))
    norm = ejx.nn.GatedRMSNorm(4, dtype=jnp.bfloat16)
    x = normal(3, 2, 7, 4, dtype=jnp.bfloat16)
    y = quick(lambda x: norm(conv(x), x))(x)
    arrays = jax.tree.leaves((conv, norm, conv.init_state(2), y))
    assert {x.dtype.name for x in arrays} == {"bfloat16"}
    assert_close(quick(jax.vmap(lambda x: conv(x)))(x), quick(lambda x: conv(x))(x))
