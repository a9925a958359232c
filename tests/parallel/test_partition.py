"""Splitting a function over a mesh along named axes, with any function for a kernel."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel_eqx.parallel import Axes, match_sharding, match_varying, output_shapes, partitioned, Split
from ejkernel_eqx.parallel.varying import varying_axes

COLLECTIVE = re.compile(
    r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit, "explicit without context": AxisType.Explicit}


def mesh_of(kind, shape=(4, 2)):
    return jax.make_mesh(shape, ("x", "y"), axis_types=(KINDS[kind],) * 2)


def context(kind, mesh):
    """`jax.make_mesh` is explicit by default, and arrays carry it in their types: no context is needed."""
    return contextlib.nullcontext() if "without" in kind else jax.set_mesh(mesh)


def grouped(q, k):
    """`[B, H, N], [B, K, N] -> [B, H, N]`: every query head reads its key head; the last axis mixes."""
    repeated = jnp.repeat(k, q.shape[1] // k.shape[1], axis=1)
    return jnp.cumsum(q, axis=-1) * repeated.sum(-1, keepdims=True)


def call(q, k, seen=None):
    def function(q, k):
        if seen is not None:
            seen.append((q.shape, k.shape))
        return grouped(q, k)

    # A lone key head is read by all, so it is none of the axes to split.
    key_axis = "K" if k.shape[1] > 1 else None
    axes = (Axes(("b0", "H", None)), Axes(("b0", key_axis, None)))
    outs = output_shapes(grouped, q, k)
    split = lambda name: name in ("b0", "H")
    return partitioned(function, (q, k), axes, outs, Axes(("b0", "H", None)), split=split, group=("H", "K"))


def inputs(batch=8, heads=8, kv_heads=4):
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.integers(-4, 5, (batch, n, 6)), jnp.float32) for n in (heads, kv_heads))


def run(kind, q_spec, k_spec, *, shape=(4, 2), **sizes):
    """The result, the compiled program's collectives, and the shapes that one device worked on."""
    q, k = inputs(**sizes)
    mesh, seen = mesh_of(kind, shape), []
    placed = jax.device_put(q, NamedSharding(mesh, q_spec)), jax.device_put(k, NamedSharding(mesh, k_spec))
    with context(kind, mesh):
        compiled = jax.jit(lambda q, k: call(q, k, seen)).lower(*placed).compile()
        out = compiled(*placed)
    np.testing.assert_array_equal(out, grouped(q, k))
    return out, COLLECTIVE.findall(compiled.as_text() or ""), seen[-1]


@pytest.mark.few(8)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "q_spec, k_spec, kv_heads, local",
    [
        (P("x"), P("x"), 4, ((2, 8, 6), (2, 4, 6))),
        (P(None, "y"), P(None, "y"), 4, ((8, 4, 6), (8, 2, 6))),
        (P("x", "y"), P("x", "y"), 4, ((2, 4, 6), (2, 2, 6))),
        (P("x", "y"), P("x", "y"), 8, ((2, 4, 6), (2, 4, 6))),
        (P("x", "y"), P("x"), 1, ((2, 4, 6), (2, 1, 6))),
        (P(("x", "y")), P(("x", "y")), 4, ((1, 8, 6), (1, 4, 6))),
        (P(), P(), 4, ((8, 8, 6), (8, 4, 6))),
    ],
)
def test_split_without_a_collective(kind, q_spec, k_spec, kv_heads, local):
    out, found, seen = run(kind, q_spec, k_spec, kv_heads=kv_heads)
    assert not found and seen == local
    assert out.sharding.is_equivalent_to(NamedSharding(out.sharding.mesh, q_spec), 3)


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_follow_the_first_that_is_split(kind):
    _, _, seen = run(kind, P("x"), P())
    assert seen == ((2, 8, 6), (2, 4, 6))
    _, _, seen = run(kind, P(), P("x", "y"))
    assert seen == ((2, 4, 6), (2, 2, 6))


@pytest.mark.parametrize("kind", KINDS)
def test_what_may_not_be_split_is_gathered(kind):
    _, found, seen = run(kind, P(None, None, "y"), P(None, None, "y"))
    assert set(found) == {"all-gather"} and seen == ((8, 8, 6), (8, 4, 6))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("q_spec, q_heads", [(P("x", "y"), 2), (P(None, ("x", "y")), 1)])
