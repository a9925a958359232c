"""The steps of a ring, from positions alone: every visible pair of tokens is in one piece, and nothing else is done."""

import collections
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ejkernel_eqx.attention.ring.schedule import runs, Sizes


def positions(sizes: Sizes, device: int, length: int) -> np.ndarray:
    """Of a device's tokens, in the order in which it has them."""
    each = length // sizes.chunks
    return np.concatenate([start + np.arange(each) for start in sizes.starts(device, length)])


Step = collections.namedtuple("Step", "shift branches table")


def hops(*args: Any) -> list[Step]:
    """The steps, one by one."""
    steps, at = [], 0
    for run in runs(*args):
        for shift, table in zip(run.shifts, run.table, strict=True):
            at += run.came
            assert at == shift
            steps.append(Step(shift, run.branches, table))
    return steps


def visible(i, j, reach):
    left, right, offset = reach
    seen = np.ones((len(i), len(j)), bool)
    seen &= True if left is None else j >= i[:, None] + offset - left
    return seen & (True if right is None else j <= i[:, None] + offset + right)


SIDE = st.none() | st.integers(0, 40)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 5),
    st.integers(1, 5),
    st.sampled_from(["contiguous", "zigzag"]),
    st.tuples(SIDE, SIDE, st.integers(-20, 20)),
    st.booleans(),
)
def test_pieces_cover_what_is_visible(devices, queries, keys, order, reach, positional):
    chunks = 2 if order == "zigzag" else 1
    sizes = Sizes(devices, queries * chunks, keys * chunks, order)
    steps = hops(sizes, reach, True, positional)
    shifts = [step.shift for step in steps]
    assert shifts == sorted(set(shifts))
    assert {step.shift for step in hops(sizes, reach, True, positional, True)} == set(shifts)
    assert all(any(step.branches[n] for n in step.table) for step in steps)
    for ours, theirs in np.ndindex(devices, devices):
        i, j = positions(sizes, ours, sizes.queries), positions(sizes, theirs, sizes.keys)
        count = np.zeros((len(i), len(j)), int)
        met = [step for step in steps if (ours - step.shift) % devices == theirs]
        for piece in (piece for step in met for piece in step.branches[step.table[ours]]):
            rows = slice(piece.queries[0], sum(piece.queries))
            columns = slice(piece.keys[0], sum(piece.keys))
            if piece.window is None:  # positions are read from arrays
                count[rows, columns] += visible(i[rows], j[columns], reach)
                continue
            local = np.arange(piece.queries[1]), np.arange(piece.keys[1])
            count[rows, columns] += visible(*local, piece.window)
            assert not positional or piece.window[2] == i[rows][0] + reach[2] - j[columns][0]
        np.testing.assert_array_equal(count, visible(i, j, reach))


def test_windows_need_as_many_steps_as_devices_that_they_reach():
    sizes = Sizes(8, 16, 16, "contiguous")
    shifts = lambda left, right: [step.shift for step in hops(sizes, (left, right, 0), True, False)]
    assert shifts(None, 0) == list(range(8))
    assert shifts(1, 0) == shifts(16, 0) == [0, 1]
    assert shifts(17, 0) == [0, 1, 2]
    assert shifts(3, 3) == [0, 1, 7]
    assert shifts(0, 0) == [0]


def test_causal_work_is_balanced_in_zigzag_order():
    def work(order, device):
        steps = hops(Sizes(4, 8, 8, order), (None, 0, 0), True, False)
        pieces = [piece for step in steps for piece in step.branches[step.table[device]]]
        # A causal piece is half of one.
        return sum(p.queries[1] * p.keys[1] / (1 if p.window == (None, None, 0) else 2) for p in pieces)

    assert len({work("zigzag", device) for device in range(4)}) == 1
    assert work("contiguous", 3) == 7 * work("contiguous", 0)
    for step in hops(Sizes(4, 8, 8, "zigzag"), (None, 0, 0), True, False):
        assert all(len(step.branches[n]) == 1 for n in step.table)
