"""Hopper's forward kernel without a Hopper: when it is chosen, what it is given, and that every tile of it compiles without spills."""

import dataclasses
import functools
import itertools
import pathlib
import re
import subprocess
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx.attention.core import problem_of
from ejkernel_eqx.attention.masks import tile_table
from ejkernel_eqx.attention.spec import AttentionArrays, AttentionSpec, RowRanges
from ejkernel_eqx.dispatch import from_dict, to_dict
from ejkernel_eqx.launch import compile_ahead, gluon_unavailable, run
from tests.attention import hopper_protocol
from tests.compiled import DEVICES

pytest.importorskip("triton")
from ejkernel_eqx.attention.triton import compiled as triton
from ejkernel_eqx.attention.triton.hopper import call as hopper_call
from ejkernel_eqx.attention.triton.hopper import tile_sizes
from ejkernel_eqx.attention.triton.hopper.schedule import schedule

HOPPER = DEVICES["sm_90"]
_MISSING = gluon_unavailable(HOPPER)
needs_gluon = pytest.mark.skipif(_MISSING is not None, reason=f"Hopper's kernel {_MISSING}")
TILE = triton.TileConfig(128, 128, 4, 2, 0, 132)
TRITON = triton.TileConfig(64, 64, 4, 2)
CAUSAL: dict[str, Any] = dict(right=0)


def call(
    dim: Any = 128,
    dtype: Any = "bfloat16",
    batch: Any = 2,
    queries: Any = 1000,
    keys: Any = 1000,
    heads: Any = 4,
    kv_heads: Any = 2,
    values: Any = None,
    with_: Any = (),
    **spec: Any,
):
    """The shapes of a call, and its description."""

    def shape(*size: int, dtype: Any = dtype) -> Any:
        return jax.ShapeDtypeStruct(size, jnp.dtype(dtype))

    options: dict[str, Any] = {
        "bias": dict(bias=shape(batch, heads, queries, keys)),
        "mask": dict(mask=shape(batch, 1, queries, keys, dtype="bool")),
        "alibi": dict(alibi_slopes=shape(1, heads, dtype="float32")),
        "sinks": dict(sinks=shape(1, heads, dtype="float32")),
        "segments": dict(
            q_segments=shape(batch, queries, dtype="int32"), kv_segments=shape(batch, keys, dtype="int32")
        ),
        "rows": dict(rows=RowRanges(*[shape(1, queries, dtype="int32")] * 3)),
        "seeds": dict(seeds=shape(batch, heads, 2, dtype="uint32")),
    }
    arrays = AttentionArrays(
        shape(batch, queries, heads, dim),
        shape(batch, keys, kv_heads, dim),
        shape(batch, keys, kv_heads, values or dim),
    )
    for name in with_:
        arrays = arrays._replace(**options[name])
    return arrays, AttentionSpec(**{"scale": dim**-0.5} | spec)


def problem(*args, **kwargs):
    """Of enough rows."""
    return problem_of("flash_attention", *call(*args, **{"batch": 32} | kwargs))


def launches(arrays, spec, config) -> list[Any]:
    """What the forward would launch; nothing is run."""
    found = []

    def record(launch, inputs):
        found.append(launch)
        return {name: jnp.zeros(out.shape, out.dtype) for name, out in launch.outputs.items()}

    jax.eval_shape(lambda arrays: triton.forward(arrays, spec, config, execute=record), arrays)
    return found


def configured(tile=TILE):
    return triton.TritonConfig(tile, TRITON, TRITON)


