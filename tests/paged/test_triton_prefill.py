"""The prefill kernel, interpreted, against the reference: every case, tiles, holes, what is another kernel's."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.compiled import executed
from tests.paged import cases
from tests.paged.cases import assert_agrees, Case, CASES, make, PagedArrays, PagedSpec, with_leading_axis
from tests.paged.triton_calls import compiled, config_of, folded, interpret, prefill_kernel, with_axis
from tests.recurrence.quick import quick
from tests.tolerances import assert_close

SIDES = (
    "float8 with infinities", "bfloat16 keys, int8 values", "int8 keys, float32 values, head scales",
    "float32 queries, bfloat16 keys, int8 values", "latent float8, bfloat16 rope", "latent float32, int8 rope, head scales"
)  # fmt: skip
# What is not held by others too.
NAMES = (
    "prefill behind keys", "mixed, all options", "speculative", "empty sequences", "no keys", "nobody", "left out",
    "page of 1", "missing pages", "freed behind a window", "D 40, V 24", "latent, options", "latent int8",
    "float8", "float8, head scales", "bfloat16", "two rows, all options", *SIDES
)  # fmt: skip
LONG = Case((21, 1, 14), (75, 20, 46), p=8, first=1, tail=2)
OPTIONS: dict[str, Any] = dict(cap=2.0, sinks=True, slopes=True)


TILE = (16, 16, 4, 1)


def attend(case: Case, *tile: int, least: int = 0, fill: float | None = None) -> dict[str, Any]:
    """By this kernel alone the sequences with more than `least` queries, in buffers as they come or full of a number."""
    return prefill(*with_axis(case), *tile, least=least, fill=fill)


def prefill(
    arrays: PagedArrays, spec: PagedSpec, *tile: int, least: int = 0, fill: float | None = None
) -> dict[str, Any]:
    def run(arrays: PagedArrays) -> dict[str, Any]:
        call = folded(arrays, spec, config_of(*(tile or TILE[:2]), *TILE[2:]))
        shape = (*call.arrays.q.shape[:2], call.values)
        before = {
            "out": jnp.full(shape, 0 if fill is None else fill, arrays.q.dtype),
            "lse": jnp.full(shape[:2], -jnp.inf if fill is None else fill, jnp.float32),
        }
        results = executed(prefill_kernel.prefill, interpret)(call, before, least)
        return {name: x.reshape(*arrays.q.shape[:2], *x.shape[1:]) for name, x in results.items()}

    return quick(run)(arrays)


def assert_same(first: dict[str, Any], second: dict[str, Any]) -> None:
    for name in ("out", "lse"):
        np.testing.assert_array_equal(np.asarray(first[name]), np.asarray(second[name]))


@pytest.mark.few(3)
@pytest.mark.parametrize("name", NAMES)
def test_agrees(name):
    assert_agrees(CASES[name], attend(CASES[name]))


TILES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "groups of 4": (16, 32, dict(H=8)),
    "groups of 3, where tiles begin within a query": (32, 16, dict(H=6, left=25, **OPTIONS)),
    "bias, kv_start": (64, 16, dict(H=16, K=1, qq_bias=24, kv_start=(21, 19, 0))),
    "holes": (16, 16, dict(p=16, missing=((0, 1), (2, 0), (2, 2)))),
    "freed page": (32, 32, dict(p=64, left=16, missing=((0, 0),))),
    "latent, groups of 32": (16, 32, dict(K=1, H=32, D=24, rope=8, kv_dtype="int8", scales="token")),
    "groups of 1": (16, 16, dict(K=4, p=5, dtype="bfloat16")),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "groups of 4" else pytest.mark.slow) for name in TILES]
)
def test_tiles_of_any_size(name):
    """From half a query's heads to 16 queries a tile; tiles of keys that all see, before and behind those that some see."""
    *tile, changes = TILES[name]
    case = dataclasses.replace(LONG, **changes)
    assert_agrees(case, attend(case, *tile))


