"""Masks made of any others, of any lengths, against numpy: what a kernel that follows the lists of tiles sees."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ejkernel_eqx import Mask
from ejkernel_eqx.attention.masks import classify
from ejkernel_eqx.attention.masks.tile_shape import Shape
from tests.attention.test_tile_lists import followed

IDS = np.sort(np.random.default_rng(0).integers(0, 9, 256))


class Both(NamedTuple):
    """A mask and what it shows, of positions and keys."""

    mask: Mask
    sees: Callable[[np.ndarray, np.ndarray], np.ndarray]


def _documents(head, query, key):
    ids = jnp.asarray(IDS)
    return ids[query] == ids[key]


_NUMBER = st.integers(0, 40)
_SIZE = st.integers(1, 40)
_LEAVES = st.one_of(
    st.builds(lambda: Both(Mask.causal(), lambda q, k: k <= q)),
    st.builds(
        lambda left, right: Both(
            Mask.sliding_window(left, right), lambda q, k: (k >= q - left) & (k <= q + right)
        ),
        _NUMBER,
        _NUMBER,
    ),
    st.builds(lambda n: Both(Mask.strided(n), lambda q, k: (q - k) % n == 0), _SIZE),
    st.builds(lambda n: Both(Mask.chunked(n), lambda q, k: q // n == k // n), _SIZE),
    st.builds(lambda n: Both(Mask.global_tokens(n), lambda q, k: (q < n) | (k < n)), _NUMBER),
    st.builds(
        lambda a, b, c: Both(
            Mask.from_function(lambda h, q, k: a * q - b * k > c), lambda q, k: a * q - b * k > c
        ),
        _SIZE,
        _SIZE,
        _NUMBER,
    ),
    st.builds(lambda: Both(Mask.from_function(_documents), lambda q, k: IDS[q] == IDS[k])),
)


def _combined(parts):
    pair = st.tuples(parts, parts)
    return st.one_of(
        pair.map(lambda x: Both(x[0].mask & x[1].mask, lambda q, k: x[0].sees(q, k) & x[1].sees(q, k))),
        pair.map(lambda x: Both(x[0].mask | x[1].mask, lambda q, k: x[0].sees(q, k) | x[1].sees(q, k))),
        parts.map(lambda x: Both(~x.mask, lambda q, k: ~x.sees(q, k))),
    )


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    both=st.recursive(_LEAVES, _combined, max_leaves=4),
    queries=st.integers(1, 120),
    keys=st.integers(1, 120),
    blocks=st.sampled_from([(16, 16), (32, 16), (16, 64)]),
    offset=st.integers(0, 100),
    by_key=st.booleans(),
    directly=st.booleans(),
)
def test_lists_of_any_mask(both, queries, keys, blocks, offset, by_key, directly):
    # A function that hides nothing, so that masks of a window alone have lists as well.
    mask = both.mask & Mask.from_function(_everything)
    pattern = mask.lower(queries, keys, q_offset=offset).pattern
    assert pattern is not None
    q, k = np.arange(queries)[:, None] + offset, np.arange(keys)[None]
    expected = np.broadcast_to(both.sees(q, k), (queries, keys))
    before = classify._DIRECTLY, classify._COARSE
    try:
        if not directly:  # blocks of tiles are looked at first
            classify._DIRECTLY, classify._COARSE = 0, 2
        block_q, block_k = blocks
        seen = followed(pattern, Shape(queries, keys, block_q, block_k, by_key), 0)
    finally:
        classify._DIRECTLY, classify._COARSE = before
    np.testing.assert_array_equal(seen, expected)


def _everything(head, query, key):
    return key >= 0
