"""Every layer on meshes: training, and decoding with a state or cache that is made on the way. Interpreted Triton stands for the kernels of GPUs,
which no compiler can split, on explicit meshes; on automatic ones a stand-in that is as opaque, whose body runs on any machine."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import ejkernel_eqx as ejx
from tests import meshes
from tests.attention import test_sharding
from tests.attention.dense import INTERPRET
from tests.meshes import HEADS, ROWS
from tests.nn import layers
from tests.nn.checks import needs_triton
from tests.nn.layers import ATTENTION, LAYERS
from tests.nn.recurrent_layers import inputs
from tests.recurrence.test_sharding import opaque

ROLLING, EXPANDED = "attention, a norm of all heads, a rolling cache", "latent attention, expanded chunks"
# One layer of each family has every layout and kind, the others have both axes split: by the compiler, and around opaque kernels.
MEMBERS = ("attention", "lstm", "mamba2")
BY_TYPES, AUTOMATIC = ("explicit without context", "both"), ("automatic", "both")
CASES = [(name, *AUTOMATIC, "xla") for name in (*LAYERS, ROLLING, EXPANDED)]
CASES += [(name, *BY_TYPES, INTERPRET) for name in (*LAYERS, ROLLING)]
CASES += [(name, "explicit", layout, "xla") for name in MEMBERS for layout in ("data", "tensor")]
DEFAULT = [("attention", *BY_TYPES, INTERPRET), ("lightning", *BY_TYPES, INTERPRET)]


def build(name: str, platform: str) -> Any:
    if name != ROLLING:
        return layers.build(name.partition(",")[0], platform=platform)
    options: Any = {"qk_norm": "all", "sinks": False, "sliding_window": 2, "platform": platform}
    layer = LAYERS["attention"](**options, key=jax.random.key(0))
    return eqx.tree_at(lambda m: m.q_norm.weight, layer, jnp.linspace(0.5, 2.0, layer.q_norm.weight.size))


def weights(name: str, layer: Any, layout: str) -> Any:
    """How the layer's arrays are split: the heads of attention, as tensor parallelism has them; all else is on every device."""

    def spec(path: Any, x: Any) -> Any:
        leaf = jax.tree_util.keystr(path)
        # All heads share the way to the latents.
        if name.partition(",")[0] not in ATTENTION or not eqx.is_array(x) or x.ndim < 2 or "_a_proj" in leaf:
            return P()
        return meshes.spec(layout, None, HEADS) if "o_proj" in leaf else meshes.spec(layout, HEADS)

    return jax.tree_util.tree_map_with_path(spec, eqx.filter(layer, eqx.is_array))


def gradients_of(static: Any, arrays: Any, x: Any) -> Any:
    """Of the weights and the input, and the output."""
    learned, rest = eqx.partition(arrays, eqx.is_inexact_array)

    def loss(learned: Any, x: Any) -> Any:
        y = eqx.combine(learned, rest, static)(x)
        return jnp.sum(jnp.sin(y)), y

    return jax.grad(loss, (0, 1), has_aux=True)(learned, x)


def everything(name: str, static: Any) -> Any:
    """A compiled function of the layer's arrays and its input: outputs, also in two pieces, and gradients."""

    def results(arrays: Any, x: Any) -> Any:
        layer = eqx.combine(arrays, static)
        rolling: Any = {"max_length": None, "rolling": True} if name == ROLLING else {"max_length": 5}
        first, state = layer(x[:, :2], layer.init_cache(4, **rolling))
        last, _ = layer(x[:, 2:], state)
        gradients, y = gradients_of(static, arrays, x)
        return (y, first, last), gradients

    return jax.jit(results)


@functools.cache
def on_one_device(name: str) -> Any:
    arrays, static = eqx.partition(build(name, "xla"), eqx.is_array)
    return everything(name, static)(arrays, inputs(4, 3))


@pytest.mark.parametrize(
    ("name", "kind", "layout", "platform"),
    [pytest.param(*c, marks=() if c in DEFAULT else pytest.mark.slow) for c in CASES],
)
def test_training_and_decoding(name, kind, layout, platform, monkeypatch):
    needs_triton(platform)
    expected = on_one_device(name.partition(",")[0] if name == EXPANDED else name)
    if name == EXPANDED:
        monkeypatch.setattr("ejkernel_eqx.nn.latent_attention.expands", lambda *_: True)
    layer = build(name, platform)
    arrays, static = eqx.partition(layer, eqx.is_array)
    mesh, rows = meshes.mesh_of(kind), meshes.spec(layout, ROWS)
    placed = meshes.place(mesh, (arrays, inputs(4, 3)), (weights(name, layer, layout), rows))
    with meshes.context(kind, mesh):
        outputs, gradients = everything(name, static)(*placed)
    meshes.agree(outputs, expected[0])
    meshes.agree(jax.tree.leaves(gradients), jax.tree.leaves(expected[1]), "gradient")
    meshes.agree(jnp.concatenate(outputs[1:], 1), expected[0][0])
    if kind != "automatic":
        assert all(meshes.lies(y, mesh, rows) for y in outputs), [y.sharding for y in outputs]
        assert meshes.lies(gradients[1], mesh, rows)


