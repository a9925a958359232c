"""`Mask` against its definition, pair by pair, and its lowering against itself."""

import dataclasses
import functools
import gc
import operator
import sys
import weakref
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel_eqx as ejx
from ejkernel_eqx import Mask
from tests.arrays import normal
from tests.attention.dense import cotangents, exact
from tests.attention.patterns import PATTERNS
from tests.attention.patterns import S as KEYS
from tests.attention.patterns import T as QUERIES
from tests.tolerances import assert_close

B, H = 2, 3


@dataclasses.dataclass(frozen=True)
class Options:
    """What a mask says, as plain numbers."""

    causal: bool = False
    windows: tuple = ()
    chunks: tuple = ()
    prefixes: tuple = ()  # [B] each
    segments: tuple = ()  # pairs of [B, T], [B, S]
    types: tuple = ()
    type_runs: tuple = ()
    q_lengths: Any = None  # [B]
    kv_lengths: Any = None
    packed: Any = None  # offsets of queries, of keys
    dense: Any = None  # [B, H, T, S]

    def masks(self) -> list[Mask]:
        single = [Mask.causal()] * self.causal
        single += [Mask.sliding_window(*window) for window in self.windows]
        single += [Mask.chunked(size) for size in self.chunks]
        single += [Mask.prefix(lengths) for lengths in self.prefixes]
        single += [Mask.from_segments(*pair) for pair in self.segments]
        single += [Mask.token_types(*pair) for pair in self.types]
        single += [Mask.token_types(*pair, runs=True) for pair in self.type_runs]
        single += [] if self.q_lengths is None else [Mask.from_lengths(q_lengths=self.q_lengths)]
        single += [] if self.kv_lengths is None else [Mask.from_lengths(kv_lengths=self.kv_lengths)]
        single += [] if self.packed is None else [Mask.from_cu_seqlens(*self.packed)]
        single += [] if self.dense is None else [Mask.from_dense(np.asarray(self.dense))]
        return single

    def sees(self, b: int, h: int, i: int, j: int, num_queries: int, num_keys: int, offset: int) -> bool:
        """The definition."""
        first = 0
        position = i + offset
        if self.packed is not None:
            q_starts, kv_starts = self.packed
            inside = [n for n in range(len(q_starts) - 1) if q_starts[n] <= i < q_starts[n + 1]]
            if not inside or not kv_starts[inside[0]] <= j < kv_starts[inside[0] + 1]:
                return False
            n = inside[0]
            first = kv_starts[n]
            # Bottom-right: the last query of a sequence sits on its last key.
            position = kv_starts[n + 1] - q_starts[n + 1] + i
        checks = [not self.causal or j <= position]
        checks += [
            (left is None or position - left <= j) and (right is None or j <= position + right)
            for left, right in self.windows
        ]
        checks += [(j - first) // size == (position - first) // size for size in self.chunks]
        checks += [j <= position or j - first < lengths[b] for lengths in self.prefixes]
        checks += [q_ids[b][i] == kv_ids[b][j] and q_ids[b][i] >= 0 for q_ids, kv_ids in self.segments]
        checks += [j <= position or q_ids[b][i] == kv_ids[b][j] != 0 for q_ids, kv_ids in self.types]
        checks += [
            j <= position
            or (q_ids[b][i] != 0 and all(kv_ids[b][max(position + 1, 0) : j + 1] == q_ids[b][i]))
            for q_ids, kv_ids in self.type_runs
        ]
        checks += [self.q_lengths is None or i < self.q_lengths[b]]
        checks += [self.kv_lengths is None or j < self.kv_lengths[b]]
        checks += [self.dense is None or self.dense[b][h][i][j]]
        return all(checks)

    def brute_force(self, t: int, s: int, q_offset: Any) -> np.ndarray:
        offsets = np.broadcast_to(s - t if q_offset is None else q_offset, (B,))
        result = np.zeros((B, H, t, s), bool)
        for b, h, i, j in np.ndindex(B, H, t, s):
            result[b, h, i, j] = self.sees(b, h, i, j, t, s, int(offsets[b]))
        return result


def intersect(masks: list[Mask]) -> Mask:
    return functools.reduce(operator.and_, masks, Mask())


def recombined(mask: Mask, t: int, s: int, q_offset: Any) -> np.ndarray:
    """The intersection of what `lower` returns, said once more from its fields alone."""
    lowered = mask.lower(t, s, q_offset=q_offset)
    i, j = np.arange(t)[:, None], np.arange(s)
    seen = np.ones((t, s), bool)
    if lowered.left is not None:
        seen = seen & (j >= i + lowered.offset - lowered.left)
    if lowered.right is not None:
        seen = seen & (j <= i + lowered.offset + lowered.right)
    if lowered.rows is not None:
        assert (lowered.left, lowered.right, lowered.offset) == (None, None, 0)
        start, end = (np.asarray(x)[..., :, None] for x in lowered.rows[:2])
        seen = seen & (start <= j) & (j < end)
    seen = seen[..., None, :, :]
    if lowered.segments is not None:
        q_ids, kv_ids = (np.asarray(x) for x in lowered.segments)
        seen = (
            seen
            & ((q_ids[..., :, None] == kv_ids[..., None, :]) & (q_ids >= 0)[..., :, None])[..., None, :, :]
        )
    return seen if lowered.dense is None else seen & np.asarray(lowered.dense)


def check(options: Options, t: int, s: int, q_offset: Any = None) -> None:
    expected = options.brute_force(t, s, q_offset)
    offset = q_offset if q_offset is None or isinstance(q_offset, int) else jnp.asarray(q_offset)
    mask = intersect(options.masks())
    np.testing.assert_array_equal(np.broadcast_to(recombined(mask, t, s, offset), expected.shape), expected)
    actual = np.asarray(mask.as_array(t, s, q_offset=offset))
    np.testing.assert_array_equal(np.broadcast_to(actual, expected.shape), expected)


RNG = np.random.default_rng(0)
DENSE = (RNG.random((B, H, 6, 7)) < 0.6).tolist()
IDS = (
    np.array([[0, 0, 1, 1, 2, -1], [1, 1, 0, 0, -3, 1]]),
    np.array([[0, 0, 1, 2, 2, 2, -1], [1, 0, 0, 1, 1, -3, 1]]),
)
TYPES = (
    np.array([[1, 1, 0, 0, 2, 2], [0, 1, 1, -1, 1, 1]]),
    np.array([[1, 1, 1, 0, 0, 2, 2], [0, 1, 1, 1, -1, 1, 1]]),
)
SINGLE = {
    "everything": Options(),
    "causal": Options(causal=True),
    "window": Options(windows=((2, 1),)),
    "left": Options(windows=((2, None),)),
    "right": Options(windows=((None, 0),)),
    "chunked": Options(chunks=(3,)),
    "prefix": Options(prefixes=((2, 5),)),
    "segments": Options(segments=(IDS,)),
    "two segmentations": Options(segments=(IDS, (IDS[0][::-1], IDS[1][::-1]))),
    "token types": Options(types=(TYPES,)),
    "token types in a window": Options(types=(TYPES,), windows=((3, 2),), kv_lengths=(6, 7)),
    "two kinds of token types": Options(types=(TYPES, (TYPES[0][::-1], TYPES[1][::-1]))),
    "runs of token types": Options(type_runs=(TYPES,)),
    "runs in documents": Options(type_runs=(TYPES,), packed=((0, 3, 6), (0, 4, 7))),
    "token types in documents": Options(types=(TYPES,), packed=((0, 3, 6), (0, 4, 7))),
    "query lengths": Options(q_lengths=(4, 0)),
    "key lengths": Options(kv_lengths=(0, 5)),
    "packed": Options(packed=((0, 2, 2, 5), (0, 3, 4, 7))),
    "packed with a tail and a head": Options(packed=((1, 3, 5), (0, 1, 6))),
    "dense": Options(dense=DENSE),
    "two windows": Options(windows=((4, 0), (None, 3), (1, None))),
    "Llama 4": Options(causal=True, chunks=(3,)),
    "prefix in documents": Options(prefixes=((1, 1),), packed=((0, 3, 6), (0, 4, 7))),
    "chunks in documents": Options(causal=True, chunks=(2,), packed=((0, 3, 6), (0, 4, 7))),
}


QUICK = ("prefix", "runs in documents", "two segmentations", "packed with a tail and a head")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in SINGLE]
)
def test_by_definition(name):
    check(SINGLE[name], 6, 7)
    if not SINGLE[name].packed:
        check(SINGLE[name], 6, 7, q_offset=-2)
        check(SINGLE[name], 6, 7, q_offset=np.array([3, 0]))


