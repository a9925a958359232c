"""Packed, padded and reversed sequences as the kernels see them."""

from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_eqx.sequences import rows as subject

read_packing: Any = subject.read_packing
ids_of_rows = st.lists(st.integers(-2, 2), min_size=7, max_size=7)


def starts_of(ids):
    """Where each token's segment starts, one by one; padding is of the segment before it."""
    starts, current, latest = [], -1, None
    for t, ident in enumerate(ids):
        if ident >= 0:
            if latest is not None and ident != latest:
                current = t
            latest = ident
        starts.append(current)
    return starts


@hypothesis.settings(max_examples=50, deadline=None, derandomize=True)
@hypothesis.given(ids_of_rows, st.booleans())
@hypothesis.example([], False)
@hypothesis.example([3], True)
def test_segments(ids, reverse):
    packing = read_packing(None, jnp.asarray(ids, jnp.int32), (), len(ids), reverse)
    ordered = ids[::-1] if reverse else ids
    assert packing.starts.tolist() == starts_of(ordered)
    assert packing.real.tolist() == [ident >= 0 for ident in ordered]
    assert packing.starts.dtype == jnp.int32 and packing.offsets is None


def test_ids_broadcast_over_leading_axes():
    ids = jnp.array([[0, 0, 1], [2, -1, 2]])
    packing = read_packing(None, ids, (4, 2), 3, False)
    assert packing.starts.shape == packing.real.shape == (4, 2, 3)
    np.testing.assert_array_equal(packing.starts[3], [[-1, -1, 2], [-1, -1, -1]])


@pytest.mark.parametrize("reverse", [False, True])
def test_offsets(reverse):
    packing = read_packing(jnp.array([1, 3, 3, 6]), None, (), 8, reverse)
    assert packing.num_sequences == 3
    assert packing.offsets.tolist() == ([2, 5, 5, 7] if reverse else [1, 3, 3, 6])
    assert packing.offsets.dtype == jnp.int32
    x = jnp.arange(8.0)
    inside = jnp.array([0.0, 1, 2, 3, 4, 5, 0, 0])
    taken = packing.take(x)
    np.testing.assert_array_equal(taken, jnp.flip(inside) if reverse else inside)
    np.testing.assert_array_equal(packing.flip(taken), inside)
    states = jnp.arange(3.0)[:, None]
    np.testing.assert_array_equal(packing.states(states), states[::-1] if reverse else states)
    np.testing.assert_array_equal(packing.states(packing.states(states)), states)


def test_padding_is_cleaned_in_values_and_gradients():
    packing = read_packing(None, jnp.array([[0, -1, 1, -3]]), (1,), 4, True)
    x = jnp.array([[[1.0, 2.0], [jnp.nan, jnp.inf], [3.0, 4.0], [jnp.nan, 0.0]]])
    taken, pull = jax.vjp(packing.take, x)
    np.testing.assert_array_equal(taken[0], [[0, 0], [3, 4], [0, 0], [1, 2]])
    (gradient,) = pull(jnp.full_like(x, jnp.nan).at[0, 1].set(5.0).at[0, 3].set(7.0))
    np.testing.assert_array_equal(gradient[0], [[7, 7], [0, 0], [5, 5], [0, 0]])


def test_nothing_is_done_without_packing():
    packing = read_packing(None, None, (2,), 4, False)
    x = jnp.ones((2, 4, 3))
    assert packing.take(x) is x and packing.mask(x) is x and packing.states(x) is x


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((jnp.array([0, 4]), jnp.zeros(4, int), ()), "cu_seqlens, segment_ids: expected at most one"),
        ((jnp.array([0, 4]), None, (2,)), r"cu_seqlens: expected operands .* without leading axes"),
        ((jnp.array([[0, 4]]), None, ()), r"cu_seqlens: expected offsets \[N \+ 1\]"),
        ((jnp.array([0, 3, 2]), None, ()), "cu_seqlens: expected offsets that never decrease"),
        ((jnp.array([0, 5]), None, ()), "cu_seqlens: expected offsets of at most total=4"),
        ((jnp.array([0.0, 4.0]), None, ()), "cu_seqlens: expected int offsets"),
        ((None, jnp.zeros(3, int), ()), r"segment_ids: expected \(4,\) ids, received shape \(3,\)"),
        ((None, jnp.zeros((3, 4), int), (2,)), r"segment_ids: expected a shape that broadcasts to \(2, 4\)"),
        ((None, jnp.zeros(4), ()), "segment_ids: expected ints"),
    ],
)
def test_errors(arguments, message):
    cu_seqlens, segment_ids, lead = arguments
    with pytest.raises(ValueError, match=message):
        read_packing(cu_seqlens, segment_ids, lead, 4, False)


def test_values_that_are_not_known_are_taken_as_they_are():
    real = jax.jit(lambda offsets: read_packing(offsets, None, (), 4, False).real)
    assert real(jnp.array([0, 3])).tolist() == [True, True, True, False]
