"""What does not fit is refused, by name."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ejkernel_eqx as ejx

KEY = jax.random.key(0)


def attention(**options):
    return ejx.nn.MultiHeadAttention(16, num_heads=4, num_kv_heads=2, platform="xla", key=KEY, **options)


def published(layer, prefix="", seed=0):
    """Random arrays by the names of the layer's parameters."""
    rng = np.random.default_rng(seed)
    leaves = jax.tree_util.tree_leaves_with_path(layer)
    leaves = [(path, x) for path, x in leaves if jnp.issubdtype(getattr(x, "dtype", int), jnp.floating)]
    name = lambda path: ".".join(str(getattr(part, "name", getattr(part, "idx", ""))) for part in path)
    return {prefix + name(path): rng.normal(size=x.shape).astype(np.float32) for path, x in leaves}


def refused(*words, like=None, given, prefix="", **options):
    with pytest.raises(ejx.CheckpointError) as raised:
        ejx.load_published(attention() if like is None else like, given, prefix, **options)
    for word in words:
        assert word in str(raised.value), str(raised.value)


@pytest.mark.parametrize("prefix", ["model.layers.0.self_attn", "model.layers.0.self_attn."])
@pytest.mark.parametrize("options", [{}, {"qk_norm": True, "sinks": True, "use_qkv_bias": True}])
def test_all_parameters(prefix, options):
    layer = attention(**options)
    given = published(layer, "model.layers.0.self_attn.") | {"lm_head.weight": np.zeros(3)}
    filled = ejx.load_published(layer, given, prefix)
    for name, array in published(layer).items():
        found = filled
        for part in name.split("."):
            found = getattr(found, part)
        assert (found == array).all(), name


def test_norms_that_the_layer_lacks():
    given = published(attention(qk_norm=True))
    refused("nothing takes its", "'q_norm.weight'", "'k_norm.weight'", "from_config", given=given)


def test_sinks_that_the_layer_lacks():
    refused("nothing takes its 'sinks'", given=published(attention(sinks=True)))


def test_parameters_that_are_not_published():
    refused(
        "it has no 'q_norm.weight'",
        "'k_norm.weight'",
        like=attention(qk_norm=True),
        given=published(attention()),
    )


def test_similar_names():
    given = published(attention(qk_norm=True))
    given["q_lnorm.weight"] = given.pop("q_norm.weight")
    refused("'q_norm.weight' (similar: 'q_lnorm.weight')", like=attention(qk_norm=True), given=given)


def test_a_transposed_projection():
    given = published(attention())
    given["k_proj.weight"] = given["k_proj.weight"].T
    refused("'k_proj.weight'", "(8, 16)", "received (16, 8)", "transpose", given=given)


def test_a_wrong_shape():
    refused(
        "'q_proj.weight'",
        "expected shape (16, 16), received (32, 16)",
        given=published(attention(output_gate=True)),
    )


def test_a_wrong_prefix():
    refused(
        "it has no 'model.q_proj.weight' (similar: 'models.q_proj.weight')",
        given=published(attention(), "models."),
        prefix="model",
    )


def test_many_names():
    given = {f"extra.{i}": np.zeros(1) for i in range(20)} | published(attention())
    refused("'extra.0'", "and 14 more", given=given)


def test_ignored_names_and_buffers():
    layer = attention()
    given = {**published(layer, "a."), "a.rotary_emb.inv_freq": np.zeros(2), "a.extra.x": np.zeros(2)}
    refused("nothing takes its 'a.extra.x'.", given=given, prefix="a")
    ejx.load_published(layer, given, "a", ignore=["extra.*"])
    ejx.load_published(layer, given, "a", ignore=["a.extra.*"])


def test_shapes_stand_for_layers():
    layer = attention(qk_norm=True, dtype=jnp.bfloat16)
    given = published(layer)
    abstract = eqx.filter_eval_shape(lambda: attention(qk_norm=True, dtype=jnp.bfloat16))
    filled, expected = ejx.load_published(abstract, given), ejx.load_published(layer, given)
    assert eqx.tree_equal(filled, expected)
    assert filled.q_proj.weight.dtype == jnp.bfloat16


