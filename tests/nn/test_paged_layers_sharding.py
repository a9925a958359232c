"""Layers over pages on several devices: heads of pages and states over some, independent caches over others. Nothing of a cache moves."""

import collections
import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel_eqx import RaggedBatch
from tests.attention.dense import INTERPRET
from tests.nn import recurrent_layers
from tests.nn.paged_layers import attention, in_place, inputs, new_caches, PAGE, PAGES, side_by_side, SLOTS
from tests.recurrence.quick import quick
from tests.tolerances import assert_close

COLLECTIVE = re.compile(
    r"= (.*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)
BATCHES = {"decode": ([1, 1, 0], [3, 5, 0]), "mixed": ([6, 1, 2], [6, 4, 5])}


def collectives(compiled):
    """What is sent, `(type, how)`; but for single numbers, such as where a loop over all ends."""
    found = COLLECTIVE.findall(compiled.as_text() or "")
    return collections.Counter((kind, how) for kind, how in found if not re.match(r"\w+\[\]", kind))


def mesh_of(kind=AxisType.Auto, **sizes):
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))


def place(mesh, tree, spec):
    return jax.tree.map(
        lambda x: jax.device_put(x, NamedSharding(mesh, spec)) if eqx.is_array(x) else x, tree
    )


def batch_of(name, seed=0):
    random = np.random.default_rng(seed)
    lens, lengths = BATCHES[name]
    tables, slots = random.permutation(PAGES)[:9].reshape(3, 3), random.permutation(SLOTS)[:3]
    return RaggedBatch.build(lens, lengths, tables, page_size=PAGE, state_indices=slots)


def tokens_of(batch, row=0):
    return jnp.asarray(inputs()[row, : batch.num_tokens])


def filled(caches, seed=1):
    """Something in all places, of which scales are positive."""
    random = np.random.default_rng(seed)

    def draw(x):
        if x.dtype == jnp.int8:
            return jnp.asarray(random.integers(-127, 127, x.shape), x.dtype)
        return jnp.asarray(np.abs(random.standard_normal(x.shape)) / 50, x.dtype)

    return jax.tree.map(draw, caches)


def assert_same(got, expected):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        if a.dtype == jnp.int8:
            assert np.abs(np.asarray(a, np.int32) - np.asarray(b, np.int32)).max() <= 1
        else:
            assert_close(a, b)


def assert_placed_alike(got, given):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(given), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim), (a.sharding, b.sharding)


@pytest.mark.slow
@pytest.mark.parametrize(("pages", "name"), [("float32", "decode"), (("float32", "int8"), "mixed")])
def test_heads_of_pages_stay_where_they_are(pages, name):
    """Weights and pages by heads: the one sum over heads, at the end, is all that is sent."""
    layer, batch = attention("norm, sinks, window"), batch_of(name)
    cache, x = filled(layer.init_paged_cache(PAGES, PAGE, dtype=pages)), tokens_of(batch)
    mesh = mesh_of(heads=2)
    sharded = place(mesh, layer, P())
    for where, spec in (
        (lambda p: [p.q_proj, p.k_proj, p.v_proj], P("heads")),
        (lambda p: p.o_proj.weight, P(None, "heads")),
    ):
        sharded = eqx.tree_at(where, sharded, place(mesh, where(layer), spec))
    arrays, static = eqx.partition(sharded, eqx.is_array)
    call = quick(lambda own, x, cache, batch: eqx.combine(own, static)(x, cache, batch=batch))
    expected = call(eqx.filter(layer, eqx.is_array), x, cache, batch)
    by_heads = place(mesh, cache, P(None, None, "heads"))
    placed = arrays, place(mesh, x, P()), by_heads, place(mesh, batch, P())
    compiled = call.lower(*placed).compile()
    got = compiled(*placed)
    assert_same(got, expected)
    assert_placed_alike(got[1], by_heads)
    assert [how for (_, how), count in collectives(compiled).items() for _ in range(count)] == ["all-reduce"]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [("mamba2", "decode"), ("qwen3-next", "mixed")])
def test_heads_of_states_stay_where_they_are(kind, name):
    layer, batch, mesh = recurrent_layers.build(kind), batch_of(name), mesh_of(heads=2)
    pool, x = filled(layer.init_state(SLOTS)), tokens_of(batch)
    call = quick(lambda x, pool, batch: layer(x, pool, batch=batch))
    by_heads = with_states(place(mesh, pool, P()), place(mesh, pool.recurrent, P(None, "heads")))
    placed = place(mesh, x, P()), by_heads, place(mesh, batch, P())
    compiled = call.lower(*placed).compile()
    got = compiled(*placed)
    assert_same(got, call(x, pool, batch))
    assert_placed_alike(got[1].recurrent, by_heads.recurrent)
    whole = "f32[" + ",".join(map(str, pool.recurrent.shape))
    assert not any(shape.startswith(whole) for shape, _ in collectives(compiled))


def with_states(pool, states):
    return eqx.tree_at(lambda s: s.recurrent, pool, states)