@needs_gluon
@pytest.mark.parametrize(
    "of, chosen",
    [
        (problem(**CAUSAL), True),
        (problem(128, "float16", with_=("sinks", "segments"), left=399, **CAUSAL), True),
        (problem(64, "float16", with_=("sinks", "rows")), True),
        (problem(64, with_=("sinks",), logits_soft_cap=30.0), True),
        (problem(256, with_=("rows",)), True),
        (problem(80), True),
        (problem(with_=("bias",)), False),
        (problem(with_=("mask",)), False),
        (problem(with_=("alibi",)), False),
        (problem(with_=("seeds",), dropout_rate=0.1), False),
        (problem(block_size=(64, 64)), False),
        (problem(scale=-1.0), False),
        (problem(64, logits_soft_cap=1e9), True),
        (problem(64, logits_soft_cap=1e-3), False),
        (problem(64, logits_soft_cap=1e20), False),
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
def test_where_it_is_timed_and_no_default():
    """Under a mask with little work for each program, and at narrow heads beside a soft cap; the same without a mask is its own."""
    few = dict(batch=1, heads=8, kv_heads=8, queries=512, keys=512)
    for of, alike in (
        (problem(**few, **CAUSAL), problem(**few)),
        (problem(64, batch=1, heads=8, kv_heads=8, queries=2048, keys=2048, **CAUSAL), problem(64, **few)),
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
        (dict(batch=8, queries=2048, **CAUSAL), 192),
        (dict(batch=4, queries=4096, **CAUSAL), 192),
        (dict(batch=1, queries=16384), 192),
        (
            dict(batch=4, queries=4096, left=255, **CAUSAL),
            128,
        ),  # few tiles of keys, of which most are partly hidden
        (dict(batch=1, heads=8, queries=2048), 128),  # one tile of queries for each multiprocessor
    ],
)
def test_the_tile_of_narrow_heads(of, block_q):
    """Wide tiles share keys; narrow ones are shared out more evenly and compute less that is hidden."""
    of = {"heads": 32, "keys": of["queries"]} | of
    found = problem(64, kv_heads=of["heads"], **of)
    assert triton.default_config(found, HOPPER).forward.block_q == block_q


def test_estimated_times_count_what_is_computed():
    """Against counting tile by tile."""
    rng = np.random.default_rng(0)
    for _ in range(40):
        length, more = (int(x) for x in rng.integers(1, 900, 2))
        keys = length + more
        left, right = (of[rng.integers(3)] for of in ((None, 50, 300), (None, 0, 70)))
        of = call(64, queries=length, keys=keys, left=left, right=right, offset=more)
        for size in ((128, 128, 2), (192, 128, 2)):
            rate, own, hidden = tile_sizes._COSTS[size[0]]
            expected = 0.0
            for first in range(0, length, size[0]):
                i = np.arange(first, min(first + size[0], length))[:, None] + more
                j = np.arange(-(-keys // 128) * 128)[None]
                seen = (j >= (0 if left is None else i - left)) & (
                    j <= (10**6 if right is None else i + right)
                )
                tiles = np.broadcast_to(seen, (len(i), j.size)).reshape(len(i), -1, 128)
                some, every = tiles.any((0, 2)), tiles.all((0, 2))
                expected += 8 * rate * (some.sum() + own + hidden * (some & ~every).sum())
            assert tile_sizes._time_of(size, problem_of("flash_attention", *of), 1) == pytest.approx(expected)


@needs_gluon
def test_where_gluon_is_missing_known_tiles_of_the_backward_stay(monkeypatch):
    """A table's entry with Hopper's tile answers anyway: with Triton's forward, and `explain` says why."""
    of = problem(**CAUSAL)
    known = dataclasses.replace(configured(), forward=TILE)
    assert triton.adapted(configured(TRITON), of, HOPPER) == configured(TRITON)
    assert (
        triton.adapted(known, problem(64, heads=32, queries=4096, keys=4096), HOPPER).forward.block_q == 192
    )
    fewer = dataclasses.replace(HOPPER, num_multiprocessors=78)
    assert triton.adapted(known, of, fewer).forward.hopper_programs == 78
    assert not triton.adapted(known, problem(queries=127), HOPPER).forward.hopper_programs
    monkeypatch.setattr(
        tile_sizes, "gluon_unavailable", lambda device: "needs JAX 0.11.1 or newer, not 0.10.2"
    )
    assert "needs JAX 0.11.1" in (triton.config_unsupported(known, of, HOPPER) or "")
    adapted = triton.adapted(known, of, HOPPER)
    assert (
        adapted.forward == triton.default_config(of, HOPPER).forward and not adapted.forward.hopper_programs
    )
    assert (adapted.key_gradient, adapted.query_gradient) == (TRITON, TRITON)
    assert triton.config_unsupported(adapted, of, HOPPER) is None
    assert "Triton's kernel, not Hopper's, which needs JAX 0.11.1" in triton.remark(adapted, of, HOPPER)


def test_other_devices_and_tables_of_before():
    for name in ("sm_80", "sm_100", "gfx942"):
        config = triton.default_config(problem(), DEVICES[name])
        assert not config.forward.hopper_programs and not triton.remark(config, problem(), DEVICES[name])
        assert "9.0" in (triton.config_unsupported(configured(), problem(), DEVICES[name]) or "")
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
        (call(with_=("mask",)), TILE, "mask"),
        (call(dtype="float32"), TILE, "float32"),
        (call(90), TILE, "90"),
        (call(), dataclasses.replace(TILE, block_q=192), "192x128"),
        (call(256), TILE, "128x128 at head dims of 256"),
        (call(), dataclasses.replace(TILE, num_warps=8), "num_warps"),
    ],
)
def test_a_configuration_that_cannot_run(of: Any, tile, word):
    with pytest.raises(ValueError, match=f"hopper_programs=0 in forward.*{word}"):
        launches(of[0], of[1], configured(tile))


def test_it_is_not_interpreted():
    pytest.importorskip("triton.experimental.gluon")
    arrays, spec = call(queries=64, keys=64)
    arrays = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), arrays)
    with pytest.raises(ValueError, match="interpreted"):
        triton.forward(
            arrays, spec, configured(), execute=lambda launch, given: run(launch, given, interpret=True)
        )


