"""Training in float8: products and both gradients against NumPy in float64 on the rounded operands, and what stays as it was."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ejkernel_eqx as ejx
from ejkernel_eqx.models import Decoder, DecoderConfig, LayerConfig, MLP, MLPConfig
from ejkernel_eqx.nn.projection import project, project_parts, project_together
from tests.agreement import platforms
from tests.attention.dense import normal, quick
from tests.matmul.float8.cases import as_numbers, by_group, E4M3, F32
from tests.meshes import collectives, mesh_of
from tests.tolerances import assert_close, errors

platform = platforms()


def in_blocks(x: Any) -> np.ndarray:
    """The numbers of a matrix rounded by blocks of 128 x 128, from the definition."""
    x = np.asarray(x, F32)
    out = np.zeros(x.shape)
    for i in range(0, x.shape[0], 128):
        for j in range(0, x.shape[1], 128):
            part = x[i : i + 128, j : j + 128]
            top = np.abs(part).max()
            codes = (part * (F32(448) / top)).astype(E4M3).astype(np.float64)
            out[i : i + 128, j : j + 128] = codes * np.float64(top / F32(448))
    return out


def in_float8(x: Any, weight: Any, dy: Any) -> tuple[np.ndarray, ...]:
    """The result and the gradients of rows `[M, K]` and of the weight `[N, K]`."""
    w = in_blocks(weight)
    return (
        as_numbers(x, None) @ w.T,
        as_numbers(dy, None) @ w,
        as_numbers(np.asarray(dy).T, None) @ in_blocks(x),
    )


def linear(width: int = 160, features: int = 288, **options: Any) -> eqx.nn.Linear:
    return eqx.nn.Linear(features, width, **options, key=jax.random.key(0))


def vjp(layer: Any, x: Any, dy: Any) -> tuple[Any, Any, Any]:
    """The result of a linear layer, and its gradients."""
    out, pull = eqx.filter_vjp(lambda layer, x: project("layer", layer, x, dy.shape[-1]), layer, x)
    return out, *pull(dy)


both = eqx.filter_jit(vjp)


def test_a_layer_agrees_with_the_formula(platform):
    """Forward and both gradients, with sizes that no block divides; that of the bias is a sum of the cotangents as they are."""
    layer, x, dy = linear(), normal(1, 2, 70, 288), normal(2, 2, 70, 160)
    out, d_layer, dx = both(ejx.with_float8_training(layer, platform=platform), x, dy)
    flat = lambda a: np.asarray(a).reshape(-1, a.shape[-1])
    wanted, wanted_dx, wanted_dw = in_float8(flat(x), layer.weight, flat(dy))
    assert_close(flat(out), wanted + np.asarray(layer.bias)[None])
    assert_close(flat(dx), wanted_dx, kind="gradient")
    assert_close(d_layer.weight.array, wanted_dw, kind="gradient")
    assert_close(d_layer.bias, flat(dy).sum(0), kind="gradient")
    exact = np.asarray(flat(dy), np.float64).T @ flat(x)
    assert 5e-3 < errors(d_layer.weight.array, exact).rms < 0.05


@pytest.mark.slow
def test_weights_of_another_dtype_and_parts():
    """bfloat16 rows by a float32 weight, whose gradient is float32; parts and neighbours are those of the whole product."""
    layer = ejx.with_float8_training(linear(use_bias=False))
    x, dy = normal(1, 90, 288).astype("bfloat16"), normal(2, 90, 160).astype("bfloat16")
    out, d_layer, dx = both(layer, x, dy)
    assert (out.dtype, dx.dtype, d_layer.weight.array.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    wanted, wanted_dx, wanted_dw = in_float8(x.astype(F32), layer.weight.array, dy.astype(F32))
    for found, expected in ((out, wanted), (dx, wanted_dx), (d_layer.weight.array, wanted_dw)):
        assert_close(found, expected, "bfloat16", "gradient")
    x = normal(1, 300, 288)
    whole = project("layer", layer, x, 160)
    assert_close(jnp.concatenate(project_parts("layer", layer, x, (60, 100)), -1), whole)
    for one in project_together({"a": layer, "b": layer}, x, (160, 160)):
        assert_close(one, whole)


def stacked(platform: Any) -> tuple[Any, list[Any]]:
    """Two layers in one, as models have them, and each alone."""
    keys = jax.random.split(jax.random.key(0))
    each = [eqx.nn.Linear(256, 256, use_bias=False, key=key) for key in keys]
    each = [ejx.with_float8_training(layer, platform=platform) for layer in each]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *each), each


@pytest.mark.few(1)
def test_vmap(platform):
    stack, each = stacked(platform)
    x, dy = normal(1, 66, 256), normal(2, 66, 256)
    found = eqx.filter_vmap(both, in_axes=(eqx.if_array(0), None, None))(stack, x, dy)
    for i, layer in enumerate(each):
        for one, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(both(layer, x, dy)), strict=True):
            assert_close(one[i], wanted, kind="gradient")
    # Cotangents of the same rows: the launch of the gradient of the weight has several examples.
    cotangents = jnp.stack([dy, 3 * dy[::-1]])
    found = eqx.filter_vmap(both, in_axes=(None, None, 0))(each[0], x, cotangents)
    for i, one in enumerate(cotangents):
        assert_close(found[1].weight.array[i], both(each[0], x, one)[1].weight.array, kind="gradient")


@pytest.mark.slow
def test_scan(platform):
    stack, each = stacked(platform)
    x, dy = normal(1, 66, 256), normal(2, 66, 256)
    arrays, rest = eqx.partition(stack, eqx.is_array)
    step = lambda x, one: (project("layer", eqx.combine(one, rest), x, 256), None)

    @quick
    def scanned(x: Any, arrays: Any) -> Any:
        out, pull = jax.vjp(lambda x, arrays: jax.lax.scan(step, x, arrays)[0], x, arrays)
        return out, *pull(dy)

    first = both(each[0], x, dy)[0]
    out, d_last, d_first = both(each[1], first, dy)
    _, d_layer, dx = both(each[0], x, d_first)
    found = scanned(x, arrays)
    assert_close(found[0], out)
    assert_close(found[1], dx, kind="gradient")
    for i, wanted in enumerate((d_layer, d_last)):
        assert_close(found[2].weight.array[i], wanted.weight.array, kind="gradient")


@pytest.mark.few(1)
def test_experts(platform):
    """The product and the gradient of the rows in float8, that of the weights as without."""
    options = {"num_experts": 2, "top_k": 1, "activation": "relu2", "gated": False, "platform": "xla"}
    layer = ejx.nn.MixtureOfExperts(128, 136, **options, key=jax.random.key(0))
    experts = ejx.with_float8_training(layer, platform=platform).experts
    rows, sizes, dy = normal(1, 150, 128), np.array([90, 41]), normal(2, 150, 128)
    run = lambda experts, rows: experts(rows, jnp.asarray(sizes))
    out, pull = eqx.filter_jit(lambda *args: eqx.filter_vjp(run, *args))(experts, rows)
    ups, downs = ([np.asarray(w) for w in getattr(layer.experts, name)] for name in ("up_proj", "down_proj"))
    up, down = ([in_blocks(w) for w in weights] for weights in (ups, downs))
    h = by_group(as_numbers(rows, None), [w.T for w in up], sizes)
    hidden = np.maximum(h, 0) ** 2
    assert_close(out, by_group(as_numbers(hidden, None), [w.T for w in down], sizes), "float32")
    d_experts, d_rows = eqx.filter_jit(pull)(dy)
    d_h = by_group(as_numbers(dy, None), down, sizes) * 2 * np.maximum(h, 0)
    assert_close(d_rows, by_group(as_numbers(d_h, None), up, sizes), kind="gradient")
    parts = [slice(0, 90), slice(90, 131)]
    assert_close(
        d_experts.down_proj.array, np.stack([np.asarray(dy)[p].T @ hidden[p] for p in parts]), kind="gradient"
    )
    assert_close(
        d_experts.up_proj.array, np.stack([d_h[p].T @ np.asarray(rows)[p] for p in parts]), kind="gradient"
    )


def descent(model: Any, loss: Any, steps: int = 10) -> list[float]:
    """The losses of AdamW."""
    optimiser = optax.adamw(3e-3)
    state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model: Any, state: Any) -> Any:
        value, grads = eqx.filter_value_and_grad(loss)(model)
        updates, state = optimiser.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, value

    losses = []
    with jax.numpy_dtype_promotion("standard"):  # optax adds integers to floats
        for _ in range(steps):
            model, state, value = step(model, state)
            losses.append(float(value))
    return losses


def test_training_lowers_the_loss():
    """Ten steps of AdamW on an MLP in bfloat16: the losses of the same layer without float8."""
    mlp = MLP(128, MLPConfig(256), key=jax.random.key(0))
    x, wanted = normal(1, 96, 128), jnp.tanh(normal(2, 96, 128))
    as_bfloat16 = lambda tree: jax.tree.map(
        lambda a: a.astype("bfloat16") if eqx.is_inexact_array(a) else a, tree
    )
    loss = lambda mlp: jnp.mean((as_bfloat16(mlp)(x.astype("bfloat16")).astype("float32") - wanted) ** 2)
    plain, rounded = descent(mlp, loss), descent(ejx.with_float8_training(mlp), loss)
    assert plain[-1] < 0.7 * plain[0] and rounded != plain
    np.testing.assert_allclose(rounded, plain, rtol=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"scan_layers": True, "remat": "kernels"}], ids=str)
def test_a_model_is_trained(options):
    rope = ejx.nn.RotaryEmbedding(32)
    attention = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 32, "rope": rope}
    config = DecoderConfig(40, 128, (LayerConfig("attention", attention, MLPConfig(128)),) * 2)
    model = Decoder(config, **options, key=jax.random.key(1))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 40, (2, 49)))
    loss = lambda model: model.loss(model.features(tokens[:, :-1]), tokens[:, 1:])
    plain, rounded = descent(model, loss), descent(ejx.with_float8_training(model), loss)
    assert plain[-1] < 0.9 * plain[0] and rounded != plain
    np.testing.assert_allclose(rounded, plain, rtol=0.02)


class Layers(eqx.Module):
    narrow: eqx.nn.Linear
    wide: eqx.nn.Linear
    head: eqx.nn.Linear


def test_which_weights():
    """Wide ones but for the head; others by `where`; and back to arrays, with nothing lost. Few rows are multiplied as before."""
    layers = Layers(linear(64, 128), linear(128, 128), linear(128, 128))
    chosen = lambda layers: [
        name for name, layer in vars(layers).items() if isinstance(layer.weight, ejx.Float8Weight)
    ]
    made = ejx.with_float8_training(layers)
    assert chosen(made) == ["wide"]
    assert chosen(ejx.with_float8_training(layers, where=lambda path: path != ".wide.weight")) == [
        "narrow",
        "head",
    ]
    x = normal(1, 30, 128)
    np.testing.assert_array_equal(project("wide", made.wide, x, 128), project("wide", layers.wide, x, 128))
    np.testing.assert_array_equal(jax.vmap(made.wide)(x), jax.vmap(layers.wide)(x))
    again = ejx.with_float8_training(ejx.with_float8_training(made), False)
    assert eqx.tree_equal(again, layers)
    with pytest.raises(ValueError, match="128 inputs and outputs or more, received none; where="):
        ejx.with_float8_training(layers.narrow)
    with pytest.raises(ValueError, match="received none"):
        ejx.with_float8_training(ejx.quantise(layers.wide, "fp8"))
    with pytest.raises(ValueError, match=r"quantise ejx\.with_float8_training\(model, False\)"):
        ejx.quantise(made, "int8")


EVERYWHERE = [("explicit", jax.P("dp")), ("explicit", jax.P()), ("automatic", jax.P("dp"))]


@pytest.mark.parametrize(
    "kind, spec", [EVERYWHERE[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in EVERYWHERE[1:])]
)
def test_a_mesh_splits_rows_and_parameters(kind, spec, platform):
    """Rows stay on their devices; the gradient of the weight is summed over them, and lies as the weight."""
    layer, x, dy = (
        ejx.with_float8_training(linear(256), platform=platform),
        normal(1, 2, 128, 288),
        normal(2, 2, 128, 256),
    )
    put = lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh_of(kind), spec))
    wanted = both(layer, x, dy)
    split = jax.tree.map(lambda leaf: put(leaf, spec), layer)
    given = split, put(x, jax.P("dp")), put(dy, jax.P("dp"))
    jax.tree.map(lambda a, b: assert_close(a, b, kind="gradient"), both(*given), wanted)
    if kind == "explicit":
        found = collectives(eqx.filter_jit(vjp).lower(*given).compile().compiled)
        assert found["all-reduce"] == 1 and found["all-gather"] == (2 if spec == jax.P("dp") else 0)


def test_what_a_mesh_may_not_split():
    mesh, layer = mesh_of("explicit"), ejx.with_float8_training(linear(128, 128))
    x = jax.device_put(normal(1, 80, 128), jax.NamedSharding(mesh, jax.P("dp", "tp")))
    with pytest.raises(ValueError, match=r"received features split by tp; "):
        project("layer", layer, x, 128)
    split = jax.tree.map(lambda a: jax.device_put(a, jax.NamedSharding(mesh, jax.P("dp"))), layer)
    with pytest.raises(ValueError, match=r"received a weight split by dp; split rows by it"):
        project("layer", split, normal(1, 80, 128), 128)
    options = {"num_experts": 2, "top_k": 1, "activation": "silu"}
    mixture = ejx.nn.MixtureOfExperts(128, 128, **options, key=jax.random.key(0))
    for name in ("gate_proj", "up_proj", "down_proj"):
        some = ejx.with_float8_training(mixture, where=lambda path, name=name: name in path)
        with pytest.raises(ValueError, match=r"experts: .* received weights of with_float8_training"):
            some(jax.device_put(x, jax.NamedSharding(mesh, jax.P("dp"))))


def test_experts_alone_and_back():
    """Experts are known by their class, and what `where=` chose is undone."""
    options = {"num_experts": 2, "top_k": 1, "activation": "silu"}
    mixture = ejx.nn.MixtureOfExperts(128, 128, **options, key=jax.random.key(0))
    alone = eqx.tree_at(lambda m: m.experts, mixture, ejx.with_float8_training(mixture.experts))
    loss = lambda model, x: jnp.sum(model(x) ** 2)
    grads = [
        eqx.filter_grad(loss)(m, normal(1, 300, 128)) for m in (alone, ejx.with_float8_training(mixture))
    ]
    assert jnp.any(grads[0].experts.up_proj.array != 0)
    for a, b in zip(*map(jax.tree.leaves, grads), strict=True):
        np.testing.assert_array_equal(a, b)
    narrow = linear(64, 64)
    changed = ejx.with_float8_training(narrow, where=lambda path: True)
    assert isinstance(changed.weight, ejx.Float8Weight)
    assert ejx.with_float8_training(changed, False).weight is narrow.weight