def test_scores_below_all_numbers():
    """A tile that all rows see whole, of scores past the end of float32, before those with others."""
    arrays, spec = make(Case((8,), (64,), p=16, H=2, K=1))
    arrays = arrays._replace(
        q=jnp.ones_like(arrays.q), k=arrays.k.at[arrays.page_table[0, 0]].set(jnp.float32(-1e38))
    )
    expected = cases.attend_exactly(arrays, spec)
    results = forward(arrays, spec)
    for name in ("out", "lse"):
        assert np.isfinite(expected[name]).all()
        assert_close(results[name][0], expected[name])


def test_bitwise_repeatable_and_no_matter_which_pages():
    case = dataclasses.replace(LONG, left=30, **OPTIONS)
    first = attend(case)
    assert_same(first, attend(case))
    arrays, spec = make(case)
    places = np.random.default_rng(1).permutation(arrays.k.shape[0])
    table = np.asarray(arrays.page_table)
    known = (table >= 0) & (table < len(places))
    moved = np.where(known, np.argsort(places)[np.where(known, table, 0)], -1).astype(np.int32)
    assert arrays.v is not None
    moved_arrays = arrays._replace(k=arrays.k[places], v=arrays.v[places], page_table=jnp.asarray(moved))
    assert_same(first, forward(moved_arrays, spec))


def forward(arrays: PagedArrays, spec: PagedSpec) -> dict[str, Any]:
    return prefill(with_leading_axis(arrays), spec)


def test_sequences_with_few_queries_are_left_alone():
    case = Case((1, 6, 2, 9, 3), (8, 6, 7, 21, 30), H=6, K=2, first=1, tail=2, sinks=True)
    results, expected = attend(case, least=3, fill=7.0), cases.run_reference(case)
    taken = np.r_[2:8, 10:19]
    for name, x in results.items():
        own = np.asarray(x)[0]
        assert (np.delete(own, taken, 0) == 7).all()
        np.testing.assert_allclose(own[taken], expected[name][taken], rtol=1e-4, atol=1e-5)
    assert_same(attend(case, least=9, fill=7.0), attend(case, least=50, fill=7.0))


def test_beside_the_decode_kernel():
    """Decodes and chunks in one call, each sequence by one of the two kernels."""
    case = Case((1, 17, 2, 18, 3), (8, 20, 7, 30, 3), K=1, tail=2, **OPTIONS)
    two = dataclasses.replace(case, q_lens=(1, 17), kv_lens=(5, 20), batch=2)
    for one in (case, two):
        arrays, spec = with_axis(one)
        call = functools.partial(executed(compiled.forward, interpret), spec=spec, config=config_of(*TILE))
        assert_agrees(one, quick(call)(arrays))


def test_lengths_that_do_not_fit():
    """More keys than the table has, and more queries than there are tokens: nothing is read or written outside."""
    case = dataclasses.replace(LONG, first=0, tail=0)
    arrays, spec = make(case)
    wrong = arrays._replace(kv_len=arrays.kv_len + 200, q_len=arrays.q_len + 9)
    forward(wrong, spec)


def test_no_sequences_and_no_tokens():
    arrays, spec = make(LONG)
    lengths = {name: getattr(arrays, name)[:0] for name in ("page_table", "q_start", "q_len", "kv_len")}
    assert not np.asarray(forward(arrays._replace(**lengths), spec)["out"]).any()
    assert forward(arrays._replace(q=arrays.q[:0], q_len=arrays.q_len * 0), spec)["out"].shape[1] == 0


def test_sequences_anywhere_among_the_tokens():
    """Tokens of no sequence between them, and sequences that begin where the next one does."""
    case = Case((3, 9, 0, 6), (5, 20, 4, 6), p=4)
    arrays, spec = make(dataclasses.replace(case, tail=6))
    start = np.array((2, 5, 16, 16), np.int32)
    order = np.concatenate([start[n] + np.arange(q) for n, q in enumerate(case.q_lens)])
    spread = jnp.zeros_like(arrays.q).at[order].set(arrays.q[: len(order)])
    results = forward(arrays._replace(q=spread, q_start=jnp.asarray(start)), spec)
    together = forward(arrays, spec)
    for name, x in results.items():
        np.testing.assert_array_equal(np.asarray(x)[0, order], np.asarray(together[name])[0, : len(order)])
