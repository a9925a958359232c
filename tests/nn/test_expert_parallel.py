"""Experts, tokens and hidden features split over eight devices give what one device gives: results, statistics and gradients, however unevenly
tokens are spread."""

import functools
import math
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ejkernel_eqx import nn
from ejkernel_eqx.nn.moe import exchange as exchanges
from tests import meshes
from tests.attention.dense import INTERPRET
from tests.nn.checks import needs_triton, refuses
from tests.nn.experts import EMBED, inputs

AXES = ("data", "expert", "tensor")
EVERY = ("data", "expert", "tensor")
SPLITS: dict[str, tuple[P, Any, Any]] = {  # of tokens [B, T], of experts, of hidden features
    "exchanged": (P(("data", "expert")), "expert", "tensor"),
    "in rounds": (P(EVERY), ("expert", "data", "tensor"), None),
    "added": (P("data"), "expert", "tensor"),
    "exchanged and added": (P("data", "expert"), ("data", "expert", "tensor"), None),
    "tokens alone": (P("expert", "data"), None, None),
    "gathered": (P("data"), None, "data"),  # as parameters split over the devices of the batch
}
_DEFAULT = ("exchanged", "explicit without context", "xla")


def layer_of(parallel: Any = None, **options: Any) -> nn.MixtureOfExperts:
    given = {"num_experts": 8, "top_k": 2, "use_bias": True, "activation": "clamped_swiglu", "shared_dim": 4}
    make = functools.partial(nn.MixtureOfExperts, EMBED, 6, parallel=parallel, key=jax.random.key(4))
    layer = make(**(given | options))
    return eqx.tree_at(lambda m: m.gate.weight, layer, 3 * layer.gate.weight)


def specs_of(arrays: Any, experts: Any, hidden: Any) -> Any:
    def spec(path: Any, x: Any) -> P:
        name = jax.tree_util.keystr(path)
        if ".experts" not in name or "latent" in name:
            return P()
        if "bias" in name:
            return P(experts, None) if "down" in name else P(experts, hidden)
        return P(experts, None, hidden) if "down" in name else P(experts, hidden, None)

    return jax.tree_util.tree_map_with_path(spec, arrays)


def everything(static: Any, arrays: Any, x: Any, real: Any) -> Any:
    def loss(arrays: Any, x: Any) -> Any:
        y, found = eqx.combine(arrays, static)(x, padding_mask=real, return_statistics=True)
        return jnp.sum(jnp.sin(y)) + nn.load_balancing_loss(found) + nn.router_z_loss(found), (y, found)

    (_, (y, found)), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(arrays, x)
    return y, found, gradients


@functools.cache
def compiled(static: Any) -> Any:
    return jax.jit(functools.partial(everything, static))


def axes_of(entry: Any) -> tuple[str, ...]:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def check(
    split: str,
    kind: str,
    platform: str = "xla",
    exchange: Any = "auto",
    shift: Any = None,
    real: Any = None,
    shape: tuple[int, int, int] = (2, 2, 2),
    **options: Any,
):
    tokens, experts, hidden = SPLITS[split]
    types = (AxisType.Auto if "automatic" in kind else AxisType.Explicit,) * 3
    mesh = jax.make_mesh(shape, AXES, axis_types=types)
    named: Any = {"exchange": exchange}
    if "automatic" in kind:
        names = tuple(axis for entry in tokens for axis in axes_of(entry))
        named |= {"expert_axes": axes_of(experts), "token_axes": names}
        named |= {"hidden_axes": axes_of(hidden) if hidden != "data" else ()}
        named |= {} if "context" in kind else {"mesh": mesh}
    x = inputs(8, 2) if shift is None else inputs(8, 2) + shift[None, None]
    plain, static = eqx.partition(layer_of(**options), eqx.is_array)
    expected = compiled(static)(plain, x, real)
    split_layer = layer_of(nn.ExpertParallel(**named), platform=platform, **options)
    arrays, static = eqx.partition(split_layer, eqx.is_array)
    specs = specs_of(arrays, experts, hidden)
    placed = meshes.place(mesh, arrays, specs)
    x = jax.device_put(x, jax.NamedSharding(mesh, tokens))
    with jax.set_mesh(mesh) if kind in ("explicit", "automatic in a context") else jax.enable_x64(False):
        y, found, gradients = compiled(static)(placed, x, real)
    sums = lambda statistics: (statistics.probability_sums, statistics.z_square_sum)
    meshes.agree((y, *sums(found)), (expected[0], *sums(expected[1])))
    np.testing.assert_array_equal(found.tokens_per_expert, expected[1].tokens_per_expert)
    leaves = jax.tree.structure(gradients[0]).unflatten(jax.tree.leaves(expected[2][0]))
    meshes.agree(gradients, (leaves, expected[2][1]), "gradient")
    if "automatic" not in kind:
        assert meshes.lies(y, mesh, tokens) and meshes.lies(gradients[1], mesh, tokens), y.sharding
        for name in ("up_proj", "down_proj"):
            spec = getattr(specs.experts, name)
            assert meshes.lies(getattr(gradients[0].experts, name), mesh, spec)


