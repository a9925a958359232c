"""Splitting a function over a mesh along named axes, with any function for a kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel_eqx.parallel import Axes, match_sharding, match_varying, output_shapes, partitioned, Split
from ejkernel_eqx.parallel.partition import whole_axes
from tests import meshes
from tests.arrays import array

KINDS = ("automatic", "explicit without context")
SPLIT = lambda name: name in ("b0", "H")
GROUP = ("H", "K")
on_each_kind = pytest.mark.parametrize("kind", KINDS)


def grouped(q, k):
    """`[B, H, N], [B, K, N] -> [B, H, N]`: every query head reads its key head; the last axis mixes."""
    repeated = jnp.repeat(k, q.shape[1] // k.shape[1], axis=1)
    return jnp.cumsum(q, axis=-1) * repeated.sum(-1, keepdims=True)


def call(q, k, seen=None, **options):
    def function(q, k):
        if seen is not None:
            seen.append((q.shape, k.shape))
        return grouped(q, k)

    # A lone key head is read by all, so it is none of the axes to split.
    key_axis = "K" if k.shape[1] > 1 else None
    axes = (Axes(("b0", "H", None)), Axes(("b0", key_axis, None)))
    return partitioned(
        function, (q, k), axes, output_shapes(grouped, q, k), axes[0], split=SPLIT, group=GROUP, **options
    )


def inputs(batch=8, heads=8, kv_heads=4):
    rng = np.random.default_rng(0)
    return tuple(array(rng.integers(-4, 5, (batch, n, 6)), jnp.float32) for n in (heads, kv_heads))


def run(kind, q_spec, k_spec, *, shape=(4, 2), **sizes):
    """The result, the compiled program's collectives, and the shapes that one device worked on."""
    q, k = inputs(**sizes)
    mesh, seen = meshes.mesh_of(kind, shape), []
    placed = meshes.place(mesh, (q, k), (q_spec, k_spec))
    compiled = jax.jit(lambda q, k: call(q, k, seen)).lower(*placed).compile()
    out = compiled(*placed)
    np.testing.assert_array_equal(out, grouped(q, k))
    return out, set(meshes.collectives(compiled)), seen[-1]


@on_each_kind
@pytest.mark.parametrize(
    "q_spec, k_spec, kv_heads, local",
    [
        (P(None, "tp"), P(None, "tp"), 4, ((8, 4, 6), (8, 2, 6))),
        (P("dp", "tp"), P("dp", "tp"), 8, ((2, 4, 6), (2, 4, 6))),
        (P("dp", "tp"), P("dp"), 1, ((2, 4, 6), (2, 1, 6))),
        (P(("dp", "tp")), P(("dp", "tp")), 4, ((1, 8, 6), (1, 4, 6))),
        # Arguments follow the first that is split.
        (P("dp"), P(), 4, ((2, 8, 6), (2, 4, 6))),
    ],
)
def test_split_without_a_collective(kind, q_spec, k_spec, kv_heads, local):
    out, found, seen = run(kind, q_spec, k_spec, kv_heads=kv_heads)
    assert not found and seen == local
    assert meshes.lies(out, out.sharding.mesh, q_spec)


@on_each_kind
def test_what_may_not_be_split_is_gathered(kind):
    _, found, seen = run(kind, P(None, None, "tp"), P(None, None, "tp"))
    assert found == {"all-gather"} and seen == ((8, 8, 6), (8, 4, 6))


@on_each_kind
@pytest.mark.parametrize("q_spec, q_heads", [(P("dp", "tp"), 2), (P(None, ("dp", "tp")), 1)])
def test_fewer_key_heads_than_devices(kind, q_spec, q_heads):
    """Two key heads for four or eight devices along the heads: each device takes the one that it reads."""
    out, found, seen = run(kind, q_spec, P(q_spec[0]), shape=(2, 4), kv_heads=2)
    rows = 4 if q_spec[0] else 8
    assert seen == ((rows, q_heads, 6), (rows, 1, 6)) and not found
    assert meshes.lies(out, out.sharding.mesh, q_spec)


@on_each_kind
def test_sizes_that_devices_do_not_divide_stay_whole(kind):
    """Three key heads on four devices; and six rows that follow keys."""
    _, _, seen = run(kind, P("dp", "tp"), P("dp"), shape=(2, 4), heads=12, kv_heads=3)
    assert seen == ((4, 12, 6), (4, 3, 6))
    _, _, seen = run(kind, P(None, "tp"), P(), batch=6)
    assert seen == ((6, 4, 6), (6, 2, 6))


def total(q, k, bias, weight):
    """Gradients of `sum(weight * grouped(q, k) + bias)`: of the keys a sum over their heads, of the bias over rows, in bfloat16."""
    group = q.shape[1] // k.shape[1]
    dk = (jnp.cumsum(q, axis=-1) * weight).sum(-1, keepdims=True)
    dk = jnp.broadcast_to(dk.reshape(q.shape[0], k.shape[1], group, 1).sum(2), k.shape)
    return dk, weight.sum(0, keepdims=True).astype(bias.dtype)


