"""Hopper's forward kernel over lists of tiles, without a Hopper: what it is given, and that its tiles compile without spills."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx import Mask
from tests.attention.hopper import call, check_compiled, configured, HOPPER, launches, needs_gluon, triton
from tests.attention.inner import (
    AttentionArrays,
    AttentionSpec,
    MaskInputs,
    problem_of,
    resolve,
    ScoreInputs,
    ScoreOptions,
    tile_shape,
)
from tests.attention.patterns import defined, H, PATTERNS, S, T
from tests.attention.tritons import lists, tile_sizes

MAP = Mask.from_blocks(np.random.default_rng(0).random((64, 64)) < 0.1, 128)
BY_HEAD = Mask.from_blocks(np.random.default_rng(0).random((16, 64, 64)) < 0.1, 128)
WIDE = Mask.causal() & (Mask.sliding_window(1000) | Mask.global_tokens(100))
listed = jax.jit(lists.listed, static_argnums=(1, 2, 3, 4))
BIG: dict[str, Any] = dict(batch=2, queries=8192, keys=8192, heads=16, kv_heads=16)


def resolved(mask: Any, t: int, s: int) -> tuple[AttentionArrays, AttentionSpec]:
    """A call as the kernels receive it."""
    x = lambda length, heads: jnp.zeros((2, length, heads, 64), jnp.bfloat16)
    return resolve(x(t, H), x(s, 2), x(s, 2), ScoreOptions(), MaskInputs(mask), ScoreInputs(return_lse=True))


def listed_pairs(
    arrays: AttentionArrays, spec: AttentionSpec, shape: tile_shape.Shape, programs: int
) -> np.ndarray:
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
    shape, expected = tile_shape.Shape(T, S, 32, 32), defined(PATTERNS[name].sees)
    for programs in (1, 5):
        assert (listed_pairs(arrays, spec, shape, programs) == expected).all()
    check_seen(jax.jit(lists.seen_keys, static_argnums=(1, 2))(arrays, spec, shape), expected[None], shape)


def check_seen(found: Any, expected: np.ndarray, shape: tile_shape.Shape) -> None:
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


@pytest.mark.few(2)
@pytest.mark.parametrize("heads", [1, H])
@pytest.mark.parametrize("window", [(None, None), (None, 0), (40, 5)])
def test_lists_of_maps(heads, window):
    """Of maps in arrays, whose blocks consist of tiles, with a static window."""
    left, right = window
    t, s = 150, 170
    table = np.random.default_rng(3).random((2, heads, 3, 3)) < 0.5
    table[0, 0], table[1, 0, 1], table[1, 0, :, 2] = False, False, False
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
        shape = tile_shape.Shape(t, s, *size)
        assert (listed_pairs(arrays, spec, shape, 5) == expected).all()
        found = jax.jit(lists.seen_keys, static_argnums=(1, 2))(arrays, spec, shape)
        assert found is None or window != (None, None)
        check_seen(found, expected, shape)


COMPILED: dict[str, tuple[dict[str, Any], int]] = {
    "map 128": (dict(dim=128, pattern=MAP), 0),
    "map of heads 64": (dict(dim=64, pattern=BY_HEAD), 0),
    "pattern 128": (dict(dim=128, pattern=WIDE, with_=("sinks",), logits_soft_cap=30.0), 0),
    "data 128": (dict(dim=128, block_size=(128, 128)), 0),
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
@pytest.mark.few(1)
@pytest.mark.parametrize("name", COMPILED)
def test_tiles_compile(name):
    """The first that the tuner would time."""
    options, spills = COMPILED[name]
    arrays, spec = requested(**options)
    problem = problem_of("block_sparse_attention", arrays, spec)
    tile = triton.TileConfig(*tile_sizes.tiles(problem, HOPPER)[0])
    (launch,) = launches(arrays, spec, configured(tile))
    assert check_compiled(launch, spills).shared <= tile_sizes.shared_memory(tile, problem)


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
