"""Hopper's forward kernel without a Hopper: when it is chosen, what it is given, and that every tile of it compiles without spills."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.attention.hopper import (
    call,
    CAUSAL,
    check_compiled,
    configured,
    HOPPER,
    launches,
    needs_gluon,
    problem,
    TILE,
    TRITON,
    triton,
)
from tests.attention.inner import from_dict, problem_of, RowRanges, run, tile_table, to_dict
from tests.attention.tritons import forward_call, schedule, tile_sizes
from tests.compiled import DEVICES, executed

FEW: dict[str, Any] = dict(batch=1, heads=8, kv_heads=8, queries=512, keys=512)


@needs_gluon
@pytest.mark.parametrize(
    "of, chosen",
    [
        (problem(128, "float16", with_=("sinks", "segments"), left=399, **CAUSAL), True),
        (problem(64, with_=("sinks",), logits_soft_cap=30.0), True),
        (problem(256, with_=("rows",)), True),
        (problem(80), True),
        (problem(192, values=128, block_size=(128, 128)), False),
        (problem(with_=("bias",)), False),
        (problem(with_=("mask",)), False),
        (problem(with_=("alibi",)), False),
        (problem(with_=("seeds",), dropout_rate=0.1), False),
        (problem(block_size=(64, 64)), False),
        (problem(scale=-1.0), False),
        (problem(64, logits_soft_cap=1e-3), False),
        (problem(64, logits_soft_cap=30.0, scale=1e9), False),
        (problem(dtype="float32"), False),
        (problem(64, values=128), False),
        (problem(90), False),
        (problem(128, values=100), False),
        (problem(queries=127), False),
    ],
)
def test_where_it_is_chosen(of, chosen):
    configs = triton.candidates(of, HOPPER)
    assert (configs[0].forward.hopper_programs == 132) == chosen
    assert configs[0] == triton.default_config(of, HOPPER)
    # Both kinds are candidates, and tables hold both.
    assert {config.forward.hopper_programs > 0 for config in configs} == (
        {False, True} if chosen else {False}
    )
    assert not any(config.query_gradient.hopper_programs for config in configs)
    assert all(triton.config_unsupported(config, of, HOPPER) is None for config in configs)
    assert all(from_dict(to_dict(config), triton.TritonConfig) == config for config in configs)
    assert ("forward: " in triton.remark(configs[0], of, HOPPER)) != chosen


@needs_gluon
def test_wide_heads():
    """Above 256 channels there is no other forward; the backward is XLA's."""
    of = problem(512, **CAUSAL)
    assert (
        triton.unsupported(of, HOPPER) is None
        and triton.unsupported(problem(264, values=512), HOPPER) is None
        and "triton" in (triton.by_request(of, HOPPER) or "")
    )
    first, *others = triton.candidates(of, HOPPER)
    assert first == triton.default_config(of, HOPPER) and first.key_gradient.block_q >= 256
    assert all(config.forward.hopper_programs == 132 for config in (first, *others))
    assert all(triton.config_unsupported(config, of, HOPPER) is None for config in (first, *others))
    assert "XLA's, not Hopper's" in triton.remark(first, of, HOPPER)
    assert "with hopper_programs" in (triton.config_unsupported(configured(), of, HOPPER) or "")
    for refused, word in (
        (problem(520), "one size, not 520 and 520"),
        (problem(512, values=128), "one size"),
        (problem(512, queries=127), "queries"),
        (problem(512, with_=("bias",)), "bias"),
        (problem(512, block_size=(128, 128)), "lists"),
    ):
        assert word in (triton.unsupported(refused, HOPPER) or "")
    assert "9.0" in (triton.unsupported(of, DEVICES["sm_80"]) or "")


@needs_gluon
@pytest.mark.parametrize("of", [problem(192, values=128, **CAUSAL), problem(144, values=96, batch=99)])
def test_keys_in_two_parts_are_timed_and_no_default(of):
    first, second, *_ = triton.candidates(of, HOPPER)
    assert not first.forward.hopper_programs and not first.key_gradient.hopper_programs
    assert second.forward.hopper_programs == 132 and second.key_gradient.hopper_programs
    assert triton.config_unsupported(second, of, HOPPER) is None
    assert triton.remark(first, of, HOPPER).count("not tested on a GPU") == 2


