"""Hopper's forward kernel over lists of tiles, without a Hopper: what it is given, its barriers, and that its tiles compile without spills."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx import Mask
from ejkernel_eqx.attention.arguments import MaskInputs, resolve, ScoreInputs, ScoreOptions
from ejkernel_eqx.attention.core import problem_of
from ejkernel_eqx.attention.masks.tile_shape import Shape
from ejkernel_eqx.attention.spec import AttentionArrays, AttentionSpec
from ejkernel_eqx.launch import compile_ahead
from tests.attention import hopper_protocol
from tests.attention.patterns import defined, H, PATTERNS, S, T
from tests.compiled import DEVICES

pytest.importorskip("triton")
from ejkernel_eqx.attention.triton import compiled as triton
from ejkernel_eqx.attention.triton.hopper import lists, tile_sizes
from tests.attention.test_hopper import _waits, call, configured, launches, needs_gluon

HOPPER = DEVICES["sm_90"]
MAP = Mask.from_blocks(np.random.default_rng(0).random((64, 64)) < 0.1, 128)
BY_HEAD = Mask.from_blocks(np.random.default_rng(0).random((16, 64, 64)) < 0.1, 128)
WIDE = Mask.causal() & (Mask.sliding_window(1000) | Mask.global_tokens(100))
listed = jax.jit(lists.listed, static_argnums=(1, 2, 3, 4))
BIG: dict[str, Any] = dict(batch=2, queries=8192, keys=8192, heads=16, kv_heads=16)


def followed(
    kernels: Any, table: np.ndarray, entries: np.ndarray, sizes: tuple[int, ...], stages: int, block_k: int
) -> hopper_protocol.Program:
    """The kernel's own control flow over the tiles of one program, with threads for its warps."""
    (heads, queries, keys), anything = sizes, hopper_protocol.Anything()
    size, tile = 64 * 64 * 2, block_k * 64 * 2
    program = hopper_protocol.Program(kernels, 2, stages, query_places=2)
    shared = dict(
        buffers=program.buffers, barriers=program.barriers, list_ptr=hopper_protocol.Pointer(entries), schedule_ptr=hopper_protocol.Pointer(table),
        T=queries, S=keys, CONSUMERS=2, H=heads, D=64, V=64, BLOCK_K=block_k, NUM_STAGES=stages,
    )  # fmt: skip
    loader = shared | dict(q_desc=("q", size), k_desc=("k", tile), v_desc=("v", tile), K=1)
    consumer = shared | dict(
        staging=hopper_protocol.Several(hopper_protocol.Buffer() for _ in range(2)), out_desc=anything, lse_ptr=anything, sinks_ptr=anything,
        pattern_ptr=anything, bits_ptr=anything, offset=0, SCALE=1.0, CAP=0.0, FAST_TANH=False, MULTIPLIER=1.0, LEFT=-1, RIGHT=-1, SINKS=False,
        BITS=0, PATIENCE=8,
    )  # fmt: skip
    program.run(loader, consumer)
    return program