# One way to split is done on every kind of mesh, the others on one of them. Interpreted Triton stands for the kernels of GPUs.
CASES = [("exchanged", "explicit without context", "xla"), ("exchanged", "explicit", INTERPRET)]
CASES += [("exchanged", "automatic", "xla"), ("exchanged", "automatic in a context", "xla")]
CASES += [("in rounds", "automatic", "xla"), ("added", "explicit", INTERPRET)]
CASES += [("gathered", "automatic", "xla")]
CASES += [("exchanged and added", "explicit without context", "xla"), ("tokens alone", "automatic", "xla")]


@pytest.mark.parametrize(
    ("split", "kind", "platform"),
    [pytest.param(*c, marks=() if c == _DEFAULT else pytest.mark.slow) for c in CASES],
)
def test_as_on_one_device(split, kind, platform):
    needs_triton(platform)
    check(split, kind, platform)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["explicit", "automatic"])
def test_latents_without_gates(kind):
    options = {"gated": False, "activation": "relu2", "latent_dim": 6, "use_bias": False}
    check("exchanged", kind, **options)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _moved(x, move, reverse, length, axes, empty):
    """The exchange of `Ragged`, whose collective CPUs do not have: every device sees everything, and takes what is for it."""
    every = lambda x: lax.all_gather(x, axes)
    rows, me = jnp.arange(length), lax.axis_index(axes)
    given, starts, sizes, places = map(every, (x, *move[:3]))
    mine = sizes[:, me]
    output = jnp.full((length, *x.shape[1:]), empty, x.dtype)
    output = jnp.where((mine == move.recv_sizes).all(), output, jnp.zeros_like(output) - 1)
    for source in range(given.shape[0]):
        at = rows - places[source, me]
        inside = (at >= 0) & (at < mine[source])
        taken = given[source].at[starts[source, me] + at].get(mode="clip")
        output = jnp.where(inside.reshape(-1, *(1,) * (output.ndim - 1)), taken, output)
    return output


_moved.defvjp(exchanges._moved_forward, exchanges._moved_backward)


@pytest.mark.slow
@pytest.mark.parametrize(("split", "uneven"), [("exchanged", False), ("in rounds", True)])
def test_ragged(split, uneven, monkeypatch):
    monkeypatch.setattr(exchanges, "_moved", _moved)
    shift = 4 * layer_of().gate.weight[0] if uneven else None
    check(split, "explicit", exchange="ragged", shift=shift)


@pytest.mark.slow
@pytest.mark.parametrize("split", ["exchanged", "in rounds"])
def test_all_tokens_go_to_the_same_experts(split):
    """The most rounds that there can be: of rows through the experts of a device, and of tokens between devices."""
    layer = layer_of()
    shift = 4 * layer.gate.weight[0] + 3 * layer.gate.weight[1]
    busy = np.asarray(layer(inputs(8, 2) + shift[None, None], return_statistics=True)[1].tokens_per_expert)
    assert (busy > 8).sum() <= 2, busy
    check(split, "automatic", shift=shift)