@needs_gluon
def test_where_it_is_timed_and_no_default():
    """Under a mask with little work for each program, and at narrow heads beside a soft cap; the same without a mask is its own."""
    for of, alike in (
        (problem(**FEW, **CAUSAL), problem(**FEW)),
        (problem(64, logits_soft_cap=30.0, **CAUSAL), problem(64, logits_soft_cap=30.0)),
    ):
        first, second, *_ = triton.candidates(of, HOPPER)
        assert first == triton.default_config(of, HOPPER) and not first.forward.hopper_programs
        assert second.forward.hopper_programs == 132 and "measured" in triton.remark(first, of, HOPPER)
        assert triton.config_unsupported(second, of, HOPPER) is None
        assert not triton.adapted(second, of, HOPPER).forward.hopper_programs
        assert triton.default_config(alike, HOPPER).forward.hopper_programs == 132


@needs_gluon
@pytest.mark.parametrize(
    "of, block_q",
    [
        (dict(batch=16, queries=1024, **CAUSAL), 128),
        (dict(batch=16, queries=1024), 192),
        (dict(batch=4, queries=4096, **CAUSAL), 192),
        # Few tiles of keys, of which most are partly hidden.
        (dict(batch=4, queries=4096, left=255, **CAUSAL), 128),
        (dict(batch=1, heads=8, queries=2048), 128),  # one tile of queries for each multiprocessor
    ],
)
def test_the_tile_of_narrow_heads(of, block_q):
    """Wide tiles share keys; narrow ones are shared out more evenly and compute less that is hidden."""
    of = {"heads": 32, "keys": of["queries"]} | of
    found = problem(64, kv_heads=of["heads"], **of)
    assert triton.default_config(found, HOPPER).forward.block_q == block_q


@needs_gluon
def test_where_gluon_is_missing_known_tiles_of_the_backward_stay(monkeypatch):
    """A table's entry with Hopper's tile answers anyway: with Triton's forward, and `explain` says why."""
    of, known = problem(**CAUSAL), configured(TILE)
    assert triton.adapted(configured(), of, HOPPER) == configured()
    wide = problem(64, heads=32, queries=4096, keys=4096)
    assert triton.adapted(known, wide, HOPPER).forward.block_q == 192
    fewer = dataclasses.replace(HOPPER, num_multiprocessors=78)
    assert triton.adapted(known, of, fewer).forward.hopper_programs == 78
    assert not triton.adapted(known, problem(queries=127), HOPPER).forward.hopper_programs
    monkeypatch.setattr(tile_sizes, "gluon_unavailable", lambda device: "needs JAX 0.11.1 or newer")
    assert "needs JAX 0.11.1" in (triton.config_unsupported(known, of, HOPPER) or "")
    adapted = triton.adapted(known, of, HOPPER)
    assert adapted.forward == triton.default_config(of, HOPPER).forward
    assert not adapted.forward.hopper_programs
    assert (adapted.key_gradient, adapted.query_gradient) == (TRITON, TRITON)
    assert triton.config_unsupported(adapted, of, HOPPER) is None
    assert "Triton's kernel, not Hopper's, which needs JAX 0.11.1" in triton.remark(adapted, of, HOPPER)


def test_other_devices_and_tables_of_before():
    for name in ("sm_80", "sm_100", "gfx942"):
        config = triton.default_config(problem(), DEVICES[name])
        assert not config.forward.hopper_programs and not config.key_gradient.hopper_programs
        assert not triton.remark(config, problem(), DEVICES[name])
        small = triton.TileConfig(16, 16, 4, 1)
        for known in (configured(TILE), triton.TritonConfig(small, TILE, small)):
            assert "9.0" in (triton.config_unsupported(known, problem(), DEVICES[name]) or "")
    known = to_dict(config)
    for kernel in ("forward", "key_gradient", "query_gradient"):
        del known[kernel]["hopper_programs"]
    assert from_dict(known, triton.TritonConfig) == config


@needs_gluon
def test_configurations_that_do_not_fit():
    wide = configured(dataclasses.replace(TILE, num_stages=4))
    assert "shared memory" in (triton.config_unsupported(wide, problem(), HOPPER) or "")
    backward = triton.TritonConfig(TRITON, TRITON, TILE)
    assert "of its own" in (triton.config_unsupported(backward, problem(), HOPPER) or "")