def test_heads_over_a_part_of_an_axis_stay_whole():
    """The compiler splits the axis of 4 devices between two heads and their elements, where features become heads."""
    mesh, features = meshes.mesh_of("automatic", (2, 4)), array(np.arange(8 * 16).reshape(8, 16), jnp.float32)
    heads, seen = lambda x: x.reshape(8, 2, 8), []
    placed = meshes.place(mesh, features, P("dp", "tp"))
    out = jax.jit(lambda x: call(heads(x), heads(x), seen))(placed)
    np.testing.assert_array_equal(out, grouped(heads(features), heads(features)))
    assert seen[-1] == ((4, 2, 8), (4, 2, 8))


SPECS = [P(), P("a"), P("b", "c"), P(("c", "a"), None, "b"), P(None, ("a", "b", "c")), P(("b", "a"), "c")]


@pytest.mark.parametrize("shape", [(2, 2, 2), (4, 1, 2)], ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_axes_of_a_sharding(shape, spec):
    mesh = jax.make_mesh(shape, ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
    names = lambda entry: (entry,) if isinstance(entry, str) else entry or ()
    wanted = [tuple(name for name in names(entry) if mesh.shape[name] > 1) for entry in spec]
    x = jax.ShapeDtypeStruct((8, 8, 8), jnp.float32, sharding=NamedSharding(mesh, spec))
    assert whole_axes(mesh, x) == (*wanted, *[()] * (3 - len(wanted)))


@on_each_kind
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_sums_over_split_axes_are_added_up(kind, kv_heads):
    """Nothing is computed twice, however few the heads are, and whatever the rows share."""
    q, k = inputs(kv_heads=kv_heads)
    bias, weight = jnp.zeros((1, *q.shape[1:]), jnp.bfloat16), inputs()[0] + 1
    mesh, seen = meshes.mesh_of(kind, (2, 4)), []

    def function(*arrays):
        seen.append(tuple(x.shape for x in arrays))
        return total(*arrays)

    key_axis = "K" if kv_heads > 1 else None
    of_queries = Axes(("b0", "H", None))
    axes = (of_queries, Axes(("b0", key_axis, None)), Axes((None, "H", None)), of_queries)

    def call(*arrays):
        outs = output_shapes(total, *arrays)
        return partitioned(function, arrays, axes, outs, axes[1:3], split=SPLIT, group=GROUP, summed=True)

    specs = (P("dp", "tp"), P("dp", "tp" if kv_heads == 4 else None), P(None, "tp"), P("dp", "tp"))
    dk, dbias = jax.jit(call)(*meshes.place(mesh, (q, k, bias, weight), specs))
    expected = total(q, k, bias, weight)
    np.testing.assert_array_equal(dk, expected[0])
    np.testing.assert_array_equal(dbias, expected[1])
    assert dbias.dtype == jnp.bfloat16
    assert seen[-1] == ((4, 2, 6), (4, 1, 6), (1, 2, 6), (4, 2, 6))


def test_a_call_that_the_compiler_cannot_carry_is_whole_where_it_splits():
    q, k = inputs()
    placed = meshes.place(meshes.mesh_of("automatic"), (q, k), (P("dp"), P()))
    whole = lambda q, k: call(q, k, meshes=Split.EXPLICIT)
    assert "custom_partitioning" not in str(jax.make_jaxpr(whole)(*placed))
    np.testing.assert_array_equal(jax.jit(whole)(*placed), grouped(q, k))


def test_inside_shard_map_it_is_the_function_itself():
    (q, k), seen, spec = inputs(), [], P("dp", "tp")
    options = {"mesh": meshes.mesh_of("automatic", (4, 2)), "in_specs": (spec, spec), "out_specs": spec}
    mapped = jax.shard_map(lambda q, k: call(q, k, seen), **options)
    np.testing.assert_array_equal(jax.jit(mapped)(q, k), grouped(q, k))
    assert seen == [((2, 4, 6), (2, 2, 6))]
    jaxpr = str(jax.make_jaxpr(mapped)(q, k))
    assert "custom_partitioning" not in jaxpr and "custom_partitioning" in str(jax.make_jaxpr(call)(q, k))


def test_shardings_in_types():
    mesh = meshes.mesh_of("explicit")
    x, y = meshes.place(mesh, (jnp.ones((8, 8)), jnp.ones((8, 8))), (P("dp"), P("dp", "tp")))
    with jax.set_mesh(mesh):
        assert jax.typeof(match_sharding(x, y)).sharding.spec == P("dp", "tp")
        assert match_sharding(x, x) is x
        shape = output_shapes(jnp.add, x, x)  # which ignore the mesh
    assert shape.shape == (8, 8) and shape.dtype == jnp.float32


def test_a_carry_varies_as_what_is_added_to_it():
    """Over one axis of the mesh for `x`, and over both for `y`."""

    def body(x, y):
        first = match_varying((jnp.zeros(()), x.sum()), (x, y))
        step = lambda carry, _: (jax.tree.map(lambda c: c + x.sum() * y.sum(), carry), None)
        (zero, own), _ = jax.lax.scan(step, first, None, 3)
        return (zero + own + y.sum()).reshape(1, 1)

    mesh, x, y = meshes.mesh_of("automatic"), jnp.arange(4.0).reshape(4, 1), jnp.arange(8.0).reshape(4, 2)
    specs = (P("dp"), P("dp", "tp"))
    found = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("dp", "tp")))(x, y)
    a, b = np.asarray(x).reshape(2, 2, 1).sum(1), np.asarray(y).reshape(2, 2, 2).sum(1)
    np.testing.assert_allclose(found, 6 * a * b + a + b)
    assert match_varying(x, x) is x