@pytest.mark.few(3)
@pytest.mark.parametrize("seed", range(12))
def test_any_intersection(seed):
    """Of three, with sums of what all of them may have many of, in any order."""
    rng, merged = np.random.default_rng(seed), {}
    for name in rng.permutation(list(SINGLE))[:3].tolist():
        for field, value in vars(SINGLE[name]).items():
            several = field in ("windows", "chunks", "prefixes", "segments", "types", "type_runs")
            merged[field] = merged.get(field, ()) + value if several else merged.get(field) or value
    offset = None if merged["packed"] else [None, 2, np.array([-4, 3])][seed % 3]
    check(Options(**merged), 6, 7, offset)


def test_what_is_static_stays_static():
    """A causal or windowed mask reaches kernels as numbers, so that they skip tiles without looking."""
    lowered = (Mask.causal() & Mask.sliding_window(5, 3) & Mask.sliding_window(9)).lower(8, 10)
    assert lowered[:3] == (5, 0, 2) and all(part is None for part in lowered[3:])
    lowered = (Mask.sliding_window(4, None) & Mask.from_segments(np.zeros((8,), int))).lower(8, 8, q_offset=3)
    assert lowered[:4] == (4, None, 3, None) and lowered.dense is None
    # One pair of segment ids is carried as such; only a second one has to be made dense.
    assert (Mask.from_segments(*IDS) & Mask.from_lengths(kv_lengths=np.array([3, 4]))).lower(
        6, 7
    ).dense is None


