"""The Triton kernels, interpreted: a part of the cases, with tiles that the lengths, windows and segments cross."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ejkernel_eqx.attention.masks import tile_table
from ejkernel_eqx.attention.reference import visibility
from ejkernel_eqx.attention.spec import AttentionArrays, AttentionSpec, RowRanges
from tests.attention.cases import Case, EMPTY, every_fourth, EVERYTHING, make, PAIRWISE, poison
from tests.attention.dense import quick
from tests.attention.kernels import check_kernels, oracle
from tests.attention.test_xla import cotangents
from tests.tolerances import assert_close

pytest.importorskip("triton")
from ejkernel_eqx.attention.triton import compiled
from ejkernel_eqx.attention.triton import interpreted as triton_interpret
from ejkernel_eqx.attention.triton.compiled import TileConfig, TritonConfig


def tiles(*sizes: tuple[int, int]) -> TritonConfig:
    forward, keys, queries = (TileConfig(block_q, block_k, 4, 1) for block_q, block_k in sizes)
    return TritonConfig(forward, keys, queries)


TILES = (
    tiles((32, 32), (32, 32), (32, 32)),
    tiles((16, 64), (32, 16), (64, 16)),
    tiles((64, 16), (16, 64), (16, 32)),
    tiles((16, 16), (64, 32), (32, 64)),
)


def run(arrays, dout, dlse, spec, config):
    out, lse = triton_interpret.platform.forward(arrays, spec, config)
    return out, lse, triton_interpret.platform.backward(arrays, spec, config, out, lse, dout, dlse)


run = quick(run, static_argnums=(3, 4))


def check(case: Case, config: TritonConfig) -> None:
    """Output, log-sum-exp and all gradients; the same from poisoned arrays, bit for bit."""
    check_kernels(case, lambda arrays, dout, dlse, spec: run(arrays, dout, dlse, spec, config))


def smaller(case: Case) -> Case:
    """The same flags at a size that an interpreter likes."""
    heads = {(8, 1): (4, 1), (4, 2): (4, 2), (3, 1): (3, 1), (2, 2): (2, 2)}[case.H, case.K]
    shrink = lambda n, most: min(n, most)
    return dataclasses.replace(
        case,
        H=heads[0],
        K=heads[1],
        T=shrink(case.T, 77),
        S=shrink(case.S, 77),
        D=shrink(case.D, 96),
        V=shrink(case.V, 96),
    )


SUBSET = [smaller(case) for case in PAIRWISE[::3]]


@pytest.mark.few(1)
@pytest.mark.parametrize("n", every_fourth(SUBSET))
def test_agrees_with_reference(n):
    check(SUBSET[n], TILES[n % len(TILES)])


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", (pytest.param(TILES[1], id="wide"), pytest.param(TILES[2], id="tall", marks=pytest.mark.slow))
)
def test_everything_at_once(config):
    check(EVERYTHING, config)


@pytest.mark.few(2)
@pytest.mark.parametrize("cap", [1e-30, 1e-12, 1e-2, 101.0, 1e6, 1e19, 1e30])
def test_any_soft_cap(cap):
    """All scores at the cap, or all far from it."""
    check(Case(B=1, T=40, S=40, H=2, K=1, D=16, V=16, right=0, soft_cap=cap), TILES[0])


@pytest.mark.few(1)
@pytest.mark.parametrize("case", EMPTY, ids=lambda case: case.name)
def test_empty(case):
    check(dataclasses.replace(case, H=2, K=1, D=16, V=16), TILES[0])


SMALL = Case(B=2, T=50, S=67, H=2, K=1, D=16, V=24)


PATTERNS = ["".join(p) for p in itertools.product("B1", "H1", "T1", "S1")]
OFTEN = {"BHTS", "1HTS", "B1T1", "11TS", "BH1S", "1111"}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "pattern", [pytest.param(p, marks=() if p in OFTEN else pytest.mark.slow) for p in PATTERNS]
)
def test_every_way_to_broadcast_a_bias(pattern):
    """And with it every way to sum its gradient, over tiles as well."""
    check(
        dataclasses.replace(SMALL, bias=pattern, right=0, offset=9, soft_cap=3.0),
        TILES[len(pattern.replace("1", "")) % 4],
    )


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "window",
    [
        dict(right=0, offset=17),
        dict(left=3, right=0, offset=17),
        dict(left=20, right=11, offset=-5),
        dict(left=0, offset=30),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "config", (pytest.param(TILES[1], id="wide"), pytest.param(TILES[2], id="tall", marks=pytest.mark.slow))
)
def test_windows_across_tiles(window, config):
    check(dataclasses.replace(SMALL, **window), config)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_tile_edges(dtype):
    """Lengths just short of, at, and just past a tile."""
    for t, s in ((31, 33), (32, 32), (33, 31), (1, 64)):
        check(dataclasses.replace(SMALL, B=1, T=t, S=s, right=0, offset=s - t, dtype=dtype), TILES[0])


IDS = {
    "unsorted": ([0] * 20 + [1] * 25 + [0] * 19, [0] * 30 + [1] * 10 + [0] * 24),
    "interleaved": ([0, 1, 2, 3] * 16, [3, 2] * 32),
    "padding inside": ([0] * 17 + [-1] * 16 + [1] * 31, [1] * 16 + [-1] * 32 + [0] * 16),
    "all padding": ([-1] * 64, [0] * 64),
    "one tile each": ([0] * 32 + [1] * 32, [1] * 32 + [0] * 32),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", IDS)
def test_segments_across_tiles(name):
    """Ids in any order: a query whose id no key has sees nothing and may be NaN."""
    case = Case(B=1, T=64, S=64, H=2, K=1, D=16, V=16)
    q_ids, kv_ids = (jnp.asarray(x, jnp.int32)[None] for x in IDS[name])
    dout, dlse = cotangents(case)
    for config, others in (
        (TILES[0], {}),
        (TILES[2], dict(sinks=jnp.ones((1, 2)), mask=jnp.arange(64) % 7 > 0)),
    ):
        arrays, spec = make(case)
        others = {n: x[None, None, None] if n == "mask" else x for n, x in others.items()}
        arrays = arrays._replace(q_segments=q_ids, kv_segments=kv_ids, **others)
        clean = run(arrays, dout, dlse, spec, config)
        out, lse, grads, _ = oracle(case, arrays, dout, dlse)
        assert_close(clean[0], out)
        assert_close(clean[1], lse)
        for n in grads:
            assert_close(getattr(clean[2], n), grads[n], kind="gradient", name=n)
        poisoned = run(poison(case, arrays), dout, dlse, spec, config)
        for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(poisoned), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


# The tables of tiles


@st.composite
def ragged(draw):
    t, s, b = draw(st.just((37, 40, 2)))
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    rows = q_ids = kv_ids = None
    band = {}
    if draw(st.booleans()):
        start = rng.integers(0, s + 1, (draw(st.sampled_from([1, b])), t))
        end = np.minimum(start + rng.integers(-3, s + 1, start.shape), s)
        if draw(st.booleans()):
            start, end = np.sort(start, axis=1), np.sort(end, axis=1)
        rows = (start, end, start)
    else:
        side = st.one_of(st.none(), st.integers(0, 20))
        band = dict(left=draw(side), right=draw(side), offset=draw(st.integers(-20, 30)))
    if rows is None or draw(st.booleans()):
        ids = lambda n: np.repeat(
            rng.integers(-1, 3, (draw(st.sampled_from([1, b])), n)), draw(st.integers(1, 12)), 1
        )[:, :n]
        q_ids, kv_ids = ids(t), ids(s)
    return (t, s, b), q_ids, kv_ids, rows, band


def test_no_grid_is_too_long():
    """Only the first axis of a GPU's grid goes past 65,535: more rows of batch and heads than that, and more tiles."""
    shape = lambda *x, dtype=jnp.float16: jax.ShapeDtypeStruct(x, dtype)
    launched = []

    def execute(launch, inputs):
        launched.append(launch)
        return {name: jnp.zeros(out.shape, out.dtype) for name, out in launch.outputs.items()}

    def backward(*arrays):
        given, (out, lse) = AttentionArrays(*arrays[:4]), arrays[4:]
        return compiled.backward(given, AttentionSpec(1.0), TILES[0], out, lse, out, lse, execute=execute)

    for batch, heads, length, bias in (
        (9000, 8, 16, (9000, 8, 16, 16)),
        (1, 1, 2**21 + 64, (1, 1, 1, 2**21 + 64)),
    ):
        q, rows = shape(batch, length, heads, 16), shape(batch, heads, length, dtype=jnp.float32)
        jax.eval_shape(backward, q, q, q, shape(*bias), q, rows)
    assert {launch.kernel.fn.__name__ for launch in launched} >= {
        "bias_gradient_kernel",
        "key_gradient_kernel",
    }
    for launch in launched:
        assert len(launch.grid) == 1 and 65_535 < launch.grid[0] < 2**31


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True)
@given(problem=ragged(), blocks=st.sampled_from([(4, 8), (16, 4)]))
def test_tables_of_tiles(problem, blocks):
    ((t, s, b), q_ids, kv_ids, rows, band), (block_q, block_k) = problem, blocks
    # Made here, not while the example is drawn: the checks of annotations take random numbers, which hypothesis refuses there.
    q_ids, kv_ids, rows = jax.tree.map(lambda x: jnp.asarray(x, jnp.int32), (q_ids, kv_ids, rows))
    arrays, _ = make(Case(B=b, T=t, S=s, H=1, K=1, D=1, V=1))
    arrays = arrays._replace(q_segments=q_ids, kv_segments=kv_ids, rows=rows and RowRanges(*rows))
    spec = AttentionSpec(scale=1.0, **band)
    seen = np.asarray(visibility(arrays, spec))[:, 0]  # [B, T, S]
    batch, t, s = seen.shape
    marks = tile_table.seen(arrays, spec)
    assert (
        not (seen.any(2) & ~(np.asarray(marks.queries) != 0)).any()
        and not (seen.any(1) & ~(np.asarray(marks.keys) != 0)).any()
    )
    keys = np.asarray(tile_table.key_tile_table(arrays, spec, block_q, block_k))
    queries = np.asarray(tile_table.query_tile_table(arrays, spec, block_q, block_k))
    assert keys.shape == (batch, -(-t // block_q), 4) and queries.shape == (batch, -(-s // block_k), 4)
    for table, view, rows, columns in (
        (keys, seen, block_q, block_k),
        (queries, seen.swapaxes(1, 2), block_k, block_q),
    ):
        for b, n in np.ndindex(table.shape[:2]):
            lo, first, last, hi = table[b, n]
            assert 0 <= lo <= first <= last <= hi <= -(-view.shape[2] // columns)
            strip = view[b, n * rows : (n + 1) * rows]
            where = np.nonzero(strip.any(0))[0]
            assert where.size == 0 or (lo * columns <= where.min() and where.max() < hi * columns)
            # Entries past the end of either axis do not count: what they hold is masked by the length.
            assert strip[:, first * columns : last * columns].all()


@pytest.mark.slow
def test_tables_skip_what_is_hidden():
    """Packed causal documents of a tile each: one tile a row, and none of it needs a look at more."""
    ids = jnp.repeat(jnp.arange(4, dtype=jnp.int32), 16)[None]
    arrays = make(Case(B=1, T=64, S=64, H=1, K=1, D=1, V=1))[0]._replace(q_segments=ids, kv_segments=ids)
    table = tile_table.key_tile_table(arrays, AttentionSpec(scale=1.0), 16, 16)
    np.testing.assert_array_equal(table[0], [[n, n, n + 1, n + 1] for n in range(4)])
    table = tile_table.key_tile_table(arrays, AttentionSpec(scale=1.0, right=0), 16, 16)
    np.testing.assert_array_equal(table[0, :, [0, 3]].T, [[n, n + 1] for n in range(4)])
    assert (table[0, :, 1] == table[0, :, 2]).all()


@pytest.mark.slow
def test_repeats_bit_for_bit():
    arrays, spec = make(EVERYTHING)
    first, second = (run(arrays, *cotangents(EVERYTHING), spec, TILES[1]) for _ in range(2))
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
