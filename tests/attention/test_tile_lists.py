"""Patterns against their definitions: as arrays, as kinds of tiles with bits, and as lists that a kernel follows."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx import Mask
from tests.attention.inner import classify, evaluate, interval, pattern, tile_lists, tile_shape, tiles
from tests.attention.patterns import defined, H, PATTERNS, S, T

Shape, lists_of = tile_shape.Shape, tile_lists.lists_of
SHAPES = [Shape(T, S, 16, 16), Shape(T, S, 32, 16), Shape(T, S, 16, 64)]


def lowered(name: str) -> tuple[pattern.Pattern, Any]:
    found = PATTERNS[name].mask.lower(T, S, num_heads=H)
    assert found.pattern is not None
    assert found[:2] == (None, None) and all(part is None for part in found[3:6])
    return found.pattern, found


def followed(pattern: Any, shape: Any, head: int) -> np.ndarray:
    """`[T, S]`: what a kernel that runs the lists of a head sees."""
    lists = lists_of(pattern, shape)
    row = lists.heads[head if len(lists.heads) > 1 else 0]
    rows, columns = shape.grid
    seen = np.zeros((rows * shape.block_q, columns * shape.block_k), bool)
    assert sorted(lists.tiles[row, :, 0]) == list(range(columns if shape.by_key else rows))
    for tile, begin, whole, end, away, entry, partial, _ in lists.tiles[row]:
        assert (entry, partial) == tuple(lists.entries[[begin, whole]])
        for at in range(begin, end):
            listed = int(lists.entries[at])
            m, n = (listed, tile) if shape.by_key else (tile, listed)
            area = np.s_[
                m * shape.block_q : (m + 1) * shape.block_q, n * shape.block_k : (n + 1) * shape.block_k
            ]
            assert not seen[area].any(), "a tile is listed twice"
            if at < whole:
                seen[area] = True
                continue
            assert lists.bits is not None
            bytes_ = lists.bits[lists.patterns[at + away]].astype("<i4").view(np.uint8)
            bits = np.unpackbits(bytes_, axis=-1, bitorder="little").astype(bool)
            seen[area] = bits[:, : shape.block_q].T if shape.by_key else bits[:, : shape.block_k]
    assert not seen[:, shape.keys :].any(), "keys past the end are visible"
    return seen[: shape.queries, : shape.keys]


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("name", PATTERNS)
def test_lists_say_the_mask(name, by_key):
    expected = defined(PATTERNS[name].sees)
    pattern, found = lowered(name)
    array = np.asarray(found.as_array(T, S))
    np.testing.assert_array_equal(np.broadcast_to(array, expected.shape), expected)
    for shape in SHAPES:
        shape = shape._replace(by_key=by_key)
        for head in range(H):
            np.testing.assert_array_equal(followed(pattern, shape, head), expected[head])
        assert lists_of(pattern, shape).blind == (not (expected.any(1).all() and expected.any(2).all()))


def test_order_and_sharing_of_lists():
    """The longest come first, and heads that see the same share them."""
    lists = lists_of(lowered("local or global")[0], SHAPES[0])
    lengths = lists.tiles[0, :, 3] - lists.tiles[0, :, 1]
    assert list(lengths) == sorted(lengths, reverse=True) and lengths[0] > lengths[-1]
    mask = Mask.from_function(lambda h, q, k: jnp.where(h < 2, k <= q, k >= q))
    found = mask.lower(T, T, num_heads=H).pattern
    assert found is not None and list(lists_of(found, Shape(T, T, 16, 16)).heads) == [0, 0, 1, 1]


def test_equal_tiles_are_stored_once():
    """Of a long window only the diagonals at its sides are partly visible."""
    pattern = Mask.from_function(lambda h, q, k: (k <= q) & (q - k < 4096)).lower(2**15, 2**15).pattern
    assert pattern is not None
    known = classify.classify(pattern, Shape(2**15, 2**15, 128, 128))
    kinds = known.rows[0].kinds
    assert len(known.bits) == 3 and (kinds == tile_shape.PARTIAL).sum() == 256 + 224
    assert (kinds == tile_shape.FULL).sum() == sum(min(m, 31) for m in range(256))
    assert classify.visible_share(pattern, 2**15, 2**15) == (kinds != tile_shape.NONE).mean()


def test_long_sequences_take_little_memory():
    length, mask = 131_072, Mask.causal() & (Mask.sliding_window(4095) | Mask.global_tokens(128))
    pattern = mask.lower(length, length).pattern
    assert pattern is not None
    shape = Shape(length, length, 128, 128)
    lists = *lists_of(pattern, shape), *lists_of(pattern, shape._replace(by_key=True))
    assert sum(x.nbytes for x in lists if isinstance(x, np.ndarray)) < 10e6


FUNCTIONS = {
    "arithmetic": lambda h, q, k: 3 * q - 2 * k + 7 > jnp.maximum(q, 5) * 2,
    "floor division": lambda h, q, k: (q - 20) // 7 == (k - 20) // 7,
    "remainders": lambda h, q, k: (q - k) % 5 + (k - 30) % 3 < 3,
    "truncation": lambda h, q, k: jax.lax.div(q - 33, 4) <= jax.lax.rem(k - 33, 9),
    "absolute": lambda h, q, k: abs(q - k) * abs(q - 30) < 100,
    "bits": lambda h, q, k: ((q & 3) ^ (k >> 2)) != 1,
    "choice": lambda h, q, k: jnp.where(q < 20, k < 10, (k > 40) ^ (q > 50)),
    "squares": lambda h, q, k: (q - 30) ** 2 + (k - 30) ** 2 < 400,
    "clip": lambda h, q, k: jnp.clip(k - q, -5, 5) == 5,
    "lookup": lambda h, q, k: jnp.asarray([5, 1, 4, 2])[q % 4] <= jnp.asarray([[1, 3], [2, 6]])[h % 2, k // 40],
    "wrap": lambda h, q, k: (q * 1_103_515_245 + k * 12_345) % 7 == 0,
    "wrapped constants": lambda h, q, k: (q * 1_103_515_245 * 1_103_515_245 + k) * 1_000_003 > 5,
    "least": lambda h, q, k: abs((q - k) * 2**30 * 2) < 0,
    "unsigned": lambda h, q, k: (k - q).astype("uint32") > jnp.uint32(2**31 + 5),
    "float": lambda h, q, k: q.astype("float32") * 0.5 > k.astype("float32") - 3,
}  # fmt: skip


def bounds(
    function: Any, first: np.ndarray, block: int, head: int = 0, regular: bool = True
) -> interval.Bounds:
    """Those of tiles of `block` by `block` pairs; `regular`: numbers of one form are kept along it."""
    q, k = first[:, None], first[None]
    edges = lambda x: (x, x) if block == 1 else (x, x + block - 1)
    step = int(first[1] - first[0])
    of = tiles.Tiles(edges(q), edges(k), head, (step, step) if regular else None)
    traced = evaluate.Function(jax.make_jaxpr(function)(*[jnp.int32(0)] * 3))
    return evaluate.bounds_of(traced, of)[0].spread(of)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_bounds_hold(name):
    """No pair of a tile is outside its bounds, and of single pairs they are the value, if known at all."""
    function = FUNCTIONS[name]
    over = jax.vmap(jax.vmap(function, (None, None, 0)), (None, 0, None))
    pairs, length = np.arange(80), 80
    for head in range(2):
        exact = np.asarray(over(jnp.int32(head), jnp.asarray(pairs), jnp.asarray(pairs)))
        for block, regular in ((1, True), (5, True), (16, True), (5, False)):
            result = bounds(function, np.arange(0, length, block), block, head, regular)
            values = exact.reshape(length // block, block, length // block, block)
            lo, hi = (np.broadcast_to(x, (length // block,) * 2) for x in (result.lo, result.hi))
            assert (lo <= values.all((1, 3))).all() and (hi >= values.any((1, 3))).all()
            if block == 1 and result.exact:
                np.testing.assert_array_equal(lo, exact)
            elif block == 1:
                assert name in ("float", "bits", "unsigned")


def test_bounds_decide_where_they_can():
    """Otherwise long masks would be looked at pair by pair."""
    documents = jnp.asarray(np.repeat(np.arange(64), 64))
    for function, most in (
        (lambda h, q, k: (k <= q) & (q - k < 500), 0.025),
        (lambda h, q, k: (documents[q] == documents[k]) & (k <= q), 0.02),
        (lambda h, q, k: (q // 512 == k // 512) | (k < 100), 0.05),
    ):
        result = bounds(function, np.arange(0, 4096, 32), 32)
        assert (np.asarray(result.lo) != result.hi).mean() < most


def test_equal_masks_are_equal_patterns():
    make = lambda: Mask.causal() & (Mask.sliding_window(5) | Mask.from_blocks(np.eye(3, dtype=bool), 16))
    first, second = (make().lower(48, 48, num_heads=2).pattern for _ in range(2))
    assert first == second and hash(first) == hash(second)
    other = (Mask.causal() & (Mask.sliding_window(6) | Mask.from_blocks(np.eye(3, dtype=bool), 16))).lower(
        48, 48
    )
    assert other.pattern != first


def test_specs_of_masks_within_masks():
    """Every array is split as if it were alone."""
    ids, spec = np.zeros((2, 8), int), jax.sharding.PartitionSpec
    mask = Mask.from_segments(ids) | ~Mask.prefix(jnp.array([1, 2]))
    specs = (mask & Mask.from_blocks(jnp.ones((2, 4, 2, 2), bool), 4)).sharding_specs(
        "data", "model", keys="k"
    )
    leaves = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, spec))
    assert leaves == [spec("data", "model", None, None), spec("data", None), spec("data", "k"), spec("data")]
