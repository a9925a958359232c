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
from tests import meshes
from tests.meshes import HEADS, ROWS
from tests.models.cases import GOLDEN, tokens
from tests.models.test_published import error_of, folder_of

_ROWS_OF = ("experts", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def tensor_parallel(mesh: Any) -> Any:
    """Which weights are split over which axis, as users write it."""

    def sharding(path: str, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        name, lead = path.split(".")[-2], () if path.startswith(".shared_blocks") else (None,)
        if name in _ROWS_OF:
            return NamedSharding(mesh, P(*lead, HEADS))
        if name in ("o_proj", "down_proj"):
            return NamedSharding(mesh, P(*lead, None, HEADS))
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, name, platform",
    [
        ("explicit", "qwen2", "triton-interpret"),
        ("explicit without context", "mamba2", "triton-interpret"),
        ("automatic", "mixtral", "xla"),
        ("explicit", "zamba2", "xla"),
    ],
)
def test_a_published_model_runs_on_a_mesh(kind, name, platform, tmp_path):
    if platform != "xla":
        pytest.importorskip("triton")
    mesh, folder = meshes.mesh_of(kind), folder_of(name, tmp_path)
    load = lambda **options: ejx.models.from_pretrained(folder, dtype="float32", **options)
    continued = lambda *given, **more: ejx.models.generate(*given, max_new_tokens=3, stop_tokens=(), **more)
    counts: list[tuple[int, int]] = []
    alone = continued(load(), tokens())
    ids = meshes.place(mesh, jnp.asarray(tokens()), P(ROWS, None))
    with meshes.context(kind, mesh):
        model = load(platform=platform, sharding=tensor_parallel(mesh))
        logits = eqx.filter_jit(model)(ids)
        texts = continued(model, ids)
        steps = list(ejx.models.stream(model, ids, max_new_tokens=3, stop_tokens=()))
        told = continued(model, ids, progress=lambda *count: counts.append(count))
    assert error_of(logits, GOLDEN[name]) < 1e-5
    for found in (texts.tokens, np.stack(steps, axis=-1), told.tokens):
        np.testing.assert_array_equal(found, alone.tokens)
    assert counts == [(1, 3), (3, 3)]
    if kind != "automatic":
        assert meshes.lies(logits, mesh, P(ROWS, None, None))


@pytest.mark.parametrize("prompts", [[[11, 12, 13], [20, 1, 2]], np.array([11, 12, 13])], ids=["list", "row"])
def test_a_mesh_of_one_device_generates(prompts):
    """Tokens, lengths and flags have different ranks."""
    config = GOLDEN["llama"]["config"] | {"num_hidden_layers": 1}
    model = ejx.models.from_config(config, key=jax.random.key(0))
    mesh = jax.make_mesh((1,), ("data",))
    call = lambda model: ejx.models.generate(model, prompts, max_new_tokens=3, stop_tokens=())
    placed, alone = call(ejx.models.place(model, model, mesh)), call(model)
    for found, expected in zip(placed, alone, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
def test_lists_of_tokens_go_to_the_devices_of_the_model():
    """They are arrays of no device that a caller chose."""
    config = GOLDEN["llama"]["config"] | {"num_hidden_layers": 1}
    model, prompts = ejx.models.from_config(config, key=jax.random.key(0)), [[11, 12, 13], [20]]
    mesh = jax.make_mesh((2, 1, 1), ejx.models.MESH_AXES)
    found = ejx.models.generate(
        ejx.models.place(model, model, mesh), prompts, max_new_tokens=3, stop_tokens=()
    )
    alone = ejx.models.generate(model, prompts, max_new_tokens=3, stop_tokens=())
    np.testing.assert_array_equal(found.tokens, alone.tokens)


@pytest.mark.slow
@pytest.mark.parametrize("kind, name", [("automatic", "qwen2"), ("explicit without context", "mamba2")])
def test_drafts_on_a_mesh(kind, name, tmp_path):
    mesh, folder = meshes.mesh_of(kind), folder_of(name, tmp_path)
    load = lambda **options: ejx.models.from_pretrained(folder, dtype="float32", platform="xla", **options)
    continued = lambda *given, **more: ejx.models.generate(*given, max_new_tokens=12, stop_tokens=(), **more)
    ids = meshes.place(mesh, jnp.asarray(tokens()), P(ROWS, None))
    model = load(sharding=tensor_parallel(mesh))
    found = continued(model, ids, speculate=ejx.models.Speculation())
    np.testing.assert_array_equal(found.tokens, continued(load(), tokens()).tokens)


@pytest.mark.slow
@pytest.mark.parametrize("kind, platform", [("automatic", "xla"), ("explicit", "triton-interpret")])
def test_gradients_on_a_mesh(kind, platform):
    if platform != "xla":
        pytest.importorskip("triton")
    attention = {"num_heads": 4, "num_kv_heads": 2, "rope": ejx.nn.RotaryEmbedding(4)}
    layer = ejx.models.LayerConfig("attention", attention, ejx.models.MLPConfig(24))
    config = ejx.models.DecoderConfig(20, 16, (layer,) * 2, tie_embeddings=True)
    build = lambda platform: ejx.models.Decoder(config, platform=platform, key=jax.random.key(0))
    ids = jnp.arange(24).reshape(4, 6) % 20
    gradient = eqx.filter_jit(eqx.filter_grad(lambda model, ids: jnp.mean(jnp.sin(model(ids)))))
    expected = gradient(build("xla"), ids)
    mesh = meshes.mesh_of(kind)
    arrays, static = eqx.partition(build(platform), eqx.is_array)
    shardings = jax.tree_util.tree_map_with_path(
        lambda path, x: tensor_parallel(mesh)(jax.tree_util.keystr(path), x), arrays
    )
    placed = eqx.combine(jax.device_put(arrays, shardings), static)
    ids = meshes.place(mesh, ids, P(ROWS, None))
    with meshes.context(kind, mesh):
        found = gradient(placed, ids)
    meshes.agree(found, expected, "gradient")
    assert meshes.lies(found.stacks[0][0].mixer.q_proj.weight, mesh, P(None, HEADS))