def test_fewer_key_heads_than_devices(kind, q_spec, q_heads):
    """Two key heads for four or eight devices along the heads: each device takes the one that it reads."""
    out, found, seen = run(kind, q_spec, P(q_spec[0]), shape=(2, 4), kv_heads=2)
    assert seen == ((4 if q_spec[0] else 8, q_heads, 6), (4 if q_spec[0] else 8, 1, 6)) and not found
    assert out.sharding.is_equivalent_to(NamedSharding(out.sharding.mesh, q_spec), 3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kv_heads, key_size", [(3, 3), (6, 6)])
def test_heads_that_devices_do_not_divide_stay_whole(kind, kv_heads, key_size):
    """Four devices, and three or six key heads."""
    _, _, seen = run(kind, P("x", "y"), P("x"), shape=(2, 4), heads=12, kv_heads=kv_heads)
    assert seen == ((4, 12, 6), (4, key_size, 6))


def total(q, k, bias, weight):
    """Gradients of `sum(weight * grouped(q, k) + bias)`: of the keys a sum over their heads, of the bias over rows, in bfloat16."""
    group = q.shape[1] // k.shape[1]
    dk = (jnp.cumsum(q, axis=-1) * weight).sum(-1, keepdims=True)
    dk = jnp.broadcast_to(dk.reshape(q.shape[0], k.shape[1], group, 1).sum(2), k.shape)
    return dk, weight.sum(0, keepdims=True).astype(bias.dtype)


@pytest.mark.few(5)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kv_heads, local", [(4, 1), (2, 1), (1, 1)])
def test_sums_over_split_axes_are_added_up(kind, kv_heads, local):
    """Nothing is computed twice, however few the heads are, and whatever the rows share."""
    q, k = inputs(kv_heads=kv_heads)
    bias, weight = jnp.zeros((1, *q.shape[1:]), jnp.bfloat16), inputs()[0] + 1
    mesh, seen = mesh_of(kind, (2, 4)), []

    def function(*arrays):
        seen.append(tuple(x.shape for x in arrays))
        return total(*arrays)

    key_axis = "K" if kv_heads > 1 else None
    axes = (
        Axes(("b0", "H", None)),
        Axes(("b0", key_axis, None)),
        Axes((None, "H", None)),
        Axes(("b0", "H", None)),
    )
    split = lambda name: name in ("b0", "H")

    def call(*arrays):
        outs = output_shapes(total, *arrays)
        return partitioned(
            function, arrays, axes, outs, axes[1:3], split=split, group=("H", "K"), summed=True
        )

    specs = (P("x", "y"), P("x", "y" if kv_heads == 4 else None), P(None, "y"), P("x", "y"))
    placed = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip((q, k, bias, weight), specs)]
    with context(kind, mesh):
        dk, dbias = jax.jit(call)(*placed)
    expected = total(q, k, bias, weight)
    np.testing.assert_array_equal(dk, expected[0])
    np.testing.assert_array_equal(dbias, expected[1])
    assert dbias.dtype == jnp.bfloat16
    assert seen[-1] == ((4, 2, 6), (4, local, 6), (1, 2, 6), (4, 2, 6))


def test_a_call_that_the_compiler_cannot_carry_is_whole_where_it_splits():
    q, k = inputs()
    mesh = mesh_of("auto")
    placed = jax.device_put(q, NamedSharding(mesh, P("x"))), k
    axes, outs = (Axes(("b0", None, None)),) * 2, output_shapes(grouped, q, k)
    call = lambda q, k: partitioned(
        grouped, (q, k), axes, outs, axes[0], split=lambda name: True, group=(), meshes=Split.EXPLICIT
    )
    assert "custom_partitioning" not in str(jax.make_jaxpr(call)(*placed))
    np.testing.assert_array_equal(jax.jit(call)(*placed), grouped(q, k))


def test_sizes_that_do_not_divide_stay_whole():
    q, k = inputs(batch=6)
    mesh, seen = mesh_of("auto"), []
    placed = jax.device_put(q, NamedSharding(mesh, P(None, "y"))), k
    out = jax.jit(lambda q, k: call(q, k, seen))(*placed)
    np.testing.assert_array_equal(out, grouped(q, k))
    assert seen[-1] == ((6, 4, 6), (6, 2, 6))


def test_inside_shard_map_it_is_the_function_itself():
    q, k = inputs()
    mesh, seen = mesh_of("auto"), []
    spec = P("x", "y")
    mapped = jax.shard_map(lambda q, k: call(q, k, seen), mesh=mesh, in_specs=(spec, spec), out_specs=spec)
    np.testing.assert_array_equal(jax.jit(mapped)(q, k), grouped(q, k))
    assert seen == [((2, 4, 6), (2, 2, 6))]
    jaxpr = str(jax.make_jaxpr(mapped)(q, k))
    assert "custom_partitioning" not in jaxpr and "custom_partitioning" in str(jax.make_jaxpr(call)(q, k))


def test_output_shapes_ignore_the_mesh():
    mesh = mesh_of("explicit")
    q, k = (jax.device_put(x, NamedSharding(mesh, P("x", "y"))) for x in inputs())
    with jax.set_mesh(mesh):
        shape = output_shapes(grouped, q, k)
    assert shape.shape == (8, 8, 6) and shape.dtype == jnp.float32


def test_match_sharding():
    mesh = mesh_of("explicit")
    x = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P("x")))
    y = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P("x", "y")))
    with jax.set_mesh(mesh):
        assert jax.typeof(match_sharding(x, y)).sharding.spec == P("x", "y")
        assert match_sharding(x, x) is x
    assert match_sharding(inputs()[0], inputs()[0]) is not None


def test_match_varying():
    mesh = mesh_of("auto")
    found = {}

    def body(x, y):
        marked, both = match_varying((jnp.zeros(3), x), (x, y))
        found.update(
            zero=varying_axes(jnp.zeros(3)),
            x=varying_axes(x),
            marked=varying_axes(marked),
            both=varying_axes((both,)),
        )
        return x + marked.sum() + both + y

    x = jnp.ones((4, 2))
    jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(P("x"), P("x", "y")), out_specs=P("x", "y")))(
        x[:, :1], x
    )
    assert found == dict(zero=frozenset(), x={"x"}, marked={"x", "y"}, both={"x", "y"})
    assert varying_axes(x) == frozenset() and match_varying(x, x) is x
