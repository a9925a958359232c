"""Ragged batches against a plain loop, and the buckets they are padded to."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ejkernel_eqx import Buckets, RaggedBatch
from tests.recurrence.quick import quick

BUCKETS = Buckets((4, 16), (3, 6), (2, 5), (1, 4, 16))
PROPERTIES = ("sequence_ids", "positions", "slots", "is_real", "last_tokens")


@quick
def properties(batch):
    return {name: getattr(batch, name) for name in PROPERTIES}


def by_hand(query_lens, lengths, rows, page_size, num_tokens, num_sequences):
    found = {
        "sequence_ids": np.full(num_tokens, -1),
        "positions": np.zeros(num_tokens, int),
        "slots": np.full(num_tokens, -1),
        "is_real": np.zeros(num_tokens, bool),
        "last_tokens": np.full(num_sequences, -1),
    }
    token = 0
    for n, (query_len, length, row) in enumerate(zip(query_lens, lengths, rows, strict=True)):
        for position in range(length - query_len, length):
            page = row[position // page_size]
            found["sequence_ids"][token], found["positions"][token] = n, position
            found["slots"][token] = -1 if page < 0 else page * page_size + position % page_size
            found["is_real"][token] = True
            found["last_tokens"][n] = token
            token += 1
    return found


def assert_properties(batch, expected):
    found = properties(batch)
    for name, x in expected.items():
        assert found[name].dtype == (bool if name == "is_real" else jnp.int32), name
        np.testing.assert_array_equal(found[name], x, err_msg=name)


@st.composite
def batches(draw):
    page_size = draw(st.integers(2, 3))
    count = draw(st.integers(0, 6))
    query_lens = draw(
        st.lists(st.integers(0, 4), min_size=count, max_size=count).filter(lambda x: sum(x) <= 16)
    )
    lengths = [query_len + draw(st.integers(0, 5)) for query_len in query_lens]
    pages = iter(draw(st.permutations(range(40))))
    rows = [
        [next(pages) if draw(st.integers(0, 4)) else -1 for _ in range(-(-length // page_size))]
        for length in lengths
    ]
    return page_size, query_lens, lengths, rows


@settings(max_examples=25, deadline=None, derandomize=True)
@given(batches())
def test_properties(drawn):
    page_size, query_lens, lengths, rows = drawn
    batch = RaggedBatch.build(query_lens, lengths, rows, page_size=page_size, buckets=BUCKETS)
    count, pages = batch.page_table.shape
    assert batch.num_tokens in BUCKETS.tokens and count in BUCKETS.sequences and pages in BUCKETS.pages
    assert batch.max_query_len in BUCKETS.query_len and batch.max_query_len >= max(query_lens, default=0)
    assert batch.is_decode == (max(query_lens, default=0) <= 1)
    assert_properties(batch, by_hand(query_lens, lengths, rows, page_size, batch.num_tokens, count))
    # Padding: no tokens, no pages.
    padding = slice(len(query_lens), None)
    assert not np.asarray(batch.lengths[padding]).any() and np.all(
        np.asarray(batch.page_table[padding]) == -1
    )
    assert np.all(np.asarray(batch.query_start_loc[len(query_lens) :]) == sum(query_lens))


def test_states_and_rows_of_arrays():
    """Wide rows take the bucket of what they hold; states are padded."""
    rows = np.array([[4, 7, 1, -1, -1, -1], [3, -1, -1, -1, -1, -1]])
    build = lambda **more: RaggedBatch.build(
        np.array([2, 0]), np.array([5, 1], np.uint16), rows, page_size=2, state_indices=[4, 4], **more
    )
    batch, padded = build(), build(buckets=BUCKETS)
    assert batch.page_table.shape == (2, 6) and padded.page_table.shape == (3, 5)
    assert (batch.num_tokens, batch.max_query_len, padded.num_tokens) == (2, 2, 4)
    assert {x.dtype for x in jax.tree.leaves(batch)} == {jnp.dtype("int32")}
    np.testing.assert_array_equal(padded.page_table[:2, :3], rows[:, :3])
    np.testing.assert_array_equal(padded.slots, [15, 2, -1, -1])
    assert batch.state_indices is not None and batch.state_indices.tolist() == [4, 4]
    assert padded.state_indices is not None and padded.state_indices.tolist() == [4, 4, -1]


def test_made_inside_jit():
    """From arrays, without Python seeing a value; also mapped."""
    starts, lengths = jnp.asarray([[0, 1, 3], [0, 0, 4]], jnp.int32), jnp.asarray([[3, 2], [0, 4]], jnp.int32)
    tables = jnp.asarray([[[5, 0], [2, -1]], [[-1, -1], [7, 1]]], jnp.int32)

    def inside(starts, lengths, table):
        batch = RaggedBatch(starts, lengths, table, page_size=2, max_query_len=4, num_tokens=5)
        assert not batch.is_decode
        return batch, {name: getattr(batch, name) for name in PROPERTIES}

    batches, found = quick(jax.vmap(inside))(starts, lengths, tables)
    assert batches.num_tokens == 5 and batches.page_table.shape == (2, 2, 2)
    for n, (query_lens, own) in enumerate(zip([[1, 2], [0, 4]], tables.tolist(), strict=True)):
        expected = by_hand(query_lens, lengths[n].tolist(), own, 2, 5, 2)
        for name, x in expected.items():
            np.testing.assert_array_equal(found[name][n], x, err_msg=name)


def test_slots_of_what_has_no_page():
    """Past the row, before the first token, or with a page number whose slots are no int32."""
    batch = RaggedBatch(
        jnp.asarray([0, 2, 4, 5], jnp.int32),
        jnp.asarray([5, 1, 1], jnp.int32),
        jnp.asarray([[1, 2], [3, 4], [2**31 - 1, 0]], jnp.int32),
        page_size=2,
        max_query_len=2,
        num_tokens=5,
    )
    assert batch.slots.tolist() == [5, -1, -1, 6, -1]


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_nothing_at_all(shape):
    batch = RaggedBatch(
        jnp.zeros(shape[0] + 1, jnp.int32),
        jnp.zeros(shape[0], jnp.int32),
        jnp.zeros(shape, jnp.int32),
        page_size=1,
        max_query_len=1,
        num_tokens=2,
    )
    assert_properties(batch, by_hand([], [], [], 1, 2, shape[0]))
    empty = RaggedBatch.build([], [], [], page_size=4)
    assert empty.num_tokens == 0 and empty.page_table.shape == (0, 1) and empty.slots.shape == (0,)


def test_powers_of_two():
    buckets = Buckets.powers_of_two(100, 8, 1)
    assert buckets == Buckets(
        (1, 2, 4, 8, 16, 32, 64, 100), (1, 2, 4, 8), (1,), (1, 2, 4, 8, 16, 32, 64, 100)
    )
    assert hash(buckets) == hash(dataclasses.replace(buckets))
    assert Buckets.powers_of_two(4, 2, 2, 1).query_len == (1,)
    assert buckets.pick(tokens=65, sequences=3, pages=0, query_len=1) == (100, 4, 1, 1)
    assert buckets.pick(0, 0, 0, 0) == (1, 1, 1, 1) and buckets.pick(100, 8, 1, 100) == (100, 8, 1, 100)


def build(query_lens=(1,), lengths=(3,), page_table=((0, 1),), **options):
    return RaggedBatch.build(list(query_lens), list(lengths), page_table, **{"page_size": 2, **options})


def direct(starts=(3,), lengths=(2,), table=(2, 4), **options):
    sizes = {"page_size": 2, "max_query_len": 1, "num_tokens": 4, **options}
    zeros = [jnp.zeros(shape, jnp.int32) for shape in (starts, lengths, table)]
    return RaggedBatch(*zeros, **sizes)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: build(query_lens=[-1]), r"query_lens: expected ints from 0 to .* received \[-1\]"),
        (lambda: build(lengths=[-1]), "lengths: expected ints from 0"),
        (lambda: build(lengths=[2**31]), "lengths: expected ints"),
        (lambda: build(query_lens=[1.5]), r"query_lens: expected ints \[N\], received float64"),
        (lambda: build(query_lens=[[1]]), "query_lens: expected ints"),
        (lambda: build(query_lens=[4]), "lengths: expected at least the 4 new tokens"),
        (lambda: build(lengths=[3, 4]), "lengths: expected an entry for each"),
        (lambda: build(page_table=[[0, 1], [2]]), "page_table: expected an entry for each of the 1"),
        (lambda: build(page_table=[[0]]), "page_table: expected 2 pages"),
        (lambda: build(page_table=np.zeros((1, 1), int)), "page_table: expected 2 pages"),
        (lambda: build(page_table=np.zeros(3, int)), r"page_table: expected ints \[N, M\]"),
        (lambda: build(page_table=[[0, -2]]), r"page_table\[0\]: expected ints from -1"),
        (lambda: build(state_indices=[-2]), "state_indices: expected ints from -1"),
        (lambda: build(state_indices=[1, 2]), "state_indices: expected an entry for each"),
        (
            lambda: build([1, 0, 2], [1, 1, 2], [[0], [0], [1]], state_indices=[3, 2, 3]),
            "state_indices: expected a slot of its own",
        ),
        (
            lambda: build([1, 1], [5, 6], [[0, 1, 2], [3, 1, 2]]),
            "page_table: expected a page of its own .* page 2 2 times; copy",
        ),
        (lambda: build([4], [4], [[1, 1]]), "a page of its own .* page 1 2 times"),
        (lambda: build(page_size=0), "page_size: expected a static int >= 1"),
        (
            lambda: jax.jit(lambda x: RaggedBatch.build(x, x, [[0]], page_size=2))(jnp.ones(1, int)),
            r"use RaggedBatch\(...\) inside",
        ),
        (lambda: build(buckets=Buckets((1,), (1,), (1,), (1,))), "pages: expected at most 1, .* split"),
        (lambda: Buckets((1, 1), (1,), (1,), (1,)), "tokens: expected a tuple of ascending sizes"),
        (lambda: Buckets((1,), (), (1,), (1,)), "sequences: expected a tuple of ascending"),
        (lambda: Buckets((1,), (1,), (0, 1), (1,)), "pages: expected a static int >= 1"),
        (lambda: Buckets.powers_of_two(0, 1, 1), "max_tokens: expected"),
        (lambda: Buckets.powers_of_two(1, 1, 1).pick(1, 2, 1, 1), "sequences: expected at most 1"),
        (lambda: Buckets.powers_of_two(1, 1, 1).pick(-1, 1, 1, 1), "tokens: expected"),
        (lambda: direct(starts=(2,)), "query_start_loc: expected int32"),
        (lambda: direct(table=(3, 4)), r"page_table: expected int32 \[N, M\]"),
        (lambda: direct(table=(2,)), "page_table: expected"),
        (lambda: direct(lengths=(2, 1)), "lengths: expected"),
        (lambda: direct(max_query_len=0), "max_query_len: expected"),
        (lambda: direct(num_tokens=-1), "num_tokens: expected"),
        (lambda: direct(page_size=0), "page_size: expected"),
    ],
)
def test_wrong_arguments(call, words, unchecked):
    with pytest.raises(ValueError, match=words):
        call()


def test_sequences_may_share_what_no_token_is_written_to():
    """The pages of a common prefix, a page behind a sequence's end, and those of a sequence without new tokens."""
    table = [[0, 1, 2, 5], [0, 1, 3], [4, 2]]
    batch = RaggedBatch.build([1, 2, 0], [5, 6, 3], table, page_size=2)
    np.testing.assert_array_equal(batch.page_table, [[0, 1, 2, 5], [0, 1, 3, -1], [4, 2, -1, -1]])
