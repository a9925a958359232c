"""Every layer on meshes: training, and decoding with a state or cache that is made on the way. Interpreted Triton stands for the kernels of GPUs,
which no compiler can split."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import ejkernel_eqx as ejx
from tests import meshes
from tests.attention.dense import INTERPRET
from tests.meshes import HEADS, ROWS
from tests.nn.recurrent_layers import build, EMBED, inputs, LAYERS

ATTENTION = (ejx.nn.MultiHeadAttention, ejx.nn.MultiHeadLatentAttention, ejx.nn.NativeSparseAttention)


def attention(name: str, platform: str) -> Any:
    rope = ejx.nn.RotaryEmbedding(EMBED // 4)
    options: Any = {"num_kv_heads": 2, "qk_norm": "all" if "norm" in name else False}
    options |= {"sliding_window": 2} if "rolling" in name else {}
    options |= {"platform": platform, "key": jax.random.key(0)}
    layer = ejx.nn.MultiHeadAttention(EMBED, num_heads=4, rope=rope, **options)
    if layer.q_norm is None:
        return layer
    return eqx.tree_at(lambda m: m.q_norm.weight, layer, jnp.linspace(0.5, 2.0, EMBED))


def latent_attention(name: str, platform: str) -> Any:
    sizes: Any = {"kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "q_lora_rank": 8}
    sizes |= {"platform": platform}
    return ejx.nn.MultiHeadLatentAttention(EMBED, num_heads=4, **sizes, key=jax.random.key(0))


def sparse_attention(name: str, platform: str) -> Any:
    sizes: Any = {"block_size": 2, "num_blocks": 2, "sliding_window": 2, "compression_size": 2}
    sizes |= {"compression_stride": 1, "rope": ejx.nn.RotaryEmbedding(EMBED // 4), "platform": platform}
    return ejx.nn.NativeSparseAttention(EMBED, num_heads=4, num_kv_heads=2, **sizes, key=jax.random.key(0))


BUILDS = {
    "attention": attention,
    "attention, a norm of all heads": attention,
    "attention, a rolling cache": attention,
    "latent attention": latent_attention,
    "latent attention, expanded chunks": latent_attention,
    "native sparse attention": sparse_attention,
    "lstm": lambda name, platform: ejx.nn.LSTM(
        EMBED, 8, num_layers=2, platform=platform, key=jax.random.key(0)
    ),
    "gru": lambda name, platform: ejx.nn.GRU(EMBED, 8, platform=platform, key=jax.random.key(0)),
    **dict.fromkeys(LAYERS, lambda name, platform: build(name, platform=platform)),
}
# One layer of each family has every layout and kind, the others have both axes split.
MEMBERS = ("attention", "lstm", "mamba2")
BOTH = (("explicit without context", "both"), ("automatic", "both"))
ONE = (("explicit", "data"), ("explicit", "tensor"))
DEFAULT = {("attention", "xla"), ("attention", INTERPRET), ("lightning", INTERPRET)}


def cases() -> Any:
    for name in BUILDS:
        pairs = [(*pair, "xla") for pair in BOTH + (ONE if name in MEMBERS else ())]
        for kind, layout, platform in [*pairs, ("explicit without context", "both", INTERPRET)]:
            default = (name, platform) in DEFAULT and kind == BOTH[0][0]
            yield pytest.param(name, kind, layout, platform, marks=() if default else pytest.mark.slow)


def weights(layer: Any, layout: str) -> Any:
    """How the layer's arrays are split: the heads of attention, as tensor parallelism has them; all else is on every device."""

    def spec(path: Any, x: Any) -> Any:
        name = jax.tree_util.keystr(path)
        if not isinstance(layer, ATTENTION) or not eqx.is_array(x) or x.ndim < 2:
            return P()
        if "_a_proj" in name:  # to the latents, which all heads share
            return P()
        return meshes.spec(layout, None, HEADS) if "o_proj" in name else meshes.spec(layout, HEADS)

    return jax.tree_util.tree_map_with_path(spec, eqx.filter(layer, eqx.is_array))


@pytest.mark.parametrize(("name", "kind", "layout", "platform"), list(cases()))
def test_training_and_decoding(name, kind, layout, platform, monkeypatch):
    if platform == INTERPRET:
        pytest.importorskip("triton")
    if "expanded chunks" in name:
        monkeypatch.setattr("ejkernel_eqx.nn.latent_attention.expands", lambda *_: True)
    layer = BUILDS[name](name, platform)
    arrays, static = eqx.partition(layer, eqx.is_array)
    x = inputs(4, 3)

    def everything(arrays, x):
        layer = eqx.combine(arrays, static)
        whole = layer(x)
        learned, rest = eqx.partition(arrays, eqx.is_inexact_array)
        loss = lambda learned, x: jnp.sum(jnp.sin(eqx.combine(learned, rest, static)(x)))
        gradients = jax.grad(loss, (0, 1))(learned, x)
        attends = isinstance(layer, ATTENTION)
        rolling: Any = {"rolling": True} if "rolling" in name else {"max_length": 5}
        state = layer.init_cache(4, **rolling) if attends else layer.init_state(4)
        first, state = layer(x[:, :2], state)
        last, _ = layer(x[:, 2:], state)
        return (whole, first, last), gradients

    expected = jax.jit(everything)(arrays, x)
    mesh = meshes.mesh_of(kind)
    placed = meshes.place(mesh, arrays, weights(layer, layout))
    rows = meshes.spec(layout, ROWS)
    x = meshes.place(mesh, x, rows)
    with meshes.context(kind, mesh):
        outputs, gradients = jax.jit(everything)(placed, x)
    meshes.agree(outputs, expected[0])
    meshes.agree(gradients, expected[1], "gradient")
    meshes.agree(jnp.concatenate(outputs[1:], 1), expected[0][0])
    if kind != "automatic":
        assert all(meshes.lies(y, mesh, rows) for y in outputs), [y.sharding for y in outputs]
        assert meshes.lies(gradients[1], mesh, rows)