def test_in_jit_and_vmap():
    chosen = SINGLE["segments"]
    mask = Mask.causal() & Mask.from_segments(*IDS) & Mask.from_lengths(kv_lengths=(5, 7))
    expected = dataclasses.replace(chosen, causal=True, kv_lengths=(5, 7)).brute_force(6, 7, None)
    actual = jax.jit(lambda mask: mask.as_array(6, 7))(mask)
    np.testing.assert_array_equal(np.broadcast_to(actual, expected.shape), expected)
    per_row = jax.vmap(
        lambda q_ids, kv_ids, n: (
            Mask.from_segments(q_ids, kv_ids) & Mask.from_lengths(kv_lengths=n)
        ).as_array(6, 7)
    )(*IDS, jnp.array([5, 7]))
    expected = dataclasses.replace(chosen, kv_lengths=(5, 7)).brute_force(6, 7, None)
    np.testing.assert_array_equal(np.broadcast_to(per_row, expected.shape), expected)
    # Built inside and given as an argument alike; its static half decides about retracing.
    traces = []

    @eqx.filter_jit
    def call(mask, x):
        traces.append(mask)
        return ejx.FlashAttention()(x, x, x, mask=mask)

    x = normal(0, (2, 6, 2, 8))
    for ids in (IDS[0], IDS[0][::-1]):
        mask = Mask.causal() & Mask.from_segments(ids)
        dense = np.broadcast_to(mask.as_array(6, 6), (2, 2, 6, 6))
        assert_close(call(mask, x), ejx.FlashAttention()(x, x, x, mask=jnp.asarray(dense)))
    assert len(traces) == 1
    call(Mask.from_segments(IDS[0]), x)
    assert len(traces) == 2


