"""`project`, the one place where layers multiply by weights: any callable for a projection, any mesh."""

import contextlib
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel_eqx as ejx
from ejkernel_eqx.nn.projection import is_shared, project, project_apart, project_parts, project_together
from tests import meshes
from tests.arrays import array, normal
from tests.meshes import COLLECTIVE
from tests.nn.checks import refuses
from tests.recurrence.quick import quick
from tests.tolerances import assert_close

IN, OUT = 16, 8


def _arrays():
    random = np.random.default_rng(0)
    return tuple(random.standard_normal(shape).astype("f") for shape in ((4, 8, IN), (OUT, IN), (OUT,)))


def _projected(x, weight, bias):
    linear = eqx.nn.Linear(IN, OUT, key=jax.random.key(0))
    return project("out_proj", eqx.tree_at(lambda m: (m.weight, m.bias), linear, (weight, bias)), x, OUT)


def _expected():
    """The product, and the gradients of the sum of its sines, in float64."""
    x, weight, bias = (a.astype(np.float64) for a in _arrays())
    y = x @ weight.T + bias
    slope = np.cos(y)
    return y, (slope @ weight, np.einsum("bto,bti->oi", slope, x), slope.sum((0, 1)))


# How x, the weight and the bias come (None: on no mesh), how the result lies, and which collective that takes.
BOTH, MOVES = ("data", "tensor"), {"all-gather", "collective-permute", "all-to-all"}
LAYOUTS = {
    "data": (P("data"), P(), P(), P("data", None, None), set()),
    "columns": (P("data"), P("tensor"), P("tensor"), P("data", None, "tensor"), set()),
    "rows, a sum": (P("data", None, "tensor"), P(None, "tensor"), P(), P("data", None, None), {"all-reduce"}),
    "x on no mesh": (None, P("tensor"), P("tensor"), P(None, None, "tensor"), set()),
    "weights on no mesh": (P("data"), None, None, P("data", None, None), set()),
    "weights split as the batch": (P("data"), P(BOTH), P(BOTH), P("data", None, "tensor"), MOVES),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name, context", [(name, n % 2 == 0) for n, name in enumerate(LAYOUTS)])
def test_explicit_meshes(name, context):
    *specs, wanted, collectives = LAYOUTS[name]
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    put = lambda a, spec: jnp.asarray(a) if spec is None else jax.device_put(a, NamedSharding(mesh, spec))
    arrays = tuple(map(put, _arrays(), specs))
    y, gradients = _expected()
    with jax.set_mesh(mesh) if context else contextlib.nullcontext():
        compiled = quick(_projected).lower(*arrays).compile()
        assert set(COLLECTIVE.findall(compiled.as_text() or "")) <= collectives
        for out in (compiled(*arrays), _projected(*arrays)):
            assert_close(out, y)
            assert tuple(jax.typeof(out).sharding.spec) == tuple(wanted)
        loss = lambda *arrays: jnp.sum(jnp.sin(_projected(*arrays)))
        grads = quick(jax.grad(loss, (0, 1, 2)))(*arrays)
    for ours, theirs, spec in zip(grads, gradients, specs, strict=True):
        assert_close(ours, theirs, kind="gradient")
        if spec is not None:
            assert ours.sharding.is_equivalent_to(NamedSharding(mesh, spec), ours.ndim)


def _placed(kind):
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(kind,) * 2)
    specs = LAYOUTS["rows, a sum"][:3]
    return [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(_arrays(), specs, strict=True)]


@pytest.mark.slow
def test_a_row_of_an_explicit_mesh_is_mapped():
    out = quick(jax.vmap(_projected, (0, None, None)))(*_placed(AxisType.Explicit))
    assert_close(out, _expected()[0])
    assert tuple(jax.typeof(out).sharding.spec) == ("data", None, None)


def test_automatic_mesh_needs_one_sum():
    arrays = _placed(AxisType.Auto)
    compiled = quick(_projected).lower(*arrays).compile()
    assert COLLECTIVE.findall(compiled.as_text() or "") == ["all-reduce"]
    assert_close(compiled(*arrays), _expected()[0])


