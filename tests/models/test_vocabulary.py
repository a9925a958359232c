"""Embeddings and logits on every mesh; and rows of a small vocabulary on a GPU: a product with ones and zeros gives what indexing gives, and
gradients summed in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ejkernel_eqx.models import vocabulary
from tests import meshes
from tests.arrays import normal
from tests.meshes import HEADS, ROWS


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(vocabulary, "place_of_calls", lambda: (vocabulary.Backend.GPU, "NVIDIA H200"))


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


@meshes.everywhere
def test_embedding_and_logits(kind, layout):
    mesh = meshes.mesh_of(kind)
    table = normal(0, (12, 8))
    ids = jnp.arange(20).reshape(4, 5) % 12

    def everything(table, ids):
        x = vocabulary.embed(table, ids)
        loss = lambda table: jnp.sum(jnp.sin(vocabulary.logits_of(table, vocabulary.embed(table, ids))))
        return x, vocabulary.logits_of(table, x), jax.grad(loss)(table)

    expected = everything(table, ids)
    rows = meshes.spec(layout, ROWS)
    for split in (meshes.spec(layout, HEADS), meshes.spec(layout, None, HEADS), meshes.spec(layout, ROWS)):
        placed = meshes.place(mesh, (table, ids), (split, rows))
        with meshes.context(kind, mesh):
            x, logits, gradient = jax.jit(everything)(*placed)
        meshes.agree((x, logits, gradient), expected)
        if kind != "automatic":
            assert meshes.lies(x, mesh, rows)
            vocabulary_axis = split[0] if split[0] != ROWS or ROWS not in rows else None
            assert meshes.lies(logits, mesh, P(*(*rows, None)[:1], None, vocabulary_axis))
            assert meshes.lies(gradient, mesh, split)
