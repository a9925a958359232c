"""The activations of gated MLPs: their values and gradients, what is kept for these, and how they compose."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ejkernel_eqx import Backend
from ejkernel_eqx.nn import activations
from ejkernel_eqx.nn.activations import ACTIVATIONS, gated
from tests import meshes
from tests.arrays import array
from tests.attention.dense import quick
from tests.meshes import HEADS, ROWS
from tests.nn.experts import act
from tests.tolerances import assert_close

by_name = pytest.mark.parametrize("name", ACTIVATIONS)


def make(*shape: int, dtype: str = "float32") -> tuple[jax.Array, ...]:
    """Gate and up, of which some are clipped, and a cotangent."""
    rng = np.random.default_rng(0)
    return tuple(array(scale * rng.standard_normal(shape), dtype) for scale in (4, 4, 1))


def results(function: Any, gate: jax.Array, up: jax.Array, dout: jax.Array) -> tuple[jax.Array, ...]:
    """The result and both gradients."""
    out, pull = jax.vjp(function, gate, up)
    return out, *pull(dout)


@pytest.fixture(params=[Backend.CPU, Backend.GPU], ids=["as on a CPU", "as on a GPU"])
def place(request, monkeypatch):
    """What calls are traced for."""
    monkeypatch.setattr(activations, "place_of_calls", lambda: (request.param, "some device"))
    return request.param


@pytest.mark.few(5)
@pytest.mark.parametrize("shape, dtype", [((3, 5, 17), "float32"), ((33,), "bfloat16")])
@by_name
def test_values_and_gradients(name, shape, dtype, place):
    arrays = make(*shape, dtype=dtype)
    found = quick(lambda *a: results(lambda *b: gated(name, *b), *a))(*arrays)
    with jax.enable_x64(True):
        wide = (jnp.asarray(np.asarray(x, np.float64)) for x in arrays)
        expected = quick(lambda *a: results(lambda *b: act(name, *b), *a))(*wide)
        expected = jax.tree.map(np.asarray, expected)
    for n, (x, wanted) in enumerate(zip(found, expected, strict=True)):
        assert x.dtype == dtype
        assert_close(x, wanted, dtype, "gradient" if n else "forward")


@by_name
def test_the_same_as_the_plain_formula_bit_for_bit(name, place):
    arrays = make(4, 40, dtype="bfloat16")
    plain = quick(lambda *a: results(lambda *b: activations._gated(name, *b), *a))(*arrays)
    found = quick(lambda *a: results(lambda *b: gated(name, *b), *a))(*arrays)
    for x, wanted in zip(found, plain, strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(wanted, np.float32))


@by_name
def test_only_gate_and_up_are_kept(name, place):
    gate, up, _ = make(4, 6)
    _, pull = jax.vjp(lambda *a: gated(name, *a), gate, up)
    assert len([x for x in jax.tree.leaves(pull) if getattr(x, "shape", None) == (4, 6)]) == 2


def test_a_barrier_only_for_gradients_on_gpus(place):
    gate, up, dout = make(4, 6)
    forward = str(jax.make_jaxpr(lambda *a: gated("silu", *a))(gate, up))
    both = str(jax.make_jaxpr(lambda *a: results(lambda *b: gated("silu", *b), *a))(gate, up, dout))
    assert "optimization_barrier" not in forward
    assert ("optimization_barrier" in both) == (place is Backend.GPU)


def test_composes(place):
    """`vmap`, one array mapped or learned alone, `scan` under `checkpoint`, forward mode and second derivatives."""
    gate, up, dout = make(3, 4, 6)
    one = lambda gate, up, dout: results(lambda *b: gated("silu", *b), gate, up, dout)
    wanted = quick(one)(gate, up, dout)
    for x, y in zip(quick(jax.vmap(one, (1, 1, 1), 1))(gate, up, dout), wanted, strict=True):
        assert_close(x, y, kind="gradient")
    few = quick(jax.vmap(one, (0, None, 0)))(gate, up[0], dout)
    same = quick(one)(gate, jnp.broadcast_to(up[0], up.shape), dout)
    for x, y in zip(few, same, strict=True):
        assert_close(x, y, kind="gradient")
    alone = quick(jax.grad(lambda gate: (gated("silu", gate, up) * dout).sum()))(gate)
    assert_close(alone, wanted[1], kind="gradient")
    _, forward = quick(lambda *a: jax.jvp(lambda x: gated("silu", x, up), a[:1], a[1:]))(gate, dout)
    assert_close(forward, wanted[1], kind="gradient")

    def loss(x, scanned):
        layer = lambda x, w: (jax.checkpoint(lambda *a: gated("silu", *a))(x, w * x), None)
        if scanned:
            return (jax.lax.scan(layer, x, jnp.arange(1.0, 3.0))[0] * dout).sum()
        return (layer(layer(x, 1.0)[0], 2.0)[0] * dout).sum()

    found, plain = (quick(jax.grad(loss), static_argnums=1)(gate / 4, s) for s in (True, False))
    assert_close(found, plain, kind="gradient")
    second = quick(jax.grad(lambda x: (jax.grad(lambda y: (gated("silu", y, y) * dout).sum())(x)).sum()))(
        gate
    )
    slope = quick(jax.grad(lambda x: (jax.grad(lambda y: (act("silu", y, y) * dout).sum())(x)).sum()))
    assert_close(second, slope(gate), kind="gradient")


@pytest.mark.parametrize("kind", meshes.KINDS)
def test_nothing_is_exchanged_on_a_mesh(kind, place):
    arrays = make(4, 6, 8)
    function = lambda *a: results(lambda *b: gated("gelu_tanh", *b), *a)
    mesh, spec = meshes.mesh_of(kind), P(ROWS, None, HEADS)
    placed = meshes.place(mesh, arrays, (spec,) * 3)
    with meshes.context(kind, mesh):
        compiled = jax.jit(function).lower(*placed).compile()
        found = compiled(*placed)
    assert not meshes.collectives(compiled)
    meshes.agree(found, jax.jit(function)(*arrays), "gradient")
    assert all(meshes.lies(x, mesh, spec) for x in found)


def test_empty_arrays(place):
    x = jnp.ones((0, 4))
    assert [y.shape for y in results(lambda *a: gated("silu", *a), x, x, x)] == [(0, 4)] * 3