def test_no_keys_are_left_to_triton():
    (launch,) = launches(*call(keys=0), configured())
    assert not launch.is_gluon


@pytest.mark.parametrize("seed", range(30))
def test_tiles_of_queries_are_dealt_once(seed):
    """Every tile to one program, with an end behind each program's last; and no program has much more to do than another."""
    rng = np.random.default_rng(seed)
    rows, queries, keys = (int(rng.integers(1, most)) for most in (40, 3000, 3000))
    left, right = (int(x) for x in rng.choice([-1, 0, 50, 700], 2))
    block_q, block_k = int(rng.choice([128, 192])), int(rng.choice([64, 128]))
    programs = int(rng.choice([1, 7, 132]))
    table = schedule(
        rows,
        queries,
        keys,
        keys - queries,
        left,
        right,
        block_q,
        block_k,
        int(rng.choice([1, 4, 64])),
        programs,
    )
    assert table.dtype == np.int32 and table.shape[1] == programs and (table[-1] == -1).all()
    tiles = -(-queries // block_q)
    np.testing.assert_array_equal(np.sort(table[table >= 0]), np.arange(tiles * rows))
    assert (np.diff((table >= 0).astype(int), axis=0) <= 0).all()


@pytest.mark.parametrize(
    "rows, length, group", [(256, 1024, 32), (64, 4096, 8), (16, 16384, 2), (48, 1000, 32)]
)
@pytest.mark.parametrize("block", [128, 192])
def test_programs_end_together(rows, length, group, block):
    """Of a causal mask, whose tiles differ most."""
    table = schedule(rows, length, length, 0, -1, 0, block, 128, group, 132)
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


@pytest.mark.few(6)
@pytest.mark.parametrize("seed", range(4))
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
    block_q, block_k = ((128, 128), (192, 128), (128, 64))[seed % 3]
    tile = dataclasses.replace(TILE, block_q=block_q, block_k=block_k)
    launch = triton.launcher(arrays, spec, configured(tile), functools.partial(run, interpret=True))
    found = hopper_call.bounds(launch, arrays, spec, tile)
    marks = found["marks"][:, :keys]
    # Keys that no range reaches count as padding: the bounds may be tighter.
    marked = arrays if arrays.q_segments is None else arrays._replace(kv_segments=marks)
    table = jax.jit(tile_table.key_tile_table, static_argnums=(1, 2, 3))(marked, spec, block_q, block_k)
    np.testing.assert_array_equal(found["tiles"], table)
    assert found["no_taken"][0] == 0 and found["marks"].shape == (batch, -(-keys // block_k) * block_k)
    seen = jax.jit(lambda arrays: tile_table.seen(arrays, spec).keys)(arrays)
    seen = np.broadcast_to(seen, (batch, keys))
    np.testing.assert_array_equal(marks >= 0, seen != 0)
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
        assert (
            scattered == (arrays.q_segments is not None and not together)
            and (kinds[b] // 2 == kinds[b, 0] // 2).all()
        )
        np.testing.assert_array_equal(ranged[b] & alike[b], by_range[b] & alike[b])
        if not scattered:
            np.testing.assert_array_equal(ranged[b], by_range[b] & alike[b])
        for m in range(kinds.shape[1]):
            reached = np.asarray(marks)[b, lo[b, m] * block_k : hi[b, m] * block_k]
            assert kinds[b, m] % 2 == (lo[b, m] >= hi[b, m] or (reached < 0).any())


def _compiled(arrays, spec):
    sizes = tile_sizes.tiles(problem_of("flash_attention", arrays, spec), HOPPER)[0]
    *_, launch = launches(arrays, spec, configured(triton.TileConfig(*sizes)))  # behind that of the bounds
    assert launch.is_gluon
    return launch


EVERYTHING: dict[str, Any] = dict(with_=("sinks", "segments"), logits_soft_cap=30.0, left=255, right=0)
COMPILED = {
    "causal 128": (call(**CAUSAL), 0),
    "everything 64": (call(64, **EVERYTHING), 0),
    "everything 128": (call(**EVERYTHING), 24),
    "everything 256": (call(256, **EVERYTHING), 96),
    "soft cap 128": (call(logits_soft_cap=30.0, **CAUSAL), 0),
    "window 64": (call(64, batch=32, queries=4096, keys=4096, left=1023, right=0), 0),
    "causal 64": (call(64, **CAUSAL), 0),
    "causal 256": (call(256, **CAUSAL), 0),
    "full 64": (call(64, queries=1024, keys=1024), 0),
    "full 128": (call(queries=1024, keys=1024), 0),
    "rows 96": (call(96, "float16", with_=("rows",)), 0),
    "segments and window 128": (call(with_=("segments",), left=255, right=0), 0),
    "sinks and segments 256": (call(256, with_=("sinks", "segments"), **CAUSAL), 96),
    "one row, one key": (call(batch=1, heads=1, kv_heads=1, keys=1), 0),
}


@needs_gluon
@pytest.mark.parametrize(
    "of, spills",
    [
        pytest.param(*of, id=name, marks=() if i < 1 else pytest.mark.slow)
        for i, (name, of) in enumerate(COMPILED.items())
    ],
)
def test_defaults_compile(of, spills):
    """Without spills to speak of, and without products that wait for one another."""
    launch = _compiled(*of)
    report = compile_ahead(launch, "sm_90")
    assert report.fits and report.spills <= spills and report.registers <= 168, report
    assert not _waits(launch)
    constants = launch.constants
    option = constants["SEGMENTS"] or constants["ROWS"] or constants["LEFT"] >= 0 or constants["CAP"] > 0
    wide = constants["BLOCK_V"] == 128 or (constants["BLOCK_V"] == 64 and option)
    if constants["BLOCK_Q"] == 128 and wide and constants["GUARD"]:  # as `UNDER` in the kernel
        under, behind = _powers_of_two(launch)
        assert under >= 64 and behind <= 2


def sass(launch):
    """The machine code of a launch."""
    from triton import knobs

    from ejkernel_eqx.launch.compile import compiled, TARGETS

    with tempfile.TemporaryDirectory() as folder:
        cubin = pathlib.Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled(launch, TARGETS["sm_90"]).asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "--dump-sass", str(cubin)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _powers_of_two(launch):
    """Of a tile of keys: how many a thread takes while the product before runs, and how many only behind it."""
    # From the wait for scores to that for the product of weights, and from there to the next product.
    under, behind = re.search(r"gsb0, 0x1 ;(.*?)gsb0, 0x0 ;(.*?)HGMMA", sass(launch), re.DOTALL).groups()  # type: ignore[union-attr]
    return under.count("MUFU.EX2"), behind.count("MUFU.EX2")


def _waits(launch):
    """Warnings of NVIDIA's assembler that products run one after the other."""
    from triton import knobs

    from ejkernel_eqx.launch.compile import compiled, TARGETS

    ptx = compiled(launch, TARGETS["sm_90"]).asm["ptx"]
    command = [knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", "/dev/stdin", "-o", "/dev/null"]
    assembled = subprocess.run(command, input=ptx, text=True, capture_output=True)
    assert assembled.returncode == 0, assembled.stderr
    return re.findall(r"C75\d\d", assembled.stderr + assembled.stdout)


@needs_gluon
def test_the_estimate_of_shared_memory():
    for dim, stages in itertools.product((64, 128, 256), (1, 2, 3)):
        of = problem(dim, **CAUSAL)
        tile = triton.TileConfig(*tile_sizes.tiles(of, HOPPER)[0])
        tile = dataclasses.replace(tile, num_stages=stages)
        (launch,) = launches(*call(dim, **CAUSAL), configured(tile))
        assert {"queries": launch.constants["IN_PLACE"]} == {
            "queries": (dim, stages) in ((128, 3), (256, 2), (256, 3))
        }


@pytest.mark.parametrize("seed", range(40))
def test_every_product_reads_what_it_should(seed):
    """The kernel's own control flow, with threads for its warps: every consumer multiplies its queries by each tile of keys that they see, the last
    one first, then the weights by the same tile of values, and stores one tile."""
    kernels = pytest.importorskip("ejkernel_eqx.attention.triton.hopper.forward_kernel", exc_type=ImportError)
    rng = np.random.default_rng(seed)
    consumers, stages, block_k = int(rng.choice([2, 3])), int(rng.integers(1, 5)), int(rng.choice([64, 128]))
    rows, queries, keys = int(rng.integers(1, 5)), int(rng.integers(1, 900)), int(rng.integers(1, 900))
    left, right = (int(x) for x in rng.choice([-1, 0, 200], 2))
    table, in_place = bool(rng.random() < 0.3), bool(rng.random() < 0.5)
    heads, kv_heads, offset, block_q = rows, 1, keys - queries, 64 * consumers
    unseen = table and bool(rng.random() < 0.5)
    counts = -(-queries // block_q), -(-keys // block_k)
    bounds = np.sort(rng.integers(0, counts[1] + 1, (counts[0], 4)), 1)
    order = schedule(rows, queries, keys, offset, left, right, block_q, block_k, 2, 1)
    size = 64 * 64 * 2
    if table:  # as `_number` says
        order = np.asarray([m + counts[0] * r for m in range(counts[0])[::-1] for r in range(rows)] + [-1])[
            :, None
        ]
    program = hopper_protocol.Program(kernels, consumers, stages, unseen=unseen)
    shared = dict(
        buffers=program.buffers, barriers=program.barriers, mail=program.mail, tiles_ptr=hopper_protocol.Pointer(bounds),
        schedule_ptr=hopper_protocol.Pointer(order), B=1, T=queries, S=keys, offset=offset, WIDTHS=(64, 64),
        CONSUMERS=consumers, H=heads, D=64, V=64,
        BLOCK_K=block_k, NUM_STAGES=stages, LEFT=left, RIGHT=right,
    )  # fmt: skip
    anything = hopper_protocol.Anything()
    tile = block_k * 64 * 2
    loader = shared | dict(
        operands=(("q", size), ("k", tile), ("v", tile)), K=kv_heads, TABLE=table, counter_ptr=anything, kinds_ptr=anything,
    )  # fmt: skip
    consumer = shared | dict(
        staging=program.buffers[0] if in_place else hopper_protocol.Several(hopper_protocol.Buffer() for _ in range(consumers)),
        out_ptr=anything, lse_ptr=anything, sinks_ptr=anything, first_ptr=anything, past_ptr=anything, q_segments_ptr=anything,
        marks_ptr=anything, SCALE=1.0, CAP=0.0, FAST_TANH=False, MULTIPLIER=1.0, SEGMENTS=table, SINKS=False,
        EVEN_K=False, GUARD=True, ROWS=False, IN_PLACE=in_place, PATIENCE=8,
    )  # fmt: skip
    program.run(loader, consumer)
    key_tiles = hopper_protocol.key_tiles()
    for w in range(consumers):
        read, stored, cleared = iter(program.read[w]), [], []
        for t in order[:, 0][order[:, 0] >= 0].tolist():
            m, h = t % counts[0], t // counts[0]
            lo, full_lo, full_hi, hi = key_tiles(
                hopper_protocol.Pointer(bounds),
                0,
                m,
                offset,
                queries,
                keys,
                block_q,
                block_k,
                left,
                right,
                table,
                False,
            )
            lo = min(lo, counts[1] - 1)
            seen = range(max(hi, lo + 1) - 1, lo - 1, -1)
            row = m * block_q + w * 64
            products: list[Any] = [(("q", 0, h, row, 0), ("k", 0, 0, seen[0] * block_k, 0))]
            for before, n in itertools.pairwise(seen):
                products += [
                    (("q", 0, h, row, 0), ("k", 0, 0, n * block_k, 0)),
                    (None, ("v", 0, 0, before * block_k, 0)),
                ]
            products.append((None, ("v", 0, 0, seen[-1] * block_k, 0)))
            partly = [n for n in seen if n == seen[0] or not full_lo <= n < full_hi]
            cleared += [("v", 0, 0, n * block_k, 0) for n in partly]
            assert [next(read) for _ in products] == products
            stored.append(((0, h, row, 0), "result"))
        assert next(read, None) is None and program.stored[w] == stored
        assert program.cleared[w] == (cleared if unseen else [])
