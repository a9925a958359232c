"""Layers over pages on several devices: heads of pages and states over some, independent caches over others. Nothing of a cache moves."""

import collections
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
from tests.nn.paged_layers import attention, in_place, inputs, new_caches, PAGE, PAGES, SLOTS
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
    return RaggedBatch.build(
        lens,
        lengths,
        random.permutation(PAGES)[:9].reshape(3, 3),
        page_size=PAGE,
        state_indices=random.permutation(SLOTS)[:3],
    )


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
@pytest.mark.parametrize(
    ("pages", "name"), [("float32", "decode"), ("int8", "mixed"), (("float32", "int8"), "mixed")]
)
def test_heads_of_pages_stay_where_they_are(pages, name):
    """Weights and pages by heads: the one sum over heads, at the end, is all that is sent."""
    layer, batch = attention("norm, sinks, window"), batch_of(name)
    cache, x = filled(layer.init_paged_cache(PAGES, PAGE, dtype=pages)), tokens_of(batch)
    mesh = mesh_of(heads=2)
    weights = lambda p: [p.q_proj, p.k_proj, p.v_proj]
    sharded = place(mesh, layer, P())
    sharded = eqx.tree_at(weights, sharded, place(mesh, weights(layer), P("heads")))
    out = lambda p: p.o_proj.weight
    sharded = eqx.tree_at(out, sharded, place(mesh, out(layer), P(None, "heads")))
    pages_by_heads = place(mesh, cache, P(None, None, "heads"))
    arrays, static = eqx.partition(sharded, eqx.is_array)
    call = lambda own, x, cache, batch: eqx.combine(own, static)(x, cache, batch=batch)
    expected = quick(call)(eqx.filter(layer, eqx.is_array), x, cache, batch)
    given = arrays, place(mesh, x, P()), pages_by_heads, place(mesh, batch, P())
    compiled = quick(call).lower(*given).compile()
    y, new = compiled(*given)
    assert_close(y, expected[0])
    assert_same(new, expected[1])
    assert_placed_alike(new, pages_by_heads)
    assert {how for _, how in collectives(compiled)} <= {"all-reduce"}
    assert sum(collectives(compiled).values()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [("mamba2", "decode"), ("qwen3-next", "mixed")])
def test_heads_of_states_stay_where_they_are(kind, name):
    layer, batch = recurrent_layers.build(kind), batch_of(name)
    pool, x = filled(layer.init_state(SLOTS)), tokens_of(batch)
    mesh = mesh_of(heads=2)
    call = lambda x, pool, batch: layer(x, pool, batch=batch)
    expected = quick(call)(x, pool, batch)
    by_heads = eqx.tree_at(
        lambda s: s.recurrent, place(mesh, pool, P()), place(mesh, pool.recurrent, P(None, "heads"))
    )
    given = place(mesh, x, P()), by_heads, place(mesh, batch, P())
    compiled = quick(call).lower(*given).compile()
    y, new = compiled(*given)
    assert_close(y, expected[0])
    assert_same(new, expected[1])
    assert_placed_alike(new.recurrent, by_heads.recurrent)
    whole = "f32[" + ",".join(map(str, pool.recurrent.shape))
    assert not any(shape.startswith(whole) for shape, _ in collectives(compiled))


def of_two(name):
    """Two caches of the hybrid model, and a batch for each."""
    batches = [batch_of(name, seed) for seed in (0, 1)]
    x = jnp.stack([tokens_of(batch, row) for row, batch in enumerate(batches)])
    caches = [filled(new_caches(), seed) for seed in (2, 3)]
    stack = lambda *trees: jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
    return x, stack(*caches), stack(*batches)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixed"])
def test_independent_caches_are_served_where_they_are(name):
    """A model on every device, whose caches never leave it: by `vmap` over what is sharded, and by `shard_map`."""
    x, caches, batch = of_two(name)
    mesh = mesh_of(replicas=2)
    call = jax.vmap(in_place)
    y, new = quick(call)(x, caches, batch)
    given = place(mesh, (x, caches, batch), P("replicas"))
    compiled = quick(call).lower(*given).compile()
    got = compiled(*given)
    assert_close(got[0], y)
    assert_same(got[1], new)
    assert_placed_alike(got[1], given[1])
    assert not collectives(compiled)

    def local(x, caches, batch):
        first = lambda tree: jax.tree.map(lambda x: x[0], tree)
        return jax.tree.map(lambda x: x[None], in_place(first(x), first(caches), first(batch)))

    mapped = jax.shard_map(local, mesh=mesh, in_specs=P("replicas"), out_specs=P("replicas"))
    got = quick(mapped, donate_argnums=1)(*given)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given[1]))
    assert_close(got[0], y)
    assert_same(got[1], new)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decode"])