MASKED = [("lfm2", "explicit without context", "xla")]
MASKED += [("mamba2", kind, platform) for platform in ("xla", INTERPRET) for kind in meshes.KINDS]


@pytest.mark.parametrize(
    ("name", "kind", "platform"),
    [pytest.param(*c, marks=() if c is MASKED[0] else pytest.mark.slow) for c in MASKED],
)
def test_a_padding_mask_that_a_mesh_splits(name, kind, platform):
    """With its rows: outputs of real tokens and gradients are those of one device, and stay split."""
    needs_triton(platform)
    real = np.arange(3)[None] >= np.arange(4)[:, None] % 3
    layer = build(name, platform)
    arrays, static = eqx.partition(layer, eqx.is_array)
    convolution = ejx.CausalConv1d(platform=platform)

    def loss(arrays: Any, x: Any, real: Any) -> Any:
        y = jnp.where(real[..., None], eqx.combine(arrays, static)(x, padding_mask=real), 0)
        return jnp.sum(jnp.sin(y)), y

    def results(*placed: Any) -> Any:
        gradients, y = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(*placed)
        # An operation outside of `jit`, too.
        ids = jnp.where(placed[2], 0, -1)
        return gradients, y, convolution(placed[1], jnp.ones((placed[1].shape[-1], 2)), segment_ids=ids)[0]

    mesh, given = meshes.mesh_of(kind), (arrays, inputs(4, 3), jnp.asarray(real))
    with meshes.context(kind, mesh):
        found = results(*meshes.place(mesh, given, (weights(name, layer, "both"), P(ROWS), P(ROWS))))
    meshes.agree(found, results(*given), "gradient")
    if kind != "automatic":
        assert all(meshes.lies(x, mesh, P(ROWS)) for x in (found[0][1], *found[1:]))


def hidden(layer: Any) -> Any:
    """The layer with stand-ins for its attention or recurrence that the compiler may not look into."""

    def stand_in(node: Any) -> Any:
        if isinstance(node, ejx.FlashAttention):
            return opaque(node, {k: v for k, v in vars(test_sharding.OPAQUE).items() if k != "OPAQUE"})
        return opaque(node) if isinstance(node, ejx.StateSpaceV2 | ejx.KernelDeltaAttention) else node

    return jax.tree.map(stand_in, layer, is_leaf=lambda node: isinstance(node, ejx.Kernel))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["attention", "mamba2", "kimi"])
def test_opaque_kernels_on_automatic_meshes(name):
    """Each device runs the kernel on its own rows and heads, and nothing is gathered: heads are summed once, and gradients of weights over rows."""
    layer, mesh = hidden(layers.build(name)), meshes.mesh_of("automatic")
    arrays, static = eqx.partition(layer, eqx.is_array)
    placed = meshes.place(mesh, (arrays, inputs(4, 3)), (weights(name, layer, "both"), P(ROWS)))
    call = jax.jit(lambda arrays, x: eqx.combine(arrays, static)(x))
    lowered = call.lower(*placed)
    assert "@CustomSPMDPartitioning" in lowered.as_text()
    forward = lowered.compile()
    backward = jax.jit(functools.partial(gradients_of, static)).lower(*placed).compile()
    assert meshes.collectives(forward) == ({"all-reduce": 1} if name == "attention" else {})
    # Of gradients, only those of the sinks and of the norms are gathered, which every device has whole.
    assert set(meshes.collectives(backward)) <= {"all-reduce", "all-gather"}
    assert max(test_sharding.gathered(backward), default=0) <= (6 if name == "attention" else 0)
    y, (gradients, _), expected = forward(*placed), backward(*placed), on_one_device(name)
    assert meshes.lies(y, mesh, P(ROWS))
    meshes.agree(y, expected[0][0])
    meshes.agree(jax.tree.leaves(gradients), jax.tree.leaves(expected[1]), "gradient")