class _Scaled(eqx.Module):
    """Takes one vector, and no more."""

    scale: jax.Array

    def __call__(self, x):
        assert x.shape == (IN,)
        return self.scale * x[:OUT]


class _Kin(eqx.nn.Linear):
    """A kind of linear layer with its own call, which reading `.weight` would pass by."""

    def __call__(self, x, *, key=None):
        return 2.0 * super().__call__(x)


@pytest.mark.few(2)
@pytest.mark.parametrize("lead", [(), (2, 3), (2, 0)])
def test_a_callable_is_given_one_vector_at_a_time(lead):
    x = jnp.asarray(np.random.default_rng(1).standard_normal((*lead, IN)), jnp.float32)
    module = _Scaled(jnp.arange(1.0, OUT + 1))
    call = lambda module, x: project("q_proj", module, x, OUT)
    assert_close(call(module, x), np.asarray(x[..., :OUT], np.float64) * np.arange(1, OUT + 1))
    grad = jax.grad(lambda module, x: jnp.sum(call(module, x)))(module, x)
    assert_close(grad.scale, np.asarray(x[..., :OUT], np.float64).reshape(-1, OUT).sum(0), kind="gradient")
    assert_close(call(lambda x: x[:OUT], x), x[..., :OUT])


def test_a_kind_of_linear_layer_is_called():
    make: Any = _Kin
    kin, x = make(IN, OUT, key=jax.random.key(0)), _arrays()[0]
    expected = 2.0 * (x.astype(np.float64) @ np.asarray(kin.weight).T + np.asarray(kin.bias))
    assert_close(project("q_proj", kin, jnp.asarray(x), OUT), expected)
    y, bias = project_apart("dt_proj", kin, jnp.asarray(x), OUT)
    assert bias is None
    assert_close(y, expected)


_linear = lambda *sizes: eqx.nn.Linear(*sizes, key=jax.random.key(0))
_to = r"q_proj: expected a projection from \[16\] to \[8\], received one that returns "
ERRORS = {
    "q_proj: expected an equinox.nn.Linear or a callable .* received ArrayImpl": jnp.ones((OUT, IN)),
    rf"{_to}\(4, 8, 16\)": lambda x: x,
    rf"{_to}\(4, 8\)": lambda x: x.sum(),
    r"q_proj: .* a weight of shape \(5, 16\)": _linear(IN, 5),
    r"q_proj: .* a weight of shape \(8, 7\)": _linear(7, OUT),
}


test_errors = refuses(ERRORS, lambda wrong: project("q_proj", wrong, jnp.asarray(_arrays()[0]), OUT))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_bias_has_a_gradient_summed_in_float32(dtype):
    """Over 4,096 rows; a sum in 16 bits loses the small terms."""
    random = np.random.default_rng(0)
    x, weight, bias, dy = (
        array(random.standard_normal(shape), dtype) for shape in ((4096, IN), (OUT, IN), (OUT,), (4096, OUT))
    )
    dbias = quick(jax.vjp(_projected, x, weight, bias)[1])(dy)[2]
    assert dbias.dtype == dtype
    assert_close(dbias, np.asarray(dy, np.float64).sum(0), dtype, name="bias")


# Fewer and more tokens than features.
@pytest.mark.parametrize(
    "tokens, biased, mapped", [(3, True, False), (3, False, True), (40, False, False), (40, True, True)]
)
def test_parts_of_a_projection(tokens, biased, mapped):
    linear = eqx.nn.Linear(IN, 3 * 8, use_bias=biased, key=jax.random.key(0))
    x = normal(1, (2, tokens, IN))
    layer = eqx.nn.Lambda(linear) if mapped else linear
    whole = project("in_proj", linear, x, 24).reshape(2, tokens, 3, 8)
    expected = [part.reshape(2, tokens, -1) for part in jnp.split(whole, [1, 5], axis=-1)]
    parts = project_parts("in_proj", layer, x, (1, 4, 3), 3)
    for part, wanted in zip(parts, expected, strict=True):
        assert_close(part, np.asarray(wanted, np.float64))


