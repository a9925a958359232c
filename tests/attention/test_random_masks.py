"""Masks made of any others, of any lengths, against numpy: what a kernel that follows the lists of tiles sees."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ejkernel_eqx import Mask
from tests.attention.inner import classify, tile_shape
from tests.attention.test_tile_lists import followed

IDS = np.sort(np.random.default_rng(0).integers(0, 9, 256))


class Both(NamedTuple):
    """A mask and what it shows, of positions and keys."""

    mask: Mask
    sees: Callable[[Any, Any], Any]


def _documents(head, query, key):
    ids = jnp.asarray(IDS)
    return ids[query] == ids[key]


def _linear(a: int, b: int, c: int) -> Mask:
    return Mask.from_function(lambda h, q, k: a * q - b * k > c)


def made(form: Any) -> Both:
    """What a form describes: a name, and numbers or other forms."""
    name, *of = form
    if name in ("and", "or", "not"):
        masks, all_seen = zip(*map(made, of), strict=True)
        if name == "not":
            return Both(~masks[0], lambda q, k: ~all_seen[0](q, k))
        if name == "and":
            return Both(masks[0] & masks[1], lambda q, k: all_seen[0](q, k) & all_seen[1](q, k))
        return Both(masks[0] | masks[1], lambda q, k: all_seen[0](q, k) | all_seen[1](q, k))
    make, sees = LEAVES[name]
    return Both(make(*of), lambda q, k: sees(q, k, *of))


LEAVES: Mapping[str, tuple[Callable[..., Mask], Callable[..., Any]]] = {
    "causal": (Mask.causal, lambda q, k: k <= q),
    "window": (Mask.sliding_window, lambda q, k, left, right: (k >= q - left) & (k <= q + right)),
    "strided": (Mask.strided, lambda q, k, n: (q - k) % n == 0),
    "chunked": (Mask.chunked, lambda q, k, n: q // n == k // n),
    "global": (Mask.global_tokens, lambda q, k, n: (q < n) | (k < n)),
    "linear": (_linear, lambda q, k, a, b, c: a * q - b * k > c),
    "documents": (lambda: Mask.from_function(_documents), lambda q, k: IDS[q] == IDS[k]),
}
_NUMBER, _SIZE = st.integers(0, 40), st.integers(1, 40)
_NUMBERS = {
    "causal": (), "window": (_NUMBER, _NUMBER), "strided": (_SIZE,), "chunked": (_SIZE,), "global": (_NUMBER,),
    "linear": (_SIZE, _SIZE, _NUMBER), "documents": (),
}  # fmt: skip
_FORMS = st.recursive(
    st.one_of(*(st.tuples(st.just(name), *numbers) for name, numbers in _NUMBERS.items())),
    lambda forms: st.one_of(
        st.tuples(st.sampled_from(["and", "or"]), forms, forms), st.tuples(st.just("not"), forms)
    ),
    max_leaves=4,
)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    form=_FORMS,
    queries=st.integers(1, 120),
    keys=st.integers(1, 120),
    blocks=st.sampled_from([(16, 16), (32, 16), (16, 64)]),
    offset=st.integers(0, 100),
    by_key=st.booleans(),
    directly=st.booleans(),
)
def test_lists_of_any_mask(form, queries, keys, blocks, offset, by_key, directly):
    both = made(form)
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
        seen = followed(pattern, tile_shape.Shape(queries, keys, block_q, block_k, by_key), 0)
    finally:
        classify._DIRECTLY, classify._COARSE = before
    np.testing.assert_array_equal(seen, expected)


def _everything(head, query, key):
    return key >= 0