@pytest.mark.slow
def test_padding():
    check("exchanged", "explicit", real=jax.random.bernoulli(jax.random.key(9), 0.6, (8, 2)))


@pytest.mark.slow
def test_tokens_that_do_not_divide():
    layer = layer_of(nn.ExpertParallel(mesh=jax.make_mesh((8,), ("expert",), axis_types=(AxisType.Auto,))))
    x = inputs(3, 7)
    meshes.agree(eqx.filter_jit(layer)(x), layer_of()(x))
    meshes.agree(layer(x[0, 0]), layer_of()(x[0, 0]))


@pytest.mark.slow
@pytest.mark.usefixtures("no_races")
def test_simulated_kernels():
    """In several rounds, of which `jax.checkpoint` keeps nothing where it can."""
    mesh = jax.make_mesh((2,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    x = inputs(2, 2) + 4 * layer_of().gate.weight[:1, None]
    on_one = layer_of()
    split = layer_of(nn.ExpertParallel(mesh=mesh, exchange="by_token"), platform="pallas-interpret")
    total = lambda of: jnp.sum(jnp.sin(of[0](of[1])))
    gradients = [eqx.filter_jit(eqx.filter_grad(total))((layer, x)) for layer in (split, on_one)]
    meshes.agree(*(jax.tree.leaves(found) for found in gradients), kind="gradient")
    meshes.agree(eqx.filter_jit(split)(x), on_one(x))


_COLLECTIVE = re.compile(r'stablehlo\.(all_gather|all_to_all)".*?-> tensor<((?:\d+x)+)f32>', re.DOTALL)


@pytest.mark.parametrize(("devices", "top_k", "most"), [(2, 6, 1.0), (8, 2, 0.3), (8, 6, 1.0)])
def test_a_token_goes_once_to_each_device(devices, top_k, most):
    """Each move of a forward pass takes `most` of all tokens, whatever the number of experts of each."""
    tokens = 64
    mesh = jax.make_mesh(
        (devices,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices]
    )
    parallel = nn.ExpertParallel(mesh=mesh, exchange="by_token")
    layer = layer_of(parallel, top_k=top_k, num_experts=16)
    text = jax.jit(lambda x: layer(x)).lower(inputs(devices * tokens)).as_text()
    moves = [shape.split("x")[:-1] for _, shape in _COLLECTIVE.findall(text)]
    wide = [shape for shape in moves if shape[-1] == str(EMBED)]
    assert len(wide) >= 2, moves  # there and back
    for shape in wide:
        assert math.prod(map(int, shape)) <= math.ceil(most * tokens) * devices * EMBED, shape


def test_ragged_compiles_for_gpus():
    """As far as a machine without one can tell."""
    mesh = jax.make_mesh((2,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    layer = layer_of(nn.ExpertParallel(mesh=mesh, exchange="ragged"))
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(layer(x))))
    text = gradient.trace(inputs(4)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@ragged_all_to_all") >= 4  # there and back, and the gradients of both


_MESH = lambda: jax.make_mesh((2, 4), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
_options: Any = nn.ExpertParallel
_on_mesh = lambda *axes, **options: layer_of(_options(*axes, mesh=_MESH()), **options)
WRONG = {
    "expert_axes: expected the name of a mesh axis or a tuple of names, received 3": lambda: _options(expert_axes=3),
    "hidden_axes: expected axes that split neither experts nor tokens, received 'expert'": lambda: _options(hidden_axes="expert"),
    "exchange: expected auto, ragged or by_token, received 'all'": lambda: _options(exchange="all"),
    "parallel: expected an ExpertParallel or None, received str": lambda: layer_of("expert"),
    "expert_axes: expected axes of the mesh, which has data, expert, received 'model'": lambda: _on_mesh("model")(inputs(8)),
    "num_experts: expected a multiple of 4, the devices of the axes expert, received 6": lambda: _on_mesh(num_experts=6)(inputs(8)),
}  # fmt: skip


test_wrong_axes = refuses(WRONG)