@pytest.mark.parametrize("tokens, other", [(2, "bias"), (2, None), (40, "dtype"), (40, "mapped"), (40, None)])
def test_narrow_projections_together(tokens, other):
    narrow: dict[str, Any] = {
        name: eqx.nn.Linear(IN, 4, use_bias=False, key=jax.random.key(i)) for i, name in enumerate("ab")
    }
    if other == "bias":
        narrow["b"] = eqx.nn.Linear(IN, 4, key=jax.random.key(1))
    if other == "dtype":
        narrow["b"] = eqx.nn.Linear(IN, 4, use_bias=False, dtype=jnp.bfloat16, key=jax.random.key(1))
    if other == "mapped":
        narrow["b"] = eqx.nn.Lambda(narrow["b"])
    x = normal(1, (2, tokens, IN))
    for name, part in zip(narrow, project_together(narrow, x, (4, 4)), strict=True):
        assert_close(part, np.asarray(project(name, narrow[name], x, 4), np.float64))


def test_parts_of_any_number_of_tokens():
    layer = eqx.nn.Linear(IN, OUT, key=jax.random.key(0))
    narrow = {"b": eqx.nn.Linear(IN, 4, use_bias=False, key=jax.random.key(1))}
    call = lambda x: (*project_parts("in_proj", layer, x, (5, 3)), *project_together(narrow, x, (4,)))
    of_any = jax.ShapeDtypeStruct(export.symbolic_shape(f"b, t, {IN}"), jnp.float32)
    program = export.export(jax.jit(call))(of_any)
    for shape in ((1, 1, IN), (2, 30, IN)):
        x = normal(2, shape)
        for part, expected in zip(program.call(x), call(x), strict=True):
            assert_close(part, expected)


def test_a_part_of_the_wrong_size():
    linear = eqx.nn.Linear(IN, 9, use_bias=False, key=jax.random.key(0))
    for tokens in (2, 40):
        x = jnp.zeros((tokens, IN))
        with pytest.raises(ValueError, match=r"in_proj: expected an equinox.nn.Linear from \[16\] to \[8\]"):
            project_parts("in_proj", linear, x, (4, 4))
        with pytest.raises(ValueError, match=r"b_proj: expected an equinox.nn.Linear from \[16\] to \[8\]"):
            project_together({"b_proj": linear}, x, (8,))


class Multiplied(eqx.Module):
    """A projection by a kernel."""

    weight: jax.Array
    product: ejx.GroupedMatmul

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.product(x[None], self.weight[None], jnp.ones(1, jnp.int32))[0]


@pytest.mark.slow
@pytest.mark.usefixtures("no_races")
def test_a_kernel_in_the_place_of_a_projection_whose_input_is_computed_again():
    layer = ejx.nn.GatedDeltaNet(IN, num_k_heads=1, head_dim=16, key=jax.random.key(0))
    product = Multiplied(layer.out_proj.weight.T, ejx.GroupedMatmul(platform="pallas-interpret"))
    x = normal(1, (3, IN))
    gradient = jax.jit(jax.grad(lambda x, layer: jnp.sum(jnp.sin(layer(x)))))
    found = gradient(x, eqx.tree_at(lambda m: m.out_proj, layer, product))
    assert_close(found, np.asarray(gradient(x, layer), np.float64), kind="gradient")


def test_which_rows_devices_share():
    """Those of explicit axes with several devices that do not split them."""

    def shared(kind, shape, *spec):
        mesh = meshes.mesh_of(kind, shape)
        x = jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, P(*spec)))
        found = []
        jax.jit(lambda x: found.append(is_shared(x)) or x)(x)
        return found[0]

    rows, heads = meshes.ROWS, meshes.HEADS
    assert shared("explicit", (2, 2), rows) and shared("explicit", (2, 2), None, heads)
    assert not shared("explicit", (2, 2), rows, heads) and not shared("explicit", (2, 2), (rows, heads))
    assert not shared("explicit", (4, 1), rows) and not shared("automatic", (2, 2), rows)
    assert not is_shared(jnp.ones(4))