@pytest.mark.slow
def test_traced_sizes():
    """A scan over layers with local and global windows, and sizes mapped over: as the same numbers written in."""
    x = normal(0, (2, 9, 2, 8))
    attention = ejx.FlashAttention(causal=True)
    windows, chunks = jnp.array([2, 2**31 - 1, 0]), jnp.array([4, 3, 2**30])

    def layer(x, sizes):
        mask = Mask.sliding_window(sizes[0]) & Mask.chunked(sizes[1])
        return attention(x, x, x, mask=mask), None

    found = jax.jit(lambda x: jax.lax.scan(layer, x, (windows, chunks))[0])(x)
    i, j = np.arange(9)[:, None], np.arange(9)
    written = np.asarray(x, np.float64)
    for window, chunk in zip(windows.tolist(), chunks.tolist(), strict=True):
        seen = (j <= i) & (j >= i - window) & (i // chunk == j // chunk)
        q = jnp.asarray(written)
        written = exact(dict(q=written, k=written, v=written), *cotangents(dict(q=q, v=q)), seen)[0][0]
    assert_close(found, written)

    # One size a row, by `vmap` and by an array of rows; a size that is known is static.
    sizes = jnp.array([1, 3])
    for make in (
        lambda n: Mask.sliding_window(n, 1),
        Mask.chunked,
        lambda n: Mask.sliding_window(3) & Mask.sliding_window(n, None),
    ):
        expected = [make(n).as_array(5, 7) for n in (1, 3)]
        np.testing.assert_array_equal(make(sizes).as_array(5, 7), expected)
        np.testing.assert_array_equal(jax.vmap(lambda n: make(n).as_array(5, 7))(sizes), expected)  # noqa: B023
    assert Mask.sliding_window(jnp.int32(4)) == Mask.sliding_window(4)
    assert Mask.chunked(np.int64(3)) == Mask.chunked(3)


def test_visualize():
    assert Mask.causal().visualize(3, 5) == "###..\n####.\n#####"
    assert Mask.sliding_window(1, 0).visualize(3, 3) == "#..\n##.\n.##"
    assert Mask.from_segments(np.array([[0, 1, -1], [5, 5, 5]])).visualize(3, 3) == "#..\n.#.\n..."
    assert Mask.prefix(2).visualize(4, 4) == "##..\n##..\n###.\n####"
    assert (Mask.chunked(2) & Mask.causal()).visualize(4, 4, q_offset=0) == "#...\n##..\n..#.\n..##"
    assert Mask.causal().visualize(2, 2, q_offset=-1) == "..\n#."


def test_token_types_as_published():
    """Gemma 3: text is causal, an image sees itself; as runs, an image does not see ahead to the next one."""
    ids = np.array([0, 1, 1, 0, 1, 1])
    assert Mask.token_types(ids).visualize(6, 6) == "\n".join(
        ["#.....", "###.##", "###.##", "####..", "######", "######"]
    )
    assert Mask.token_types(ids, runs=True).visualize(6, 6) == "\n".join(
        ["#.....", "###...", "###...", "####..", "######", "######"]
    )
    # A union takes a dense mask; runs are ranges of keys.
    lowered = Mask.token_types(ids).lower(6, 6)
    assert lowered.rows is None and lowered.dense is not None
    lowered = Mask.token_types(ids, runs=True).lower(6, 6)
    assert lowered.rows is not None and lowered.dense is None


@pytest.mark.parametrize("suffix, start", [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_picture(tmp_path, suffix, start):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"mask{suffix}"
    for queries, keys in ((5, 8), (0, 4), (1, 300)):
        text = Mask.causal().visualize(queries, keys, path=path)
        assert text == Mask.causal().visualize(queries, keys)
        assert path.read_bytes().startswith(start)


def test_picture_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.colors", None)
    with pytest.raises(ImportError, match=r"needs matplotlib, which is not installed; run: pip install"):
        Mask.causal().visualize(2, 2, path=tmp_path / "mask.png")


def every_kind(batch: int, t: int) -> Mask:
    rng = np.random.default_rng(0)
    ids = lambda: rng.integers(-1, 2, (batch, t))
    return (
        Mask.causal()
        & Mask.from_segments(ids())
        & Mask.from_segments(np.zeros(t, int), np.zeros((1, t), int))
        & Mask.token_types(ids())
        & Mask.token_types(ids(), runs=True)
        & Mask.prefix(rng.integers(0, t, batch))
        & Mask.from_lengths(rng.integers(1, t, batch), 5)
        & Mask.from_dense(rng.random((batch, 1, t, t)) < 0.8)
    )


def test_sharding_specs():
    mask = every_kind(4, 8)
    specs = mask.sharding_specs(batch=("a", "b"), heads="h", queries="q", keys="k")
    assert jax.tree.structure(specs) == jax.tree.structure(mask)
    both = ("a", "b")
    assert specs.is_causal
    assert specs.segments == ((P(both, "q"), P(both, "k")), (P("q"), P(None, "k")))
    assert specs.types == specs.type_runs == ((P(both, "q"), P(both, "k")),)
    assert specs.prefix_lengths == specs.q_lengths == P(both) and specs.kv_lengths == P()
    assert specs.dense == P(both, None, "q", "k")
    assert Mask.from_dense(np.ones((2, 3, 4, 5, 6), bool)).sharding_specs(P("a", None), "h").dense == P(
        "a", None, "h", None, None
    )
    assert Mask.from_cu_seqlens([0, 3, 8]).sharding_specs("a", queries="q").cu_seqlens == (P(), P())
    assert Mask.from_segments(np.ones((2, 3, 4), int)).sharding_specs(queries="q").segments[0][0] == P(
        None, None, "q"
    )


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
def test_split_over_a_mesh():
    mask, expected = every_kind(4, 8), every_kind(4, 8).as_array(8, 8)
    mesh = jax.make_mesh((4, 2), ("data", "seq"), axis_types=(AxisType.Auto,) * 2)
    specs = mask.sharding_specs("data", queries="seq")
    placed = jax.device_put(mask, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))
    assert placed.dense is not None and placed.dense.sharding.shard_shape((4, 1, 8, 8)) == (1, 1, 4, 8)
    np.testing.assert_array_equal(jax.jit(lambda m: m.as_array(8, 8))(placed), expected)

    # Every device has its rows and their queries; where these begin it says itself.
    def part(mask):
        first = jax.lax.axis_index("seq") * 4
        return mask.as_array(4, 8, q_offset=first)

    # Lengths of queries count from the row's beginning, so they are left out where queries are split.
    mask = dataclasses.replace(mask, q_lengths=None)
    expected = mask.as_array(8, 8)
    specs = mask.sharding_specs("data", queries="seq")
    split = jax.shard_map(part, mesh=mesh, in_specs=(specs,), out_specs=P("data", None, "seq", None))
    np.testing.assert_array_equal(jax.jit(split)(mask), expected)


def test_random_is_as_dense_as_asked():
    mask = Mask.random(100, 200, visible=0.3, key=jax.random.key(0)).as_array(100, 200)
    assert mask.shape == (1, 100, 200) and abs(float(mask.mean()) - 0.3) < 0.02


WRONG: dict[str, Any] = {
    "left: expected a key count >= 0 or None, received -1": lambda: Mask.sliding_window(-1),
    "right: expected a key count >= 0 or None, received -2": lambda: Mask.sliding_window(None, -2),
    "type_ids: expected ints, one per token, 0 for causal only, received float32": lambda: Mask.token_types(np.ones(3, np.float32)),
    "kv_type_ids: expected ints, one per token": lambda: Mask.token_types(np.ones(3, int), np.int32(1)),
    "mask: expected token types for 3 queries and 4 keys": lambda: Mask.token_types(np.ones(3, int)).as_array(3, 4),
    "batch: expected a name for each of the 2 leading axes": lambda: Mask.from_segments(np.ones((2, 4, 3), int)).sharding_specs("x"),
    "sharding_specs: expected each mesh axis at most once": lambda: Mask.causal().sharding_specs(("x", "y"), queries="x"),
    "path: expected a file name ending in .png": lambda: Mask.causal().visualize(2, 2, path="mask.txt"),
    "size: expected a chunk of at least one position, received 0": lambda: Mask.chunked(0),
    "mask: expected a boolean array, received dtype float32": lambda: Mask.from_dense(np.ones((2, 2), np.float32)),
    "cu_seqlens: expected in at most one of two combined masks": lambda: Mask.from_cu_seqlens([0, 3]) & Mask.from_cu_seqlens([0, 2, 3]),
    "f: expected a function that can be traced": lambda: Mask.from_function(lambda h, q, k: q > 1 and k > 1),
    "f: expected one boolean": lambda: Mask.from_function(lambda h, q, k: q - k),
    "stride: expected an int of at least 1": lambda: Mask.strided(0),
    "count: expected an int of at least 0": lambda: Mask.global_tokens(-1),
    "left: expected an int of at least 0": lambda: Mask.dilated(-1, rate=2),
    "block_map: expected booleans": lambda: Mask.from_blocks(np.ones((2, 2)), 16),
    "block_size: expected an int of at least 1": lambda: Mask.from_blocks(np.ones((2, 2), bool), 0),
    "block_map: expected 3 by 2 blocks": lambda: Mask.from_blocks(np.ones((2, 2), bool), 16).as_array(40, 32),
    "num_heads: expected the number of heads": lambda: PATTERNS["wider heads"].mask.as_array(4, 4),
    "block_map: expected 1 or 3 heads": lambda: PATTERNS["blocks"].mask.as_array(QUERIES, KEYS, num_heads=3),
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_what_makes_no_mask(message):
    with pytest.raises(ValueError) as caught:
        WRONG[message]()
    assert str(caught.value).startswith(message)


def test_what_all_parts_of_a_union_hold_stays_outside():
    """So that no array of all pairs is made of it."""
    ids, kv_lengths = jnp.arange(40) // 9, jnp.asarray(30)
    segments, lengths = Mask.from_segments(ids), Mask.from_lengths(kv_lengths=kv_lengths)
    local, first = Mask.sliding_window(3, 2), Mask.global_tokens(4)
    seen = lambda mask: np.asarray(mask.as_array(40, 40)).reshape(40, 40)
    union = (lengths & segments & local) | (first & segments & lengths)
    lowered = union.lower(40, 40)
    assert lowered.dense is None and lowered.pattern is not None and lowered.segments is not None
    expected = seen(segments) & seen(lengths) & (seen(local) | seen(first))
    np.testing.assert_array_equal(seen(union), expected)
    part = (lengths & local) | (lengths & segments & first)
    np.testing.assert_array_equal(seen(part), seen(lengths) & (seen(local) | (seen(segments) & seen(first))))
    # Equal ids in other arrays are not known to be equal.
    other = (Mask.from_segments(ids + 0) & local) | (segments & first)
    np.testing.assert_array_equal(seen(other), seen(segments) & (seen(local) | seen(first)))


def test_complements_of_unions_and_complements():
    segments, first = Mask.from_segments(jnp.arange(40) // 9), Mask.global_tokens(4)
    seen = lambda mask: np.asarray(mask.as_array(40, 40)).reshape(40, 40)
    np.testing.assert_array_equal(seen(~(segments | first)), ~(seen(segments) | seen(first)))
    both = Mask.causal() & (segments | first)
    np.testing.assert_array_equal(seen(~both), ~(seen(Mask.causal()) & (seen(segments) | seen(first))))
    np.testing.assert_array_equal(seen(~~segments), seen(segments))
    assert (~~segments).lower(40, 40).dense is None
    assert (~(segments | first)).lower(40, 40).pattern is not None  # tiles that it hides are skipped


def test_nothing_keeps_a_function_alive_that_jax_has_forgotten():
    class Table:
        pass

    def called(n: int, use: str) -> weakref.ref:
        table = Table()
        mask = Mask.from_function(lambda head, query, key: (key <= query) | (key == n) & (table is not None))
        if use == "as an array":
            mask.as_array(4, 4)
        else:
            q = jnp.ones((4, 1, 8))
            ejx.flash_attention(q, q, q, mask=mask, platform="xla").block_until_ready()
        return weakref.ref(table)

    tables = [called(n, use) for use in ("as an array", "in a call") for n in range(2)]
    jax.clear_caches()
    gc.collect()
    assert [table() for table in tables] == [None] * 4