def of_two(name):
    """Two caches of the hybrid model, and a batch for each."""
    batches = [batch_of(name, seed) for seed in (0, 1)]
    x = jnp.stack([tokens_of(batch, row) for row, batch in enumerate(batches)])
    return x, side_by_side(*(filled(new_caches(), seed) for seed in (2, 3))), side_by_side(*batches)


@functools.cache
def each_alone():
    """What the model gives for both, one by one."""
    one, two = quick(in_place), of_two("mixed")
    return side_by_side(*(one(*jax.tree.map(lambda x, n=n: x[n], two)) for n in range(2)))


@pytest.mark.slow
def test_independent_caches_are_served_where_they_are():
    """A model on every device, whose caches never leave it: by `vmap` over what is sharded, and by `shard_map`."""
    mesh = mesh_of(replicas=2)
    placed = place(mesh, of_two("mixed"), P("replicas"))
    compiled = quick(jax.vmap(in_place)).lower(*placed).compile()
    got = compiled(*placed)
    assert_same(got, each_alone())
    assert_placed_alike(got[1], placed[1])
    assert not collectives(compiled)

    def local(*own):
        return jax.tree.map(lambda x: x[None], in_place(*jax.tree.map(lambda x: x[0], own)))

    mapped = jax.shard_map(local, mesh=mesh, in_specs=P("replicas"), out_specs=P("replicas"))
    got = quick(mapped, donate_argnums=1)(*placed)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(placed[1]))
    assert_same(got, each_alone())


@pytest.mark.slow
def test_one_batch_for_all_caches_inside_shard_map():
    """Pages differ from device to device, tables and tokens do not."""
    x, caches, batch = of_two("decode")
    x, batch = jax.tree.map(lambda x: x[0], (x, batch))

    def local(x, caches, batch):
        x = jax.lax.pcast(x, "replicas", to="varying")  # as it is after the first layer
        return jax.tree.map(lambda x: x[None], in_place(x, jax.tree.map(lambda x: x[0], caches), batch))

    specs, over = (P(), P("replicas"), P()), P("replicas")
    mapped = jax.shard_map(local, mesh=mesh_of(replicas=2), in_specs=specs, out_specs=over)
    assert_same(quick(mapped)(x, caches, batch), quick(jax.vmap(in_place, (None, 0, None)))(x, caches, batch))


@pytest.mark.slow
def test_replicas_and_heads_together():
    x, caches, batch = of_two("mixed")
    mesh = mesh_of(replicas=2, heads=2)
    pages, states = caches.layers
    by_heads = place(mesh, pages, P("replicas", None, None, None, "heads"))
    of_heads = place(mesh, states.recurrent, P("replicas", None, None, "heads"))
    caches = caches.with_layers([by_heads, with_states(place(mesh, states, P("replicas")), of_heads)])
    x, batch = place(mesh, (x, batch), P("replicas"))
    got = quick(jax.vmap(in_place))(x, caches, batch)
    assert_same(got, each_alone())
    assert_placed_alike(got[1].layers[0], by_heads)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "way", "platform"),
    [
        ("attention", "types", INTERPRET),
        ("mamba", "shard_map", INTERPRET),
        ("qwen3-next", "shard_map", "xla"),
        ("qwen3-next", "types", INTERPRET),
    ],
)
def test_chunks_where_types_say_shardings(kind, way, platform):
    """On a mesh of explicit axes, and inside `shard_map`."""
    batches = [batch_of("mixed", seed) for seed in (0, 1)]
    if kind == "attention":
        layer = attention("norm, sinks, window", platform=platform)
        cache = filled(layer.init_paged_cache(PAGES, PAGE))
    else:
        layer = recurrent_layers.build(kind, platform=platform)
        cache = filled(layer.init_state(SLOTS))
    given = side_by_side(*map(tokens_of, batches)), side_by_side(cache, cache), side_by_side(*batches)
    call = jax.vmap(lambda x, cache, batch: layer(x, cache, batch=batch))
    expected, over = quick(call)(*given), P("replicas")
    mesh = mesh_of(AxisType.Explicit if way == "types" else AxisType.Auto, replicas=2)
    if way == "types":
        with jax.set_mesh(mesh):
            got = quick(call)(*place(mesh, given, over))
        assert_placed_alike(got[1], place(mesh, given[1], over))
    else:
        got = quick(jax.shard_map(call, mesh=mesh, in_specs=(over,) * 3, out_specs=over))(*given)
    assert_same(got, expected)


def test_pages_and_slots_are_copied_where_they_are():
    _, caches, _ = of_two("decode")
    copy = jax.vmap(lambda c, source, target: c.copy_pages(source, target).copy_states(target, source))
    numbers = jnp.array([[3, -1, 4], [0, 2, 1]]), jnp.array([[1, 0, 2], [4, 3, -1]])
    sharded = place(mesh_of(replicas=2), (caches, *numbers), P("replicas"))
    compiled = quick(copy).lower(*sharded).compile()
    both = compiled(*sharded), quick(copy)(caches, *numbers)
    assert eqx.tree_equal(*(jax.tree.map(np.asarray, caches) for caches in both))
    assert not collectives(compiled)
