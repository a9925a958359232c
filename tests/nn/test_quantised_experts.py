"""Experts whose weights are quantised: the results and gradients of their numbers, without arrays of floats of all of them."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import ejkernel_eqx as ejx
from ejkernel_eqx import nn
from tests import meshes
from tests.attention.dense import INTERPRET, normal
from tests.nn.checks import needs_triton
from tests.tolerances import assert_close

EMBED, HIDDEN, EXPERTS = 64, 128, 8


def layer_of(**options: Any) -> nn.MixtureOfExperts:
    given = {"num_experts": EXPERTS, "top_k": 2, "use_bias": True, "activation": "clamped_swiglu"}
    return nn.MixtureOfExperts(EMBED, HIDDEN, **(given | options), key=jax.random.key(2))


@eqx.filter_jit
def run(layer: Any, x: Any) -> Any:
    def loss(x):
        y = layer(x)
        return jnp.sum(jnp.sin(y)), y

    (_, y), gradient = jax.value_and_grad(loss, has_aux=True)(x)
    return y, gradient


def agree(found: Any, expected: Any) -> None:
    assert_close(np.asarray(found[0]), np.asarray(expected[0]))
    assert_close(np.asarray(found[1]), np.asarray(expected[1]), kind="gradient")


CASES = [
    (kind, platform)
    for kind in ("int8", "fp8-block", "int4", "mxfp4", "nvfp4")
    for platform in ("xla", INTERPRET)
]
_DEFAULT = {("int4", INTERPRET)}


@pytest.mark.parametrize(
    ("kind", "platform"), [pytest.param(*c, marks=() if c in _DEFAULT else pytest.mark.slow) for c in CASES]
)
def test_experts_are_those_of_their_numbers(kind, platform):
    """A few tokens, as in a decode step."""
    needs_triton(platform)
    layer = ejx.quantise(layer_of(platform=platform), kind)
    x = normal(3, 3, EMBED)
    agree(run(layer, x), run(ejx.dequantise(layer), x))


@pytest.mark.parametrize("part", ["gate_proj", pytest.param("down_proj", marks=pytest.mark.slow)])
def test_some_weights_of_experts(part):
    """Gate and up that are not stored alike are multiplied as floats."""
    layer = ejx.quantise(layer_of(), "int4", where=lambda path: path.endswith(part))
    x = normal(3, 3, EMBED)
    agree(run(layer, x), run(ejx.dequantise(layer), x))


def test_a_step_of_few_tokens_makes_no_floats_of_all_experts():
    layer, x = ejx.quantise(layer_of(), "mxfp4"), normal(3, 2, EMBED)
    text = run.lower(layer, x).as_text()
    shapes = [f"tensor<{EXPERTS}x{HIDDEN}x{EMBED}x", f"tensor<{EXPERTS}x{EMBED}x{HIDDEN}x"]
    assert f"{shapes[0]}f32>" in run.lower(ejx.dequantise(layer), x).as_text()
    assert not any(f"{shape}f32>" in text or f"{shape}bf16>" in text for shape in shapes)


@pytest.mark.slow
def test_experts_that_no_token_goes_to_are_not_read():
    layer, x = ejx.quantise(layer_of(), "mxfp4"), jnp.broadcast_to(normal(3, EMBED), (3, EMBED))
    unused = np.setdiff1d(np.arange(EXPERTS), np.unique(layer.route(x).indices))
    where = lambda m: (m.experts.gate_proj.scales, m.experts.up_proj.scales, m.experts.down_proj.scales)
    spoiled = eqx.tree_at(where, layer, replace_fn=lambda scales: scales.at[unused].set(255))  # NaN
    agree(run(spoiled, x), run(layer, x))


@functools.cache
def on_one_device(kind: str) -> Any:
    return run(ejx.dequantise(ejx.quantise(layer_of(), kind)), normal(3, 8, EMBED))


# The scales of fp8-block are those of 128 hidden features, which two devices would cut: its weights become floats.
@pytest.mark.slow
@pytest.mark.parametrize("mesh_kind", ["explicit", "automatic"])
@pytest.mark.parametrize(
    ("kind", "platform"), [("mxfp4", "xla"), ("int8", "xla"), ("fp8-block", "xla"), ("nvfp4", INTERPRET)]
)
def test_on_a_mesh(kind, platform, mesh_kind):
    """Experts and their hidden features split over devices."""
    needs_triton(platform)
    axis_type = AxisType.Explicit if mesh_kind == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((2, 2, 2), ("data", "expert", "tensor"), axis_types=(axis_type,) * 3)
    parallel = nn.ExpertParallel(
        "expert", ("data", "expert"), "tensor", mesh=None if mesh_kind == "explicit" else mesh
    )
    layer = ejx.quantise(layer_of(parallel=parallel, platform=platform), kind)

    def place(path: Any, x: Any) -> Any:
        name = jax.tree_util.keystr(path)
        axes = [None] * x.ndim
        if ".experts" in name:
            axes[0] = "expert"
            hidden = 2 if "down" in name and "bias" not in name else 1
            is_split = "down_proj_bias" not in name and x.ndim > hidden and x.shape[hidden] % 2 == 0
            axes[hidden % x.ndim] = "tensor" if is_split else axes[hidden % x.ndim]
        return meshes.place(mesh, (x,), (P(*axes),))[0]

    arrays, static = eqx.partition(layer, eqx.is_array)
    placed = eqx.combine(jax.tree_util.tree_map_with_path(place, arrays), static)
    x = jax.device_put(normal(3, 8, EMBED), jax.NamedSharding(mesh, P(("data", "expert"))))
    with jax.set_mesh(mesh) if mesh_kind == "explicit" else jax.enable_x64(False):
        agree(run(placed, x), on_one_device(kind))
