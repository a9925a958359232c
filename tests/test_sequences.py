"""Helpers for packed sequences against the loops that define them."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from ejkernel_eqx import sequences
from tests.attention.dense import quick

quickly = settings(max_examples=20, deadline=None, derandomize=True)
LENGTHS = st.lists(st.integers(0, 4), min_size=0, max_size=5)
TOTAL = 24  # one size, so that all examples share their compilations


def packed(lengths, head=0, number=5):
    """Offsets, and the tokens of each sequence: five always, the last ones empty."""
    offsets = np.cumsum([head, *lengths, *[0] * (number - len(lengths))])
    return offsets.astype(np.int32), [range(a, b) for a, b in itertools.pairwise(offsets)]


def ids_of(spans, total=TOTAL):
    ids = np.full(total, -1, np.int32)
    for n, span in enumerate(spans):
        ids[list(span)] = n
    return ids


def summed(x, groups, reverse):
    """`[T, ...]` within groups of tokens, and 0 elsewhere, in float64."""
    out = np.zeros(x.shape)
    for group in groups:
        tokens = list(group)[::-1] if reverse else list(group)
        out[tokens] = np.cumsum(np.asarray(x, np.float64)[tokens], axis=0)
    return out


def chunks_of(spans, size):
    return [
        (n, m, span[m * size : (m + 1) * size])
        for n, span in enumerate(spans)
        for m in range(-(-len(span) // size))
    ]


@quickly
@given(lengths=LENGTHS, head=st.integers(0, 3), size=st.sampled_from([1, 3]))
def test_offsets_ids_positions_chunks_and_back(lengths, head, size):
    offsets, spans = packed(lengths, head)
    ids, positions = sequences.cu_seqlens_to_segment_ids(offsets, TOTAL), np.zeros(TOTAL, np.int32)
    for span in spans:
        positions[list(span)] = np.arange(len(span))
    np.testing.assert_array_equal(ids, ids_of(spans))
    np.testing.assert_array_equal(sequences.positions_from_cu_seqlens(offsets, TOTAL), positions)
    np.testing.assert_array_equal(sequences.segment_positions(ids), positions)
    np.testing.assert_array_equal(sequences.sequence_lengths(offsets), [len(span) for span in spans])
    assert ids.dtype == jnp.int32
    # Sequences without tokens have no ids, so only the others come back.
    full = [n for n in lengths if n]
    expected = np.cumsum([head if full else 0, *full, *[0] * (5 - len(full))])
    np.testing.assert_array_equal(sequences.segment_ids_to_cu_seqlens(ids, 5), expected)
    chunks, most = chunks_of(spans, size), TOTAL // size + 5
    found, absent = sequences.chunk_indices(offsets, size, most), [-1] * (most - len(chunks))
    assert found.sequence.tolist() == [n for n, _, _ in chunks] + absent
    assert found.chunk.tolist() == [m for _, m, _ in chunks] + absent


@quickly
@given(runs=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4)), max_size=5), tail=st.integers(0, 3))
def test_every_run_is_a_sequence(runs, tail):
    """Ids that come back, out of order, with gaps."""
    ids = np.array([7 * i for i, n in runs for _ in range(n)] + [-1] * tail, np.int32)
    ids = np.concatenate([ids, np.full(TOTAL - len(ids), -3, np.int32)])
    cuts = [t for t in range(TOTAL) if ids[t] >= 0 and (t == 0 or ids[t] != ids[t - 1])]
    end = int(np.sum(ids >= 0))
    expected = [*cuts, *[end] * (6 - len(cuts))]
    np.testing.assert_array_equal(sequences.segment_ids_to_cu_seqlens(ids, 5), expected)


@pytest.mark.slow
@pytest.mark.parametrize("total", [0, 1])
def test_nearly_nothing(total):
    offsets, ids = np.array([0, total]), np.zeros(total, np.int32)
    assert sequences.cu_seqlens_to_segment_ids(offsets, total).tolist() == ids.tolist()
    assert sequences.segment_ids_to_cu_seqlens(ids, 2).tolist() == [0, total, total]
    assert sequences.segment_ids_to_cu_seqlens(ids - 1, 2).tolist() == [0, 0, 0]
    assert sequences.segment_positions(ids).tolist() == ids.tolist()
    assert sequences.cu_seqlens_to_segment_ids(np.array([0]), total).tolist() == [-1] * total
    assert sequences.segment_ids_to_cu_seqlens(ids - 1, 0).tolist() == [0]
    assert sequences.sequence_lengths(np.array([0])).shape == (0,)
    packing: Any
    for packing in ({}, {"cu_seqlens": offsets}, {"segment_ids": ids}):
        for call in (
            sequences.chunk_global_cumsum,
            lambda x, **more: sequences.chunk_local_cumsum(x, 3, **more),
        ):
            np.testing.assert_array_equal(call(jnp.ones((total, 2)), axis=0, **packing), np.ones((total, 2)))
    assert sequences.chunk_indices(offsets, 4, 2).sequence.tolist() == [total - 1, -1]


def test_inside_jit_what_does_not_fit_joins_nothing():
    to_offsets = jax.jit(sequences.segment_ids_to_cu_seqlens, static_argnums=1)
    # A third run becomes padding; padding in between becomes a sequence.
    assert to_offsets(jnp.array([0, 0, 1, 2, 2]), 2).tolist() == [0, 2, 3]
    assert to_offsets(jnp.array([-1, 0, 0, -1, 1, -1]), 4).tolist() == [1, 3, 4, 5, 5]
    few = jax.jit(lambda c: sequences.chunk_indices(c, 2, 2))(jnp.array([0, 3, 5]))
    assert few.sequence.tolist() == [0, 0] and few.chunk.tolist() == [0, 1]


@pytest.mark.slow
def test_batches_and_vmap():
    offsets = jnp.asarray(np.stack([packed(lengths)[0] for lengths in ((3, 0, 4), (1, 2, 3, 4), ())]))
    ids = sequences.cu_seqlens_to_segment_ids(offsets, TOTAL)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, TOTAL, 2)), jnp.float32)
    for convert, rows in (
        (lambda c: sequences.cu_seqlens_to_segment_ids(c, TOTAL), offsets),
        (lambda c: sequences.positions_from_cu_seqlens(c, TOTAL), offsets),
        (sequences.sequence_lengths, offsets),
        (lambda c: sequences.chunk_indices(c, 3, 12), offsets),
        (lambda ids: sequences.segment_ids_to_cu_seqlens(ids, 5), ids),
        (sequences.segment_positions, ids),
    ):
        each = [convert(row) for row in rows]
        for found in (quick(jax.vmap(convert))(rows), quick(convert)(rows)):
            jax.tree.map(lambda x, *xs: np.testing.assert_array_equal(x, np.stack(xs)), found, *each)
    sums = lambda x, ids: sequences.chunk_global_cumsum(x, axis=0, segment_ids=ids)
    rows = np.stack([sums(*row) for row in zip(x, ids)])
    np.testing.assert_array_equal(jax.vmap(sums)(x, ids), rows)
    np.testing.assert_array_equal(sequences.chunk_global_cumsum(x, axis=1, segment_ids=ids), rows)


@functools.partial(jax.jit, static_argnames=("size", "axis", "reverse"))
def cumsums(x, size, **options):
    if size is None:
        return sequences.chunk_global_cumsum(x, **options)
    return sequences.chunk_local_cumsum(x, size, **options)


@quickly
@given(
    lengths=LENGTHS,
    head=st.integers(0, 3),
    size=st.sampled_from([None, 1, 3, 4, 100]),
    reverse=st.booleans(),
    axis=st.sampled_from([0, 1, -1]),
    kind=st.sampled_from(["none", "cu_seqlens", "segment_ids"]),
)
def test_cumsum(lengths, head, size, reverse, axis, kind):
    offsets, spans = packed(lengths, head)
    spans = [range(TOTAL)] if kind == "none" else spans
    groups = spans if size is None else [tokens for _, _, tokens in chunks_of(spans, size)]
    x = np.random.default_rng(len(lengths)).standard_normal((TOTAL, 2, 3)).astype(np.float32)
    expected = summed(x, groups, reverse)
    hidden = np.ones(TOTAL, bool)
    hidden[[t for group in groups for t in group]] = False
    x[hidden] = np.nan
    packing = {} if kind == "none" else {kind: offsets if kind == "cu_seqlens" else ids_of(spans)}
    actual = cumsums(np.moveaxis(x, 0, axis), size, axis=axis, reverse=reverse, **packing)
    np.testing.assert_allclose(np.moveaxis(np.asarray(actual), axis, 0), expected, atol=1e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize("reverse, size", [(False, 3), (True, None)])
@pytest.mark.parametrize("kind", ["cu_seqlens", "segment_ids"])
def test_gradients(kind, size, reverse, enable_x64):
    offsets, spans = packed((4, 0, 7, 1), 1, 4)
    packing = {kind: offsets if kind == "cu_seqlens" else ids_of(spans, 15)}
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 15)))
    function = lambda x: jnp.sin(cumsums(x, size, axis=1, reverse=reverse, **packing))
    assert function(x).dtype == jnp.float64
    check_grads(function, (x,), order=1, modes=("fwd", "rev"))


def test_padding_reaches_no_gradient():
    x = jnp.array([1.0, 2.0, jnp.nan, jnp.inf])
    gradient = jax.grad(
        lambda x: sequences.chunk_local_cumsum(x, 4, axis=0, cu_seqlens=jnp.array([0, 2])).sum()
    )
    assert gradient(x).tolist() == [2, 1, 0, 0]


def test_sums_keep_what_a_difference_loses():
    """A long sequence of large numbers, then a short one of small ones; half precision is summed in float32."""
    x = jnp.concatenate([jnp.full(4096, 1e4), jnp.full(8, 1e-3)])
    sums = cumsums(x, None, axis=0, cu_seqlens=np.array([0, 4096, 4104]))
    np.testing.assert_allclose(sums[4096:], 1e-3 * np.arange(1, 9), rtol=1e-6)
    for dtype in (jnp.bfloat16, jnp.float16):
        sums = sequences.chunk_global_cumsum(jnp.ones(3000, dtype), axis=0)
        assert sums.dtype == jnp.float32 and sums[-1] == 3000
        assert cumsums(jnp.ones(3000, dtype), 3000, axis=0)[-1] == 3000


@pytest.mark.slow
def test_memory_is_linear(optimised):
    t = 1 << 15
    x, ids = jax.ShapeDtypeStruct((t,), jnp.float32), jax.ShapeDtypeStruct((t,), jnp.int32)
    offsets = jax.ShapeDtypeStruct((1025,), jnp.int32)
    for function, *args in (
        (lambda c: sequences.cu_seqlens_to_segment_ids(c, t), offsets),
        (lambda c: sequences.positions_from_cu_seqlens(c, t), offsets),
        (lambda i: sequences.segment_ids_to_cu_seqlens(i, 1024), ids),
        (lambda i: sequences.segment_positions(i), ids),
        (lambda c: sequences.chunk_indices(c, 64, t // 64 + 1024), offsets),
        (lambda x, c: sequences.chunk_local_cumsum(x, 64, axis=0, reverse=True, cu_seqlens=c), x, offsets),
        (jax.grad(lambda x, i: sequences.chunk_global_cumsum(x, axis=0, segment_ids=i).sum()), x, ids),
    ):
        memory = optimised(jax.jit(function).lower(*args)).memory_analysis()
        assert memory is not None and memory.temp_size_in_bytes < 256 * t


@pytest.mark.few(3)
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("shards, length", [(1, 2), (2, 8), (4, 24), (3, 0)])
def test_zigzag(shards, length, axis):
    x = np.moveaxis(np.arange(length * 6, dtype=np.int32).reshape(length, 2, 3), 0, axis)
    chunk = length // (2 * shards)
    order = [i * chunk + t for n in range(shards) for i in (n, 2 * shards - 1 - n) for t in range(chunk)]
    mixed = sequences.reorder_sequence(x, shards, axis=axis)
    np.testing.assert_array_equal(mixed, np.take(x, np.array(order, int), axis=axis))
    np.testing.assert_array_equal(sequences.restore_sequence(mixed, shards, axis=axis), x)
    assert mixed.dtype == x.dtype


@pytest.mark.slow
def test_zigzag_composes():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 32)), jnp.float32)
    mixed = jax.jit(jax.vmap(lambda x: sequences.reorder_sequence(x, 4, axis=0)))(x)
    np.testing.assert_array_equal(mixed, sequences.reorder_sequence(x, 4, axis=1))
    weights = jnp.arange(32, dtype=jnp.float32)
    gradient = jax.grad(lambda x: (sequences.reorder_sequence(x, 4, axis=0) * weights).sum())(x[0])
    np.testing.assert_array_equal(gradient, sequences.restore_sequence(weights, 4, axis=0))


IDS, X = np.array([0, 0, 1]), np.ones((2, 3), np.float32)
to_ids, to_offsets = sequences.cu_seqlens_to_segment_ids, sequences.segment_ids_to_cu_seqlens
sums, pieces = sequences.chunk_global_cumsum, sequences.chunk_indices
WRONG = {
    "floats": (lambda: to_ids(np.ones(3, np.float32), 3), r"^cu_seqlens: .*int.*received float32 \(3,\); "),
    "offsets are none": (lambda: sequences.sequence_lengths(np.zeros(0, int)), r"^cu_seqlens: .* \(0,\)"),
    "offsets decrease": (
        lambda: sequences.sequence_lengths([0, 3, 2]),
        r"^cu_seqlens: .*never.* \[0 3 2\]; ",
    ),
    "offsets begin below 0": (lambda: pieces([-1, 3], 2, 9), "^cu_seqlens: expected offsets that"),
    "offsets leave the tokens": (
        lambda: sequences.positions_from_cu_seqlens([0, 5], 4),
        "total=4, received 5",
    ),
    "total": (lambda: to_ids([0, 1], -1), "^total: expected a static int >= 0, received -1"),
    "traced total": (lambda: jax.jit(lambda n: to_ids(jnp.array([0, 1]), n))(3), "^total: .*static argument"),
    "ids are booleans": (lambda: sequences.segment_positions(np.ones(3, bool)), "^segment_ids: .* bool"),
    "too many runs": (lambda: to_offsets([0, 1, 0], 2), "^max_segments: .* 3, received 2; raise it"),
    "padding in between": (lambda: to_offsets([0, -1, 0], 3), r"^segment_ids: .*padding.* \[ 0 -1  0\]"),
    "too many chunks": (
        lambda: pieces([0, 3, 5], 2, 2),
        "^max_chunks: .* 3, received 2; total // chunk_size",
    ),
    "chunk size": (lambda: sequences.chunk_local_cumsum(X, 0, axis=1), "^chunk_size: .* >= 1, received 0"),
    "ints": (lambda: sums(IDS, axis=0), "^x: expected floats, received dtype int"),
    "axis": (lambda: sums(X, axis=2), "^axis: expected an axis of x, which has 2 axes, received 2"),
    "both": (lambda: sums(X, axis=1, cu_seqlens=[0, 3], segment_ids=IDS), "^segment_ids: expected None with"),
    "offsets per row": (lambda: sums(X, axis=1, cu_seqlens=[[0, 3]]), r"^cu_seqlens: .* use jax.vmap"),
    "ids of another length": (
        lambda: sums(X, axis=0, segment_ids=IDS),
        r"^segment_ids: .* \(2,\), .* \(3,\)",
    ),
    "indivisible": (lambda: sequences.reorder_sequence(X, 2, axis=1), r"^x: .* = 4, received 3; pad it to 4"),
    "shards": (lambda: sequences.restore_sequence(X, 0, axis=1), "^num_shards: .* >= 1, received 0"),
    "axis of zigzag": (lambda: sequences.reorder_sequence(X, 1, axis=-3), "^axis: expected an axis of x"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name, unchecked):
    call, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        call()
