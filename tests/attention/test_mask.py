"""`Mask` against its definition, pair by pair, and its lowering against itself."""

import dataclasses
import functools
import operator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ejkernel_eqx as ejx
from ejkernel_eqx import Mask
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
        single += [] if self.q_lengths is None else [Mask.from_lengths(q_lengths=self.q_lengths)]
        single += [] if self.kv_lengths is None else [Mask.from_lengths(kv_lengths=self.kv_lengths)]
        single += [] if self.packed is None else [Mask.from_cu_seqlens(*self.packed)]
        single += [] if self.dense is None else [Mask.from_dense(self.dense)]
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
        checks += [self.q_lengths is None or i < self.q_lengths[b]]
        checks += [self.kv_lengths is None or j < self.kv_lengths[b]]
        checks += [self.dense is None or bool(self.dense[b, h, i, j])]
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
DENSE = RNG.random((B, H, 6, 7)) < 0.6
IDS = (
    np.array([[0, 0, 1, 1, 2, -1], [1, 1, 0, 0, -3, 1]]),
    np.array([[0, 0, 1, 2, 2, 2, -1], [1, 0, 0, 1, 1, -3, 1]]),
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


@pytest.mark.parametrize("name", SINGLE)
def test_by_definition(name):
    check(SINGLE[name], 6, 7)
    if not SINGLE[name].packed:
        check(SINGLE[name], 6, 7, q_offset=-2)
        check(SINGLE[name], 6, 7, q_offset=np.array([3, 0]))


@st.composite
def options(draw, t: int, s: int) -> Options:
    flag, length = st.booleans(), st.integers(-1, s + 2)
    side = st.one_of(st.none(), st.integers(0, s))
    ids = lambda n: np.array(
        draw(st.lists(st.lists(st.integers(-1, 2), min_size=n, max_size=n), min_size=B, max_size=B))
    )
    packed = None
    if draw(st.integers(0, 3)) == 0:
        count = draw(st.integers(1, 3))
        cuts = lambda n: tuple(
            sorted(draw(st.lists(st.integers(0, n), min_size=count + 1, max_size=count + 1)))
        )
        packed = (cuts(t), cuts(s))
    return Options(
        causal=draw(flag),
        windows=tuple(draw(st.lists(st.tuples(side, side), max_size=2))),
        chunks=tuple(draw(st.lists(st.integers(1, s), max_size=2))),
        prefixes=tuple(draw(st.lists(st.tuples(length, length), max_size=2))),
        segments=tuple((ids(t), ids(s)) for _ in range(draw(st.integers(0, 2)))),
        q_lengths=draw(st.one_of(st.none(), st.tuples(length, length))),
        kv_lengths=draw(st.one_of(st.none(), st.tuples(length, length))),
        packed=packed,
        dense=np.random.default_rng(draw(st.integers(0, 99))).random((B, H, t, s)) < 0.8
        if draw(flag)
        else None,
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_intersection(data):
    t, s = data.draw(st.sampled_from([(4, 6), (6, 4), (5, 5)]))
    chosen = data.draw(options(t, s))
    offset = st.one_of(
        st.none(), st.integers(-4, 6), st.tuples(st.integers(-4, 6), st.integers(-4, 6)).map(np.array)
    )
    q_offset = None if chosen.packed else data.draw(offset)
    expected = chosen.brute_force(t, s, q_offset)
    masks = data.draw(st.permutations(chosen.masks()))
    q_offset = jnp.asarray(q_offset) if isinstance(q_offset, np.ndarray) else q_offset
    mask = intersect(masks)
    np.testing.assert_array_equal(np.broadcast_to(recombined(mask, t, s, q_offset), expected.shape), expected)
    np.testing.assert_array_equal(
        np.broadcast_to(mask.as_array(t, s, q_offset=q_offset), expected.shape), expected
    )


def test_what_is_static_stays_static():
    """A causal or windowed mask reaches kernels as numbers, so that they skip tiles without looking."""
    lowered = (Mask.causal() & Mask.sliding_window(5, 3) & Mask.sliding_window(9)).lower(8, 10)
    assert lowered[:3] == (5, 0, 2) and lowered[3:] == (None, None, None)
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

    x = jax.random.normal(jax.random.key(0), (2, 6, 2, 8))
    for ids in (IDS[0], IDS[0][::-1]):
        mask = Mask.causal() & Mask.from_segments(ids)
        dense = np.broadcast_to(mask.as_array(6, 6), (2, 2, 6, 6))
        assert_close(call(mask, x), ejx.FlashAttention()(x, x, x, mask=jnp.asarray(dense)))
    assert len(traces) == 1
    call(Mask.from_segments(IDS[0]), x)
    assert len(traces) == 2


def test_visualize():
    assert Mask.causal().visualize(3, 5) == "###..\n####.\n#####"
    assert Mask.sliding_window(1, 0).visualize(3, 3) == "#..\n##.\n.##"
    assert Mask.from_segments(np.array([[0, 1, -1], [5, 5, 5]])).visualize(3, 3) == "#..\n.#.\n..."
    assert Mask.prefix(2).visualize(4, 4) == "##..\n##..\n###.\n####"
    assert (Mask.chunked(2) & Mask.causal()).visualize(4, 4, q_offset=0) == "#...\n##..\n..#.\n..##"
    assert Mask.causal().visualize(2, 2, q_offset=-1) == "..\n#."


def test_random_is_as_dense_as_asked():
    mask = Mask.random(100, 200, visible=0.3, key=jax.random.key(0)).as_array(100, 200)
    assert mask.shape == (1, 100, 200) and abs(float(mask.mean()) - 0.3) < 0.02


def test_two_packings_do_not_combine():
    with pytest.raises(
        ValueError,
        match=r"^cu_seqlens: expected in one of two combined masks, received in both; merge the packings first",
    ):
        Mask.from_cu_seqlens([0, 3]) & Mask.from_cu_seqlens([0, 2, 3])
    with pytest.raises(TypeError, match="unsupported operand"):
        Mask.causal() & np.ones((3, 3), bool)


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: Mask.sliding_window(-1), "^left: expected a number of keys >= 0 or None, received -1"),
        (
            lambda: Mask.sliding_window(None, -2),
            "^right: expected a number of keys >= 0 or None, received -2",
        ),
        (lambda: Mask.chunked(0), "^size: expected a chunk of at least one position, received 0"),
        (
            lambda: Mask.from_dense(np.ones((2, 2), np.float32)),
            "^mask: expected a boolean array, received dtype float32; an additive mask is given as bias=",
        ),
    ],
)
def test_what_makes_no_mask(build, message):
    with pytest.raises(ValueError, match=message):
        build()
