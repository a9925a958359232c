"""Rows of a small vocabulary on a GPU: a product with ones and zeros gives what indexing gives, and gradients summed in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx.dispatch import Backend
from ejkernel_eqx.models import vocabulary


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(vocabulary, "place_of_calls", lambda: (Backend.GPU, "NVIDIA H200"))


def _given(dtype, words=256):
    random = np.random.default_rng(0)
    table = jnp.asarray(random.standard_normal((words, 8)), dtype)
    return table, jnp.asarray(random.integers(-words, words, (2, 2048)), jnp.int32).at[0, :2].set(words + 5)


def test_rows_of_a_small_vocabulary(on_gpu):
    table, tokens = _given(jnp.bfloat16)
    np.testing.assert_array_equal(vocabulary.embed(table, tokens), table[tokens])
    cotangent = jnp.asarray(np.random.default_rng(1).standard_normal((*tokens.shape, 8)), jnp.bfloat16)
    (found,) = jax.vjp(lambda table: vocabulary.embed(table, tokens), table)[1](cotangent)
    expected = np.zeros((256, 8))
    rows = np.clip(np.where(np.asarray(tokens) < 0, np.asarray(tokens) + 256, tokens), 0, 255)
    np.add.at(expected, rows, np.asarray(cotangent, np.float64))
    assert found.dtype == table.dtype
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=2.0**-8, atol=1e-2)
    assert "scatter" not in str(jax.make_jaxpr(jax.grad(lambda t: vocabulary.embed(t, tokens).sum()))(table))


@pytest.mark.parametrize(
    ("dtype", "words", "count"), [("float32", 256, 4096), ("bfloat16", 1024, 4096), ("bfloat16", 256, 64)]
)
def test_others_are_gathered(on_gpu, dtype, words, count):
    table, tokens = _given(dtype, words)
    tokens = tokens.reshape(-1)[:count]
    assert "gather" in str(jax.make_jaxpr(vocabulary.embed)(table, tokens))
