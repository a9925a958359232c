"""Where `ejx.models.place` puts arrays, on meshes with some of the axes; `test_split_tokens.py` has gradients on all of them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ejkernel_eqx import models
from ejkernel_eqx.models import mesh
from tests.models.cases import tokens
from tests.models.test_published import folder_of
from tests.models.test_split_tokens import MIXERS, model_of
from tests.tolerances import assert_close

ATTENTION = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}


def decoder() -> models.Decoder:
    layer = models.LayerConfig("attention", ATTENTION, models.MLPConfig(64))
    return models.Decoder(models.DecoderConfig(48, 32, (layer,)), platform="xla", key=jax.random.key(0))


def mesh_of(**sizes: int) -> jax.sharding.Mesh:
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), devices=devices)


@pytest.mark.slow
def test_a_mesh_of_two_axes_gives_the_loss_of_one_device():
    model, over = decoder(), mesh_of(data=2, tensor=2)
    batch = np.random.default_rng(0).integers(0, 48, (4, 9)).astype(np.int32)
    logits = eqx.filter_jit(lambda model, tokens: model(tokens))
    inputs, targets = models.place_tokens(batch, over)
    loss = models.split_cross_entropy(logits(models.place(model, model, over), inputs), targets)
    expected = np.asarray(logits(model, jnp.asarray(batch[:, :-1])), np.float64)
    lse = np.log(np.sum(np.exp(expected), -1))
    expected = np.mean(lse - np.take_along_axis(expected, batch[:, 1:, None], -1)[..., 0])
    assert_close(loss, expected, dtype="float32")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "gemma4_text whole", "zamba2"])
def test_what_stands_beside_layers(kind, tmp_path, enable_x64):
    """Learned positions, embeddings for each layer and shared blocks: features and texts are those of one device."""
    mesh, batch = mesh_of(data=2, tensor=2), tokens(4, 13)
    model = models.from_pretrained(folder_of(kind, tmp_path), dtype="float64")
    placed, (inputs, _) = models.place(model, model, mesh), models.place_tokens(batch, mesh)
    features = eqx.filter_jit(lambda model, ids: model.features(ids))
    assert_close(features(placed, inputs), features(model, batch[:, :-1]), dtype="float64")
    continued = lambda *given: models.generate(*given, max_new_tokens=4, stop_tokens=()).tokens
    np.testing.assert_array_equal(continued(placed, inputs), continued(model, batch[:, :-1]))


@pytest.mark.parametrize("sizes", [{"data": 4}, {"data": 4, "tensor": 2}], ids=str)
def test_rows_that_are_not_split(sizes):
    """The devices that would split the rows split features, more of them than there are heads."""
    model, ids = decoder(), tokens(1, 7)
    placed = models.place(model, model, mesh_of(**sizes))
    logits = eqx.filter_jit(lambda model, ids: model(ids))
    assert_close(jax.device_get(logits(placed, ids)), logits(model, ids))


@pytest.mark.parametrize(
    ("sizes", "path", "shape", "spec"),
    [
        # Rows by all axes, so that they are gathered in their order; the features of what follows heads by tensor.
        ({"data": 2, "sequence": 2, "tensor": 2}, "mixer.q_proj", (1, 32, 32), P(None, ("tensor", "data", "sequence"), None)),
        ({"data": 2, "sequence": 2, "tensor": 2}, "mixer.o_proj", (1, 32, 32), P(None, ("data", "sequence"), "tensor")),
        ({"data": 2}, "mixer.k_proj", (1, 16, 32), P(None, "data", None)),
        ({"tensor": 2}, "mlp.down_proj", (1, 32, 64), P(None, None, "tensor")),
        ({"data": 2}, "mixer.kv_a_proj_with_mqa", (1, 20, 32), P(None, None, "data")),
        # Two key/value heads are not split over four devices, and 30 features neither, but over two.
        ({"tensor": 4}, "mixer.k_proj", (1, 16, 32), P()),
        ({"data": 4}, "mlp.up_proj", (1, 30, 64), P()),
        ({"data": 3, "tensor": 2}, "mlp.up_proj", (1, 64, 32), P(None, "tensor", None)),
        ({"tensor": 2}, "mixer_norm", (1, 32), P()),
        # Experts over the rows' devices; three are too few for them.
        ({"data": 2, "sequence": 2, "tensor": 2}, ".mlp.experts.up_proj", (1, 4, 32, 16), P(None, "data", ("tensor", "sequence"), None)),
        ({"data": 2, "tensor": 2}, ".mlp.experts.down_proj", (1, 4, 16, 32), P(None, "data", None, "tensor")),
        ({"data": 2, "tensor": 2}, ".mlp.experts.gate_proj", (1, 3, 32, 16), P(None, None, ("tensor", "data"), None)),
        ({"data": 2}, ".mlp.experts.up_proj_bias", (2, 4, 32), P()),
        # What Gemma 4 and Zamba2 have besides.
        ({"data": 2, "tensor": 2}, ".layer_embedding.embed_tokens_per_layer", (48, 64), P("tensor", "data")),
        ({"data": 2}, "per_layer_projection", (1, 32, 8), P(None, None, "data")),
        ({"data": 2, "tensor": 2}, ".shared_blocks[0].feed_forward.down_proj.weight", (32, 64), P("data", "tensor")),
    ],
)  # fmt: skip
def test_how_an_array_is_split(sizes, path, shape, spec):
    leaf = jax.ShapeDtypeStruct(shape, jnp.float32)
    name = path if path.startswith(".") else f".stacks[0][0].{path}.weight"
    found = models.partition_spec(name, leaf, decoder(), mesh_of(**sizes))
    assert tuple(found) == tuple(spec)


@pytest.mark.parametrize("mixer", MIXERS)
def test_no_matrix_of_a_mixer_is_whole(mixer):
    """Of linear layers, by every name that mixers give them. Those of a low rank may be, which are not worth a collective."""
    model, over = eqx.filter_eval_shape(model_of, (mixer,)), mesh_of(data=4)
    is_linear = lambda node: isinstance(node, eqx.nn.Linear)
    found = jax.tree_util.tree_leaves_with_path(model.stacks[0][0].mixer, is_leaf=is_linear)
    names = {jax.tree_util.keystr(path): node.weight for path, node in found if is_linear(node)}
    spec = lambda name, leaf: models.partition_spec(f".stacks[0][0].mixer{name}.weight", leaf, model, over)
    assert names and not [
        name for name, weight in names.items() if "data" not in spec(name, weight) and weight.size >= 32 * 32
    ]


def test_updates_lie_as_the_weights_beside_them():
    leaf, over = jax.ShapeDtypeStruct((1, 4, 32), jnp.float32), mesh_of(data=2)
    of = lambda end: models.partition_spec(f".stacks[0][0].mixer.in_proj_qkvz.{end}", leaf, decoder(), over)
    assert of("a") == of("base.weight") == of("weight") == P(None, None, "data") and of("b") == P()


def test_other_axes_are_named():
    other = jax.make_mesh((1,), ("rows",), devices=jax.devices()[:1])
    with pytest.raises(
        ValueError, match=r"mesh: expected .* with axes of data, sequence, tensor, received \('rows',\)"
    ):
        models.place({"x": jnp.ones((2, 2))}, decoder(), other)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((3, 9), r"batch: expected rows of inputs in 2 equal parts, over .* axis 'data', received 3; leave out 1 of them, or pad them to 4"),
        ((2, 2, 10), r"batch: expected tokens of inputs in 2 equal parts, over the devices of axis 'sequence', received 9; .* to 10"),
        ((9,), r"batch: expected tokens \[..., B, T \+ 1\], received shape \(9,\); batch\[None\]"),
    ],
)  # fmt: skip
def test_tokens_that_a_mesh_does_not_divide(shape, message):
    with pytest.raises(ValueError, match=message):
        models.place_tokens(np.zeros(shape, np.int32), mesh_of(data=2, sequence=2))


def test_options_of_the_compiler():
    """XLA checks the names on every platform. One device of a CPU needs none."""
    assert models.compiler_options() == models.compiler_options(mesh_of(data=2)) == {}
    options = mesh.FOR_GPUS | mesh.FOR_SEVERAL
    assert jax.jit(lambda x: x + 1, compiler_options=options)(jnp.int32(1)) == 2
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        jax.jit(lambda x: x + 1, compiler_options={f"{next(iter(options))}_": 0})(jnp.int32(1))


def test_shapes_are_placed_as_their_arrays():
    model, over = decoder(), mesh_of(data=2, tensor=2)
    abstract = models.place(eqx.filter_eval_shape(decoder), model, over)
    for x, y in zip(
        jax.tree.leaves(abstract), jax.tree.leaves(models.place(model, model, over)), strict=True
    ):
        assert not eqx.is_array(y) or (x.sharding, x.shape, x.dtype) == (y.sharding, y.shape, y.dtype)
