"""A published model over several devices: loaded into its shards, called, trained and continued there."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel_eqx as ejx
from ejkernel_eqx.models import vocabulary
from tests import meshes
from tests.meshes import HEADS, ROWS
from tests.models.cases import tokens
from tests.models.test_published import error_of, folder_of, GOLDEN

_ROWS_OF = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def tensor_parallel(mesh: Any) -> Any:
    """Which weights are split over which axis, as users write it."""

    def sharding(path: str, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        name = path.split(".")[-2]
        if name == "experts":
            return NamedSharding(mesh, P(None, HEADS))
        if name in _ROWS_OF:
            return NamedSharding(mesh, P(None, HEADS))
        if name in ("o_proj", "down_proj"):
            return NamedSharding(mesh, P(None, None, HEADS))
        return NamedSharding(mesh, P(None, HEADS) if "embedding" in path else P())

    return sharding


@pytest.mark.parametrize("kind", ["explicit without context", "automatic"])
def test_weights_are_read_into_their_shards(kind, tmp_path):
    mesh = meshes.mesh_of(kind)
    folder = folder_of("qwen2", tmp_path)
    model = ejx.models.from_pretrained(folder, sharding=tensor_parallel(mesh))
    plain = ejx.models.from_pretrained(folder)
    meshes.agree(eqx.filter(model, eqx.is_array), eqx.filter(plain, eqx.is_array))
    layer = model.stacks[0][0]
    assert meshes.lies(layer.mixer.q_proj.weight, mesh, P(None, HEADS))
    assert meshes.lies(layer.mixer.o_proj.weight, mesh, P(None, None, HEADS))
    assert meshes.lies(model.embedding, mesh, P(None, HEADS))
    assert meshes.lies(model.norm.weight, mesh, P())


@pytest.mark.parametrize(
    ("sharding", "message"), [(3, "a function"), (lambda path, leaf: "tp", "received str")]
)
def test_shardings_that_are_none(sharding, message, tmp_path):
    with pytest.raises(ValueError, match=f"sharding: expected .*{message}"):
        ejx.models.from_pretrained(folder_of("qwen2", tmp_path), sharding=sharding)


@meshes.everywhere
def test_embedding_and_logits(kind, layout):
    mesh = meshes.mesh_of(kind)
    table = jax.random.normal(jax.random.key(0), (12, 8))
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", meshes.KINDS)
@pytest.mark.parametrize("name", ["qwen2", "mamba2", "mixtral"])
def test_a_published_model_runs_on_a_mesh(kind, name, tmp_path):
    mesh = meshes.mesh_of(kind)
    folder = folder_of(name, tmp_path)
    alone = ejx.models.generate(
        ejx.models.from_pretrained(folder, dtype="float32"), tokens(), max_new_tokens=4, stop_tokens=()
    )
    rows = P(ROWS, None)
    ids = meshes.place(mesh, jnp.asarray(tokens()), rows)
    with meshes.context(kind, mesh):
        model = ejx.models.from_pretrained(folder, dtype="float32", sharding=tensor_parallel(mesh))
        logits = eqx.filter_jit(model)(ids)
        texts = ejx.models.generate(model, ids, max_new_tokens=4, stop_tokens=())
    assert error_of(logits, GOLDEN[name]) < 1e-5
    np.testing.assert_array_equal(texts.tokens, alone.tokens)
    if kind != "automatic":
        assert meshes.lies(logits, mesh, P(ROWS, None, None))


@pytest.mark.slow
@pytest.mark.parametrize("kind", meshes.KINDS)
def test_gradients_on_a_mesh(kind):
    rope = ejx.nn.RotaryEmbedding(4)
    attention = {"num_heads": 4, "num_kv_heads": 2, "rope": rope}
    layer = ejx.models.LayerConfig("attention", attention, ejx.models.MLPConfig(24))
    config = ejx.models.DecoderConfig(20, 16, (layer,) * 2, tie_embeddings=True)
    model = ejx.models.Decoder(config, key=jax.random.key(0))
    ids = jnp.arange(24).reshape(4, 6) % 20
    gradient = eqx.filter_jit(eqx.filter_grad(lambda model, ids: jnp.mean(jnp.sin(model(ids)))))
    expected = gradient(model, ids)
    mesh = meshes.mesh_of(kind)
    arrays, static = eqx.partition(model, eqx.is_array)
    shardings = jax.tree_util.tree_map_with_path(
        lambda path, x: tensor_parallel(mesh)(jax.tree_util.keystr(path), x), arrays
    )
    placed = eqx.combine(jax.device_put(arrays, shardings), static)
    ids = meshes.place(mesh, ids, P(ROWS, None))
    with meshes.context(kind, mesh):
        found = gradient(placed, ids)
    meshes.agree(found, expected, "gradient")
    assert meshes.lies(found.stacks[0][0].mixer.q_proj.weight, mesh, P(None, HEADS))