@pytest.mark.parametrize("seed", range(40))
def test_every_product_reads_what_it_should(seed):
    """As the test of the dense kernel: of every tile of queries all entries in order, and the one past the end for a list without entries."""
    kernels = pytest.importorskip("ejkernel_eqx.attention.triton.hopper.listed_kernel", exc_type=ImportError)
    rng = np.random.default_rng(seed)
    stages, block_k, heads = int(rng.integers(1, 5)), int(rng.choice([64, 128])), int(rng.integers(1, 5))
    queries, keys = int(rng.integers(1, 900)), int(rng.integers(1, 900))
    count, others = -(-queries // 128), -(-keys // block_k)
    which = [[np.flatnonzero(rng.random(others) < rng.random()) for _ in range(count)] for _ in range(heads)]
    entries = np.concatenate([np.concatenate(row) for row in which] + [np.zeros(1)]).astype(np.int64)
    records: list[Any] = []
    for h, m in np.random.default_rng(seed).permutation(list(np.ndindex(heads, count))).tolist():
        begin = sum(len(x) for row in which[:h] for x in row) + sum(len(x) for x in which[h][:m])
        length = len(which[h][m])
        records.append(
            [h * count + m, begin, begin + int(rng.integers(0, length + 1)), begin + length, 0, 0, 0, 0]
        )
    table = np.array([*records, [-1] + [0] * 7])[:, None]
    program = followed(kernels, table, entries, (heads, queries, keys), stages, block_k)
    for w in range(2):
        rows = [(t // count, t % count * 128 + w * 64) for t, *_ in records]
        seen = [which[t // count][t % count].tolist() or [others] for t, *_ in records]
        flat = [(h, row, n) for (h, row), tiles in zip(rows, seen, strict=True) for n in tiles]
        products: list[Any] = []
        for at, (h, row, n) in enumerate(flat):
            products.append((("q", 0, h, row, 0), ("k", 0, 0, n * block_k, 0)))
            if at:
                products.append((None, ("v", 0, 0, flat[at - 1][2] * block_k, 0)))
        products.append((None, ("v", 0, 0, flat[-1][2] * block_k, 0)))
        assert program.read[w] == products
        assert program.stored[w] == [((0, h, row, 0), "result") for h, row in rows]


def resolved(mask: Any, t: int, s: int) -> tuple[AttentionArrays, AttentionSpec]:
    """A call as the kernels receive it."""
    x = lambda length, heads: jnp.zeros((2, length, heads, 64), jnp.bfloat16)
    return resolve(
        x(t, H), x(s, 2), x(s, 2), ScoreOptions(), mask, MaskInputs(), ScoreInputs(), return_lse=True
    )


def listed_pairs(arrays: AttentionArrays, spec: AttentionSpec, shape: Shape, programs: int) -> np.ndarray:
    """`[B, H, T, S]`: which pairs the kernel would see; a tile that is taken twice is an error."""
    found = listed(arrays, spec, shape, 2, programs)
    table, entries, patterns = (np.asarray(x) for x in (found.schedule, found.entries, found.patterns))
    bits = None if found.bits is None else np.asarray(found.bits)
    batch, _, heads, _ = arrays.q.shape
    count, others = shape.grid
    grid = np.zeros((batch * heads, count * shape.block_q, others * shape.block_k), bool)
    taken = np.zeros((batch * heads, count), int)
    assert table.shape[1:] == (programs, 8) and table.dtype == np.int32 and (table[0, :, 0] >= 0).all()
    i, j = np.ogrid[: shape.block_q, : shape.block_k]
    for program in range(programs):
        ended = False
        for t, lo, part, hi, away, *_ in table[:, program].tolist():
            ended |= t < 0
            assert ended == (t < 0) and 0 <= lo < len(entries)
            if ended:
                continue
            row, m = divmod(t, count)
            taken[row, m] += 1
            for at in range(lo, hi):
                n = int(entries[at])
                seen = np.ones((shape.block_q, shape.block_k), bool)
                if at >= part:
                    query, key = m * shape.block_q + i + spec.offset, n * shape.block_k + j
                    seen &= (key < shape.keys) & (spec.right is None or key <= query + spec.right)
                    seen &= spec.left is None or key >= query - spec.left
                    if bits is not None:
                        words = bits[patterns[away + at]].astype(np.uint32)
                        seen &= np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").astype(bool)
                grid[row, m * shape.block_q :, n * shape.block_k :][: shape.block_q, : shape.block_k] |= seen
        assert ended
    assert (taken == 1).all()
    return grid[:, : shape.queries, : shape.keys].reshape(batch, heads, shape.queries, shape.keys)


@pytest.mark.parametrize("name", PATTERNS)
def test_lists_of_patterns(name):
    """Programs see what the mask says, and values are cleared of exactly the keys that no query sees."""
    arrays, spec = resolved(PATTERNS[name].mask, T, S)
    shape, expected = Shape(T, S, 32, 32), defined(PATTERNS[name].sees)
    for programs in (1, 5):
        assert (listed_pairs(arrays, spec, shape, programs) == expected).all()
    check_seen(jax.jit(lists.seen_keys, static_argnums=(1, 2))(arrays, spec, shape), expected[None], shape)


def check_seen(found: Any, expected: np.ndarray, shape: Shape) -> None:
    """Without flags, every key of a tile that is read is seen by some query."""
    batch, heads, t, s = expected.shape
    seen = expected.any(2).reshape(batch, 2, heads // 2, s)
    keys = np.moveaxis(np.asarray(seen.any(2)), 1, 2)  # [B, S, K]
    if found is not None:
        assert (np.broadcast_to(found, (batch, s, found.shape[-1])) == keys).all()
        return
    tiles = np.add.reduceat(
        np.add.reduceat(expected, np.arange(0, t, shape.block_q), 2), np.arange(0, s, shape.block_k), 3
    )
    repeated = tiles.any(2).repeat(shape.block_k, -1)[..., :s]
    read = np.moveaxis(np.asarray(repeated.reshape(seen.shape).any(2)), 1, 2)
    assert (keys | ~read).all()


@pytest.mark.parametrize("share", [0.0, 0.05, 0.3])
def test_programs_end_whatever_lists_the_device_builds(share):
    """Of maps in arrays, each batch row's and head's own: lists may be empty, the last one of a program, too."""
    kernels = pytest.importorskip("ejkernel_eqx.attention.triton.hopper.listed_kernel", exc_type=ImportError)
    table = np.random.default_rng(0).random((2, H, 4, 4)) < share
    arrays, spec = resolved(Mask.from_blocks(jnp.asarray(table), 64), 250, 250)
    found = listed(arrays, spec, Shape(250, 250, 128, 64), 2, 3)
    for program in range(3):
        mine = np.asarray(found.schedule)[:, program].copy()[:, None]
        stored = followed(kernels, mine, np.asarray(found.entries), (H, 250, 250), 2, 64).stored
        assert len(stored[0]) == len(stored[1]) == (mine[..., 0] >= 0).sum()


@pytest.mark.few(2)
@pytest.mark.parametrize("heads", [1, H])
@pytest.mark.parametrize("window", [(None, None), (None, 0), (40, 5)])
def test_lists_of_maps(heads, window):
    """Of maps in arrays, whose blocks consist of tiles, with a static window."""
    left, right = window
    t, s = 150, 170
    table = np.random.default_rng(3).random((2, heads, 3, 3)) < 0.5
    table[0, 0, 1], table[1, 0, :, 2] = False, False
    mask = Mask.from_blocks(jnp.asarray(table), (64, 64))
    if left is not None or right is not None:
        mask = mask & (Mask.causal() if left is None else Mask.sliding_window(left, right))
    arrays, spec = resolved(mask, t, s)
    i, j = np.ogrid[:t, :s]
    query = i + s - t
    seen = table.repeat(64, -2).repeat(64, -1)[..., :t, :s]
    seen = seen & (left is None or j >= query - left) & (right is None or j <= query + right)
    expected = np.broadcast_to(seen, (2, H, t, s))
    for size in ((64, 64), (32, 32), (64, 32)):
        shape = Shape(t, s, *size)
        assert (listed_pairs(arrays, spec, shape, 5) == expected).all()
        found = jax.jit(lists.seen_keys, static_argnums=(1, 2))(arrays, spec, shape)
        assert found is None or window != (None, None)
        check_seen(found, expected, shape)


COMPILED: dict[str, tuple[dict[str, Any], int]] = {
    "map 128": (dict(dim=128, pattern=MAP), 0),
    "map of heads 64": (dict(dim=64, pattern=BY_HEAD), 0),
    "pattern 128": (dict(dim=128, pattern=WIDE, with_=("sinks",), logits_soft_cap=30.0), 0),
    "soft cap 128": (dict(dim=128, pattern=WIDE, logits_soft_cap=30.0), 0),
    "pattern 64": (dict(dim=64, pattern=WIDE), 0),
    "pattern 80, float16": (dict(dim=80, dtype="float16", pattern=WIDE), 8),
    "data 128": (dict(dim=128, block_size=(128, 128)), 0),
    "data, causal 64": (dict(dim=64, block_size=(256, 128), right=0), 0),
}


def requested(pattern: Any = None, **options: Any) -> tuple[AttentionArrays, AttentionSpec]:
    arrays, spec = call(**options, **BIG)
    if pattern is not None:
        known = pattern.lower(8192, 8192, num_heads=16).pattern
        spec = dataclasses.replace(spec, pattern=known)
        if known.heads:
            arrays = arrays._replace(heads=jax.ShapeDtypeStruct((1, 16), jnp.int32))
    if spec.block_size is not None:
        blocks = (1, 1, *(8192 // size for size in spec.block_size))
        arrays = arrays._replace(blocks=jax.ShapeDtypeStruct(blocks, jnp.bool_))
    return arrays, spec


@needs_gluon
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if i < 1 else pytest.mark.slow) for i, name in enumerate(COMPILED)]
)
def test_tiles_compile(name):
    """All that the tuner would time: without spills to speak of, and without products that wait for one another."""
    options, spills = COMPILED[name]
    arrays, spec = requested(**options)
    problem = problem_of("block_sparse_attention", arrays, spec)
    tiles = [triton.TileConfig(*sizes) for sizes in tile_sizes.tiles(problem, HOPPER)]
    assert tiles
    for tile in tiles:
        (launch,) = launches(arrays, spec, configured(tile))
        report = compile_ahead(launch, "sm_90")
        assert launch.is_gluon and report.fits and report.spills <= spills and not _waits(launch), report
        assert report.shared <= tile_sizes.shared_memory(tile, problem)


@needs_gluon
@pytest.mark.parametrize(
    "options, word",
    [
        (dict(pattern=MAP), ""),
        (dict(block_size=(128, 256)), ""),
        (dict(dim=256, pattern=MAP), "up to 128"),
        (dict(block_size=(64, 128)), "blocks consist of its tiles"),
        (dict(pattern=WIDE, block_size=(128, 128)), "beside a pattern"),
        (dict(pattern=WIDE, with_=("segments",)), "ranges and segments"),
        (dict(pattern=WIDE, with_=("rows",)), "ranges and segments"),
    ],
)
def test_which_lists_it_takes(options, word):
    problem = problem_of("block_sparse_attention", *requested(**options))
    assert word in (tile_sizes.problem_unfit(problem) or "") and bool(word) == bool(
        tile_sizes.problem_unfit(problem)
    )
    found = {config.forward.hopper_programs > 0 for config in triton.candidates(problem, HOPPER)}
    assert found == ({False} if word else {False, True})
    # The backward of lists is Triton's.
    config = triton.default_config(problem, HOPPER)
    assert not (config.key_gradient.hopper_programs or config.query_gradient.hopper_programs)


@needs_gluon
def test_a_tile_that_cuts_blocks():
    arrays, spec = requested(block_size=(128, 64))
    with pytest.raises(ValueError, match="128x128 at head dims of 128 for these lists"):
        launches(arrays, spec, configured(triton.TileConfig(128, 128, 4, 2, 0, 132)))
    assert launches(arrays, spec, configured(triton.TileConfig(128, 64, 4, 4, 0, 132)))[0].is_gluon


@needs_gluon
@pytest.mark.parametrize(
    "name, chosen",
    [("map 128", True), ("pattern 128", True), ("map of heads 64", False), ("data 128", False)],
)
def test_which_lists_choose_it(name, chosen):
    """Those that it was measured with."""
    problem = problem_of("block_sparse_attention", *requested(**COMPILED[name][0]))
    config = triton.default_config(problem, HOPPER)
    assert (config.forward.hopper_programs == 132) == chosen
    assert ("such lists" in triton.remark(config, problem, HOPPER)) != chosen