@pytest.mark.parametrize(
    "of, tile, word",
    [
        (call(with_=("bias",)), TILE, "bias"),
        (call(90), TILE, "90"),
        (call(), dataclasses.replace(TILE, block_q=192), "192x128"),
        (call(256), TILE, "128x128 at head dims of 256"),
        (call(), dataclasses.replace(TILE, num_warps=8), "num_warps"),
    ],
)
def test_a_configuration_that_cannot_run(of: Any, tile, word):
    with pytest.raises(ValueError, match=f"hopper_programs=0 in forward.*{word}"):
        launches(of[0], of[1], configured(tile))


def test_it_is_not_interpreted_and_takes_some_keys():
    pytest.importorskip("triton.experimental.gluon")
    arrays, spec = call(queries=64, keys=64)
    arrays = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), arrays)
    interpreted = functools.partial(run, interpret=True)
    with pytest.raises(ValueError, match="interpreted"):
        executed(triton.forward, interpreted)(arrays, spec, configured(TILE))
    (launch,) = launches(*call(keys=0), configured(TILE))
    assert not launch.is_gluon


def test_tiles_of_queries_are_dealt_once():
    """Every tile to one program, with an end behind each program's last."""
    rng = np.random.default_rng(0)
    for _ in range(30):
        rows, queries, keys = (int(rng.integers(1, most)) for most in (40, 3000, 3000))
        left, right = (int(x) for x in rng.choice([-1, 0, 50, 700], 2))
        size = int(rng.choice([128, 192])), int(rng.choice([64, 128]))
        group, programs = int(rng.choice([1, 4, 64])), int(rng.choice([1, 7, 132]))
        offset = keys - queries
        table = schedule.schedule(rows, queries, keys, offset, left, right, *size, group, programs)
        assert table.dtype == np.int32 and table.shape[1] == programs and (table[-1] == -1).all()
        tiles = -(-queries // size[0])
        np.testing.assert_array_equal(np.sort(table[table >= 0]), np.arange(tiles * rows))
        assert (np.diff((table >= 0).astype(int), axis=0) <= 0).all()


@pytest.mark.parametrize(
    "rows, length, group, block", [(256, 1024, 32, 128), (16, 16384, 2, 128), (48, 1000, 32, 192)]
)
def test_programs_end_together(rows, length, group, block):
    """Of a causal mask, whose tiles differ most."""
    table = schedule.schedule(rows, length, length, 0, -1, 0, block, 128, group, 132)
    tile = table % -(-length // block)
    takes = np.where(table >= 0, 1 + -(-np.minimum((tile + 1) * block, length) // 128), 0).sum(0)
    longest = 1 + -(-length // 128)
    assert takes.max() <= takes.mean() + longest * (0.3 if length > 1000 else 0.6)


RANGED = {
    "segments": dict(with_=("segments",)),
    "segments, window": dict(with_=("segments",), left=300, right=0),
    "rows": dict(with_=("rows",)),
    "rows, segments": dict(with_=("rows", "segments")),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", RANGED)
def test_bounds_in_one_launch(kind, seed):
    """Against the array operations that other kernels use; and keys that no query sees are marked."""
    rng = np.random.default_rng(seed)
    batch, queries, keys = (int(rng.integers(1, most)) for most in (3, 500, 2600))
    of = RANGED[kind] | ({} if "rows" in kind else dict(offset=keys - queries))
    arrays, spec = call(64, batch=batch, queries=queries, keys=keys, **of)
    arrays = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), arrays)
    padded = rng.choice([-1, 5])  # before or behind the segments, if they are in order
    ids = [
        np.sort(np.where(x < 0, padded, x), 1) if rng.random() < 0.7 else np.minimum(x, 1)
        for x in (rng.integers(-1, 5, (batch, length), np.int32) for length in (queries, keys))
    ]
    ids = [np.where(x == 5, -1, x) for x in ids]
    start = rng.integers(0, keys + 1, (1, queries))
    start = np.sort(start, 1) if rng.random() < 0.5 else start
    end = np.minimum(keys, start + rng.integers(0, keys, (1, 1)))
    if "segments" in kind:
        arrays = arrays._replace(q_segments=jnp.asarray(ids[0]), kv_segments=jnp.asarray(ids[1]))
    if "rows" in kind:
        arrays = arrays._replace(rows=RowRanges(*(jnp.asarray(x, jnp.int32) for x in (start, end, start))))
    arrays, spec = triton.explicit_ranges(arrays, spec)
    block_q, block_k = ((128, 128), (192, 128), (128, 64))[(seed + len(kind)) % 3]
    tile = dataclasses.replace(TILE, block_q=block_q, block_k=block_k)
    launch = triton.launcher(arrays, spec, configured(tile))
    bounds = executed(forward_call.bounds, functools.partial(run, interpret=True))
    found = bounds(launch, arrays, spec, tile)
    marks = found["marks"][:, :keys]
    # Keys that no range reaches count as padding: the bounds may be tighter.
    marked = arrays if arrays.q_segments is None else arrays._replace(kv_segments=marks)
    table = jax.jit(tile_table.key_tile_table, static_argnums=(1, 2, 3))(marked, spec, block_q, block_k)
    np.testing.assert_array_equal(found["tiles"], table)
    assert found["no_claims"][0] == 0 and found["marks"].shape == (batch, -(-keys // block_k) * block_k)
    seen = jax.jit(lambda arrays: tile_table.seen(arrays, spec).keys)(arrays)
    np.testing.assert_array_equal(marks >= 0, np.broadcast_to(seen, (batch, keys)) != 0)
    # The range of each query is what it sees, unless the keys of a segment are apart: then it is what it sees by ranges alone.
    first, past, kinds = (np.asarray(found[name]) for name in ("first", "past", "kinds"))
    key = np.arange(keys)
    ranged = (key >= first[..., None]) & (key < past[..., None])
    low, high = (
        np.asarray(x)[..., None] for x in jax.jit(tile_table.row_ranges, static_argnums=1)(arrays, spec)
    )
    by_range = np.broadcast_to((key >= low) & (key < high), ranged.shape)
    alike = np.ones_like(by_range)
    if arrays.q_segments is not None:
        q_ids, k_ids = np.asarray(arrays.q_segments)[..., None], np.asarray(marked.kv_segments)[:, None]
        alike = (q_ids == k_ids) & (q_ids >= 0)
        by_range = by_range & (q_ids >= 0)
    lo, hi = np.asarray(found["tiles"])[..., 0], np.asarray(found["tiles"])[..., 3]
    for b in range(batch):
        scattered = kinds[b, 0] >= 2  # `scores.SCATTERED`
        real = np.flatnonzero(np.asarray(marks)[b] >= 0)
        inner = np.asarray(marks)[b, real[0] : real[-1] + 1] if real.size else np.zeros(1, np.int32)
        together = (inner >= 0).all() and (np.diff(inner) >= 0).all()
        assert scattered == (arrays.q_segments is not None and not together)
        assert (kinds[b] // 2 == kinds[b, 0] // 2).all()
        np.testing.assert_array_equal(ranged[b] & alike[b], by_range[b] & alike[b])
        if not scattered:
            np.testing.assert_array_equal(ranged[b], by_range[b] & alike[b])
        for m in range(kinds.shape[1]):
            reached = np.asarray(marks)[b, lo[b, m] * block_k : hi[b, m] * block_k]
            assert kinds[b, m] % 2 == (lo[b, m] >= hi[b, m] or (reached < 0).any())


EVERYTHING: dict[str, Any] = dict(with_=("sinks", "segments"), logits_soft_cap=30.0, left=255, right=0)
COMPILED = {
    "causal 128": (call(**CAUSAL), 0),
    "causal 64": (call(64, **CAUSAL), 0),
    "everything 64": (call(64, **EVERYTHING), 0),
    "causal 256": (call(256, **CAUSAL), 0),
    "everything 256": (call(256, **EVERYTHING), 96),
    "one row, one key": (call(batch=1, heads=1, kv_heads=1, keys=1), 0),
}


@needs_gluon
@pytest.mark.few(1)
@pytest.mark.parametrize("name", COMPILED)
def test_defaults_compile(name):
    of, spills = COMPILED[name]
    sizes = tile_sizes.tiles(problem_of("flash_attention", *of), HOPPER)[0]
    *_, launch = launches(*of, configured(triton.TileConfig(*sizes)))  # behind that of the bounds
    check_compiled(launch, spills)