def test_one_batch_for_all_caches_inside_shard_map(name):
    """Pages differ from device to device, tables and tokens do not."""
    x, caches, batch = of_two(name)
    x, batch = jax.tree.map(lambda x: x[0], (x, batch))
    mesh = mesh_of(replicas=2)
    y, new = quick(jax.vmap(in_place, (None, 0, None)))(x, caches, batch)

    def local(x, caches, batch):
        x = jax.lax.pcast(x, "replicas", to="varying")  # as it is after the first layer
        return jax.tree.map(lambda x: x[None], in_place(x, jax.tree.map(lambda x: x[0], caches), batch))

    specs = (P(), P("replicas"), P())
    got = quick(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("replicas")))(x, caches, batch)
    assert_close(got[0], y)
    assert_same(got[1], new)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixed"])
def test_replicas_and_heads_together(name):
    x, caches, batch = of_two(name)
    mesh = mesh_of(replicas=2, heads=2)
    pages, states = caches.layers
    by_heads = place(mesh, pages, P("replicas", None, None, None, "heads"))
    states = eqx.tree_at(
        lambda s: s.recurrent,
        place(mesh, states, P("replicas")),
        place(mesh, states.recurrent, P("replicas", None, None, "heads")),
    )
    call = jax.vmap(in_place)
    y, new = quick(call)(x, caches, batch)
    given = (
        place(mesh, x, P("replicas")),
        caches.with_layers([by_heads, states]),
        place(mesh, batch, P("replicas")),
    )
    got = quick(call)(*given)
    assert_close(got[0], y)
    assert_same(got[1], new)
    assert_placed_alike(got[1].layers[0], by_heads)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "platform"), [("mixed", "xla"), ("decode", INTERPRET)])
def test_attention_where_types_say_shardings(name, platform):
    """On a mesh of explicit axes."""
    layer, batches = (
        attention("norm, sinks, window", platform=platform),
        [batch_of(name, seed) for seed in (0, 1)],
    )
    stack = lambda *trees: jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
    cache = filled(layer.init_paged_cache(PAGES, PAGE))
    given = stack(*map(tokens_of, batches)), stack(cache, cache), stack(*batches)
    call = jax.vmap(lambda x, cache, batch: layer(x, cache, batch=batch))
    expected = quick(call)(*given)
    mesh = mesh_of(AxisType.Explicit, replicas=2)
    with jax.set_mesh(mesh):
        got = quick(call)(*place(mesh, given, P("replicas")))
    assert_same(got, expected)
    assert_placed_alike(got[1], place(mesh, given[1], P("replicas")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "way", "platform"),
    [
        ("mamba", "types", "xla"),
        ("qwen3-next", "shard_map", "xla"),
        ("mamba", "shard_map", INTERPRET),
        ("qwen3-next", "types", INTERPRET),
    ],
)
def test_chunks_of_recurrent_layers(kind, way, platform):
    """Inside `shard_map`, and on a mesh of explicit axes."""
    layer, batches = (
        recurrent_layers.build(kind, platform=platform),
        [batch_of("mixed", seed) for seed in (0, 1)],
    )
    stack = lambda *trees: jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
    state = filled(layer.init_state(SLOTS))
    given = stack(*map(tokens_of, batches)), stack(state, state), stack(*batches)
    call = jax.vmap(lambda x, state, batch: layer(x, state, batch=batch))
    expected = quick(call)(*given)
    mesh = mesh_of(AxisType.Explicit if way == "types" else AxisType.Auto, replicas=2)
    if way == "types":
        with jax.set_mesh(mesh):
            got = quick(call)(*place(mesh, given, P("replicas")))
    else:
        specs = (P("replicas"),) * 3
        got = quick(jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=P("replicas")))(*given)
    for actual, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert_close(actual, wanted)


def test_pages_and_slots_are_copied_where_they_are():
    _, caches, _ = of_two("decode")
    mesh = mesh_of(replicas=2)
    copy = jax.vmap(lambda c, source, target: c.copy_pages(source, target).copy_states(target, source))
    numbers = jnp.array([[3, -1, 4], [0, 2, 1]]), jnp.array([[1, 0, 2], [4, 3, -1]])
    sharded = place(mesh, (caches, *numbers), P("replicas"))
    compiled = quick(copy).lower(*sharded).compile()
    assert eqx.tree_equal(
        jax.tree.map(np.asarray, compiled(*sharded)), jax.tree.map(np.asarray, quick(copy)(caches, *numbers))
    )
    assert not collectives(compiled)