def test_norms_published_less_one():
    layer = attention(qk_norm=True, dtype=jnp.bfloat16)
    given = published(layer)
    filled = ejx.load_published(layer, given, unit_offset_norms=True)
    assert filled.q_norm is not None
    assert (filled.q_norm.weight == jnp.asarray(1 + given["q_norm.weight"], jnp.bfloat16)).all()
    assert (filled.q_proj.weight == jnp.asarray(given["q_proj.weight"], jnp.bfloat16)).all()


def test_the_dtype():
    filled = ejx.load_published(attention(), published(attention()), dtype="bfloat16")
    assert {x.dtype for x in jax.tree.leaves(eqx.filter(filled, eqx.is_array))} == {jnp.dtype("bfloat16")}
    with pytest.raises(ValueError, match="dtype: expected a floating dtype"):
        ejx.load_published(attention(), published(attention()), dtype=jnp.int32)


def test_arrays_are_placed_as_those_of_the_layer():
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    layer = attention()
    placed = eqx.tree_at(lambda m: m.q_proj.weight, layer, jax.device_put(layer.q_proj.weight, sharding))
    given = published(layer)
    for like in (placed, eqx.filter_eval_shape(lambda: placed)):
        filled = ejx.load_published(like, given)
        if like is placed:
            assert filled.q_proj.weight.sharding == sharding
        assert (filled.q_proj.weight == given["q_proj.weight"]).all()
    shape = jax.ShapeDtypeStruct((16, 16), jnp.float32, sharding=sharding)
    like = eqx.tree_at(lambda m: m.q_proj.weight, layer, shape)
    assert ejx.load_published(like, given, dtype=jnp.bfloat16).q_proj.weight.sharding == sharding


def test_models_are_filled_by_names():
    class Block(eqx.Module):
        norm: eqx.nn.LayerNorm
        mixers: tuple[ejx.nn.MultiHeadAttention, ...]
        heads: dict[str, eqx.nn.Linear]
        scale: jax.Array
        count: jax.Array
        activation: object

    block = Block(
        eqx.nn.LayerNorm(16),
        (attention(),),
        {"a": eqx.nn.Linear(2, 3, key=KEY)},
        jnp.ones(2),
        jnp.arange(3),
        jnp.tanh,
    )
    given = published(attention(), "mixers.0.") | {
        "norm.weight": np.full(16, 2.0),
        "norm.bias": np.full(16, 3.0),
    }
    given |= {"heads.a.weight": np.ones((3, 2)), "heads.a.bias": np.ones(3), "scale": np.full(2, 5.0)}
    filled = ejx.load_published(block, given)
    assert (filled.norm.weight == 2).all() and (filled.norm.bias == 3).all() and (filled.scale == 5).all()
    assert (filled.mixers[0].q_proj.weight == given["mixers.0.q_proj.weight"]).all()
    assert (filled.count == jnp.arange(3)).all() and filled.activation is jnp.tanh


def test_values_that_are_not_published_and_have_only_a_shape():
    layer = lambda: ejx.nn.LightningAttention(
        8, num_heads=2, num_layers=4, layer_index=2, platform="xla", key=KEY
    )
    given = published(layer())
    assert int(ejx.load_published(layer(), given).layer_index) == 2
    refused("layer_index: expected an array", like=eqx.filter_eval_shape(layer), given=given)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"prefix": 3}, "prefix: expected text"),
        ({"ignore": "q_proj"}, "ignore: expected a sequence"),
        ({"unit_offset_norms": 1}, "unit_offset_norms: expected True or False"),
    ],
)
def test_wrong_arguments(options, message, unchecked):
    with pytest.raises(ValueError, match=message):
        ejx.load_published(attention(), published(attention()), **options)


class Own(eqx.Module):
    """Fills itself, and not well."""

    a: jax.Array
    wrong: str = eqx.field(static=True)

    def _published(self, weights):
        found = weights.take("a", self.a.shape, self.a.dtype)
        arrays = {"left": self.a, "shape": found[:1], "dtype": found.astype("bfloat16"), "fields": found}
        return Own(arrays[self.wrong], "" if self.wrong == "fields" else self.wrong)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ("left", "received the one of like"),
        ("shape", "expected float32 of shape (2,), received float32 of shape (1,)"),
        ("dtype", "expected float32 of shape (2,), received bfloat16"),
        ("fields", "_published of Own"),
    ],
)
def test_what_a_module_makes_of_its_weights(wrong, message):
    refused(message, like=Own(jnp.zeros(2), wrong), given={"a": np.ones(2, np.float32)})
